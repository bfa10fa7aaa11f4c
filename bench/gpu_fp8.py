"""Products with FP8 weights on a GPU: their errors and their speed.

    python bench/gpu_fp8.py [--only numerics kernels few] [--sweep]

Kernels are timed in captured graphs over weights that rotate beyond the L2 cache, beside the same
product in bfloat16 and beside torch's `scaled_mm`; the roof is the time to read the weight once at
the copy rate of the same run, or to multiply at twice bfloat16's rate. `few` (only if named) times
products of 1 to 16 rows by each kernel that takes them, in turns, and `attention` those of
Qwen3-30B-A3B's attention in blocks for 32 to 256 rows. bench/gpu_quantised.py measures
whole models.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from clocks import capture, compile_beside, graph_us, num_inputs, release, replay_us
from gpu_roof import Rates, kept_rates
from harness import Harness, Run, spread
from weft.kernels.ops.activation import silu_and_mul
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.gpu_fp8 import torch_product
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.linear.triton_fp8_few_rows import FewRows, few_rows
from weft.kernels.ops.linear.triton_fp8_few_rows import SpreadLaunchConfig as Spread
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, quantise_rows
from weft.kernels.ops.linear.triton_fp8_tiles import TileLaunchConfig as Tile
from weft.kernels.ops.linear.triton_fp8_tiles import multiply_fp8
from weft.kernels.ops.linear.triton_streamed import StreamedLaunchConfig, multiply_streamed
from weft.kernels.shared.formats.fp8 import FP8, FP8_MAX
from weft.kernels.shared.formats.quantised import (
    FP8_GROUP,
    Fp8Blocks,
    Fp8Channels,
    Fp8Matrix,
    quantise_fp8_channels,
)

BF16 = torch.bfloat16
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""`quantization_config` of Qwen's and DeepSeek's checkpoints."""
ROTATING_BYTES = 200 << 20

harness = Harness(__file__, __doc__)
harness.flag("--sweep", action="store_true", help="time launch shapes beside the chosen")
harness.flag("--processes", type=int, default=8, help="that compile kernels")


class Product(NamedTuple):
    """A matrix product of Llama-3.1-8B."""

    name: str
    n: int
    k: int
    is_gated: bool = False

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.is_gated else self.n


PRODUCTS = (
    Product("qkv", 6144, 4096),
    Product("o", 4096, 4096),
    Product("gate_up", 28672, 4096, True),
    Product("down", 4096, 14336),
)
ROWS = (1, 16, 64, 256, 4096)
FEW_PRODUCTS = (
    *PRODUCTS,
    Product("qkv of Qwen3-30B-A3B", 5120, 2048),
    Product("o of Qwen3-30B-A3B", 2048, 4096),
)
FEW_ROWS = (1, 2, 4, 8, 16)
ATTENTION_LAUNCHES: dict[int, tuple[Tile, ...]] = {
    32: tuple(Tile(32, 64, FP8_GROUP, 4, 5, True, splits=n) for n in (1, 2, 3, 4)),
    64: (
        *(Tile(64, 64, FP8_GROUP, 4, 5, True, splits=n) for n in (1, 2, 3, 4)),
        Tile(64, 128, FP8_GROUP, 8, 4, True, splits=4),
    ),
    128: (
        *(Tile(64, 64, FP8_GROUP, 4, 5, True, splits=n) for n in (1, 2)),
        Tile(128, 64, FP8_GROUP, 4, 5, True, splits=2),
        Tile(128, 128, FP8_GROUP, 8, 4, True, splits=4),
        Tile(128, 64, FP8_GROUP, 4, 4, is_copied=True, splits=2),
    ),
    256: (
        Tile(64, 64, FP8_GROUP, 4, 5, True),
        Tile(128, 64, FP8_GROUP, 4, 4, True, splits=2),
        Tile(128, 128, FP8_GROUP, 8, 4, True, splits=2),
        Tile(128, 128, FP8_GROUP, 8, 4, True, splits=4),
        Tile(128, 128, FP8_GROUP, 8, 4, is_copied=True, splits=2),
        Tile(128, 128, FP8_GROUP, 8, 4, is_copied=True, splits=4),
    ),
}
"""By the number of rows."""
STREAMED = (
    StreamedLaunchConfig(16, 8, 4), StreamedLaunchConfig(16, 8, 2), StreamedLaunchConfig(32, 8, 2),
    StreamedLaunchConfig(32, 8, 1), StreamedLaunchConfig(16, 4, 4), StreamedLaunchConfig(16, 4, 2),
    StreamedLaunchConfig(32, 4, 2), StreamedLaunchConfig(32, 4, 1), StreamedLaunchConfig(16, 16, 2),
)  # fmt: skip
_TURNS = 7
Shape = Spread | Tile
SWEEP: dict[int, tuple[Shape, ...]] = {
    1: (
        Spread(4, 32, 8), Spread(2, 32, 4), Spread(8, 8, 4), Spread(4, 8, 2),
        Spread(8, 16, 8), Spread(2, 16, 4), Spread(4, 16, 4),
    ),
    16: (
        Tile(16, 64, 256, 4, 5, True), Tile(16, 128, 128, 8, 5, True),
        Tile(16, 64, 128, 4, 8, True), Tile(16, 64, 256, 4, 7, True),
        Tile(16, 64, 128, 4, 5, True, splits=8), Tile(16, 64, 256, 4, 4, True, splits=2),
    ),
    64: (
        Tile(64, 64, 256, 4, 4, True), Tile(64, 128, 128, 8, 5, True),
        Tile(64, 32, 256, 4, 5), Tile(64, 64, 256, 4, 4, False, True),
        Tile(64, 32, 256, 4, 7), Tile(64, 32, 256, 4, 7, False, True),
        Tile(64, 64, 256, 4, 5, True, True), Tile(64, 64, 128, 4, 5, True, splits=4),
    ),
    256: (
        Tile(128, 128, 128, 8, 4, False, True), Tile(64, 128, 256, 4, 4, False, True),
        Tile(128, 64, 256, 4, 4, False, True), Tile(64, 64, 256, 4, 5, False, True),
        Tile(128, 64, 128, 4, 6, False, True), Tile(128, 128, 128, 8, 5, False, True),
    ),
    4096: (
        Tile(128, 128, 128, 8, 4, False, True), Tile(128, 256, 128, 8, 4, False, True),
    ),
}  # fmt: skip
"""Launch shapes; the first two are always measured."""


