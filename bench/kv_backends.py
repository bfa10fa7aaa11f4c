"""Pages of a KV store in a Valkey or Redis server: keeping, looking up and bringing back.

It starts a server on loopback (`--url` takes another one) and a store's back end beside an arena.
It stores pages, drops them from the arena and fetches them again; every page is compared with the
original. The plain rows send the same bytes through the library's client alone, which is the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from valkey.asyncio import Valkey

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from weft.engine.transfer.digest import digest_pages
from weft.kvstore.backends.valkey import ValkeyBackend, ValkeySource
from weft.kvstore.pages import Offer, PageStore
from weft.kvstore.settings import KvStoreSettings
from weft.testing.services.valkey_server import valkey_server

BATCH_BYTES = 8 << 20
Row = tuple[str, int, float, float, float]
"""Operation, bytes of a page, median ms per page, least, most."""


async def timed(action: Awaitable[object], num_pages: int) -> float:
    """Milliseconds per page."""
    started_at = time.perf_counter()
    await action
    return (time.perf_counter() - started_at) * 1e3 / num_pages


async def measure(url: str, page_bytes: int, num_pages: int, turns: int) -> list[Row]:
    """Rows of one page size; the first turn warms up."""
    settings = KvStoreSettings(backend="valkey", valkey_url=[url], valkey_timeout_s=30.0)
    pool = np.zeros((2 * num_pages + 2, page_bytes), np.uint8)
    pages = PageStore(pool)
    source = ValkeySource(settings)
    threads = ThreadPoolExecutor(4)
    backend = source.open(pages, 1.0, threads)
    plain = Valkey.from_url(url)
    found: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        keys = [secrets.token_bytes(32) for _ in range(num_pages)]
        contents = np.random.default_rng().integers(0, 256, (num_pages, page_bytes), np.uint8)
        digests = digest_pages(contents, range(num_pages)).tolist()
        times = {
            "keep": await timed(keep(backend, pages, keys, contents, digests), num_pages),
        }
        pages.flush()
        assert not pages.num_held(keys)
        times["look up"] = await timed(backend.look_up(keys), num_pages)
        times["bring back"] = await timed(bring(backend, pages, keys), num_pages)
        for key, content in zip(keys, contents, strict=True):
            page = pages.page_of(key)
            assert page is not None
            assert np.array_equal(pool[page], content), "a page came back changed"
        times["plain SET"] = await timed(plain_set(plain, keys, contents), num_pages)
        times["plain GET"] = await timed(plain_get(plain, keys, page_bytes), num_pages)
        pages.flush()
        await backend.flush()
        await plain.flushdb()
        if turn:
            for name, ms in times.items():
                found.setdefault(name, []).append(ms)
    await backend.close(1.0)
    await source.close()
    await plain.connection_pool.disconnect()
    threads.shutdown()
    return [
        (name, page_bytes, statistics.median(ms), min(ms), max(ms)) for name, ms in found.items()
    ]


async def keep(
    backend: ValkeyBackend,
    pages: PageStore,
    keys: list[bytes],
    contents: np.ndarray,
    digests: list[int],
) -> None:
    """Times pages from the arena until all of them are in the server."""
    goal = backend.counters.saved_pages + len(keys)
    for start in range(0, len(keys), 64):
        part = slice(start, start + 64)
        offers = [Offer(k, d, 0) for k, d in zip(keys[part], digests[part], strict=True)]
        incoming = pages.begin(offers)
        pages.pool[incoming.pages] = contents[part]
        pages.publish(incoming, digests[part])
        while backend.counters.saved_pages < min(goal, goal - len(keys) + start + 64):
            await asyncio.sleep(0.0005)


async def bring(backend: ValkeyBackend, pages: PageStore, keys: list[bytes]) -> None:
    """Fetches all pages to the arena."""
    while pages.num_held(keys) < len(keys):
        await backend.fetch(keys)


async def plain_set(client: Valkey, keys: list[bytes], contents: np.ndarray) -> None:
    """The same bytes by the library alone."""
    step = max(1, BATCH_BYTES // contents.shape[1])
    for start in range(0, len(keys), step):
        pipeline = client.pipeline(transaction=False)
        for key, content in zip(
            keys[start : start + step], contents[start : start + step], strict=True
        ):
            pipeline.set(b"plain" + key, content.tobytes())
        await pipeline.execute()


async def plain_get(client: Valkey, keys: list[bytes], page_bytes: int) -> None:
    """The same bytes by the library alone."""
    step = max(1, BATCH_BYTES // page_bytes)
    for start in range(0, len(keys), step):
        pipeline = client.pipeline(transaction=False)
        for key in keys[start : start + step]:
            pipeline.get(b"plain" + key)
        assert all(len(value) == page_bytes for value in await pipeline.execute())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server that may be emptied; default: one of its own")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, valkey_server(Path(folder)) as server:
        for page_bytes in (368_640, 2 << 20):
            url = arguments.url or server.url
            rows += asyncio.run(measure(url, page_bytes, arguments.pages, arguments.turns))
    table = Table("what", "page bytes", "ms a page", "least", "most", "MB/s")
    for name, page_bytes, median, least, most in rows:
        rate = "-" if name == "look up" else f"{page_bytes / median / 1e3:,.0f}"
        table.add_row(name, f"{page_bytes:,}", f"{median:.3f}", f"{least:.3f}", f"{most:.3f}", rate)
    Console().print(table)
    if arguments.json is not None:
        names = ("what", "page_bytes", "median_ms", "least_ms", "most_ms")
        figures = [dict(zip(names, row, strict=True)) for row in rows]
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
