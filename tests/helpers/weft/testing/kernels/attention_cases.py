"""Random paged attention, its exact result, and NaN wherever nothing may be read."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec

LAYERS, LAYER = 2, 1


def in_parts(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A form of `paged_attention` that takes the fields of its records one by one."""

    def call(
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        page_table: torch.Tensor,
        cu_q_lens: torch.Tensor,
        kv_lens: torch.Tensor,
        scale: float,
        max_q_len: int,
        max_kv_len: int,
        *,
        window: int | None = None,
        is_fixed: bool = False,
        ancestors: torch.Tensor | None = None,
        is_settled: bool = False,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
        first_position: int = 0,
        is_chunked: bool = False,
        key_ends: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        heads = (q.shape[1], pool.shape[1], q.shape[2])
        softmax = (sinks, softcap, first_position, is_chunked)
        spec = AttentionSpec(*heads, scale, window, is_fixed, *softmax)
        step = AttentionMetadata(
            page_table=page_table,
            places=torch.empty(0, dtype=torch.int64),
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            ancestors=ancestors,
            is_settled=is_settled,
            key_ends=key_ends,
        )
        return attention(q, pool, layer, spec, step, **options)

    return call


class Geometry(NamedTuple):
    """Sizes of a pool and of what attends to it."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int


class Case(NamedTuple):
    """Arguments of one call and the plain K and V behind them."""

    q: torch.Tensor
    pool: torch.Tensor
    page_table: torch.Tensor
    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    scale: float
    kv: list[torch.Tensor]
    """For each request [2, Hkv, kv_len, D]."""

    def own_kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the step's rows, each [T, Hkv, D], with a gap after each row."""
        q_lens = self.cu_q_lens.diff().tolist()
        parts = [kv[:, :, kv.shape[2] - n :] for kv, n in zip(self.kv, q_lens, strict=True)]
        k, v = torch.cat(parts, dim=2).transpose(1, 2)
        rows, heads, dim = k.shape
        wide = k.new_full((2, rows, heads + 1, dim), float("nan"))
        wide[0, :, :heads], wide[1, :, :heads] = k, v
        return wide[0, :, :heads], wide[1, :, :heads]

    @property
    def max_q_len(self) -> int:
        """Rows of the request that brings most."""
        return int(self.cu_q_lens.diff().max()) if len(self.kv_lens) else 0

    @property
    def max_kv_len(self) -> int:
        """Length of the longest context."""
        return int(self.kv_lens.max()) if len(self.kv_lens) else 0


def hide_own_pages(case: Case, least_rows: int = 2) -> Case:
    """NaN in the pool for what the requests of so many rows bring: it must be read elsewhere."""
    pool = case.pool.clone()
    page_size = pool.shape[4]
    for request, kv_len in enumerate(case.kv_lens.tolist()):
        q_len = int(case.cu_q_lens[request + 1] - case.cu_q_lens[request])
        if q_len >= least_rows:
            own = torch.arange(kv_len - q_len, kv_len, device=pool.device)
            pages = case.page_table[request, own // page_size].long()
            pool[pages, :, LAYER, :, own % page_size] = float("nan")
    return case._replace(pool=pool)


def make_case(
    geometry: Geometry, lengths: list[tuple[int, int]], dtype: torch.dtype, device: str = "cpu"
) -> Case:
    """Requests of (q_len, kv_len) over scattered pages.

    All that no request may see is NaN: other layers, other pages, positions beyond kv_len. The
    table is far out of range beyond the pages that are used.
    """
    heads, kv_heads, dim, page_size = geometry
    counts = [-(-kv_len // page_size) for _, kv_len in lengths]
    num_pages = sum(counts) + 3
    shape = (num_pages, kv_heads, LAYERS, 2, page_size, dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
    free = torch.randperm(num_pages).tolist()
    table = torch.full((len(lengths), max(counts, default=0) + 2), 1 << 30, dtype=torch.int32)
    kv = []
    for request, ((_, kv_len), count) in enumerate(zip(lengths, counts, strict=True)):
        pages = [free.pop() for _ in range(count)]
        table[request, :count] = torch.tensor(pages, dtype=torch.int32)
        plain = torch.randn(2, kv_heads, kv_len, dim, device=device).to(dtype)
        padded = plain.new_full((2, kv_heads, count * page_size, dim), float("nan"))
        padded[:, :, :kv_len] = plain
        # [2, Hkv, pages, page_size, D] -> [pages, Hkv, 2, page_size, D]
        pool[pages, :, LAYER] = padded.unflatten(2, (count, page_size)).permute(2, 1, 0, 3, 4)
        kv.append(plain)
    starts = torch.tensor([0, *(q_len for q_len, _ in lengths)]).cumsum(0).int()
    q = (2 * torch.randn(int(starts[-1]), heads, dim, device=device)).to(dtype)
    kv_lens = torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32)
    return Case(q, pool, table.to(device), starts.to(device), kv_lens.to(device), dim**-0.5, kv)


def hide_first(case: Case, first_position: int) -> None:
    """NaN in the pool for positions that are not to be read."""
    page_size = case.pool.shape[4]
    for request, kv_len in enumerate(case.kv_lens.tolist()):
        hidden = torch.arange(min(first_position, kv_len))
        pages = case.page_table[request, hidden // page_size].long()
        case.pool[pages, :, LAYER, :, hidden % page_size] = float("nan")


def hide_before_window(case: Case, window: int, *, is_chunked: bool = False) -> None:
    """NaN in the pool for positions that are before the window of a request's first row."""
    page_size = case.pool.shape[4]
    for request, kv_len in enumerate(case.kv_lens.tolist()):
        q_len = int(case.cu_q_lens[request + 1] - case.cu_q_lens[request])
        first = kv_len - q_len + 1 - window
        if is_chunked:
            first = (kv_len - q_len) // window * window
        hidden = torch.arange(max(0, first), device=case.pool.device)
        pages = case.page_table[request, hidden // page_size].long()
        case.pool[pages, :, LAYER, :, hidden % page_size] = float("nan")


def random_key_ends(case: Case) -> torch.Tensor:
    """Ends of rows among which some spans see one another both ways, one of them to the end."""
    ends = []
    for (first, end), kv_len in zip(pairwise(case.cu_q_lens.tolist()), case.kv_lens, strict=True):
        at, last = int(kv_len) - (end - first), int(kv_len)
        while at < last:
            length = min(last - at, random.choice((1, 3, 70, 150)))
            is_span = random.random() < 0.6
            ends += [at + length] * length if is_span else range(at + 1, at + length + 1)
            at += length
    return torch.tensor(ends, dtype=torch.int32, device=case.q.device)


def eager_attention(
    case: Case,
    first_position: int = 0,
    window: int | None = None,
    *,
    is_chunked: bool = False,
    key_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch's own result in the dtype of the case."""
    return in_parts(paged_attention_reference)(
        case.q,
        case.pool,
        LAYER,
        case.page_table,
        case.cu_q_lens,
        case.kv_lens,
        case.scale,
        case.max_q_len,
        case.max_kv_len,
        first_position=first_position,
        window=window,
        is_chunked=is_chunked,
        key_ends=key_ends,
    )


def exact_attention(
    case: Case,
    first_position: int = 0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    *,
    is_chunked: bool = False,
    key_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition in float64: [T, Hq * D]; a row that sees nothing is zero."""
    heads = case.q.shape[1]
    out = torch.empty_like(case.q, dtype=torch.float64)
    starts = case.cu_q_lens.tolist()
    for request, plain in enumerate(case.kv):
        k, v = plain.double().repeat_interleave(heads // plain.shape[1], dim=1)
        first, end = starts[request], starts[request + 1]
        if first == end:
            continue
        scores = torch.einsum("thd,hnd->htn", case.q[first:end].double(), k) * case.scale
        positions = torch.arange(k.shape[1], device=k.device)
        last_seen = torch.arange(k.shape[1] - (end - first), k.shape[1], device=k.device)
        ends = last_seen + 1 if key_ends is None else key_ends[first:end]
        is_hidden = (positions >= ends.unsqueeze(1)) | (positions < first_position)
        if window is not None and is_chunked:
            is_hidden |= positions // window != last_seen.unsqueeze(1) // window
        elif window is not None:
            is_hidden |= positions <= last_seen.unsqueeze(1) - window
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if sinks is not None:
            of_rows = sinks.double()[:, None, None].expand(-1, end - first, 1)
            scores = torch.cat((scores, of_rows), dim=-1)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[1]]
        out[first:end] = torch.einsum("htn,hnd->thd", weights, v)
    return out.flatten(1)


def decode_rows(module: ModuleType, case: Case, max_kv_len: int, **options: Any) -> torch.Tensor:
    """`decode_attention` of a copy of its module; rows that it leaves out are NaN.

    What is there before the last kernel ends may be read before: the same bits.
    """
    outs = []
    for is_settled in (False, True):
        out = torch.full_like(case.q, float("nan")).flatten(1)
        lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, 1, max_kv_len)
        attention = in_parts(partial(module.decode_attention, out))
        attention(case.q, case.pool, LAYER, *lengths, is_settled=is_settled, **options)
        outs.append(out)
    assert torch.equal(outs[0].nan_to_num(nan=1e4), outs[1].nan_to_num(nan=1e4))
    return outs[1]
