"""Small random decoder layers and steps over them."""

from __future__ import annotations

import torch
from weft.kernels.decoder_layer import (
    DecoderLayerWeight,
    DecoderStep,
    GatedMlpWeight,
    SparseMlpWeight,
    pack_decoder_layer,
    prepare_step,
)
from weft.kernels.linear import pack_gate_up, pack_linear
from weft.kernels.lora import LoraStep
from weft.kernels.moe import pack_experts
from weft.kernels.quantised import Int8Channels, quantise_channels

LAYERS, PAGE_SIZE, HIDDEN, INNER = 3, 8, 72, 200
HEADS, KV_HEADS, DIM = 6, 2, 40
EXPERTS, EXPERT_INNER = 5, 44


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)


def make_mlp(dtype: torch.dtype) -> GatedMlpWeight:
    return GatedMlpWeight(
        pack_gate_up(draw(2 * INNER, HIDDEN, dtype=dtype)),
        pack_linear(draw(HIDDEN, INNER, dtype=dtype)),
    )


def make_sparse_mlp(dtype: torch.dtype) -> SparseMlpWeight:
    experts = [
        (draw(2 * EXPERT_INNER, HIDDEN, dtype=dtype), draw(HIDDEN, EXPERT_INNER, dtype=dtype))
        for _ in range(EXPERTS)
    ]
    router = pack_linear(draw(EXPERTS, HIDDEN, dtype=dtype))
    return SparseMlpWeight(router, pack_experts(experts, EXPERTS), 2, True)


def make_int8_layer(dtype: torch.dtype) -> DecoderLayerWeight:
    """Creates a layer whose products have int8 weights."""

    def matrix(rows: int, columns: int) -> Int8Channels:
        return quantise_channels(torch.randn(rows, columns) / columns**0.5)

    width = (HEADS + 2 * KV_HEADS) * DIM
    return pack_decoder_layer(
        input_norm=1 + draw(HIDDEN, dtype=dtype),
        qkv=pack_linear(matrix(width, HIDDEN), draw(width, dtype=dtype), dtype=dtype),
        o=pack_linear(matrix(HIDDEN, HEADS * DIM), dtype=dtype),
        post_norm=1 + draw(HIDDEN, dtype=dtype),
        mlp=GatedMlpWeight(
            pack_gate_up(matrix(2 * INNER, HIDDEN), dtype=dtype),
            pack_linear(matrix(HIDDEN, INNER), dtype=dtype),
        ),
        eps=1e-5,
    )


def make_layer(dtype: torch.dtype, qwen: bool, is_sparse: bool = False) -> DecoderLayerWeight:
    """Creates a layer with biases, head norms if `qwen`, and experts if `is_sparse`."""
    width = (HEADS + 2 * KV_HEADS) * DIM
    return pack_decoder_layer(
        input_norm=1 + draw(HIDDEN, dtype=dtype),
        qkv=pack_linear(draw(width, HIDDEN, dtype=dtype), draw(width, dtype=dtype)),
        o=pack_linear(draw(HIDDEN, HEADS * DIM, dtype=dtype)),
        post_norm=1 + draw(HIDDEN, dtype=dtype),
        mlp=make_sparse_mlp(dtype) if is_sparse else make_mlp(dtype),
        eps=1e-5,
        q_norm=1 + draw(DIM, dtype=dtype) if qwen else None,
        k_norm=1 + draw(DIM, dtype=dtype) if qwen else None,
    )


def make_step(
    layer: DecoderLayerWeight,
    lengths: list[tuple[int, int]],
    pool: torch.Tensor,
    lora: LoraStep | None = None,
) -> DecoderStep:
    """A step over requests of (new rows, context); their pages lie in order in `pool`."""
    pages = torch.arange(len(pool), dtype=torch.int32).view(len(lengths), -1)
    positions = [torch.arange(kv_len - q_len, kv_len) for q_len, kv_len in lengths]
    slots = [
        pages[r, p // PAGE_SIZE].long() * PAGE_SIZE + p % PAGE_SIZE for r, p in enumerate(positions)
    ]
    angles = torch.outer(torch.arange(200).float(), 1e4 ** -(torch.arange(0, DIM, 2) / DIM))
    return prepare_step(
        layer,
        pool=pool,
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1),
        page_table=pages,
        cu_q_lens=torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int(),
        kv_lens=torch.tensor([kv_len for _, kv_len in lengths]).int(),
        num_heads=HEADS,
        scale=DIM**-0.5,
        max_q_len=max(q for q, _ in lengths),
        max_kv_len=max(kv_len for _, kv_len in lengths),
        lora=lora,
    )
