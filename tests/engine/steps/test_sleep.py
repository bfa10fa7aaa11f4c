"""Sleep and waking: what is given back, what comes back, and what is refused meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import Asleep, ConfigError, InvalidRequest, WeightsIncomplete
from weft.contract.request import StopCriteria
from weft.contract.weights import WeightCommand
from weft.engine.loop.llm import LLM
from weft.testing.engine.weight_commands import Commands
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = {"num_attention_heads": 8, "vocab_size": 517}
PROMPTS = [list(range(3, 43)), list(range(5, 20))]
SETTINGS = {"page_size": 8, "prefill_chunk_tokens": 24, "num_pages": 64, "dtype": "float32"}
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
LARGE = 64 << 20


def model(path: Path, seed: int, **sizes: Any) -> Path:
    return make_tiny("llama", path, seed, tokenizer=True, **{**SIZES, **sizes})


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]


def digest(llm: LLM) -> bytes:
    return llm.engine.parts.local.refits.packed_digest()


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"quantization": "int8"}, marks=pytest.mark.full),
        pytest.param({"tp": 2}, marks=pytest.mark.full_after(1)),
    ],
)
def test_text_after_sleep_is_that_before(
    settings: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    with LLM(model(tmp_path / "m", seed), **(SETTINGS | settings)) as llm:
        right, packed = texts(llm), digest(llm)
        for _ in range(2):
            assert llm.sleep().asleep == ["weights", "kv_cache"]
            assert llm.sleep().asleep == ["weights", "kv_cache"]
            with pytest.raises(Asleep, match="weights, kv_cache"):
                texts(llm)
            assert llm.wake(["weights"]).asleep == ["kv_cache"]
            assert digest(llm) == packed
            # vllm-omni#4473: with one tag awake, requests ran into memory that was not there.
            with pytest.raises(Asleep, match="kv_cache"):
                texts(llm)
            assert llm.wake().asleep == []
            assert llm.wake().asleep == []
            assert texts(llm) == right
        assert llm.sleep(tags=["weights"]).asleep == ["weights"]
        with pytest.raises(Asleep, match="the weights sleep"):
            llm.refit(tmp_path / "m")
        assert llm.wake().pause == ""
        assert texts(llm) == right


def test_memory_is_given_back(tmp_path: Path, seed: int) -> None:
    folder = model(tmp_path / "m", seed, hidden_size=1024, intermediate_size=4096)
    num_pages = LARGE // (2 * 4 * 8 * 1024)
    settings = SETTINGS | {"num_pages": max(256, num_pages), "max_running_requests": 8}
    with LLM(folder, **settings) as llm:
        pool = llm.engine.parts.local.pool
        pool.view(-1)[:].zero_()  # So that all of it is there.
        weights = (folder / "model.safetensors").stat().st_size
        right, packed, awake = texts(llm), digest(llm), resident()
        assert weights > LARGE
        assert pool.nbytes > LARGE // 8
        llm.sleep()
        assert awake - resident() > 0.9 * (weights + pool.nbytes)
        llm.wake()
        assert digest(llm) == packed
        assert texts(llm) == right


@pytest.mark.full
def test_a_hundred_cycles_lose_nothing(tmp_path: Path, seed: int) -> None:
    folder = model(tmp_path / "m", seed, hidden_size=512, intermediate_size=2048)
    with LLM(folder, **SETTINGS) as llm:
        right, packed = texts(llm), digest(llm)
        found = []
        for turn in range(100):
            llm.sleep(tags=[["weights"], ["kv_cache"], ["weights", "kv_cache"]][turn % 3])
            llm.wake()
            assert digest(llm) == packed
            if turn % 10 == 0:
                assert texts(llm) == right
                found.append(resident())
        assert max(found[1:]) - min(found[1:]) < LARGE


def test_after_level_2_there_is_no_version_until_an_update(tmp_path: Path, seed: int) -> None:
    """trl#5312: it answered with the weights of the start."""
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    with LLM(second, **SETTINGS) as fresh:
        right, packed = texts(fresh), digest(fresh)
    with LLM(first, **SETTINGS) as llm:
        texts(llm)
        status = llm.sleep(level=2)
        assert (status.state, status.model_digest) == ("failed", b"")
        assert llm.wake(["weights"]).asleep == ["kv_cache"]
        with pytest.raises(Asleep):
            texts(llm)
        # An update that fails before it writes leaves nothing, not the old weights.
        with pytest.raises(Exception, match="no folder"):
            llm.refit(tmp_path / "nothing")
        assert llm.wake().state == "failed"
        with pytest.raises(WeightsIncomplete, match="no version of the weights"):
            texts(llm)
        assert llm.refit(second, "2").version == "2"
        assert digest(llm) == packed
        assert texts(llm) == right
        # Level 2 after level 1 drops what was put away.
        llm.sleep(tags=["weights"])
        assert llm.sleep(level=2).state == "failed"
        llm.wake()
        with pytest.raises(WeightsIncomplete):
            texts(llm)
        llm.refit(second)
        assert texts(llm) == right


@pytest.mark.parametrize("mode", ["retract", "abort", "wait"])
def test_requests_under_way(mode: Any, tmp_path: Path, seed: int) -> None:
    with LLM(model(tmp_path / "m", seed), **SETTINGS) as llm:
        right = texts(llm)
        commands = Commands(llm)
        commands.at(9, WeightCommand(query=1, action="sleep", mode=mode))
        commands.after(1, WeightCommand(query=2, action="wake"))
        found = llm.generate(PROMPTS, stop=STOP)
        commands.wait(2)
        assert [commands.replies[query].failure for query in (1, 2)] == [None] * 2
        assert commands.replies[1].status.asleep == ["weights", "kv_cache"]
        for one, whole in zip(found, right, strict=True):
            assert one.token_ids == whole[: len(one.token_ids)]
            is_whole = len(one.token_ids) == len(whole)
            assert is_whole == (mode != "abort")
        assert llm.weights.pause == ""
        assert texts(llm) == right


def test_requests_that_keep_their_pages_keep_them(tmp_path: Path, seed: int) -> None:
    with LLM(model(tmp_path / "m", seed), **SETTINGS) as llm:
        right = texts(llm)
        commands = Commands(llm)
        commands.at(9, WeightCommand(query=1, action="sleep", mode="keep"))
        commands.after(1, WeightCommand(query=2, action="sleep", mode="keep", tags=["weights"]))
        commands.after(2, WeightCommand(query=3, action="wake"))
        assert texts(llm) == right
        refused = commands.replies[1].failure
        assert refused is not None
        assert refused.param == "mode"
        assert commands.replies[2].status.asleep == ["weights"]
        assert commands.replies[3].failure is None


def test_what_cannot_be_is_refused(tmp_path: Path, seed: int) -> None:
    with pytest.raises(InvalidRequest, match="level"):
        WeightCommand(query=1, action="sleep", level=3)
    with pytest.raises(InvalidRequest, match="tags"):
        WeightCommand(query=1, action="sleep", tags=["cuda_graph"])  # type: ignore[list-item]
    settings = SETTINGS | {"sleep_dir": str(tmp_path / "nowhere")}
    with LLM(model(tmp_path / "m", seed), **settings) as llm:
        right = texts(llm)
        for level in (1, 2):
            with pytest.raises(ConfigError, match="sleep_dir"):
                llm.sleep(level=level)
            assert llm.weights.asleep == []
            assert texts(llm) == right
