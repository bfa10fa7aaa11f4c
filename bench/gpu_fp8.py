"""Products with FP8 weights on a GPU: their errors, their speed, and that of whole models.

    python bench/gpu_fp8.py [--parts numerics kernels engine] [--sweep] [--out DIR]

Kernels are timed in captured graphs over weights that rotate beyond the L2 cache, beside the same
product in bfloat16 and beside torch's `scaled_mm`; the roof is the time to read the weight once at
the copy rate of the same run, or to multiply at twice bfloat16's rate. A part that fails is
reported, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_kernels import capture, replay_us
from gpu_roof import Rates, measure_rates
from gpu_setup import describe_gpu
from weft.kernels.activation import silu_and_mul
from weft.kernels.fp8 import FP8, FP8_MAX
from weft.kernels.gpu.fp8_few_rows import FewRows, few_rows
from weft.kernels.gpu.fp8_few_rows import SpreadLaunchConfig as Spread
from weft.kernels.gpu.fp8_linear import torch_product
from weft.kernels.gpu.fp8_rows import Fp8Rows, quantise_rows
from weft.kernels.gpu.fp8_tiles import TileLaunchConfig as Tile
from weft.kernels.gpu.fp8_tiles import multiply_fp8
from weft.kernels.quantised import (
    FP8_GROUP,
    Fp8Blocks,
    Fp8Channels,
    Fp8Matrix,
    quantise_fp8_channels,
)

BF16 = torch.bfloat16
REPEATS = 9
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""`quantization_config` of Qwen's and DeepSeek's checkpoints."""
ROTATING_BYTES = 200 << 20


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


@dataclass(slots=True)
class Timing:
    """One way to compute a product."""

    product: str
    rows: int
    scales: str
    """channels or blocks; empty for bfloat16."""
    way: str
    us: float
    roof_us: float


@dataclass(slots=True)
class Error:
    """A kernel's error on the card, against float64 on the dequantised numbers."""

    product: str
    rows: int
    scales: str
    way: str
    error: float
    """Root mean square of the error, over that of the exact result."""
    peer_error: float
    """The same for the exact result rounded to bfloat16."""

    @property
    def is_close(self) -> bool:
        """Whether the error is at most twice that of rounding to bfloat16."""
        return self.error <= 2 * self.peer_error


@dataclass(slots=True)
class Found:
    """Results of all parts."""

    errors: list[Error] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


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


def check_numerics(found: Found, is_sweep: bool) -> None:
    """Errors of each kernel at real shapes."""
    for product, scales in itertools.product(PRODUCTS, ("channels", "blocks")):
        (matrix,) = matrices(product, scales, 1)
        wide = matrix.dequantised(torch.float32).double()
        for rows in ROWS:
            x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
            shapes: list[Shape | None] = [*shapes_of(product, rows, scales, False)]
            for shape in shapes + [None] * (rows > 1):
                with noted(found, f"numerics {product.name} {rows} {scales} {shape}"):
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
                    row = Error(
                        product.name,
                        rows,
                        scales,
                        str(shape or "scaled_mm"),
                        float(error),
                        float(peer),
                    )
                    found.errors.append(row)
                    if not row.is_close:
                        found.failures.append(f"error {row}")
        del matrix, wide
        release()
    worst = max((row.error / row.peer_error for row in found.errors), default=0.0)
    print(f"numerics: {len(found.errors)} products, worst error {worst:.2f} times bfloat16's")
    with noted(found, "rounding of rows"):
        check_rows(found)


def rounded_rows(rows: Fp8Rows) -> torch.Tensor:
    """Rounded rows in float32."""
    if rows.has_groups:
        wide = rows.scales.T.repeat_interleave(FP8_GROUP, 1)
        return (rows.data.float() * wide[:, : rows.data.shape[1]])[: rows.rows]
    return rows.data.float() * rows.scales[:, None]


def after(out: torch.Tensor, product: Product) -> torch.Tensor:
    """The activation that follows a product by torch."""
    return silu_and_mul(out) if product.is_gated else out


def check_rows(found: Found) -> None:
    """Checks that our kernel rounds rows as torch does."""
    x = torch.randn(64, 14336, device="cuda", dtype=BF16)
    x[3] = 0
    rounded = quantise_rows(x, has_groups=False)
    peer = (x.float() * (448 / x.float().abs().amax(1, keepdim=True).clamp_min(1e-30))).to(FP8)
    differ = (rounded.data.view(torch.uint8) != peer.view(torch.uint8)).float().mean().item()
    print(f"rounded rows: {differ:.2e} of the numbers differ from torch's (ties)")
    if differ > 1e-3:
        found.failures.append(f"rounded rows differ: {differ}")


