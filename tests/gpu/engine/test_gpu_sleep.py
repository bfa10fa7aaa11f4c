"""Sleep on a GPU: memory that the driver has again, and text, graphs and digests afterwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import ConfigError, WeightsIncomplete
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.ranked_texts import gpus_of_ranks
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

PROMPTS = [list(range(3, 43)), list(range(5, 20))]
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128, "num_attention_heads": 16}
# Cached pages would change how many rows a prompt has, and with it how its sums are rounded.
SETTINGS = {"device": "cuda", "dtype": "bfloat16", "num_pages": 1024, "prefix_cache": False}
SETTINGS |= {"max_running_requests": 8, "max_step_tokens": 256, "prefill_chunk_tokens": 256}
SLACK = 64 << 20


def model(path: Path, seed: int, kind: str = "llama", **sizes: Any) -> Path:
    return make_tiny(kind, path, seed, **{**SIZES, **sizes})


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "fp8"},
        {"quantization": "int4"},
        {"cuda_graphs": False},
        {"sleep_host_bytes": 2 << 30},
    ],
    ids=str,
)
def test_text_and_memory_after_sleep_are_those_before(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = model(tmp_path / "m", random.randrange(10**6))
    with LLM(folder, **({"sleep_host_bytes": 0} | SETTINGS | settings)) as llm:
        local = llm.engine.parts.local
        right, packed, awake = texts(llm), local.refits.packed_digest(), free()
        assert local.sleeper.problem == ""
        # At least: of float32 in the file, a byte or half of one in formats that are made at load.
        weights = (folder / "model.safetensors").stat().st_size // 8
        for turn in range(10):
            llm.sleep()
            assert free() > awake + weights + local.pool.nbytes - SLACK
            llm.wake(["weights"])
            assert local.refits.packed_digest() == packed
            llm.wake()
            assert abs(free() - awake) < SLACK, turn
            assert texts(llm) == right


@pytest.mark.full
def test_a_hundred_cycles_lose_nothing(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", 1)
    with LLM(folder, sleep_host_bytes=2 << 30, **SETTINGS) as llm:
        right, awake = texts(llm), free()
        for _ in range(100):
            llm.sleep()
            llm.wake()
        assert abs(free() - awake) < SLACK
        assert texts(llm) == right


def test_dropped_weights_are_those_of_the_next_update(tmp_path: Path) -> None:
    first, second = model(tmp_path / "first", 1), model(tmp_path / "second", 2)
    with LLM(second, **SETTINGS) as fresh:
        right = texts(fresh)
    with LLM(first, sleep_host_bytes=0, **SETTINGS) as llm:
        texts(llm)
        for level in (2, 1):
            llm.sleep()
            llm.sleep(level=level)
            llm.wake()
        with pytest.raises(WeightsIncomplete):
            texts(llm)
        llm.refit(second)
        assert texts(llm) == right


def test_ranks_sleep_together(tmp_path: Path) -> None:
    two = SETTINGS | {"tp": 2, "device": gpus_of_ranks(2)}
    with LLM(model(tmp_path / "m", 3), sleep_host_bytes=0, **two) as llm:
        right = texts(llm)
        for _ in range(3):
            assert llm.sleep(tags=["weights"]).asleep == ["weights"]
            llm.wake()
            assert texts(llm) == right


def test_workers_without_the_setting_say_so(tmp_path: Path) -> None:
    with LLM(model(tmp_path / "m", 4), **SETTINGS) as llm:
        right = texts(llm)
        with pytest.raises(ConfigError, match="sleep_host_bytes"):
            llm.sleep()
        assert texts(llm) == right
