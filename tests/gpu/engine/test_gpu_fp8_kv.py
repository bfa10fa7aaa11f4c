"""K and V in FP8 on a GPU: attention against float64, and a model against itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.engine.base.errors import ConfigError
from weft.engine.base.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.kernels.attention import (
    AttentionSpec,
    GroupStep,
    paged_attention,
    paged_attention_reference,
)
from weft.kernels.fp8_kv import SCALE_BYTES, dequantised, parts_of
from weft.kernels.quantised import FP8
from weft.kernels.rope import rope_and_cache
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.models.float32_reference import reference_logits, reference_model
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BF16 = torch.bfloat16


def make_pool(pages: int) -> torch.Tensor:
    shape = (pages, KV_HEADS, 2, 2, PAGE, DIM + SCALE_BYTES)
    pool = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    numbers, scales = parts_of(pool)
    drawn = torch.randn(numbers.shape, device="cuda").mul_(100).to(FP8)
    numbers.view(torch.uint8).copy_(drawn.view(torch.uint8))
    scales.copy_(torch.rand(scales.shape, device="cuda") / 60)
    return pool


@pytest.mark.parametrize(
    "lengths", [[(1, 700), (1, 33), (1, 2000)], [(200, 333), (1, 90), (64, 64)], [(1, 65536)]]
)
def test_attention(lengths: list[tuple[int, int]]) -> None:
    fresh_seed()
    q_lens = torch.tensor([length for length, _ in lengths])
    kv_lens = torch.tensor([length for _, length in lengths]).int().cuda()
    cu = torch.cat((torch.zeros(1), q_lens.cumsum(0))).int().cuda()
    per = -(-int(kv_lens.max()) // PAGE)
    pool = make_pool(1 + per * len(lengths))
    table = (1 + torch.randperm(per * len(lengths))).view(-1, per).int().cuda()
    q = torch.randn(int(q_lens.sum()), HEADS, DIM, device="cuda", dtype=BF16)
    places = torch.arange(len(q), device="cuda")
    step = GroupStep(table, places, cu, kv_lens, int(q_lens.max()), int(kv_lens.max()))
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5)
    out = paged_attention(q, pool, 1, spec, step)
    kept = dequantised(pool, torch.float32)
    exact = paged_attention_reference(q.double(), kept.double(), 1, spec, step)
    peer = paged_attention_reference(q, kept.to(BF16), 1, spec, step)
    assert_as_exact(out, peer, exact, factor=3.0)


def test_vectors_are_rounded_to_their_nearest_numbers() -> None:
    fresh_seed()
    rows, pool = 100, make_pool(20)
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
    assert ((found - wanted).abs() <= wanted.abs() / 16 * 1.01 + most * 2.0**-18).all()


def test_a_model(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, random.randrange(10**6), head_dim=64)
    lengths = (1, 7, 33, 150, 300, *[random.randrange(2, 40) for _ in range(10)])
    prompts = [[random.randrange(3, 500) for _ in range(length)] for length in lengths]
    stop, greedy = StopCriteria(max_tokens=30, ignore_eos=True), SamplingParams(temperature=0.0)
    settings = {"device": "cuda", "dtype": "bfloat16", "num_pages": 400, "kv_dtype": "fp8_e4m3"}
    with LLM(path, **settings, poison_free_pages=True) as llm:
        assert llm.engine._executor.pool.dtype == torch.uint8
        tokens = [sample.token_ids for sample in llm.generate(prompts, greedy, stop)]
        again = [sample.token_ids for sample in llm.generate(prompts, greedy, stop)]
    model, far, count = reference_model(path, BF16), 0, 0
    for prompt, answers in zip(prompts, (*zip(tokens, again, strict=True),), strict=True):
        for answer in answers:
            logits = reference_logits(model, prompt, answer)
            chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
            far += int((logits.max(-1).values - chosen > 0.25 * logits.std(-1)).sum())
            count += len(answer)
    assert far < 0.02 * count, (far, count)


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, random.randrange(10**6))
    for settings, problem in (
        ({"device": "cuda", "dtype": "float32"}, "activations in float32"),
        ({"device": "cpu"}, "auto on CPUs"),
        ({"device": "cuda", "deterministic": True}, "auto with deterministic"),
    ):
        with pytest.raises(ConfigError, match=f"kv_dtype.*{problem}"):
            LLM(path, num_pages=40, kv_dtype="fp8_e4m3", **settings)
