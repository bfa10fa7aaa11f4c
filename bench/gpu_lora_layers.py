"""What adapters add to whole decoder layers of Llama-3.1-8B's shapes, in a CUDA graph.

python bench/gpu_lora_layers.py                 64 requests that decode, mixes of adapters
python bench/gpu_lora_layers.py --rows 4096     eight prompts of 512 tokens
python bench/gpu_lora_layers.py --timeline      when each kernel of a layer ran
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Layer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.stack import Run, run_all
from weft.engine.model.step import Step
from weft.kernels.attention import AttentionMetadata, AttentionSpec
from weft.kernels.linear import pack_gate_up, pack_linear
from weft.kernels.lora import LoraSegments, LoraStep, LoraWeights, sort_tokens
from weft.kernels.norm import Norm
from weft.kernels.side_stream import rehearsal
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


NORM = Norm(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), 1e-5)
COS_SIN = torch.randn(8192, DIM, device="cuda")


def make_layer(index: int) -> Layer:
    """A layer of random weights."""
    attention = Attention(
        AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5),
        index,
        COS_SIN,
        qkv_proj=pack_linear(numbers((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)),
        o_proj=pack_linear(numbers(HIDDEN, HEADS * DIM)),
    )
    gate_up, down = pack_gate_up(numbers(2 * INNER, HIDDEN)), pack_linear(numbers(HIDDEN, INNER))
    return Layer(index, NORM, attention, NORM, GatedMLP(index, gate_up, down))


RUN = Run([make_layer(index) for index in range(LAYERS)])


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
            with rehearsal():
                self._run()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self._run()

    def _run(self) -> torch.Tensor:
        return run_all([RUN], self._hidden.clone(), self._step, self._pool)

    def us(self, repeats: int = 20) -> float:
        """Median microseconds a layer."""
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / LAYERS)
        return statistics.median(times)

    def timeline(self) -> None:
        """Prints start and duration of the kernels of a layer in the middle, in microseconds."""
        with profile(activities=[ProfilerActivity.CUDA]) as taken:
            for _ in range(3):
                self.graph.replay()
            torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        events = [event for event in taken.events() if event.device_type == cuda]
        events.sort(key=lambda event: event.time_range.start)
        each = len(events) // (3 * LAYERS)
        for event in events[len(events) // 2 :][: each + 1]:
            begin, end = event.time_range.start, event.time_range.end
            print(f"  {begin - events[0].time_range.start:10.2f} {end - begin:8.2f}  {event.name}")


def main() -> None:
    """Measures each mix beside none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64, help="more than 256: prompts of 512")
    parser.add_argument("--timeline", action="store_true")
    arguments = parser.parse_args()
    rows = arguments.rows
    q_len, kv_len = (512, 512) if rows > 256 else (1, 640)
    for count, rank in ((0, 0), *MIXES):
        lora = adapters_of(rows, count, rank, are_sorted=q_len > 1) if count else None
        graph = Graph(step_of(rows, q_len, kv_len, lora), rows)
        print(f"{rows} rows, {count} adapters of rank {rank}: {graph.us():.1f} us a layer")
        if arguments.timeline and (count, rank) in ((0, 0), MIXES[0]):
            graph.timeline()


if __name__ == "__main__":
    main()