def quantise_blocks(weight: torch.Tensor) -> Fp8Blocks:
    """Rounds each block to FP8, the largest magnitude of the block being FP8_MAX."""
    n, k = weight.shape
    whole = F.pad(weight.float(), (0, -k % FP8_GROUP, 0, -n % FP8_GROUP))
    tiles = whole.view(whole.shape[0] // FP8_GROUP, FP8_GROUP, -1, FP8_GROUP)
    scales = tiles.abs().amax(dim=(1, 3)) / FP8_MAX
    data = (tiles / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(whole.shape)
    return Fp8Blocks(data[:n, :k].contiguous(), scales, FP8_GROUP)


def matrices(product: Product, scales: str, count: int) -> list[Fp8Matrix]:
    """Random weights of a product."""
    make = quantise_fp8_channels if scales == "channels" else quantise_blocks
    shape = (product.n, product.k)
    return [
        make(torch.randn(shape, device="cuda", dtype=BF16) / product.k**0.5) for _ in range(count)
    ]


def run_shape(
    x: torch.Tensor, matrix: Fp8Matrix, product: Product, shape: Shape | None, given: FewRows
) -> torch.Tensor:
    """The product by a kernel of ours, with the rounding of rows where it takes them rounded."""
    out = torch.empty((x.shape[0], product.columns), device="cuda", dtype=BF16)
    if isinstance(shape, Tile):
        rounded = quantise_rows(x, has_groups=not isinstance(matrix, Fp8Channels))
        multiply_fp8(
            rounded, matrix, out, given.bias, given.residual, is_gated=given.is_gated, launch=shape
        )
    else:
        few_rows(x, matrix, out, given, shape)
    return out


def suits(shape: Shape, product: Product, scales: str) -> bool:
    """Whether a kernel can be launched with this shape."""
    if isinstance(shape, Tile) and shape.splits > 1 and product.is_gated:
        return False
    if scales == "blocks" and not isinstance(shape, Spread):
        return shape.tile == FP8_GROUP and shape.columns <= FP8_GROUP
    return True


def shapes_of(product: Product, rows: int, scales: str, is_sweep: bool) -> list[Shape]:
    """The shapes that are measured."""
    wanted = SWEEP[rows] if is_sweep else SWEEP[rows][:2]
    return [shape for shape in wanted if suits(shape, product, scales)]


def check_numerics(run: Run, is_sweep: bool) -> None:
    """Errors of each kernel at real shapes."""
    for product, scales in itertools.product(PRODUCTS, ("channels", "blocks")):
        (matrix,) = matrices(product, scales, 1)
        wide = matrix.dequantised(torch.float32).double()
        for rows in ROWS:
            x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
            shapes: list[Shape | None] = [*shapes_of(product, rows, scales, False)]
            for shape in shapes + [None] * (rows > 1):
                with run.noted(f"numerics {product.name} {rows} {scales} {shape}"):
                    taken = x.double()
                    rounded = quantise_rows(x, has_groups=scales == "blocks")
                    if not isinstance(shape, Spread):
                        taken = rounded_rows(rounded).double()
                    exact = taken @ wide.T
                    if product.is_gated:
                        gate, up = exact.chunk(2, dim=1)
                        exact = F.silu(gate) * up
                    if shape is None:
                        out = after(torch_product(rounded, matrix), product)
                    else:
                        out = run_shape(
                            x, matrix, product, shape, FewRows(is_gated=product.is_gated)
                        )
                    norm = exact.square().mean().sqrt()
                    error = (out.double() - exact).square().mean().sqrt() / norm
                    peer = (exact.to(BF16).double() - exact).square().mean().sqrt() / norm
                    figures = {"rows": rows, "scales": scales, "way": str(shape or "scaled_mm")}
                    figures |= {"error": float(error), "of_rounding": float(peer)}
                    run.row(table="errors", product=product.name, **figures)
                    if error > 2 * peer:
                        run.fail(f"error of {product.name}, {figures}")
        del matrix, wide
        release()
    with run.noted("rounding of rows"):
        check_rows(run)


def rounded_rows(rows: Fp8Rows) -> torch.Tensor:
    """Rounded rows in float32."""
    if rows.has_groups:
        wide = rows.scales.T.repeat_interleave(FP8_GROUP, 1)
        return (rows.data.float() * wide[:, : rows.data.shape[1]])[: rows.rows]
    return rows.data.float() * rows.scales[:, None]


def after(out: torch.Tensor, product: Product) -> torch.Tensor:
    """The activation that follows a product by torch."""
    return silu_and_mul(out) if product.is_gated else out


def check_rows(run: Run) -> None:
    """Checks that our kernel rounds rows as torch does."""
    x = torch.randn(64, 14336, device="cuda", dtype=BF16)
    x[3] = 0
    rounded = quantise_rows(x, has_groups=False)
    peer = (x.float() * (448 / x.float().abs().amax(1, keepdim=True).clamp_min(1e-30))).to(FP8)
    differ = (rounded.data.view(torch.uint8) != peer.view(torch.uint8)).float().mean().item()
    run.note(f"rounded rows: {differ:.2e} of the numbers differ from torch's (ties)")
    if differ > 1e-3:
        run.fail(f"rounded rows differ: {differ}")


def torch_ways(
    x: torch.Tensor, product: Product, scales: str, weights: Sequence[Fp8Matrix]
) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """torch's own products of rounded rows, the activation behind them; of whole tensors with one
    scale for a comparison."""
    rounded = quantise_rows(x, has_groups=scales == "blocks")
    yield (
        f"scaled_mm {scales}",
        [lambda w=w: after(torch_product(rounded, w), product) for w in weights],
    )
    if scales == "blocks":
        return
    one = torch.ones((), device="cuda")
    for is_fast in (True, False):
        options = {"out_dtype": BF16, "use_fast_accum": is_fast}
        yield (
            f"scaled_mm tensor{'' if is_fast else ', exact'}",
            [
                lambda w=w, options=options: after(
                    torch._scaled_mm(rounded.data, w.data.t(), one, one, **options), product
                )
                for w in weights
            ],
        )


def time_kernels(run: Run, rates: Rates, is_sweep: bool) -> None:
    """Times every way of every product."""
    for product in PRODUCTS:
        count = max(2, -(-ROTATING_BYTES // (product.n * product.k)))
        plain = [
            torch.randn(product.n, product.k, device="cuda", dtype=BF16)
            for _ in range(max(2, count // 2))
        ]
        for rows in ROWS:
            x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
            with run.noted(f"bfloat16 {product.name} {rows}"):
                calls: list[Callable[[], object]] = [
                    (lambda w=w, x=x: silu_and_mul(F.linear(x, w)))
                    if product.is_gated
                    else (lambda w=w, x=x: F.linear(x, w))
                    for w in plain
                ]
                note_time(run, product, rows, "", "bfloat16", calls, rates)
        del plain
        release()
        for scales in ("channels", "blocks"):
            weights = matrices(product, scales, count)
            for rows in ROWS:
                x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
                shapes = shapes_of(product, rows, scales, is_sweep)
                for shape in shapes:
                    with run.noted(f"time {product.name} {rows} {scales} {shape}"):
                        calls = shape_calls(x, weights, product, shape)
                        note_time(run, product, rows, scales, str(shape), calls, rates)
                if rows > 1:
                    with run.noted(f"scaled_mm {product.name} {rows} {scales}"):
                        for way, calls in torch_ways(x, product, scales, weights):
                            note_time(run, product, rows, scales, way, calls, rates)
                    with run.noted(f"rounding {product.name} {rows} {scales}"):
                        has_groups = scales == "blocks"
                        calls = [lambda x=x, g=has_groups: quantise_rows(x, has_groups=g)]
                        note_time(run, product, rows, scales, "rounding of rows", calls, rates)
            del weights
            release()


def shape_calls(
    x: torch.Tensor, weights: Sequence[Fp8Matrix], product: Product, shape: Shape
) -> list[Callable[[], object]]:
    """Calls of a kernel alone, rows rounded before."""
    given, scales = FewRows(is_gated=product.is_gated), not isinstance(weights[0], Fp8Channels)
    out = torch.empty((x.shape[0], product.columns), device="cuda", dtype=BF16)
    if isinstance(shape, Tile):
        rounded = quantise_rows(x, has_groups=scales)
        return [
            lambda w=w: multiply_fp8(
                rounded, w, out, None, None, is_gated=product.is_gated, launch=shape
            )
            for w in weights
        ]
    return [lambda w=w: few_rows(x, w, out, given, shape) for w in weights]


def compile_one(case: tuple[Product, int, str, Shape]) -> str:
    """Compiles a kernel by a product of fewer columns; returns what went wrong."""
    product, rows, scales, shape = case
    try:
        (matrix,) = matrices(product, scales, 1)
        x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
        run_shape(x, matrix, product, shape, FewRows(is_gated=product.is_gated))
    except Exception as error:
        return str(error)
    return ""


def compile_streamed(case: tuple[Product, int, str, StreamedLaunchConfig | None]) -> str:
    """Compiles a kernel of few rows; returns what went wrong."""
    product, rows, scales, launch = case
    try:
        (weight,) = few_weights(product, scales, 1)
        x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
        out = torch.empty((rows, product.columns), device="cuda", dtype=BF16)
        streamed(x, out, FewRows(is_gated=product.is_gated), launch, weight)
    except Exception as error:
        return str(error)
    return ""


def note_time(
    run: Run,
    product: Product,
    rows: int,
    scales: str,
    way: str,
    calls: Sequence[Callable[[], object]],
    rates: Rates,
) -> None:
    """Times one way of computing a product."""
    size = 1 if scales else 2
    work = 2.0 * rows * product.n * product.k / (rates.flop_per_s * (2 if scales else 1))
    read = (
        size * product.n * product.k + 2.0 * rows * (product.k + product.columns)
    ) / rates.bytes_per_s
    us, roof_us = graph_us(calls), 1e6 * max(work, read)
    figures = {"rows": rows, "scales": scales or "none", "way": way, "us": us, "roof_us": roof_us}
    run.row(table="kernels", product=product.name, **figures, share=roof_us / us)


def compile_all(run: Run) -> None:
    """Compiles what the parts launch."""
    cases = [
        (product._replace(n=4096 if product.is_gated else 2048), rows, scales, shape)
        for product, rows, scales in itertools.product(PRODUCTS, ROWS, ("channels", "blocks"))
        for shape in shapes_of(product, rows, scales, run.options.sweep)
    ]
    compile_beside(compile_one, cases, run.options.processes, run)


@harness.part
def numerics(run: Run) -> None:
    """Errors of all kernels."""
    compile_all(run)
    check_numerics(run, run.options.sweep)


@harness.part
def kernels(run: Run) -> None:
    """Every way of every product."""
    compile_all(run)
    time_kernels(run, kept_rates(run), run.options.sweep)


@harness.part_if_named
def few(run: Run) -> None:
    """Products of few rows. Times include the launch that rounds the rows, where a way has one."""
    kinds = ("none", "channels", "blocks")
    launches = STREAMED if run.options.sweep else (None,)
    cases = list(itertools.product(FEW_PRODUCTS, (8, 16), kinds, launches))
    compile_beside(compile_streamed, cases, run.options.processes, run)
    rates = kept_rates(run)
    for product, scales in itertools.product(FEW_PRODUCTS, kinds):
        weights = few_weights(product, scales, min(12, num_inputs(product.n * product.k)))
        for rows in (1, 4, 16) if run.options.sweep else FEW_ROWS:
            with run.noted(f"{product.name}, {scales}, {rows} rows"):
                time_few(run, product, scales, weights, rows, rates.bytes_per_s)
        del weights
        release()


@harness.part_if_named
def attention(run: Run) -> None:
    """Products of attention, whose rows are rounded before, and those in bfloat16."""
    rates = kept_rates(run)
    for product in FEW_PRODUCTS[len(PRODUCTS) :]:
        count = min(12, num_inputs(product.n * product.k))
        plain, weights = (few_weights(product, scales, count) for scales in ("none", "blocks"))
        for rows, launches in ATTENTION_LAUNCHES.items():
            x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
            out = torch.empty((rows, product.n), device="cuda", dtype=BF16)
            rounded = quantise_rows(x, has_groups=True)
            ways: dict[str, Callable[..., object]] = {
                "bfloat16, cuBLAS": partial(F.linear, x),
                "cuBLAS": partial(torch_product, rounded),
            }
            for launch in launches:
                given = {"bias": None, "residual": None, "launch": launch}
                ways[str(launch)] = partial(multiply_fp8, rounded, out=out, **given)
            graphs = {}
            for name, way in ways.items():
                with run.noted(f"{product.name}, {rows} rows, {name}"):
                    taken = plain if name.startswith("bf") else weights
                    graphs[name] = capture([partial(way, weight) for weight in taken])
            with run.noted(f"rounding for {product.name}, {rows} rows"):
                graphs["rounding of rows"] = capture([partial(quantise_rows, x, has_groups=True)])
            note_turns(run, "attention", product, rows, graphs, 1e6 / rates.bytes_per_s)
        del plain, weights
        release()


def note_turns(
    run: Run, table: str, product: Product, rows: int, graphs: dict[str, Any], us_per_byte: float
) -> None:
    """Times graphs in turns; shares are those of reading a weight in FP8."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_TURNS):
        for name, graph in graphs.items():
            times[name].append(replay_us(*graph))
    for name, found in times.items():
        us = spread(found)
        share = product.n * product.k * us_per_byte / us.median
        run.row(table=table, product=product.name, rows=rows, way=name, us=us, share=share)


def few_weights(product: Product, scales: str, count: int) -> Sequence[Fp8Matrix | torch.Tensor]:
    """Random weights of a product, in bfloat16 without scales."""
    if scales == "none":
        shape = product.n, product.k
        return [torch.randn(shape, device="cuda", dtype=BF16) for _ in range(count)]
    return matrices(product, scales, count)


def time_few(
    run: Run,
    product: Product,
    scales: str,
    weights: Sequence[Fp8Matrix | torch.Tensor],
    rows: int,
    bytes_per_s: float,
) -> None:
    """Times each way of a product with few rows, in turns."""
    x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
    out = torch.empty((rows, product.columns), device="cuda", dtype=BF16)
    given = FewRows(is_gated=product.is_gated)

    def chosen(weight: Fp8Matrix | torch.Tensor) -> object:
        form = PlainForm(weight) if isinstance(weight, torch.Tensor) else weight
        w = LinearWeight(product.n, product.k, BF16, product.is_gated, form, None)
        return gate_up_silu(x, w) if product.is_gated else linear(x, w)

    def other(weight: Fp8Matrix | torch.Tensor) -> object:
        if isinstance(weight, torch.Tensor):
            return after(F.linear(x, weight), product)
        taken = quantise_rows(x, has_groups=scales == "blocks")
        return multiply_fp8(taken, weight, out, None, None, is_gated=product.is_gated)

    ways = {"chosen": chosen, "cuBLAS" if scales == "none" else "rounded": other}
    for launch in STREAMED if run.options.sweep else (None,):
        name = "streamed" if launch is None else str(launch)
        ways[name] = partial(streamed, x, out, given, launch)
    graphs = {
        name: capture([partial(way, weight) for weight in weights]) for name, way in ways.items()
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_TURNS):
        for name, graph in graphs.items():
            times[name].append(replay_us(*graph))
    size = 2 if scales == "none" else 1
    roof_us = 1e6 * size * product.n * product.k / bytes_per_s
    for name, found in times.items():
        us = spread(found)
        figures = {"rows": rows, "scales": scales, "way": name, "us": us}
        run.row(table="few", product=product.name, **figures, share=roof_us / us.median)


def streamed(
    x: torch.Tensor,
    out: torch.Tensor,
    given: FewRows,
    launch: StreamedLaunchConfig | None,
    weight: Fp8Matrix | torch.Tensor,
) -> None:
    """`multiply_streamed` with its weight last."""
    multiply_streamed(x, weight, out, given, launch)


if __name__ == "__main__":
    sys.exit(harness.main())
