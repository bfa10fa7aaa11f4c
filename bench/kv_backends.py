"""Pages of a KV store in a Valkey or Redis server: keeping, looking up and bringing back.

It starts a server on loopback (`--url` takes another one) and a store's back end beside an arena.
It stores pages, drops them from the arena and fetches them again; every page is compared with the
original. The plain rows send the same bytes through the library's client alone, which is the bound.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from harness import Harness, Run, spread
from valkey.asyncio import Valkey

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from weft.contract.store import Offer
from weft.kvstore.backends.valkey import ValkeyBackend, ValkeySource
from weft.kvstore.pages import PageStore
from weft.kvstore.settings import KvStoreSettings
from weft.pages.transfer.digest import digest_pages
from weft.testing.services.valkey_server import valkey_server

BATCH_BYTES = 8 << 20


async def ms_a_page(action: Awaitable[object], num_pages: int) -> float:
    """Milliseconds per page."""
    started_at = time.perf_counter()
    await action
    return (time.perf_counter() - started_at) * 1e3 / num_pages


async def measure(url: str, page_bytes: int, num_pages: int, turns: int) -> dict[str, list[float]]:
    """Milliseconds per page by operation; the first turn warms up."""
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
            "keep": await ms_a_page(keep(backend, pages, keys, contents, digests), num_pages),
        }
        pages.flush()
        assert not pages.num_held(keys)
        times["look up"] = await ms_a_page(backend.look_up(keys), num_pages)
        times["bring back"] = await ms_a_page(bring(backend, pages, keys), num_pages)
        for key, content in zip(keys, contents, strict=True):
            page = pages.page_of(key)
            assert page is not None
            assert np.array_equal(pool[page], content), "a page came back changed"
        times["plain SET"] = await ms_a_page(plain_set(plain, keys, contents), num_pages)
        times["plain GET"] = await ms_a_page(plain_get(plain, keys, page_bytes), num_pages)
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
    return found


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


harness = Harness(__file__, __doc__, repeats=5)
harness.flag("--url", help="a server that may be emptied; default: one of its own")
harness.flag("--pages", type=int, default=128)


@harness.part
def pages(run: Run) -> None:
    """All sizes of pages."""
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
    server = run.stack.enter_context(valkey_server(folder))
    options = run.options
    for page_bytes in (368_640, 2 << 20):
        url = options.url or server.url
        found = asyncio.run(measure(url, page_bytes, options.pages, options.repeats))
        for name, ms in found.items():
            each = spread(ms)
            rate = page_bytes / each.median / 1e3
            run.row(what=name, page_bytes=page_bytes, ms_a_page=each, mb_per_s=rate)


if __name__ == "__main__":
    sys.exit(harness.main())
