"""Attention over latents: torch's operations and the GPU's kernel, against float64."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention import (
    attention_before,
    latent_attention,
    merged,
    own_attention,
    read_latents,
    write_latents,
)
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import fresh_seed

PAGE, LAYER = 8, 1
LENGTHS = [(1, 1), (1, 40), (3, 3), (5, 21), (17, 17), (1, 300)]
"""New rows and positions of each request."""


def make(
    dtype: torch.dtype, heads: int, width: int, rest: int, *, has_trees: bool, first: int
) -> tuple[torch.Tensor, torch.Tensor, LatentSpec, AttentionMetadata]:
    q_lens, kv_lens = [q for q, _ in LENGTHS], [kv for _, kv in LENGTHS]
    pages = sum(-(-kv // PAGE) for kv in kv_lens)
    pool = torch.randn(pages + 1, 1, 2, 1, PAGE, width + rest).to(dtype)
    order = (1 + torch.randperm(pages)).int()
    table = torch.full((len(LENGTHS), 40), -1, dtype=torch.int32)
    for request, kv in enumerate(kv_lens):
        count = -(-kv // PAGE)
        table[request, :count], order = order[:count], order[count:]
        pool[int(table[request, 0]), 0, LAYER, 0, :first] = float("nan")
    rows = sum(q_lens)
    words = None
    if has_trees:
        words = torch.full((rows,), -1)
        words[5:10] = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101])
    step = AttentionMetadata(
        page_table=table,
        places=torch.zeros(rows, dtype=torch.int64),
        cu_q_lens=torch.tensor([0, *q_lens]).cumsum(0).int(),
        kv_lens=torch.tensor(kv_lens).int(),
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        ancestors=words,
    )
    q = torch.randn(rows, heads, width + rest).to(dtype)
    return q, pool, LatentSpec(heads, width, 0.2, first), step


def exact(
    q: torch.Tensor, pool: torch.Tensor, spec: LatentSpec, step: AttentionMetadata
) -> torch.Tensor:
    """Row by row in float64."""
    out = []
    for request, (q_len, kv_len) in enumerate(LENGTHS):
        pages = step.page_table[request, : -(-kv_len // PAGE)].long()
        keys = pool[pages, 0, LAYER, 0].flatten(0, 1)[:kv_len].double()
        for number in range(q_len):
            row = int(step.cu_q_lens[request]) + number
            root = kv_len - q_len
            word = -1 if step.ancestors is None else int(step.ancestors[row])
            visible = range(spec.first_position, root + number + 1)
            seen = [p for p in visible if p < root or word >> (p - root) & 1]
            scores = q[row].double() @ keys[seen].t() * spec.scale
            out.append(scores.softmax(dim=-1) @ keys[seen, : spec.value_dim])
    return torch.stack(out)


@pytest.mark.parametrize(("has_trees", "first"), [(False, 0), (True, 0), (False, 1), (False, 7)])
def test_each_row_sees_what_is_before_it(has_trees: bool, first: int) -> None:
    fresh_seed()
    q, pool, spec, step = make(torch.float32, 5, 24, 8, has_trees=has_trees, first=first)
    out = latent_attention(q, pool, LAYER, spec, step)
    torch.testing.assert_close(out.double(), exact(q, pool, spec, step), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="does not fit"):
        latent_attention(q[..., :-1].contiguous(), pool, LAYER, spec, step)
    with pytest.raises(IndexError):
        latent_attention(q, pool, 2, spec, step)


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize(
    ("heads", "width", "rest", "has_trees", "first", "dtype"),
    [
        (3, 24, 8, False, 1, torch.float32),
        (20, 33, 5, True, 0, torch.float32),
        (16, 512, 64, False, 0, torch.float16),
    ],
)
def test_the_kernel(
    heads: int,
    width: int,
    rest: int,
    has_trees: bool,
    first: int,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    fresh_seed()
    q, pool, spec, step = make(dtype, heads, width, rest, has_trees=has_trees, first=first)
    expected, eps = exact(q, pool, spec, step), torch.finfo(dtype).eps
    with kernel_module("latent_attention.triton_latent", tmp_path) as module:
        for most in (1, 3):
            module._MAX_PARTS, module._MIN_PART = most, 16
            module.num_multiprocessors = lambda _: 1000
            out = module.latent_attention(q, pool, LAYER, spec, step)
            torch.testing.assert_close(out.double(), expected, rtol=16 * eps, atol=16 * eps)


def check_parts(
    before: tuple[torch.Tensor, torch.Tensor],
    given: tuple[torch.Tensor, torch.Tensor, LatentSpec, AttentionMetadata],
) -> None:
    """Attention to what is before a step, merged with that among its rows, is attention to all."""
    q, pool, spec, step = given
    own = torch.cat(
        [
            pool[step.page_table[request, : -(-kv // PAGE)].long(), 0, LAYER, 0].flatten(0, 1)[
                kv - q_len : kv
            ]
            for request, (q_len, kv) in enumerate(LENGTHS)
        ]
    )
    keys = own.unsqueeze(1).expand(-1, spec.heads, -1)
    values = keys[..., : spec.value_dim]
    found = own_attention(q, keys, values, step.cu_q_lens, spec.scale)
    out = merged(*found, *before)
    torch.testing.assert_close(out.double(), exact(q, pool, spec, step), rtol=1e-5, atol=1e-5)


def test_what_is_before_a_step_and_its_own_rows_are_merged() -> None:
    fresh_seed()
    given = make(torch.float32, 5, 24, 8, has_trees=False, first=0)
    q, pool, spec, step = given
    before = attention_before(q, pool, LAYER, spec, step)
    assert not before[0][0].any()
    check_parts(before, given)
    trees = step._replace(ancestors=torch.full((len(q),), -1))
    with pytest.raises(ValueError, match="trees"):
        attention_before(q, pool, LAYER, spec, trees)


@pytest.mark.needs("triton-interpreter")
def test_the_kernel_of_what_is_before_a_step(tmp_path: Path) -> None:
    fresh_seed()
    given = make(torch.float32, 5, 24, 8, has_trees=False, first=0)
    q, pool, spec, step = given
    with kernel_module("latent_attention.triton_latent", tmp_path) as module:
        for most in (1, 3):
            module._MAX_PARTS, module._MIN_PART = most, 16
            module.num_multiprocessors = lambda _: 1000
            check_parts(module.attention_before(q, pool, LAYER, spec, step), given)


def test_vectors_are_written_to_their_places() -> None:
    fresh_seed()
    pool = torch.zeros(4, 1, 2, 1, PAGE, 12)
    places = torch.tensor(random.sample(range(PAGE, 4 * PAGE), 7))
    latents, spec = torch.randn(7, 12), LatentSpec(1, 8, 1.0)
    write_latents(latents, pool, LAYER, spec, places)
    flat = pool[:, 0, LAYER, 0].flatten(0, 1)
    assert torch.equal(flat[places], latents)
    assert torch.equal(read_latents(pool, LAYER, spec, places, torch.float32), latents)
    assert int((flat != 0).any(dim=1).sum()) == 7
    assert not pool[:, 0, 0].any()


def scaled(pool: torch.Tensor, dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool in 8 bits of the same vectors, and these vectors as it keeps them, float64."""
    pages = len(pool)
    kept = torch.zeros(pages, 1, 2, 1, PAGE, pool.shape[-1] + 4, dtype=dtype)
    spec, places = LatentSpec(1, width, 1.0), torch.arange(pages * PAGE)
    write_latents(pool[:, 0, LAYER, 0].flatten(0, 1), kept, LAYER, spec, places)
    wide = torch.zeros_like(pool, dtype=torch.float64)
    wide[:, 0, LAYER, 0] = rounded(pool[:, 0, LAYER, 0].double(), dtype, width)
    return kept, wide


