"""Routers, gates and biases other than Qwen3-MoE's: on the CPU, and by Triton's interpreter."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.phimoe.modeling_phimoe import sparsemixer
from weft.kernels.ops.activation.spec import GELU_TANH, SILU, Gating
from weft.kernels.ops.linear import gate_up_silu
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.moe import moe, route
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.reference import route_reference
from weft.kernels.ops.moe.spec import CYCLES, ExpertWeights, RouterForm, Routing, SparseMlpWeight
from weft.kernels.ops.stream.additions import Combine, Normed
from weft.kernels.shared.formats.int_groups import mxfp4_groups
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.near_ties import clear_logits, draw_clear

GPT_OSS = Gating(alpha=1.702, limit=1.1, offset=1.0)
LIMITED = Gating(limit=0.7, gate_limit=0.9)
GATINGS = {"gpt-oss": GPT_OSS, "gelu": GELU_TANH, "limited": LIMITED}


def activated(gate: torch.Tensor, up: torch.Tensor, gating: Gating) -> torch.Tensor:
    """Each form as it is defined."""
    if gating is GELU_TANH:
        return F.gelu(gate, approximate="tanh") * up
    if gating is LIMITED:
        return F.silu(gate.clamp(max=0.9)) * up.clamp(-0.7, 0.7)
    gate, up = gate.clamp(max=1.1), up.clamp(-1.1, 1.1)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


FORMS = {
    "sigmoid": (7, 3, RouterForm(is_sigmoid=True, scale=1.8)),
    "corrected": (20, 4, RouterForm(is_sigmoid=True, correction=0.4 * torch.randn(20))),
    "best-two": (
        18,
        5,
        RouterForm(
            is_sigmoid=True,
            correction=0.4 * torch.randn(18),
            groups=6,
            kept_groups=2,
            summed=2,
            scale=2.5,
        ),
    ),
    "best-one": (20, 6, RouterForm(groups=5, kept_groups=2, scale=16.0)),
    "factors": (9, 3, RouterForm(factors=torch.rand(9) + 0.5)),
    "corrected-softmax": (9, 2, RouterForm(correction=0.2 * torch.randn(9), least_sum=1e-12)),
}


def expected_routing(
    logits: torch.Tensor, top_k: int, form: RouterForm, *, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, in float64 and plain Python."""
    all_ids, all_shares = [], []
    for row in logits.double():
        scores = (row.sigmoid() if form.is_sigmoid else row.softmax(dim=0)).tolist()
        worth = list(scores)
        if form.correction is not None:
            worth = [a + b for a, b in zip(worth, form.correction.tolist(), strict=True)]
        size = len(worth) // form.groups
        groups = [sorted(worth[g * size : (g + 1) * size]) for g in range(form.groups)]
        sums = [sum(group[-form.summed :]) for group in groups]
        kept = sorted(range(form.groups), key=lambda g: -sums[g])[: form.kept_groups]
        allowed = [e for e in range(len(worth)) if e // size in kept]
        ids = sorted(sorted(allowed, key=lambda e: -worth[e])[:top_k])
        shares = [scores[e] for e in ids]
        total = max(sum(shares), form.least_sum) if renormalise else 1.0
        all_ids.append(ids)
        factors = [1.0] * len(worth) if form.factors is None else form.factors.tolist()
        scaled = zip(shares, ids, strict=True)
        all_shares.append([form.scale * factors[e] * share / total for share, e in scaled])
    return torch.tensor(all_ids, dtype=torch.int32), torch.tensor(all_shares)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_routing(name: str, renormalise: bool) -> None:
    fresh_seed()
    experts, top_k, form = FORMS[name]
    logits = clear_logits(40, experts, top_k, form, spread=2.0)
    ids, shares = route(logits, top_k, renormalise=renormalise, form=form)
    expected = expected_routing(logits, top_k, form, renormalise=renormalise)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(shares, expected[1])


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("name", FORMS)
def test_routing_on_a_gpu(name: str, tmp_path: Path) -> None:
    fresh_seed()
    experts, top_k, form = FORMS[name]
    logits = clear_logits(11, experts, top_k, form, spread=2.0)
    with kernel_module("moe.triton_route", tmp_path) as module:
        for renormalise in (False, True):
            expected = expected_routing(logits, top_k, form, renormalise=renormalise)
            alone = module.route(logits, top_k, renormalise, form)
            sorted_too = module.route_and_sort(
                logits, top_k, 16, renormalise=renormalise, form=form
            )
            for ids, shares, *_ in (alone, sorted_too):
                assert torch.equal(ids, expected[0])
                torch.testing.assert_close(shares, expected[1])


@pytest.mark.needs("triton-interpreter")
@pytest.mark.full_after(1)
@pytest.mark.parametrize("name", FORMS)
def test_routing_to_copies_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Experts whose copies on two ranks take turns, and the rows' experts beside their places."""
    fresh_seed()
    experts, top_k, form = FORMS[name]
    logits, own = clear_logits(11, experts, top_k, form, spread=2.0), experts - experts // 4
    places = torch.randperm(experts, dtype=torch.int32).clamp_(max=own).repeat(CYCLES, 1)
    shared = torch.rand(experts) < 0.5
    places[1::3, shared] = own
    with kernel_module("moe.triton_route", tmp_path) as module:
        for placement in (None, places[0].contiguous(), places):
            chosen = [torch.full((15, top_k), -1, dtype=torch.int32) for _ in range(3)]
            expected = route(
                logits, top_k, renormalise=True, form=form, placement=placement, chosen=chosen[0]
            )
            assert torch.equal(
                chosen[0][:11], route_reference(logits, top_k, renormalise=True, form=form).ids
            )
            assert (chosen[0][11:] == -1).all()
            alone = module.route(logits, top_k, True, form, placement, chosen[1])
            size = experts if placement is None else own
            *together, blocks = module.route_and_sort(
                logits, top_k, 16, renormalise=True, form=form, placement=placement, own=size,
                chosen=chosen[2],
            )  # fmt: skip
            assert torch.equal(chosen[1], chosen[0])
            assert torch.equal(chosen[2], chosen[0])
            for ids, shares in (alone, together):
                assert torch.equal(ids, expected.ids)
                torch.testing.assert_close(shares, expected.weights)
            found = set[tuple[int, int]]()
            flat = expected.ids.flatten().tolist()
            for expert, begin, end in zip(*(t.tolist() for t in blocks[1:]), strict=True):
                if expert < size:
                    pairs = blocks.order[begin : min(end, begin + 16)].tolist()
                    assert all(flat[pair] == expert for pair in pairs)
                    found |= {(pair, expert) for pair in pairs}
            assert found == {(pair, place) for pair, place in enumerate(flat) if place < size}


def test_sparse_mixer_chooses_one_expert_after_another() -> None:
    """As transformers' function for Phi-3.5-MoE does, where no random numbers are drawn."""
    fresh_seed()
    jitter, logits = 0.05, torch.randn(40, 9)
    ids, shares = route(logits, 2, renormalise=False, form=RouterForm(jitter=jitter))
    expected, chosen = sparsemixer(logits, jitter, training=False)
    order = chosen.argsort(dim=-1)
    assert torch.equal(ids, chosen.gather(-1, order).to(torch.int32))
    torch.testing.assert_close(shares, expected.gather(-1, order))


@pytest.mark.parametrize("top_k", [1, 3])
def test_shares_that_scale_the_input(top_k: int) -> None:
    """As if each chosen expert had its own rows."""
    fresh_seed()
    case = Experts(9, torch.float32, SILU)
    form = RouterForm(is_sigmoid=True, scales_input=True)
    residual = torch.randn(9, 40)

    def run(router: torch.Tensor) -> torch.Tensor:
        w = SparseMlpWeight(pack_linear(router), case.packed(), top_k, renormalise=False, form=form)
        return Combine(Normed(case.x), w, None, 0).added_to(residual.clone())

    router = draw_clear(lambda: torch.randn(5, 40) / 4, run)
    out = run(router)
    logits = case.x @ router.t()
    expected = residual.clone()
    for row, scores in enumerate(logits):
        for expert in scores.topk(top_k).indices.tolist():
            x = case.x[row] * scores[expert].sigmoid()
            gate, up = (case.w13[expert] @ x + case.biases[0][expert]).chunk(2)
            expected[row] += case.w2[expert] @ (F.silu(gate) * up) + case.biases[1][expert]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_a_correction_that_is_no_number_is_not_hidden() -> None:
    form = RouterForm(is_sigmoid=True, correction=torch.zeros(6), groups=3, kept_groups=2)
    logits = torch.randn(1, 6)
    logits[0, 4] = math.nan
    ids, shares = route(logits, 2, renormalise=True, form=form)
    assert 4 in ids[0].tolist()
    assert shares.isnan().all()


class Experts:
    """Random experts with biases and a limited gate."""

    def __init__(self, rows: int, dtype: torch.dtype, gating: Gating) -> None:
        self.gating = gating
        experts, hidden, inner, top_k = 5, 40, 24, 3
        self.x = torch.randn(rows, hidden).to(dtype)
        self.w13 = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
        self.w2 = (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype)
        self.biases = (
            torch.randn(experts, 2 * inner).to(dtype),
            torch.randn(experts, hidden).to(dtype),
        )
        ids = torch.stack([torch.randperm(experts)[:top_k].sort().values for _ in range(rows)])
        self.routing = Routing(ids.int(), torch.rand(rows, top_k))

    def packed(self) -> ExpertWeights:
        pairs = list(zip(self.w13, self.w2, strict=True))
        return pack_experts(pairs, len(pairs), gating=self.gating, biases=self.biases)

    def compute(self, dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(self.x.shape, dtype=dtype)
        x, w13, w2, b13, b2 = (t.to(dtype) for t in (self.x, self.w13, self.w2, *self.biases))
        for row, (ids, shares) in enumerate(zip(*self.routing, strict=True)):
            for expert, share in zip(ids.tolist(), shares.to(dtype), strict=True):
                gate, up = (w13[expert] @ x[row] + b13[expert]).chunk(2)
                inner = activated(gate, up, self.gating)
                out[row] += share * (w2[expert] @ inner + b2[expert])
        return out


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_with_biases_and_other_gates(dtype: torch.dtype, gating: str) -> None:
    fresh_seed()
    case = Experts(9, dtype, GATINGS[gating])
    out = moe(case.x, case.routing, case.packed())
    assert_as_exact(out, case.compute(dtype), case.compute(torch.float64), slack=1e-5)


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize(
    ("rows", "gating"),
    [
        (2, "gpt-oss"),
        (20, "gpt-oss"),
        (2, "gelu"),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, "limited"), (20, "gelu"))),
    ],
)
def test_such_experts_on_a_gpu(rows: int, gating: str, tmp_path: Path) -> None:
    fresh_seed()
    case = Experts(rows, torch.float32, GATINGS[gating])
    with kernel_module("moe.gpu", tmp_path) as module:
        more = module.ExpertParts(case.gating, case.biases)
        out = module.moe(case.x, *case.routing, case.w13, case.w2, None, None, more)
    exact = case.compute(torch.float64)
    assert_as_exact(out, case.compute(torch.float32), exact, slack=1e-5)


def test_a_limited_gate_hides_no_number_that_is_none() -> None:
    weight, x = torch.randn(64, 8), torch.randn(2, 8)
    x[0, 3] = math.nan
    out = gate_up_silu(x, pack_gate_up(weight, gating=GPT_OSS))
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], GPT_OSS.of(x[1:] @ weight.t())[0])


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(3):
        found = mxfp4_groups(blocks[expert], scales[expert]).dequantised(torch.float32)
        assert torch.equal(found, expected[expert].t())
    with pytest.raises(ValueError, match="no number"):
        mxfp4_groups(blocks[0], torch.full_like(scales[0], 255))
