"""Draft adapters on a GPU: one captured graph for requests with and without."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from torch.cuda import CUDAGraph
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.drafts import tree_shapes
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.testing.engine.draft_adapter_cases import PAGE, VOCAB, DraftAdapterCase, random_prompts
from weft.testing.engine.drafters import KnownDrafter, RandomGate
from weft.testing.engine.eagle3_cases import WatchedHead
from weft.testing.engine.tree_drafters import TreeDrafter, WatchedTrees

pytestmark = pytest.mark.needs("cuda")

STOP = StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    **{"device": "cuda", "num_pages": 200, "max_running_requests": 4, "max_step_tokens": 256},
    **{"max_context_tokens": 256, "poison_free_pages": True, "lora_memory_bytes": 8 << 20},
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> DraftAdapterCase:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    return DraftAdapterCase(tmp_path_factory.mktemp("case"), seed, head_dim=64)


class Batch:
    """Requests of each adapter, and of none, in turn."""

    def __init__(self, case: DraftAdapterCase, number: int, params: SamplingParams) -> None:
        self.prompts = random_prompts(number)
        names = ["", *(str(path) for path in case.adapters)]
        self.names = [names[index % len(names)] for index in range(number)]
        self.params = params
        with case.llm(**SETTINGS) as plain:
            self.expected = self.run(case, plain)
        self.texts = {
            (tuple(prompt), 0): prompt + ids
            for prompt, ids in zip(self.prompts, self.expected, strict=True)
        }

    def run(self, case: DraftAdapterCase, llm: LLM) -> list[list[int]]:
        digests = {"": b""} | {str(path): llm.load_adapter(path) for path in case.adapters}
        adapters = [digests[name] for name in self.names]
        samples = llm.generate(self.prompts, self.params, STOP, adapters=adapters)
        return [sample.token_ids for sample in samples]


def note_graphs(engine: Engine) -> Counter[tuple[str, bool]]:
    """Counts the graphs that draft, by kind and whether they have draft adapters."""
    drafter = engine.drafter
    assert isinstance(drafter, EagleDrafter)
    counts: Counter[tuple[str, bool]] = Counter()
    for kind, graphs in (("chain", drafter._graphs), ("tree", drafter._tree_graphs)):
        if graphs is None:
            continue
        for key, (graph, found) in graphs._graphs.items():
            noted = Noted(graph, counts, (kind, key.has_lora))
            graphs._graphs[key] = (noted, found)  # type: ignore[index]
    return counts


class Noted:
    """A graph whose replays are counted."""

    def __init__(
        self, graph: CUDAGraph, counts: Counter[tuple[str, bool]], key: tuple[str, bool]
    ) -> None:
        self._graph, self._counts, self._key = graph, counts, key

    def replay(self) -> None:
        self._counts[self._key] += 1
        self._graph.replay()


@pytest.mark.parametrize("width", [1, 4], ids=["chains", "trees"])
def test_drafts_are_those_of_each_adapters_head(case: DraftAdapterCase, width: int) -> None:
    batch = Batch(case, 12, SamplingParams(temperature=0.0))
    watched: WatchedHead | WatchedTrees
    with case.drafting(draft_width=width, **SETTINGS) as drafting:
        counts = note_graphs(drafting.engine)
        if width == 1:
            watched = WatchedHead(drafting.engine, KnownDrafter(batch.texts, VOCAB, 0.6))
        else:
            trees = TreeDrafter(batch.texts, VOCAB, 0.6)
            watched = WatchedTrees(drafting.engine, trees, tree_shapes(width))
        for _ in range(2):  # The second time on a warm cache.
            assert batch.run(case, drafting) == batch.expected
    print(dict(counts))
    assert counts["chain" if width == 1 else "tree", True] > 10
    names = dict(zip(map(tuple, batch.prompts), batch.names, strict=True))
    case.check(watched, names, allowed=2, tolerance=2e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_without_drafts(case: DraftAdapterCase, temperature: float) -> None:
    """Steps overlap; adapters lose their places to others meanwhile."""
    batch = Batch(case, 24, SamplingParams(temperature=temperature, seed=5))
    with case.drafting(draft_width=4, **SETTINGS) as drafting:
        engine = drafting.engine
        assert engine.scheduler.running_plans.drafts_on_device
        counts = note_graphs(engine)
        gate = RandomGate((0, 1, 3, 5, *tree_shapes(4)))
        engine.scheduler.running_plans.gate = gate
        for _ in range(2):
            assert batch.run(case, drafting) == batch.expected
        drafting.generate(batch.prompts[:6], batch.params, STOP)
        while engine.pipeline.num_steps:  # The last step may be under way.
            engine.turn()
        assert engine.memory.counts().used == 0
    print(dict(counts))
    assert all(counts[kind, has_lora] > 5 for kind in ("chain", "tree") for has_lora in (0, 1))
