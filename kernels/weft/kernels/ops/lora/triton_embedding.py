"""Low-rank additions to an embedding on a GPU. A token's ranks are looked up in A, not
multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.lora.triton_parts import AdapterRows
from weft.kernels.ops.lora.triton_rows import expand_rows, of_tokens
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last


def add_embedding_lora(out: torch.Tensor, token_ids: torch.Tensor, addition: LoraAddition) -> None:
    (part,), token_slots = addition.parts, addition.segments.token_slots
    tokens, rows = token_ids.shape[0], part.table.shape[2]
    if tokens == 0:
        return
    options = launch_options(out.device)
    shrunk = torch.empty((1, tokens, part.max_rank), dtype=torch.float32, device=out.device)
    _gather_kernel[(tokens, rows)](
        shrunk, token_ids, token_slots, AdapterRows.of_a(part), addition.layer,
        part.table.shape[1], part.in_features, num_warps=1, **options,
    )  # fmt: skip
    slots = of_tokens(token_slots)
    expand_rows(out, shrunk, addition.parts, addition.layer, slots, options)


@triton.jit(do_not_specialize=["layer", "slots"])
def _gather_kernel(
    shrunk: tl.tensor,
    token_ids: tl.tensor,
    token_slots: tl.tensor,
    of_a: AdapterRows,
    layer: int,
    slots: int,
    vocabulary: int,
) -> None:
    release_next()
    wait_for_last()
    token, index = tl.program_id(0), tl.program_id(1)
    slot = tl.load(token_slots + token)
    at = layer * slots + slot
    if (slot == 0) | (index >= tl.load(of_a.counts + at)):
        return
    row = tl.load(of_a.table + at * tl.num_programs(1) + index).to(tl.int64)
    rank = tl.arange(0, 8)
    values = tl.load(of_a.pool + (row * 8 + rank) * vocabulary + tl.load(token_ids + token))
    to = shrunk + (token * tl.num_programs(1) + index) * 8 + rank
    tl.store(to, values.to(tl.float32))
