"""Lays out the rows of a step on the device, from a few numbers for each request. A request brings
its last token, and drafts may follow it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.step_requests.spec import DecodeColumns, StepColumns
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.step_requests import triton_requests as _triton_requests
else:
    _triton_requests = deferred(__name__, "weft.kernels.ops.step_requests.triton_requests")


def expand_requests(
    step: StepColumns, page_table: torch.Tensor, page_size: int, num_slots: int
) -> None:
    """Writes the columns of a step from `step.requests`, except those that `resolve_rows` fills in.

    The first number is a flag: 0 leaves the columns as they are. Then come, for each request, a
    slot, the position of the last token (-1: only the device knows it), the number of rows, and a
    limit that only chains of drafts obey. Entries after the last request have no rows. A token is
    drawn for every row.

    Args:
        step: Changed. T = L. Rows that no request brings, and requests without rows, belong to the
            dummy slot and the null page.
        page_table: [num_slots, max_pages] int32; the null page is page 0.
        num_slots: The last slot is the dummy.
    """
    assert step.requests is not None, "the step is given by its columns"
    if step.requests.is_cuda:
        _triton_requests.expand_requests(step, page_table, page_size, num_slots)
        return
    if int(step.requests[0]) == 0:
        return
    slots, starts, counts, _ = step.requests[1:].view(4, -1).tolist()
    null = num_slots - 1
    for column, padding in (
        *((step.token_ids, 0), (step.positions, 0), (step.slots, 0), (step.rows, null)),
        *((step.logits_rows, 0), (step.drawing_slots, null), (step.sources, -1)),
        *((step.owners, -1), (step.verify_rows, -1), (step.kv_lens, 0)),
    ):
        column.fill_(padding)
    if step.ancestors is not None:
        step.ancestors.fill_(-1)
    step.cu_q_lens[0] = 0
    row = 0
    for request, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
        is_late = start < 0
        for behind in range(count):
            position = behind if is_late else start + behind
            step.positions[row] = position
            page = int(page_table[slot, position // page_size])
            step.slots[row] = 0 if is_late else page * page_size + position % page_size
            step.logits_rows[row], step.drawing_slots[row] = row, slot
            step.sources[row] = behind * num_slots + slot
            step.owners[row] = request if is_late else -1
            step.verify_rows[request, behind] = row
            row += 1
        if count:
            step.rows[request] = slot
            step.kv_lens[request] = 0 if is_late else start + count
        step.cu_q_lens[request + 1] = row


def expand_decodes(
    given: DecodeColumns,
    step: StepRows,
    known: SlotTokens,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    """Writes the remaining columns of a step with one row for each request, and new pages into the
    page table.

    Args:
        given: A request in the dummy slot, which is the last one, is padding.
        step: Changed: tokens, places and lengths (0 for padding). `given` has the positions.
        page_table: [slots + 1, max_pages] int32, changed.
    """
    if given.slots.is_cuda:
        _triton_requests.expand_decodes(given, step, known, page_table, page_size)
        return
    slots, positions, tokens, pages = given
    columns, dummy = positions // page_size, known.tokens.shape[1] - 1
    is_new = pages >= 0
    page_table[slots[is_new], columns[is_new]] = pages[is_new].int()
    step.token_ids.copy_(torch.where(tokens < 0, known.tokens[0, slots], tokens))
    own = page_table[slots, columns].long()
    step.places.copy_(own * page_size + positions % page_size)
    step.kv_lens.copy_((positions + 1).masked_fill(slots == dummy, 0))
