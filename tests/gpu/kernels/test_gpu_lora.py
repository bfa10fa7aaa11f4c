"""Low-rank additions on a GPU at real sizes, against float64."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from weft.engine.model.loader import load_model
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.lora import add_lora, sort_tokens
from weft.kernels.ops.lora.spec import ExpertAddition, LoraAddition, LoraSegments, LoraStep
from weft.kernels.ops.moe.gpu import moe as gpu_moe
from weft.kernels.ops.moe.triton_route import route as gpu_moe_route
from weft.kernels.shared.dependent_launch import launch_options
from weft.kernels.shared.side_stream import rehearsal
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import (
    LoraCase,
    add_by,
    draw_slots,
    make_expert_lora,
    make_lora,
    segments_of,
)
from weft.testing.models.lora_models import lora_step, make_adapters, make_experts
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

CUDA = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANKS = [0, 8, 16, 5, 0, 64, 32, 1, 16]
"""By slot."""


def on_gpu(segments: LoraSegments) -> LoraSegments:
    return LoraSegments(*(getattr(segments, name).to(CUDA) for name in LoraSegments.__slots__))


def make_parts(k: int, widths: tuple[int, ...], dtype: torch.dtype) -> list[LoraCase]:
    return [
        make_lora(
            k,
            width,
            RANKS[:1] + random.sample(RANKS[1:], len(RANKS) - 1),
            dtype,
            column=sum(widths[:n]),
            layers=2,
        ).to(CUDA)
        for n, width in enumerate(widths)
    ]


def add_all(
    cases: list[LoraCase], out: torch.Tensor, x: torch.Tensor, slots: list[int]
) -> torch.Tensor:
    """Adapter by adapter, in the dtype of `x`."""
    out = out.clone()
    for case in cases:
        w = case.weights
        columns = out[:, w.column : w.column + w.out_features]
        for slot in set(slots):
            if (1, slot) in case.plain:
                a, b = (t.to(x.dtype) for t in case.plain[1, slot])
                tokens = [t for t, s in enumerate(slots) if s == slot]
                columns[tokens] += (x[tokens] @ a.T) @ b.T
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("k", "widths"),
    [(4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (14336, (4096,)), (577, (301, 77))],
)
@pytest.mark.parametrize("tokens", [1, 8, 64, 700, 1300])
def test_additions(k: int, widths: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
    fresh_seed()
    cases = make_parts(k, widths, dtype)
    slots = draw_slots(tokens, len(RANKS))
    x = torch.randn(tokens, k, device=CUDA).to(dtype)
    out = torch.randn(tokens, sum(widths) + 8, device=CUDA).to(dtype)
    before = out.clone()
    segments = on_gpu(segments_of(slots, len(RANKS) + 4))
    # What the kernels do not write was NaN before.
    poison = torch.full((8, tokens, 3 * 64), float("nan"), device=CUDA)
    del poison
    add_lora(out, x, LoraAddition(tuple(case.weights for case in cases), 1, segments))
    exact = add_all(cases, before.double(), x.double(), slots)
    assert_as_exact(out, add_all(cases, before, x, slots), exact)
    untouched = exact == before.double()
    assert torch.equal(out[untouched], before[untouched])


@pytest.mark.parametrize("tokens", [3, 40, 100])
def test_layers_with_adapters(tokens: int) -> None:
    fresh_seed()
    # Of 17 to 64 rows those without adapters at all are multiplied by another kernel.
    are_same_bits = not 17 <= tokens <= 64
    k, inner, dtype = 1024, 3072, torch.bfloat16
    weight = (torch.randn(2 * inner, k, device=CUDA) / k**0.5).to(dtype)
    cases = make_parts(k, (inner, inner), dtype)
    slots = draw_slots(tokens, len(RANKS))
    x = torch.randn(tokens, k, device=CUDA).to(dtype)
    added = LoraAddition(tuple(c.weights for c in cases), 1, on_gpu(segments_of(slots)))
    product = x.double() @ weight.double().T
    out = linear(x, pack_linear(weight), lora=added)
    exact = add_all(cases, product, x.double(), slots)
    peer = add_all(cases, torch.nn.functional.linear(x, weight), x, slots)
    assert_as_exact(out, peer, exact)
    plain = [token for token, slot in enumerate(slots) if slot == 0 and are_same_bits]
    assert torch.equal(out[plain], linear(x, pack_linear(weight))[plain])
    out = gate_up_silu(x, pack_gate_up(weight), added)
    assert torch.equal(out[plain], gate_up_silu(x, pack_gate_up(weight))[plain])
    (gate, up), (peer_gate, peer_up) = exact.chunk(2, -1), peer.chunk(2, -1)
    silu = torch.nn.functional.silu
    assert_as_exact(out, silu(peer_gate) * peer_up, silu(gate) * up)


@pytest.mark.parametrize("tokens", [4, 64])
def test_a_captured_graph_serves_any_mix(tokens: int) -> None:
    """Slots, tables and rows change between replays, at the same places."""
    fresh_seed()
    k, width, dtype = 512, 640, torch.bfloat16
    cases = make_parts(k, (width,), dtype)
    x = torch.randn(tokens, k, device=CUDA).to(dtype)
    out = torch.zeros(tokens, width, device=CUDA, dtype=dtype)
    segments = on_gpu(segments_of([0] * tokens, len(RANKS)))
    added = LoraAddition((cases[0].weights,), 1, segments)
    with rehearsal():
        add_lora(out, x, added)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora(out, x, added)
    for turn in range(4):
        if turn == 3:
            other = make_parts(k, (width,), dtype)
            for name in ("a", "b"):
                rows = getattr(cases[0].weights, name)
                new = getattr(other[0].weights, name)
                rows[: len(new)] = new[: len(rows)]
            cases[0].weights.table.copy_(other[0].weights.table)
            cases[0].weights.counts.copy_(other[0].weights.counts)
            cases = [LoraCase(cases[0].weights, other[0].plain)]
        slots = [turn] * tokens if turn < 2 else draw_slots(tokens, len(RANKS))
        host = sort_tokens(np.array(slots, np.int32), len(RANKS))
        for name, values in zip(LoraSegments.__slots__, host, strict=True):
            getattr(segments, name).copy_(torch.from_numpy(values))
        out.zero_()
        graph.replay()
        nothing = torch.zeros_like(out)
        exact = add_all(cases, nothing.double(), x.double(), slots)
        assert_as_exact(out, add_all(cases, nothing, x, slots), exact)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("requests_each", [1, 5])
def test_models_with_adapters_equal_those_on_a_cpu(
    kind: str, requests_each: int, tmp_path: Path
) -> None:
    """The same steps of the same requests, in float32: prompts, then a token each."""
    fresh_seed()
    path = make_tiny(kind, tmp_path / "model", random.randrange(1 << 30))
    config = json.loads((path / "config.json").read_text())
    is_dense = kind == "llama"
    adapters, experts = make_adapters(config, is_dense), {} if is_dense else make_experts(config)
    found = []
    tokens = [
        random.choices(range(config["vocab_size"]), k=15 - n % 4) for n in range(4 * requests_each)
    ]
    for device in ("cpu", CUDA):
        driver = PagedDriver(
            load_model(path, "float32", device).model, num_pages=32 * requests_each
        )
        driver.pool = driver.pool.to(device)
        cases, of_experts = (
            {name: case.to(device) for name, case in some.items()} for some in (adapters, experts)
        )
        requests, logits = [PagedRequest() for _ in tokens], []
        for begin, end in ((0, 10), (10, 11)):
            work = [(r, t[begin:end]) for r, t in zip(requests, tokens, strict=True)]
            batch = driver.batch(work)
            slots = [n % 4 for n, (_, new) in enumerate(work) for _ in new]
            step = lora_step(cases, of_experts, slots)
            step = replace(
                step,
                are_given=True,
                segments=LoraSegments(
                    *(getattr(step.segments, n).to(device) for n in LoraSegments.__slots__)
                ),
            )
            batch = replace(batch, lora=step)
            with torch.inference_mode():
                hidden = driver.model.forward(batch, driver.pool)
                rows = step.select(batch.logits_rows)
                logits.append(driver.model.logits(hidden, rows).cpu())
        found.append(torch.stack(logits))
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[0].abs().max()


def test_selected_rows() -> None:
    fresh_seed()
    slots = draw_slots(200, len(RANKS))
    rows = torch.tensor(sorted(random.sample(range(200), 9)))
    step = LoraStep(segments=on_gpu(segments_of(slots, len(RANKS))))
    selected = step.select(rows.to(CUDA)).segments
    expected = segments_of(slots, len(RANKS)).select(rows)
    for name in LoraSegments.__slots__:
        assert torch.equal(getattr(selected, name).cpu(), getattr(expected, name))


@pytest.mark.parametrize(
    ("name", "original", "replacement"),
    [
        ("lora.triton_rows", "for index in range(count):", "for index in range(count - 1):"),
        ("lora.triton_tiles", "_tile(b, row,", "_tile(b, row - 1,"),
    ],
)
def test_the_checks_see_a_dropped_tile(
    name: str, original: str, replacement: str, tmp_path: Path
) -> None:
    fresh_seed()
    case = make_lora(512, 300, [0, 8, 24], torch.bfloat16, layers=2).to(CUDA)
    slots = [1, 2] * 20
    x = torch.randn(40, 512, device=CUDA).bfloat16()
    before = torch.randn(40, 300, device=CUDA).bfloat16()
    added = LoraAddition((case.weights,), 1, on_gpu(segments_of(slots)))
    exact = add_all([case], before.double(), x.double(), slots)
    peer = add_all([case], before, x, slots)
    for change in (None, (original, replacement)):
        out = before.clone()
        with kernel_module(name, tmp_path, change) as module:
            add_by(module, out, x, added, launch_options(x.device))
        if change is None:
            assert_as_exact(out, peer, exact)
    with pytest.raises(AssertionError):
        assert_as_exact(out, peer, exact)


@pytest.mark.parametrize("tokens", [2, 12, 40])
@pytest.mark.parametrize("is_shared", [False, True])
def test_captured_layers_equal_those_launched_one_by_one(tokens: int, is_shared: bool) -> None:
    """In a captured graph adapters are multiplied beside the products."""
    fresh_seed()
    k, inner, experts = 256, 384, 8
    dense = make_parts(k, (inner, inner), torch.bfloat16)
    gate_up = pack_gate_up((torch.randn(2 * inner, k, device=CUDA) / k**0.5).bfloat16())
    down = pack_linear((torch.randn(k, inner, device=CUDA) / inner**0.5).bfloat16())
    to_down = make_parts(inner, (k,), torch.bfloat16)
    shapes = ((k, inner, 0, "a"), (k, inner, inner, "a"), (inner, k, 0, "b"))
    of_experts = [
        make_expert_lora(
            n, m, RANKS, experts, torch.bfloat16, shared=side if is_shared else None, column=column
        ).to(CUDA)
        for n, m, column, side in shapes
    ]
    w13 = (torch.randn(experts, 2 * inner, k, device=CUDA) / k**0.5).bfloat16()
    w2 = (torch.randn(experts, k, inner, device=CUDA) / inner**0.5).bfloat16()
    segments = on_gpu(segments_of(draw_slots(tokens, len(RANKS)), len(RANKS)))
    added = [
        LoraAddition(tuple(c.weights for c in cases), 1, segments) for cases in (dense, to_down)
    ]
    w = [case.weights for case in of_experts]
    expert_added = ExpertAddition((w[0], w[1]), (w[2],), 0, segments.token_slots)
    x, router = torch.randn(tokens, k, device=CUDA).bfloat16(), torch.randn(k, experts, device=CUDA)

    def layers() -> torch.Tensor:
        hidden = linear(gate_up_silu(x, gate_up, added[0]), down, lora=added[1])
        ids, shares = gpu_moe_route(hidden.float() @ router, 2, True)
        return gpu_moe(hidden, ids, shares, w13, w2, None, expert_added)

    with torch.inference_mode():
        expected = layers()
        with rehearsal():
            rehearsed = layers()
        assert torch.equal(rehearsed, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers()
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)
