"""Trees of drafts as a GPU's graphs grow them: padded, with inputs in fixed places, and known to
the host later than to the device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.drafts import DraftShape, tree_shapes
from weft.engine.executor.drafts.tree_graphs import StaticTrees, TreeBucket, TreeGraphs
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.testing.engine.captured_drafts import Recorded, capture, capture_trees
from weft.testing.engine.drafters import KnownGraphs, RandomGate, texts_of
from weft.testing.engine.eagle3_cases import HeadReference
from weft.testing.engine.tree_drafters import KnownTreeGraphs, TreeDrafter, WatchedTrees
from weft.testing.models.choices import check_same_groups
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 517
MAX_REQUESTS = 4
SHAPES = tree_shapes(4)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    path = tmp_path_factory.mktemp("t")
    return make_tiny("llama", path, seed, vocab_size=VOCAB, num_hidden_layers=4)


@pytest.fixture(scope="module")
def draft_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), target_dir, seed + 1)


def random_prompts(number: int) -> list[list[int]]:
    lengths = [random.randint(1, 4 * PAGE) for _ in range(number)]
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def settings(draft_dir: Path | None = None) -> dict[str, object]:
    given: dict[str, object] = {"dtype": "float32", "page_size": PAGE}
    given |= {"max_running_requests": MAX_REQUESTS}
    if draft_dir is not None:
        given |= {"draft_dir": draft_dir, "drafter": "eagle3", "draft_width": 4}
        given |= {"poison_free_pages": True}
    return given


@pytest.mark.parametrize("num_pages", [None, 40], ids=["room", "few-pages"])
def test_padded_trees_are_the_heads(
    target_dir: Path, draft_dir: Path, num_pages: int | None
) -> None:
    prompts = random_prompts(6)
    params = SamplingParams(temperature=1.0, seed=5)
    stop = StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)
    with LLM(target_dir, **settings()) as plain:
        expected = plain.generate_all(prompts, params, stop)
    known = TreeDrafter(texts_of(prompts, expected, 5), VOCAB, 0.6)
    with LLM(target_dir, num_pages=num_pages, **settings(draft_dir)) as drafting:
        capture_trees(drafting.engine, SHAPES, MAX_REQUESTS)
        watched = WatchedTrees(drafting.engine, known, (0, 3, *SHAPES))
        before = Recorded.num_replays
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, params, stop)
            check_same_groups(
                partial(load_reference, target_dir), prompts, groups, expected, params
            )
        assert Recorded.num_replays > before
    watched.check(HeadReference(target_dir, draft_dir), 6)


def test_what_graphs_grow_is_drawn_from_on_the_host(target_dir: Path, draft_dir: Path) -> None:
    """As on a GPU whose own sampler is not to be trusted. The noise of a tree's rows is that of
    their positions: the text is the same."""
    prompts = random_prompts(8)
    params = SamplingParams(temperature=1.0, seed=5)
    stop = StopCriteria(max_tokens=5 * PAGE, ignore_eos=True)
    with LLM(target_dir, **settings()) as plain:
        expected = plain.generate_all(prompts, params, stop)
    with LLM(target_dir, **settings(draft_dir)) as drafting:
        capture_trees(drafting.engine, SHAPES, MAX_REQUESTS)
        choose(drafting.engine, SHAPES)
        before = Recorded.num_replays
        groups = drafting.generate_all(prompts, params, stop)
        check_same_groups(partial(load_reference, target_dir), prompts, groups, expected, params)
        assert Recorded.num_replays - before > 50


@pytest.mark.parametrize("num_pages", [None, 24], ids=["room", "few-pages"])
@pytest.mark.parametrize("chance", [0.0, 0.8, 1.0])
def test_steps_behind_trees_whose_outcome_the_host_does_not_know(
    target_dir: Path, draft_dir: Path, chance: float, num_pages: int | None
) -> None:
    """What is drafted, where, and behind which token, the device knows alone; with chains
    between."""
    prompts = random_prompts(7)
    greedy = SamplingParams(temperature=0.0)
    stop = StopCriteria(max_tokens=5 * PAGE, stop_token_ids=tuple(range(0, VOCAB, 80)))
    with LLM(target_dir, **settings()) as plain:
        expected = plain.generate_all(prompts, greedy, stop)
    texts = texts_of(prompts, expected, 0)
    given = settings(draft_dir) | {"overlap": "on", "num_pages": num_pages}
    with LLM(target_dir, **given) as drafting:
        engine = drafting.engine
        KnownGraphs(engine, texts, VOCAB, chance)
        trees = KnownTreeGraphs(engine, texts, VOCAB, chance)
        choose(engine, (0, 2, 5, *SHAPES))
        num_accepted = num_rounds = 0

        def has_seen_all() -> bool:
            return trees.num_late > 4 and engine.counters()["verified_runs"] > 15

        # From the second time on with a warm cache; random texts may end soon.
        while num_rounds < 2 or (not has_seen_all() and num_rounds < 12):
            num_rounds += 1
            groups = drafting.generate_all(prompts, greedy, stop)
            check_same_groups(
                partial(load_reference, target_dir), prompts, groups, expected, greedy
            )
            num_accepted += sum(
                s.timeline.num_accepted_tokens for group in groups for s in group if s.timeline
            )
        assert has_seen_all()
        assert (num_accepted > 0) == (chance > 0)
        while engine.pipeline.num_steps:  # The last step may be under way.
            engine.turn()
        assert engine.memory.counts().used == 0


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "graphs"])
def test_trees_up_to_the_last_position_of_the_model(
    tmp_path: Path, seed: int, is_captured: bool
) -> None:
    """Which is the context's, and no page's end."""
    limit = 5 * PAGE + 3
    shape = {"vocab_size": VOCAB, "num_hidden_layers": 4, "max_position_embeddings": limit}
    target_dir = make_tiny("llama", tmp_path / "t", seed, **shape)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    # So short that all have many steps to go.
    prompts = [prompt[:PAGE] for prompt in random_prompts(3)]
    greedy = SamplingParams(temperature=0.0)
    stop = StopCriteria(max_tokens=limit, ignore_eos=True)
    with LLM(target_dir, **settings()) as plain:
        expected = plain.generate_all(prompts, greedy, stop)
    texts = texts_of(prompts, expected, 0)
    with LLM(target_dir, **settings(draft_dir)) as drafting:
        if is_captured:
            capture_trees(drafting.engine, SHAPES, MAX_REQUESTS)
        WatchedTrees(drafting.engine, TreeDrafter(texts, VOCAB, 0.6), SHAPES)
        groups = drafting.generate_all(prompts, greedy, stop)
        check_same_groups(partial(load_reference, target_dir), prompts, groups, expected, greedy)
        ends = [len(p) + len(g[0].token_ids) for p, g in zip(prompts, groups, strict=True)]
        assert ends == [limit] * 3
        assert drafting.engine.counters()["tree_runs"] > 10


def choose(engine: Engine, shapes: Sequence[int | DraftShape]) -> None:
    """Lets an engine draft any of these."""
    engine.scheduler.running_plans.gate = RandomGate(shapes)


def test_every_tree_has_a_graph_that_is_no_deeper() -> None:
    for width in range(2, 7):
        shapes = tree_shapes(width)
        assert shapes
        buckets = [TreeBucket(shape, size) for shape in shapes for size in (1, 2, 4)]
        graphs = TreeGraphs(_NoTrees(), buckets, capture)
        for shape in shapes:
            for count in range(1, shape.num_drafts + 1):
                for requests in range(1, 5):
                    found = graphs.bucket_of(shape._replace(num_drafts=count), requests)
                    assert count <= found.shape.num_drafts <= shape.num_drafts
                    assert found.shape.depth <= shape.depth
                    assert requests <= found.requests < 2 * requests or found.requests == 4


class _NoTrees(StaticTrees):
    def __init__(self) -> None:
        """Has nothing to grow."""

    def send_nothing(self, bucket: TreeBucket) -> None:
        """Sends nothing."""

    def run(self, bucket: TreeBucket) -> torch.Tensor:
        """Is nothing."""
        return torch.zeros(1, dtype=torch.int64)
