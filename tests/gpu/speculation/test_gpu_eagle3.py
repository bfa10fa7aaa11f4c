"""EAGLE-3 heads on a GPU: the text is the target's, the drafts are the head's, inside graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.llm import LLM
from weft.engine.scheduler.plan import VerifyItem
from weft.kernels.ops.step_rows.spec import SlotTokens
from weft.testing.engine.drafters import KnownDrafter, KnownGraphs, RandomGate, texts_of
from weft.testing.engine.eagle3_cases import NotedChains, WatchedHead, check_chains
from weft.testing.engine.later_drafts import fetched
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

PAGE = 16
VOCAB = 517
STOP = StopCriteria(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_drafts_are_the_heads_and_the_text_is_the_targets(
    kind: str, cuda_graphs: bool, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    target_dir = make_tiny(
        kind, tmp_path / "t", seed, num_hidden_layers=4, head_dim=64, vocab_size=VOCAB
    )
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    shared = [random.randrange(3, VOCAB) for _ in range(3 * PAGE + 3)]
    prompts = [
        shared[: random.randint(1, len(shared))]
        + [random.randrange(3, VOCAB) for _ in range(random.randint(1, 2 * PAGE))]
        for _ in range(6)
    ]
    params = SamplingParams(temperature=1.0, seed=5, n=2)
    settings = {
        "device": "cuda",
        "dtype": "float32",
        "page_size": PAGE,
        "num_pages": 300,
        "max_running_requests": 16,
        "max_step_tokens": 128,
        "prefill_chunk_tokens": 32,
        "poison_free_pages": True,
        "cuda_graphs": cuda_graphs,
    }
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate_all(prompts, params, STOP)
    known = KnownDrafter(texts_of(prompts, expected, 5), VOCAB, 0.6)
    with LLM(target_dir, draft_dir=draft_dir, drafter="eagle3", **settings) as drafting:
        watched = WatchedHead(drafting.engine, known)
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, params, STOP)
            for group, wanted in zip(groups, expected, strict=True):
                assert [s.token_ids for s in group] == [s.token_ids for s in wanted]
        assert drafting.engine.counters()["accepted_tokens"] > 0
    # Rounding may decide between tokens that the head finds equally likely.
    check_chains(watched, target_dir, draft_dir, allowed=1)


@pytest.mark.parametrize("num_pages", [300, 40], ids=["room", "few-pages"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_behind_steps_whose_outcome_the_host_does_not_know(
    temperature: float, num_pages: int, tmp_path: Path
) -> None:
    """Drafts, acceptance, positions and noise are the device's; the text is what it was."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    target_dir = make_tiny(
        "llama", tmp_path / "t", seed, num_hidden_layers=4, head_dim=64, vocab_size=VOCAB
    )
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    prompts = [
        [random.randrange(3, VOCAB) for _ in range(random.randint(1, 4 * PAGE))] for _ in range(9)
    ]
    params = SamplingParams(temperature=temperature, seed=5)
    stop = StopCriteria(max_tokens=60, stop_token_ids=tuple(range(0, VOCAB, 50)))
    settings = {"device": "cuda", "dtype": "float32", "page_size": PAGE, "num_pages": num_pages}
    settings |= {"max_running_requests": 8, "max_step_tokens": 128, "prefill_chunk_tokens": 32}
    settings |= {"max_context_tokens": 256}
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate_all(prompts, params, stop)
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "poison_free_pages": True}
    with LLM(target_dir, **settings) as drafting:
        engine = drafting.engine
        assert engine.scheduler.running_plans.drafts_on_device
        graphs = KnownGraphs(engine, texts_of(prompts, expected, 5), VOCAB, 0.7)
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, params, stop)
            for group, wanted in zip(groups, expected, strict=True):
                assert [s.token_ids for s in group] == [s.token_ids for s in wanted]
        # Requests that a stop token ended leave a step behind, which holds their pages.
        while engine.has_work:
            engine.turn()
        counters = engine.counters()
        assert graphs.num_late > 20
        assert counters["accepted_tokens"] > 0.3 * counters["drafted_tokens"]
        assert engine.memory.counts().used == 0


