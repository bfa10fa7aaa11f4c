"""Page operations against plain indexing on numpy copies."""

import random

import numpy as np
import pytest
import torch
from weft.kernels.ops import pages as page_ops
from weft.kernels.ops.page_digest import page_digests
from weft.kernels.ops.pages import copy_pages, gather_pages, scatter_pages
from weft.testing.kernels.page_cases import expected_digests, page_numbers, poisoned, unsigned
from weft.testing.kernels.wide_pages import WidePages

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
everywhere = pytest.mark.parametrize("device", DEVICES)
NUM_PAGES = 24


def make_pool(dtype: torch.dtype, device: str) -> torch.Tensor:
    """A pool of odd shape with random bits, NaNs among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    content = np.random.default_rng().integers(0, 256, (NUM_PAGES, 720 * size), dtype=np.uint8)
    return torch.from_numpy(content).view(dtype).view(NUM_PAGES, 3, 5, 2, 4, 6).to(device)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """`[pages, bytes]` of a tensor; a copy."""
    return tensor.cpu().flatten(1).view(torch.uint8).numpy().copy()


@everywhere
@pytest.mark.parametrize("most_alone", [2, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_what_plain_indexing_makes(
    dtype: torch.dtype, most_alone: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_ops, "_MAX_SINGLE_COPIES", most_alone)
    pool = make_pool(dtype, device)
    expected = bits(pool)
    for count in (0, 1, 5):
        order = random.sample(range(NUM_PAGES), 2 * count)
        sources, destinations = order[:count], order[count:]
        if count > 1:
            sources[-1] = sources[0]
        copy_pages(pool, sources, destinations)
        expected[destinations] = expected[sources]
        assert (bits(pool) == expected).all()


@everywhere
@pytest.mark.parametrize(
    ("sources", "destinations", "problem"),
    [
        ([NUM_PAGES], [1], "pool of"),
        ([0], [-1], "pool of"),
        ([0, 1 << 40], [1, 2], "pool of"),
        ([0, 1], [2, 2], "twice"),
        ([1, 2], [3, 1], "source and destination"),
        ([1, 2], [3], "2 sources"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    device: str, sources: list[int], destinations: list[int], problem: str
) -> None:
    pool = make_pool(torch.float32, device)
    before = bits(pool)
    with pytest.raises(ValueError, match=problem):
        copy_pages(pool, sources, destinations)
    with pytest.raises(ValueError, match="contiguous"):
        copy_pages(pool.transpose(1, 2), [0], [1])
    assert (bits(pool) == before).all()


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 7, NUM_PAGES])
def test_pages_go_out_and_in_again(dtype: torch.dtype, device: str, count: int) -> None:
    pool = make_pool(dtype, device)
    pages, out = page_numbers(NUM_PAGES, count, device), poisoned(count + 2, pool)
    before = bits(pool)
    gather_pages(pool, pages, out)
    numbers = pages.cpu().numpy()
    assert (bits(out)[:count] == before[numbers]).all()
    assert (bits(out)[count:] == bits(poisoned(2, pool))).all()
    assert unsigned(page_digests(pool, pages)) == expected_digests(pool, pages)

    other = make_pool(dtype, device)
    expected = bits(other)
    expected[numbers] = before[numbers]
    scatter_pages(out, pages, other)
    assert (bits(other) == expected).all()


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 11])
def test_pages_may_lie_apart(dtype: torch.dtype, device: str, count: int) -> None:
    """Nothing between them is copied, digested or written."""
    pool, other = make_pool(dtype, device), make_pool(dtype, device)
    wide, target = WidePages(pool), WidePages(other)
    pages, out = page_numbers(NUM_PAGES, count, device), poisoned(count, pool)
    gather_pages(wide.pool, pages, out)
    assert (bits(out) == bits(pool[pages])).all()
    assert unsigned(page_digests(wide.pool, pages)) == expected_digests(pool, pages)
    wide.check(pool)
    scatter_pages(out, pages, target.pool)
    other[pages] = pool[pages]
    target.check(other)
    sources, destinations = page_numbers(NUM_PAGES, 2 * count).view(2, count).tolist()
    for copied in (target.pool, other):
        copy_pages(copied, sources, destinations)
    target.check(other)


def test_pages_that_do_not_begin_at_words_are_refused() -> None:
    halves = torch.zeros(4, 17, dtype=torch.bfloat16)[:, :16]
    pages, out = page_numbers(4, 1), poisoned(1, halves)
    with pytest.raises(ValueError, match="begin at words"):
        gather_pages(halves, pages, out)
    with pytest.raises(ValueError, match="8-byte"):
        page_digests(torch.zeros(4, 17)[:, :16], pages)


@everywhere
def test_buffers_and_numbers_that_do_not_fit_are_refused(device: str) -> None:
    pool = make_pool(torch.float32, device)
    pages, out = page_numbers(NUM_PAGES, 3, device), poisoned(3, pool)
    before = bits(pool)
    wrong = [
        (pool.transpose(1, 2), pages, out, "contiguous"),
        (pool, pages.int(), out, "int64"),
        (pool, pages.view(1, 3), out, "int64"),
        (pool, pages, out[:2], "3 pages"),
        (pool, pages, out[:, :-4].contiguous(), "bytes"),
        (pool, pages, out.view(torch.int8), "uint8"),
        (pool, pages, out.repeat(1, 2)[:, ::2], "contiguous rows"),
        (pool, pages, out.new_zeros(3, out.shape[1] + 2)[:, :-2], "contiguous rows"),
        (torch.zeros(4, 3, dtype=torch.int8, device=device), pages, out, "4-byte"),
    ]
    for bad_pool, bad_pages, bad_buffer, problem in wrong:
        with pytest.raises(ValueError, match=problem):
            gather_pages(bad_pool, bad_pages, bad_buffer)
        with pytest.raises(ValueError, match=problem):
            scatter_pages(bad_buffer, bad_pages, bad_pool)
    with pytest.raises(ValueError, match="8-byte"):
        page_digests(torch.zeros(NUM_PAGES, 3, device=device), pages)
    assert (bits(pool) == before).all()


@pytest.mark.parametrize(("num_from", "num_into"), [(3, 21), (21, 3), (5, 7), (7, 5), (4, 4)])
def test_pages_are_repacked_by_the_byte(
    monkeypatch: pytest.MonkeyPatch, num_from: int, num_into: int
) -> None:
    """A few bytes at a time, however many there are."""
    monkeypatch.setattr(page_ops, "_REPACKED_BYTES", 160)
    pool, target = (
        torch.randint(1, 255, (40, 32 * length), dtype=torch.uint8)
        for length in (num_from, num_into)
    )
    pages = random.sample(range(40), random.randint(1, 4))
    count = -(-len(pages) * num_from // num_into)
    into = random.sample(range(40), count)
    before = target.clone()
    taken: list[torch.Tensor] = []
    select = torch.Tensor.index_select

    def noted(rows: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        taken.append(select(rows, dim, index))
        return taken[-1]

    monkeypatch.setattr(torch.Tensor, "index_select", noted)
    page_ops.repack_pages(pool, pages, target, into)
    assert 0 < max(some.numel() for some in taken) <= 160
    wanted = torch.zeros(count * target.shape[1], dtype=torch.uint8)
    wanted[: len(pages) * pool.shape[1]] = torch.cat([pool[page] for page in pages])
    before[into] = wanted.view(count, -1)
    assert torch.equal(target, before)
    again = torch.zeros_like(pool)
    page_ops.repack_pages(target, into, again, pages)
    assert torch.equal(again[pages], pool[pages])
    assert int(again.count_nonzero()) == len(pages) * pool.shape[1]


@pytest.mark.parametrize(("num_from", "num_into"), [(3, 21), (21, 3), (5, 7), (7, 5), (4, 4)])
def test_runs_of_pages_are_repacked_apart(
    monkeypatch: pytest.MonkeyPatch, num_from: int, num_into: int
) -> None:
    """All at once, as if each run had a call of its own."""
    monkeypatch.setattr(page_ops, "_REPACKED_BYTES", random.choice([160, 1 << 20]))
    pool, target = (
        torch.randint(1, 255, (40, 32 * length), dtype=torch.uint8)
        for length in (num_from, num_into)
    )
    num_runs = random.randint(2, 5)
    pages = random.sample(range(40), num_runs)
    size = -(-num_from // num_into)
    into = random.sample(range(40), num_runs * size)
    alone, again = target.clone(), torch.zeros_like(pool)
    runs = [into[at : at + size] for at in range(0, len(into), size)]
    for page, run in zip(pages, runs, strict=True):
        page_ops.repack_pages(pool, [page], alone, run)
    page_ops.repack_pages(pool, pages, target, into, num_runs=num_runs)
    assert torch.equal(target, alone)
    page_ops.repack_pages(target, into, again, pages, num_runs=num_runs)
    assert torch.equal(again[pages], pool[pages])
    assert int(again.count_nonzero()) == len(pages) * pool.shape[1]
