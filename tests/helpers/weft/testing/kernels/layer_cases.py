"""Small random decoder layers and steps over them."""

from __future__ import annotations

import functools

import torch
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Layer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.stack import Run
from weft.engine.model.step import Step
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.lora.spec import LoraStep
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.spec import SparseMlpWeight
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.stream.reference import Stream
from weft.kernels.ops.stream.taps import Taps
from weft.kernels.shared.formats.quantised import Int8Channels, quantise_channels

LAYERS, PAGE_SIZE, HIDDEN, INNER = 3, 8, 72, 200
HEADS, KV_HEADS, DIM = 6, 2, 40
EXPERTS, EXPERT_INNER = 5, 44


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)


def make_mlp(index: int, dtype: torch.dtype, inner: int = INNER) -> GatedMLP:
    gate_up = pack_gate_up(draw(2 * INNER, HIDDEN, dtype=dtype))
    return GatedMLP(index, gate_up, pack_linear(draw(HIDDEN, inner, dtype=dtype)))


def make_sparse_mlp(index: int, dtype: torch.dtype) -> SparseMLP:
    experts = [
        (draw(2 * EXPERT_INNER, HIDDEN, dtype=dtype), draw(HIDDEN, EXPERT_INNER, dtype=dtype))
        for _ in range(EXPERTS)
    ]
    router = pack_linear(draw(EXPERTS, HIDDEN, dtype=dtype))
    return SparseMLP(index, SparseMlpWeight(router, pack_experts(experts, EXPERTS), 2, True))


@functools.cache
def make_cos_sin(dim: int = DIM, max_positions: int = 200) -> torch.Tensor:
    """One table for all layers that rotate alike, as models have it."""
    angles = torch.outer(
        torch.arange(max_positions).float(), 1e4 ** -(torch.arange(0, dim, 2) / dim)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def make_layer(index: int, dtype: torch.dtype, qwen: bool, is_sparse: bool = False) -> Layer:
    """Creates a layer with biases, head norms if `qwen`, and experts if `is_sparse`."""
    width = (HEADS + 2 * KV_HEADS) * DIM

    def norm(size: int) -> Norm:
        return Norm(1 + draw(size, dtype=dtype), 1e-5)

    attention = Attention(
        AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5),
        index,
        make_cos_sin(),
        qkv_proj=pack_linear(draw(width, HIDDEN, dtype=dtype), draw(width, dtype=dtype)),
        o_proj=pack_linear(draw(HIDDEN, HEADS * DIM, dtype=dtype)),
        q_norm=norm(DIM) if qwen else None,
        k_norm=norm(DIM) if qwen else None,
    )
    make = make_sparse_mlp if is_sparse else make_mlp
    return Layer(index, norm(HIDDEN), attention, norm(HIDDEN), make(index, dtype))


def make_int8_run(dtype: torch.dtype) -> Run:
    """The same of layers whose products have int8 weights."""

    def matrix(rows: int, columns: int) -> Int8Channels:
        return quantise_channels(torch.randn(rows, columns) / columns**0.5)

    def layer(index: int) -> Layer:
        made = make_layer(index, dtype, qwen=False)
        width = (HEADS + 2 * KV_HEADS) * DIM
        attention = Attention(
            AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5),
            index,
            make_cos_sin(),
            qkv_proj=pack_linear(matrix(width, HIDDEN), draw(width, dtype=dtype), dtype=dtype),
            o_proj=pack_linear(matrix(HIDDEN, HEADS * DIM), dtype=dtype),
        )
        gate_up = pack_gate_up(matrix(2 * INNER, HIDDEN), dtype=dtype)
        mlp = GatedMLP(index, gate_up, pack_linear(matrix(HIDDEN, INNER), dtype=dtype))
        return made._replace(mixer=attention, feed=mlp)

    return Run([layer(index) for index in range(LAYERS)])


def make_run(dtype: torch.dtype, qwen: bool, first: int = 0, count: int = LAYERS) -> Run:
    """Creates consecutive layers with gated MLPs."""
    return Run([make_layer(first + number, dtype, qwen) for number in range(count)])


def make_step(
    lengths: list[tuple[int, int]], pool: torch.Tensor, lora: LoraStep | None = None
) -> Step:
    """A step over requests of (new rows, context); their pages lie in order in `pool`."""
    pages = torch.arange(len(pool), dtype=torch.int32).view(len(lengths), -1)
    positions = [torch.arange(kv_len - q_len, kv_len) for q_len, kv_len in lengths]
    places = [
        pages[r, p // PAGE_SIZE].long() * PAGE_SIZE + p % PAGE_SIZE for r, p in enumerate(positions)
    ]
    group = AttentionMetadata(
        page_table=pages,
        places=torch.cat(places),
        cu_q_lens=torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int(),
        kv_lens=torch.tensor([kv_len for _, kv_len in lengths]).int(),
        max_q_len=max(q for q, _ in lengths),
        max_kv_len=max(kv_len for _, kv_len in lengths),
    )
    return step_of(torch.cat(positions), group, lora)


def step_of(
    positions: torch.Tensor, group: AttentionMetadata, lora: LoraStep | None = None
) -> Step:
    """A step as layers see it: of tokens nothing is known."""
    nothing = positions[:0]
    return Step(
        token_ids=nothing, positions=positions, groups=(group,), logits_rows=nothing, lora=lora
    )


def run_by_operation(
    run: Run, hidden: torch.Tensor, step: Step, pool: torch.Tensor, taps: Taps | None = None
) -> torch.Tensor:
    """The layers as separate operations; `hidden` is not changed."""
    stream = Stream(hidden, taps)
    run.by_operation(stream, step, pool)
    return stream.settle()
