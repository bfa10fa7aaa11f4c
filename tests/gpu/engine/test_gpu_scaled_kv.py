"""K and V in 8 bits on a GPU: attention against float64, and a model against itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.pages.scaled_kv import SCALE_BYTES, dequantised, parts_of
from weft.kernels.ops.rope import rope_and_cache
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.models.float32_reference import reference_logits, reference_model
from weft.testing.models.tiny_adapters import peft_model
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BF16 = torch.bfloat16


def make_pool(pages: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    shape = (pages, KV_HEADS, 2, 2, PAGE, DIM + SCALE_BYTES)
    pool = torch.zeros(shape, dtype=dtype, device="cuda")
    numbers, scales = parts_of(pool)
    drawn = torch.randn(numbers.shape, device="cuda").mul_(40).clamp_(-127, 127).to(numbers.dtype)
    numbers.view(torch.uint8).copy_(drawn.view(torch.uint8))
    scales.copy_(torch.rand(scales.shape, device="cuda") / 60)
    return pool


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fixed": {"is_fixed": True},
    "window": {"window": 100},
    "capped": {"softcap": 20.0, "sinks": True},
}


@pytest.mark.parametrize("kept", [torch.uint8, torch.int8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "lengths", [[(1, 700), (1, 33), (1, 2000)], [(200, 333), (1, 90), (64, 64)], [(1, 65536)]]
)
def test_attention(lengths: list[tuple[int, int]], way: str, kept: torch.dtype) -> None:
    fresh_seed()
    q_lens = torch.tensor([length for length, _ in lengths])
    kv_lens = torch.tensor([length for _, length in lengths]).int().cuda()
    cu = torch.cat((torch.zeros(1), q_lens.cumsum(0))).int().cuda()
    per = -(-int(kv_lens.max()) // PAGE)
    pool = make_pool(1 + per * len(lengths), kept)
    table = (1 + torch.randperm(per * len(lengths))).view(-1, per).int().cuda()
    q = torch.randn(int(q_lens.sum()), HEADS, DIM, device="cuda", dtype=BF16)
    places = torch.arange(len(q), device="cuda")
    step = AttentionMetadata(table, places, cu, kv_lens, int(q_lens.max()), int(kv_lens.max()))
    constants = dict(WAYS[way])
    if constants.pop("sinks", False):
        constants["sinks"] = torch.randn(HEADS, device="cuda")
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, **constants)
    out = paged_attention(q, pool, 1, spec, step)
    vectors = dequantised(pool, torch.float32)
    exact = paged_attention_reference(q.double(), vectors.double(), 1, spec, step)
    peer = paged_attention_reference(q, vectors.to(BF16), 1, spec, step)
    assert_as_exact(out, peer, exact, factor=3.0)
    print(way, kept, lengths, "rms error", relative(out, exact), "bfloat16", relative(peer, exact))


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The root mean square of the error, relative to that of the exact values."""
    return float((found - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


@pytest.mark.parametrize("kept", [torch.uint8, torch.int8])
def test_vectors_are_rounded_to_their_nearest_numbers(kept: torch.dtype) -> None:
    fresh_seed()
    rows, pool = 100, make_pool(20, kept)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, device="cuda", dtype=BF16)
    qkv *= torch.rand(rows, 1, device="cuda").mul_(8).exp2_().to(BF16)
    qkv[7] = 0
    turns = torch.cat((torch.ones(rows, DIM // 2), torch.zeros(rows, DIM // 2)), 1).cuda()
    slots = 16 + torch.randperm(280, device="cuda")[:rows]
    given = (qkv, torch.arange(rows, device="cuda"), turns)
    rope_and_cache(*given, pool, 1, slots, HEADS, KV_HEADS)
    found = dequantised(pool, torch.float32)[slots // PAGE, :, 1, :, slots % PAGE]
    wanted = qkv.view(rows, -1, DIM)[:, HEADS:].float().view(rows, 2, KV_HEADS, DIM).transpose(1, 2)
    most = wanted.abs().amax(-1, keepdim=True)
    # Half a step of three bits of mantissa, or of the smallest numbers.
    bound = wanted.abs() / 16 * 1.01 + most * 2.0**-18
    bound = bound if kept == torch.uint8 else most / 127 * 0.501
    assert ((found - wanted).abs() <= bound).all()


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "chunks": ("qwen3_moe", {"prefill_chunk_tokens": 64, "max_step_tokens": 128}),
    "ngram": ("llama", {"drafter": "ngram"}),
    "trees": ("llama", {"drafter": "eagle3", "draft_width": 3}),
    "windows": ("mistral", {}),
    "int8": ("qwen3", {"kv_dtype": "int8"}),
}


def make_prompts() -> list[list[int]]:
    """Some of them with a common beginning."""
    shared = [random.randrange(3, 500) for _ in range(300)]
    cuts = (0, 0, 20, 150, 300, 0, 0, 290)
    return [shared[:cut] + [random.randrange(3, 500) for _ in range(5)] for cut in cuts]


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str, tmp_path: Path) -> None:
    kind, settings = MODELS[name]
    fields = {"sliding_window": 48} if name == "windows" else {}
    path = make_tiny(kind, tmp_path / "model", random.randrange(10**6), head_dim=64, **fields)
    if settings.get("drafter") == "eagle3":
        settings = {**settings, "draft_dir": make_tiny_draft(tmp_path / "head", path, 1)}
    prompts = make_prompts()
    stop, greedy = StopCriteria(max_tokens=30, ignore_eos=True), SamplingParams(temperature=0.0)
    settings = {"max_running_requests": 8, "num_pages": 400, **settings}
    settings = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "fp8_e4m3", **settings}
    with LLM(path, **settings, poison_free_pages=True) as llm:
        assert llm.engine.parts.local.pool.itemsize == 1
        tokens = [sample.token_ids for sample in llm.generate(prompts, greedy, stop)]
        again = [sample.token_ids for sample in llm.generate(prompts, greedy, stop)]
        assert llm.engine.counters()["prefix_hit_tokens"] > 0
    check_near(path, 2 * prompts, tokens + again)


def check_near(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Fails if many greedy tokens are far from the choice of a model whose KV is not rounded."""
    model, far, count = reference_model(path, BF16), 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = reference_logits(model, prompt, answer)
        chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
        far += int((logits.max(-1).values - chosen > 0.3 * logits.std(-1)).sum())
        count += len(answer)
    print("far", far, "of", count)
    assert far < 0.02 * count, (far, count)


def test_fixed_bits(tmp_path: Path) -> None:
    """Rows read their own K and V in pages, so that chunks and cached pages change no token."""
    path = make_tiny("llama", tmp_path, random.randrange(10**6), head_dim=64)
    prompts, stop = make_prompts(), StopCriteria(max_tokens=20, ignore_eos=True)
    found = []
    for chunk in (512, 48):
        settings = {"prefill_chunk_tokens": chunk, "num_pages": 400, "max_running_requests": 8}
        settings |= {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "fp8_e4m3"}
        with LLM(path, deterministic=True, **settings) as llm:
            for _ in range(2):
                found.append([sample.token_ids for sample in llm.generate(prompts, stop=stop)])
    assert all(tokens == found[0] for tokens in found)
    check_near(path, prompts, found[0])


def test_adapters(tmp_path: Path) -> None:
    """An adapter's tokens are near those of the model into which it is merged."""
    path = make_tiny("llama", tmp_path / "model", random.randrange(10**6), head_dim=64)
    model = peft_model(path, random.randrange(10**6))
    model.save_pretrained(tmp_path / "adapter")
    prompts, stop = make_prompts(), StopCriteria(max_tokens=20, ignore_eos=True)
    settings = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "fp8_e4m3"}
    settings |= {"num_pages": 400, "max_running_requests": 8}
    with LLM(path, enable_lora=True, **settings) as llm:
        name = llm.load_adapter(tmp_path / "adapter")
        samples = llm.generate(prompts, stop=stop, adapters=[name] * len(prompts))
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    check_near(tmp_path / "merged", prompts, [sample.token_ids for sample in samples])
