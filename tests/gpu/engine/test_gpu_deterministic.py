"""Deterministic mode on a GPU: the same bits alone, in a batch of 64, in chunks, with drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.contract.errors import ConfigError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.linear import gpu_fp8 as fp8_linear
from weft.kernels.ops.linear import triton_fixed as fixed
from weft.kernels.ops.linear.gpu import linear
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.lora import add_embedding_lora, sort_tokens
from weft.kernels.ops.lora.spec import ExpertAddition, LoraAddition, LoraSegments
from weft.kernels.ops.moe import gpu as gpu_moe
from weft.kernels.ops.moe import route
from weft.kernels.ops.moe.spec import Routing, StackedWeight
from weft.kernels.ops.moe.triton_combine import NormAfter
from weft.kernels.ops.norm.triton_rms import add_rms_norm, rms_norm
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Blocks, Fp8Channels, Fp8Experts
from weft.testing.engine.drafters import KnownDrafter, speculate, texts_of
from weft.testing.kernels.attention_cases import (
    LAYER,
    Geometry,
    eager_attention,
    exact_attention,
    in_parts,
    make_case,
)
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import (
    LoraCase,
    Shared,
    draw_slots,
    make_expert_lora,
    make_lora,
)
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.tiny_adapters import (
    adapter_tensors,
    make_expert_adapter,
    vocabulary_tensors,
    write_adapter,
)
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

CUDA = "cuda"
VOCAB = 517
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "head_dim": 64}
"""At which cuBLAS and our own kernels cut products by their rows."""
MIXTURE = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
RANKS = [0, 8, 16, 5, 40, 64, 1]
"""Of adapters, by slot."""


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


def make_model(
    kind: str, folder: Path, seed: int, layout: str | None, overrides: dict[str, Any]
) -> Path:
    """A tiny model; unless `layout` is None, its weights are FP8 with scales in this layout."""
    path = make_tiny(kind, folder / "model", seed, **SIZES, **overrides)
    return path if layout is None else fp8_copy(path, folder / layout, layout)[0]


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


def bits(samples: list[GeneratedSample]) -> list[list[Any]]:
    """Tokens with their log-probabilities and those of the likeliest."""
    return [[(t.token_id, t.logprob, t.top) for t in sample.logprobs] for sample in samples]


class Requests:
    """64 of them, which use the model and these adapters in turn."""

    def __init__(self, adapters: Sequence[Path] = ()) -> None:
        self.prompts = random_prompts()
        self.sampling = sampling_of(self.prompts)
        self._adapters = adapters
        self._named: list[bytes] = [b""]

    def load(self, llm: LLM, order: Sequence[int]) -> None:
        """Loads the adapters, each of which gets its place on the device in this order."""
        loaded = {i: llm.load_adapter(self._adapters[i], is_pinned=True) for i in order}
        self._named = [b"", *(loaded[i] for i in sorted(loaded))]

    def run(
        self, llm: LLM, chosen: Sequence[int] = range(64), *, is_adapted: bool = True
    ) -> list[GeneratedSample]:
        """Some of them together."""
        picked = [self.prompts[i] for i in chosen]
        named = [self._named[i % len(self._named)] if is_adapted else b"" for i in chosen]
        sampling = [self.sampling[i] for i in chosen]
        return llm.generate(picked, sampling, STOP, top_logprobs=3, adapters=named)

    def drafter(self, samples: list[GeneratedSample]) -> KnownDrafter:
        """Drafts what is known to follow, with mistakes."""
        texts: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for prompt, drawn, sample in zip(self.prompts, self.sampling, samples, strict=True):
            texts |= texts_of([prompt], [[sample]], drawn.seed)
        return KnownDrafter(texts, VOCAB, 0.8)


@pytest.mark.parametrize(
    ("kind", "overrides", "layout"),
    [
        ("llama", {}, None),
        ("qwen3", {}, None),
        ("mistral", {"sliding_window": 100}, None),
        ("qwen3_moe", MIXTURE, None),
        ("llama", {}, "blocks"),
        ("llama", {}, "channel"),
        ("qwen3_moe", MIXTURE, "blocks"),
        ("qwen3_moe", MIXTURE, "channel"),
    ],
)
def test_requests_are_the_same_bits_in_any_company(
    kind: str, overrides: dict[str, Any], layout: str | None, tmp_path: Path
) -> None:
    path = make_model(kind, tmp_path, random.randrange(10**6), layout, overrides)
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


def write_adapters(
    folder: Path, model_dir: Path, seed: int, part: str
) -> tuple[list[Path], tuple[str, ...]]:
    """Six of several ranks, and the projections that they change."""
    config, ranks = json.loads((model_dir / "config.json").read_text()), (8, 16, 5, 40, 24, 1)
    if part.endswith("experts"):
        is_shared = part == "shared_experts"
        return [
            make_expert_adapter(folder / f"a{i}", model_dir, seed + i, rank, is_shared=is_shared)
            for i, rank in enumerate(ranks)
        ], ("v", "router", part)
    dense = ("q", "k", "v", "o", "gate", "up", "down")
    vocabulary = ("embed_tokens", "lm_head") if part == "vocabulary" else ()
    paths = []
    for i, rank in enumerate(ranks):
        tensors = adapter_tensors(config, seed + i, rank=rank)
        if vocabulary:
            tensors |= vocabulary_tensors(config, seed + i, rank=rank)
        targets = [*(f"{name}_proj" for name in dense), *vocabulary]
        paths.append(write_adapter(folder / f"a{i}", tensors, r=rank, target_modules=targets))
    return paths, (*dense, *vocabulary)


@pytest.mark.parametrize(
    ("kind", "overrides", "part", "layout"),
    [
        ("llama", {}, "vocabulary", None),
        ("qwen3", {}, "", None),
        ("qwen3_moe", MIXTURE, "experts", None),
        ("qwen3_moe", MIXTURE, "shared_experts", None),
        ("qwen3", {}, "", "blocks"),
        ("qwen3_moe", MIXTURE, "experts", "blocks"),
    ],
)
def test_requests_with_adapters_are_the_same_bits_in_any_company(
    kind: str, overrides: dict[str, Any], part: str, layout: str | None, tmp_path: Path
) -> None:
    """Whatever adapters there are beside theirs, and wherever on the device these are."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    random.seed(seed)
    path = make_model(kind, tmp_path, seed, layout, overrides)
    adapters, projections = write_adapters(tmp_path, path, seed, part)
    requests, alone, settings = Requests(adapters), [*range(9), 63], {}
    settings = {
        "enable_lora": True,
        "max_loras": 6,
        "lora_memory_bytes": 256 << 20,
        "lora_projections": projections,
    }
    with make_llm(path, **settings) as llm:
        requests.load(llm, range(6))
        expected = bits([requests.run(llm, [i])[0] for i in alone])
        samples = requests.run(llm)
        plain = bits(requests.run(llm, alone, is_adapted=False))
    together = bits(samples)
    assert [together[i] for i in alone] == expected
    for i, adapted, other in zip(alone, expected, plain, strict=True):
        assert (adapted == other) == (i % 7 == 0), "adapters change nothing, or the model's own"
    steps = {"max_step_tokens": 96, "prefill_chunk_tokens": 48, "cuda_graphs": False}
    with make_llm(path, **settings, **steps) as llm:
        requests.load(llm, [4, 2, 5, 0, 3, 1])
        assert bits(requests.run(llm)) == together
    with make_llm(path, **settings, drafter="ngram", prefix_cache=True) as llm:
        requests.load(llm, [5, 4, 3, 2, 1, 0])
        speculate(llm.engine, requests.drafter(samples), (2, 5))
        assert bits([requests.run(llm, [i])[0] for i in alone]) == expected
        assert bits(requests.run(llm)) == together
        assert llm.engine.counters()["accepted_tokens"] > 0
    with make_llm(path, **settings, deterministic=False) as llm:
        requests.load(llm, range(6))
        assert bits(requests.run(llm)) != together, "the comparison sees nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (70, 200), (4096, 100), (4096, 128)])
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


