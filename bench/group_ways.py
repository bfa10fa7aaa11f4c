"""Ways to multiply 16-bit floats by weights of 4 bits in groups of 128 on tensor cores.

Weights lie as the threads of an operation take them: a strip of 16 rows and 64 columns is 32 times
16 bytes, one word for each operation over 16 columns. All kernels dequantise in registers, apply
scales to sums in float32 and round nothing but the result.

- `resident`: a program keeps its part of x in shared memory, and its warps take slices of K, for
  one strip after another.
- `streamed`: warps take strips, and x passes through shared memory; by `mma` or by `wgmma`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

GROUP = 128
STRIP = 16
PART = 64
"""Columns of K of a strip that lie together."""


class Way(NamedTuple):
    """How a product is launched."""

    kind: str
    """resident, mma, mma-direct, wgmma or wgmma-direct."""
    rows: int
    """Of a program."""
    columns: int
    """Of a program; of a gated pair of each."""
    warps: int
    splits: int
    """Programs that share K."""
    more: int
    """Resident: programs a multiprocessor; else stages of x."""


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [N, K] uint8 below 16 as kernels take them, [N / 16, K / 64, 32, 4] int32."""
    n, k = numbers.shape
    apart = numbers.to(torch.int64).view(n // STRIP, 2, 8, k // PART, 4, 2, 4, 2)
    # strip, half of rows, row, part, operation, half of columns, pair, which of a pair
    apart = apart.permute(0, 3, 2, 6, 4, 7, 5, 1)
    # strip, part, row, pair, operation, which, half of columns, half of rows
    word = torch.zeros(apart.shape[:5], dtype=torch.int64, device=numbers.device)
    for which in range(2):
        for half in range(2):
            for upper in range(2):
                word |= apart[..., which, half, upper] << 16 * which + 8 * half + 4 * upper
    word = torch.where(word >= 1 << 31, word - (1 << 32), word).int()
    return word.reshape(n // STRIP, k // PART, 32, 4).contiguous()


_PAIRS = gl.constexpr(
    """
    {
    .reg .b32 word, centre;
    mov.b32 centre, 0x43084308;
    lop3.b32 $0, $8, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $8, 4;
    lop3.b32 $1, word, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $8, 8;
    lop3.b32 $2, word, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $8, 12;
    lop3.b32 $3, word, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $4, $9, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $9, 4;
    lop3.b32 $5, word, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $9, 8;
    lop3.b32 $6, word, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $9, 12;
    lop3.b32 $7, word, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 $0, $0, centre;
    sub.bf16x2 $1, $1, centre;
    sub.bf16x2 $2, $2, centre;
    sub.bf16x2 $3, $3, centre;
    sub.bf16x2 $4, $4, centre;
    sub.bf16x2 $5, $5, centre;
    sub.bf16x2 $6, $6, centre;
    sub.bf16x2 $7, $7, centre;
    }
    """
)
"""Two words become eight pairs of neighbouring columns: numbers less 8."""


@gluon.jit
def _eight(words):
    """Of words [..., 4]: eight tensors of that shape, of which words 2i and 2i + 1 are pairs."""
    return gl.inline_asm_elementwise(
        _PAIRS,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [words],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _floats(words, LEAD: gl.constexpr, STRIPS: gl.constexpr, layout: gl.constexpr):
    """Words [LEAD, STRIPS, 32, 4] as an operand, [LEAD, STRIPS * 16, 64]; LEAD of 1 is left out."""
    a, b, c, d, e, f, g, h = _eight(words)
    first = gl.join(gl.join(a, b), gl.join(c, d))
    second = gl.join(gl.join(e, f), gl.join(g, h))
    # lead, strip, row, pair, upper of operations, which, half of rows, of columns, operation
    both = gl.join(first, second)
    both = gl.reshape(both, [LEAD, STRIPS, 8, 4, 2, 2, 2, 2, 2])
    both = gl.permute(both, (0, 1, 6, 2, 4, 8, 7, 3, 5))
    if LEAD == 1:
        both = gl.reshape(both, [STRIPS * 16, 64])
    else:
        both = gl.reshape(both, [LEAD, STRIPS * 16, 64])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.constexpr_function
def _powers(count, rank, dim, start=1):
    """Bases of `count` places of a dimension, in steps of `start`."""
    bases = []
    step = start
    while step < start * count:
        bases.append([step if i == dim else 0 for i in range(rank)])
        step *= 2
    return bases


@gluon.constexpr_function
def _words_layout(lead, strips, warps, is_led):
    """Of words [lead, strips, 32, 4]; warps share the first or the second dimension."""
    own = strips if is_led else strips // warps
    reg = [[0, 0, 0, 1], [0, 0, 0, 2]]
    reg += _powers(own, 4, 1, 1 if is_led else warps)
    warp = _powers(warps, 4, 0 if is_led else 1)
    return gl.DistributedLinearLayout(reg, _powers(32, 4, 2), warp, [], [lead, strips, 32, 4])


@gluon.constexpr_function
def _staged_layout(strips, warps):
    """Of words [strips, 32, 4] that warps take from shared memory."""
    reg = [[0, 0, 1], [0, 0, 2], *_powers(strips // warps, 3, 0, warps)]
    return gl.DistributedLinearLayout(
        reg, _powers(32, 3, 1), _powers(warps, 3, 0), [], [strips, 32, 4]
    )


@gluon.jit
def _wait_for_last(IS_DEPENDENT: gl.constexpr):
    if IS_DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _release_next(IS_DEPENDENT: gl.constexpr):
    if IS_DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _silu(x):
    return gl.fdiv(x, 1.0 + gl.exp(-x))


@gluon.jit(do_not_specialize=["rows", "tiles"])
def resident_kernel(
    out,
    x,
    data,
    scales,
    rows,
    columns,
    tiles,
    width,
    K: gl.constexpr,
    IS_GATED: gl.constexpr,
    ROWS: gl.constexpr,
    STRIPS: gl.constexpr,
    WARPS: gl.constexpr,
    GROUPS: gl.constexpr,
    SPLITS: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """GROUPS: groups of a warp's slice of K. Tiles: of STRIPS strips. A split product's parts are
    written as they are, [SPLITS, rows, columns] float32."""
    _release_next(IS_DEPENDENT)
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    first_of: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    second_of: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    by_row: gl.constexpr = gl.SliceLayout(2, sums)
    wl: gl.constexpr = _words_layout(WARPS, STRIPS, WARPS, True)
    PARTS: gl.constexpr = 2 * GROUPS
    split = gl.program_id(1)
    begin = split * (WARPS * GROUPS)

    # Where words lie.
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, wl))))
    strip = gl.arange(0, STRIPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, wl))))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, wl))))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, wl))))
    OF_STRIP: gl.constexpr = K // 64 * 128
    at = (
        ((begin + warp * GROUPS) * 256)[:, None, None, None]
        + (strip * OF_STRIP)[None, :, None, None]
        + (lane * 4)[None, None, :, None]
        + word[None, None, None, :]
    )
    OF_TILE: gl.constexpr = STRIPS * OF_STRIP
    up_words = columns // 16 * OF_STRIP
    # Where scales lie.
    led = gl.arange(0, WARPS, layout=gl.SliceLayout(1, by_row))
    own = gl.arange(0, STRIPS * 16, layout=gl.SliceLayout(0, by_row))
    at_scale = ((begin + led * GROUPS) * width)[:, None] + own[None, :]

    tile = gl.program_id(0)
    words = ()
    given = ()
    words_up = ()
    given_up = ()
    for i in gl.static_range(PARTS):
        words = words + (gl.load(data + at + (tile * OF_TILE + i * 128)),)  # noqa: RUF005 - the compiler takes no starred tuple
        if IS_GATED:
            words_up = words_up + (gl.load(data + at + (up_words + tile * OF_TILE + i * 128)),)  # noqa: RUF005 - the compiler takes no starred tuple
    for i in gl.static_range(GROUPS):
        given = given + (gl.load(scales + at_scale + (i * width + tile * (STRIPS * 16))),)  # noqa: RUF005 - the compiler takes no starred tuple
        if IS_GATED:
            given_up = given_up + (  # noqa: RUF005 - the compiler takes no starred tuple
                gl.load(scales + at_scale + (i * width + tile * (STRIPS * 16) + columns)),
            )
    _wait_for_last(IS_DEPENDENT)

    # The rows' part of K, kept.
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[2, 1, 0])
    kept = gl.allocate_shared_memory(x.dtype.element_ty, [PARTS, WARPS, ROWS, 64], shared)
    copied: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    of_led: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, copied))
    of_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, copied))
    of_place: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, copied))
    slice_ = gl.arange(0, WARPS, layout=of_led)
    row = gl.arange(0, ROWS, layout=of_row)
    place = gl.arange(0, 64, layout=of_place)
    from_x = (
        (begin * 128 + slice_ * (PARTS * 64))[:, None, None]
        + (row * K)[None, :, None]
        + place[None, None, :]
    )
    exists = (
        (slice_ < WARPS)[:, None, None] & (row < rows)[None, :, None] & (place < 64)[None, None, :]
    )
    for i in gl.static_range(PARTS):
        async_copy.async_copy_global_to_shared(kept.index(i), x + from_x + i * 64, mask=exists)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()

    flat: gl.constexpr = gl.SliceLayout(0, sums)
    out_column = gl.arange(0, STRIPS * 16, layout=gl.SliceLayout(1, flat))
    out_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat))
    while tile < tiles:
        following = tile + gl.num_programs(0)
        is_more = following < tiles
        total = gl.zeros([WARPS, STRIPS * 16, ROWS], gl.float32, sums)
        up = gl.zeros([WARPS, STRIPS * 16, ROWS], gl.float32, sums)
        next_words = ()
        next_given = ()
        next_words_up = ()
        next_given_up = ()
        for g in gl.static_range(GROUPS):
            part = gl.zeros([WARPS, STRIPS * 16, ROWS], gl.float32, sums)
            part_up = gl.zeros([WARPS, STRIPS * 16, ROWS], gl.float32, sums)
            for h in gl.static_range(2):
                taken = kept.index(2 * g + h).permute((0, 2, 1)).load(second_of)
                part = mma_v2(_floats(words[2 * g + h], WARPS, STRIPS, first_of), taken, part)
                next_words = next_words + (  # noqa: RUF005 - the compiler takes no starred tuple
                    gl.load(data + at + (following * OF_TILE + (2 * g + h) * 128), mask=is_more),
                )
                if IS_GATED:
                    part_up = mma_v2(
                        _floats(words_up[2 * g + h], WARPS, STRIPS, first_of), taken, part_up
                    )
                    next_words_up = next_words_up + (  # noqa: RUF005 - the compiler takes no starred tuple
                        gl.load(
                            data + at + (up_words + following * OF_TILE + (2 * g + h) * 128),
                            mask=is_more,
                        ),
                    )
            total += part * given[g].to(gl.float32)[:, :, None]
            next_given = next_given + (  # noqa: RUF005 - the compiler takes no starred tuple
                gl.load(scales + at_scale + (g * width + following * (STRIPS * 16)), mask=is_more),
            )
            if IS_GATED:
                up += part_up * given_up[g].to(gl.float32)[:, :, None]
                next_given_up = next_given_up + (  # noqa: RUF005 - the compiler takes no starred tuple
                    gl.load(
                        scales + at_scale + (g * width + following * (STRIPS * 16) + columns),
                        mask=is_more,
                    ),
                )
        words = next_words
        given = next_given
        words_up = next_words_up
        given_up = next_given_up
        whole = gl.sum(total, axis=0)
        if IS_GATED:
            whole = _silu(whole) * gl.sum(up, axis=0)
        to = (split * rows + out_row)[None, :] * columns + (tile * (STRIPS * 16) + out_column)[
            :, None
        ]
        mask = (out_row < rows)[None, :] & (out_column < STRIPS * 16)[:, None]
        gl.store(out + to, whole.to(out.dtype.element_ty), mask=mask)
        tile += gl.num_programs(0)


