"""Fills of models with sliding windows: they bring all pages of layers without a window, and of the
others what the owner still needs.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.fills import FillCommand, FillerEvent
from weft.contract.handle import FillEvent
from weft.contract.request import SamplingParams
from weft.engine.base.config import NEVER_SHIP_TOKENS
from weft.testing.engine.engine_pair import WAYS, EnginePair, ManualClock, make_engine
from weft.testing.engine.engine_storm import Storm, check_empty, make_texts, ride_out
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, WINDOW, VOCAB = 8, 21, 517
SOME = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"layer_types": SOME, "num_hidden_layers": 4, "use_sliding_window": True},
    "qwen3": {"layer_types": ["full_attention"] * 2 + SOME[:2], "num_hidden_layers": 4},
    "mistral": {"num_hidden_layers": 3},
}
"""Window pages as long as three pages of the first group, half as long, and twice as long."""
OTHERS = [
    pytest.param(*way.values, id=way.id, marks=[*way.marks, pytest.mark.full])
    for way in (WAYS[0], *WAYS[2:])
]


@pytest.fixture(
    params=[
        "qwen2",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen3", "mistral")),
    ],
    scope="module",
)
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    overrides = {"sliding_window": WINDOW, "use_sliding_window": True, **KINDS[request.param]}
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"), seed, **overrides)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


class Greedy:
    """Equals tokens of which each is the model's choice behind those before it."""

    def __init__(self, model: torch.nn.Module, prompt: list[int], num_new: int) -> None:
        self._model, self._prompt, self._num_new = model, prompt, num_new

    @torch.inference_mode()
    def __eq__(self, tokens: object) -> bool:
        assert isinstance(tokens, list)
        assert len(tokens) == self._num_new
        logits = self._model(torch.tensor([[*self._prompt, *tokens[:-1]]])).logits[0]
        check_choices(logits[len(self._prompt) - 1 :], tokens)
        return True


def make_pair(model_dir: Path, num_fillers: int = 1, **settings: Any) -> EnginePair:
    clock, values = ManualClock(), {"window_pages": "free", **settings}
    owner = make_engine(model_dir, "decode", clock, **values)
    fillers = [
        make_engine(model_dir, "prefill", clock, **{**values, "worker_id": f"prefill-{number}"})
        for number in range(num_fillers)
    ]
    return EnginePair(owner, fillers, clock)


def lose_windows(pair: EnginePair) -> None:
    """Takes all cached window pages of the owner, as other requests would."""
    pair.settle()
    for window in pair.owner.parts.companions:
        window.memory.release(window.memory.allocate(window.memory.num_available_pages))


def check(pair: EnginePair) -> None:
    pair.settle()
    for engine in (pair.owner, *pair.fillers.values()):
        check_empty(engine)
        for window in engine.parts.companions:
            if window._index is not None:
                window._index.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("of_owner", [True, False])
def test_windows_go_between_ranks_and_one_process(
    model_dir: Path, model: torch.nn.Module, of_owner: bool
) -> None:
    clock, ranks = ManualClock(), {"tp": 2, "rank_timeout_s": 60.0}
    owner, filler = (
        make_engine(model_dir, role, clock, window_pages="free", **(ranks if has_ranks else {}))
        for role, has_ranks in (("decode", of_owner), ("prefill", not of_owner))
    )
    pair = EnginePair(owner, [filler], clock)
    try:
        for length in (WINDOW, WINDOW + PAGE, *random.sample(range(60, 160), 3)):
            prompt = random_prompt(length)
            assert pair.finish(pair.submit(prompt, 6)) == [Greedy(model, prompt, 6)]
        counters = pair.owner.counters()
        assert (counters["fills_done"], counters["fills_failed"]) == (5, 0)
        check(pair)
    finally:
        pair.close()


@pytest.mark.parametrize("way", [WAYS[1], *OTHERS])
def test_filled_prompts_of_every_length_around_borders(
    model_dir: Path, model: torch.nn.Module, way: dict[str, Any]
) -> None:
    pair = make_pair(model_dir, **way)
    try:
        lengths = [*range(WINDOW - 2, WINDOW + PAGE + 3), *random.sample(range(60, 160), 3)]
        for length in lengths:
            prompt = random_prompt(length)
            assert pair.finish(pair.submit(prompt, 6)) == [Greedy(model, prompt, 6)]
        counters = pair.owner.counters()
        assert counters["fills_done"] == sum(length > PAGE for length in lengths)
        assert not counters["fills_failed"]
        check(pair)
    finally:
        pair.close()


