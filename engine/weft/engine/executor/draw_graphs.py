"""Sampling after captured steps, as CUDA graphs. The LM head, the choice of tokens, their storage
on the device and their copy to the host take one launch instead of about ten.

Sampling has graphs apart from the step's, because masks of constraints may have to be sent after
the step has started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.engine.base.device_copies import DeviceCopies, Marks
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.drafts.keeping import DraftKeeper
from weft.engine.executor.graphs import GraphBucket, Progress, StepGraphs, capturing
from weft.engine.model.interface import LogitsInParts, Model
from weft.engine.sampling.device_draws import Way
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.kernels.ops.greedy import greedy_rows
from weft.kernels.ops.sampling.device import draw_rows
from weft.kernels.ops.sampling.spec import SlotTensors
from weft.kernels.ops.step_rows import keep_tokens

if TYPE_CHECKING:
    from weft.engine.parallel.device_peers import DevicePeers

FREE_ROWS = 64
"""Rows for which an LM head takes little more time than for one. Steps with prompts and fewer
drawing rows are padded to it.
"""
CHEAP_ROWS = 384
"""Rows up to which padding costs little: about as many are multiplied while the weights are read.
"""
MAX_PADDING = 1.5
"""Largest ratio of drawn rows to a step's own rows, beyond `CHEAP_ROWS`."""


_OWN = -1
"""Marks a row that draws with its request's own slot."""


class DrawKey(NamedTuple):
    """Identity of a graph: the step that it follows, the number of drawn rows, and the way of
    drawing.
    """

    bucket: GraphBucket
    rows: int
    way: Way


