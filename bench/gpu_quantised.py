"""Products with weights of 4 bits on a GPU, and whole models.

    python bench/gpu_quantised.py [--only kernels experts kv engine] [--sweep] [--models ...]

Kernels are timed in captured graphs over weights that rotate beyond the L2 cache. The roof is the
time to read the weight once at the copy rate of the same run, or to multiply. Whole models decode
batches of equal requests with 512 tokens in; their roof counts the bytes that a step reads.
A model is named with its format, as in `llama-3.1-8b:fp8:fp8_e4m3`, which is followed by that of
KV. bench/gpu_fp8.py measures the products with FP8 weights.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from clocks import compile_beside, graph_us, release
from engine_runs import run_batch
from gpu_engine import GPU_SETTINGS, PROMPT_TOKENS
from gpu_fp8 import BF16, FP8_BLOCKS, PRODUCTS, ROTATING_BYTES, ROWS, Product
from gpu_hybrid import told_kernels
from gpu_roof import Rates, _attention, _feed, decode_work, kept_rates
from harness import Harness, Run
from model_shapes import MODELS
from weft.checkpoint.config import ModelConfig
from weft.engine.loop.llm import LLM
from weft.kernels.ops.activation import silu_and_mul
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.linear.gpu_groups import in_floats
from weft.kernels.ops.linear.triton_groups_few_rows import (
    MAX_ROWS,
    PairExperts,
    few_rows_launch_config,
    multiply_few,
)
from weft.kernels.ops.linear.triton_groups_few_rows import FewRowsLaunchConfig as FewRows
from weft.kernels.ops.linear.triton_groups_product import (
    Experts,
    multiply_groups,
    product_launch_config,
)
from weft.kernels.ops.linear.triton_groups_product import GroupsLaunchConfig as Groups
from weft.kernels.ops.linear.triton_groups_tensor_cores import MAX_ROWS as MOST_WIDE_ROWS
from weft.kernels.ops.linear.triton_groups_tensor_cores import (
    TensorCoresLaunchConfig as TensorCores,
)
from weft.kernels.ops.linear.triton_groups_tensor_cores import (
    multiply_wide,
    tensor_cores_launch_config,
)
from weft.kernels.ops.moe.gpu import MAX_PACKED_ROWS
from weft.kernels.ops.moe.spec import PLAIN_EXPERTS
from weft.kernels.ops.moe.tiles import packed_tiles
from weft.kernels.ops.moe.triton_sort import sort_pairs
from weft.kernels.ops.pages.scaled_kv import SCALE_BYTES
from weft.kernels.shared.formats.packed_groups import PackedExperts, PackedGroups

Shape = Groups | FewRows | TensorCores
Format = Literal["int4", "mxfp4"]
FEW = (
    FewRows(8, 16, 4), FewRows(8, 16, 2), FewRows(16, 16, 4), FewRows(8, 32, 4),
    FewRows(4, 16, 2), FewRows(4, 8, 1), FewRows(8, 16, 4, True),
    FewRows(4, 16, 4, True), FewRows(8, 8, 2, True), FewRows(4, 8, 1, True),
)  # fmt: skip
SWEEP: dict[int, tuple[Shape, ...]] = {
    1: (*FEW, Groups(8, 16, 4, 4, 6)),
    2: (*FEW, Groups(8, 16, 4, 4, 6)),
    8: (
        Groups(8, 16, 4, 4, 6), TensorCores(8, 32, 2, 6), TensorCores(8, 64, 4, 6),
        TensorCores(8, 64, 4, 6, 4), TensorCores(8, 64, 4, 4, 8),
    ),
    16: (
        Groups(16, 32, 4, 4, 4, 2), TensorCores(16, 32, 2, 6), TensorCores(16, 32, 2, 4),
        TensorCores(16, 64, 4, 6), TensorCores(16, 64, 4, 6, 4), TensorCores(16, 64, 4, 4, 8),
        TensorCores(16, 32, 2, 6, 4),
    ),
    32: (
        Groups(32, 64, 0, 4, 6), TensorCores(32, 64, 4, 4), TensorCores(32, 64, 4, 4, 4),
        TensorCores(32, 64, 4, 6, 8), TensorCores(32, 128, 8, 4, 8),
        TensorCores(32, 64, 4, 3, 8, True), TensorCores(32, 64, 4, 3, 5, True),
    ),
    64: (
        Groups(64, 64, 0, 4, 4), Groups(64, 128, 0, 8, 4, 8), TensorCores(64, 64, 4, 4),
        TensorCores(64, 128, 8, 4), TensorCores(64, 64, 4, 4, 4), TensorCores(64, 128, 8, 4, 4),
        TensorCores(64, 128, 8, 4, 8), TensorCores(64, 64, 4, 3),
        TensorCores(64, 64, 4, 4, 8, True), TensorCores(64, 64, 4, 4, 5, True),
    ),
    256: (
        Groups(256, 128, 0, 8, 2, 1, True), TensorCores(64, 64, 4, 4),
        TensorCores(64, 128, 8, 4), TensorCores(64, 128, 8, 4, 2),
        TensorCores(128, 128, 8, 3), TensorCores(128, 128, 8, 3, 2),
    ),
}  # fmt: skip
"""Launch shapes that are timed beside the chosen one."""
EXPERTS = (
    ("gpt-oss-20b", 32, 2880, 2880, 4, "mxfp4"),
    ("qwen3-30b-a3b", 128, 2048, 768, 8, "int4"),
)
"""Model, experts, hidden and inner size, experts of a token, format."""
MANY_EXPERTS = (
    (64, 4, 4, 3), (32, 4, 4, 4), (64, 0, 4, 4), (64, 0, 4, 3), (128, 0, 8, 3), (128, 0, 4, 3),
    (64, 0, 4, 6), (32, 0, 4, 4), (32, 2, 2, 3), (32, 2, 2, 4), (16, 2, 2, 4), (64, 2, 2, 3),
)  # fmt: skip
"""Shapes of sorted pairs but for their rows."""
EXPERTS_ROWS = (1, 4, 64, 256)
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
                "symmetric": True, "actorder": None,
            },
        }
    },
}  # fmt: skip
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "int4": INT4,
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8-blocks": FP8_BLOCKS,
}
BITS = {"int4": 4 + 16 / 128, "mxfp4": 4 + 8 / 32, "fp8": 8.0, "fp8-blocks": 8.0}
"""Bits of a weight with its share of a scale."""
LONG_RUN = 256
"""Requests from which on a batch is not run before it is timed."""

harness = Harness(__file__, __doc__)
harness.flag("--sweep", action="store_true", help="time launch shapes beside the chosen")
harness.flag("--models", nargs="+", default=["llama-3.1-8b:int4", "gpt-oss-20b:mxfp4"])
harness.flag("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
harness.flag("--layers", type=int, default=0, help="of models; 0: all")
harness.flag("--rows", nargs="+", type=int, help="that are timed; default: all")
harness.flag("--long", type=int, default=0, help="requests of 1,024 in, 1,024 out")
harness.flag("--told", action="store_true", help="tell the kernels of a step")
harness.flag("--deterministic", action="store_true", help="models in this mode")
harness.flag("--processes", type=int, default=8, help="that compile kernels")


def draw(product: Product, number_format: Format) -> PackedGroups:
    """A random weight, made on the device as it lies there."""
    unit, half = (128, 64) if number_format == "int4" else (32, 32)
    width = -(-product.n // 16) * 16
    size = (product.n, -(-product.k // (2 * half)) * half)
    data = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
    groups = size[1] * 2 // unit
    if number_format == "int4":
        scales = torch.full((groups, width), 2.0**-9, dtype=torch.float16, device="cuda")
    else:
        scales = torch.full((groups, width), 121, dtype=torch.uint8, device="cuda")
    is_e2m1 = number_format == "mxfp4"
    return PackedGroups(data, scales, None, product.n, product.k, unit, is_e2m1)


def run_shape(x: torch.Tensor, w: PackedGroups, product: Product, shape: Shape) -> None:
    """The product by our kernel; what cannot be gated is, by a launch of its own."""
    out = torch.empty((x.shape[0], product.columns), device="cuda", dtype=BF16)
    if isinstance(shape, FewRows):
        multiply_few(out, x, w, is_gated=product.is_gated, launch=shape)
        return
    is_gated = product.is_gated and shape.splits == 1 and shape.columns < 128
    if product.is_gated and not is_gated:
        out = torch.empty((x.shape[0], product.n), device="cuda", dtype=BF16)
    if isinstance(shape, TensorCores):
        multiply_wide(out, x, w, is_gated=is_gated, launch=shape)
    else:
        multiply_groups(out, x, w, shape, is_gated=is_gated)
    if product.is_gated and not is_gated:
        silu_and_mul(out)


def shapes_of(product: Product, rows: int, number_format: Format, is_sweep: bool) -> list[Shape]:
    """The chosen shape, and those that are timed beside it."""
    if rows not in SWEEP:
        return []
    half = 64 if number_format == "int4" else 32
    chosen: Shape = product_launch_config(
        rows, product.columns, half, is_gated=product.is_gated, is_fixed=False
    )
    if rows <= MAX_ROWS:
        chosen = few_rows_launch_config(rows, product.k, half, is_gated=product.is_gated)
    elif number_format == "int4" and rows <= MOST_WIDE_ROWS:
        chosen = tensor_cores_launch_config(
            rows, product.columns, product.k, is_gated=product.is_gated
        )
    return list(dict.fromkeys([chosen, *(SWEEP[rows] if is_sweep else ())]))


def cases(is_sweep: bool) -> list[tuple[Product, int, Format, Shape]]:
    """All kernels that `time_kernels` launches; products of one K have them in common."""
    formats: tuple[Format, ...] = ("int4", "mxfp4") if not is_sweep else ("int4",)
    return [
        (product, rows, number_format, shape)
        for product, rows, number_format in itertools.product(PRODUCTS[1:], SWEEP, formats)
        for shape in shapes_of(product, rows, number_format, is_sweep)
    ]


def compile_one(case: tuple[Product, int, Format, Shape]) -> str:
    """Compiles a kernel by a small product; returns what went wrong."""
    product, rows, number_format, shape = case
    product = product._replace(n=512)
    try:
        x = torch.zeros(rows, product.k, device="cuda", dtype=BF16)
        run_shape(x, draw(product, number_format), product, shape)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{product.name} {rows} {number_format} {shape}: {str(error)[:200]}"
    return ""


def time_kernels(run: Run, rates: Rates, is_sweep: bool, rows_of: Sequence[int]) -> None:
    """Times every way of every product."""
    for product in PRODUCTS:
        size = product.n * product.k
        plain = [
            torch.randn(product.n, product.k, device="cuda", dtype=BF16)
            for _ in range(max(2, ROTATING_BYTES // (2 * size)))
        ]
        xs = {n: torch.randn(n, product.k, device="cuda", dtype=BF16) for n in rows_of}
        for rows, x in xs.items():
            with run.noted(f"bfloat16 {product.name} {rows}"):
                calls = [_after(product, lambda w=w, x=x: F.linear(x, w)) for w in plain]
                note(run, product, rows, "", "bfloat16", calls, rates)
        del plain
        for number_format in ("int4",) if is_sweep else ("int4", "mxfp4"):
            weights = [draw(product, number_format) for _ in range(2 * ROTATING_BYTES // size + 1)]
            for rows, x in xs.items():
                for place, shape in enumerate(shapes_of(product, rows, number_format, is_sweep)):
                    with run.noted(f"{product.name} {rows} {number_format} {shape}"):
                        calls = [
                            lambda w=w, x=x, s=shape, p=product: run_shape(x, w, p, s)
                            for w in weights
                        ]
                        way = ",".join(str(value) for value in shape)
                        note(
                            run, product, rows, number_format, way, calls, rates, place == 0
                        )  # fmt: skip
                if rows >= 256:
                    with run.noted(f"{product.name} {rows} {number_format} in floats"):
                        calls = [
                            _after(product, lambda w=w, x=x: F.linear(x, in_floats(w, BF16)))
                            for w in weights[:3]
                        ]
                        chosen = rows not in SWEEP
                        note(
                            run, product, rows, number_format, "floats", calls, rates, chosen
                        )  # fmt: skip
            del weights
        release()


def _after(product: Product, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return (lambda: silu_and_mul(call())) if product.is_gated else call


def note(
    run: Run,
    product: Product,
    rows: int,
    number_format: str,
    way: str,
    calls: Sequence[Callable[[], object]],
    rates: Rates,
    is_chosen: bool = False,
) -> None:
    """Times one way of computing a product."""
    work = 2.0 * rows * product.n * product.k / rates.flop_per_s
    weight = BITS.get(number_format, 16) / 8 * product.n * product.k
    read = (weight + 2.0 * rows * (product.k + product.columns)) / rates.bytes_per_s
    keep(
        run,
        product.name,
        rows,
        number_format,
        way,
        graph_us(calls),
        1e6 * max(work, read),
        is_chosen,
    )


def keep(
    run: Run,
    product: str,
    rows: int,
    number_format: str,
    way: str,
    us: float,
    roof_us: float,
    is_chosen: bool,
) -> None:
    """Adds a way of computing a product to the table."""
    figures = {"format": number_format or "none", "way": way, "is_chosen": is_chosen}
    figures |= {"us": us, "roof_us": roof_us, "share": roof_us / us}
    run.row(table="products", product=product, rows=rows, **figures)


def call_experts(
    product: Product, packed: PackedExperts, rows: int, top_k: int, shape: Shape
) -> Callable[[], None]:
    """A product of random pairs; of gate and up each row of x is that of `top_k` pairs."""
    experts, pairs = packed.shape[0], rows * top_k
    ids = torch.rand(rows, experts, device="cuda").topk(top_k, dim=1).indices.int()
    if rows * top_k <= experts:
        ids = torch.randperm(experts, device="cuda")[:pairs].int().view(rows, top_k)
    is_gated = product.is_gated
    x = torch.randn(rows if is_gated else pairs, product.k, device="cuda", dtype=BF16)
    shares = None if is_gated else torch.ones(rows, top_k, device="cuda")
    out = torch.empty(pairs, product.columns, device="cuda", dtype=BF16)
    taken = top_k if is_gated else 1
    if isinstance(shape, FewRows):
        few = PairExperts(ids, shares, taken, PLAIN_EXPERTS)
        return partial(multiply_few, out, x, packed, is_gated=is_gated, launch=shape, experts=few)
    blocks = sort_pairs(ids, experts, shape.rows)
    many = Experts(blocks, shares, taken, PLAIN_EXPERTS)
    return partial(multiply_groups, out, x, packed, shape, is_gated=is_gated, experts=many)


def shapes_of_experts(
    product: Product, rows: int, experts: int, top_k: int, half: int
) -> list[Shape]:
    """The chosen shape first."""
    if rows <= MAX_PACKED_ROWS:
        chosen: Shape = few_rows_launch_config(1, product.k, half, is_gated=product.is_gated)
        return list(dict.fromkeys([chosen, *FEW]))
    count = packed_tiles(rows * top_k, experts, is_plain=True).rows
    chosen = product_launch_config(
        count, product.columns, half, is_gated=product.is_gated, is_fixed=False, can_split=False
    )
    others = [Groups(count, *shape) for shape in MANY_EXPERTS if count <= 16 or not shape[1]]
    return list(dict.fromkeys([chosen, *others]))


def experts_products() -> Iterator[tuple[Product, int, int, Format]]:
    """Products of gate and up, and down, with experts, experts of a token, and format."""
    for model, experts, hidden, inner, top_k, number_format in EXPERTS:
        yield Product(f"{model} up", 2 * inner, hidden, True), experts, top_k, number_format
        yield Product(f"{model} down", hidden, inner), experts, top_k, number_format


def draw_experts(product: Product, count: int, number_format: Format) -> PackedExperts:
    """Random experts."""
    first = draw(product, number_format)
    packed = PackedExperts.empty(count, first)
    packed.data.random_()
    packed.scales.copy_(first.scales.expand_as(packed.scales))
    return packed


def compile_experts(case: tuple[tuple[Product, int, int, Format], int, int]) -> str:
    """As `compile_one`, for all shapes of a product of pairs and experts from one place on."""
    (product, experts, top_k, number_format), rows, place = case
    half = 64 if number_format == "int4" else 32
    shapes = shapes_of_experts(product, rows, experts, top_k, half)[place::3]
    try:
        packed = draw_experts(product, top_k, number_format)
        for shape in shapes:
            call_experts(product, packed, rows, top_k, shape)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"experts {product.name} {rows}: {str(error)[:200]}"
    return ""


def time_experts(run: Run, rates: Rates, rows_of: Sequence[int]) -> None:
    """Products of pairs of a row and an expert; the roof reads each chosen expert once."""
    for product, experts, top_k, number_format in experts_products():
        half, numbers = (64 if number_format == "int4" else 32), product.n * product.k
        count = max(1, 2 * ROTATING_BYTES // (experts * numbers)) + 1
        copies = [draw_experts(product, experts, number_format) for _ in range(count)]
        for rows in rows_of:
            read = min(experts, rows * top_k) * numbers * BITS[number_format] / 8
            roof = 1e6 * read / rates.bytes_per_s
            shapes = shapes_of_experts(product, rows, experts, top_k, half)
            for place, shape in enumerate(shapes):
                with run.noted(f"experts {product.name} {rows} {shape}"):
                    calls = [
                        call_experts(product, copies[i % count], rows, top_k, shape)
                        for i in range(4 * count)
                    ]
                    way = ",".join(str(value) for value in shape)
                    us, name = graph_us(calls), f"experts {product.name}"
                    keep(run, name, rows, number_format, way, us, roof, place == 0)
        del copies
        release()


def bench_model(
    run: Run,
    rates: Rates,
    model: str,
    number_format: str,
    batches: Sequence[int],
    layers: int,
    kv_dtype: str,
    long: int = 0,
    is_told: bool = False,
    is_fixed: bool = False,
) -> None:
    """Decode and prefill of one model in one format; empty: bfloat16; fp8: made of it. Pages hold
    what `batches` need and little more, so that models in bfloat16 fit as well. `long`:
    requests at once with 1,024 tokens in and 1,024 out; 0: none. Told: prints a step's kernels.
    Fixed: in deterministic mode.
    """
    fields = dict(MODELS[model])
    if layers:
        fields["num_hidden_layers"] = layers
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:layers]
    if number_format in QUANTIZATIONS:
        fields["quantization_config"] = QUANTIZATIONS[number_format]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(fields))
        config = ModelConfig.load(folder)
        began = time.perf_counter()
        settings = {
            **GPU_SETTINGS,
            "kv_dtype": kv_dtype,
            "quantization": "fp8" if number_format == "fp8" else "auto",
            "num_pages": max(37 * max(batches) + 64, 1200, 130 * long),
            "max_running_requests": max(*batches, long),
            "deterministic": is_fixed,
        }
        row: dict[str, Any] = {"model": model, "format": number_format or "bfloat16"}
        row |= {"kv": kv_dtype, "deterministic": is_fixed}
        with LLM(folder, **settings) as llm:
            row["ready_s"] = time.perf_counter() - began
            row["memory_gb"] = torch.cuda.memory_allocated() / 1e9
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            for batch in batches:
                with run.noted(f"engine {model} {number_format} batch {batch}"):
                    if batch < LONG_RUN:
                        run_batch(llm, batch, PROMPT_TOKENS, 8)
                    runs = [run_batch(llm, batch, PROMPT_TOKENS, 64) for _ in range(2)]
                    best = min(runs, key=lambda run: run.seconds / run.num_steps)
                    step_s = best.seconds / best.num_steps
                    saved = _saved_bytes(config, number_format, batch)
                    work = decode_work(config, batch, PROMPT_TOKENS + 32.0)
                    roof = max(
                        (work.num_bytes - saved) / rates.bytes_per_s, work.flop / rates.flop_per_s
                    )
                    figures = {"requests": batch, "tokens_per_s": batch / step_s}
                    figures |= {"step_ms": 1e3 * step_s, "share_of_roof": roof / step_s}
                    host_ms = 1e3 * statistics.median(best.host_s)
                    run.row(row, table="decode", **figures, host_ms=host_ms)
            with run.noted(f"engine {model} {number_format} prefill"):
                times = [run_batch(llm, 4, 4096, 2).first_token_s for _ in range(3)]
                run.row(row, table="prompts", tokens_per_s=4 * 4096 / min(times))
            for batch in batches if is_told else ():
                told_kernels(partial(run_batch, llm, batch, 16, 33), f"x{batch}", 32)
            if long:
                with run.noted(f"engine {model} {number_format} {long} long requests"):
                    done = run_batch(llm, long, 1024, 1024)
                    run.row(
                        row,
                        table="long requests",
                        requests=long,
                        tokens_per_s=long * 1024 / done.all_seconds,
                        decode_tokens_per_s=long * done.num_steps / max(done.seconds, 1e-9),
                        first_token_s=done.first_token_s,
                    )


def _saved_bytes(config: Any, number_format: str, tokens: int) -> float:
    """Bytes of weights that a step reads less than in bfloat16: of all products but the LM head, or
    of experts alone.
    """
    if number_format not in BITS:
        return 0.0
    feeds = sum(_feed(config, layer, tokens)[0] for layer in range(config.num_layers))
    has_attention = number_format in ("int4", "fp8", "fp8-blocks")
    attention = config.num_layers * _attention(config)[0] if has_attention else 0.0
    return (feeds + attention) * (16 - BITS[number_format]) / 8


def time_kv(run: Run, rates: Rates) -> None:
    """Decode attention of Llama-3.1-8B over K and V in bfloat16 and in 8 bits."""
    heads, kv_heads, dim, page_size, layers = 32, 8, 128, 16, 2
    for requests, length in ((64, 8192), (256, 1024), (1, 65536), (1, 8192)):
        per = length // page_size
        table = torch.randperm(requests * per, device="cuda").view(requests, per).int()
        cu = torch.arange(requests + 1, device="cuda").int()
        lens = torch.full((requests,), length, device="cuda").int()
        q = torch.randn(requests, heads, dim, device="cuda", dtype=BF16)
        step = AttentionMetadata(table, torch.arange(requests, device="cuda"), cu, lens, 1, length)
        spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
        row: dict[str, Any] = {"requests": requests, "length": length}
        for name, kept in (("bfloat16", None), ("fp8", torch.uint8), ("int8", torch.int8)):
            with run.noted(f"attention {requests} x {length} {name}"):
                shape = (requests * per, kv_heads, layers, 2, page_size)
                if kept is not None:
                    width = dim + SCALE_BYTES
                    pool = torch.randint(0, 48, (*shape, width), dtype=kept, device="cuda")
                else:
                    pool = torch.randn((*shape, dim), device="cuda", dtype=BF16)
                calls = [
                    lambda p=pool, n=n, given=(spec, step), q=q: paged_attention(q, p, n, *given)
                    for n in range(layers)
                ]
                row[f"{name}_us"] = us = graph_us(calls)
                row[f"{name}_share"] = 1e6 * pool.nbytes / layers / rates.bytes_per_s / us
                del pool, calls
            release()
        run.row(row, table="attention")


@harness.part_if_named
def compiled(run: Run) -> None:
    """Compiles the kernels that `kernels` and `experts` launch."""
    options = run.options
    rows = options.rows or (*SWEEP, *EXPERTS_ROWS)
    dense = [case for case in cases(options.sweep) if case[1] in rows]
    compile_beside(compile_one, dense, options.processes, run)
    of_experts = [each for each in EXPERTS_ROWS if each in rows]
    every = list(itertools.product(experts_products(), of_experts, range(3)))
    compile_beside(compile_experts, every, options.processes, run)


@harness.part
def kernels(run: Run) -> None:
    """Every way of every product."""
    rows = run.options.rows or sorted({*ROWS, *SWEEP})
    time_kernels(run, kept_rates(run), run.options.sweep, rows)


@harness.part
def experts(run: Run) -> None:
    """Products of pairs of a row and an expert."""
    rows = [n for n in EXPERTS_ROWS if n in (run.options.rows or (n,))]
    time_experts(run, kept_rates(run), rows)


@harness.part
def kv(run: Run) -> None:
    """Attention over KV in 8 bits."""
    time_kv(run, kept_rates(run))


@harness.part
def engine(run: Run) -> None:
    """Whole models."""
    options, rates = run.options, kept_rates(run)
    for each in options.models:
        model, number_format, kv_dtype = [*each.split(":"), "", ""][:3]
        with run.noted(f"engine {each}"):
            bench_model(
                run, rates, model, number_format, options.batches, options.layers,
                kv_dtype or "auto", options.long, options.told, options.deterministic,
            )  # fmt: skip
        # Only once no frame of the model's run holds its tensors.
        release()


if __name__ == "__main__":
    sys.exit(harness.main())
