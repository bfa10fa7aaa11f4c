"""Low-rank additions in eager torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from weft.kernels.ops.lora.spec import NO_SLOT, LoraAddition, LoraSegments, LoraWeights


def add_embedding_reference(
    out: torch.Tensor, token_ids: torch.Tensor, addition: LoraAddition
) -> None:
    """`add_embedding_lora` in eager torch, on a CPU."""
    (part,) = addition.parts
    for tokens, slot in segments_with_adapters(addition.segments):
        count = int(part.counts[addition.layer, slot])
        if count == 0:
            continue
        a_rows, b_rows = _rows_of(part, addition.layer, slot, count)
        given = part.a[a_rows[:, None], :, token_ids.index_select(0, tokens)[None, :]]
        shrunk = given.transpose(1, 2).flatten(0, 1).float()
        added = torch.zeros((tokens.shape[0], part.out_features))
        # Ranks are added one by one, since the order of sums in a product would depend on the
        # number of tokens.
        for ranks, b in zip(shrunk, part.plain_b(b_rows).flatten(0, 1), strict=True):
            added += ranks[:, None] * b.float()
        _add(out, tokens, part, added)


def add_lora_reference(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition) -> None:
    """`add_lora` in eager torch, any device; sums in float32, rounds once."""
    for tokens, slot in segments_with_adapters(addition.segments):
        given = x.index_select(0, tokens).float()
        for part in addition.parts:
            count = int(part.counts[addition.layer, slot])
            if count:
                a_rows, b_rows = _rows_of(part, addition.layer, slot, count)
                shrunk = given @ part.a.index_select(0, a_rows).flatten(0, 1).float().t()
                b = part.plain_b(b_rows).flatten(0, 1).float()
                _add(out, tokens, part, shrunk @ b)


def segments_with_adapters(segments: LoraSegments) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields the tokens, [n] int64, and the slot of each segment that has an adapter and tokens."""
    starts = segments.starts.tolist()
    for index, slot in enumerate(segments.slots.tolist()):
        tokens = segments.order[starts[index] : starts[index + 1]].long()
        if tokens.shape[0] and slot != NO_SLOT:
            yield tokens, slot


def _rows_of(
    part: LoraWeights, layer: int, slot: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[count] int64 each: rows of A and of B."""
    a, b = (table[layer, slot, :count].long() for table in (part.table, part.rows_of_b))
    return a, b


def _add(out: torch.Tensor, tokens: torch.Tensor, part: LoraWeights, added: torch.Tensor) -> None:
    columns = out[:, part.column : part.column + part.out_features]
    columns[tokens] = (columns[tokens].float() + added).to(out.dtype)
