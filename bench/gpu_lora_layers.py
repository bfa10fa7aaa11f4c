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
from weft.kernels.decoder_layer import (
    DecoderStep,
    GatedMlpWeight,
    decoder_layers,
    pack_decoder_layer,
    prepare_step,
    stack_layers,
)
from weft.kernels.linear import pack_gate_up, pack_linear
from weft.kernels.lora import LoraSegments, LoraStep, LoraWeights, sort_tokens
from weft.kernels.side_stream import rehearsal

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
    """Random numbers, [rows, columns] bf16."""
    values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return values / columns**0.5


LAYER_WEIGHTS = [
    pack_decoder_layer(
        input_norm=torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16),
        qkv=pack_linear(numbers((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)),
        o=pack_linear(numbers(HIDDEN, HEADS * DIM)),
        post_norm=torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16),
        mlp=GatedMlpWeight(
            pack_gate_up(numbers(2 * INNER, HIDDEN)), pack_linear(numbers(HIDDEN, INNER))
        ),
        eps=1e-5,
    )
    for _ in range(LAYERS)
]
STACK = stack_layers(LAYER_WEIGHTS)


def adapters_of(rows: int, count: int, rank: int, *, are_sorted: bool) -> LoraStep:
    """Rows take adapters in turns, or one after the other as prompts do."""
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


def step_of(rows: int, q_len: int, kv_len: int, lora: LoraStep | None) -> DecoderStep:
    """Requests of `q_len` new rows each, which see `kv_len`."""
    requests, pages = rows // q_len, -(-kv_len // 16)
    pool = torch.zeros(
        (requests * pages + 1, KV_HEADS, LAYERS, 2, 16, DIM), device="cuda", dtype=torch.bfloat16
    ).normal_()
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    positions = torch.arange(kv_len - q_len, kv_len, device="cuda").repeat(requests)
    owners = torch.arange(requests, device="cuda").repeat_interleave(q_len)
    return prepare_step(
        LAYER_WEIGHTS[0],
        pool=pool,
        positions=positions,
        slots=table[owners, positions // 16].long() * 16 + positions % 16,
        cos_sin=torch.randn(kv_len, DIM, device="cuda"),
        page_table=table,
        cu_q_lens=torch.arange(requests + 1, device="cuda", dtype=torch.int32) * q_len,
        kv_lens=torch.full((requests,), kv_len, device="cuda", dtype=torch.int32),
        num_heads=HEADS,
        scale=DIM**-0.5,
        max_q_len=q_len,
        max_kv_len=kv_len,
        lora=lora,
    )


class Graph:
    """The layers of a step, captured."""

    def __init__(self, step: DecoderStep, rows: int) -> None:
        self._step, self._hidden = step, numbers(rows, HIDDEN)
        with torch.inference_mode():
            with rehearsal():
                self._run()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self._run()

    def _run(self) -> torch.Tensor:
        return decoder_layers(self._hidden.clone(), STACK, self._step)

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
