"""What adapters add to the experts of Qwen3-30B-A3B's layers, in a CUDA graph.

    python bench/gpu_lora_experts.py
    python bench/gpu_lora_experts.py --rows 64 8192 --kinds experts
    python bench/gpu_lora_experts.py --rows 64 256 --only tune

Routing and experts of some layers with their own weights, one after the other, each with the norm
behind it; no attention. Up to 256 rows take adapters in turns, as requests that decode; more are
prompts of 512 tokens. Times of all mixes are taken in alternation; a row shows medians and their
ratio to no adapters.

`--only tune` compares ways of adding: in tiles, and between the products in several launch shapes.
Each is first compared with float32. Then it shows when the kernels of one layer run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from clocks import event_s, graph_of, timeline_of
from harness import Harness, Run, Spread, in_turns, spread
from weft.kernels.ops.lora.spec import ExpertAddition, LoraWeights
from weft.kernels.ops.moe import gpu as moe
from weft.kernels.ops.moe import triton_lora_pairs as moe_lora_pairs
from weft.kernels.ops.moe.triton_combine import NormAfter
from weft.kernels.ops.moe.triton_lora_pairs import PairLaunchConfig
from weft.kernels.ops.moe.triton_route import route

EXPERTS, TOP_K, HIDDEN, INNER, LAYERS = 128, 8, 2048, 768, 3
MAX_ROWS = 8
"""Rows of an adapter in the tables: rank 64."""
MIXES = ((8, 16), (1, 16), (8, 64))
"""Numbers of adapters, and their rank."""
MIX_NAMES = [f"{count} of rank {rank}" for count, rank in MIXES]
KINDS = ("shared-experts", "experts")
PROMPT = 512
SHAPES = tuple(
    PairLaunchConfig(*shape) for shape in ((256, 1), (128, 1), (256, 2), (128, 2), (256, 4))
)
"""Launch shapes that are compared."""


harness = Harness(__file__, __doc__, repeats=20)
harness.flag("--rows", type=int, nargs="+", default=[16, 64, 256, 1024, 8192])
harness.flag("--kinds", nargs="+", choices=KINDS, default=KINDS)


class Way(NamedTuple):
    """How additions are computed."""

    shape: PairLaunchConfig | None
    """Between the products, in this launch shape; None: in tiles."""
    is_begun: bool = True
    """Ranks that experts share are begun before the router; else each pair's are computed beside
    the first product, and the activation is what does not begin early."""


WAYS = {
    "in tiles": Way(None),
    **{f"{shape.columns} columns, {shape.warps} warps": Way(shape) for shape in SHAPES},
    "the first, ranks of pairs": Way(SHAPES[0], is_begun=False),
}
"""Ways of adding, by name."""
Stack = list[tuple[torch.Tensor, ...]]
"""Router, gate and up, down of each layer."""


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
        stack: Stack,
        lora: Callable[[int], ExpertAddition] | None,
        *,
        is_begun: bool = True,
    ) -> None:
        self._x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self._stream = torch.zeros_like(self._x)
        self._gain = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self._stack, self._lora, self._is_begun = stack, lora, is_begun
        with torch.inference_mode():
            self._graph = graph_of(self._run)

    def _run(self) -> torch.Tensor:
        x, after = self._x, NormAfter(self._stream, self._gain, 1e-6)
        for layer, (router, w13, w2) in enumerate(self._stack):
            added = None if self._lora is None else self._lora(layer)
            ranks = None
            if self._is_begun:
                ranks = moe.begin_ranks(x, added, EXPERTS, INNER, is_fixed=False)
            self._logits = (x @ router.T).float()
            given = (x, self._logits, TOP_K, w13, w2, after, added, ranks)
            x = moe.routed_moe(*given, renormalise=True)
        return x

    def of_one_layer(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input of a stack of one layer, its logits, and what a replay adds to the stream."""
        assert len(self._stack) == 1
        self._stream.zero_()
        self._graph.replay()
        torch.cuda.synchronize()
        return self._x, self._logits, self._stream

    def timeline(self) -> Iterator[tuple[str, float, float]]:
        """Each kernel of the last layer of a replay: name, begin and end in microseconds."""
        ranges = timeline_of(self._graph.replay)
        last = ranges[-(len(ranges) // LAYERS) :]
        for name, begin, end in last:
            yield name, begin - last[0][1], end - last[0][1]

    def us(self) -> float:
        """Microseconds a layer of one replay."""
        return 1e6 * event_s(self._graph.replay) / LAYERS


@contextmanager
def way_of(name: str) -> Iterator[None]:
    """Context in which additions are computed in one of the `WAYS`."""
    before = moe.MAX_PAIRED_ROWS, moe_lora_pairs.LAUNCH_CONFIG
    shape = WAYS[name].shape
    if shape is None:
        moe.MAX_PAIRED_ROWS = 0
    else:
        moe.MAX_PAIRED_ROWS, moe_lora_pairs.LAUNCH_CONFIG = 1 << 20, shape
    try:
        yield
    finally:
        moe.MAX_PAIRED_ROWS, moe_lora_pairs.LAUNCH_CONFIG = before


def in_float32(
    x: torch.Tensor,
    logits: torch.Tensor,
    stack: Stack,
    lora: Callable[[int], ExpertAddition] | None,
) -> torch.Tensor:
    """What the first layer's experts are, expert by expert and adapter by adapter."""
    _, w13, w2 = stack[0]
    ids, shares = route(logits, TOP_K, True)
    out = torch.zeros(x.shape, device="cuda")
    added = None if lora is None else lora(0)

    def plus(product: torch.Tensor, given: torch.Tensor, rows: torch.Tensor, expert: int) -> None:
        assert added is not None
        parts = added.w13 if product.shape[1] == 2 * INNER else added.w2
        slots = added.token_slots[rows]
        for slot, part in ((s, p) for s in slots.unique().tolist() for p in parts):
            its, at = slots == slot, slot * EXPERTS + expert
            count = int(part.counts[0, at])
            a = part.a[part.table[0, at, :count].long()].flatten(0, 1).float()
            b = part.b[part.rows_of_b[0, at, :count].long()].flatten(0, 1).float()
            columns = slice(part.column, part.column + part.out_features)
            product[its, columns] += given[its] @ a.T @ b

    for expert in range(EXPERTS):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        given = x[rows].float()
        both = given @ w13[expert].float().T
        if added is not None:
            plus(both, given, rows, expert)
        gate, up = both.chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        product = inner @ w2[expert].float().T
        if added is not None:
            plus(product, inner, rows, expert)
        out.index_add_(0, rows, product * shares[rows, places, None])
    return out


def compare_ways(run: Run, stack: Stack, kind: str, rows: int) -> None:
    """Errors and times of all ways; raises SystemExit where one is wrong."""
    mixes = [adapters_of(rows, count, rank, kind) for count, rank in MIXES]
    errors = {}
    for name, way in WAYS.items():
        with way_of(name):
            graph = Graph(rows, stack[:1], mixes[0], is_begun=way.is_begun)
        x, logits, out = graph.of_one_layer()
        exact = in_float32(x, logits, stack, mixes[0])
        size = float(exact.abs().max())
        changed = float((exact - in_float32(x, logits, stack, None)).abs().max()) / size
        errors[name] = float((out - exact).abs().max()) / size
        if not errors[name] < min(0.02, changed / 4):
            raise SystemExit(f"{kind}, {rows} rows, {name}: off by {errors[name]:.2%} of {size}")
    graphs = {"none": Graph(rows, stack, None)}
    for name, way in WAYS.items():
        with way_of(name):
            for mix, lora in zip(MIX_NAMES, mixes, strict=True):
                graphs[f"{name}: {mix}"] = Graph(rows, stack, lora, is_begun=way.is_begun)
    times = times_of(graphs, run.options.repeats)
    table = f"us a layer's experts: {rows} rows, adapters of {kind}"
    run.row(table=table, way="none", us=times["none"])
    for name in WAYS:
        mixed = {mix: times[f"{name}: {mix}"] for mix in MIX_NAMES}
        run.row(table=table, way=name, error=errors[name], **mixed)


def times_of(graphs: dict[str, Graph], repeats: int) -> dict[str, Spread]:
    """Microseconds a layer, taken in alternation."""
    found = in_turns({name: graph.us for name, graph in graphs.items()}, repeats, warm_up=3)
    return {name: spread(us) for name, us in found.items()}


def show_timeline(stack: Stack, kind: str, rows: int) -> None:
    """When the kernels of a layer run, without adapters and with the first mix."""
    for name, lora in (("no adapters", None), (kind, adapters_of(rows, *MIXES[0], kind))):
        print(f"{rows} rows, {name}: begin, end in us")
        for kernel, begin, end in Graph(rows, stack, lora).timeline():
            print(f"  {begin:7.1f} {end:7.1f}  {kernel[:70]}")


def make_stack() -> Stack:
    """Layers of random weights."""
    sizes = ((EXPERTS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    return [tuple(numbers(*size) for size in sizes) for _ in range(LAYERS)]


@harness.part
def experts(run: Run) -> None:
    """Each mix beside none."""
    stack = make_stack()
    for kind in run.options.kinds:
        for rows in run.options.rows:
            mixes = [adapters_of(rows, count, rank, kind) for count, rank in MIXES]
            graphs = {"none": Graph(rows, stack, None)}
            graphs |= {n: Graph(rows, stack, m) for n, m in zip(MIX_NAMES, mixes, strict=True)}
            times = times_of(graphs, run.options.repeats)
            run.row(table=f"us a layer's experts, adapters of {kind}", rows=rows, **times)
            del mixes, graphs
            torch.cuda.empty_cache()


@harness.part_if_named
def tune(run: Run) -> None:
    """Ways of adding beside each other."""
    stack = make_stack()
    for kind in run.options.kinds:
        for rows in run.options.rows:
            compare_ways(run, stack, kind, rows)
            torch.cuda.empty_cache()
        show_timeline(stack, kind, run.options.rows[0])


if __name__ == "__main__":
    sys.exit(harness.main())