def test_a_heads_drafts_behind_steps_under_way_are_its_drafts(tmp_path: Path) -> None:
    """Of steps whose begin the host did not know, as of others: the head's own chain."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    target_dir = make_tiny(
        "llama", tmp_path / "t", seed, num_hidden_layers=4, head_dim=64, vocab_size=VOCAB
    )
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    settings = {"device": "cuda", "dtype": "float32", "page_size": PAGE, "num_pages": 300}
    settings |= {"max_running_requests": 8, "max_step_tokens": 128, "draft_dir": draft_dir}
    settings |= {"prefill_chunk_tokens": 32, "drafter": "eagle3"}
    prompts = [[random.randrange(3, VOCAB) for _ in range(random.randint(1, 90))] for _ in range(6)]
    with LLM(target_dir, **settings) as drafting:
        noted = NotedChains(drafting.engine, RandomGate((1, 3, 5)))
        drafting.generate(prompts, SamplingParams(temperature=0.0), STOP)
    check_chains(noted, target_dir, draft_dir, allowed=1)


class BothWays:
    """Drafts by graphs, and looks what single operations draft for the same requests."""

    def __init__(self, drafter: EagleDrafter, known: SlotTokens) -> None:
        assert drafter._graphs is not None
        self._drafter, self._known = drafter, known
        self._eager = EagleDrafter(
            drafter._chains._model, drafter._chains._pool, drafter._table, drafter._page_size
        )
        self.num_chains = self.num_different = 0
        self.sizes: set[int] = set()

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        chains = fetched(self._drafter, items, self._known)
        others = self._eager.draft(items)
        self.sizes.add(len(items))
        self.num_chains += len(chains)
        self.num_different += sum(a != b for a, b in zip(chains, others, strict=True))
        return chains


def test_graphs_draft_what_single_operations_do(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    target_dir = make_tiny("llama", tmp_path / "t", seed, num_hidden_layers=4, head_dim=64)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    settings = {"device": "cuda", "dtype": "float32", "page_size": PAGE, "num_pages": 300}
    settings |= {"max_running_requests": 12, "max_step_tokens": 128, "max_draft_tokens": 4}
    settings |= {"prefill_chunk_tokens": 32, "draft_dir": draft_dir, "drafter": "eagle3"}
    with LLM(target_dir, **settings) as drafting:
        drafter = drafting.engine.drafter
        assert isinstance(drafter, EagleDrafter)
        both = drafting.engine.pipeline._drafter = BothWays(
            drafter, drafting.engine.parts.local.known
        )
        drafting.engine.scheduler.running_plans.drafts_on_device = False
        gate = RandomGate((1, 2, 3, 4))
        drafting.engine.scheduler.running_plans.gate = gate
        for count in (1, 3, 12):
            prompts = [
                [random.randrange(3, VOCAB) for _ in range(random.randint(1, 90))]
                for _ in range(count)
            ]
            drafting.generate(prompts, SamplingParams(temperature=1.0), STOP)
    assert 1 in both.sizes
    assert max(both.sizes) > 4
    assert both.num_chains > 100
    # Padding may round otherwise, and rounding decide between tokens that are equally likely.
    assert both.num_different <= 0.02 * both.num_chains


@pytest.mark.whole_device
def test_a_pool_that_is_sized_by_what_is_free_has_room_for_the_heads_layer(tmp_path: Path) -> None:
    target_dir = make_tiny("llama", tmp_path / "t", 3, num_hidden_layers=4, head_dim=64)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, 4)
    settings = {"device": "cuda", "dtype": "bfloat16", "max_running_requests": 8}
    prompt = [random.randrange(3, VOCAB) for _ in range(40)]
    greedy = SamplingParams(temperature=0.0)
    with LLM(target_dir, draft_dir=draft_dir, drafter="eagle3", **settings) as drafting:
        (sample,) = drafting.generate([prompt], greedy, STOP)
        assert len(sample.token_ids) == STOP.max_tokens
        assert torch.isfinite(drafting.engine.parts.local.pool[1:4]).all()