class DrawGraphs:
    """Sampling after all captured steps but single long prompts, captured for each bucket. Rows
    beyond a step's own are drawn too, for the dummy slot.

    Args:
        tables: Sampling tables of slots without penalties or biases; None: graphs draw greedy
            tokens only, or another rank draws.
        peers: Ranks, of which rank 0 draws for all; None: the model is on one device.
        on_capture: Called first and after each bucket with (captured, total, description).

    Raises:
        ConfigError: There is not enough memory for the graphs.
    """

    def __init__(
        self,
        model: Model,
        graphs: StepGraphs,
        inputs: DeviceInputs,
        keeper: DraftKeeper,
        tables: SlotTensors | None,
        ways: Sequence[Way],
        peers: DevicePeers | None = None,
        on_capture: Progress = lambda done, total, what: None,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._keeper = keeper
        self._tables = tables
        self._peers = peers
        device = inputs.pages.device
        steps = {
            bucket: hidden
            for bucket, hidden in graphs.results()
            if bucket.kind not in ("media", "prompts", "cold")
            and not (bucket.has_lora and inputs.changes_logits)
        }
        most = max((len(hidden) for hidden in steps.values()), default=0)
        is_pinned = device.type == "cuda"
        self._host = torch.zeros((3, most), dtype=torch.int64, pin_memory=is_pinned)
        self._marks = Marks(device, number=4)
        self._drawn_as = torch.full((most,), _OWN, dtype=torch.int64, device=device)
        """[most]: the slot with which each row of a step with drafts draws."""
        self._sent_as = np.zeros(0, np.int64)
        """The first entries of `_drawn_as` as they were sent last; all later entries are `_OWN`."""
        self._copies = DeviceCopies(device)
        self._graphs: dict[DrawKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._drawn: dict[tuple[DrawKey, int], tuple[torch.Tensor, Int64Array]] = {}
        """By graph and number of wanted rows: tokens on the device, and [3, L] on the host: these
        tokens; in steps with drafts also the rows' own tokens, and with trees the rows' ancestor
        masks (`StepRows.ancestors`).
        """
        keys = {
            bucket: [DrawKey(bucket, rows, way) for rows in _sizes(bucket) for way in ways]
            for bucket in sorted(steps, reverse=True)
        }
        total = sum(len(some) for some in keys.values())
        on_capture(0, total, "capturing graphs of drawing")
        with capturing("drawing"):
            for bucket, some in keys.items():
                graphs.send_nothing(bucket)
                for key in some:
                    self._graphs[key] = graphs.capture(
                        lambda key=key, hidden=steps[bucket]: self._draw(key, hidden)  # type: ignore[misc]
                    )
                on_capture(len(self._graphs), total, "capturing graphs of drawing")

    def has(self, bucket: GraphBucket, count: int) -> bool:
        """Whether there is a graph for `count` rows of such a step that draws few rows more."""
        rows = next(size for size in _sizes(bucket) if size >= count)
        is_near = rows <= max(CHEAP_ROWS, MAX_PADDING * count)
        return is_near and DrawKey(bucket, rows, "greedy") in self._graphs

    def begin(
        self,
        bucket: GraphBucket,
        positions: Int64Array,
        way: Way,
        slot_override: Int64Array | None = None,
    ) -> PendingTokens:
        """Draws from the step that ran last, and keeps the tokens on the device. Wait for the
        tokens before the next draws begin, which overwrite them.

        Args:
            bucket: Bucket of the step; it has drafts if `slot_override` is given.
            positions: [L]: position of each row's token.
            way: "any" if `slot_override` is given.
            slot_override: [L]: slots by row, if some rows draw with other slots than their
                requests'; else None.
        """
        if bucket.drafts:
            self._send_slots(slot_override)
        count = len(positions)
        rows = next(size for size in _sizes(bucket) if size >= count)
        key = DrawKey(bucket, rows, way)
        graph, tokens = self._graphs[key]
        graph.replay()
        drawn = self._drawn.get((key, count))
        if drawn is None:
            drawn = self._drawn[key, count] = (tokens[:count], self._host[:, :count].numpy())
        drawn_tokens, host = drawn
        mark = self._marks.add()

        def fetch() -> SampledRows:
            mark.wait()
            return SampledRows(host[0].copy(), [None] * count)

        def wait_for_rows() -> Int64Array:
            mark.wait()
            found: Int64Array = host[1:]
            return found

        return PendingTokens(drawn_tokens, positions, fetch, are_kept=True, rows=wait_for_rows)

    def _send_slots(self, slot_override: Int64Array | None) -> None:
        wanted = self._sent_as[:0] if slot_override is None else slot_override
        if np.array_equal(wanted, self._sent_as):
            return  # Usually the same rows have masks as in the step before.
        entries = np.full(max(len(wanted), len(self._sent_as)), _OWN, np.int64)
        entries[: len(wanted)] = wanted
        (sent,) = self._copies.send((entries,))
        self._drawn_as[: len(entries)].copy_(sent)
        self._sent_as = wanted.copy()

    def _draw(self, key: DrawKey, hidden: torch.Tensor) -> torch.Tensor:
        bucket, rows, verified = key.bucket, key.rows, None
        if bucket.kind == "decode":
            step, slots = self._inputs.drawing_step(rows)
            positions = step.positions
        elif bucket.kind == "ragged":
            step, verified, drawn_from = self._inputs.ragged_step(bucket.columns)
            slots, positions = verified.slots[:rows], step.positions[drawn_from[:rows]]
        else:
            step, verified, _ = self._inputs.ragged_step(bucket.columns)
            slots, positions = verified.slots[:rows], step.positions[:rows]
        logits = self._logits(hidden[:rows])
        if logits is None:
            assert self._peers is not None
            tokens = self._peers.share_tokens(torch.empty_like(slots))
        else:
            tokens = self._tokens(key, logits, slots, positions + 1)
        given = [tokens]
        if bucket.kind in ("decode", "ragged"):
            # For verified rows this keeps an arbitrary token; `accept` then keeps the right one.
            keep_tokens(tokens, slots, self._keeper.known)
        if verified is not None and bucket.drafts:
            self._keeper.accept(tokens, step, verified)
            given += [step.token_ids] if step.ancestors is None else [*step[:1], step.ancestors]
        for host, column in zip(self._host, given, strict=False):
            host[:rows].copy_(column[:rows], non_blocking=True)
        return tokens

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[rows, vocab] float32 on rank 0. None on the other ranks, which may compute a part of the
        logits for rank 0.
        """
        peers = self._peers
        if peers is None:
            return self._model.logits(hidden)
        share, part = peers.share_of_logits(len(hidden)), None
        if share is not None and isinstance(self._model, LogitsInParts):
            part = self._model.logits_part(hidden, share)
        logits = None if part is None else peers.gather_logits(part)
        if peers.rank:
            return None
        return self._model.logits(hidden) if logits is None else logits

    def _tokens(
        self, key: DrawKey, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        if key.way == "greedy":
            tokens = greedy_rows(logits)
        else:
            assert self._tables is not None
            slot_override = slots
            if key.bucket.drafts:
                slot_override = self._drawn_as[: key.rows]
                slot_override = torch.where(slot_override == _OWN, slots, slot_override)
            tokens = draw_rows(logits, slot_override, positions, self._tables)
        return tokens if self._peers is None else self._peers.share_tokens(tokens)


def _sizes(bucket: GraphBucket) -> list[int]:
    """Numbers of rows that sampling after such steps is captured for, ascending.

    A step with prompts may have few requests or many, all with drafts or all without. The first
    step after drafts ended has no drafts either, but takes the smallest graph for steps that have
    them.
    """
    if bucket.kind == "ragged":
        most = bucket.columns.max_logits
        return sorted({min(FREE_ROWS, bucket.requests, most), min(bucket.requests, most), most})
    if bucket.kind == "verify" and bucket.drafts == 1:
        return [bucket.requests, bucket.tokens]
    return [bucket.tokens]
