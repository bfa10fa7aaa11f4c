"""Pages that leave and enter a pool on a GPU: the kernels at real sizes, and the copies' order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from weft.engine.transfer.mover import DeviceMove, Lanes, PageMover
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import DeviceStagingPages, PinnedStagingPages
from weft.kernels.ops.page_digest import page_digests
from weft.kernels.ops.pages import gather_pages, scatter_pages
from weft.pages.transfer.digest import digest_pages
from weft.testing.kernels.page_cases import (
    bytes_of,
    expected_digests,
    page_numbers,
    poisoned,
    random_pool,
    unsigned,
)

pytestmark = pytest.mark.needs("cuda")

CUDA = torch.device("cuda")
A_WHILE = 200_000_000
"""Clock cycles of a device: a tenth of a second, about."""


@pytest.mark.parametrize(
    ("num_pages", "num_words", "count"),
    [(300, 1 << 19, 200), (40, (7 << 16) + 6, 40), (1000, 70, 777), (3, 2, 3), (5, 64, 0)],
)
def test_pages_go_out_and_in_again(num_pages: int, num_words: int, count: int) -> None:
    pool = random_pool(num_pages, num_words, torch.bfloat16, "cuda")
    pages, out = page_numbers(num_pages, count, "cuda"), poisoned(count + 1, pool)
    gather_pages(pool, pages, out)
    numbers = pages.cpu().numpy()
    before = bytes_of(pool)
    assert (out.cpu().numpy()[:count] == before[numbers]).all()
    assert (out[count:] == poisoned(1, pool)).all()
    assert unsigned(page_digests(pool, pages)) == digest_pages(before, numbers).tolist()
    other = random_pool(num_pages, num_words, torch.bfloat16, "cuda")
    expected = bytes_of(other)
    expected[numbers] = before[numbers]
    scatter_pages(out, pages, other)
    assert (bytes_of(other) == expected).all()


def test_pages_beyond_32_bit_offsets() -> None:
    num_words = 1 << 19
    pool = torch.empty((4200, 4 * num_words), dtype=torch.uint8, device=CUDA)
    assert pool.numel() > 1 << 33
    numbers = [4199, 4100, 1, 2049, 2047, 1023]
    pages = torch.tensor(numbers, device=CUDA)
    sent = torch.randint(0, 256, (len(numbers), 4 * num_words), dtype=torch.uint8, device=CUDA)
    scatter_pages(sent, pages, pool)
    out = torch.empty_like(sent)
    gather_pages(pool, pages, out)
    assert torch.equal(out, sent)
    assert torch.equal(pool[4199], sent[0])
    rows = torch.arange(len(numbers))
    assert unsigned(page_digests(pool, pages)) == expected_digests(sent.cpu(), rows)


class Moved:
    """A pool, a staging area and the way between them."""

    def __init__(
        self,
        num_pages: int,
        num_words: int,
        num_staged: int,
        kind: type[PinnedStagingPages] | type[DeviceStagingPages],
    ) -> None:
        self.pool = random_pool(num_pages, num_words, torch.bfloat16, "cuda")
        self.pool[0] = 0
        memory = kind(num_staged, 4 * num_words, self.pool.device)
        self.area = StagingArea(memory.pages, num_staged // 2)
        self.lanes = Lanes(self.pool.device, 4 * num_words)
        self.mover = PageMover(self.pool, self.area, memory, self.lanes)

    def staged_pages(self, count: int) -> list[int]:
        return random.sample(range(len(self.area.pages)), count)


@pytest.fixture(params=[PinnedStagingPages, DeviceStagingPages])
def kind(request: pytest.FixtureRequest) -> type[PinnedStagingPages] | type[DeviceStagingPages]:
    kind: type[PinnedStagingPages] | type[DeviceStagingPages] = request.param
    return kind


@pytest.fixture(params=[(200, 1 << 19, 64), (60, 1 << 22, 24), (200, 98, 100)])
def moved(
    request: pytest.FixtureRequest, kind: type[PinnedStagingPages] | type[DeviceStagingPages]
) -> Iterator[Moved]:
    moved = Moved(*request.param, kind)
    yield moved
    moved.mover.close()


def test_staged_pages_are_the_pools_and_back(moved: Moved) -> None:
    count = len(moved.area.pages) - 1
    pages = page_numbers(len(moved.pool), count).tolist()
    staged = moved.staged_pages(count)
    before = bytes_of(moved.pool)
    out = moved.mover.move_out(pages, staged, with_digests=True)
    out.wait()
    assert out.is_done()
    assert (moved.area.pages[staged] == before[pages]).all()
    assert out.digests() == digest_pages(before, pages).tolist()

    moved.area.pages[:] = np.random.default_rng().integers(0, 256, moved.area.pages.shape)
    before[pages] = moved.area.pages[staged]
    into = moved.mover.move_in(staged, pages, moved.mover.mark(), with_digests=True)
    into.wait()
    assert (bytes_of(moved.pool) == before).all()
    assert into.digests() == digest_pages(before, pages).tolist()
    plain = moved.mover.move_out(pages, staged, with_digests=False)
    plain.wait()
    assert plain.digests() == [0] * count


def test_what_comes_in_waits_for_its_mark(moved: Moved) -> None:
    pages, staged = [3, 1, 2], moved.staged_pages(3)
    numbers = torch.tensor(pages, device=CUDA)
    moved.pool[numbers] = 0
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    moved.pool[numbers] = 0  # the last use of these pages, a wipe
    landed = np.random.default_rng().integers(0, 256, moved.area.pages[staged].shape)
    moved.area.pages[staged] = landed
    moved.mover.move_in(staged, pages, moved.mover.mark(), with_digests=False).wait()
    assert (bytes_of(moved.pool)[pages] == landed).all()


def test_memory_can_be_pinned_again_where_it_was_pinned() -> None:
    """And what lies there is what a device copies: it knows addresses, not what they are now."""
    device_end = torch.empty((40, 1 << 20), dtype=torch.uint8, device=CUDA)
    for turn in range(1, 20):
        memory = PinnedStagingPages(40, 1 << 20, device_end.device)
        memory.pages[:] = turn
        device_end.copy_(torch.from_numpy(memory.pages), non_blocking=True)
        torch.cuda.synchronize()
        assert (device_end == turn).all()
        memory.close()
        del memory
        plain = np.full((40, 1 << 20), 100 + turn, np.uint8)
        device_end.copy_(torch.from_numpy(plain))
        assert (device_end == 100 + turn).all()
        del plain


def a_step() -> torch.cuda.Event:
    """Work on the engine's stream; the event behind it."""
    torch.ones(1000, device=CUDA).sum()
    event = torch.cuda.Event()
    event.record()
    return event


def test_no_step_waits_for_copies(moved: Moved) -> None:
    """A copy that cannot go on holds up neither the engine's thread nor its stream."""
    pages, staged = [5, 4], moved.staged_pages(2)

    def move_in() -> DeviceMove:
        return moved.mover.move_in(staged, pages, moved.mover.mark(), with_digests=True)

    def move_out() -> DeviceMove:
        return moved.mover.move_out(pages, staged, with_digests=True)

    for lane, move in ((moved.lanes.into, move_in), (moved.lanes.out, move_out)):
        # Kernels that are used for the first time are loaded, which waits for the device.
        for _ in range(2):
            move().wait()
        a_step().synchronize()
        with lane.begin(None):
            torch.cuda._sleep(5 * A_WHILE)
        torch.cuda.set_sync_debug_mode("error")
        try:
            under_way = move()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        a_step().synchronize()
        assert not under_way.is_done()
        under_way.wait()
