"""Decoder layers of few rows in a CUDA graph: norms taken by products, and what adapters add made
by products, or each by launches of their own.

python bench/gpu_few_rows.py                    SmolLM2-135M and Qwen3-0.6B, one and two rows
python bench/gpu_few_rows.py --rows 1 2 4 8 --rank 16       with an adapter for each row
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from model_shapes import MODELS
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Layer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.stack import Run, run_all
from weft.engine.model.step import Step
from weft.kernels.attention import AttentionMetadata, AttentionSpec
from weft.kernels.gpu import linear as gpu_linear
from weft.kernels.gpu import stream as gpu
from weft.kernels.linear import pack_gate_up, pack_linear
from weft.kernels.lora import ROW_RANK, LoraSegments, LoraStep, LoraWeights, sort_tokens
from weft.kernels.norm import Norm
from weft.kernels.side_stream import rehearsal
from weft.testing.kernels.layer_cases import step_of

CONTEXT, PAGE_SIZE, REPLAYS, ROUNDS = 512, 16, 4, 30
MIN_WEIGHT_BYTES = 200 << 20
"""All layers together are no less: what the device's cache holds would be too fast."""


def never(*arguments: object, **options: object) -> bool:
    """In place of a choice."""
    return False


NORMS, ADDITIONS = (gpu, "can_fold"), (gpu_linear, "_adds_within")
WAYS = {
    "as it is": (),
    "norms by themselves": (NORMS,),
    "additions and norms by themselves": (NORMS, ADDITIONS),
}


def numbers(rows: int, columns: int) -> torch.Tensor:
    """Random numbers, [rows, columns] bf16."""
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5


def make_layer(shape: dict[str, Any], index: int) -> Layer:
    """A layer of random weights."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    gain = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    attention = Attention(
        AttentionSpec(heads, kv_heads, dim, dim**-0.5),
        index,
        torch.randn(CONTEXT, dim, device="cuda"),
        qkv_proj=pack_linear(numbers((heads + 2 * kv_heads) * dim, hidden)),
        o_proj=pack_linear(numbers(hidden, heads * dim)),
    )
    gate_up = pack_gate_up(numbers(2 * inner, hidden))
    mlp = GatedMLP(index, gate_up, pack_linear(numbers(hidden, inner)))
    return Layer(index, Norm(gain, 1e-5), attention, Norm(gain, 1e-5), mlp)


def make_adapters(shape: dict[str, Any], layers: int, rows: int, rank: int) -> LoraStep:
    """An adapter for each row, of all products."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = (shape[f"num_{name}_heads"] * dim for name in ("attention", "key_value"))
    widths = {
        "qkv": ((hidden, q, 0), (hidden, kv, q), (hidden, kv, q + kv)),
        "o": ((q, hidden, 0),),
        "gate_up": ((hidden, inner, 0), (hidden, inner, inner)),
        "down": ((inner, hidden, 0),),
    }
    used = rank // ROW_RANK
    counts = torch.full((layers, rows + 1), used, device="cuda", dtype=torch.int32)
    counts[:, 0] = 0

    def part(depth: int, columns: int, first: int) -> LoraWeights:
        size = layers * rows * used
        table = torch.zeros(layers, rows + 1, used, device="cuda", dtype=torch.int32)
        table[:, 1:] = torch.randperm(size, device="cuda").int().view(layers, rows, used)
        a, b = (numbers(size * ROW_RANK, n).view(size, ROW_RANK, n) for n in (depth, columns))
        return LoraWeights(a, b, table, counts, first)

    host = sort_tokens(np.arange(1, rows + 1, dtype=np.int32), rows + 1)
    segments = LoraSegments(*(torch.from_numpy(array).cuda() for array in host))
    groups = {name: tuple(part(*sizes) for sizes in parts) for name, parts in widths.items()}
    return LoraStep(segments=segments, **groups, are_given=True)


def make_pool(shape: dict[str, Any], layers: int, rows: int) -> torch.Tensor:
    """Pages of as many requests as rows."""
    pages, dim = rows * CONTEXT // PAGE_SIZE, shape["head_dim"]
    size = (pages, shape["num_key_value_heads"], layers, 2, PAGE_SIZE, dim)
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def make_step(rows: int, lora: LoraStep | None) -> Step:
    """Requests that bring one row each and see 512 positions."""
    pages = CONTEXT // PAGE_SIZE
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    group = AttentionMetadata(
        page_table=table,
        places=table[:, -1].long() * PAGE_SIZE + PAGE_SIZE - 1,
        cu_q_lens=torch.arange(rows + 1, device="cuda", dtype=torch.int32),
        kv_lens=torch.full((rows,), CONTEXT, device="cuda", dtype=torch.int32),
        max_q_len=1,
        max_kv_len=CONTEXT,
    )
    return step_of(torch.full((rows,), CONTEXT - 1, device="cuda"), group, lora)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The work as a graph, after it ran once."""
    with rehearsal():
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
    """Times the ways in turn and prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen3-0.6b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rank", type=int, help="of an adapter for each row; 0: none", default=0)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "us a layer:", ", ".join(WAYS))
    for name in arguments.models:
        shape = MODELS[name]
        first = make_layer(shape, 0)
        products = (first.mixer.qkv_proj, first.mixer.o_proj)
        products += (first.feed.gate_up_proj, first.feed.down_proj)
        layers = -(-MIN_WEIGHT_BYTES // sum(product.data.nbytes for product in products))
        stack = [Run([first, *(make_layer(shape, 1 + index) for index in range(layers - 1))])]
        for rows in arguments.rows:
            rank, lora = arguments.rank, None
            if rank:
                lora = make_adapters(shape, layers, rows, rank)
            step, pool = make_step(rows, lora), make_pool(shape, layers, rows)
            hidden = numbers(rows, shape["hidden_size"])
            run = partial(run_all, stack, hidden, step, pool)
            graphs = []
            for patches in WAYS.values():
                with contextlib.ExitStack() as changes:
                    for module, function in patches:
                        changes.enter_context(mock.patch.object(module, function, never))
                    graphs.append(captured(run))
            times = [[replay_us(graph) / layers for graph in graphs] for _ in range(ROUNDS)]
            medians = (statistics.median(way) for way in zip(*times[5:], strict=True))
            print(f"{name}, {rows} rows:", ", ".join(f"{median:.2f}" for median in medians))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
