"""Drawing on the device that computes the logits, so that only tokens are fetched. Tokens are drawn
and counted in the order of the calls. No call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from weft.contract.arrays import Int64Array
from weft.contract.request import TokenLogprob
from weft.engine.base.device_copies import Fetched
from weft.engine.sampling.logprobs import token_logprobs
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.engine.sampling.slot_table import SlotTable
from weft.kernels.ops.sampling.device import draw_rows, top_logits
from weft.kernels.ops.sampling.spec import DraftedRows, TopLogits

Way = Literal["greedy", "any"]
"""How the tokens of a step are drawn: all as the most likely ones, or each by its slot's
parameters.
"""
WAYS: tuple[Way, ...] = ("greedy", "any")


class RowsOnDevice(NamedTuple):
    """Slots and positions of the rows of logits, where the device has them already."""

    slots: torch.Tensor | None
    """[L] int64; None: the host must send them."""
    positions: torch.Tensor
    """[L] int64: positions of the tokens to be drawn."""


class RowsBehindDrafts(NamedTuple):
    """Rows of a step that verifies drafts, some of whose requests have penalties, so that their
    tokens are counted.
    """

    firsts: Int64Array
    """[L]: the first row of each row's request."""
    rows: torch.Tensor
    """[2, T] int64 on the device: the rows' tokens, and their ancestor masks if they form trees."""
    are_trees: bool


CapturedDraw = Callable[[Way, Int64Array | None], PendingTokens]
"""Draws by a graph, in the given way. The second argument has slots by row, [L], if some rows draw
with other slots than their requests'.
"""


def draw_on_device(
    table: SlotTable,
    logits: torch.Tensor,
    slots: Int64Array,
    positions: Int64Array,
    num_tops: Mapping[int, int],
    heats: npt.NDArray[np.float64],
    on_device: RowsOnDevice | None = None,
    drafted: RowsBehindDrafts | None = None,
) -> PendingTokens:
    """Draws one token per row and counts it. In steps with drafts only tokens of accepted rows are
    counted. Sends the table's changes and does not wait.

    Args:
        logits: [L, vocab_size] float32 on the device; unchanged.
        slots: [L]. A slot may occur twice if it was not added, or if its tokens do not depend on
            the ones before.
        positions: [L]: absolute positions of the tokens to be drawn; the largest possible ones if
            only the device knows them.
        num_tops: By row: number of most likely tokens wanted in addition to the log-probability of
            the drawn one.
        heats: By what the logits of these rows are divided before; empty: by 1.
        on_device: Positions, and perhaps slots, that are on the device already and replace these.
        drafted: Rows of a step with drafts, if some slot counts its tokens; else None.
    """
    rows, nothing = np.fromiter(num_tops, np.int64), slots[:0]
    firsts = nothing if drafted is None else drafted.firsts
    if on_device is not None:
        slots = slots if on_device.slots is None else nothing
    sent = table.send(
        slots,
        positions if on_device is None else nothing,
        rows,
        firsts,
        heats.view(np.int64),
    )
    device_slots, device_positions, device_rows, device_firsts, device_heats = sent
    if on_device is not None:
        device_positions = on_device.positions
        device_slots = device_slots if on_device.slots is None else on_device.slots
    behind = None
    if drafted is not None:
        row_tokens, words = drafted.rows
        behind = DraftedRows(device_firsts, row_tokens, words if drafted.are_trees else None)
    tokens = draw_rows(logits, device_slots, device_positions, table.tensors, behind)
    if not num_tops:
        return PendingTokens.of_tokens(tokens, positions)
    num_top = max(num_tops.values())
    top = top_logits(logits, device_rows, tokens, num_top, device_heats.view(torch.float64))
    together = Fetched(torch.cat([tokens, *_as_int64(top)]))
    return PendingTokens(tokens, positions, partial(_with_logprobs, together, num_tops, num_top))


def _as_int64(top: TopLogits) -> list[torch.Tensor]:
    """Packs all results as int64 bits, so that one copy fetches them with the tokens.
    `_with_logprobs` unpacks them.
    """
    return [
        top.log_sums.view(torch.int64),
        top.drawn.double().view(torch.int64),
        top.ids.view(-1),
        top.logits.double().view(torch.int64).view(-1),
    ]


def _with_logprobs(together: Fetched, num_tops: Mapping[int, int], num_top: int) -> SampledRows:
    """`together` has the tokens, then what `_as_int64` has packed for the rows of `num_tops`."""
    fetched, count = together.wait().numpy(), len(num_tops)
    num_rows = len(fetched) - count * (2 + 2 * num_top)
    tokens, bits = fetched[:num_rows], fetched[num_rows:]
    log_sums, drawn = bits[: 2 * count].view(np.float64).reshape(2, count)
    ids, logits = bits[2 * count :].reshape(2, count, num_top)
    values = logits.view(np.float64) - log_sums[:, None]
    own_tokens = tokens[np.fromiter(num_tops, np.int64)]
    logprobs: list[TokenLogprob | None] = [None] * num_rows
    found = token_logprobs(num_tops, own_tokens, drawn - log_sums, ids, values)
    for row, logprob in found.items():
        logprobs[row] = logprob
    return SampledRows(tokens, logprobs)
