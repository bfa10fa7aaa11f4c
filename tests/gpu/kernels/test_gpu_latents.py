"""Attention to latents on a GPU, at DeepSeek-V3's sizes, against eager torch in float32."""

from __future__ import annotations

import pytest
import torch
from weft.checkpoint.latent_config import LatentConfig
from weft.engine.model.layers.latent import LatentAttention
from weft.engine.model.layers.layer import Query
from weft.engine.model.layers.rotary import Rotary
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention import (
    attention_before,
    is_faster_uncompressed,
    latent_attention,
    planned,
    read_latents,
    write_latents,
)
from weft.kernels.ops.latent_attention.reference import latent_attention_reference
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.norm import Norm
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.layer_cases import step_of

pytestmark = pytest.mark.needs("cuda")

HEADS, LAYERS = 128, 2
SIZES = LatentConfig(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
DIM = SIZES.kv_rank + SIZES.rope_dim
SPEC = LatentSpec(HEADS, SIZES.kv_rank, 0.05)


def make_step(lengths: list[tuple[int, int]], page: int) -> tuple[AttentionMetadata, torch.Tensor]:
    """Requests of so many new rows and positions, and a pool whose free pages are not finite."""
    counts = [-(-kv // page) for _, kv in lengths]
    order = 1 + torch.randperm(sum(counts), device="cuda").int()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    places = []
    for request, ((q_len, kv), count) in enumerate(zip(lengths, counts, strict=True)):
        table[request, :count], order = order[:count], order[count:]
        at = torch.arange(kv - q_len, kv, device="cuda")
        places.append(table[request, at // page].long() * page + at % page)
    pool = torch.randn(sum(counts) + 3, 1, LAYERS, 1, page, DIM, device="cuda").bfloat16()
    pool[-2:] = float("nan")
    step = AttentionMetadata(
        page_table=table,
        places=torch.cat(places),
        cu_q_lens=torch.tensor([0, *(q for q, _ in lengths)], device="cuda").cumsum(0).int(),
        kv_lens=torch.tensor([kv for _, kv in lengths], device="cuda").int(),
        max_q_len=max(q for q, _ in lengths),
        max_kv_len=max(kv for _, kv in lengths),
    )
    return step, pool


def check(found: torch.Tensor, exact: torch.Tensor) -> None:
    error = float((found.float() - exact).abs().max() / exact.abs().max())
    assert error < 0.01, error


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 700)],
        [(1, 1 + 37 * n) for n in range(70)],
        [(90, 300)],
        [(1, 300), (70, 70), (5, 1000), (1, 1), (2100, 2500)],
    ],
)
def test_rows(lengths: list[tuple[int, int]], page: int) -> None:
    fresh_seed()
    step, pool = make_step(lengths, page)
    q = torch.randn(len(step.places), HEADS, DIM, device="cuda").bfloat16()
    exact = latent_attention_reference(q.float(), pool[:-2].float(), 1, SPEC, step)
    check(latent_attention(q, pool, 1, SPEC, step), exact)
    made = planned(step, q.dtype, SPEC, len(q), pool)
    print("FlashMLA" if made.latents is not None else "no FlashMLA")
    check(latent_attention(q, pool, 1, SPEC, made), exact)
    sums = torch.full(q.shape[:2], -1e38, device="cuda")
    before = latent_attention_reference(q.float(), pool[:-2].float(), 1, SPEC, step, sums)
    has_some = sums > -1e30
    for each in (step, made):
        found, found_sums = attention_before(q, pool, 1, SPEC, each)
        # Of rows with nothing before them the sums alone count.
        check(found * has_some.unsqueeze(2), before)
        assert torch.equal(found_sums > -1e30, has_some)
        assert ((found_sums - sums).abs() < 0.05)[has_some].all()


@pytest.mark.needs("fa3")
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("lengths", "num_earlier"),
    [
        ([(1, 300), (2100, 2100), (50, 50), (1, 1)], 0),
        ([(1, 300), (2000, 2700), (90, 90)], None),
        ([(1, 300), (2000, 2700), (90, 90)], 700),
        ([(40, 3000), (1, 300), (2000, 2700), (1, 1), (90, 90)], 3660),
    ],
)
def test_prompts_by_heads(
    lengths: list[tuple[int, int]], num_earlier: int | None, page: int
) -> None:
    fresh_seed()
    step, pool = make_step(lengths, page)
    step = step._replace(is_cold=num_earlier == 0, num_earlier=num_earlier)
    rows = len(step.places)
    to_keys = torch.randn(HEADS, SIZES.nope_dim, SIZES.kv_rank, device="cuda").bfloat16() / 20
    to_values = torch.randn(HEADS, SIZES.kv_rank, SIZES.value_dim, device="cuda").bfloat16() / 20
    none = LinearWeight(1, 1, torch.bfloat16, False, PlainForm(to_keys[0, :1, :1]), None)
    layer = LatentAttention(
        SIZES,
        1,
        Rotary(torch.zeros(1, SIZES.rope_dim, device="cuda"), 0),
        SPEC.scale,
        down_proj=none,
        q_norm=None,
        q_proj=None,
        kv_norm=Norm(to_keys[0, 0], 1e-6),
        absorbed=(to_keys, to_values),
        o_proj=none,
    )
    q = torch.randn(rows, HEADS, SIZES.nope_dim + SIZES.rope_dim, device="cuda").bfloat16()
    assert is_faster_uncompressed(q.dtype, q.shape[2], SIZES.value_dim, rows)
    whole = step_of(torch.zeros(rows, dtype=torch.int64, device="cuda"), step)
    found = layer.attend(Query(q), whole, pool).x.view(rows, HEADS, -1)
    absorbed = torch.einsum("thn,hnr->thr", q[..., :128].float(), to_keys.float())
    asked = torch.cat((absorbed, q[..., 128:].float()), dim=2)
    mixed = latent_attention_reference(asked, pool[:-2].float(), 1, SPEC, step)
    check(found, torch.einsum("thr,hrv->thv", mixed, to_values.float()))


