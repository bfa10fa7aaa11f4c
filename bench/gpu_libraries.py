"""Our kernels on a GPU beside those of libraries, in turns: which of the two should serve.

    python bench/gpu_libraries.py [--only fp8 lora decode]

`fp8`: products with FP8 weights beside `torch._scaled_mm` and `torch.nn.functional.scaled_mm`, rows
rounded before. `lora`: what adapters add to a layer's products beside plain products by segment,
torch's grouped products over tokens sorted by adapter. `decode`: attention of one row a request
beside FlashInfer, where it can be imported.

Each way is a captured graph of calls over inputs that rotate beyond the L2 cache. `own_of_library`
is the ratio of their times in the same turn: above 0.97 the library is within 3 %.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from clocks import capture, num_inputs, release, replay_us
from gpu_fp8 import PRODUCTS, after, matrices
from gpu_kernels import PAGE_SIZE, attention_call, lora_additions
from harness import Harness, Run, in_turns, ratio_of, spread
from weft.kernels.ops.linear.gpu_fp8 import torch_product
from weft.kernels.ops.linear.triton_fp8_rows import quantise_rows
from weft.kernels.ops.linear.triton_fp8_tiles import multiply_fp8
from weft.kernels.ops.lora import add_lora
from weft.kernels.ops.lora.spec import LoraAddition

BF16 = torch.bfloat16
Calls = Sequence[Callable[[], object]]
LORA_PRODUCTS = (
    ("qkv", 4096, (4096, 1024, 1024)),
    ("o", 4096, (4096,)),
    ("gate_up", 4096, (14336, 14336)),
    ("down", 14336, (4096,)),
)
"""Products of a layer of Llama-3.1-8B: name, K and the columns of its parts."""

harness = Harness(__file__, __doc__, repeats=15)


def compare(run: Run, table: str, name: str, own: Calls, library: Calls) -> None:
    """Adds a row of both, in turns."""
    graphs = {"own": capture(own), "library": capture(library)}
    ways = {way: lambda given=given: replay_us(*given) for way, given in graphs.items()}
    us = in_turns(ways, run.options.repeats)
    figures = {f"{way}_us": spread(us[way]) for way in ways}
    ratio = ratio_of(us["own"], us["library"])
    run.row(table=table, name=name, **figures, own_of_library=ratio)


@harness.part
def fp8(run: Run) -> None:
    """Tiles of rounded rows."""
    for product in PRODUCTS:
        for scales in ("channels", "blocks"):
            weights = matrices(product, scales, num_inputs(product.n * product.k))
            for rows in (16, 64, 256, 1024, 4096):
                x = torch.randn(rows, product.k, device="cuda", dtype=BF16)
                rounded = quantise_rows(x, has_groups=scales == "blocks")
                out = torch.empty((rows, product.columns), device="cuda", dtype=BF16)
                is_gated = product.is_gated
                with run.noted(f"fp8 {product.name} {rows} {scales}"):
                    own = [
                        lambda w=w, r=rounded, o=out, g=is_gated: multiply_fp8(
                            r, w, o, None, None, is_gated=g
                        )
                        for w in weights
                    ]
                    library = [
                        lambda w=w, r=rounded, p=product: after(torch_product(r, w), p)
                        for w in weights
                    ]
                    compare(run, "fp8", f"{product.name} {rows} rows {scales}", own, library)
            del weights
            release()


class Segments(NamedTuple):
    """Tokens by adapter, and each adapter's matrices of each part, as a library would hold them."""

    order: torch.Tensor
    """[T] int64: the tokens sorted by adapter."""
    ends: torch.Tensor
    """[adapters] int32: where each adapter's tokens end."""
    matrices: list[tuple[torch.Tensor, torch.Tensor]]
    """A as [adapters, K, rank] and B as [adapters, rank, N]."""

    @classmethod
    def of(cls, added: LoraAddition) -> Segments:
        """Those of an addition whose adapters are in the slots from 1 on, all of one rank."""
        adapters = added.parts[0].table.shape[1] - 1
        slots = added.segments.token_slots.long() - 1
        ends = torch.bincount(slots, minlength=adapters).cumsum(0).to(torch.int32)
        found = []
        for part in added.parts:
            at = part.table[added.layer, 1:].long()
            a, b = part.a[at].flatten(1, 2), part.b[at].flatten(1, 2)
            found.append((a.transpose(1, 2), b.contiguous()))
        return cls(added.segments.order.long(), ends, found)


