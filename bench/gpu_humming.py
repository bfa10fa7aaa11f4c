"""Products with weights of 4 bits by humming-kernels, in the shapes of bench/gpu_quantised.py.

    python bench/gpu_humming.py [--only dense experts]

Needs the package `humming-kernels`, which compiles its kernels when they are first used. Times are
of captured graphs over weights that rotate beyond the L2 cache; errors are root mean squares
against float64 on de-quantised weights, beside those of the exact result rounded to bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from clocks import graph_us, release
from gpu_fp8 import BF16, PRODUCTS, ROTATING_BYTES, Product
from harness import Harness, Run
from humming.layer import HummingLayer
from humming.testing.data import generate_moe_tensors
from humming.tune import get_heuristics_config
from weft.kernels.ops.activation import silu_and_mul

GROUP = 128
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096)
EXPERTS = (("qwen3-30b-a3b up", 128, 1536, 2048, 8), ("qwen3-30b-a3b down", 128, 2048, 768, 1))
"""Product, experts, N, K, experts of a row."""
EXPERTS_ROWS = (1, 16, 64, 256, 4096)

harness = Harness(__file__, __doc__)


def draw(n: int, k: int, experts: int = 0) -> HummingLayer:
    """A random weight in groups, laid out as the library wants it."""
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config={"dtype": "uint4", "group_size": GROUP},
        num_experts=experts or None,
        torch_dtype=BF16,
    ).cuda()
    size = (experts, n) if experts else (n,)
    limits = torch.iinfo(torch.int32)
    numbers = torch.randint(
        limits.min, limits.max, (*size, k // 8), dtype=torch.int32, device="cuda"
    )
    scales = (0.5 + torch.rand(*size, k // GROUP, device="cuda")).mul_(2.0**-9).to(BF16)
    layer.load_from_tensors({"weight": numbers, "weight_scale": scales})
    return layer


def dequantised(layer: HummingLayer) -> torch.Tensor:
    """The weight before it was laid out, [N, K] float64."""
    shifts = torch.arange(0, 32, 4, device="cuda", dtype=torch.int32)
    numbers = (layer.weight.unsqueeze(-1) >> shifts & 15).flatten(-2).double() - 8
    return numbers * layer.weight_scale.double().repeat_interleave(GROUP, -1)


def root_mean_square(values: torch.Tensor) -> float:
    """Of all values."""
    return float(values.double().square().mean().sqrt())


def check(product: Product, rows: int) -> dict[str, float]:
    """Errors of a product, relative to the result."""
    layer = draw(product.n, product.k)
    weight = dequantised(layer)
    layer.transform()
    x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
    exact = x.double() @ weight.t()
    size = root_mean_square(exact)
    return {
        "error": root_mean_square(layer(x).double() - exact) / size,
        "error_of_rounding": root_mean_square(exact.to(BF16).double() - exact) / size,
    }


def after(product: Product, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Gate and up become one by a launch of its own."""
    return (lambda: silu_and_mul(call())) if product.is_gated else call


def layers(n: int, k: int, experts: int = 0) -> list[HummingLayer]:
    """As many as the L2 cache cannot hold."""
    count = 2 * ROTATING_BYTES // (n * k * max(1, experts)) + 2
    drawn = [draw(n, k, experts) for _ in range(count)]
    for layer in drawn:
        layer.transform()
    return drawn


@harness.part
def dense(run: Run) -> None:
    """All products and numbers of rows, beside bfloat16."""
    for product in PRODUCTS:
        ours = layers(product.n, product.k)
        plain = [torch.randn(product.n, product.k, device="cuda", dtype=BF16) for _ in range(4)]
        for rows in ROWS:
            x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
            row: dict[str, Any] = {"product": product.name, "rows": rows}
            with run.noted(f"{product.name} {rows}"):
                row["bfloat16_us"] = graph_us(
                    [after(product, partial(torch.nn.functional.linear, x, w)) for w in plain]
                )
                row["humming_us"] = graph_us([after(product, partial(w, x)) for w in ours])
                if rows in (1, 16, 256):
                    row |= check(product, rows)
            run.row(row)
        del ours, plain
        release()


@harness.part
def experts(run: Run) -> None:
    """Products of pairs of a row and an expert; the sort is not timed."""
    for name, count, n, k, top_k in EXPERTS:
        ours = layers(n, k, count)
        for rows in EXPERTS_ROWS:
            row: dict[str, Any] = {"product": name, "rows": rows}
            with run.noted(f"{name} {rows}"):
                inputs = rows if top_k > 1 else 8 * rows
                config = get_heuristics_config(
                    ours[0].humming_config, shape_m=inputs, gemm_type="indexed"
                )
                block = config["block_shape"][0]
                ids = torch.rand(rows, count, device="cuda").topk(8, dim=1).indices.int()
                pairs = ids if top_k > 1 else ids.view(-1, 1)
                _, _, order, of_blocks, padded = generate_moe_tensors(
                    pairs, count, "indexed", block
                )
                x = torch.randn(inputs, k, device="cuda", dtype=BF16)
                row["block"] = block
                row["humming_us"] = graph_us([
                    partial(
                        w, x, sorted_ids=order, expert_ids=of_blocks, num_tokens_padded=padded,
                        top_k=top_k, compute_config={"gemm_type": "indexed"}, tuning_config=config,
                    )
                    for w in ours
                ])  # fmt: skip
            run.row(row)
        del ours
        release()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(harness.main())