@gluon.jit(do_not_specialize=["rows"])
def streamed_kernel(
    out,
    x,
    data,
    scales,
    rows,
    columns,
    width,
    K: gl.constexpr,
    IS_GATED: gl.constexpr,
    IS_WIDE: gl.constexpr,
    IS_STAGED: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """IS_WIDE: products of four warps at once (wgmma). IS_STAGED: words pass through shared
    memory."""
    _release_next(IS_DEPENDENT)
    if IS_WIDE:
        sums: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
        )
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    else:
        sums: gl.constexpr = gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8]
        )
        shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    first_of: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    second_of: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, sums)
    STRIPS: gl.constexpr = COLUMNS // 16
    wl: gl.constexpr = _words_layout(1, STRIPS, WARPS, False)
    ALL: gl.constexpr = K // 128
    OWN: gl.constexpr = (ALL + SPLITS - 1) // SPLITS
    split = gl.program_id(2)
    # A program without groups reads those of others, and multiplies none.
    begin = gl.minimum(split * OWN, ALL - 1)
    end = gl.minimum(split * OWN + OWN, ALL)

    strip = gl.arange(0, STRIPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, wl))))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, wl))))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, wl))))
    OF_STRIP: gl.constexpr = K // 64 * 128
    tile = gl.program_id(1)
    last = columns // 16 - 1
    at = (
        (gl.minimum(tile * STRIPS + strip, last) * OF_STRIP)[None, :, None, None]
        + (lane * 4)[None, None, :, None]
        + word[None, None, None, :]
    )
    at_up = columns // 16 * OF_STRIP
    own = tile * COLUMNS + gl.arange(0, COLUMNS, layout=by_row)
    at_scale = gl.minimum(own, columns - 1)

    sl: gl.constexpr = _staged_layout(STRIPS, WARPS)
    if IS_STAGED:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
        kl: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
        bank = gl.allocate_shared_memory(gl.int32, [STAGES, STRIPS, 64, 4], plain)
        if IS_GATED:
            bank_up = gl.allocate_shared_memory(gl.int32, [STAGES, STRIPS, 64, 4], plain)
        k_strip = gl.arange(0, STRIPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, kl)))
        k_lane = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, kl)))
        k_word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, kl)))
        k_at = (
            (gl.minimum(tile * STRIPS + k_strip, last) * OF_STRIP)[:, None, None]
            + (k_lane * 4)[None, :, None]
            + k_word[None, None, :]
        )
        k_is = ((k_strip < STRIPS)[:, None, None] & (k_lane < 64)[None, :, None]) & (k_word < 4)[
            None, None, :
        ]
        for i in gl.static_range(STAGES - 1):
            k_from = data + k_at + (begin + i) * 256
            k_exists = k_is & (begin + i < end)
            async_copy.async_copy_global_to_shared(bank.index(i), k_from, mask=k_exists)
            if IS_GATED:
                async_copy.async_copy_global_to_shared(
                    bank_up.index(i), k_from + at_up, mask=k_exists
                )
    else:
        words = gl.load(data + at + begin * 256)
        words_next = gl.load(data + at + (begin * 256 + 128))
        words_up = words
        words_up_next = words_next
        if IS_GATED:
            words_up = gl.load(data + at + (at_up + begin * 256))
            words_up_next = gl.load(data + at + (at_up + begin * 256 + 128))
    following = gl.minimum(begin + 1, ALL - 1)
    given = gl.load(scales + at_scale + begin * width)
    given_next = gl.load(scales + at_scale + following * width)
    given_up = given
    given_up_next = given_next
    if IS_GATED:
        given_up = gl.load(scales + at_scale + (begin * width + columns))
        given_up_next = gl.load(scales + at_scale + (following * width + columns))
    _wait_for_last(IS_DEPENDENT)

    ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, ROWS, 128], shared)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied))
    place = gl.arange(0, 128, layout=gl.SliceLayout(0, copied))
    from_x = (row * K)[:, None] + place[None, :]
    is_x = (row < rows)[:, None] & (place < 128)[None, :]
    # The first group's words are counted with the first rows.
    for i in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(
            ring.index(i), x + from_x + (begin + i) * 128, mask=is_x & (begin + i < end)
        )
        async_copy.commit_group()

    total = gl.zeros([COLUMNS, ROWS], gl.float32, sums)
    up = gl.zeros([COLUMNS, ROWS], gl.float32, sums)
    stage = 0
    for group in range(begin, end):
        async_copy.wait_group(STAGES - 2)
        if IS_WIDE:
            fence_async_shared()
        gl.thread_barrier()
        ahead = group + STAGES - 1
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        async_copy.async_copy_global_to_shared(
            ring.index(free), x + from_x + ahead * 128, mask=is_x & (ahead < end)
        )
        if IS_STAGED:
            k_from = data + k_at + ahead * 256
            k_exists = k_is & (ahead < end)
            async_copy.async_copy_global_to_shared(bank.index(free), k_from, mask=k_exists)
            if IS_GATED:
                async_copy.async_copy_global_to_shared(
                    bank_up.index(free), k_from + at_up, mask=k_exists
                )
        async_copy.commit_group()
        following = gl.minimum(group + 1, ALL - 1)
        part = gl.zeros([COLUMNS, ROWS], gl.float32, sums)
        part_up = gl.zeros([COLUMNS, ROWS], gl.float32, sums)
        for h in gl.static_range(2):
            turned = ring.index(stage).slice(64 * h, 64, dim=1).permute((1, 0))
            if IS_STAGED:
                mine = bank.index(stage).slice(32 * h, 32, dim=1).load(sl)
            elif h == 0:
                mine = words
            else:
                mine = words_next
            operand = _floats(mine, 1, STRIPS, first_of)
            if IS_WIDE:
                part = warpgroup_mma(operand, turned, part, use_acc=h > 0)
            else:
                taken = turned.load(second_of)
                part = mma_v2(operand, taken, part)
            if IS_GATED:
                if IS_STAGED:
                    mine_up = bank_up.index(stage).slice(32 * h, 32, dim=1).load(sl)
                elif h == 0:
                    mine_up = words_up
                else:
                    mine_up = words_up_next
                operand_up = _floats(mine_up, 1, STRIPS, first_of)
                if IS_WIDE:
                    part_up = warpgroup_mma(operand_up, turned, part_up, use_acc=h > 0)
                else:
                    part_up = mma_v2(operand_up, taken, part_up)
            if not IS_STAGED:
                if h == 0:
                    words = gl.load(data + at + following * 256)
                    if IS_GATED:
                        words_up = gl.load(data + at + (at_up + following * 256))
                else:
                    words_next = gl.load(data + at + (following * 256 + 128))
                    if IS_GATED:
                        words_up_next = gl.load(data + at + (at_up + following * 256 + 128))
        total += part * given.to(gl.float32)[:, None]
        given = given_next
        following = gl.minimum(group + 2, ALL - 1)
        given_next = gl.load(scales + at_scale + following * width)
        if IS_GATED:
            up += part_up * given_up.to(gl.float32)[:, None]
            given_up = given_up_next
            given_up_next = gl.load(scales + at_scale + (following * width + columns))
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    async_copy.wait_group(0)
    if IS_GATED:
        total = _silu(total) * up
    PER: gl.constexpr = 8
    stored: gl.constexpr = gl.BlockedLayout([PER, 1], [8, 4], [1, WARPS], [0, 1])
    whole = gl.convert_layout(total.to(out.dtype.element_ty), stored)
    out_column = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, stored))
    out_row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, stored))
    mask = (out_column < columns)[:, None] & (out_row < rows)[None, :]
    to = (split * rows + out_row)[None, :] * columns + out_column[:, None]
    gl.store(out + to, whole, mask=mask)


