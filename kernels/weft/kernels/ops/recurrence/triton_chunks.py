"""Recurrent operations on a GPU for many rows a sequence: by chunks of 64, in matrix products.

The states at the beginnings of chunks are computed one after another, everything else at once. The
gated delta rule's updates of a chunk solve a triangular system (arXiv 2412.06464, section 3.3). Its
inverse T turns values and keys into U and W, so that the updates after a state S are U - W S. Mamba
2 (arXiv 2405.21060, section 6) has given updates. If each element of a key has a decay (arXiv
2510.26692, section 3.2), the decay between two rows is a product of two factors, both at most 1:
the decay up to the first row of the later row's block of 16, and the decay after it. Within a block
it is computed for each pair. Products take operands of 16 bits and accumulate in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.ops.recurrence.sequences import CHUNK
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2
from weft.kernels.shared.multiprocessors import num_multiprocessors
from weft.kernels.shared.strided import Strided

_FEWEST = 32
"""Fewest rows a sequence, on average, for which chunks are faster than row by row."""
_LARGEST_KEY = 256
_VALUES, _NARROW_VALUES, _WIDE_VALUES = 64, 32, 128
"""Values that a program computes; fewer in the kernel whose states follow one another. The delta
rule with a decay for each head takes twice as many if that leaves two programs for each
multiprocessor. Eight prompts of 1,024 rows of Qwen3-Next's sizes take 714 us on an H100 with wider
states, 797 us with wider outputs, and 859 us without either.
"""


class ChunkForm(NamedTuple):
    """What kernels know when they are compiled."""

    by_key: bool
    """Whether each element of a key has a decay."""
    key_dim: int
    """Dk."""
    value_dim: int
    """Dv. It is not called `values`, which tuples in Triton's kernels have already."""
    block_keys: int
    chunk: int
    """Rows of a chunk."""
    is_unit: bool


def supports_chunks(rows: HeadRows) -> bool:
    """Whether rows are computed by chunks."""
    v, keys = rows.v, rows.k.shape[2]
    is_narrow = v.dtype in (torch.bfloat16, torch.float16) and keys <= _LARGEST_KEY
    return is_narrow and v.shape[0] >= _FEWEST * rows.sequences.num_sequences


def chunked_recurrence(given: HeadRows, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`triton_steps.recurrence` of rows for which `supports_chunks` holds."""
    packed = given.packed()
    q, k, v = (Strided.of(part) for part in packed[:3])
    _, _, own, decay, sequences, beta, steps, skips, scale, is_unit = packed
    rows, heads, values = own.shape
    keys, shared, count = k.data.shape[2], given.shared, sequences.num_sequences
    cu_lens, chunks = sequences.cu_lens, sequences.chunks
    states, after = states.contiguous(), torch.empty_like(states, dtype=torch.float32)
    most, firsts = chunks.shape[0], sequences.first_chunks
    block_keys = next_power_of_2(max(16, keys))
    all_values = next_power_of_2(max(16, values))
    tile = min(_VALUES, all_values)
    by_key = decay.dim() == 3
    can_widen = beta is not None and not by_key
    programs = 2 * num_multiprocessors(own.device)
    warps = 8 if by_key else 4
    if by_key:
        grown = torch.empty_like(decay)
        _grown_kernel[(most, heads)](
            decay, grown, chunks, heads, KEYS=keys, BLOCK_KEYS=block_keys, CHUNK=CHUNK
        )
        decay = grown
    form = ChunkForm(by_key, keys, values, block_keys, CHUNK, is_unit)
    updates = own.new_empty((rows, heads, values))
    weights: torch.Tensor | None = None
    lasting: torch.Tensor | None = None
    if beta is not None:
        weights, lasting = own.new_empty((2, rows, heads, keys))
        _solve_kernel[(most, heads)](
            k, v, decay, beta, weights, lasting, updates, chunks, heads, shared, FORM=form,
            TILE=tile, num_warps=warps, num_stages=2,
        )  # fmt: skip
    begins = own.new_empty((most, heads, keys, values))
    is_wide = can_widen and count * heads * cdiv(values, _VALUES) >= programs
    narrow = min(_VALUES if is_wide else _NARROW_VALUES, all_values)
    _states_kernel[(count * heads, cdiv(values, narrow))](
        k, v, decay, steps, weights, lasting, updates, states, after, begins, cu_lens, firsts,
        heads, shared, FORM=form, TILE=narrow, num_warps=4, num_stages=2,
    )  # fmt: skip
    out = own.new_empty((rows, heads, values))
    is_wide = can_widen and most * heads * cdiv(values, _WIDE_VALUES) >= programs
    tile = min(_WIDE_VALUES if is_wide else _VALUES, all_values)
    _outputs_kernel[(most, heads, cdiv(values, tile))](
        q, k, v, decay, skips, updates, begins, out, chunks, heads, shared, scale, FORM=form,
        TILE=tile, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out, after


@triton.jit
def _keys(
    x: tl.tensor, row: tl.tensor, element: tl.tensor, mask: tl.tensor, IS_UNIT: tl.constexpr
) -> tl.tensor:
    """[CHUNK, BLOCK_KEYS] float32: keys or queries of a chunk, of length 1 if `IS_UNIT`."""
    found = tl.load(x + row[:, None] + element[None], mask=mask, other=0.0).to(tl.float32)
    if IS_UNIT:
        found *= tl.rsqrt(tl.sum(found * found, axis=1) + 1e-6)[:, None]
    return found


@triton.jit
def _grown_kernel(
    decay: tl.tensor,
    grown: tl.tensor,
    chunks: tl.tensor,
    heads: int,
    KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Running sums of the elements' decays from the beginning of a chunk."""
    begin = tl.load(chunks + tl.program_id(0) * 2)
    length = tl.load(chunks + tl.program_id(0) * 2 + 1)
    index, element = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEYS)
    mask = (index < length)[:, None] & (element < KEYS)[None]
    at = ((begin + index) * heads + tl.program_id(1))[:, None] * KEYS + element[None]
    total = tl.cumsum(tl.load(decay + at, mask=mask, other=0.0), axis=0)
    tl.store(grown + at, total, mask=mask)


