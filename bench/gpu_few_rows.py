"""Decoder layers of few rows in a CUDA graph: norms taken by products, or by launches of their own.

python bench/gpu_few_rows.py                    SmolLM2-135M and Qwen3-0.6B, one and two rows
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from model_shapes import MODELS
from weft.kernels.decoder_layer import (
    DecoderLayerWeight,
    DecoderStep,
    GatedMlpWeight,
    pack_decoder_layer,
    prepare_step,
)
from weft.kernels.gpu import decoder_layers as gpu
from weft.kernels.linear import pack_gate_up, pack_linear

CONTEXT, PAGE_SIZE, REPLAYS, ROUNDS = 512, 16, 4, 30
MIN_WEIGHT_BYTES = 200 << 20
"""All layers together are no less: what the device's cache holds would be too fast."""


def numbers(rows: int, columns: int) -> torch.Tensor:
    """Random numbers, [rows, columns] bf16."""
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5


def make_layer(shape: dict[str, Any]) -> DecoderLayerWeight:
    """A layer of random weights."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    gain = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    return pack_decoder_layer(
        input_norm=gain,
        qkv=pack_linear(numbers((heads + 2 * kv_heads) * dim, hidden)),
        o=pack_linear(numbers(hidden, heads * dim)),
        post_norm=gain,
        mlp=GatedMlpWeight(
            pack_gate_up(numbers(2 * inner, hidden)), pack_linear(numbers(hidden, inner))
        ),
        eps=1e-5,
    )


def make_step(w: DecoderLayerWeight, shape: dict[str, Any], layers: int, rows: int) -> DecoderStep:
    """Requests that bring one row each and see 512 positions."""
    pages, dim = CONTEXT // PAGE_SIZE, shape["head_dim"]
    size = (rows * pages, shape["num_key_value_heads"], layers, 2, PAGE_SIZE, dim)
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    return prepare_step(
        w,
        pool=torch.randn(size, device="cuda", dtype=torch.bfloat16),
        positions=torch.full((rows,), CONTEXT - 1, device="cuda"),
        slots=table[:, -1].long() * PAGE_SIZE + PAGE_SIZE - 1,
        cos_sin=torch.randn(CONTEXT, dim, device="cuda"),
        page_table=table,
        cu_q_lens=torch.arange(rows + 1, device="cuda", dtype=torch.int32),
        kv_lens=torch.full((rows,), CONTEXT, device="cuda", dtype=torch.int32),
        num_heads=shape["num_attention_heads"],
        scale=dim**-0.5,
        max_q_len=1,
        max_kv_len=CONTEXT,
    )


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The work as a graph, after it ran once."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / REPLAYS


def main() -> None:
    """Times both ways in turn and prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen3-0.6b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2])
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "us a layer: norms by themselves, by products")
    for name in arguments.models:
        shape = MODELS[name]
        first = make_layer(shape)
        parts = (first.qkv, first.o, first.mlp.gate_up, first.mlp.down)
        layers = -(-MIN_WEIGHT_BYTES // sum(part.data.nbytes for part in parts))
        stack = [first, *(make_layer(shape) for _ in range(layers - 1))]
        for rows in arguments.rows:
            step = make_step(first, shape, layers, rows)
            hidden = numbers(rows, shape["hidden_size"])
            run = partial(gpu.decoder_layers, hidden, stack, step, 0)
            graphs = []
            for takes_norms in (False, True):
                with mock.patch.object(gpu, "_take_norms", lambda *_, it=takes_norms: it):
                    graphs.append(captured(run))
            times = [[replay_us(graph) / layers for graph in graphs] for _ in range(ROUNDS)]
            apart, together = (statistics.median(way) for way in zip(*times[5:], strict=True))
            print(f"{name}, {rows} rows: {apart:.2f}, {together:.2f} ({apart / together:.3f})")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