def draw_fp8(*shape: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers and scales, of blocks of so many rows; 0: of rows."""
    *_, n, k = shape
    data = (torch.randn(*shape, device=CUDA) * 100).clamp(-448, 448).to(FP8)
    of = (-(-n // block_rows), -(-k // FP8_GROUP)) if block_rows else (n,)
    return data, (0.5 + torch.rand(*shape[:-2], *of, device=CUDA)) / (100 * k**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_rows", [0, 32, 128])
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (77, 208), (4096, 100), (512, 14336)])
def test_rows_of_products_with_fp8_weights_are_the_same_bits(
    n: int, k: int, block_rows: int, dtype: torch.dtype
) -> None:
    data, scales = draw_fp8(n, k, block_rows=block_rows)
    matrix = Fp8Blocks(data, scales, block_rows) if block_rows else Fp8Channels(data, scales)
    w = LinearWeight(n, k, dtype, False, matrix, torch.randn(n, device=CUDA).to(dtype), True)
    x, residual = (torch.randn(500, size, device=CUDA).to(dtype) for size in (k, n))

    def run(begin: int, end: int) -> torch.Tensor:
        return fp8_linear.linear(x[begin:end].clone(), w, residual[begin:end].clone())

    whole, wide = run(0, 500), matrix.dequantised(torch.float32).double()
    exact = x.double() @ wide.T + w.bias + residual
    # FP8 keeps four significant bits of a number, so rounded rows are off by a few per cent.
    assert (whole.double() - exact).norm() < 0.05 * exact.norm()
    for begin, end in ((0, 1), (499, 500), (5, 8), (30, 46), (30, 47), (7, 71), (100, 301)):
        assert torch.equal(run(begin, end), whole[begin:end]), (begin, end)


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "width", "block_rows"),
    [
        (128, 8, 2048, 768, None),
        (9, 3, 520, 72, None),
        (128, 8, 2048, 768, 128),
        (128, 8, 2048, 768, 0),
        (9, 3, 528, 96, 32),
    ],
)
def test_rows_of_experts_are_the_same_bits(
    experts: int, top_k: int, hidden: int, width: int, block_rows: int | None
) -> None:
    """With and without the norm that follows, of shapes whose tiles were measured and others; in
    bfloat16, and in FP8 with scales of rows (0) and of blocks.
    """
    rows = 1500
    x, residual = (torch.randn(rows, hidden, device=CUDA).bfloat16() for _ in range(2))

    def stack(n: int, k: int) -> StackedWeight:
        if block_rows is None:
            return (torch.randn(experts, n, k, device=CUDA) / k**0.5).bfloat16()
        return Fp8Experts(*draw_fp8(experts, n, k, block_rows=block_rows), block_rows)

    w13, w2 = stack(2 * width, hidden), stack(hidden, width)
    router, gain = torch.randn(experts, hidden, device=CUDA).bfloat16(), torch.ones(hidden).cuda()

    def run(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        part, stream = x[begin:end].clone(), residual[begin:end].clone()
        logits = fixed.fixed_linear(part, router, None, None, torch.float32)
        routed = route(logits, top_k, renormalise=True)
        out = gpu_moe.moe(part, *routed, w13, w2, stream, is_fixed=True)
        after = NormAfter(stream, gain.bfloat16(), 1e-6)
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


PIECES = ((0, 1), (699, 700), (5, 8), (30, 46), (30, 47), (7, 71), (100, 401), (3, 690))
"""Of 700 rows, by themselves."""


def segments_of(slots: list[int]) -> LoraSegments:
    """Of a step; with segments that nobody is in, as in a captured one."""
    host = sort_tokens(np.array(slots, np.int32), len(RANKS))
    return LoraSegments(*(torch.from_numpy(array).to(CUDA) for array in host))


def check_pieces(
    slots: list[int], run: Callable[[slice, LoraSegments], torch.Tensor]
) -> torch.Tensor:
    """All rows, any piece of which is the same bits by itself."""
    whole = run(slice(None), segments_of(slots))
    for begin, end in PIECES:
        piece = run(slice(begin, end), segments_of(slots[begin:end]))
        assert torch.equal(piece, whole[begin:end]), (begin, end)
    return whole


def add_all(
    cases: list[LoraCase], out: torch.Tensor, x: torch.Tensor, slots: list[int]
) -> torch.Tensor:
    """Adapter by adapter, in the dtype of `x`."""
    out, of_rows = out.clone(), torch.tensor(slots, device=x.device)
    for case in cases:
        columns = out[:, case.weights.column :][:, : case.weights.out_features]
        for (_, slot), pair in case.plain.items():
            a, b = (half.to(x.dtype) for half in pair)
            columns[of_rows == slot] += (x[of_rows == slot] @ a.T) @ b.T
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("k", "widths"), [(4096, (4096, 1024, 1024)), (14336, (4096,)), (577, (301, 77))]
)
def test_rows_of_products_with_adapters_are_the_same_bits(
    k: int, widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Rows of any adapters, or of none, with a residual taken along too."""
    fresh_seed()
    cases = [
        make_lora(k, n, [0, *random.sample(RANKS[1:], 6)], dtype, column=sum(widths[:part])).to(
            CUDA
        )
        for part, n in enumerate(widths)
    ]
    columns, slots = sum(widths), draw_slots(700, len(RANKS))
    x, residual = (torch.randn(700, size, device=CUDA).to(dtype) for size in (k, columns))
    weight = (torch.randn(columns, k, device=CUDA) / k**0.5).to(dtype)
    w = LinearWeight(columns, k, dtype, False, PlainForm(weight), None, is_fixed=True)

    def run(rows: slice, segments: LoraSegments, *, has_residual: bool = False) -> torch.Tensor:
        added = LoraAddition(tuple(case.weights for case in cases), 0, segments)
        stream = residual[rows].clone() if has_residual else None
        return linear(x[rows].clone(), w, stream, lora=added)

    whole = check_pieces(slots, run)
    exact = add_all(cases, x.double() @ weight.double().T, x.double(), slots)
    assert_as_exact(whole, add_all(cases, x @ weight.T, x, slots), exact)
    base = [row for row, slot in enumerate(slots) if slot == 0]
    plain = fixed.fixed_linear(x, weight, None, None, dtype)
    assert torch.equal(whole[base], plain[base])
    with_residual = check_pieces(slots, lambda *given: run(*given, has_residual=True))
    assert torch.equal(with_residual, whole + residual)


def test_rows_of_embeddings_with_adapters_are_the_same_bits() -> None:
    fresh_seed()
    vocabulary, hidden, slots = 1000, 4096, draw_slots(700, len(RANKS))
    case = make_lora(vocabulary, hidden, RANKS, torch.bfloat16).to(CUDA)
    ids = torch.randint(vocabulary, (700,), device=CUDA)
    before = torch.randn(700, hidden, device=CUDA).bfloat16()

    def run(rows: slice, segments: LoraSegments) -> torch.Tensor:
        out = before[rows].clone()
        add_embedding_lora(out, ids[rows].clone(), LoraAddition((case.weights,), 0, segments))
        return out

    whole = check_pieces(slots, run)
    one_hot = torch.nn.functional.one_hot(ids, vocabulary)
    exact = add_all([case], before.double(), one_hot.double(), slots)
    assert_as_exact(whole, add_all([case], before, one_hot.bfloat16(), slots), exact)


@pytest.mark.parametrize("shared", [("a", "b"), (None, None)])
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "width"), [(64, 8, 2048, 768), (9, 3, 520, 72)]
)
def test_rows_of_experts_with_adapters_are_the_same_bits(
    experts: int, top_k: int, hidden: int, width: int, shared: tuple[Shared, Shared]
) -> None:
    fresh_seed()
    ranks, (of_up, of_down), slots = [0, 8, 16, 5], shared, draw_slots(700, 4)
    gate, up = (
        make_expert_lora(
            hidden, width, ranks, experts, torch.bfloat16, shared=of_up, column=column
        ).to(CUDA)
        for column in (0, width)
    )
    down = make_expert_lora(width, hidden, ranks, experts, torch.bfloat16, shared=of_down).to(CUDA)
    x, residual = (torch.randn(700, hidden, device=CUDA).bfloat16() for _ in range(2))
    w13 = (torch.randn(experts, 2 * width, hidden, device=CUDA) / hidden**0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, width, device=CUDA) / width**0.5).bfloat16()
    routed = route(torch.randn(700, experts, device=CUDA), top_k, renormalise=True)

    def run(
        rows: slice, segments: LoraSegments | None, *, has_residual: bool = False
    ) -> torch.Tensor:
        added = None
        if segments is not None:
            both = (gate.weights, up.weights)
            added = ExpertAddition(both, (down.weights,), 0, segments.token_slots)
        ids, shares = routed.ids[rows].clone(), routed.weights[rows].clone()
        stream = residual[rows].clone() if has_residual else None
        return gpu_moe.moe(x[rows].clone(), ids, shares, w13, w2, stream, added, is_fixed=True)

    whole, plain = check_pieces(slots, run), run(slice(None), None)
    base = [row for row, slot in enumerate(slots) if slot == 0]
    assert torch.equal(whole[base], plain[base])
    with_residual = check_pieces(slots, lambda *given: run(*given, has_residual=True))
    assert torch.equal(with_residual, whole + residual)
    results = [
        expert_by_expert(x.to(dtype), routed, w13.to(dtype), w2.to(dtype), (gate, up, down), slots)
        for dtype in (torch.bfloat16, torch.double)
    ]
    assert_as_exact(whole, *results)


