"""Bandwidth of page writes between two processes: Weft's send agents beside raw NIXL calls, and
copies into shared memory.

All write the same scattered pages in the same run, by turns; digests of the arrived pages are
compared. Copies and digests of the same pages run beside, with one thread.
"""

import multiprocessing
import multiprocessing.connection
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from harness import Harness, Run, ratio_of, spread, timed
from numpy.typing import NDArray
from weft.contract.handle import NixlTargetInfo, SharedTargetInfo
from weft.pages.transfer.digest import digest_pages, native_digest
from weft.pages.transfer.nixl import (
    PoolRegion,
    ReceiveAgent,
    SendAgents,
    encode_notification,
    nixl_available,
)
from weft.pages.transfer.nixl_binding import load_binding
from weft.pages.transfer.nixl_wire import ByteRange, strided_rows
from weft.pages.transfer.shared import SharedPool, SharedSenders
from weft.pages.transfer.shared_memory import MemoryFile

PAGE_KIB = (180, 360)
POLL_S = 2e-4
NOTIFICATION = encode_notification(1, bytes(16), 0)


def owner(
    connection: multiprocessing.connection.Connection, num_pages: int, page_bytes: int
) -> None:
    """The owner's process: registers a pool, then answers questions about it."""
    memory = MemoryFile(num_pages * page_bytes)
    pool = np.zeros((num_pages, page_bytes), np.uint8)
    pools = {"raw": pool, "weft": pool, "shared": memory.array.reshape(num_pages, page_bytes)}
    agent = ReceiveAgent("bench-owner", PoolRegion.of_array(pool))
    sharer = SharedPool("bench-owner", memory, page_bytes, num_pages)
    connection.send((agent.target(), sharer.target()))
    while (question := connection.recv()) is not None:
        if isinstance(question, str):
            agent.poll()
            pools[question][:] = 0
            connection.send(None)
        else:
            name, pages = question
            connection.send(digest_pages(pools[name], pages))
    agent.close()
    sharer.close()


class RawWriter:
    """The minimum that the NIXL API requires: descriptors prepared once, one transfer per write."""

    def __init__(self, pool: NDArray[np.uint8], target: NixlTargetInfo) -> None:
        num_pages, page_bytes = pool.shape
        self._agent = load_binding().create_agent("bench-raw", has_device=False)
        self._agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
        peer = self._agent.add_remote_agent(target.agent_metadata).decode()
        count, whole = (num_pages, 0), [ByteRange(0, page_bytes)]
        self._local = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", strided_rows(pool.ctypes.data, page_bytes, *count, whole), "DRAM"
        )
        self._remote = self._agent.prep_xfer_dlist(
            peer, strided_rows(target.base_address, page_bytes, *count, whole), "DRAM"
        )

    def write(self, local: NDArray[np.int32], remote: NDArray[np.int32]) -> None:
        """Writes pages and waits."""
        handle = self._agent.make_prepped_xfer(
            "WRITE", self._local, local, self._remote, remote, NOTIFICATION
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        handle.release()
        assert state == "DONE", state


def weft_write(
    agents: SendAgents, target: NixlTargetInfo, local: NDArray[np.int32], remote: NDArray[np.int32]
) -> None:
    """Writes pages and waits, as the filler does."""
    handle = agents.write(("owner", 1), target, local.tolist(), remote.tolist(), NOTIFICATION)
    while handle.poll() == "pending":
        time.sleep(POLL_S)


def shared_write(
    senders: SharedSenders,
    target: SharedTargetInfo,
    local: NDArray[np.int32],
    remote: NDArray[np.int32],
) -> None:
    """Copies pages into the owner's memory, as the filler does."""
    senders.write(("owner", 1), target, local.tolist(), remote.tolist(), lambda: None)


def copy_pages(
    source: NDArray[np.uint8],
    local: NDArray[np.int32],
    destination: NDArray[np.uint8],
    remote: NDArray[np.int32],
) -> None:
    """Copies the same pages with one thread in one process."""
    for source_page, page in zip(local.tolist(), remote.tolist(), strict=True):
        destination[page] = source[source_page]


class Owner:
    """The owner's process, as seen from this one."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        arguments = (there, num_pages, page_bytes)
        self._process = context.Process(target=owner, args=arguments, daemon=True)
        self._process.start()
        there.close()
        self.target: NixlTargetInfo
        self.shared: SharedTargetInfo
        self.target, self.shared = self._here.recv()

    def clear(self, name: str) -> None:
        """Zeroes the owner's pool for one way and drops its notifications."""
        self._here.send(name)
        self._here.recv()

    def digests(self, name: str, pages: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Digests of pages in the owner's pool for one way."""
        self._here.send((name, pages))
        return np.asarray(self._here.recv())

    def end(self) -> None:
        """Ends the process."""
        self._here.send(None)
        self._process.join()


def measure(page_kib: int, chunk_mib: int, repeats: int) -> dict[str, Any]:
    """Takes turns, in alternating order, each turn with other pages."""
    page_bytes = page_kib << 10
    num_pages = (chunk_mib << 20) // page_bytes
    rng = np.random.default_rng()
    pool = rng.integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)
    copied = np.zeros_like(pool)
    peer = Owner(num_pages, page_bytes)
    raw = RawWriter(pool, peer.target)
    agents = SendAgents("bench-weft", PoolRegion.of_array(pool))
    senders = SharedSenders(PoolRegion.of_array(pool))
    writes: dict[str, Callable[[NDArray[np.int32], NDArray[np.int32]], None]] = {
        "raw": raw.write,
        "weft": partial(weft_write, agents, peer.target),
        "shared": partial(shared_write, senders, peer.shared),
    }
    is_verified = True
    times: dict[str, list[float]] = {name: [] for name in (*writes, "copy", "digest")}
    for turn in range(repeats + 1):
        local = rng.permutation(num_pages).astype(np.int32)
        remote = rng.permutation(num_pages).astype(np.int32)
        expected = digest_pages(pool, local)
        took: dict[str, float] = {}
        for name in writes if turn % 2 else reversed(writes):
            peer.clear(name)
            took[name] = timed(partial(writes[name], local, remote))
            is_verified &= bool((peer.digests(name, remote) == expected).all())
        took["copy"] = timed(partial(copy_pages, pool, local, copied, remote))
        took["digest"] = timed(partial(digest_pages, pool, local))
        if turn:  # The first turn connects and touches memory.
            for name, duration in took.items():
                times[name].append(duration)
    agents.close()
    senders.close()
    peer.end()
    rates = {
        f"{name}_gb_per_s": spread([pool.nbytes / seconds / 1e9 for seconds in values])
        for name, values in times.items()
    }
    return {
        "page_kib": page_kib,
        "pages": num_pages,
        **rates,
        "ratio": ratio_of(times["raw"], times["weft"]),
        "shared_ratio": ratio_of(times["raw"], times["shared"]),
        "best_ratio": min(times["raw"]) / min(times["weft"]),
        "verified": is_verified,
    }


harness = Harness(__file__, __doc__, repeats=15)
harness.flag("--chunk-mib", type=int, default=48, help="bytes a write (default 48 MiB)")


@harness.part
def transfer(run: Run) -> None:
    """All sizes of pages."""
    is_available, reason = nixl_available()
    if not is_available:
        raise SystemExit(reason)
    native_digest()
    for kib in PAGE_KIB:
        row = measure(kib, run.options.chunk_mib, run.options.repeats)
        run.row(row)
        if not row["verified"]:
            run.fail(f"pages of {kib} KiB came changed")


if __name__ == "__main__":
    sys.exit(harness.main())