class noted:
    """Context that reports a failure in its block, and lets the program go on."""

    def __init__(self, found: Found, what: str) -> None:
        self._found, self._what = found, what

    def __enter__(self) -> None:
        """Begins."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        """Reports, unless the run was interrupted."""
        if error is None or not isinstance(error, Exception):
            return False
        text = f"{self._what}: {type(error).__name__}: {str(error)[:300]}"
        self._found.failures.append(text)
        print(f"FAILED {text}", flush=True)
        if not isinstance(error, (RuntimeError, ValueError)) and "out of resource" not in text:
            traceback.print_exc()
        return True


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


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of a call."""
    graph, number = capture(calls)
    return sorted(replay_us(graph, number) for _ in range(REPEATS))[REPEATS // 2]


def time_kernels(found: Found, rates: Rates, is_sweep: bool) -> None:
    """Times every way of every product."""
    for product in PRODUCTS:
        count = max(2, -(-ROTATING_BYTES // (product.n * product.k)))
        plain = [
            torch.randn(product.n, product.k, device="cuda", dtype=BF16)
            for _ in range(max(2, count // 2))
        ]
        for rows in ROWS:
            x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
            with noted(found, f"bfloat16 {product.name} {rows}"):
                calls: list[Callable[[], object]] = [
                    (lambda w=w, x=x: silu_and_mul(F.linear(x, w)))
                    if product.is_gated
                    else (lambda w=w, x=x: F.linear(x, w))
                    for w in plain
                ]
                note_time(found, product, rows, "", "bfloat16", calls, rates)
        del plain
        release()
        for scales in ("channels", "blocks"):
            weights = matrices(product, scales, count)
            for rows in ROWS:
                x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
                shapes = shapes_of(product, rows, scales, is_sweep)
                for shape in shapes:
                    with noted(found, f"time {product.name} {rows} {scales} {shape}"):
                        calls = shape_calls(x, weights, product, shape)
                        note_time(found, product, rows, scales, str(shape), calls, rates)
                if rows > 1:
                    with noted(found, f"scaled_mm {product.name} {rows} {scales}"):
                        for way, calls in torch_ways(x, product, scales, weights):
                            note_time(found, product, rows, scales, way, calls, rates)
                    with noted(found, f"rounding {product.name} {rows} {scales}"):
                        has_groups = scales == "blocks"
                        calls = [lambda x=x, g=has_groups: quantise_rows(x, has_groups=g)]
                        note_time(found, product, rows, scales, "rounding of rows", calls, rates)
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


def compile_all(is_sweep: bool, processes: int) -> None:
    """Compiles the kernels in processes beside each other, for this one to find in Triton's cache;
    what fails there fails again where it is timed.
    """
    cases = [
        (product._replace(n=4096 if product.is_gated else 2048), rows, scales, shape)
        for product, rows, scales in itertools.product(PRODUCTS, ROWS, ("channels", "blocks"))
        for shape in shapes_of(product, rows, scales, is_sweep)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        failed = [error for error in pool.map(compile_one, cases, chunksize=4) if error]
    print(f"compiled {len(cases) - len(failed)} of {len(cases)} kernels", flush=True)


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


def note_time(
    found: Found,
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
    row = Timing(product.name, rows, scales, way, time_us(calls), 1e6 * max(work, read))
    found.timings.append(row)


def report_kernels(found: Found) -> None:
    """A line for each product and number of rows: bfloat16, then each kind's ways by time."""
    for product, rows in itertools.product(PRODUCTS, ROWS):
        mine = [row for row in found.timings if (row.product, row.rows) == (product.name, rows)]
        plain = next((row.us for row in mine if not row.scales), float("nan"))
        for scales in ("channels", "blocks"):
            ways = sorted((row for row in mine if row.scales == scales), key=lambda row: row.us)
            roof = ways[0].roof_us if ways else float("nan")
            shown = "; ".join(f"{row.us:.1f} {_short(row.way)}" for row in ways)
            print(
                f"{product.name} x{rows} {scales}: bfloat16 {plain:.1f}, roof {roof:.1f} | {shown}"
            )


def _short(way: str) -> str:
    for name in ("columns=", "groups=", "warps=", "stages=", "slices=", "tile=", "rows=", "Shape"):
        way = way.replace(name, "")
    for name in ("is_turned=", "is_copied="):
        way = way.replace(f"{name}True", name[3]).replace(f", {name}False", "")
    return way.replace(", ", ",")


def release() -> None:
    """Gives unused memory back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def write_json(folder: Path, setup: dict[str, Any], rates: Rates, found: Found) -> None:
    """Writes gpu_fp8.json."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        **setup,
        "copy_tb_s": rates.bytes_per_s / 1e12,
        "matmul_tflop_s": rates.flop_per_s / 1e12,
        **asdict(found),
    }
    (folder / "gpu_fp8.json").write_text(json.dumps(content, indent=1))


def bench_engine(
    found: Found,
    rates: Rates,
    models: Sequence[str],
    batches: Sequence[int],
    formats: Sequence[str],
) -> None:
    """Decode and prefill of whole models, in bfloat16 and quantised, in turns."""
    for model, quantization in itertools.product(models, formats):
        with noted(found, f"engine {model} {quantization}"):
            bench_model(found, rates, model, batches, quantization)
        # Only once no frame of the model's run holds its tensors.
        release()


def bench_model(
    found: Found, rates: Rates, model: str, batches: Sequence[int], quantization: str
) -> None:
    """Decode and prefill of one model in one format."""
    from gpu_engine import bench_decode, run_batch
    from model_shapes import write_config
    from weft.checkpoint.config import ModelConfig
    from weft.engine.loop.llm import LLM

    if model == "qwen3-30b-a3b" and torch.cuda.get_device_properties(0).total_memory < 100e9:
        # Beside its weights in bfloat16 there is no room for more.
        batches = [batch for batch in batches if batch <= 64]
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name), model)
        if quantization == "fp8-blocks":
            write_blocks(folder)
        config = ModelConfig.load(folder)
        began = time.perf_counter()
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "quantization": "auto" if quantization == "fp8-blocks" else quantization,
            "dummy_weights": True,
            "num_pages": 50 * max(batches) + 1100,
            "max_context_tokens": 5120,
            "max_running_requests": max(batches),
            "max_step_tokens": 8192,
            "prefill_chunk_tokens": 4096,
            "prefix_cache": False,
            "inter_token_target_s": 1.0,
        }
        with LLM(folder, **settings) as llm:
            row: dict[str, Any] = {"model": model, "quantization": quantization, "decode": {}}
            row["ready_s"] = time.perf_counter() - began
            row["memory_gb"] = torch.cuda.memory_allocated() / 1e9
            for batch in batches:
                with noted(found, f"engine {model} {quantization} batch {batch}"):
                    decode, _ = bench_decode(llm, config, batch, rates, 64)
                    row["decode"][batch] = {
                        "tokens_per_s": decode.tokens_per_s,
                        "step_ms": decode.step_ms,
                        "device_ms": decode.device_ms,
                        "host_ms": decode.host_ms,
                    }
            with noted(found, f"engine {model} {quantization} prefill"):
                times = [run_batch(llm, 4, 4096, 2).first_token_s for _ in range(3)]
                row["prefill_tokens_per_s"] = 4 * 4096 / min(times)
        found.models.append(row)
        print(json.dumps(row), flush=True)


def write_blocks(folder: Path) -> None:
    """Makes the model's checkpoint one of FP8 blocks, as Qwen's are."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": FP8_BLOCKS}
    path.write_text(json.dumps(fields))


def report_engine(found: Found) -> None:
    """Each model's rates beside those in bfloat16."""
    plain = {row["model"]: row for row in found.models if row["quantization"] == "auto"}
    for row in found.models:
        beside = plain.get(row["model"], row)
        parts = []
        for batch, decode in row["decode"].items():
            before = beside["decode"].get(batch, decode)
            ratio = decode["tokens_per_s"] / before["tokens_per_s"]
            on_device = before["device_ms"] / decode["device_ms"] if decode["device_ms"] else 0.0
            parts.append(
                f"{batch}: {decode['tokens_per_s']:.0f} tok/s {ratio:.2f}x ({on_device:.2f}x)"
            )
        prefill = row.get("prefill_tokens_per_s", float("nan"))
        ratio = prefill / beside.get("prefill_tokens_per_s", prefill)
        print(
            f"{row['model']} {row['quantization']}: {', '.join(parts)}; prefill {prefill:.0f} "
            f"tok/s {ratio:.2f}x; {row['memory_gb']:.1f} GB, ready in {row['ready_s']:.0f} s"
        )


def main() -> None:
    """Runs the parts, and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = ("numerics", "kernels", "engine")
    parser.add_argument("--parts", nargs="+", choices=every, default=list(every))
    parser.add_argument("--sweep", action="store_true", help="time launch shapes beside the chosen")
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "qwen3-30b-a3b"])
    parser.add_argument("--formats", nargs="+", default=["auto", "fp8", "fp8-blocks"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--processes", type=int, default=8, help="that compile kernels")
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    setup, found, began = describe_gpu(arguments.commit), Found(), time.perf_counter()
    rates = measure_rates()
    print(
        f"{setup['device']}, torch {setup['torch']}: copy {rates.bytes_per_s / 1e12:.2f} TB/s, "
        f"products {rates.flop_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    release()
    parts: dict[str, Callable[[], None]] = {
        "numerics": lambda: check_numerics(found, arguments.sweep),
        "kernels": lambda: time_kernels(found, rates, arguments.sweep),
        "engine": lambda: bench_engine(
            found, rates, arguments.models, arguments.batches, arguments.formats
        ),
    }
    if {"numerics", "kernels"} & set(arguments.parts):
        with noted(found, "compiling"):
            compile_all(arguments.sweep, arguments.processes)
    for part in arguments.parts:
        with noted(found, part):
            parts[part]()
        print(f"{part}: done after {time.perf_counter() - began:.0f} s", flush=True)
        if part == "kernels":
            report_kernels(found)
        if arguments.out:
            # Written after each part, so that a time limit does not lose earlier ones.
            write_json(arguments.out, setup, rates, found)
    report_engine(found)
    print(f"{len(found.failures)} failures")
    for failure in found.failures:
        print(failure)


if __name__ == "__main__":
    main()
