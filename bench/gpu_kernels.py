"""Time of the GPU's kernels against the memory and matmul rates measured in the same run.

    python bench/gpu_kernels.py [--only trees rows tiles experts attention heads]

Each row is the median of replays of a graph of calls over inputs that rotate beyond the L2 cache.
Between them the row's ceiling is measured, so that both meet the same clocks and the same limit of
power.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from clocks import capture, num_inputs, replay_us
from harness import Harness, Run, spread
from weft.kernels.ops.activation import silu_and_mul
from weft.kernels.ops.attention import gpu as gpu_attention
from weft.kernels.ops.attention.library_flash import prompt_rows, supports
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec, OwnKv
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.triton_tiled import tiled_linear
from weft.kernels.ops.lora import add_lora, sort_tokens
from weft.kernels.ops.lora.spec import LoraAddition, LoraSegments, LoraWeights
from weft.kernels.ops.moe.gpu import routed_moe
from weft.kernels.ops.moe.triton_combine import NormAfter
from weft.kernels.ops.norm import add_rms_norm, rms_norm
from weft.kernels.ops.page_digest import page_digests
from weft.kernels.ops.pages import gather_pages, scatter_pages
from weft.kernels.ops.replaced.triton_replaced import replace_products
from weft.kernels.ops.rope import rope_and_cache

BF16 = torch.bfloat16
PAGE_SIZE = 16
REPEATS = 15

harness = Harness(__file__, __doc__)


@triton.jit
def _read_kernel(out: tl.tensor, x: tl.tensor, steps: int, BLOCK: tl.constexpr) -> None:
    begin = tl.program_id(0).to(tl.int64) * steps * BLOCK
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(steps):
        total += tl.load(x + begin + step * BLOCK + column)
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


class Bench:
    """Ceilings of this device, and rows against them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # As much as the largest rows read.
        source = torch.randint(0, 99, (1 << 28,), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        programs, block = 1 << 14, 4096
        steps = source.numel() // programs // block
        sums = torch.empty(programs, dtype=torch.int32, device="cuda")
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
        # A kernel: inside a graph a plain copy becomes a node for a copy engine, which is slower.
        ceilings: dict[str, tuple[float, Callable[[], object]]] = {
            "copy": (2.0 * source.nbytes, lambda: torch.add(source, 1, out=target)),
            "read": (
                float(source.nbytes),
                lambda: _read_kernel[(programs,)](sums, source, steps, BLOCK=block, num_warps=8),
            ),
            "matmul": (2.0 * 8192**3, lambda: a @ b),
        }
        # With the calls, which hold the memory that their graphs use.
        self._ceilings = {
            kind: (work, call, *capture([call])) for kind, (work, call) in ceilings.items()
        }

    def row(
        self, name: str, work: float, calls: Sequence[Callable[[], object]], kind: str = "copy"
    ) -> float:
        """Adds a row.

        Args:
            name: Its name.
            work: Bytes or floating point operations of one call.
            calls: Equal calls on different inputs.
            kind: Ceiling: copy, read or matmul.

        Returns:
            Median microseconds of one call.
        """
        graph, number = capture(calls)
        most, _, ceiling, ceiling_calls = self._ceilings[kind]
        times, shares, rates = [], [], []
        for _ in range(REPEATS):
            rate = most / replay_us(ceiling, ceiling_calls) / 1e6
            times.append(replay_us(graph, number))
            shares.append(work / times[-1] / 1e6 / rate)
            rates.append(rate)
        us = statistics.median(times)
        unit = "TFLOP/s" if kind == "matmul" else "TB/s"
        figures = {"us": spread(times), "rate": work / us / 1e6, "unit": unit}
        figures |= {"share": statistics.median(shares), "of": kind}
        self._run.row({"name": name} | figures, ceiling=statistics.median(rates))
        return us


def bench_rows(bench: Bench, tokens: int, hidden: int = 4096, inner: int = 14336) -> None:
    """Norms, activation, rotation with cache write."""
    count = num_inputs(tokens * hidden * 4)
    xs = [torch.randn(tokens, hidden, device="cuda", dtype=BF16) for _ in range(count)]
    residuals = [x.clone() for x in xs]
    weight = torch.ones(hidden, device="cuda", dtype=BF16)
    size = xs[0].nbytes
    calls: list[Callable[[], object]] = [lambda x=x: rms_norm(x, weight, 1e-5) for x in xs]
    bench.row(f"rms_norm {tokens}x{hidden}", 2 * size, calls)
    pairs = list(zip(xs, residuals, strict=True))
    calls = [lambda x=x, r=r: add_rms_norm(x, r, weight, 1e-5) for x, r in pairs]
    bench.row(f"add_rms_norm {tokens}x{hidden}", 4 * size, calls)
    both = [
        torch.randn(tokens, 2 * inner, device="cuda", dtype=BF16)
        for _ in range(num_inputs(4 * tokens * inner))
    ]
    calls = [lambda x=x: silu_and_mul(x) for x in both]
    bench.row(f"silu_and_mul {tokens}x{inner}", 1.5 * both[0].nbytes, calls)
    heads, kv_heads, dim = 32, 8, 128
    qkv = [
        torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=BF16)
        for _ in range(num_inputs(2 * tokens * (heads + 2 * kv_heads) * dim))
    ]
    pages = tokens // PAGE_SIZE + 1
    shape = (pages, kv_heads, len(qkv), 2, PAGE_SIZE, dim)
    pool = torch.zeros(shape, device="cuda", dtype=BF16)
    cos_sin = torch.randn(tokens, dim, device="cuda")
    positions = torch.arange(tokens, device="cuda")
    calls = [
        lambda x=x, i=i: rope_and_cache(x, positions, cos_sin, pool, i, positions, heads, kv_heads)
        for i, x in enumerate(qkv)
    ]
    bench.row(f"rope_and_cache {tokens}", 2 * qkv[0].nbytes + cos_sin.nbytes, calls)


