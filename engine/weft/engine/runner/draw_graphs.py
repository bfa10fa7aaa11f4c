"""Drawing behind captured steps, as CUDA graphs: LM head, choice of tokens, what the device keeps
of them and their copy to the host are one launch instead of about ten.

A graph of its own, not a part of the step's: masks of constraints may come in between.
"""

from __future__ import annotations

import logging
import time

import torch
from weft.engine.device_copies import Mark
from weft.engine.models.interface import CausalLM
from weft.engine.runner.device_inputs import DeviceInputs
from weft.engine.runner.graphs import GraphBucket, StepGraphs, says_what_lacks_memory
from weft.engine.runner.keeping import TokenKeeper
from weft.engine.sampling.device import CapturedDraws, Way
from weft.kernels.device_sampling import SlotTables, draw_rows
from weft.kernels.greedy import greedy_rows

logger = logging.getLogger(__name__)


class DrawGraphs:
    """The drawing from decode steps and from steps that verify drafts, captured for each bucket.

    Rows beyond a step's own are drawn too, for the dummy slot.

    Args:
        model: Loaded model.
        graphs: The captured steps.
        inputs: Of the steps.
        keeper: Of the tokens.
        tables: Of slots whose requests have no penalties or biases; None: only greedy tokens.

    Raises:
        ConfigError: There is not enough memory for them.
    """

    def __init__(
        self,
        model: CausalLM,
        graphs: StepGraphs,
        inputs: DeviceInputs,
        keeper: TokenKeeper,
        tables: SlotTables | None,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._keeper = keeper
        self._tables = tables
        self._device = inputs.pages.device
        steps = {
            bucket: hidden
            for bucket, hidden in graphs.results()
            if bucket.kind in ("decode", "verify", "tree")
            and not (bucket.has_lora and inputs.changes_logits)
        }
        most = max((len(hidden) for hidden in steps.values()), default=0)
        is_pinned = self._device.type == "cuda"
        self._host = torch.zeros((3, most), dtype=torch.int64, pin_memory=is_pinned)
        ways: tuple[Way, ...] = ("greedy",) if tables is None else ("greedy", "any")
        self._graphs: dict[tuple[GraphBucket, Way], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        began = time.perf_counter()
        with says_what_lacks_memory("drawing"):
            for bucket in sorted(steps, reverse=True):
                graphs.send_nothing(bucket)
                for way in ways:
                    self._graphs[bucket, way] = graphs.capture(
                        lambda bucket=bucket, way=way: self._draw(bucket, steps[bucket], way)  # type: ignore[misc]
                    )
        seconds = time.perf_counter() - began
        logger.info("captured %d CUDA graphs of drawing in %.1f s", len(self._graphs), seconds)

    def has(self, bucket: GraphBucket) -> bool:
        """Whether the drawing from these steps is captured."""
        return (bucket, "greedy") in self._graphs

    def begin(self, bucket: GraphBucket, count: int, way: Way) -> CapturedDraws:
        """Draws from the step that ran last, and keeps the tokens.

        Args:
            bucket: Of the step.
            count: L, its rows of logits.
            way: How.
        """
        graph, tokens = self._graphs[bucket, way]
        graph.replay()
        return CapturedDraws(tokens[:count], self._host[:, :count].numpy(), Mark(self._device))

    def _draw(self, bucket: GraphBucket, hidden: torch.Tensor, way: Way) -> torch.Tensor:
        """The captured work: [rows of the bucket] int64."""
        logits = self._model.logits(hidden)
        if bucket.kind == "decode":
            step, slots = self._inputs.drawing_step(bucket.tokens)
        else:
            step, verified = self._inputs.verifying_step(bucket.columns)
            slots = verified.slots
        if way == "greedy":
            tokens = greedy_rows(logits)
        else:
            assert self._tables is not None
            tokens = draw_rows(logits, slots, step.positions[: len(slots)] + 1, self._tables)
        given = [tokens]
        if bucket.kind == "decode":
            self._keeper.keep(tokens, slots)
        else:
            self._keeper.accept(tokens, step, verified)
            given += [step.token_ids] if step.ancestors is None else [*step[:1], step.ancestors]
        for host, column in zip(self._host, given, strict=False):
            host[: len(tokens)].copy_(column, non_blocking=True)
        return tokens