def test_a_shipped_prompt_takes_no_more_memory_than_a_local_one(
    model_dir: Path, model: torch.nn.Module
) -> None:
    """And what lies behind the last window is not sent."""
    bytes_of = {}
    for mode in ("keep", "free"):
        pair = make_pair(model_dir, window_pages=mode, prefix_cache=False)
        try:
            prompt, owner = random_prompt(50 * PAGE + 1), pair.owner
            request = pair.submit(prompt, 40)
            pair.run(lambda pair=pair, request=request: pair.answers[request].tokens)
            used = [memory.counts().used for memory in owner.memories]
            assert used[0] == 51
            assert all(count <= -(-WINDOW // PAGE) + 2 for count in used[1:])
            assert pair.finish(request) == [Greedy(model, prompt, 40)]
            bytes_of[mode] = owner.counters()["accepted_bytes"]
            check(pair)
        finally:
            pair.close()
    kept, freed = owner.parts.layout.groups
    last_window = -(-(WINDOW - 1) // PAGE) * freed.page_bytes(PAGE)
    whole = 50 * (kept.page_bytes(PAGE) + freed.page_bytes(PAGE))
    print(f"{bytes_of['free']:,} bytes instead of {bytes_of['keep']:,}")
    assert bytes_of["keep"] == whole
    least = 50 * kept.page_bytes(PAGE) + last_window
    assert least <= bytes_of["free"] < least + kept.page_bytes(PAGE)


@pytest.mark.parametrize("transport", ["data", pytest.param("staged", marks=pytest.mark.full)])
def test_a_fill_in_pieces(model_dir: Path, model: torch.nn.Module, transport: str) -> None:
    """Each brings what its own end needs, with room for a third of a window."""
    values: dict[str, Any] = {"max_fill_fraction": 0.1, "num_pages": 60}
    if transport == "staged":
        values |= {"force_staging": True, "max_fill_fraction": 0.12}
    pair = make_pair(model_dir, **values)
    try:
        for length in random.sample(range(100, 250), 3):
            prompt = random_prompt(length)
            assert pair.finish(pair.submit(prompt, 5)) == [Greedy(model, prompt, 5)]
        counters = pair.owner.counters()
        assert counters["fills_done"] > 6
        assert not counters["fills_failed"]
        check(pair)
    finally:
        pair.close()


@pytest.mark.parametrize(
    "tight",
    [
        {},
        {"force_staging": True, "max_fill_fraction": 0.12, "num_pages": 60},
        pytest.param({"max_fill_fraction": 0.1, "num_pages": 60}, marks=pytest.mark.full),
    ],
    ids=["roomy", "staged", "small"],
)
def test_prompts_that_part_from_a_filled_one_anywhere(
    model_dir: Path, model: torch.nn.Module, tight: dict[str, Any]
) -> None:
    """Pages of layers without a window are sent once, whatever window pages are there; each fill
    brings the window behind its end. Where that has no room, its pieces are sent.
    """
    pair = make_pair(model_dir, max_running_requests=2, **tight)
    try:
        base = random_prompt(150)
        assert pair.finish(pair.submit(base, 3)) == [Greedy(model, base, 3)]
        for length in random.sample(range(1, 151), 12 if not tight else 4):
            if tight:
                lose_windows(pair)
            begin = pair.owner.counters()
            prompt = base[:length] + random_prompt(random.randint(1, 40))
            assert pair.finish(pair.submit(prompt, 3)) == [Greedy(model, prompt, 3)]
            end = pair.owner.counters()
            if end["fills_done"] > begin["fills_done"] and not tight:
                first, last = length // PAGE, (len(prompt) - 1) // PAGE
                kept = pair.owner.parts.layout.groups[0].page_bytes(PAGE)
                window = pair.owner.fills.num_companion_pages
                sent = (end["accepted_bytes"] - begin["accepted_bytes"]) // kept
                assert sent <= max(1, last - first) + window
        assert not pair.owner.counters()["fills_failed"]
        check(pair)
    finally:
        pair.close()


def test_a_window_longer_than_the_share_of_fills_is_sent_at_once(tmp_path: Path, seed: int) -> None:
    """In pieces all of it would travel; and behind cached pages that lack it, a fill has room."""
    shape = {"num_hidden_layers": 8, "sliding_window": 128, "max_position_embeddings": 2048}
    model_dir = make_tiny("mistral", tmp_path, seed, use_sliding_window=True, **shape)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    pair = make_pair(model_dir, num_pages=None, kv_memory_bytes=6 << 20)
    try:
        owner, base = pair.owner, random_prompt(50 * PAGE + 1)
        pair.finish(pair.submit(base, 2))
        kept = owner.parts.layout.groups[0].page_bytes(PAGE)
        most = owner.fills.num_companion_pages
        assert most > int(0.3 * owner.memory.num_usable_pages)
        assert owner.counters()["fills_done"] == 1
        assert owner.counters()["accepted_bytes"] == (50 + most) * kept
        lose_windows(pair)
        prompt = base[:300] + random_prompt(60)
        assert pair.finish(pair.submit(prompt, 2)) == [Greedy(model, prompt, 2)]
        assert owner.counters()["fills_done"] == 2
        assert owner.counters()["accepted_bytes"] == (50 + most + 44 - 37 + most) * kept
        check(pair)
    finally:
        pair.close()


@pytest.mark.parametrize("num_fillers", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_fill_that_breaks_anywhere(
    model_dir: Path, model: torch.nn.Module, num_fillers: int
) -> None:
    """The next filler fills, or the owner computes, all behind what it can go on with."""
    pair = make_pair(model_dir, num_fillers)
    most = num_cut = 0

    def cut(event: FillEvent) -> list[FillEvent]:
        nonlocal num_cut
        if pair.owner.counters()["accepted_pages"] < most or event.kind not in ("written", "data"):
            return [event]
        pair.on_event = lambda event: [event]
        num_cut += 1
        return [FillEvent(kind="broken", message="cut")]

    try:
        base = random_prompt(8 * PAGE)
        assert pair.finish(pair.submit(base, 3)) == [Greedy(model, base, 3)]
        for num_before in random.sample(range(10), 3):
            prompt = base[: random.randint(1, len(base))] + random_prompt(12 * PAGE)
            most = pair.owner.counters()["accepted_pages"] + num_before
            pair.on_event = cut
            assert pair.finish(pair.submit(prompt, 6)) == [Greedy(model, prompt, 6)]
        # What comes last may bring more pages than were left until the cut.
        assert pair.owner.counters()["fills_failed"] == num_cut > 0
        check(pair)
    finally:
        pair.close()


def test_a_failed_fill_behind_shared_pages_where_memory_is_taken(
    model_dir: Path, model: torch.nn.Module
) -> None:
    """The pages that it shares with a running request are not reserved again when it is queued."""
    pair = make_pair(model_dir, num_pages=64, max_step_tokens=16, max_running_requests=8)
    starts: list[FillCommand] = []

    def keep(command: FillCommand) -> list[FillCommand]:
        starts.append(command)
        return []

    try:
        owner, base = pair.owner, random_prompt(160)
        prompts = [base, base[:140] + random_prompt(40), random_prompt(26 * PAGE - 3)]
        requests = [pair.submit(base, 40)]
        pair.run(lambda: bool(pair.answers[requests[0]].tokens))
        for window in owner.parts.companions:  # Other requests take what is cached.
            window.memory.release(window.memory.allocate(window.memory.num_available_pages))
        pair.on_command = keep
        requests.append(pair.submit(prompts[1], 4))
        pair.run(lambda: bool(starts))
        handle = starts[0].handle
        assert handle is not None
        num_shared = handle.start_token // PAGE
        assert num_shared == 17
        requests.append(pair.submit(prompts[2], 2, candidates=[]))
        pair.run(lambda: owner.memory.num_available_pages < num_shared)
        failed = FillEvent(kind="failed", message="cut", is_stopped=True)
        pair.send(filler_events=[FillerEvent(lease_id=starts[0].lease_id, event=failed)])
        pair.on_command = lambda command: [command]
        expected = [Greedy(model, *of) for of in zip(prompts, (40, 4, 2), strict=True)]
        assert pair.finish(*requests) == expected
        assert owner.counters()["fills_failed"] == 1
        check(pair)
    finally:
        pair.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "transport", ["data", pytest.param("nixl", marks=pytest.mark.needs("nixl"))]
)
def test_whatever_goes_wrong(model_dir: Path, model: torch.nn.Module, transport: str) -> None:
    """Random requests and faults: every answer is right, and nothing stays behind."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, clock = random.Random(seed), ManualClock()
    samplings = [SamplingParams(temperature=float(i % 2 == 0), seed=i, n=4) for i in range(12)]
    quiet = make_engine(
        model_dir, "decode", clock, local_prefill_max_tokens=NEVER_SHIP_TOKENS, window_pages="keep"
    )
    texts = make_texts(quiet, clock, samplings, 12)
    values = {"transport": transport, "window_pages": "free", "max_running_requests": 4}
    owner = make_engine(model_dir, "decode", clock, num_pages=64, **values)
    fillers = [
        make_engine(model_dir, "prefill", clock, num_pages=80, worker_id=f"prefill-{n}", **values)
        for n in range(2)
    ]
    storm = Storm(owner, fillers, clock, texts, rng)
    try:
        ride_out(
            storm,
            250,
            10,
            lambda: bool(owner.counters()["fills_done"] and owner.counters()["fills_failed"]),
        )
        assert owner.counters()["fills_done"]
        check(storm)
    finally:
        storm.close()
