"""Deterministic mode: the same bits alone, in a batch of 64, whole, in chunks, token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.checkpoint.adapters.names import VOCABULARY
from weft.contract.errors import ConfigError
from weft.contract.request import StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.executor import device
from weft.engine.loop import build as parts
from weft.engine.loop.llm import LLM
from weft.engine.model.interface import Model
from weft.engine.model.loader import load_model
from weft.testing.kernels.lora_cases import LoraCase
from weft.testing.models.lora_models import LAYERS, RANKS, lora_step, make_adapters, make_experts
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_adapters import (
    LINEAR,
    adapter_tensors,
    vocabulary_tensors,
    write_adapter,
)
from weft.testing.models.tiny_encoders import make_encoder
from weft.testing.models.tiny_models import make_tiny

VOCAB = 517
LONG = 530
"""Longer than the segments in which attention is reduced."""


Work = list[tuple[PagedRequest, list[int]]]
Run = Callable[[PagedDriver, Work], torch.Tensor]
"""A step: logits of every row."""


def run_plain(driver: PagedDriver, work: Work) -> torch.Tensor:
    return driver.step(work, range(sum(len(tokens) for _, tokens in work)))


def in_parts(
    model: Model, prompt: list[int], sizes: list[int], run: Run = run_plain, slot: int = 0
) -> torch.Tensor:
    """Logits of every position, computed in steps of these sizes, round and round."""
    driver, request, parts_ = PagedDriver(model, 100), PagedRequest(slot=slot), []
    done = 0
    while done < len(prompt):
        tokens = prompt[done : done + sizes[len(parts_) % len(sizes)]]
        parts_.append(run(driver, [(request, tokens)]))
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


def with_adapters(path: Path, dtype: torch.dtype) -> Run:
    """Steps in which a request's slot is that of its adapter too: of all projections, of the
    embedding and the LM head, and of experts."""
    config = json.loads((path / "config.json").read_text())
    is_dense = "num_experts" not in config
    cases = make_adapters(config, is_dense), {} if is_dense else make_experts(config)

    def cast(case: LoraCase) -> LoraCase:
        w = case.weights
        return LoraCase(replace(w, a=w.a.to(dtype), b=w.b.to(dtype)), case.plain)

    adapters, experts = ({name: cast(case) for name, case in some.items()} for some in cases)

    def run(driver: PagedDriver, work: Work) -> torch.Tensor:
        rows = range(sum(len(tokens) for _, tokens in work))
        batch = driver.batch(work, rows)
        slots = [request.slot for request, tokens in work for _ in tokens]
        batch.lora = lora_step(adapters, experts, slots)
        with torch.inference_mode():
            hidden = driver.model.forward(batch, driver.pool)
            return driver.model.logits(hidden, batch.lora.select(batch.logits_rows))

    return run


@pytest.mark.needs("cc")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_logits_with_adapters_are_the_same_bits(
    kind: str, dtype: str, threads: int, tmp_path: Path
) -> None:
    """Beside requests of other adapters, of the same, and of none."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    random.seed(seed)
    torch.manual_seed(seed)
    path = make_tiny(kind, tmp_path, seed, num_hidden_layers=LAYERS)
    run = with_adapters(path, getattr(torch, dtype))
    lengths = [70, 33, 1, 40, *(random.randrange(1, 20) for _ in range(20))]
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    slots = [*range(len(RANKS)), *(random.randrange(len(RANKS)) for _ in lengths[len(RANKS) :])]
    with one_thread():
        torch.set_num_threads(threads)
        model = load_model(path, dtype).model
        chosen = list(zip(prompts, slots, strict=True))[: 2 * len(RANKS)]
        whole = [in_parts(model, prompt, [LONG], run, slot) for prompt, slot in chosen]
        for (prompt, slot), expected in zip(chosen, whole, strict=True):
            assert torch.equal(in_parts(model, prompt, [16, 1, 1, 30, 7], run, slot), expected)
        assert torch.equal(whole[0], in_parts(model, prompts[0], [LONG]))
        assert not torch.equal(whole[1], in_parts(model, prompts[1], [LONG]))
        work = [(PagedRequest(slot=slots[i]), prompt) for i, prompt in enumerate(prompts)]
        together = run(PagedDriver(model, 300), work)
        for logits, expected in zip(together.split(lengths), whole, strict=False):
            assert torch.equal(logits, expected)