def expert_by_expert(
    x: torch.Tensor,
    routed: Routing,
    w13: torch.Tensor,
    w2: torch.Tensor,
    cases: tuple[LoraCase, LoraCase, LoraCase],
    slots: list[int],
) -> torch.Tensor:
    """In the dtype of `x`; added up in float64."""
    gate, up, down = cases
    of_rows, total = torch.tensor(slots, device=CUDA), torch.zeros_like(x, dtype=torch.double)

    def add(case: LoraCase, out: torch.Tensor, given: torch.Tensor, which: torch.Tensor) -> None:
        columns = out[:, case.weights.column :][:, : case.weights.out_features]
        for slot in range(1, 4):
            a, b = (half.to(x.dtype) for half in case.plain[expert, slot])
            chosen = of_rows[which] == slot
            columns[chosen] += (given[chosen] @ a.T) @ b.T

    for expert in range(len(w13)):
        rows, places = torch.where(routed.ids == expert)
        both = x[rows] @ w13[expert].T
        for case in (gate, up):
            add(case, both, x[rows], rows)
        to_gate, to_up = both.chunk(2, dim=-1)
        inner = torch.nn.functional.silu(to_gate) * to_up
        out = inner @ w2[expert].T
        add(down, out, inner, rows)
        total.index_add_(0, rows, out.double() * routed.weights[rows, places, None])
    return total.to(x.dtype)


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
        return in_parts(paged_attention)(
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
    ],
)
def test_what_cannot_be_promised_is_refused(
    kind: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = make_tiny(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match=reason):
        make_llm(path, **settings)
