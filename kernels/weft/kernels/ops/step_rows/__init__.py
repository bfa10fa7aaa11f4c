"""Rows of a step that depend on the previous step's results, which only the device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from weft.kernels.ops.attention.reference import depths_of
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.step_rows import triton_rows as _triton_rows
else:
    _triton_rows = deferred(__name__, "weft.kernels.ops.step_rows.triton_rows")


def resolve_rows(
    step: StepRows,
    sources: torch.Tensor,
    owners: torch.Tensor,
    known: SlotTokens,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    """Completes the first rows of a step.

    Args:
        step: Changed: tokens of the first N rows. For a request that starts late, also positions,
            places and length. With `ancestors` also these, and the positions in trees, which were
            those of chains before.
        sources: [N] int64: d * (slots + 1) + slot for the d-th row after the slot's last token; -1:
            the row is complete.
        owners: [N] int64: the row's request, if it starts late, at `known.starts`; else -1.
        page_table: [slots + 1, max_pages] int32.
    """
    if sources.shape[0] == 0:
        return
    if sources.is_cuda:
        _triton_rows.resolve_rows(step, sources, owners, known, page_table, page_size)
        return
    count, width = sources.shape[0], known.tokens.shape[1]
    # Numpy, since the time for so few numbers is that of the calls, and torch's calls take several
    # times as long.
    drawn = known.tokens.numpy().reshape(-1)[sources.numpy()]
    np.copyto(step.token_ids.numpy()[:count], drawn, where=sources.numpy() >= 0)
    if (owners.numpy() >= 0).any():
        late = (owners >= 0).nonzero()[:, 0]
        slots, behind, requests = sources[late] % width, sources[late] // width, owners[late]
        positions = known.starts[slots] + behind
        step.positions[late] = positions
        pages = page_table[slots, positions // page_size].long()
        step.places[late] = pages * page_size + positions % page_size
        lengths = (step.cu_q_lens[requests + 1] - step.cu_q_lens[requests]).long()
        step.kv_lens[requests] = (known.starts[slots] + lengths).int()
    if step.ancestors is not None and known.words is not None:
        rows = (sources >= 0).nonzero()[:, 0]
        words, behind = known.words.view(-1)[sources[rows]], sources[rows] // width
        step.ancestors[rows] = words
        step.positions[rows] += depths_of(words, behind) - behind


def group_places(
    positions: torch.Tensor,
    cu_q_lens: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    places: torch.Tensor,
) -> torch.Tensor:
    """Where K and V of a step's rows go in another page group than the first.

    Args:
        positions: [T] int64, complete.
        cu_q_lens: [R + 1] int32; rows after the last are padding.
        page_tables: [R, max_pages] int32: the group's; the null page is page 0.
        places: [T] int64: places in the first group. Rows whose place is in its null page write
            nothing there, and nothing here either.

    Returns:
        [T] int64: page * page_size + offset.
    """
    rows = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    requests = torch.searchsorted(cu_q_lens, rows, right=True) - 1
    requests = requests.clamp(max=page_tables.shape[0] - 1)
    pages = page_tables[requests, positions // page_size].long()
    pages = pages.masked_fill(places < page_size, 0)
    return pages * page_size + positions % page_size


def keep_tokens(drawn: torch.Tensor, slots: torch.Tensor, known: SlotTokens) -> None:
    """Makes drawn tokens the last tokens of their slots.

    Args:
        drawn: [L] int64; negative where no token was drawn.
        slots: [L] int64.
        known: Changed.
    """
    # A missing token is negative. What follows it is dropped, but needs an id of the vocabulary.
    if drawn.is_cuda:
        known.tokens[0].index_copy_(0, slots, drawn.clamp(min=0))
    else:
        known.tokens.numpy()[0, slots.numpy()] = np.maximum(drawn.numpy(), 0)


def accept_drafts(
    drawn: torch.Tensor, step: StepRows, verified: Verified, known: SlotTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts each request's drafts as far as they equal the drawn tokens.

    Args:
        drawn: [L] int64; negative where no token was drawn. Drawing stops where a request ends. If
            the request continues nevertheless, its last token is the one before.
        known: Changed: the requests' last tokens, and their positions.

    Returns:
        [V] int64: row of the step that each request's last token was drawn from, and its slot.
    """
    if drawn.is_cuda:
        return _triton_rows.accept_drafts(drawn, step, verified, known)
    rows, tokens = verified.rows.numpy(), drawn.numpy()
    following = rows[:, 1:]
    found, drafts = tokens[np.maximum(rows, 0)], step.token_ids.numpy()[np.maximum(following, 0)]
    is_accepted = (found[:, :-1] == drafts) & (found[:, 1:] >= 0) & (following >= 0)
    num_accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
    last_rows = np.maximum(rows[np.arange(len(rows)), num_accepted], 0)
    slots = np.where(rows[:, 0] < 0, len(known.starts) - 1, verified.slots.numpy()[rows[:, 0]])
    # A missing token is negative. What follows it is dropped, but needs an id of the vocabulary.
    known.tokens.numpy()[0, slots] = np.maximum(tokens[last_rows], 0)
    known.starts.numpy()[slots] = step.positions.numpy()[last_rows] + 1
    return torch.from_numpy(last_rows), torch.from_numpy(slots)


def chain_places(
    slots: torch.Tensor,
    starts: torch.Tensor,
    limits: torch.Tensor,
    late_starts: torch.Tensor,
    page_table: torch.Tensor,
    depth: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions and places of the tokens of draft chains.

    Args:
        slots: [R] int64.
        starts: [R] int64: positions of the first tokens; negative: take them from `late_starts`.
        limits: [R] int64: position from which on a chain has no pages; at least 1.
        late_starts: [slots + 1] int64.
        page_table: [slots + 1, max_pages] int32; the null page is page 0.

    Returns:
        Positions [depth, R] int64; places [depth, R] int64, page * page_size + offset; lengths
        [depth, R] int32, positions + 1. A token without a page gets the last position that has one,
        and a place in the null page.
    """
    if slots.is_cuda:
        return _triton_rows.chain_places(
            slots, starts, limits, late_starts, page_table, depth, page_size
        )
    firsts = torch.where(starts < 0, late_starts[slots], starts)
    wanted = firsts + torch.arange(depth, device=slots.device).unsqueeze(1)
    positions = torch.minimum(wanted, limits - 1)
    pages = page_table[slots, positions // page_size].long()
    places = pages * page_size + positions % page_size
    places = places.masked_fill(wanted >= limits, 0)
    return positions, places, (positions + 1).int()