def plain_segments(
    x: torch.Tensor, out: torch.Tensor, added: LoraAddition, segments: Segments
) -> None:
    """`add_lora` by grouped products."""
    order, ends, matrices_of_parts = segments
    taken = x.index_select(0, order)
    for part, (a, b) in zip(added.parts, matrices_of_parts, strict=True):
        found = F.grouped_mm(F.grouped_mm(taken, a, offs=ends), b, offs=ends)
        columns = out[:, part.column : part.column + part.out_features]
        columns.index_add_(0, order, found)


@harness.part
def lora(run: Run) -> None:
    """Additions to a layer's products."""
    for rows, adapters, rank in ((16, 16, 16), (64, 8, 16), (64, 32, 64), (1024, 8, 16)):
        for name, k, widths in LORA_PRODUCTS:
            additions = lora_additions(k, widths, adapters, rank, rows)
            x = torch.randn(rows, k, device="cuda", dtype=BF16)
            out = torch.zeros(rows, sum(widths), device="cuda", dtype=BF16)
            title = f"{name} {rows} rows {adapters} x r{rank}"
            with run.noted(f"lora {title}"):
                pairs = [(added, Segments.of(added)) for added in additions]
                check_alike(run, title, x, out, *pairs[0])
                own = [lambda a=a, x=x, o=out: add_lora(o, x, a) for a, _ in pairs]
                library = [lambda p=p, x=x, o=out: plain_segments(x, o, *p) for p in pairs]
                compare(run, "lora", title, own, library)
                del pairs, own, library
            release()


def check_alike(
    run: Run,
    title: str,
    x: torch.Tensor,
    out: torch.Tensor,
    added: LoraAddition,
    segments: Segments,
) -> None:
    """Fails the run unless both ways add the same within rounding."""
    one, other = torch.zeros_like(out), torch.zeros_like(out)
    add_lora(one, x, added)
    plain_segments(x, other, added, segments)
    error = (one - other).float().abs().max() / other.float().abs().max()
    if not error < 0.05:
        run.fail(f"{title}: the two ways differ by {float(error):.3f} of the largest number")


@harness.part
def decode(run: Run) -> None:
    """Attention of requests that decode."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        run.note(f"no FlashInfer here: {error}")
        return
    heads, kv_heads, dim = 32, 8, 128
    for requests, kv_len in ((1, 640), (16, 640), (64, 640), (64, 4096), (128, 4096), (1, 16384)):
        with run.noted(f"decode {requests} x {kv_len}"):
            own = attention_call(requests, 1, kv_len, heads, kv_heads)
            pages = -(-kv_len // PAGE_SIZE)
            shape = (requests * pages, 2, kv_heads, PAGE_SIZE, dim)
            pools = [torch.randn(shape, device="cuda", dtype=BF16) for _ in own]
            room = torch.empty(128 << 20, device="cuda", dtype=torch.uint8)
            starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * pages
            table = torch.randperm(requests * pages, device="cuda").int()
            last = torch.full((requests,), (kv_len - 1) % PAGE_SIZE + 1, device="cuda").int()
            given = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                room, "HND", use_cuda_graph=True, use_tensor_cores=True,
                paged_kv_indptr_buffer=starts.clone(), paged_kv_indices_buffer=table.clone(),
                paged_kv_last_page_len_buffer=last.clone(),
            )  # fmt: skip
            given.plan(starts, table, last, heads, kv_heads, dim, PAGE_SIZE, q_data_type=BF16)
            q = torch.randn(requests, heads, dim, device="cuda", dtype=BF16)
            library = [lambda p=p, g=given, q=q: g.run(q, p) for p in pools]
            compare(run, "decode", f"{requests} x {kv_len} {heads}/{kv_heads}", own, library)
            del own, pools, library
            release()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(harness.main())
