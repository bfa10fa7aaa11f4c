"""A head's drafts as a GPU's graphs make them, on a CPU: recorded, and replayed in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from weft.engine.base.drafts import DraftShape
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.drafts.chains import ChainGraphs, StaticChains, chain_shapes
from weft.engine.executor.drafts.draft_rows import AdapterRows
from weft.engine.executor.drafts.tree_graphs import StaticTrees, TreeBucket, TreeGraphs
from weft.engine.executor.local import LocalExecutor
from weft.engine.features.speculative.adapted import AdaptedDrafter
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.engine import Engine
from weft.engine.model.heads.drafted import DraftedModel
from weft.pages.memory.page_table import PageTable


class HostPages:
    """A device's page table that is the host's."""

    def __init__(self, table: PageTable) -> None:
        self.pages = torch.from_numpy(table.pages)

    def send_pages(self) -> None:
        """Does nothing: the host's table is read directly."""


class Recorded:
    """Stands in for a graph: the result is always in the same memory."""

    num_replays = 0

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run, self.result = run, run()
        self.num_own = 0
        """Number of replays of this one."""

    def replay(self) -> None:
        """See `torch.cuda.CUDAGraph.replay`."""
        Recorded.num_replays += 1
        self.num_own += 1
        with torch.inference_mode():
            self.result.copy_(self._run())


def capture(run: Callable[[], torch.Tensor]) -> tuple[Recorded, torch.Tensor]:
    """See `StepGraphs.capture`."""
    recorded = Recorded(run)
    return recorded, recorded.result


def capture_chains(engine: Engine, max_drafts: int) -> ChainGraphs:
    """Gives an engine's drafter what it has on a GPU; behind `RecordedSteps`, chains run with the
    inputs of these.
    """
    drafter, model, executor = _parts_of(engine)
    most = engine.config.max_running_requests
    lora = executor._lora
    adapters = None if lora is None else AdapterRows(lora, executor.device, most, [1])
    shapes = chain_shapes(max_drafts, most, has_lora=lora is not None)
    inputs, size = executor.inputs or _host_inputs(engine), engine.config.page_size
    static = StaticChains(model, executor.pool, executor.known, inputs, size, max(shapes), adapters)
    with torch.inference_mode():
        graphs = drafter._graphs = ChainGraphs(static, shapes, capture)
    return graphs


def capture_trees(engine: Engine, shapes: Sequence[DraftShape], max_requests: int) -> TreeGraphs:
    """The same for trees."""
    drafter, model, executor = _parts_of(engine)
    lora, rows_each = executor._lora, [1, shapes[0].width]
    adapters = None
    if lora is not None:
        adapters = AdapterRows(lora, executor.device, max_requests, rows_each)
    pages, size = HostPages(executor.page_table), engine.config.page_size
    static = StaticTrees(model, executor.pool, executor.known, pages, size, max_requests, adapters)
    sizes = {size for size in (1, 2) if size < max_requests} | {max_requests}
    buckets = [TreeBucket(shape, size) for shape in shapes for size in sorted(sizes)]
    if lora is not None:
        buckets += [bucket._replace(has_lora=True) for bucket in buckets]
    with torch.inference_mode():
        graphs = drafter._tree_graphs = TreeGraphs(static, buckets, capture)
    return graphs


def num_replays(graphs: ChainGraphs | TreeGraphs, *, has_lora: bool) -> int:
    """Number of replays of the graphs with or without draft adapters."""
    captured = graphs._graphs.items()
    return sum(graph.num_own for key, (graph, _) in captured if key.has_lora == has_lora)


def _host_inputs(engine: Engine) -> DeviceInputs:
    """Inputs of chains alone, of an engine whose steps run without any."""
    _, _, executor = _parts_of(engine)
    executor.page_table._changed = []
    most, size = engine.config.max_running_requests, engine.config.page_size
    inputs = DeviceInputs(executor.page_table, size, most, executor.known)
    inputs.keep_ragged(0)
    return inputs


def _parts_of(engine: Engine) -> tuple[EagleDrafter, DraftedModel, LocalExecutor]:
    drafter, executor = engine.drafter, engine.parts.local
    if isinstance(drafter, AdaptedDrafter):  # Where drafts are captured there is none.
        drafter.close()
        engine.drafter = engine.pipeline._drafter = drafter = drafter._plain
        assert isinstance(drafter, EagleDrafter)
        drafter.waits_for_trees = True
    assert isinstance(drafter, EagleDrafter)
    assert isinstance(executor._model, DraftedModel)
    return drafter, executor._model, executor