@triton.jit
def _alike(
    left: tl.tensor,
    keys: tl.tensor,
    grown: tl.tensor,
    k: tl.tensor,
    k_row: int,
    of_gate: tl.tensor,
    gate_row: int,
    begin: tl.tensor,
    length: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Products of rows of `left` with keys at or before them, times the decay of each element.

    `left`, `keys` and `grown`, sums of decays, are [CHUNK, BLOCK_KEYS] float32. `k` and `of_gate`
    are the head's keys and sums of decays, with rows `k_row` and `gate_row` apart. The chunk has
    `length` rows from `begin` on.
    """
    CHUNK: tl.constexpr = FORM.chunk
    index, element = tl.arange(0, CHUNK), tl.arange(0, FORM.block_keys)
    is_key = element < FORM.key_dim
    found = tl.zeros((CHUNK, CHUNK), tl.float32)
    kind = k.dtype.element_ty
    for first in tl.static_range(16, CHUNK, 16):
        is_there = is_key & (element * 0 + first < length)
        at_first = tl.load(of_gate + (begin + first) * gate_row + element, mask=is_there, other=0.0)
        later = (left * tl.exp(tl.minimum(grown - at_first[None], 0.0))).to(kind)
        before = (keys * tl.exp(tl.minimum(at_first[None] - grown, 0.0))).to(kind)
        is_here = (index // 16 * 16 == first)[:, None] & (index < first)[None]
        found = tl.where(is_here, tl.dot(later, tl.trans(before)), found)
    for number in range(0, 16):
        other = index // 16 * 16 + number
        both = (other < length)[:, None] & is_key[None]
        row = begin + other
        at_other = of_gate + (row * gate_row)[:, None] + element[None]
        between = grown - tl.load(at_other, mask=both, other=0.0)
        key = _keys(k, row * k_row, element, both, FORM.is_unit)
        one = tl.sum(left * key * tl.exp(tl.minimum(between, 0.0)), axis=1)
        is_here = (index[None] == other[:, None]) & (index[:, None] >= index[None])
        found = tl.where(is_here, one[:, None], found)
    return found


@triton.jit
def _solve_kernel(
    k: Strided,
    v: Strided,
    decay: tl.tensor,
    beta: tl.tensor,
    weights: tl.tensor,
    lasting: tl.tensor,
    updates: tl.tensor,
    chunks: tl.tensor,
    heads: int,
    shared: int,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """W and U of a chunk of one head, and the keys with their decay up to the chunk's end."""
    KEYS: tl.constexpr = FORM.key_dim
    VALUES: tl.constexpr = FORM.value_dim
    CHUNK: tl.constexpr = FORM.chunk
    head = tl.program_id(1)
    begin = tl.load(chunks + tl.program_id(0) * 2)
    length = tl.load(chunks + tl.program_id(0) * 2 + 1)
    if length > 0:
        index = tl.arange(0, CHUNK)
        element = tl.arange(0, FORM.block_keys)
        is_row = index < length
        row = begin + index
        both = is_row[:, None] & (element < KEYS)[None]
        of_keys = k.data + head // shared * k.second
        keys = _keys(of_keys, row * k.first, element, both, FORM.is_unit)
        share = tl.load(beta + row * heads + head, mask=is_row, other=0.0)
        kind = k.data.dtype.element_ty
        if FORM.by_key:
            at = decay + (row * heads + head)[:, None] * KEYS + element[None]
            grown = tl.load(at, mask=both, other=0.0)
            alike = _alike(keys, keys, grown, of_keys, k.first, decay + head * KEYS, heads * KEYS,
                           begin, length, FORM)  # fmt: skip
            decayed = (keys * tl.exp(grown)).to(kind)
            of_last = decay + ((begin + length - 1) * heads + head) * KEYS + element
            total = tl.load(of_last, mask=element < KEYS, other=0.0)
            left = keys * tl.exp(total[None] - grown)
        else:
            gate = tl.load(decay + row * heads + head, mask=is_row, other=0.0)
            grown = tl.cumsum(gate, axis=0)
            left = keys * tl.exp(tl.sum(gate, axis=0) - grown)[:, None]
            narrow = keys.to(kind)
            alike = tl.dot(narrow, tl.trans(narrow))
            alike *= tl.exp(tl.minimum(grown[:, None] - grown[None], 0.0))
            decayed = (keys * tl.exp(grown)[:, None]).to(kind)
        to = lasting + (row * heads + head)[:, None] * KEYS + element[None]
        tl.store(to, left.to(kind), mask=both)
        system = tl.where(index[:, None] > index[None], alike * share[:, None], 0.0)
        # The inverse of the system: blocks of 16 by substitution, all at once, then pairs of
        # blocks.
        block, inner = tl.arange(0, CHUNK // 16), tl.arange(0, 16)
        is_own = block[:, None, None, None] == block[None, None, :, None]
        blocks = tl.reshape(system, (CHUNK // 16, 16, CHUNK // 16, 16))
        solved = -tl.sum(tl.where(is_own, blocks, 0.0), axis=2)
        for number in range(2, 16):
            is_here = (inner == number)[None, :, None]
            found = tl.sum(tl.where(is_here, solved, 0.0), axis=1)
            found += tl.sum(found[:, :, None] * solved, axis=1)
            solved = tl.where(is_here, found[:, None], solved)
        inverse = tl.reshape(tl.where(is_own, solved[:, :, None], 0.0), (CHUNK, CHUNK))
        inverse = tl.where(index[:, None] == index[None], 1.0, inverse)
        is_pair = index[:, None] // 32 == index[None] // 32
        pairs = is_pair & (index[:, None] // 16 != index[None] // 16)
        left = tl.dot(inverse, tl.where(pairs, system, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(left, inverse, input_precision="tf32x3")
        left = tl.dot(inverse, tl.where(is_pair, 0.0, system), input_precision="tf32x3")
        inverse -= tl.dot(left, inverse, input_precision="tf32x3")
        shares = (inverse * share[None]).to(kind)
        weight = tl.dot(shares, decayed)
        to = weights + (row * heads + head)[:, None] * KEYS + element[None]
        tl.store(to, weight.to(kind), mask=both)
        for first in tl.static_range(0, VALUES, TILE):
            value = first + tl.arange(0, TILE)
            mask = is_row[:, None] & (value < VALUES)[None]
            at = v.data + head * v.second + (row * v.first)[:, None] + value[None]
            update = tl.dot(shares, tl.load(at, mask=mask, other=0.0))
            to = updates + (row * heads + head)[:, None] * VALUES + value[None]
            tl.store(to, update.to(kind), mask=mask)


@triton.jit
def _states_kernel(
    k: Strided,
    v: Strided,
    decay: tl.tensor,
    steps: tl.tensor,
    weights: tl.tensor,
    lasting: tl.tensor,
    updates: tl.tensor,
    states: tl.tensor,
    after: tl.tensor,
    begins: tl.tensor,
    cu_lens: tl.tensor,
    firsts: tl.tensor,
    heads: int,
    shared: int,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The states of some values of one head of a sequence, and the updates of its rows."""
    KEYS: tl.constexpr = FORM.key_dim
    VALUES: tl.constexpr = FORM.value_dim
    CHUNK: tl.constexpr = FORM.chunk
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    element, index = tl.arange(0, FORM.block_keys), tl.arange(0, CHUNK)
    value = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_key, is_value = element < KEYS, value < VALUES
    both = is_key[:, None] & is_value[None]
    place = element[:, None] * VALUES + value[None]
    own = tl.program_id(0).to(tl.int64) * KEYS * VALUES
    state = tl.load(states + own + place, mask=both, other=0.0)
    begin, end = tl.load(cu_lens + sequence), tl.load(cu_lens + sequence + 1)
    first = tl.load(firsts + sequence)
    kind = k.data.dtype.element_ty
    for number in range(0, (end - begin + CHUNK - 1) // CHUNK):
        row = begin + number * CHUNK + index
        is_row = row < end
        at_key = is_row[:, None] & is_key[None]
        at_value = is_row[:, None] & is_value[None]
        before = begins + ((first + number) * heads + head) * KEYS * VALUES
        narrow = state.to(kind)
        tl.store(before + place, narrow, mask=both)
        taken = updates + (row * heads + head)[:, None] * VALUES + value[None]
        if weights is not None:
            at = weights + (row * heads + head)[:, None] * KEYS + element[None]
            weight = tl.load(at, mask=at_key, other=0.0)
            update = tl.load(taken, mask=at_value, other=0.0).to(tl.float32)
            update -= tl.dot(weight, narrow)
        else:
            at = v.data + head * v.second + (row * v.first)[:, None] + value[None]
            update = tl.load(at, mask=at_value, other=0.0).to(tl.float32)
            update *= tl.load(steps + row * heads + head, mask=is_row, other=0.0)[:, None]
        tl.store(taken, update.to(kind), mask=at_value)
        if FORM.by_key:
            last = tl.minimum(begin + (number + 1) * CHUNK, end) - 1
            of_last = decay + (last * heads + head) * KEYS + element
            state *= tl.exp(tl.load(of_last, mask=is_key, other=0.0))[:, None]
        else:
            gate = tl.load(decay + row * heads + head, mask=is_row, other=0.0)
            total = tl.sum(gate, axis=0)
            state *= tl.exp(total)
        if lasting is not None:
            at = lasting + (row * heads + head)[:, None] * KEYS + element[None]
            keys = tl.load(at, mask=at_key, other=0.0)
        else:
            of_keys = k.data + head // shared * k.second
            keys = _keys(of_keys, row * k.first, element, at_key, FORM.is_unit)
            keys = (keys * tl.exp(total - tl.cumsum(gate, axis=0))[:, None]).to(kind)
        state += tl.dot(tl.trans(keys), update.to(kind))
    tl.store(after + own + place, state, mask=both)


@triton.jit
def _outputs_kernel(
    q: Strided,
    k: Strided,
    v: Strided,
    decay: tl.tensor,
    skips: tl.tensor,
    updates: tl.tensor,
    begins: tl.tensor,
    out: tl.tensor,
    chunks: tl.tensor,
    heads: int,
    shared: int,
    scale: float,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Some values of one head, for a chunk's queries."""
    KEYS: tl.constexpr = FORM.key_dim
    VALUES: tl.constexpr = FORM.value_dim
    head = tl.program_id(1)
    chunk = tl.program_id(0).to(tl.int64)
    begin, length = tl.load(chunks + chunk * 2), tl.load(chunks + chunk * 2 + 1)
    if length > 0:
        index, element = tl.arange(0, FORM.chunk), tl.arange(0, FORM.block_keys)
        value = tl.program_id(2) * TILE + tl.arange(0, TILE)
        is_row, is_key, is_value = index < length, element < KEYS, value < VALUES
        row = begin + index
        both = is_row[:, None] & is_key[None]
        at_value = is_row[:, None] & is_value[None]
        of_keys = k.data + head // shared * k.second
        of_queries = q.data + head // shared * q.second
        keys = _keys(of_keys, row * k.first, element, both, FORM.is_unit)
        queries = _keys(of_queries, row * q.first, element, both, FORM.is_unit)
        kind = q.data.dtype.element_ty
        if FORM.by_key:
            at = decay + (row * heads + head)[:, None] * KEYS + element[None]
            grown = tl.load(at, mask=both, other=0.0)
            alike = _alike(queries, keys, grown, of_keys, k.first, decay + head * KEYS,
                           heads * KEYS, begin, length, FORM)  # fmt: skip
            queries *= tl.exp(grown)
        else:
            grown = tl.cumsum(tl.load(decay + row * heads + head, mask=is_row, other=0.0), axis=0)
            alike = tl.dot(queries.to(kind), tl.trans(keys.to(kind)))
            alike *= tl.exp(tl.minimum(grown[:, None] - grown[None], 0.0))
            queries *= tl.exp(grown)[:, None]
        alike = tl.where(index[:, None] >= index[None], alike, 0.0)
        before = begins + (chunk * heads + head) * KEYS * VALUES
        place = element[:, None] * VALUES + value[None]
        state = tl.load(before + place, mask=is_key[:, None] & is_value[None], other=0.0)
        made = tl.dot(queries.to(kind), state)
        taken = (row * heads + head)[:, None] * VALUES + value[None]
        update = tl.load(updates + taken, mask=at_value, other=0.0)
        made = (made + tl.dot(alike.to(kind), update)) * scale
        if skips is not None:
            at = v.data + head * v.second + (row * v.first)[:, None] + value[None]
            given = tl.load(at, mask=at_value, other=0.0).to(tl.float32)
            made += given * tl.load(skips + head)
        tl.store(out + taken, made.to(out.dtype.element_ty), mask=at_value)
