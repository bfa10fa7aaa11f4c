"""GPU memory that two processes share: pages arrive, and no process that is gone keeps memory."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from weft.contract.handle import SharedTargetInfo
from weft.engine.transfer.staging_memory import DeviceStagingPages
from weft.pages.transfer.nixl_wire import TransferError
from weft.pages.transfer.shared import SharedSenders
from weft.testing.engine.shared_gpu_process import (
    PAGE_BYTES,
    PAGES,
    Connection,
    digests_of,
    own,
)

pytestmark = pytest.mark.needs("cuda")

KEY = ("owner", 7)


@pytest.fixture
def start() -> Iterator[Callable[[str], tuple[Any, Connection, SharedTargetInfo]]]:
    """Starts owners that end with the test."""
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []

    def starter(device: str) -> tuple[Any, Connection, SharedTargetInfo]:
        here, there = context.Pipe()
        process = context.Process(target=own, args=(there, device), daemon=True)
        process.start()
        there.close()
        started.append(process)
        return process, here, here.recv()

    yield starter
    for process in started:
        process.kill()
        process.join()


def senders() -> tuple[torch.Tensor, SharedSenders]:
    memory = DeviceStagingPages(PAGES, PAGE_BYTES, torch.device("cuda:0"))
    memory.tensor.random_(0, 256)
    torch.cuda.synchronize()
    return memory.tensor, SharedSenders(memory.region())


def write(
    made: SharedSenders, target: SharedTargetInfo, pages: tuple[list[int], list[int]]
) -> None:
    handle = made.write(KEY, target, *pages, lambda: None)
    while handle.poll() == "pending":
        pass


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_pages_arrive_in_another_processs_gpu_memory(device: str, start: Any) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    _, owner, target = start(device)
    assert target.memory_type == "VRAM"
    pool, made = senders()
    for count in (1, 5, PAGES):
        sources, destinations = (random.sample(range(PAGES), count) for _ in range(2))
        write(made, target, (sources, destinations))
        owner.send(destinations)
        assert owner.recv() == digests_of(pool, sources)
    write(made, target, (list(range(PAGES)), list(range(PAGES))))
    owner.send(list(range(PAGES)))
    assert owner.recv() == digests_of(pool, list(range(PAGES)))
    made.close()


def test_gpu_memory_of_an_owner_that_is_gone_is_given_back(start: Any) -> None:
    process, _, target = start("cuda:0")
    _, made = senders()
    write(made, target, ([1], [2]))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    held = torch.cuda.mem_get_info("cuda:0")[0]
    made.tidy()
    assert not made.has_peers
    assert torch.cuda.mem_get_info("cuda:0")[0] >= held + PAGES * PAGE_BYTES
    with pytest.raises(TransferError):
        made.connect(KEY, target)


def test_memory_is_shared_beside_expandable_segments(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own memory cannot be exported then."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _, owner, target = start("cuda:0")
    pool, made = senders()
    write(made, target, ([3], [4]))
    owner.send([4])
    assert owner.recv() == digests_of(pool, [3])
    made.close()
