"""The native CPU operations beside torch and beside what the CPU can do at most.

Shapes are those of the demo model (SmolLM2-135M): 30 layers, so that weights and pages come from
memory as they do in a step. A row takes turns between the native operation, torch and a probe of
the machine (memory read, multiply-adds in registers); medians. Results are checked first.

    python bench/kernels_cpu.py [--only attention] [--dtype bfloat16] [--baseline TREE]
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from harness import Harness, Run, in_turns, ratio_of, spread, timed
from roofline import Roofline
from weft.kernels.ops.activation import silu_and_mul, silu_and_mul_reference
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.dense_run import DenseLayer, DenseRun
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.ops.lora.spec import LoraSegments, LoraStep, LoraWeights, addition_to
from weft.kernels.ops.norm import Norm, rms_norm
from weft.kernels.ops.norm.reference import rms_norm_reference
from weft.kernels.ops.rope import rope_and_cache
from weft.kernels.ops.rope.reference import rope_and_cache_reference
from weft.kernels.shared import cpu
from weft.kernels.shared.memory import WeightArena, huge_zeros
from weft.pages.transfer.digest import digest_pages, digest_pages_numpy

LAYERS, HIDDEN, INNER, VOCAB = 30, 576, 1536, 49152
HEADS, KV_HEADS, DIM, PAGE_SIZE = 9, 3, 64, 16
EPS = 1e-5
SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5)

harness = Harness(__file__, __doc__, repeats=9)
harness.flag("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
harness.flag("--threads", type=int, default=len(os.sched_getaffinity(0)))
harness.flag("--only", nargs="+", metavar="WORD", help="rows with one of these in their name")


@dataclass(slots=True)
class Row:
    """One line of the table: what is timed, and its lower bound."""

    name: str
    native: Callable[[], object]
    peer: Callable[[], object]
    peer_name: str
    flops: float = 0.0
    """Multiplications and additions of one call."""
    bytes: float = 0.0
    """Bytes read from memory by one call."""


@dataclass(slots=True)
class Model:
    """Random weights of the demo model, packed and (for torch) plain."""

    layers: list[DenseLayer]
    plain: list[dict[str, torch.Tensor]]
    head: LinearWeight
    plain_head: torch.Tensor
    cos_sin: torch.Tensor
    pool: torch.Tensor


def make_model(dtype: torch.dtype) -> Model:
    """Creates a model of fresh random numbers."""
    arena = WeightArena()

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)

    plain = [
        {
            "qkv": draw((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            "o": draw(HIDDEN, HEADS * DIM),
            "gate_up": draw(2 * INNER, HIDDEN),
            "down": draw(HIDDEN, INNER),
        }
        for _ in range(LAYERS)
    ]
    angles = torch.outer(torch.arange(8192), 1e4 ** -(torch.arange(0, DIM, 2) / DIM))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    layers = [
        DenseLayer(
            input_norm=Norm(1 + draw(HIDDEN), EPS),
            qkv=pack_linear(w["qkv"], arena=arena),
            q_norm=None,
            k_norm=None,
            o=pack_linear(w["o"], arena=arena),
            post_norm=Norm(1 + draw(HIDDEN), EPS),
            gate_up=pack_gate_up(w["gate_up"], arena=arena),
            down=pack_linear(w["down"], arena=arena),
            cos_sin=cos_sin,
            spec=SPEC,
        )
        for w in plain
    ]
    head = draw(VOCAB, HIDDEN)
    pool = huge_zeros((700, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM), dtype)
    pool.copy_(torch.randn(700, 1, 1, 1, 1, 1).to(dtype).expand_as(pool))
    return Model(
        layers=layers,
        plain=plain,
        head=pack_linear(head, arena=arena),
        plain_head=head,
        cos_sin=cos_sin,
        pool=pool,
    )


@dataclass(slots=True)
class Step:
    """The tensors of one step over requests of (new rows, context)."""

    rows: int
    positions: torch.Tensor
    group: AttentionMetadata


def make_step(requests: Sequence[tuple[int, int]], num_pages: int) -> Step:
    """Scatters the requests over the pool's pages."""
    max_pages = max(-(-kv_len // PAGE_SIZE) for _, kv_len in requests)
    table = torch.randperm(num_pages)[: len(requests) * max_pages].int().view(len(requests), -1)
    positions = [torch.arange(kv_len - q_len, kv_len) for q_len, kv_len in requests]
    places = [
        table[r, p // PAGE_SIZE].long() * PAGE_SIZE + p % PAGE_SIZE for r, p in enumerate(positions)
    ]
    group = AttentionMetadata(
        page_table=table,
        places=torch.cat(places),
        cu_q_lens=torch.tensor([0, *(q_len for q_len, _ in requests)]).cumsum(0).int(),
        kv_lens=torch.tensor([kv_len for _, kv_len in requests]).int(),
        max_q_len=max(q_len for q_len, _ in requests),
        max_kv_len=max(kv_len for _, kv_len in requests),
    )
    return Step(sum(q_len for q_len, _ in requests), torch.cat(positions), group)


def linear_row(model: Model, rows: int, with_head: bool) -> Row:
    """Times all linear layers of a step, gate and up with their activation."""
    dtype = model.plain_head.dtype
    inputs = {k: torch.randn(rows, k).to(dtype) for k in (HIDDEN, INNER)}
    size = sum(w.numel() for w in model.plain[0].values()) * LAYERS
    size += model.plain_head.numel() if with_head else 0

    def native() -> None:
        for layer in model.layers:
            linear(inputs[HIDDEN], layer.qkv)
            linear(inputs[HIDDEN], layer.o)
            gate_up_silu(inputs[HIDDEN], layer.gate_up)
            linear(inputs[INNER], layer.down)
        if with_head:
            linear(inputs[HIDDEN], model.head)

    def peer() -> None:
        for plain in model.plain:
            F.linear(inputs[HIDDEN], plain["qkv"])
            F.linear(inputs[HIDDEN], plain["o"])
            gate, up = F.linear(inputs[HIDDEN], plain["gate_up"]).chunk(2, dim=-1)
            F.silu(gate) * up
            F.linear(inputs[INNER], plain["down"])
        if with_head:
            F.linear(inputs[HIDDEN], model.plain_head)

    check(
        linear(inputs[HIDDEN], model.layers[0].qkv), F.linear(inputs[HIDDEN], model.plain[0]["qkv"])
    )
    return Row(
        f"linear layers{' + LM head' if with_head else ''}, {rows} rows",
        native,
        peer,
        "F.linear",
        flops=2.0 * rows * size,
        bytes=float(size * dtype.itemsize),
    )


def amx_row(model: Model, rows: int, without: cpu.NativeCpu) -> Row:
    """Times the linear layers of a step on AMX, beside the same code built without it."""
    native = cpu.native_cpu()
    assert native is not None
    dtype = model.plain_head.dtype
    products = []
    for layer in model.layers:
        products += layer.products.values()
    inputs = {k: torch.randn(rows, k).to(dtype) for k in (HIDDEN, INNER)}
    out = torch.empty(rows * max(w.out_features for w in products), dtype=dtype)
    size = sum(w.out_features * w.in_features for w in products)

    def run(operations: cpu.NativeCpu) -> None:
        for w in products:
            x = inputs[w.in_features]
            operations.linear(w.address, x.data_ptr(), rows, None, out.data_ptr(), True, None, 0)

    return Row(
        f"linear layers on AMX, {rows} rows",
        lambda: run(native),
        lambda: run(without),
        "without AMX",
        flops=2.0 * rows * size,
        bytes=float(size * dtype.itemsize),
    )


def attention_row(model: Model, name: str, requests: Sequence[tuple[int, int]]) -> Row:
    """Times the attention of all layers."""
    step = make_step(requests, len(model.pool))
    q = torch.randn(step.rows, HEADS, DIM).to(model.pool.dtype)

    def run(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        for layer in range(LAYERS):
            out = function(q, model.pool, layer, SPEC, step.group)
        return out

    check(run(paged_attention), run(paged_attention_reference))
    seen = sum(q_len * kv_len - q_len * (q_len - 1) / 2 for q_len, kv_len in requests)
    kv = sum(kv_len for _, kv_len in requests) * KV_HEADS * 2 * DIM * model.pool.dtype.itemsize
    return Row(
        f"attention, {name}",
        lambda: run(paged_attention),
        lambda: run(paged_attention_reference),
        "gather + SDPA",
        flops=4.0 * seen * HEADS * DIM * LAYERS,
        bytes=float(kv * LAYERS),
    )


def small_rows(model: Model, rows: int) -> list[Row]:
    """Norms, rotation with cache write and activation of all layers."""
    dtype = model.pool.dtype
    step = make_step([(1, 200)] * rows if rows <= 16 else [(rows, rows)], len(model.pool))
    x, weight = torch.randn(rows, HIDDEN).to(dtype), torch.ones(HIDDEN).to(dtype)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
    both = torch.randn(rows, 2 * INNER).to(dtype)
    rope = (qkv, step.positions, model.cos_sin, model.pool)
    rest = (step.group.places, HEADS, KV_HEADS)

    def each(call: Callable[[int], object], times: int = LAYERS) -> Callable[[], None]:
        def run() -> None:
            for layer in range(times):
                call(layer)

        return run

    return [
        Row(
            f"RMS norm twice a layer, {rows} rows",
            each(lambda _: rms_norm(x, weight, EPS), 2 * LAYERS),
            each(lambda _: rms_norm_reference(x, weight, EPS), 2 * LAYERS),
            "eager",
        ),
        Row(
            f"rope + cache write, {rows} rows",
            each(lambda layer: rope_and_cache(*rope, layer, *rest)),
            each(lambda layer: rope_and_cache_reference(*rope, layer, *rest)),
            "eager",
        ),
        Row(
            f"SiLU * up, {rows} rows",
            each(lambda _: silu_and_mul(both)),
            each(lambda _: silu_and_mul_reference(both)),
            "eager",
        ),
    ]


def in_one_call(
    model: Model, run: DenseRun, hidden: torch.Tensor, step: Step, lora: LoraStep | None = None
) -> torch.Tensor:
    """All layers as one operation."""
    return run(hidden.clone(), step.positions, step.group, model.pool, 0, lora)


def by_operation(
    model: Model, hidden: torch.Tensor, step: Step, lora: LoraStep | None = None
) -> torch.Tensor:
    """All layers as separate operations."""
    for i, layer in enumerate(model.layers):
        to_qkv, to_o, to_gate_up, to_down = (addition_to(lora, g, i) for g in layer.products)
        qkv = linear(layer.input_norm(hidden), layer.qkv, lora=to_qkv)
        rope = (qkv, step.positions, model.cos_sin, model.pool, i, step.group.places)
        q = rope_and_cache(*rope, HEADS, KV_HEADS)
        mixed = paged_attention(q, model.pool, i, SPEC, step.group)
        hidden = linear(mixed, layer.o, hidden, lora=to_o)
        inner = gate_up_silu(layer.post_norm(hidden), layer.gate_up, to_gate_up)
        hidden = linear(inner, layer.down, hidden, lora=to_down)
    return hidden


def logits_of(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """Computes the LM head."""
    normed = model.layers[0].input_norm(hidden)
    return linear(normed, model.head, None, torch.float32)


def step_row(model: Model, name: str, requests: Sequence[tuple[int, int]], with_head: bool) -> Row:
    """A whole step of the model, as one operation beside single native operations."""
    step = make_step(requests, len(model.pool))
    hidden = torch.randn(step.rows, HIDDEN).to(model.pool.dtype)
    dense = DenseRun.of(model.layers)
    assert dense is not None

    def finish(out: torch.Tensor) -> torch.Tensor:
        return logits_of(model, out) if with_head else out

    def run(fused: bool) -> torch.Tensor:
        if fused:
            return finish(in_one_call(model, dense, hidden, step))
        return finish(by_operation(model, hidden, step))

    check(run(True), run(False))
    linears = linear_row(model, step.rows, with_head)
    attention = attention_row(model, name, requests)
    return Row(
        f"whole step, {name}",
        lambda: run(True),
        lambda: run(False),
        "single operations",
        flops=linears.flops + attention.flops,
        bytes=linears.bytes + attention.bytes,
    )


def make_lora(num_adapters: int, rank: int, rows: int, dtype: torch.dtype) -> LoraStep:
    """Adapters of all projections; the rows take turns with them."""
    count = rank // 8
    slots = 1 + torch.arange(num_adapters)
    table = torch.zeros(LAYERS, num_adapters + 1, count, dtype=torch.int32)
    size = LAYERS * num_adapters * count
    table[:, 1:] = torch.randperm(size).int().view(LAYERS, num_adapters, count)
    counts = torch.full((LAYERS, num_adapters + 1), count, dtype=torch.int32)
    counts[:, 0] = 0

    def part(in_features: int, out_features: int, column: int = 0) -> LoraWeights:
        a, b = (huge_zeros((size, 8, width), dtype) for width in (in_features, out_features))
        a.copy_(torch.randn(a.shape) / in_features**0.5)
        b.copy_(torch.randn(b.shape) / 50)
        return LoraWeights(a, b, table, counts, column).pack()

    q, kv = HEADS * DIM, KV_HEADS * DIM
    of_rows = slots[torch.arange(rows) % num_adapters].int()
    return LoraStep(
        segments=LoraSegments.of(sort_tokens(of_rows.numpy())),
        qkv=(part(HIDDEN, q), part(HIDDEN, kv, q), part(HIDDEN, kv, q + kv)),
        o=(part(q, HIDDEN),),
        gate_up=(part(HIDDEN, INNER), part(HIDDEN, INNER, INNER)),
        down=(part(INNER, HIDDEN),),
    )


def lora_row(
    model: Model, name: str, requests: Sequence[tuple[int, int]], num_adapters: int, with_head: bool
) -> Row:
    """A whole step with adapters of rank 16 beside the same step without."""
    step = make_step(requests, len(model.pool))
    hidden = torch.randn(step.rows, HIDDEN).to(model.pool.dtype)
    dense = DenseRun.of(model.layers)
    assert dense is not None
    lora = make_lora(num_adapters, 16, step.rows, model.pool.dtype)

    def run(lora: LoraStep | None) -> torch.Tensor:
        out = in_one_call(model, dense, hidden, step, lora)
        return logits_of(model, out) if with_head else out

    out = by_operation(model, hidden, step, lora)
    check(run(lora), logits_of(model, out) if with_head else out)
    return Row(
        f"{num_adapters} adapters of rank 16, {name}",
        lambda: run(lora),
        lambda: run(None),
        "no adapter",
    )


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Stops the benchmark if a timed operation's result differs from its peer's."""
    scale = expected.float().abs().max().item()
    error = (out.float() - expected.float()).abs().max().item()
    if not error <= 0.03 * scale:
        raise SystemExit(f"wrong result: off by {error} of {scale}")


def make_rows(model: Model) -> list[Row]:
    """All rows; an operation's result is checked before."""
    rows = [linear_row(model, n, True) for n in (1, 4, 8, 16, 32)]
    rows += [linear_row(model, n, False) for n in (256, 512)]
    native = cpu.native_cpu()
    if native is not None and native.has_amx and model.pool.dtype == torch.bfloat16:
        without = cpu.load_without_amx()
        assert without is not None
        rows += [amx_row(model, n, without) for n in (1, 4, 8, 16, 64, 256, 512)]
    decode = [
        ("1 x 200", 1, 200),
        ("16 x 200", 16, 200),
        ("16 x 640", 16, 640),
        ("1 x 8000", 1, 8000),
    ]
    for name, count, context in decode:
        rows.append(attention_row(model, f"decode {name}", [(1, context)] * count))
    rows.append(attention_row(model, "256 of 256", [(256, 256)]))
    rows.append(attention_row(model, "512 of 2048", [(512, 2048)]))
    for count in (1, 16, 512):
        rows += small_rows(model, count)
    for name, count, context in decode[:2]:
        rows.append(step_row(model, f"decode {name}", [(1, context)] * count, True))
    rows.append(step_row(model, "prompt 256 of 256", [(256, 256)], False))
    rows.append(step_row(model, "prompt 512 of 1024", [(512, 1024)], False))
    for count in (1, 8, 32):
        rows.append(lora_row(model, "decode 64 x 160", [(1, 160)] * 64, count, True))
    rows.append(lora_row(model, "decode 1 x 160", [(1, 160)], 1, True))
    rows.append(lora_row(model, "prompt 512 of 512", [(512, 512)], 1, False))
    rows.append(digest_row())
    return rows


def digest_row() -> Row:
    """Pages as workers ship them, by one thread."""
    count, page_bytes = 64, 1 << 20
    pages = np.random.default_rng().integers(0, 256, (count, page_bytes), dtype=np.uint8)
    numbers = range(count)
    found = digest_pages(pages, numbers)
    assert (found == digest_pages_numpy(pages, numbers)).all(), "digests"
    return Row(
        name=f"page digests, one thread, {count} x 1 MiB",
        native=lambda: digest_pages(pages, numbers),
        peer=lambda: digest_pages_numpy(pages, numbers),
        peer_name="numpy",
        bytes=float(pages.nbytes),
    )


@harness.part
def kernels(run: Run) -> None:
    """All rows, in turns, so that other load on the machine affects all alike."""
    options = run.options
    if cpu.native_cpu() is None:
        raise SystemExit(f"no native operations: {cpu.native_cpu_missing()}")
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    with torch.inference_mode():
        rows = [row for row in make_rows(make_model(dtype)) if run.wants(row.name)]
        roofline = Roofline(dtype)

        def measure(row: Row) -> tuple[float, float, float, float]:
            rates = roofline.read_bytes_per_s(), roofline.flops_per_s()
            return timed(row.native), timed(row.peer), *rates

        found = in_turns({row.name: partial(measure, row) for row in rows}, options.repeats)
    for row in rows:
        native, peer, read, flops = zip(*found[row.name], strict=True)
        native_s = statistics.median(native)
        least_s = max(row.bytes / statistics.median(read), row.flops / statistics.median(flops))
        run.row(
            name=row.name,
            native_ms=spread(native, 1e3),
            gbytes_per_s=row.bytes / native_s / 1e9,
            gflops_per_s=row.flops / native_s / 1e9,
            roofline_share=least_s / native_s,
            peer=row.peer_name,
            peer_ms=spread(peer, 1e3),
            times_faster=ratio_of(peer, native),
        )
    probes = [figures[2:] for each in found.values() for figures in each]
    read_rate, peak = (statistics.median(rates) / 1e9 for rates in zip(*probes, strict=True))
    run.note(f"memory is read at {read_rate:.1f} GB/s; peak {peak:.0f} GFLOP/s")


if __name__ == "__main__":
    sys.exit(harness.main())