@pytest.mark.parametrize("kept", [torch.int8, torch.uint8])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 1 + 37 * n) for n in range(70)], [(1, 300), (70, 70), (5, 1000), (1, 1), (300, 900)]],
)
def test_latents_in_8_bits(lengths: list[tuple[int, int]], kept: torch.dtype) -> None:
    """The write is that of a CPU but for neighbours, and attention is to what is kept."""
    fresh_seed()
    step, floats = make_step(lengths, 16)
    places = torch.arange((len(floats) - 2) * 16, device="cuda")
    vectors = floats[:-2, 0, 1, 0].flatten(0, 1)
    vectors[:, SIZES.kv_rank :] *= 30
    shape = (*floats.shape[:-1], DIM + 4)
    pool, on_host = torch.zeros(shape, dtype=kept, device="cuda"), torch.zeros(shape, dtype=kept)
    write_latents(vectors, pool, 1, SPEC, places)
    write_latents(vectors.cpu(), on_host, 1, SPEC, places.cpu())
    found = read_latents(pool, 1, SPEC, places, torch.float32)
    expected = read_latents(on_host, 1, SPEC, places.cpu(), torch.float32).cuda()
    assert (found == expected).double().mean() > 0.998
    assert ((found - vectors).abs() <= 0.07 * vectors.abs().amax(1, keepdim=True)).all()
    assert not pool[:, 0, 0].any()
    q = torch.randn(len(step.places), HEADS, DIM, device="cuda").bfloat16()
    exact = latent_attention_reference(q.float(), pool, 1, SPEC, step)
    check(latent_attention(q, pool, 1, SPEC, step), exact)
    made = planned(step, q.dtype, SPEC, len(q), pool)
    assert made.latents is None
    sums = torch.full(q.shape[:2], -1e38, device="cuda")
    before = latent_attention_reference(q.float(), pool, 1, SPEC, step, sums)
    found, found_sums = attention_before(q, pool, 1, SPEC, made)
    has_some = sums > -1e30
    check(found * has_some.unsqueeze(2), before)
    assert ((found_sums - sums).abs() < 0.05)[has_some].all()
