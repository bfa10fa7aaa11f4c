"""Profiles of an engine's steps: how many they have, on which ranks, and how they end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import InvalidRequest, ProfileRunning
from weft.contract.profiles import MAX_STEPS, ProfileOptions
from weft.contract.request import StopCriteria
from weft.engine.executor import profiler
from weft.engine.loop.llm import LLM
from weft.testing.engine.profiled import EngineProfiles, step_names
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = {"num_attention_heads": 8, "vocab_size": 517}
PROMPTS = [list(range(3, 43)), list(range(5, 20))]


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_records_the_steps_that_were_asked_for(
    size: int, tmp_path: Path, seed: int
) -> None:
    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, **SIZES)
    stop = StopCriteria(max_tokens=40, ignore_eos=True)
    settings = {"page_size": 8, "prefill_chunk_tokens": 24, "num_pages": 48, "dtype": "float32"}
    with LLM(folder, tp=size, **settings) as llm:
        before = llm.generate(PROMPTS, stop=stop)
        profiles = EngineProfiles(llm.engine, tmp_path)
        profiles.begin("first", steps=5)
        profiles.begin("second")
        began_s = time.time()
        during = llm.generate(PROMPTS, stop=stop)
        while not profiles.ends:
            during = llm.generate(PROMPTS, stop=stop)
        (end,) = profiles.ends
        assert (end.profile, end.steps, end.reason, end.ranks) == ("first", 5, "steps", size)
        assert began_s <= end.began_s <= end.ended_s <= time.time()
        # The second came while the first ran.
        accepted, refused = profiles.failures
        assert accepted is None
        assert refused is not None
        assert refused.reason == ProfileRunning.reason
        assert "first" in refused.message
        # One that was stopped has the steps until then; the next one can begin.
        profiles.begin("third", steps=MAX_STEPS)
        llm.generate(PROMPTS, stop=stop)
        while not llm.engine.parts.local.profiler.is_recording:
            llm.generate(PROMPTS, stop=stop)
        profiles.stop("third")
        after = llm.generate(PROMPTS, stop=stop)
        assert profiles.ends[1].reason == "stopped"
        assert 0 < profiles.ends[1].steps < MAX_STEPS
        for end in profiles.ends:
            for trace in profiles.parts(end):
                names = step_names(trace)
                assert len(names) == end.steps
                assert [int(name.split()[1].rstrip(":")) for name in names] == [
                    *range(1, end.steps + 1)
                ]
                at = [
                    trace["baseTimeNanoseconds"] / 1e9 + event["ts"] / 1e6
                    for event in trace["traceEvents"]
                    if event.get("cat") == "user_annotation"
                ]
                assert end.began_s - 0.01 <= min(at) <= max(at) <= end.ended_s
        # What is recorded changes no token.
        for one in (during, after):
            assert [sample.token_ids for sample in one] == [s.token_ids for s in before]


def test_an_idle_engine_ends_a_profile_in_time(tmp_path: Path, seed: int) -> None:
    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, **SIZES)
    with LLM(folder, dtype="float32", num_pages=48) as llm:
        profiles = EngineProfiles(llm.engine, tmp_path)
        profiles.begin("idle", limit_s=0.1)
        while not profiles.ends:
            llm.engine.turn()
        (end,) = profiles.ends
        assert (end.steps, end.reason) == (0, "time")
        assert step_names(profiles.parts(end)[0]) == []
        # One that waits for a later step begins there, and ends without a further step.
        profiles.begin("later", steps=4, after_steps=3, limit_s=600)
        while len(profiles.ends) < 2:
            llm.generate([[5, 6, 7]], stop=StopCriteria(max_tokens=9, ignore_eos=True))
        end = profiles.ends[1]
        assert (end.steps, end.reason) == (4, "steps")
        names = step_names(profiles.parts(end)[0])
        assert len(names) == 4
        assert any(name.endswith("1 decodes") for name in names)


def test_an_engine_outlives_its_profiler(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no profiler today")

    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, **SIZES)
    with LLM(folder, dtype="float32", num_pages=48) as llm:
        profiles = EngineProfiles(llm.engine, tmp_path)
        before = llm.generate(PROMPTS, stop=StopCriteria(max_tokens=9))
        monkeypatch.setattr(profiler, "profile", fail)
        profiles.begin("failed", steps=3)
        while not profiles.ends:
            after = llm.generate(PROMPTS, stop=StopCriteria(max_tokens=9))
        assert [one.token_ids for one in after] == [one.token_ids for one in before]
        with pytest.raises(AssertionError, match="no profiler today"):
            profiles.parts(profiles.ends[0])
        monkeypatch.undo()
        profiles.begin("again", steps=3)
        while len(profiles.ends) < 2:
            llm.generate(PROMPTS, stop=StopCriteria(max_tokens=9))
        assert len(step_names(profiles.parts(profiles.ends[1])[0])) == 3


@pytest.mark.parametrize("comes_back", ["within the profile", "after it"])
def test_a_profiler_that_hangs_blocks_nothing_once_it_is_back(
    comes_back: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUPTI may."""
    is_back, make = threading.Event(), profiler.profile

    def hang(*args: Any, **options: Any) -> Any:
        assert is_back.wait(60)
        return make(*args, **options)

    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, **SIZES)
    stop = StopCriteria(max_tokens=9)
    with LLM(folder, dtype="float32", num_pages=48) as llm:
        profiles = EngineProfiles(llm.engine, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(profiler, "profile", hang)
            patch.setattr(profiler, "PREPARE_LIMIT_S", 0.0)
            profiles.begin("hung", steps=20)
            llm.generate(PROMPTS, stop=stop)
            assert not profiles.ends
            preparing = llm.engine.parts.local.profiler._preparing
            assert preparing is not None
            if comes_back == "within the profile":
                is_back.set()
                preparing.join(60)
            while not profiles.ends:
                llm.generate(PROMPTS, stop=stop)
            assert [end.profile for end in profiles.ends] == ["hung"]
            with pytest.raises(AssertionError, match="not ready within 0 s"):
                profiles.parts(profiles.ends[0])
            if comes_back == "after it":
                profiles.begin("refused", steps=3)
                llm.generate(PROMPTS, stop=stop)
                refused = profiles.failures[1]
                assert refused is not None
                assert refused.reason == ProfileRunning.reason
                assert "restart" in refused.message
        is_back.set()
        preparing.join(60)
        profiles.begin("again", steps=3)
        while len(profiles.ends) < 2:
            llm.generate(PROMPTS, stop=stop)
        assert len(step_names(profiles.parts(profiles.ends[1])[0])) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"steps": MAX_STEPS + 1},
        {"limit_s": 0.0},
        {"after_steps": -1},
        {"host": False, "device": False},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ProfileOptions(**wrong)  # type: ignore[arg-type]
    assert refused.value.param in (*wrong, None)