def rounded(vectors: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """[..., D] float64: each half of a vector in steps of its own scale, which is the next number
    in bfloat16 from its largest magnitude on.
    """
    found, most = vectors.clone(), 127 if dtype == torch.int8 else 448
    for part in (found[..., :width], found[..., width:]):
        exact = part.float().abs().amax(-1, keepdim=True) / most
        near = exact.bfloat16()
        above = torch.nextafter(near, torch.full_like(near, math.inf))
        scales = torch.where(near.float() < exact, above, near).double()
        numbers = (part / torch.where(scales > 0, scales, 1.0)).clamp(-most, most)
        whole = numbers.round() if most == 127 else numbers.to(torch.float8_e4m3fn).double()
        part.copy_(whole * scales)
    return found


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_vectors_in_8_bits_keep_a_scale_for_the_latent_and_one_for_the_key(
    dtype: torch.dtype,
) -> None:
    fresh_seed()
    pool = torch.randn(4, 1, 2, 1, PAGE, 24)
    pool[..., 16:] *= 100
    pool[1, 0, LAYER, 0, 2, :16] = 0
    kept, wide = scaled(pool, dtype, 16)
    spec, places = LatentSpec(1, 16, 1.0), torch.randperm(4 * PAGE)[:20]
    found = read_latents(kept, LAYER, spec, places, torch.float32).double()
    expected = wide[:, 0, LAYER, 0].flatten(0, 1)[places]
    sizes = pool[:, 0, LAYER, 0].flatten(0, 1)[places].double()
    for half in (slice(0, 16), slice(16, 24)):
        # A number may round to its other neighbour where it lies between two.
        most = 1.1 / 127 if dtype == torch.int8 else 0.07
        error = (found - expected)[:, half].abs()
        assert (error <= most * sizes[:, half].abs().amax(-1, keepdim=True)).all()
        assert (error > 1e-5 * sizes[:, half].abs()).double().mean() < 0.05
    assert not kept[:, 0, 0].any()
    nothing = torch.full((1, 24), math.nan)
    write_latents(nothing, kept, LAYER, spec, places[:1])
    assert read_latents(kept, LAYER, spec, places[:1], torch.float32).isnan().all()


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_the_kernel_writes_the_same_8_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    fresh_seed()
    # Numbers that the format has: the interpreter rounds others to FP8 wrongly.
    kind, most = (torch.int8, 127) if dtype == torch.int8 else (torch.float8_e4m3fn, 448)
    latents, spec = torch.randn(9, 40).mul_(30).clamp_(-127, 127), LatentSpec(1, 24, 1.0)
    latents[:, [0, 30]] = most
    latents = latents.to(kind).float() / 64
    latents[:, 24:] *= 32
    latents[3, :24] = 0
    latents[4, 30] = float("nan")
    places = torch.tensor(random.sample(range(4 * PAGE), 9))
    own, other = (torch.zeros(4, 1, 2, 1, PAGE, 44, dtype=dtype) for _ in range(2))
    write_latents(latents, own, LAYER, spec, places)
    with kernel_module("latent_attention.triton_latent", tmp_path) as module:
        module.write_scaled(latents, other, LAYER, spec, places)
    latents[4, 24:] = math.nan
    found, expected = (
        read_latents(pool, LAYER, spec, places, torch.float32) for pool in (other, own)
    )
    torch.testing.assert_close(found, latents, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(expected, latents, rtol=0, atol=0, equal_nan=True)
    # What is beside a number that is not finite may be any number.
    flat = [pool[:, 0, LAYER, 0].flatten(1)[:, : PAGE * 40] for pool in (other, own)]
    numbers = [one.unflatten(1, (PAGE, 40)).flatten(0, 1) for one in flat]
    for one in numbers:
        one[places[4]] = 0
    assert torch.equal(*numbers)
    assert not other[:, 0, 0].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_attention_to_8_bits_is_that_to_what_they_mean(dtype: torch.dtype) -> None:
    fresh_seed()
    q, pool, spec, step = make(torch.float32, 5, 32, 16, has_trees=False, first=0)
    pool[..., 32:] *= 3
    kept, wide = scaled(pool, dtype, 32)
    out = latent_attention(q, kept, LAYER, spec, step)
    found = read_latents(kept, LAYER, spec, torch.arange(len(pool) * PAGE), torch.float64)
    wide[:, 0, LAYER, 0] = found.view(len(pool), PAGE, -1)
    torch.testing.assert_close(out.double(), exact(q, wide, spec, step), rtol=1e-5, atol=1e-5)


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("kept_in", [torch.int8, torch.uint8])
@pytest.mark.parametrize(
    ("heads", "width", "rest", "has_trees", "first", "dtype"),
    [
        (3, 24, 8, False, 1, torch.float32),
        (20, 32, 16, True, 0, torch.float16),
        pytest.param(16, 512, 64, False, 0, torch.float16, marks=pytest.mark.full),
    ],
)
def test_the_kernel_of_8_bits(
    kept_in: torch.dtype,
    heads: int,
    width: int,
    rest: int,
    has_trees: bool,
    first: int,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    fresh_seed()
    q, pool, spec, step = make(dtype, heads, width, rest, has_trees=has_trees, first=first)
    kept, wide = scaled(pool, kept_in, width)
    places = torch.arange(len(pool) * PAGE)
    found = read_latents(kept, LAYER, spec, places, torch.float64)
    wide[:, 0, LAYER, 0] = found.view(len(pool), PAGE, -1)
    expected, eps = exact(q, wide, spec, step), torch.finfo(dtype).eps
    with kernel_module("latent_attention.triton_latent", tmp_path) as module:
        for most in (1, 3):
            module._MAX_PARTS, module._MIN_PART = most, 16
            module.num_multiprocessors = lambda _: 1000
            out = module.latent_attention(q, kept, LAYER, spec, step)
            torch.testing.assert_close(out.double(), expected, rtol=16 * eps, atol=16 * eps)


def test_parts_fill_the_rounds_of_programs() -> None:
    """Programs that take a multiprocessor each end no later than with a fixed number of rounds."""
    from weft.kernels.ops.latent_attention.triton_latent import launch_config, num_parts

    launch = launch_config(torch.bfloat16, 64, 64)
    for _ in range(300):
        programs, processors = random.randint(1, 1500), random.choice((78, 114, 132, 148))
        most = random.randint(1, 32)

        def rounds(parts: int, each: int = programs, at_once: int = processors) -> float:
            return -(-each * parts // at_once) / parts

        parts = num_parts(programs, most, processors, launch)
        assert 1 <= parts <= most
        before = min(most, -(-2 * processors // programs))
        assert rounds(parts) <= 1.02 * rounds(before)
        assert rounds(parts) <= rounds(1)