def multiply(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    columns: int,
    way: Way,
    *,
    is_gated: bool,
    options: dict[str, bool],
) -> torch.Tensor:
    """[M, columns] bfloat16, or where split the parts of the sums, [splits, M, columns] float32.

    Args:
        x: [M, K] bfloat16.
        data: By `pack`.
        scales: [K / 128, N] float16.
        columns: Of the result, a multiple of a program's.
        way: How; splits must divide groups where x is resident.
        is_gated: Gate and up become one.
        options: Of the launch.
    """
    rows, k = x.shape
    many = (way.splits, rows, columns) if way.splits > 1 else (rows, columns)
    dtype = torch.float32 if way.splits > 1 else x.dtype
    out = torch.empty(many, dtype=dtype, device=x.device)
    if way.kind == "resident":
        strips, tiles = way.columns // STRIP, columns // way.columns
        groups = k // GROUP // way.splits // way.warps
        programs = min(tiles, max(1, 132 * way.more // way.splits))
        resident_kernel[(programs, way.splits)](
            out, x, data, scales, rows, columns, tiles, scales.shape[1], K=k, IS_GATED=is_gated,
            ROWS=way.rows, STRIPS=strips, WARPS=way.warps, GROUPS=groups, SPLITS=way.splits,
            num_warps=way.warps, **options,
        )  # fmt: skip
        return out
    grid = (triton.cdiv(rows, way.rows), triton.cdiv(columns, way.columns), way.splits)
    streamed_kernel[grid](
        out, x, data, scales, rows, columns, scales.shape[1], K=k, IS_GATED=is_gated,
        IS_WIDE=way.kind.startswith("wgmma"), IS_STAGED="direct" not in way.kind, ROWS=way.rows,
        COLUMNS=way.columns, WARPS=way.warps, STAGES=way.more, SPLITS=way.splits,
        num_warps=way.warps, **options,
    )  # fmt: skip
    return out
