"""Deterministic mode on a GPU: the same bits alone, in a batch of 64, in chunks, with drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import KnownDrafter, speculate, texts_of
from tiny_models import make_tiny
from weft.engine.errors import ConfigError
from weft.engine.llm import LLM, Sample
from weft.engine.request import SamplingParams, StopCriteria
from weft.kernels.gpu import fixed_linear as fixed

pytestmark = pytest.mark.needs("cuda")

CUDA = "cuda"
VOCAB = 517
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "head_dim": 64}
"""At which cuBLAS and our own kernels cut products by their rows."""


def make_llm(path: Path, **settings: Any) -> LLM:
    values: dict[str, Any] = {
        "device": CUDA,
        "dtype": "bfloat16",
        "num_pages": 1500,
        "max_running_requests": 64,
        "max_step_tokens": 1024,
        "prefill_chunk_tokens": 1024,
        "prefix_cache": False,
        "deterministic": True,
    }
    return LLM(path, **(values | settings))


def random_prompts() -> list[list[int]]:
    """64, a long one, one that spans chunks and one that repeats itself among them."""
    lengths = [700, 130, *(random.randrange(1, 40) for _ in range(61))]
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    return [*prompts, [random.randrange(3, VOCAB) for _ in range(9)] * 12]


def sampling_of(prompts: list[list[int]]) -> list[SamplingParams]:
    """Greedy, drawn, and drawn with filters, in turn."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 6},
    ]
    return [SamplingParams(**kinds[i % 3]) for i in range(len(prompts))]


def bits(samples: list[Sample]) -> list[list[Any]]:
    """Tokens with their log-probabilities and those of the likeliest."""
    return [[(t.token_id, t.logprob, t.top) for t in sample.logprobs] for sample in samples]


class Requests:
    """64 of them."""

    def __init__(self) -> None:
        self.prompts = random_prompts()
        self.sampling = sampling_of(self.prompts)

    def run(self, llm: LLM, chosen: Sequence[int] = range(64)) -> list[Sample]:
        """Some of them together."""
        picked = [self.prompts[i] for i in chosen]
        return llm.generate(picked, [self.sampling[i] for i in chosen], STOP, top_logprobs=3)

    def drafter(self, samples: list[Sample]) -> KnownDrafter:
        """Drafts what is known to follow, with mistakes."""
        texts: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for prompt, drawn, sample in zip(self.prompts, self.sampling, samples, strict=True):
            texts |= texts_of([prompt], [[sample]], drawn.seed)
        return KnownDrafter(texts, VOCAB, 0.8)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_requests_are_the_same_bits_in_any_company(kind: str, tmp_path: Path) -> None:
    path = make_tiny(kind, tmp_path / "model", random.randrange(10**6), **SIZES)
    requests, alone = Requests(), [0, 1, 2, 3, 63]
    with make_llm(path) as llm:
        assert any("deterministic" in notice for notice in llm.engine.info.notices)
        expected = bits([requests.run(llm, [i])[0] for i in alone])
        samples = requests.run(llm)
    together = bits(samples)
    assert [together[i] for i in alone] == expected
    with make_llm(path, max_step_tokens=96, prefill_chunk_tokens=48, cuda_graphs=False) as llm:
        assert bits(requests.run(llm)) == together
    with make_llm(path, drafter="ngram", prefix_cache=True) as llm:
        speculate(llm.engine, requests.drafter(samples), (2, 5))
        assert bits([requests.run(llm, [i])[0] for i in alone]) == expected
        assert bits(requests.run(llm)) == together
        assert llm.engine.counters()["accepted_tokens"] > 0
    with make_llm(path, deterministic=False) as llm:
        assert bits(requests.run(llm)) != together, "the comparison sees nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (70, 200), (128, 100)])
def test_rows_of_products_are_the_same_bits(n: int, k: int, dtype: torch.dtype) -> None:
    rows = 500
    x, weight = torch.randn(rows, k, device=CUDA), torch.randn(n, k, device=CUDA) / k**0.5
    x, weight = x.to(dtype), weight.to(dtype)
    bias, residual = torch.randn(n, device=CUDA).to(dtype), torch.randn(rows, n, device=CUDA)
    residual = residual.to(dtype)
    out = fixed.fixed_linear(x, weight, bias, residual, dtype)
    exact = x.double() @ weight.double().T + bias + residual
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    for begin, end in ((0, 1), (499, 500), (7, 71), (100, 301)):
        part = x[begin:end].clone()
        again = fixed.fixed_linear(part, weight, bias, residual[begin:end].clone(), dtype)
        assert torch.equal(again, out[begin:end])


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("llama", {"dtype": "float32"}, "float32"),
        ("llama", {"enable_lora": True}, "enable_lora"),
        ("qwen3_moe", {}, "experts"),
    ],
)
def test_what_cannot_be_promised_is_refused(
    kind: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = make_tiny(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match=reason):
        make_llm(path, **settings)
