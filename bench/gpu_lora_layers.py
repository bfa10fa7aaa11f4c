"""What adapters add to whole decoder layers of Llama-3.1-8B's shapes, in a CUDA graph.

python bench/gpu_lora_layers.py                 64 requests that decode, mixes of adapters
python bench/gpu_lora_layers.py --rows 4096     eight prompts of 512 tokens
python bench/gpu_lora_layers.py --timeline      when each kernel of a layer ran
"""

from __future__ import annotations

import statistics
import sys
from functools import cache

import numpy as np
import torch
from clocks import event_s, graph_of, timeline_of
from harness import Harness, Run
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Layer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.stack import Run as Stack
from weft.engine.model.stack import run_all
from weft.engine.model.step import Step
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.ops.lora.spec import LoraSegments, LoraStep, LoraWeights
from weft.kernels.ops.norm import Norm
from weft.testing.kernels import layer_cases

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 4096, 14336, 32, 8, 128, 6
MAX_ROWS = 8
"""Most device rows of an adapter in the tables: rank 64."""
MIXES = ((8, 16), (1, 16), (32, 16), (8, 64))
"""Numbers of adapters, and their rank."""
KINDS = {
    "q": (HIDDEN, HEADS * DIM, 0, "qkv"),
    "k": (HIDDEN, KV_HEADS * DIM, HEADS * DIM, "qkv"),
    "v": (HIDDEN, KV_HEADS * DIM, (HEADS + KV_HEADS) * DIM, "qkv"),
    "o": (HEADS * DIM, HIDDEN, 0, "o"),
    "gate": (HIDDEN, INNER, 0, "gate_up"),
    "up": (HIDDEN, INNER, INNER, "gate_up"),
    "down": (INNER, HIDDEN, 0, "down"),
}
"""Columns in and out, the first one in the product, and the product."""


def numbers(rows: int, columns: int) -> torch.Tensor:
    """Random matrix, [rows, columns] bf16."""
    values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return values / columns**0.5


@cache
def stack() -> Stack:
    """The layers, of random weights."""
    norm = Norm(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), 1e-5)
    cos_sin = torch.randn(8192, DIM, device="cuda")
    return Stack([make_layer(index, norm, cos_sin) for index in range(LAYERS)])


def make_layer(index: int, norm: Norm, cos_sin: torch.Tensor) -> Layer:
    """A layer of random weights."""
    attention = Attention(
        AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5),
        index,
        cos_sin,
        qkv_proj=pack_linear(numbers((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)),
        o_proj=pack_linear(numbers(HIDDEN, HEADS * DIM)),
    )
    gate_up, down = pack_gate_up(numbers(2 * INNER, HIDDEN)), pack_linear(numbers(HIDDEN, INNER))
    return Layer(index, norm, attention, norm, GatedMLP(index, gate_up, down))


def adapters_of(rows: int, count: int, rank: int, *, are_sorted: bool) -> LoraStep:
    """Assigns adapters to rows: by turns, or in runs of rows as prompts have."""
    used = rank // 8
    groups: dict[str, list[LoraWeights]] = {}
    for depth, columns, column, group in KINDS.values():
        size = LAYERS * count * used
        table = torch.zeros(LAYERS, count + 1, MAX_ROWS, device="cuda", dtype=torch.int32)
        order = torch.randperm(size, device="cuda").int()
        table[:, 1:, :used] = order.view(LAYERS, count, used)
        counts = torch.full((LAYERS, count + 1), used, device="cuda", dtype=torch.int32)
        counts[:, 0] = 0
        a, b = (numbers(size * 8, width).view(size, 8, width) for width in (depth, columns))
        groups.setdefault(group, []).append(LoraWeights(a, b, table, counts, column))
    slots = np.arange(rows) % count + 1
    host = sort_tokens((np.sort(slots) if are_sorted else slots).astype(np.int32), count + 1)
    return LoraStep(
        segments=LoraSegments(*(torch.from_numpy(array).cuda() for array in host)),
        qkv=tuple(groups["qkv"]),
        o=tuple(groups["o"]),
        gate_up=tuple(groups["gate_up"]),
        down=tuple(groups["down"]),
        are_given=True,
    )


def step_of(rows: int, q_len: int, kv_len: int, lora: LoraStep | None) -> Step:
    """A step of requests with `q_len` new rows each, which attend to `kv_len` tokens."""
    requests, pages = rows // q_len, -(-kv_len // 16)
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    positions = torch.arange(kv_len - q_len, kv_len, device="cuda").repeat(requests)
    owners = torch.arange(requests, device="cuda").repeat_interleave(q_len)
    group = AttentionMetadata(
        page_table=table,
        places=table[owners, positions // 16].long() * 16 + positions % 16,
        cu_q_lens=torch.arange(requests + 1, device="cuda", dtype=torch.int32) * q_len,
        kv_lens=torch.full((requests,), kv_len, device="cuda", dtype=torch.int32),
        max_q_len=q_len,
        max_kv_len=kv_len,
    )
    return layer_cases.step_of(positions, group, lora)


class Graph:
    """The layers of a step, captured."""

    def __init__(self, step: Step, rows: int) -> None:
        self._step, self._hidden = step, numbers(rows, HIDDEN)
        shape = (step.groups[0].page_table.numel() + 1, KV_HEADS, LAYERS, 2, 16, DIM)
        self._pool = torch.zeros(shape, device="cuda", dtype=torch.bfloat16).normal_()
        with torch.inference_mode():
            self.graph = graph_of(self._run)

    def _run(self) -> torch.Tensor:
        return run_all([stack()], self._hidden.clone(), self._step, self._pool)

    def us(self, repeats: int = 20) -> float:
        """Median microseconds a layer."""
        times = [event_s(self.graph.replay) for _ in range(repeats)]
        return 1e6 * statistics.median(times) / LAYERS

    def timeline(self) -> None:
        """Prints start and duration of the kernels of a layer in the middle, in microseconds."""
        events = timeline_of(lambda: [self.graph.replay() for _ in range(3)])
        each = len(events) // (3 * LAYERS)
        for name, begin, end in events[len(events) // 2 :][: each + 1]:
            print(f"  {begin - events[0][1]:10.2f} {end - begin:8.2f}  {name}")


harness = Harness(__file__, __doc__)
harness.flag("--rows", type=int, default=64, help="more than 256: prompts of 512")
harness.flag("--timeline", action="store_true", help="when the kernels of a layer run")


@harness.part
def layers(run: Run) -> None:
    """Each mix beside none."""
    rows = run.options.rows
    q_len, kv_len = (512, 512) if rows > 256 else (1, 640)
    for count, rank in ((0, 0), *MIXES):
        lora = adapters_of(rows, count, rank, are_sorted=q_len > 1) if count else None
        graph = Graph(step_of(rows, q_len, kv_len, lora), rows)
        run.row(rows=rows, adapters=count, rank=rank, us_a_layer=graph.us())
        if run.options.timeline and (count, rank) in ((0, 0), MIXES[0]):
            graph.timeline()


if __name__ == "__main__":
    sys.exit(harness.main())
