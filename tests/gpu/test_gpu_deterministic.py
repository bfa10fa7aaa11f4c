"""Deterministic mode on a GPU: the same bits alone, in a batch of 64, in chunks, with drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import LAYER, Geometry, eager_attention, exact_attention, make_case
from drafters import KnownDrafter, speculate, texts_of
from kernel_checks import assert_as_exact
from tiny_models import make_tiny
from weft.engine.errors import ConfigError
from weft.engine.llm import LLM, Sample
from weft.engine.request import SamplingParams, StopCriteria
from weft.kernels.attention import paged_attention
from weft.kernels.gpu import fixed_linear as fixed
from weft.kernels.gpu import moe as gpu_moe
from weft.kernels.gpu.norm import add_rms_norm, rms_norm
from weft.kernels.moe import route

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


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 100}),
        ("qwen3_moe", {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384}),
    ],
)
def test_requests_are_the_same_bits_in_any_company(
    kind: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    path = make_tiny(kind, tmp_path / "model", random.randrange(10**6), **SIZES, **overrides)
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
    for begin, end in ((0, 1), (499, 500), (5, 8), (30, 46), (30, 47), (7, 71), (100, 301)):
        part = x[begin:end].clone()
        again = fixed.fixed_linear(part, weight, bias, residual[begin:end].clone(), dtype)
        assert torch.equal(again, out[begin:end])


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "width"), [(128, 8, 2048, 768), (9, 3, 520, 72)]
)
def test_rows_of_experts_are_the_same_bits(
    experts: int, top_k: int, hidden: int, width: int
) -> None:
    """With and without the norm that follows, of shapes whose tiles were measured and others."""
    rows = 1500
    x, residual = (torch.randn(rows, hidden, device=CUDA).bfloat16() for _ in range(2))
    w13 = (torch.randn(experts, 2 * width, hidden, device=CUDA) / hidden**0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, width, device=CUDA) / width**0.5).bfloat16()
    router, gain = torch.randn(experts, hidden, device=CUDA).bfloat16(), torch.ones(hidden).cuda()

    def run(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        part, stream = x[begin:end].clone(), residual[begin:end].clone()
        logits = fixed.fixed_linear(part, router, None, None, torch.float32)
        routed = route(logits, top_k, renormalise=True)
        out = gpu_moe.moe(part, *routed, w13, w2, stream, is_fixed=True)
        after = gpu_moe.NormAfter(stream, gain.bfloat16(), 1e-6)
        normed = gpu_moe.routed_moe(
            part, logits, top_k, w13, w2, after, renormalise=True, is_fixed=True
        )
        assert torch.equal(out, stream)
        assert torch.equal(normed, rms_norm(stream, after.weight, after.eps))
        return out, normed

    whole = run(0, rows)
    for begin, end in ((0, 1), (1499, 1500), (5, 8), (30, 46), (7, 71), (100, 400), (3, 1100)):
        for part, expected in zip(run(begin, end), whole, strict=True):
            assert torch.equal(part, expected[begin:end]), (begin, end)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (8, 8, 80)])
def test_rows_of_attention_are_the_same_bits(heads: int, kv_heads: int, dim: int) -> None:
    """Of a prompt in pieces of any length, and of single rows, which see parts of tiles."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    length, other = 1300, 5000
    geometry = Geometry(heads, kv_heads, dim, 16)
    case = make_case(geometry, [(length, length), (1, other)], torch.bfloat16, CUDA)

    def attend(q: torch.Tensor, kv_lens: list[int], q_lens: list[int]) -> torch.Tensor:
        return paged_attention(
            q.contiguous(),
            case.pool,
            LAYER,
            case.page_table[: len(kv_lens)],
            torch.tensor([0, *q_lens], device=CUDA).cumsum(0).int(),
            torch.tensor(kv_lens, dtype=torch.int32, device=CUDA),
            case.scale,
            max(q_lens),
            max(kv_lens),
            is_fixed=True,
        )

    whole = attend(case.q, [length, other], [length, 1])
    assert_as_exact(whole, eager_attention(case), exact_attention(case))
    begin = 0
    while begin < length:
        # Beside a bound of many segments these are programs of their own.
        end = min(length, begin + random.choice((1, 2, 5, 48, 64, 300)))
        piece = attend(case.q[begin:end], [end], [end - begin])
        assert torch.equal(piece, whole[begin:end]), (begin, end)
        begin = end
    assert torch.equal(attend(case.q[length - 1 :], [length, other], [1, 1]), whole[length - 1 :])


def test_a_residual_is_added_to_the_same_bits_before_a_norm() -> None:
    x, residual = (torch.randn(70, 4096, device=CUDA).bfloat16() for _ in range(2))
    weight = torch.randn(4096, device=CUDA).bfloat16()
    expected = rms_norm(x + residual, weight, 1e-5)
    normed, stream = add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(normed, expected)
    assert torch.equal(stream, x + residual)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("llama", {"dtype": "float32"}, "float32"),
        ("llama", {"enable_lora": True}, "enable_lora"),
    ],
)
def test_what_cannot_be_promised_is_refused(
    kind: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = make_tiny(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match=reason):
        make_llm(path, **settings)
