"""MTP heads that checkpoints bring: drafts are those of the head over transformers' hidden states,
texts those of the model alone.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from weft.contract.errors import ConfigError, ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.kernels.shared import cpu
from weft.testing.engine.captured_drafts import capture_chains
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.engine.drafters import KnownDrafter, RandomGate, texts_of
from weft.testing.engine.eagle3_cases import NUM_CHECKED, HasChains, NotedChains, WatchedHead
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import NEAR_TIE, OF_STATES, check_same
from weft.testing.models.every_family import load_reference
from weft.testing.models.reference_models import VOCAB, make_reference
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import KINDS, NaiveMtp, make_cycle, make_tiny_mtp

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
SAMPLED = SamplingParams(temperature=1.0, seed=5)
GREEDY = SamplingParams(temperature=0.0)
STOP = StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)
NEAR_TIES = {kind: OF_STATES if kind == "qwen" else NEAR_TIE for kind in KINDS}


def llm(path: Path, **settings: object) -> LLM:
    return LLM(path, dtype="float32", page_size=PAGE, prefill_chunk_tokens=2 * PAGE, **settings)


def random_tokens(count: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(count)]


def prompts_of_one_begin() -> list[list[int]]:
    shared = random_tokens(3 * PAGE + 3)
    return [
        shared[: random.randint(1, len(shared))] + random_tokens(random.randint(1, 2 * PAGE))
        for _ in range(6)
    ]


def check_chains(watched: HasChains, naive: NaiveMtp) -> None:
    chains = [(tokens, chain) for tokens, chain in watched.chains if chain]
    assert len(chains) > NUM_CHECKED
    for tokens, chain in random.sample(chains, NUM_CHECKED // 2):
        assert naive.agrees(tokens, chain), (tokens, chain)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_heads_whatever_happened_to_a_request(
    kind: str, tmp_path: Path, seed: int
) -> None:
    """Chunks, prefix hits that end inside a page, samples of one prompt, or pre-emption."""
    has_own, overlap = random.choice((False, True)), random.choice(("off", "on"))
    num_pages = random.choice((None, 20))
    print(f"own copies {has_own}, overlap {overlap}, pages {num_pages}")
    naive = make_tiny_mtp(kind, tmp_path / "model", seed, has_own=has_own)
    load, prompts = partial(load_reference, tmp_path / "model"), prompts_of_one_begin()
    params = SamplingParams(temperature=1.0, seed=5, n=1 if num_pages else 2)
    # Longer texts with few pages: short ones may end in time for the next, without pre-emption.
    stop = replace(STOP, max_tokens=6 * PAGE) if num_pages else STOP
    with llm(tmp_path / "model") as plain:
        expected = plain.generate_all(prompts, params, stop)
    given = {"num_pages": num_pages, "overlap": overlap, "poison_free_pages": True}
    with llm(tmp_path / "model", drafter="mtp", **given) as drafting:
        known = KnownDrafter(texts_of(prompts, expected, 5), VOCAB, 0.6)
        watched = WatchedHead(drafting.engine, known)
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, params, stop)
            for prompt, group, wanted in zip(prompts, groups, expected, strict=True):
                for number, (one, other) in enumerate(zip(group, wanted, strict=True)):
                    texts = (prompt, one.token_ids, other.token_ids)
                    check_same(load, *texts, params, number, NEAR_TIES[kind])
        counters = drafting.engine.counters()
    assert counters["accepted_tokens"] > 0
    if num_pages:
        assert counters["preemptions"] > 0
    check_chains(watched, naive)


@pytest.fixture(scope="module")
def cycle_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """A model that its head knows well."""
    path = tmp_path_factory.mktemp("cycle") / "model"
    make_tiny_mtp("glm", path, seed)
    make_cycle(path, seed)
    return path


def test_a_head_that_guesses_well_saves_steps(cycle_dir: Path) -> None:
    """Greedy and drawn; chains of five go on from the head's own states."""
    prompts = [random_tokens(count) for count in (1, PAGE, 30)]
    expected, num_steps = {}, {}
    for drafter in ("none", "mtp"):
        settings = {} if drafter == "none" else {"draft_gate": "fixed"}
        with llm(cycle_dir, drafter=drafter, **settings) as model:
            for params in (GREEDY, SAMPLED):
                found = [s.token_ids for s in model.generate(prompts, params, STOP)]
                assert expected.setdefault(params.temperature, found) == found
            counters = model.engine.counters()
            num_steps[drafter] = counters["steps"]
    accepted, drafted = counters["accepted_tokens"], counters["drafted_tokens"]
    print(f"{accepted} of {drafted} drafts are right, steps {num_steps}")
    assert accepted > drafted / 3
    assert num_steps["mtp"] < 0.7 * num_steps["none"]


