"""Bandwidth of page writes between two processes: Weft's send agents beside raw NIXL calls.

Both write the same scattered pages to the same pool in the same run, by turns; digests of the
arrived pages are compared. Run it as `python bench/transfer.py`, with `--json` for machines.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from weft.contract.handle import NixlTargetInfo
from weft.engine.transfer.digest import digest_pages, native_digest
from weft.engine.transfer.nixl import (
    PoolRegion,
    ReceiveAgent,
    SendAgents,
    encode_notification,
    nixl_available,
)
from weft.engine.transfer.nixl_binding import load_binding
from weft.engine.transfer.nixl_wire import strided_row

PAGE_KIB = (180, 360)
POLL_S = 2e-4
NOTIFICATION = encode_notification(1, bytes(16), 0)


@dataclass(frozen=True)
class Row:
    """One page size; bandwidths in GB/s (10^9 bytes), each a median with least and most."""

    page_kib: int
    num_pages: int
    raw: tuple[float, float, float]
    weft: tuple[float, float, float]
    ratio: float
    """Weft's bandwidth over that of raw calls, the median of the turns."""
    best_ratio: float
    """Weft's best bandwidth over the best of raw calls, which other programs disturb least."""
    copy: tuple[float, float, float]
    """Bandwidth of copying the same pages in one process with one thread."""
    digest: tuple[float, float, float]
    """Bandwidth of computing the pages' digests with one thread."""
    verified: bool
    """Whether all pages arrived unchanged, by both ways."""


def owner(
    connection: multiprocessing.connection.Connection, num_pages: int, page_bytes: int
) -> None:
    """The owner's process: registers a pool, then answers questions about it."""
    pool = np.zeros((num_pages, page_bytes), np.uint8)
    agent = ReceiveAgent("bench-owner", PoolRegion.of_array(pool))
    connection.send(agent.target())
    while (question := connection.recv()) is not None:
        if isinstance(question, str):
            agent.poll()
            pool[:] = 0
            connection.send(None)
        else:
            connection.send(digest_pages(pool, question))
    agent.close()


class RawWriter:
    """The minimum that the NIXL API requires: descriptors prepared once, one transfer per write."""

    def __init__(self, pool: NDArray[np.uint8], target: NixlTargetInfo) -> None:
        num_pages, page_bytes = pool.shape
        self._agent = load_binding().create_agent("bench-raw", has_device=False)
        self._agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
        peer = self._agent.add_remote_agent(target.agent_metadata).decode()
        self._local = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", strided_row(pool.ctypes.data, page_bytes, num_pages, 0), "DRAM"
        )
        self._remote = self._agent.prep_xfer_dlist(
            peer, strided_row(target.base_address, page_bytes, num_pages, 0), "DRAM"
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


def copy_pages(
    source: NDArray[np.uint8],
    local: NDArray[np.int32],
    destination: NDArray[np.uint8],
    remote: NDArray[np.int32],
) -> None:
    """Copies the same pages with one thread in one process."""
    for source_page, page in zip(local.tolist(), remote.tolist(), strict=True):
        destination[page] = source[source_page]


def seconds(action: Callable[[], object]) -> float:
    """Wall time of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def spread(num_bytes: int, durations: list[float]) -> tuple[float, float, float]:
    """Median, least and most GB/s."""
    rates = [num_bytes / duration / 1e9 for duration in durations]
    return statistics.median(rates), min(rates), max(rates)


class Owner:
    """The owner's process, as seen from this one."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        arguments = (there, num_pages, page_bytes)
        self._process = context.Process(target=owner, args=arguments, daemon=True)
        self._process.start()
        there.close()
        self.target: NixlTargetInfo = self._here.recv()

    def clear(self) -> None:
        """Zeroes the owner's pool and drops its notifications."""
        self._here.send("clear")
        self._here.recv()

    def digests(self, pages: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Digests of pages in the owner's pool."""
        self._here.send(pages)
        return np.asarray(self._here.recv())

    def end(self) -> None:
        """Ends the process."""
        self._here.send(None)
        self._process.join()


def measure(page_kib: int, chunk_mib: int, repeats: int) -> Row:
    """Takes turns `repeats` times, in alternating order, each turn with other pages."""
    page_bytes = page_kib << 10
    num_pages = (chunk_mib << 20) // page_bytes
    rng = np.random.default_rng()
    pool = rng.integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)
    copied = np.zeros_like(pool)
    peer = Owner(num_pages, page_bytes)
    raw = RawWriter(pool, peer.target)
    agents = SendAgents("bench-weft", PoolRegion.of_array(pool))
    is_verified = True
    times: dict[str, list[float]] = {"raw": [], "weft": [], "copy": [], "digest": []}
    for turn in range(repeats + 1):
        local = rng.permutation(num_pages).astype(np.int32)
        remote = rng.permutation(num_pages).astype(np.int32)
        expected = digest_pages(pool, local)
        took: dict[str, float] = {}
        for name in ("raw", "weft") if turn % 2 else ("weft", "raw"):
            peer.clear()
            if name == "raw":
                took[name] = seconds(partial(raw.write, local, remote))
            else:
                took[name] = seconds(partial(weft_write, agents, peer.target, local, remote))
            is_verified &= bool((peer.digests(remote) == expected).all())
        took["copy"] = seconds(partial(copy_pages, pool, local, copied, remote))
        took["digest"] = seconds(partial(digest_pages, pool, local))
        if turn:  # The first turn connects and touches memory.
            for name, duration in took.items():
                times[name].append(duration)
    agents.close()
    peer.end()
    ratios = [a / b for a, b in zip(times["raw"], times["weft"], strict=True)]
    rates = {name: spread(pool.nbytes, values) for name, values in times.items()}
    return Row(
        page_kib,
        num_pages,
        **rates,
        ratio=statistics.median(ratios),
        best_ratio=min(times["raw"]) / min(times["weft"]),
        verified=is_verified,
    )


def print_table(rows: list[Row]) -> None:
    """Prints one line per page size."""

    def cell(rate: tuple[float, float, float]) -> str:
        return f"{rate[0]:.2f} ({rate[1]:.2f}..{rate[2]:.2f})"

    line = "{:>8} {:>6}  {:<21} {:<21} {:<16} {:<21} {:<21} {}"
    print("GB/s: median (least..most); Weft/raw: median of the turns (best of each)")
    heads = ("page", "pages", "raw NIXL", "Weft", "Weft/raw", "copy, 1 thread", "digest, 1 thread")
    print(line.format(*heads, "verified"))
    for row in rows:
        ratios = f"{row.ratio:.3f} ({row.best_ratio:.3f})"
        rates = [cell(rate) for rate in (row.raw, row.weft, row.copy, row.digest)]
        verified = "yes" if row.verified else "NO"
        print(
            line.format(
                f"{row.page_kib} KiB", row.num_pages, *rates[:2], ratios, *rates[2:], verified
            )
        )


def main() -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunk-mib", type=int, default=48, help="bytes a write (default 48 MiB)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    is_available, reason = nixl_available()
    if not is_available:
        parser.exit(1, f"{reason}\n")
    native_digest()
    rows = [measure(kib, arguments.chunk_mib, arguments.repeats) for kib in PAGE_KIB]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