@pytest.mark.needs("cc")
def test_the_flag_is_granted_where_the_operations_allow_it(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    with one_thread(), LLM(path, dtype="float32", num_pages=16, deterministic=True) as llm:
        assert any("deterministic" in notice for notice in llm.engine.info.notices)


@pytest.mark.needs("cc")
def test_requests_with_adapters_are_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """By the engine: wherever on the device an adapter is, and in chunks."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    random.seed(seed)
    path = make_tiny("llama", tmp_path / "model", seed)
    config, paths = json.loads((path / "config.json").read_text()), []
    for i, rank in enumerate((8, 20, 3)):
        tensors = adapter_tensors(config, seed + i, rank=rank)
        tensors |= vocabulary_tensors(config, seed + i, rank=rank)
        targets = [*LINEAR, *VOCABULARY]
        paths.append(write_adapter(tmp_path / f"a{i}", tensors, r=rank, target_modules=targets))
    prompts = [
        [random.randrange(3, VOCAB) for _ in range(length)]
        for length in (70, 1, 9, 33, 5, 50, 20, 2)
    ]
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "num_pages": 200,
        "deterministic": True,
        "enable_lora": True,
        "max_loras": 3,
        "lora_projections": (*(name.removesuffix("_proj") for name in LINEAR), *VOCABULARY),
    }
    stop = StopCriteria(max_tokens=8, ignore_eos=True)

    def run(llm: LLM, named: list[bytes], chosen: list[int]) -> list[Any]:
        adapters = [named[i % len(named)] for i in chosen]
        samples = llm.generate([prompts[i] for i in chosen], None, stop, 3, adapters)
        return [[(t.token_id, t.logprob, t.top) for t in sample.logprobs] for sample in samples]

    everyone = list(range(len(prompts)))
    with one_thread(), LLM(path, **settings) as llm:
        named = [b"", *(llm.load_adapter(adapter) for adapter in paths)]
        together = run(llm, named, everyone)
        plain = run(llm, [b""], everyone)
    assert [a == b for a, b in zip(together, plain, strict=True)] == [i % 4 == 0 for i in everyone]
    steps = {"max_running_requests": 8, "max_step_tokens": 32, "prefill_chunk_tokens": 16}
    with one_thread(), LLM(path, **settings, **steps) as llm:
        named = [b"", *reversed([llm.load_adapter(adapter) for adapter in reversed(paths)])]
        assert run(llm, named, everyone) == together
        assert [run(llm, named, [i])[0] for i in everyone] == together


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_what_is_computed_in_another_order_is_named_apart(kind: str, tmp_path: Path) -> None:
    """Native operations of a CPU compute decoders in one order in any case, but not encoders."""
    path = make_tiny(kind, tmp_path) if kind == "llama" else make_encoder(kind, tmp_path, 1)
    usual, fixed = load_model(path, "float32"), load_model(path, "float32", is_fixed=True)
    assert (usual.digest != fixed.digest) == (kind == "bert")


@pytest.mark.parametrize("missing", ["compiler", "attention"])
def test_the_flag_is_refused_elsewhere(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("llama", tmp_path, head_dim=24 if missing == "compiler" else 20)
    if missing == "compiler":
        monkeypatch.setattr(device, "native_cpu", lambda: None)
    config = EngineConfig(
        model_dir=path, dtype="float32", num_pages=16, transport="data", deterministic=True
    )
    with one_thread(), pytest.raises(ConfigError, match="deterministic"):
        parts.load_parts(config)