@pytest.mark.full
@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("kind", ["glm", "deepseek", "qwen"])
def test_chains_as_a_gpu_captures_them(
    kind: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps begin where the device alone knows, and padding rows draft as well."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    naive = make_tiny_mtp(kind, tmp_path / "model", seed)
    prompts = [random_tokens(5 * index + 1) for index in range(6)]
    settings = {"max_running_requests": 4, "max_step_tokens": 40, "max_context_tokens": 64}
    with llm(tmp_path / "model", **settings) as plain:
        expected = [sample.token_ids for sample in plain.generate(prompts, SAMPLED, STOP)]
    settings |= {"drafter": "mtp", "max_draft_tokens": 3}
    with llm(tmp_path / "model", poison_free_pages=True, overlap="on", **settings) as captured:
        engine = captured.engine
        RecordedSteps(engine, 3)
        capture_chains(engine, 3)
        engine.scheduler.running_plans.drafts_on_device = True
        noted = NotedChains(engine, RandomGate((0, 1, 3)))
        found = [sample.token_ids for sample in captured.generate(prompts, SAMPLED, STOP)]
    load = partial(load_reference, tmp_path / "model")
    for prompt, one, other in zip(prompts, found, expected, strict=True):
        check_same(load, prompt, one, other, SAMPLED, near_tie=NEAR_TIES[kind])
    check_chains(noted, naive)


def test_pages_of_a_filler_have_the_heads_entries(tmp_path: Path, seed: int) -> None:
    """The rest behind what was filled has each length; a filler without the head declines."""
    path = tmp_path / "model"
    naive = make_tiny_mtp(random.choice(("glm", "deepseek")), path, seed)
    prompts = [random_tokens(3 * PAGE + rest + 1) for rest in range(PAGE)]
    with llm(path) as plain:
        groups = [[sample] for sample in plain.generate(prompts, GREEDY, STOP)]
    clock, settings = ManualClock(), {"prefill_chunk_tokens": PAGE}
    owner = make_engine(path, "decode", clock, drafter="mtp", **settings)
    fillers = [
        make_engine(path, "prefill", clock, worker_id=f"p{index}", mtp_head=has_head, **settings)
        for index, has_head in enumerate((True, False))
    ]
    pair = EnginePair(owner, fillers, clock)
    try:
        texts = texts_of(prompts, groups, GREEDY.seed or 0)
        watched = WatchedHead(owner, KnownDrafter(texts, VOCAB, 0.6))
        for prompt, (sample,) in zip(prompts, groups, strict=True):
            request_id = pair.submit(prompt, len(sample.token_ids))
            assert pair.finish(request_id) == [sample.token_ids]
            fills = pair.answers[request_id].finished[0].timeline.fills
            for fill in fills:
                assert ("declined: namespace" in fill.failure) == (fill.worker_id == "p1")
            pair.settle()
        assert owner.counters()["fills_done"] > 0
        assert fillers[1].counters()["computed_tokens"] == 0
    finally:
        pair.close()
    check_chains(watched, naive)


def test_a_checkpoint_says_what_was_left_out(
    cycle_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert load_model(cycle_dir, "float32", mtp_head=True).mtp is not None
    assert "left out" not in caplog.text
    with caplog.at_level("INFO"):
        assert load_model(cycle_dir, "float32").mtp is None
    assert "model.layers.3. left out" in caplog.text
    with llm(cycle_dir, mtp_head=True, dummy_weights=True, drafter="mtp") as dummy:
        assert len(dummy.generate([random_tokens(9)], GREEDY, STOP)[0].token_ids) == 3 * PAGE


def test_what_cannot_be_is_refused(cycle_dir: Path, tmp_path: Path, seed: int) -> None:
    with pytest.raises(ConfigError, match="mtp_head"):
        EngineConfig(model_dir=cycle_dir, draft_dir=tmp_path, drafter="mtp")
    make_reference("glm4_moe", tmp_path / "without", seed, **KINDS["glm"].fields)
    with pytest.raises(ModelError, match=r"has no MTP head: there is no tensor model\.layers\.3"):
        llm(tmp_path / "without", drafter="mtp")
    other = make_tiny("llama", tmp_path / "llama", seed)
    with pytest.raises(ModelError, match="LlamaForCausalLM brings none"):
        llm(other, mtp_head=True)
