"""What adapters add to the experts of Qwen3-30B-A3B's layers, in a CUDA graph.

    python bench/gpu_lora_experts.py
    python bench/gpu_lora_experts.py --rows 64 8192 --kinds experts

Routing and experts of some layers with their own weights, one after the other; no attention. Up to
256 rows take adapters in turns, as requests that decode; more are prompts of 512 tokens. Times of
all mixes are taken in alternation; a row shows medians and their ratio to no adapters.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_setup import describe_gpu
from rich.console import Console
from rich.table import Table
from weft.kernels.gpu import moe
from weft.kernels.lora import ExpertAddition, LoraWeights
from weft.kernels.side_stream import rehearsal

EXPERTS, TOP_K, HIDDEN, INNER, LAYERS = 128, 8, 2048, 768, 3
MAX_ROWS = 8
"""Rows of an adapter in the tables: rank 64."""
MIXES = ((8, 16), (1, 16), (8, 64))
"""Numbers of adapters, and their rank."""
KINDS = ("shared-experts", "experts")
PROMPT = 512


def numbers(*size: int) -> torch.Tensor:
    """Random numbers in bfloat16 for weights whose last dimension is the input's."""
    values = torch.empty(size, device="cuda", dtype=torch.bfloat16)
    return values.normal_(std=size[-1] ** -0.5)


def sides(count: int, rank: int, *, is_shared: bool) -> tuple[torch.Tensor, int]:
    """Table [LAYERS, slots, MAX_ROWS] of one side of the adapters, and its rows in the pool."""
    used = rank // 8
    table = torch.zeros(LAYERS, count + 1, EXPERTS, MAX_ROWS, device="cuda", dtype=torch.int32)
    num_rows = LAYERS * count * (1 if is_shared else EXPERTS) * used
    order = torch.randperm(num_rows, device="cuda").int().view(LAYERS, count, -1, used)
    table[:, 1:, :, :used] = order
    return table.flatten(1, 2), num_rows


def weights(count: int, rank: int, size: tuple[int, int], column: int, shared: str) -> LoraWeights:
    """Adapters of one projection; `shared`: the side that experts share, "a", "b" or neither."""
    (table, a_rows), (b_table, b_rows) = (
        sides(count, rank, is_shared=side == shared) for side in "ab"
    )
    counts = torch.full(table.shape[:2], rank // 8, device="cuda", dtype=torch.int32)
    counts[:, :EXPERTS] = 0
    a, b = numbers(a_rows, 8, size[0]), numbers(b_rows, 8, size[1])
    return LoraWeights(a, b, table, counts, column, b_table, shared == "a", shared == "b")


def adapters_of(rows: int, count: int, rank: int, kind: str) -> Callable[[int], ExpertAddition]:
    """The additions to a layer, by its number."""
    up, down = ("a", "b") if kind == "shared-experts" else ("", "")
    w13 = tuple(weights(count, rank, (HIDDEN, INNER), n * INNER, up) for n in range(2))
    w2 = (weights(count, rank, (INNER, HIDDEN), 0, down),)
    run = 1 if rows <= 256 else PROMPT
    slots = (torch.arange(rows, device="cuda") // run % count + 1).int()
    return lambda layer: ExpertAddition(w13, w2, layer, slots)


class Graph:
    """The experts of some layers, captured."""

    def __init__(
        self,
        rows: int,
        stack: list[tuple[torch.Tensor, ...]],
        lora: Callable[[int], ExpertAddition] | None,
    ) -> None:
        self._x = numbers(rows, HIDDEN)
        self._stack, self._lora = stack, lora
        with torch.inference_mode():
            with rehearsal():
                self._run()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = self._run()

    def _run(self) -> torch.Tensor:
        x = self._x
        for layer, (router, w13, w2) in enumerate(self._stack):
            added = None if self._lora is None else self._lora(layer)
            logits = (x @ router.T).float()
            x = moe.routed_moe(x, logits, TOP_K, w13, w2, None, added, renormalise=True)
        return x

    def us(self) -> float:
        """Microseconds a layer of one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / LAYERS


def main() -> None:
    """Measures each mix beside none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 1024, 8192])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    stack = [
        (
            numbers(EXPERTS, HIDDEN),
            numbers(EXPERTS, 2 * INNER, HIDDEN),
            numbers(EXPERTS, HIDDEN, INNER),
        )
        for _ in range(LAYERS)
    ]
    table = Table(title="us a layer's experts")
    names = ["none", *(f"{count} of rank {rank}" for count, rank in MIXES)]
    for name in ("adapters of", "rows", *names):
        table.add_column(name, justify="right")
    found: list[dict[str, object]] = []
    for kind in arguments.kinds:
        for rows in arguments.rows:
            mixes = [adapters_of(rows, count, rank, kind) for count, rank in MIXES]
            graphs = [Graph(rows, stack, lora) for lora in (None, *mixes)]
            times: list[list[float]] = [[] for _ in graphs]
            order = list(range(len(graphs)))
            for turn in range(arguments.turns + 3):
                random.shuffle(order)
                for index in order:
                    us = graphs[index].us()
                    if turn >= 3:
                        times[index].append(us)
            medians = [statistics.median(some) for some in times]
            base = medians[0]
            cells = [f"{us:.0f} ({us / base - 1:+.0%})" for us in medians[1:]]
            table.add_row(kind, str(rows), f"{base:.0f}", *cells)
            found.append({"kind": kind, "rows": rows, "us": dict(zip(names, times, strict=True))})
            del mixes, graphs
            torch.cuda.empty_cache()
    Console().print(table)
    if arguments.json is not None:
        kept = {"setup": describe_gpu(arguments.commit), "rows": found}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
