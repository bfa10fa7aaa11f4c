"""The arithmetic of an arena, over a driver that maps memory of the host."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from typing import Any

import pytest
import torch
from weft.contract.errors import ConfigError
from weft.engine.executor.device_arena import DeviceArena
from weft.engine.executor.memory_spans import Span, spans_of, without

CPU = torch.device("cpu")
PAGE = 1 << 16


class HostDriver:
    """Addresses stay, and memory that was unmapped has lost its content."""

    granularity = PAGE

    def __init__(self) -> None:
        self.blocks: dict[int, ctypes.Array[ctypes.c_uint8]] = {}
        self.mapped: dict[int, int] = {}
        self.handles: set[int] = set()
        """Of memory that was not released."""
        self.is_full = False
        self.kept: set[int] = set()
        """Addresses that it refuses to unmap."""
        self.unreleased: set[int] = set()
        """Addresses whose memory it unmaps, and refuses to release."""

    def reserve(self, size: int) -> int:
        block = (ctypes.c_uint8 * size)()
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int, size: int) -> None:
        assert address not in self.mapped
        del self.blocks[address]

    def map(self, address: int, size: int) -> int:
        if self.is_full:
            raise ConfigError("cuMemCreate: the GPU has not enough memory")
        assert address not in self.mapped
        self.mapped[address] = size
        self.handles.add(address ^ 1)
        return address ^ 1

    def unmap(self, address: int, size: int) -> None:
        if address in self.kept:
            raise ConfigError("cuMemUnmap: invalid argument")
        assert self.mapped.pop(address) == size
        ctypes.memset(address, 0xEE, size)

    def release(self, handle: int) -> None:
        assert handle ^ 1 not in self.mapped
        if handle ^ 1 in self.unreleased:
            raise ConfigError("cuMemRelease: unknown error")
        self.handles.remove(handle)


class HostArena(DeviceArena):
    def _view(self, begin: int, end: int) -> torch.Tensor:
        block = (ctypes.c_uint8 * (end - begin)).from_address(begin)
        return torch.frombuffer(block, dtype=torch.uint8)

    def tensor(self, *shape: int) -> torch.Tensor:
        made = torch.randn(shape)
        address = self._memory.on_take(made.nbytes, 0, None)
        assert address
        place = self._view(address, address + made.nbytes).view(torch.float32).view(shape)
        return place.copy_(made)


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver()


@pytest.fixture
def arena(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> HostArena:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kw: empty(*args, **kw))
    return HostArena(CPU, tensors=list, driver=driver)  # type: ignore[arg-type]


def test_what_was_put_away_comes_back(arena: HostArena, driver: HostDriver) -> None:
    tensors = [arena.tensor(random.randrange(1, 300), 129) for _ in range(5)]
    right = [one.clone() for one in tensors]
    for _ in range(3):
        taken = arena.num_bytes
        arena.leave(keeps=True)
        arena.leave(keeps=True)
        assert not driver.mapped
        assert not driver.handles
        assert arena.num_bytes == 0
        assert not any(torch.equal(one, was) for one, was in zip(tensors, right, strict=True))
        arena.come_back()
        arena.come_back()
        assert arena.num_bytes == taken
        assert all(torch.equal(one, was) for one, was in zip(tensors, right, strict=True))


@pytest.mark.parametrize("is_put_away_before", [False, True])
def test_dropped_weights_leave_what_no_update_fills(
    arena: HostArena, is_put_away_before: bool
) -> None:
    parameters, tables = [arena.tensor(200, 70) for _ in range(3)], arena.tensor(31, 5)
    # Another part of the same piece is no parameter.
    within = parameters[0].view(-1)[-200:]
    arena.tensors = lambda: [parameters[0].view(-1)[:-200], *parameters[1:]]
    was, own = tables.clone(), within.clone()
    if is_put_away_before:
        arena.leave(keeps=True)
    arena.leave(keeps=False)
    arena.come_back()
    assert torch.equal(tables, was)
    assert torch.equal(within, own)
    assert parameters[1].view(torch.uint8).eq(0xEE).all()


def test_pools_come_back_as_zeros(arena: HostArena) -> None:
    arena.tensors = None
    pool = arena.tensor(100, 100)
    arena.leave(keeps=False)
    arena.come_back()
    assert not pool.any()


def test_memory_that_is_not_there_leaves_the_arena_asleep(
    arena: HostArena, driver: HostDriver
) -> None:
    one = arena.tensor(50, 50)
    was = one.clone()
    arena.leave(keeps=True)
    driver.is_full = True
    with pytest.raises(ConfigError, match="not enough"):
        arena.come_back()
    # PyTorch is told that there is no memory.
    assert arena._memory.on_take(100, 0, None) == 0
    driver.is_full = False
    arena.come_back()
    assert torch.equal(one, was)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("is_unmapped", [True, False])
def test_pieces_that_were_given_back_come_back_if_one_was_not(
    arena: HostArena, driver: HostDriver, keeps: bool, is_unmapped: bool
) -> None:
    weights = [arena.tensor(100, 100) for _ in range(3)]
    arena.tensors = lambda: weights
    before, pieces = [one.clone() for one in weights], dict(driver.mapped)
    fails = driver.unreleased if is_unmapped else driver.kept
    fails.add(random.choice([*pieces][1:]))
    with pytest.raises(OSError, match="not all memory"):
        arena.leave(keeps=keeps)
    assert driver.mapped != pieces
    arena.come_back()
    assert driver.mapped == pieces
    assert all(map(torch.equal, weights, before)) == keeps
    fails.clear()
    arena.leave(keeps=True)
    assert not driver.mapped
    assert arena.num_bytes == 0


@pytest.mark.parametrize("is_unmapped", [True, False])
def test_nothing_reaches_a_freed_piece_that_the_driver_keeps(
    arena: HostArena, driver: HostDriver, is_unmapped: bool
) -> None:
    kept, freed = arena.tensor(10, 10), arena.tensor(10, 10).data_ptr()
    was, size = kept.clone(), arena.num_bytes // 2
    (driver.unreleased if is_unmapped else driver.kept).add(freed)
    arena._memory.on_free(freed, 400, 0, None)
    assert arena.num_bytes == size
    # Addresses are given back if nothing is mapped there.
    assert (freed in driver.blocks) == (freed in driver.mapped) == (not is_unmapped)
    arena.leave(keeps=True)
    arena.come_back()
    assert torch.equal(kept, was)


def test_freed_pieces_are_given_back(arena: HostArena, driver: HostDriver) -> None:
    first, second = arena.tensor(10, 10).data_ptr(), arena.tensor(10, 10).data_ptr()
    arena._memory.on_free(first, 400, 0, None)
    arena.leave(keeps=True)
    arena._memory.on_free(second, 400, 0, None)
    arena.come_back()
    assert not driver.mapped
    assert not driver.blocks


def test_nothing_comes_back_into_memory_that_was_freed_meanwhile(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, freed = arena.tensor(10, 10), arena.tensor(10, 10).data_ptr()
    was = kept.clone()
    arena.leave(keeps=True)
    arena._memory.on_free(freed, 400, 0, None)
    seen, view = list[int](), arena._view
    monkeypatch.setattr(
        arena, "_view", lambda begin, end: (seen.append(begin), view(begin, end))[1]
    )
    arena.come_back()
    assert seen == [kept.data_ptr()]
    assert torch.equal(kept, was)


def test_parts_without_others() -> None:
    whole = [Span(0, 10), Span(20, 30)]
    assert without(whole, []) == whole
    assert without(whole, [Span(3, 5), Span(8, 22)]) == [Span(0, 3), Span(5, 8), Span(22, 30)]
    assert without(whole, [Span(0, 30)]) == []


def test_spans_leave_out_what_is_not_theirs() -> None:
    block = torch.zeros(4096)
    begin = block.data_ptr()
    parts = [block[:100], block[112:200], block[1000:1100], block[2000:2100].view(10, 10)[:, :5]]
    # 48 bytes between the first two belong to nobody; rows with gaps are left out.
    spans = spans_of(parts)
    assert spans == [Span(begin, begin + 800), Span(begin + 4000, begin + 4400)]


class Pool:
    id = (0, 1)


def test_pools_do_not_end_while_tensors_are_made(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch aborts the process otherwise."""
    ended: list[Any] = []

    def made(memory: Any) -> Pool:
        pool = Pool()
        weakref.finalize(pool, ended.append, memory)
        return pool

    monkeypatch.setattr("weft.engine.executor.device_arena._Pieces.pool", made)
    for name in ("beginAllocateToPool", "endAllocateToPool", "releasePool"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *_: None, raising=False)
    device = torch.device("cuda", 0)
    first, second = (DeviceArena(device, driver=driver) for _ in range(2))  # type: ignore[arg-type]
    with first.taking():
        pass
    with second.taking():
        del first
        gc.collect()
        assert not ended
    with second.taking():
        assert len(ended) == 1
