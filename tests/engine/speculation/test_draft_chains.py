"""Chains of drafts as a GPU's graphs run them: padded, with inputs in fixed places."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.executor.drafts.chains import ChainGraphs, ChainShape, StaticChains, chain_shapes
from weft.engine.loop.llm import LLM
from weft.engine.scheduler.plan import Plan
from weft.testing.engine.captured_drafts import Recorded, capture, capture_chains
from weft.testing.engine.drafters import KnownDrafter, KnownGraphs, RandomGate, texts_of
from weft.testing.engine.eagle3_cases import WatchedHead, check_chains
from weft.testing.models.choices import check_same_groups
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 517
MAX_REQUESTS = 11


@pytest.mark.parametrize("num_pages", [None, 24], ids=["room", "few-pages"])
def test_padded_chains_are_the_heads(num_pages: int | None, tmp_path: Path, seed: int) -> None:
    target_dir = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB, num_hidden_layers=4)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    prompts = [
        [random.randrange(3, VOCAB) for _ in range(random.randint(1, 4 * PAGE))] for _ in range(6)
    ]
    params = SamplingParams(temperature=1.0, seed=5, n=1 if num_pages else 2)
    stop = StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate_all(prompts, params, stop)
    known = KnownDrafter(texts_of(prompts, expected, 5), VOCAB, 0.6)
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "num_pages": num_pages}
    with LLM(target_dir, poison_free_pages=True, **settings) as drafting:
        capture_chains(drafting.engine, max_drafts=5)
        watched = WatchedHead(drafting.engine, known)
        before = Recorded.num_replays
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, params, stop)
            check_same_groups(
                partial(load_reference, target_dir), prompts, groups, expected, params
            )
        assert Recorded.num_replays > before
        assert drafting.engine.counters()["accepted_tokens"] > 0
    check_chains(watched, target_dir, draft_dir)


@pytest.mark.parametrize("num_pages", [None, 24], ids=["room", "few-pages"])
@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
def test_steps_behind_steps_whose_outcome_the_host_does_not_know(
    chance: float, num_pages: int | None, tmp_path: Path, seed: int
) -> None:
    """What is drafted, where, and behind which token, the device knows alone."""
    target_dir = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB, num_hidden_layers=4)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    prompts = [
        [random.randrange(3, VOCAB) for _ in range(random.randint(1, 4 * PAGE))] for _ in range(7)
    ]
    greedy = SamplingParams(temperature=0.0)
    stop = StopCriteria(max_tokens=3 * PAGE, stop_token_ids=tuple(range(0, VOCAB, 80)))
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate_all(prompts, greedy, stop)
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "num_pages": num_pages}
    with LLM(target_dir, poison_free_pages=True, overlap="on", **settings) as drafting:
        engine = drafting.engine
        graphs = KnownGraphs(engine, texts_of(prompts, expected, 0), VOCAB, chance)
        num_accepted = num_rounds = 0

        def has_seen_all() -> bool:
            return graphs.num_late > 5 and engine.counters()["verified_runs"] > 20

        # From the second time on with a warm cache; random texts may end soon.
        while num_rounds < 2 or (not has_seen_all() and num_rounds < 12):
            num_rounds += 1
            groups = drafting.generate_all(prompts, greedy, stop)
            check_same_groups(
                partial(load_reference, target_dir), prompts, groups, expected, greedy
            )
            for group in groups:
                num_accepted += sum(s.timeline.num_accepted_tokens for s in group if s.timeline)
        counters = engine.counters()
        assert has_seen_all()
        if chance == 0.0:  # Behind the end of a text, any draft may be right.
            assert num_accepted == 0
        else:
            # If each draft is right with chance c, c + c^2 + ... + c^d of d drafts are accepted on
            # average, here at least half. Short texts lower the share, since drafts behind their
            # ends are not accepted. Drafts for a wrong place would be right in one case of VOCAB.
            assert num_accepted > 0.1 * chance * counters["drafted_tokens"]
        while engine.pipeline.num_steps:  # The last step may be under way.
            engine.turn()
        assert engine.memory.counts().used == 0


def test_nobody_sits_out_where_drafts_end(tmp_path: Path, seed: int) -> None:
    """With a gate that wants drafts and none in turn, each step has all requests."""
    target_dir = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB, num_hidden_layers=4)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    prompts = [[random.randrange(3, VOCAB) for _ in range(5)] for _ in range(MAX_REQUESTS)]
    greedy, stop = SamplingParams(temperature=0.0), StopCriteria(max_tokens=120, ignore_eos=True)
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate_all(prompts, greedy, stop)
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "overlap": "on"}
    with LLM(target_dir, **settings) as drafting:
        engine = drafting.engine
        KnownGraphs(engine, texts_of(prompts, expected, 0), VOCAB, 0.7)
        engine.scheduler.running_plans.gate = RandomGate((0, 0, 0, 3))
        begun, launch = [], engine.scheduler.launch

        def noted(plan: Plan) -> int:
            left = [r.max_tokens - r.num_generated for r in engine.scheduler.running]
            if len(left) == MAX_REQUESTS and min(left) > 15:
                is_late = plan.is_late is not None and bool(plan.is_late.all())
                begun.append((len(plan), len(plan.verifies), is_late))
            return launch(plan)

        engine.scheduler.launch = noted  # type: ignore[method-assign]
        groups = drafting.generate_all(prompts, greedy, stop)
        check_same_groups(partial(load_reference, target_dir), prompts, groups, expected, greedy)
    assert {count for count, *_ in begun[1:]} == {MAX_REQUESTS}
    assert (MAX_REQUESTS, MAX_REQUESTS, False) in begun
    assert (MAX_REQUESTS, 0, True) in begun, "a late step without drafts"
    assert (MAX_REQUESTS, 0, False) in begun


@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize(("max_drafts", "max_requests"), [(1, 1), (5, 64), (16, 100), (6, 257)])
def test_every_chain_has_a_graph_that_is_hardly_larger(
    max_drafts: int, max_requests: int, has_lora: bool
) -> None:
    shapes = chain_shapes(max_drafts, max_requests, has_lora=True)
    assert len(set(shapes)) == len(shapes)
    graphs = ChainGraphs(_NoChains(), shapes, capture)
    for requests in range(1, max_requests + 1):
        for depth in range(1, max_drafts + 1):
            shape = graphs.shape_of(depth, requests, has_lora=has_lora)
            assert shape.has_lora == has_lora
            assert depth <= shape.depth <= max_drafts
            assert requests <= shape.requests < 2 * requests or shape.requests == 1


class _NoChains(StaticChains):
    def __init__(self) -> None:
        """Has nothing to run."""

    def send_nothing(self, shape: ChainShape) -> None:
        """Sends nothing."""

    def run(self, shape: ChainShape) -> torch.Tensor:
        """Is nothing."""
        return torch.zeros((shape.depth, shape.requests), dtype=torch.int64)
