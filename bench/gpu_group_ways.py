"""Ways to multiply few and many rows by weights of 4 bits on a GPU, beside one another.

    python bench/gpu_group_ways.py [--rows 16 64 256] [--products ...] [--out DIR]

Times are of captured graphs over weights that rotate beyond the L2 cache, with the launch that sums
what programs share; errors are root mean squares against float64 on de-quantised weights, relative,
beside those of the exact result rounded to bfloat16. `now` is what the product launches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from gpu_fp8 import BF16, PRODUCTS, ROTATING_BYTES, Found, Product, noted, release, time_us
from gpu_quantised import draw, run_shape, shapes_of
from gpu_setup import describe_gpu
from group_ways import GROUP, Way, multiply, pack
from weft.kernels.gpu.activation import silu_and_mul
from weft.kernels.gpu.dependent_launch import launch_options
from weft.kernels.gpu.groups_product import _SUMMED, _sum_kernel

SMALL = 2048
"""Rows of a weight by which a kernel is compiled."""
WAYS: dict[str, dict[int, tuple[Way, ...]]] = {
    "qkv": {
        1: (
            Way("resident", 8, 16, 8, 1, 1), Way("resident", 8, 16, 8, 1, 2),
            Way("resident", 8, 16, 16, 1, 1), Way("resident", 8, 16, 16, 1, 2),
            Way("mma", 8, 64, 4, 4, 6),
        ),
        8: (Way("resident", 8, 16, 8, 1, 1), Way("mma", 8, 128, 8, 8, 4)),
        16: (
            Way("resident", 16, 16, 8, 1, 1), Way("resident", 16, 16, 16, 1, 1),
            Way("mma", 16, 128, 8, 8, 4), Way("mma", 16, 64, 4, 4, 6), Way("mma", 16, 64, 4, 8, 4),
            Way("mma-direct", 16, 128, 8, 8, 3), Way("wgmma", 16, 128, 8, 8, 4),
        ),
        64: (
            Way("mma", 64, 128, 8, 5, 4), Way("mma", 64, 256, 8, 5, 4),
            Way("mma", 64, 128, 4, 5, 4),
            Way("wgmma", 64, 128, 8, 5, 4), Way("wgmma", 64, 64, 4, 4, 4),
            Way("mma-direct", 64, 256, 8, 5, 4),
        ),
        256: (
            Way("wgmma", 128, 128, 8, 1, 4), Way("wgmma", 128, 128, 8, 2, 4),
            Way("wgmma", 64, 128, 8, 1, 4), Way("mma", 64, 128, 8, 1, 4),
        ),
    },
    "o": {
        1: (
            Way("resident", 8, 16, 8, 1, 1), Way("resident", 8, 16, 8, 1, 2),
            Way("resident", 8, 16, 16, 1, 1), Way("resident", 8, 16, 16, 1, 2),
            Way("mma", 8, 64, 4, 4, 6),
        ),
        8: (Way("resident", 8, 16, 8, 1, 1), Way("mma", 8, 128, 8, 8, 4)),
        16: (
            Way("resident", 16, 16, 8, 1, 1), Way("resident", 16, 16, 16, 1, 1),
            Way("mma", 16, 128, 8, 8, 4), Way("mma", 16, 64, 4, 4, 6), Way("mma", 16, 64, 4, 8, 4),
            Way("wgmma", 16, 128, 8, 8, 4),
        ),
        64: (
            Way("mma", 64, 128, 8, 8, 4), Way("mma", 64, 256, 8, 8, 4),
            Way("wgmma", 64, 128, 8, 8, 4),
            Way("wgmma", 64, 64, 4, 4, 4),
        ),
        256: (
            Way("wgmma", 128, 128, 8, 2, 4), Way("wgmma", 64, 128, 8, 2, 4),
            Way("wgmma", 64, 64, 4, 1, 4),
        ),
    },
    "gate_up": {
        1: (
            Way("resident", 8, 16, 8, 1, 1), Way("resident", 8, 16, 8, 1, 2),
            Way("resident", 8, 16, 16, 1, 1), Way("mma", 8, 64, 4, 1, 6),
        ),
        8: (Way("resident", 8, 16, 8, 1, 1), Way("mma", 8, 64, 4, 1, 6)),
        16: (
            Way("resident", 16, 16, 8, 1, 1), Way("resident", 16, 16, 16, 1, 1),
            Way("mma", 16, 64, 4, 1, 6), Way("mma", 16, 32, 2, 1, 6), Way("mma", 16, 128, 8, 1, 6),
            Way("wgmma", 16, 64, 4, 1, 6),
        ),
        64: (
            Way("mma", 64, 64, 4, 1, 4), Way("mma", 64, 128, 8, 1, 4),
            Way("wgmma", 64, 64, 4, 1, 4),
            Way("mma", 64, 32, 2, 1, 4), Way("wgmma", 64, 128, 8, 1, 4),
        ),
        256: (
            Way("wgmma", 64, 64, 4, 1, 4), Way("wgmma", 64, 128, 8, 1, 4),
            Way("mma", 64, 64, 4, 1, 4),
        ),
    },
    "down": {
        1: (
            Way("resident", 8, 16, 4, 7, 4), Way("resident", 8, 16, 8, 7, 2),
            Way("resident", 8, 16, 16, 7, 1), Way("mma", 8, 64, 4, 8, 6),
        ),
        8: (Way("resident", 8, 16, 4, 7, 2), Way("mma", 8, 128, 8, 12, 6)),
        16: (
            Way("resident", 16, 16, 4, 7, 2), Way("resident", 16, 16, 8, 7, 2),
            Way("mma", 16, 128, 8, 12, 6), Way("mma", 16, 64, 4, 8, 6), Way("mma", 16, 64, 4, 4, 8),
            Way("wgmma", 16, 128, 8, 12, 6),
        ),
        64: (
            Way("mma", 64, 128, 8, 8, 4), Way("mma", 64, 256, 8, 8, 4),
            Way("mma", 64, 128, 4, 8, 4),
            Way("wgmma", 64, 128, 8, 8, 4), Way("wgmma", 64, 64, 4, 4, 4),
        ),
        256: (
            Way("wgmma", 128, 128, 8, 2, 4), Way("wgmma", 128, 128, 8, 4, 4),
            Way("wgmma", 64, 128, 8, 2, 4),
        ),
    },
}  # fmt: skip
"""What is timed of a product."""


def numbers(product: Product) -> tuple[torch.Tensor, torch.Tensor]:
    """A random weight: numbers [N, K] uint8 and scales [K / 128, N] float16."""
    size = (product.n, product.k)
    scales = torch.rand(product.k // GROUP, product.n, device="cuda").add_(0.5).mul_(2.0**-9)
    return torch.randint(0, 16, size, dtype=torch.uint8, device="cuda"), scales.half()


def run(
    x: torch.Tensor, data: torch.Tensor, scales: torch.Tensor, product: Product, way: Way
) -> torch.Tensor:
    """The product with what follows it, as other ways do it."""
    is_gated = product.is_gated and way.splits == 1
    columns = product.columns if is_gated else product.n
    options = launch_options(x.device)
    out = multiply(x, data, scales, columns, way, is_gated=is_gated, options=options)
    if way.splits > 1:
        parts, out = out, torch.empty((x.shape[0], columns), dtype=x.dtype, device=x.device)
        _sum_kernel[(x.shape[0], triton.cdiv(columns, _SUMMED))](
            out, parts, None, None, columns, parts.stride(0), SPLITS=way.splits, TILE=_SUMMED,
            num_warps=4, **options,
        )  # fmt: skip
    return silu_and_mul(out) if product.is_gated and not is_gated else out


def compile_one(case: tuple[Product, Way]) -> str:
    """Compiles a kernel by a small product; returns what went wrong."""
    product, way = case
    product = product._replace(n=SMALL)
    try:
        given, scales = numbers(product)
        x = torch.zeros(way.rows, product.k, device="cuda", dtype=BF16)
        run(x, pack(given), scales, product, way)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{product.name} {way}: {str(error)[:300]}"
    return ""


def exact_of(x: torch.Tensor, given: torch.Tensor, scales: torch.Tensor, product: Product) -> Any:
    """In float64, part by part of the weight's rows."""
    parts = []
    for rows, own in zip(given.split(4096), scales.split(4096, dim=1), strict=True):
        wide = (rows.double() - 8) * own.double().repeat_interleave(GROUP, 0).t()
        parts.append(x.double() @ wide.t())
    exact = torch.cat(parts, dim=1)
    if product.is_gated:
        gate, up = exact.chunk(2, dim=1)
        exact = F.silu(gate) * up
    return exact


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The error's norm over the result's."""
    return float((found.double() - exact).norm() / exact.norm())


def time_product(
    found: Found, product: Product, rows_of: list[int], out: Path | None, setup: dict[str, Any]
) -> None:
    """All ways of one product."""
    count = 2 * ROTATING_BYTES // (product.n * product.k) + 1
    given, scales = numbers(product)
    weights = [(pack(given), scales)]
    weights += [
        (torch.randint_like(weights[0][0], -(2**31), 2**31 - 1), scales) for _ in range(count)
    ]
    now = [draw(product, "int4") for _ in range(count)]
    plain = [torch.randn(product.n, product.k, device="cuda", dtype=BF16) for _ in range(4)]
    for rows in rows_of:
        x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
        exact = exact_of(x, given, scales, product)
        rounding = relative(exact.to(BF16), exact)

        def note(
            way: str,
            calls: list[Any],
            error: float | None,
            rows: int = rows,
            rounding: float = rounding,
        ) -> None:
            row = {"product": product.name, "rows": rows, "way": way, "us": time_us(calls)}
            row["error"] = error
            found.models.append(row)
            beside = "" if error is None else f"error {error:.2e}, rounding {rounding:.2e}"
            print(f"{product.name} x{rows} {row['us']:7.2f} us {way} {beside}", flush=True)

        with noted(found, f"{product.name} {rows} bfloat16"):
            each = [partial(F.linear, x, w) for w in plain]
            calls = [lambda c=c: silu_and_mul(c()) for c in each] if product.is_gated else each
            note("bfloat16", calls, None)
        for shape in shapes_of(product, rows, "int4", False)[:1]:
            with noted(found, f"{product.name} {rows} now"):
                note("now", [partial(run_shape, x, w, product, shape) for w in now], None)
        for way in WAYS[product.name].get(rows, ()):
            with noted(found, f"{product.name} {rows} {way}"):
                error = relative(run(x, *weights[0], product, way), exact)
                if not error <= 2 * rounding:
                    found.failures.append(f"error {product.name} {rows} {way}: {error:.2e}")
                calls = [partial(run, x, *w, product, way) for w in weights]
                note(",".join(str(value) for value in way), calls, error)
        if out:
            content = {**setup, "rows": found.models, "failures": found.failures}
            (out / "gpu_group_ways.json").write_text(json.dumps(content, indent=1))
    release()


def report(found: Found, rows_of: list[int]) -> None:
    """The best way of each product, and their sum."""
    for rows in rows_of:
        total = {"bfloat16": 0.0, "now": 0.0, "best": 0.0}
        shown = []
        for product in PRODUCTS:
            mine = [r for r in found.models if (r["product"], r["rows"]) == (product.name, rows)]
            ours = [r for r in mine if r["way"] not in total]
            if not ours:
                continue
            best = min(ours, key=lambda r: r["us"])
            total["best"] += best["us"]
            shown.append(f"{product.name} {best['us']:.1f} {best['way']}")
            for name in ("bfloat16", "now"):
                total[name] += sum(r["us"] for r in mine if r["way"] == name)
        print(
            f"layer x{rows}:", {name: round(us, 1) for name, us in total.items()}, *shown, sep="; "
        )


def main() -> None:
    """Compiles, checks and times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 16, 1, 256, 8])
    names = [product.name for product in PRODUCTS]
    parser.add_argument("--products", nargs="+", choices=names, default=names)
    parser.add_argument("--processes", type=int, default=6, help="that compile")
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    began, found = time.perf_counter(), Found()
    products = [product for product in PRODUCTS if product.name in arguments.products]
    cases = {
        (way, product.k, product.is_gated and way.splits == 1): (product, way)
        for product, rows in itertools.product(products, arguments.rows)
        for way in WAYS[product.name].get(rows, ())
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        failed = [error for error in pool.map(compile_one, cases.values()) if error]
    print(f"compiled {len(cases) - len(failed)} of {len(cases)}", *failed, sep="\n", flush=True)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    setup = describe_gpu(arguments.commit)
    for rows, product in itertools.product(arguments.rows, products):
        with noted(found, f"{product.name} {rows}"):
            time_product(found, product, [rows], arguments.out, setup)
    report(found, arguments.rows)
    print(f"{time.perf_counter() - began:.0f} s, {len(found.failures)} failures")
    print(*found.failures, sep="\n")


if __name__ == "__main__":
    main()
