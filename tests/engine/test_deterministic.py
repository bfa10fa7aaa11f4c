"""Deterministic mode: the same bits alone, in a batch of 64, whole, in chunks, token by token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from paging import PagedDriver, PagedRequest
from threads import one_thread
from tiny_models import make_tiny
from weft.engine import parts
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.llm import LLM
from weft.engine.models.interface import CausalLM
from weft.engine.models.loader import load_model

VOCAB = 517
LONG = 530
"""Longer than the segments in which attention is reduced."""


def in_parts(model: CausalLM, prompt: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of every position, computed in steps of these sizes, round and round."""
    driver, request, parts_ = PagedDriver(model, 100), PagedRequest(), []
    done = 0
    while done < len(prompt):
        tokens = prompt[done : done + sizes[len(parts_) % len(sizes)]]
        parts_.append(driver.step([(request, tokens)], range(len(tokens))))
        done += len(tokens)
    return torch.cat(parts_)


@pytest.mark.needs("cc")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mistral"])
def test_logits_are_the_same_bits(kind: str, dtype: str, threads: int, tmp_path: Path) -> None:
    window = {"sliding_window": 100} if kind == "mistral" else {}
    path = make_tiny(kind, tmp_path, random.randrange(10**6), num_hidden_layers=2, **window)
    lengths = [LONG, 33, 1, *(random.randrange(1, 20) for _ in range(61))]
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    with one_thread():
        torch.set_num_threads(threads)
        model = load_model(path, dtype).model
        whole = [in_parts(model, prompt, [LONG]) for prompt in prompts[:3]]
        for prompt, expected in zip(prompts, whole, strict=False):
            assert torch.equal(in_parts(model, prompt, [64, 1, 1, 1, 130, 7]), expected)
        assert torch.equal(in_parts(model, prompts[1], [1]), whole[1])
        work = [(PagedRequest(), prompt) for prompt in prompts]
        together = PagedDriver(model, 300).step(work, range(sum(lengths)))
        for logits, expected in zip(together.split(lengths), whole, strict=False):
            assert torch.equal(logits, expected)


@pytest.mark.needs("cc")
def test_the_flag_is_granted_where_the_operations_allow_it(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    with one_thread(), LLM(path, dtype="float32", num_pages=16, deterministic=True) as llm:
        assert any("deterministic" in notice for notice in llm.engine.info.notices)


def test_what_is_computed_in_one_order_on_a_gpu_is_named_apart(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    usual, fixed = load_model(path, "float32"), load_model(path, "float32", is_fixed=True)
    assert usual.digest != fixed.digest


@pytest.mark.parametrize("missing", ["compiler", "attention"])
def test_the_flag_is_refused_elsewhere(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("llama", tmp_path, head_dim=24 if missing == "compiler" else 20)
    if missing == "compiler":
        monkeypatch.setattr(parts, "native_cpu", lambda: None)
    config = EngineConfig(
        model_dir=path, dtype="float32", num_pages=16, transport="data", deterministic=True
    )
    with one_thread(), pytest.raises(ConfigError, match="deterministic"):
        parts.load_parts(config)