def bench_linears(bench: Bench, rows: int) -> None:
    """The four products of a layer of Llama-3.1-8B and its LM head."""
    shapes = {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }
    for name, (n, k) in shapes.items():
        count = max(2, (1 << 28) // (n * k))
        weights = [pack_linear(torch.randn(n, k, device="cuda", dtype=BF16)) for _ in range(count)]
        x = torch.randn(rows, k, device="cuda", dtype=BF16)
        calls = [lambda w=w, x=x: linear(x, w) for w in weights]
        bench.row(f"linear {name} {rows} rows", 2.0 * (n * k + rows * (n + k)), calls)


def bench_tiles(bench: Bench, rows: int) -> None:
    """Products by `tiled_linear` of layers of SmolLM2-135M, Qwen3-0.6B and Llama-3.1-8B, and the
    same by cuBLAS, with the activation behind those of gate and up. The first is cuBLAS's.
    """
    plain, gated = ((960, 576), (4096, 1024)), ((3072, 576), (6144, 1024), (28672, 4096))
    shapes = [*((*shape, False) for shape in plain), *((*shape, True) for shape in gated)]
    for n, k, is_gated in shapes:
        count = num_inputs(2 * n * k)
        weights = [torch.randn(n, k, device="cuda", dtype=BF16) / k**0.5 for _ in range(count)]
        x = torch.randn(rows, k, device="cuda", dtype=BF16)
        read = 2.0 * (n * k + rows * (n + k))
        name = f"{'gate and up' if is_gated else 'plain'} {rows} rows {n}x{k}"
        calls: list[Callable[[], object]] = [
            lambda w=w, x=x, g=is_gated: tiled_linear(x, w, None, gated=g) for w in weights
        ]
        bench.row(name, read, calls)
        calls = [lambda w=w, x=x: F.linear(x, w) for w in weights]
        if is_gated:
            calls = [lambda w=w, x=x: silu_and_mul(F.linear(x, w)) for w in weights]
        bench.row(f"{name}, cuBLAS", read, calls)


def bench_digests(bench: Bench, page_bytes: int, count: int) -> None:
    """Digests of pages in a pool, which are read once."""
    pool = torch.randint(0, 99, (count, page_bytes // 4), dtype=torch.int32, device="cuda")
    pages = torch.randperm(count, device="cuda")
    bench.row(
        f"page_digest {count} x {page_bytes >> 10} KiB",
        float(pool.nbytes),
        [lambda: page_digests(pool, pages)],
    )


def bench_page_moves(bench: Bench, page_bytes: int, count: int) -> None:
    """Pages of a pool to a dense buffer and back."""
    pool = torch.randint(0, 99, (count, page_bytes), dtype=torch.uint8, device="cuda")
    pages, dense = torch.randperm(count, device="cuda"), torch.empty_like(pool)
    for name, move in (
        ("gather", lambda: gather_pages(pool, pages, dense)),
        ("scatter", lambda: scatter_pages(dense, pages, pool)),
    ):
        bench.row(f"{name} {count} x {page_bytes >> 10} KiB", 2.0 * pool.nbytes, [move])


def bench_experts(bench: Bench, rows: int) -> None:
    """A layer's experts of Qwen3-30B-A3B behind its router, with the norm that follows."""
    experts, top_k, hidden, width, layers = 128, 8, 2048, 768, 3
    weights = [
        (
            torch.randn(experts, 2 * width, hidden, device="cuda", dtype=BF16) * 0.02,
            torch.randn(experts, hidden, width, device="cuda", dtype=BF16) * 0.02,
        )
        for _ in range(layers)
    ]
    logits = [torch.randn(rows, experts, device="cuda") for _ in range(12)]
    x = torch.randn(rows, hidden, device="cuda", dtype=BF16)
    after = NormAfter(torch.zeros_like(x), torch.ones(hidden, device="cuda", dtype=BF16), 1e-6)
    calls = [
        lambda w=w, scores=scores: routed_moe(x, scores, top_k, *w, after, renormalise=True)
        for w, scores in zip(itertools.cycle(weights), logits, strict=False)
    ]
    chosen = [len(scores.topk(top_k).indices.unique()) for scores in logits]
    read = statistics.mean(chosen) * 3 * width * hidden * 2.0
    if rows < 1024:
        bench.row(f"experts {rows} rows", read + 6.0 * x.nbytes, calls)
    else:
        work = 2.0 * rows * top_k * 3 * width * hidden
        bench.row(f"experts {rows} rows", work, calls, "matmul")


def lora_additions(
    k: int, widths: Sequence[int], adapters: int, rank: int, rows: int
) -> list[LoraAddition]:
    """Additions to the product of each of some layers, whose rows take turns with the adapters."""
    count, layers = rank // 8, max(2, min(32, (1 << 28) // (adapters * rank * (k + sum(widths)))))
    size = layers * adapters * count
    table = torch.zeros(layers, adapters + 1, count, device="cuda", dtype=torch.int32)
    order = torch.randperm(size, device="cuda").int()
    table[:, 1:] = order.view(layers, adapters, count)
    counts = torch.full((layers, adapters + 1), count, device="cuda", dtype=torch.int32)
    counts[:, 0] = 0
    parts, column = [], 0
    for width in widths:
        a, b = (torch.randn(size, 8, n, device="cuda", dtype=BF16) / 64 for n in (k, width))
        parts.append(LoraWeights(a, b, table, counts, column))
        column += width
    host = sort_tokens((np.arange(rows) % adapters + 1).astype(np.int32), adapters + 1)
    segments = LoraSegments(*(torch.from_numpy(array).cuda() for array in host))
    return [LoraAddition(tuple(parts), layer, segments) for layer in range(layers)]


def bench_lora(bench: Bench, rows: int, adapters: int, rank: int) -> None:
    """Times the additions of adapters to the products of a layer of Llama-3.1-8B, without the
    products.
    """
    total_us = 0.0
    for name, k, widths in (
        ("qkv", 4096, (4096, 1024, 1024)),
        ("o", 4096, (4096,)),
        ("gate_up", 4096, (14336, 14336)),
        ("down", 14336, (4096,)),
    ):
        x = torch.randn(rows, k, device="cuda", dtype=BF16)
        out = torch.zeros(rows, sum(widths), device="cuda", dtype=BF16)
        additions = lora_additions(k, widths, adapters, rank, rows)
        calls = [lambda a=a, x=x, out=out: add_lora(out, x, a) for a in additions]
        weights = min(adapters, rows) * rank * (len(widths) * k + sum(widths))
        label = f"lora {name} {rows} rows {adapters} x r{rank}"
        total_us += bench.row(label, 2.0 * (weights + rows * (k + 2 * sum(widths))), calls)
    print(f"{rows} rows, {adapters} adapters of rank {rank}: {total_us:.1f} us a layer")


def bench_replaced_heads(bench: Bench, rows: int, adapters: int) -> None:
    """LM heads of adapters in the place of that of Llama-3.1-8B, whose rows take turns with the
    adapters; without any, what is left is to see that."""
    vocab, hidden, most = 128256, 4096, 4
    matrices = torch.randn(most, vocab, hidden, device="cuda", dtype=BF16)
    places = torch.arange(-1, most, device="cuda", dtype=torch.int32)
    slots = np.arange(rows) % adapters + 1 if adapters else np.zeros(rows)
    host = sort_tokens(slots.astype(np.int32), most + 1)
    segments = LoraSegments(*(torch.from_numpy(array).cuda() for array in host))
    x = torch.randn(rows, hidden, device="cuda", dtype=BF16)
    out = torch.zeros(rows, vocab, device="cuda")
    read = 2.0 * (adapters * vocab * hidden + rows * hidden)
    written = 4.0 * rows * vocab * (adapters > 0)
    bench.row(
        f"heads {rows} rows {adapters} adapters",
        read + written,
        [lambda: replace_products(out, x, matrices, places, segments, is_fixed=False)],
    )


def attention_call(
    requests: int,
    q_len: int,
    kv_len: int,
    heads: int,
    kv_heads: int,
    dim: int = 128,
    window: int | None = None,
    *,
    is_tree: bool = False,
) -> list[Callable[[], object]]:
    """Calls over the layers of a pool of random pages; a tree's nodes have four children."""
    pages = -(-kv_len // PAGE_SIZE)
    layer_bytes = 4 * requests * pages * PAGE_SIZE * kv_heads * dim
    layers = num_inputs(layer_bytes)
    shape = (requests * pages + 1, kv_heads, layers, 2, PAGE_SIZE, dim)
    pool = torch.empty(shape, device="cuda", dtype=BF16).normal_()
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    q = torch.randn(requests * q_len, heads, dim, device="cuda", dtype=BF16)
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * q_len
    kv_lens = torch.full((requests,), kv_len, device="cuda", dtype=torch.int32)
    words = [1]
    for row in range(1, q_len):
        words.append(words[(row - 1) // 4] | 1 << row)
    ancestors = torch.tensor(words * requests, device="cuda") if is_tree else None
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, window)
    step = AttentionMetadata(table, starts, starts, kv_lens, q_len, kv_len, ancestors)
    return [
        # Not settled, as it is in a model: calls that follow each other would overlap.
        lambda layer=layer: gpu_attention.paged_attention(q, pool, layer, spec, step)
        for layer in range(layers)
    ]


def cold_call(
    requests: int,
    length: int,
    heads: int,
    kv_heads: int,
    window: int | None = None,
    *,
    is_flash: bool = False,
) -> Callable[[], object]:
    """Prompts with nothing before them, whose own K and V are at hand, as the engine calls it;
    `is_flash`: with FlashAttention-3.
    """
    dim, rows = 128, requests * length
    q, k, v = (
        torch.randn(rows, count, dim, device="cuda", dtype=BF16)
        for count in (heads, kv_heads, kv_heads)
    )
    pool = torch.empty((1, kv_heads, 1, 2, PAGE_SIZE, dim), device="cuda", dtype=BF16)
    table = torch.zeros((requests, length // PAGE_SIZE), device="cuda", dtype=torch.int32)
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * length
    kv_lens = torch.full((requests,), length, device="cuda", dtype=torch.int32)
    own = OwnKv(k, v, prompt_rows(starts, rows) if is_flash else None)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, window)
    step = AttentionMetadata(table, starts, starts, kv_lens, length, length)
    return lambda: gpu_attention.paged_attention(q, pool, 0, spec, step, own)


def bench_attention(bench: Bench) -> None:
    """Decode against the read rate, prefill against the matmul rate and torch's own."""
    for heads, kv_heads, requests, kv_len in (
        (32, 8, 1, 640),
        (32, 8, 16, 640),
        (32, 8, 64, 640),
        (32, 8, 64, 4096),
        (32, 8, 128, 4096),
        (32, 8, 1, 16384),
        (16, 8, 64, 4096),
        (32, 4, 64, 4096),
    ):
        calls = attention_call(requests, 1, kv_len, heads, kv_heads)
        num_bytes = 4.0 * requests * kv_len * kv_heads * 128
        bench.row(f"decode {requests}x{kv_len} {heads}/{kv_heads}", num_bytes, calls, "read")
    for requests, q_len, kv_len in (
        (8, 512, 512),
        (1, 2048, 2048),
        (1, 8192, 8192),
        (1, 2048, 8192),
    ):
        calls = attention_call(requests, q_len, kv_len, 32, 8)[:2]
        seen = q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2
        work = 4.0 * requests * seen * 32 * 128
        bench.row(f"extend {requests}x{q_len} of {kv_len}", work, calls, "matmul")
    for requests, length in ((8, 512), (1, 2048), (2, 4096), (1, 8192)):
        work = 2.0 * requests * length * (length + 1) * 32 * 128
        calls = [cold_call(requests, length, 32, 8)]
        bench.row(f"extend {requests}x{length} cold, own K and V", work, calls, "matmul")
        if supports(BF16, 128, requests * length):
            calls = [cold_call(requests, length, 32, 8, is_flash=True)]
            bench.row(f"extend {requests}x{length} cold, FlashAttention-3", work, calls, "matmul")
    q, k, v = (torch.randn(1, h, 8192, 128, device="cuda", dtype=BF16) for h in (32, 8, 8))
    bench.row(
        "torch sdpa 1x8192, dense K and V",
        2.0 * 8192 * 8193 * 32 * 128,
        [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)],
        "matmul",
    )


def bench_trees(bench: Bench) -> None:
    """Rows that verify drafts against reading K and V once, as one row does."""
    for requests, kv_len in ((1, 512), (1, 4096), (1, 16384), (4, 4096)):
        num_bytes = 4.0 * requests * kv_len * 8 * 128
        for rows in (1, 4, 8, 16, 32):
            for is_tree in (False, True):
                if is_tree and rows == 1:
                    continue
                calls = attention_call(requests, rows, kv_len, 32, 8, is_tree=is_tree)
                name = f"{'tree' if is_tree else 'chain'} {requests}x{rows} of {kv_len} 32/8"
                bench.row(name, num_bytes, calls, "read")


def bench_windows(bench: Bench, window: int = 4096) -> None:
    """Against what lies within windows alone."""
    for requests, kv_len in ((64, 4096), (64, 16384), (1, 16384)):
        calls = attention_call(requests, 1, kv_len, 32, 8, window=window)
        name = f"decode {requests}x{kv_len} 32/8, window {window}"
        bench.row(name, 4.0 * requests * window * 8 * 128, calls, "read")
    calls = attention_call(1, 2048, 16384, 32, 8, window=window)[:2]
    work = 4.0 * 2048 * window * 32 * 128
    bench.row(f"extend 1x2048 of 16384, window {window}", work, calls, "matmul")
    work = 4.0 * (16384 * window - window * (window - 1) / 2) * 32 * 128
    calls = [cold_call(1, 16384, 32, 8, window)]
    bench.row(f"extend 1x16384 cold, window {window}", work, calls, "matmul")


@harness.part
def rows(run: Run) -> None:
    """Operations that only move rows and pages."""
    bench = Bench(run)
    for tokens in (64, 4096):
        bench_rows(bench, tokens)
    # Pages of 16 positions of Llama-3.1-8B.
    bench_digests(bench, 2 << 20, 512)
    bench_page_moves(bench, 2 << 20, 256)


@harness.part
def tiles(run: Run) -> None:
    """Products of few rows by tiles."""
    bench = Bench(run)
    for count in (20, 32, 64):
        bench_tiles(bench, count)


@harness.part
def experts(run: Run) -> None:
    """Experts of a layer."""
    bench = Bench(run)
    for count in (1, 2, 4, 8, 16, 64, 4096):
        bench_experts(bench, count)


@harness.part
def products(run: Run) -> None:
    """Products, and what adapters add to them, at the sizes of models that are served."""
    bench = Bench(run)
    for count in (1, 16, 64):
        bench_linears(bench, count)
    for adapters in (1, 8, 32):
        bench_lora(bench, 64, adapters, 16)
    bench_lora(bench, 64, 8, 64)
    bench_lora(bench, 1, 1, 16)
    bench_lora(bench, 4096, 8, 16)


@harness.part
def heads(run: Run) -> None:
    """LM heads of adapters."""
    bench = Bench(run)
    for count, adapters in ((1, 1), (16, 4), (64, 1), (64, 4), (64, 0)):
        bench_replaced_heads(bench, count, adapters)


@harness.part
def attention(run: Run) -> None:
    """Attention over whole contexts and within windows."""
    bench = Bench(run)
    bench_attention(bench)
    bench_windows(bench)


@harness.part
def trees(run: Run) -> None:
    """Attention of rows that verify drafts."""
    bench_trees(Bench(run))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(harness.main())
