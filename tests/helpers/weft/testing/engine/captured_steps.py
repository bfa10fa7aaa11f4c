"""Steps and drawing as a GPU's graphs run them, on a CPU: recorded, replayed in their places."""

from __future__ import annotations

from collections.abc import Callable

import torch
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.graphs import GraphBucket, GraphBuckets, StepGraphs, step_buckets
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.engine import Engine
from weft.engine.sampling.sampler import Sampler
from weft.testing.engine.captured_drafts import capture
from weft.testing.engine.drafters import KnownGraphs


class RecordedSteps(StepGraphs):
    """Captured steps of a executor on a CPU.

    Args:
        engine: Its model has no native operations, which refuse rows of padding.
        max_drafts: Of a request.
        tree_rows: See `LocalExecutor`.
        has_lora: Whether steps are captured with adapters too.
    """

    def __init__(
        self,
        engine: Engine,
        max_drafts: int,
        tree_rows: tuple[int, ...] = (),
        *,
        has_lora: bool = False,
    ) -> None:
        executor, config = engine.parts.local, engine.config
        for host in (executor.page_table, *executor.window_tables):
            host._changed = []
        most, tokens = config.max_running_requests, config.max_step_tokens + config.decodes_beside
        table, page_size = executor.page_table, config.page_size
        windows = list(zip(executor.window_tables, executor._pools[1:], strict=True))
        states = executor._device_states(most)
        inputs = DeviceInputs(
            table, page_size, most, executor.known, executor._lora, tokens, windows, states
        )
        inputs._table = inputs._table.clone()  # Else the host's pages are seen before they come.
        inputs._windows = [(host, pages.clone(), pool) for host, pages, pool in inputs._windows]
        buckets = step_buckets(
            executor._model.config,
            executor.pool.dtype,
            most,
            tokens,
            has_lora=has_lora,
            max_drafts=max_drafts,
            tree_rows=tree_rows,
            has_states=states is not None,
            has_media=executor.media is not None,
        )
        self._model, self._pool, self._inputs = executor._model, executor.pool, inputs
        self._rotations, self._late = executor.rotations, executor._late
        self._has_logits, self._beside = executor.has_logits, None
        self._media = executor.media_inputs(buckets)
        self._types = self.new_types(buckets, executor.pool.device)
        self.buckets = GraphBuckets(executor._model.config, buckets)
        self._engine = engine
        self.num_replays: dict[str, int] = {}
        """Number of steps run, by kind of bucket."""
        inputs.keep_ragged(max(bucket.columns.num_bytes for bucket in buckets))
        self._graphs = {bucket: self._capture(bucket) for bucket in sorted(buckets, reverse=True)}
        executor._inputs = executor._batches = inputs
        executor.graphs = self
        sampler = Sampler(
            engine.info.vocab_size,
            most,
            device=torch.device("cpu"),
            max_masked_rows=most * max_drafts,
        )
        engine._step_sampler._sampler = sampler
        executor.capture_draws(sampler.plain_tensors)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple:  # type: ignore[type-arg]
        """See `StepGraphs.capture`."""
        with torch.inference_mode():
            return capture(run)

    def _replay(self, bucket: GraphBucket) -> torch.Tensor:
        # Graphs captured later may have their results where a step has its intermediate ones.
        drafter = self._engine.drafter
        if isinstance(drafter, EagleDrafter):
            graphs = drafter._graphs
            if isinstance(graphs, KnownGraphs):
                graphs.last.random_(0, 9)
            elif graphs is not None:
                for _, result in graphs._graphs.values():
                    result.random_(0, 9)
        self.num_replays[bucket.kind] = self.num_replays.get(bucket.kind, 0) + 1
        return super()._replay(bucket)
