"""Stores that keep their pages in a real Valkey or Redis server, or in a cluster of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from weft.cli import certs
from weft.cli.certs import issue
from weft.contract.errors import ConfigError
from weft.contract.reports import TierReport
from weft.kvstore.settings import KvStoreSettings
from weft.kvstore.store import KvStore
from weft.testing.services.certificates import make_certificates
from weft.testing.services.kv_chain import Chain, Filled, StoreCaller, random_pages
from weft.testing.services.store_server import store_here

pytestmark = pytest.mark.needs("valkey")
with contextlib.suppress(ImportError):
    from weft.kvstore.backends.valkey_values import HEADER_BYTES, pack, unpack, value_name
    from weft.testing.services.valkey_server import ValkeyServer, valkey_cluster, valkey_server

PAGE_BYTES = 4096
NUM_PAGES = 8
Held = tuple[Chain, NDArray[np.uint8]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path) as server:
        yield server


@contextlib.asynccontextmanager
async def opened(*urls: str, **changes: Any) -> AsyncIterator[tuple[KvStore, StoreCaller]]:
    """A store with a back end, and a client of it."""
    settings = {"memory_bytes": 64 * PAGE_BYTES, "backend": "valkey", "valkey_url": list(urls)}
    # Timeouts for a machine with other work.
    settings |= {"valkey_timeout_s": 5.0, "valkey_lookup_timeout_s": 5.0}
    async with store_here(**settings | changes) as (store, address), StoreCaller(address) as caller:
        yield store, caller


async def put(
    caller: StoreCaller, num_pages: int = NUM_PAGES, *, may_refuse: bool = False, **changes: Any
) -> Held:
    """Puts a new chain; with `may_refuse`, the store may have no room for some of its pages."""
    chain, content = Chain(num_pages, **changes), random_pages(num_pages, PAGE_BYTES)
    answer = await caller.put_data(chain, range(num_pages), content)
    assert answer.stored_pages + may_refuse * answer.refused_pages == num_pages
    return chain, content


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def kept(store: KvStore) -> TierReport:
    (tier,) = store.tiers()
    assert tier.name == "valkey"
    return tier


async def saved(store: KvStore, num_pages: int) -> None:
    await until(lambda: kept(store).counters["saved_pages"] >= num_pages)


def check(filled: Filled, content: NDArray[np.uint8], num_pages: int) -> None:
    assert filled.kinds[-1] == "done"
    assert sorted(filled.pages) == list(range(num_pages))
    for index, page in filled.pages.items():
        assert bytes(page) == content[index].tobytes()


# -- values ----------------------------------------------------------------------------------------


def test_a_value_is_the_page_of_its_key_alone() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    key, parent, group = chance.randbytes(32), chance.randbytes(32), chance.randbytes(8)
    content = np.frombuffer(chance.randbytes(PAGE_BYTES), np.uint8)
    value = pack(key, 12345, parent, group, content)
    page = unpack(key, value)
    assert page is not None
    assert (page.digest, page.parent, page.group) == (12345, parent, group)
    assert bytes(page.content) == content.tobytes()
    assert unpack(chance.randbytes(32), value) is None
    for size in (0, 3, HEADER_BYTES - 1, HEADER_BYTES, len(value) - 1):
        assert unpack(key, value[:size]) is None
    for position in range(HEADER_BYTES):
        changed = bytearray(value)
        changed[position] ^= 1 << chance.randrange(8)
        assert unpack(key, bytes(changed)) is None


# -- one server ------------------------------------------------------------------------------------


async def test_what_the_arena_gave_up_comes_back(server: ValkeyServer) -> None:
    async with opened(server.url, memory_bytes=33 * PAGE_BYTES) as (store, caller):
        held = []
        for _ in range(6):
            held.append(await put(caller))
            await saved(store, NUM_PAGES * len(held))
        for chain, content in random.sample(held, 6):
            assert await caller.look_up(chain) == NUM_PAGES
            check(await caller.fill(chain), content, NUM_PAGES)
        stats = await caller.settled()
        (tier,) = stats.tiers
        assert tier.name == "valkey"
        assert tier.counters["loaded_pages"] >= 2 * NUM_PAGES
        assert tier.counters["corrupt_pages"] == tier.counters["failed_saves"] == 0
        # What came back is not sent again.
        assert tier.counters["saved_pages"] == 6 * NUM_PAGES


async def test_pages_outlive_the_store_and_are_shared(server: ValkeyServer) -> None:
    """A second store beside the first one, then a third one after both have ended."""
    async with opened(server.url) as (store, caller), opened(server.url) as (other, asker):
        chain, content = await put(caller)
        await saved(store, NUM_PAGES)
        assert await asker.look_up(Chain(3)) == 0
        assert await asker.look_up(chain) == NUM_PAGES
        check(await asker.fill(chain), content, NUM_PAGES)
        longer = Chain(NUM_PAGES + 1, namespace=chain.namespace, tokens=[*chain.tokens, 1, 2, 3, 4])
        more = random_pages(1, PAGE_BYTES)
        assert (await asker.put_data(longer, [NUM_PAGES], more)).stored_pages == 1
        await saved(other, 1)
    async with opened(server.url) as (_, caller):
        assert await caller.look_up(longer) == NUM_PAGES + 1
        check(await caller.fill(longer), np.concatenate([content, more]), NUM_PAGES + 1)


async def test_two_stores_send_a_page_once(server: ValkeyServer) -> None:
    async with opened(server.url) as (store, caller), opened(server.url) as (other, asker):
        chain, content = await put(caller)
        await saved(store, NUM_PAGES)
        assert (await asker.put_data(chain, range(NUM_PAGES), content)).stored_pages == NUM_PAGES
        _, _ = await put(asker, 1)
        await saved(other, 1)
        assert kept(other).counters["saved_pages"] == 1


async def test_a_prefix_is_a_store_of_its_own(server: ValkeyServer) -> None:
    async with opened(server.url) as (store, caller):
        chain, _ = await put(caller)
        await saved(store, NUM_PAGES)
    async with opened(server.url, valkey_prefix="weft-b") as (_, caller):
        assert await caller.look_up(chain) == 0


async def test_pages_of_two_sizes_share_a_server(server: ValkeyServer) -> None:
    async with opened(server.url) as (store, caller):
        chain, content = await put(caller)
        await saved(store, NUM_PAGES)
    async with opened(server.url) as (store, caller):
        large = Chain(2)
        assert (
            await caller.put_data(large, range(2), random_pages(2, 2 * PAGE_BYTES))
        ).stored_pages == 2
        await saved(store, 2)
    async with opened(server.url) as (_, caller):
        assert await caller.look_up(chain) == NUM_PAGES
        check(await caller.fill(chain), content, NUM_PAGES)


async def test_pages_expire(server: ValkeyServer) -> None:
    async with opened(server.url, valkey_ttl_s=3600.0) as (store, caller):
        await put(caller)
        await saved(store, NUM_PAGES)
        with server.client() as client:
            left = [client.ttl(name) for name in server.page_names()]
    assert len(left) == NUM_PAGES
    assert all(3000 < seconds <= 3600 for seconds in left)


async def test_a_flush_empties_the_server_of_these_pages_alone(server: ValkeyServer) -> None:
    async with opened(server.url) as (store, caller):
        chain, _ = await put(caller)
        await saved(store, NUM_PAGES)
        with server.client() as client:
            client.set("weft-of-others", "1")
        assert await store.flush() == 2 * NUM_PAGES
        assert server.page_names() == [b"weft-of-others"]
        assert await caller.look_up(chain) == 0


# -- TLS -------------------------------------------------------------------------------------------


def certificates(folder: Path, *hosts: str) -> Path:
    """Those of stores and of a server at these hosts, as `weft certs` makes them."""
    authority = make_certificates(folder, "kvstore")
    issue(authority, folder, "valkey", hosts)
    return folder


async def test_pages_travel_over_mutual_tls(tmp_path: Path) -> None:
    assert certs.main([str(tmp_path / "tls"), "--service", "kvstore", "--service", "valkey"]) == 0
    with valkey_server(tmp_path, tls=tmp_path / "tls") as server:
        async with opened(server.url) as (store, caller):
            chain, content = await put(caller)
            await saved(store, NUM_PAGES)
        assert len(server.page_names()) == NUM_PAGES
        async with opened(server.url) as (store, caller):
            assert await caller.look_up(chain) == NUM_PAGES
            check(await caller.fill(chain), content, NUM_PAGES)
            assert f"valkey at 127.0.0.1:{server.port}" in await store.describe_transport()
            assert "rror" not in await store.describe_transport()


@pytest.mark.parametrize("what", ["no TLS", "authority", "host", "no certificate", "stranger"])
async def test_a_server_that_is_not_to_be_trusted_gets_no_page(tmp_path: Path, what: str) -> None:
    """Nor does one that does not trust the store: all of it is misses, and is said."""
    tls = certificates(tmp_path / "tls", "elsewhere.example" if what == "host" else "127.0.0.1")
    others = certificates(tmp_path / "others", "127.0.0.1")
    with valkey_server(tmp_path, tls=tls) as server:
        url = {
            "no TLS": f"valkey://127.0.0.1:{server.port}",
            "authority": server.tls_url(others / "ca.pem", tls),
            "no certificate": server.tls_url(tls / "ca.pem", None),
            "stranger": server.tls_url(tls / "ca.pem", others),
        }.get(what, server.url)
        async with opened(url) as (store, caller):
            chain, content = await put(caller)
            await until(lambda: kept(store).counters["failed_saves"] == NUM_PAGES)
            assert await caller.look_up(Chain(3)) == 0
            check(await caller.fill(chain), content, NUM_PAGES)  # From the arena.
            told = await store.describe_transport()
            assert "rror" in told or "losed" in told or "failed" in told, told
        assert server.page_names() == []


# -- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["page", "digest", "key"])
async def test_changed_bytes_in_the_server_are_a_miss(server: ValkeyServer, where: str) -> None:
    async with opened(server.url) as (store, caller):
        chain, content = await put(caller)
        await saved(store, NUM_PAGES)
    name = value_name("weft", chain.keys[5])
    with server.client() as client:
        value = bytearray(client.get(name))
        if where == "page":
            value[random.randrange(HEADER_BYTES, len(value))] ^= 1 << random.randrange(8)
        elif where == "digest":
            value[random.randrange(HEADER_BYTES)] ^= 1 << random.randrange(8)
        else:
            value = client.get(value_name("weft", chain.keys[4]))
        client.set(name, bytes(value))
    async with opened(server.url) as (store, caller):
        assert await caller.look_up(chain) == NUM_PAGES
        check(await caller.fill(chain), content, 5)
        await until(lambda: kept(store).counters["corrupt_pages"] == 1)
        await until(lambda: name not in server.page_names())
        assert await caller.look_up(chain) == 5
        await caller.settled()


async def test_a_full_server_is_counted_and_nothing_else(server: ValkeyServer) -> None:
    async with opened(server.url) as (store, caller):
        with server.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
        chain, content = await put(caller)
        await until(lambda: kept(store).counters["failed_saves"] == NUM_PAGES)
        await put(caller)  # It is let be for a while.
        await until(lambda: kept(store).counters["dropped_pages"] == NUM_PAGES)
        assert await caller.look_up(chain) == NUM_PAGES
        check(await caller.fill(chain), content, NUM_PAGES)
        await caller.settled()


async def test_what_the_server_gave_up_is_a_miss(server: ValkeyServer) -> None:
    """The prefix before the gap is still of use."""
    async with opened(server.url) as (store, caller):
        chain, content = await put(caller)
        await saved(store, NUM_PAGES)
    with server.client() as client:
        client.delete(value_name("weft", chain.keys[3]))
    async with opened(server.url) as (_, caller):
        assert await caller.look_up(chain) == 3
        check(await caller.fill(chain), content, 3)


async def test_a_killed_server_is_misses_and_comes_back(server: ValkeyServer) -> None:
    async with opened(server.url) as (store, caller):
        chain, content = await put(caller)
        await saved(store, NUM_PAGES)
        server.kill()
        assert await caller.look_up(Chain(3)) == 0
        assert await caller.look_up(chain) == NUM_PAGES  # They are in the arena.
        check(await caller.fill(chain), content, NUM_PAGES)
        lost, _ = await put(caller)
        await until(lambda: kept(store).counters["failed_saves"] == NUM_PAGES)
        assert "valkey at" in await store.describe_transport()
        assert "Error" in await store.describe_transport()
        server.start()
        # The breaker tries it again by itself.
        async with asyncio.timeout(60):
            while not server.page_names():
                await put(caller, 2)
                await asyncio.sleep(0.2)
        assert value_name("weft", lost.keys[0]) not in server.page_names()
        await caller.settled()


async def test_a_kill_in_the_middle_breaks_nothing(server: ValkeyServer) -> None:
    """Puts, lookups and fills go on while the server dies: all end, none with wrong bytes."""
    async with opened(server.url, memory_bytes=40 * PAGE_BYTES) as (store, caller):
        held = []
        for _ in range(4):
            held.append(await put(caller))
            await saved(store, NUM_PAGES * len(held))

        async def use() -> None:
            for _ in range(10):
                chain, content = random.choice(held)
                num_pages = await caller.look_up(chain)
                filled = await caller.fill(chain)
                assert filled.kinds[-1] in ("done", "declined")
                for index, page in filled.pages.items():
                    assert bytes(page) == content[index].tobytes()
                assert num_pages <= NUM_PAGES
                # Pages that wait for the dead server take room until they are given up.
                held.append(await put(caller, may_refuse=True))

        users = asyncio.gather(*(use() for _ in range(3)))
        await asyncio.sleep(random.random() * 0.3)
        server.kill()
        async with asyncio.timeout(60):
            await users
        await caller.settled()


async def test_a_server_that_stands_still_costs_a_timeout(server: ValkeyServer) -> None:
    """A lookup ends long before its server answers, and the breaker ends even that wait."""
    times = {"valkey_timeout_s": 0.5, "valkey_lookup_timeout_s": 0.2}
    async with opened(server.url, **times) as (store, caller):
        chain, content = await put(caller)
        # A busy machine may let a save be too late.
        async with asyncio.timeout(60):
            while not kept(store).counters["saved_pages"]:
                await asyncio.sleep(0.1)
                await put(caller, 1)
        server.pause()
        try:
            for _ in range(6):
                async with asyncio.timeout(60):
                    assert await caller.look_up(Chain(4)) == 0
            await until(lambda: kept(store).counters["backend_skipped_commands"] > 0)
            check(await caller.fill(chain), content, NUM_PAGES)
        finally:
            server.go_on()
        deadline = time.monotonic() + 60
        before = kept(store).counters["saved_pages"]
        while kept(store).counters["saved_pages"] == before:
            await put(caller, 1)
            await asyncio.sleep(0.1)
            assert time.monotonic() < deadline
        await caller.settled()


async def test_a_store_starts_before_its_server(tmp_path: Path) -> None:
    with valkey_server(tmp_path) as server:
        server.kill()
        async with opened(server.url) as (store, caller):
            chain, content = await put(caller)
            check(await caller.fill(chain), content, NUM_PAGES)
            assert "not reached yet" in await store.describe_transport()
            server.start()
            async with asyncio.timeout(60):
                while not server.page_names():
                    await put(caller, 1)
                    await asyncio.sleep(0.2)


async def test_a_password_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("quite secret\n")
    with valkey_server(tmp_path) as server:
        with server.client() as client:
            client.config_set("requirepass", "quite secret")
        files = {"valkey_password_file": tmp_path / "password"}
        async with opened(server.url, **files) as (store, caller):
            await put(caller)
            await saved(store, NUM_PAGES)
        async with opened(server.url) as (store, caller):
            await put(caller)
            await until(lambda: kept(store).counters["failed_saves"] == NUM_PAGES)


async def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for wrong, text in (
        ({"backend": "valkey"}, "needs --valkey-url"),
        ({"valkey_url": ["valkey://h"]}, "is for --backend valkey"),
        (
            {"backend": "valkey", "valkey_url": ["valkey://h"], "disk_cache_dir": tmp_path},
            "leave --disk-cache-dir away",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            KvStoreSettings.model_validate(wrong)
    for url in ("http://127.0.0.1:1", "valkey://u:sec#ret@h:1", "valkey://127.0.0.1:1?tls=yes"):
        with pytest.raises(ConfigError, match="write valkey://") as caught:
            async with opened(url):
                pass
        assert "sec" not in caught.value.message.replace("--valkey-password-file", "")
    shown = KvStoreSettings(backend="valkey", valkey_url=["valkey://u:secret@h"]).describe()
    assert "secret" not in str(shown)


# -- a cluster -------------------------------------------------------------------------------------


async def test_a_cluster_holds_pages_on_all_nodes_and_survives_one(tmp_path: Path) -> None:
    with valkey_cluster(tmp_path) as nodes:
        seeds = [node.url for node in nodes]
        size = {"memory_bytes": 256 * PAGE_BYTES}
        async with opened(*seeds[:2], **size) as (store, caller):
            held = [await put(caller, 20) for _ in range(3)]
            await saved(store, 60)
            assert all(node.page_names() for node in nodes)
            assert sum(len(node.page_names()) for node in nodes) == 60
            assert "cluster of 3 nodes" in await store.describe_transport()
        async with opened(nodes[2].url, **size) as (_, caller):
            for chain, content in held:
                assert await caller.look_up(chain) == 20
                check(await caller.fill(chain), content, 20)
        gone = random.choice(nodes)
        lost = set(gone.page_names())
        gone.kill()
        async with opened(*seeds, **size) as (store, caller):
            for chain, content in held:
                names = [value_name("weft", key) for key in chain.keys]
                num_left = next((i for i, name in enumerate(names) if name in lost), 20)
                # It may be asked before the store knows of the cluster.
                async with asyncio.timeout(60):
                    while await caller.look_up(chain) < num_left:
                        await asyncio.sleep(0.1)
                assert await caller.look_up(chain) == num_left
                if num_left:
                    check(await caller.fill(chain), content, num_left)
            # A store that no lookup hit has made no arena, and so no tier, before this put.
            await put(caller, 60)
            await until(lambda: kept(store).counters["saved_pages"] > 0)
            await until(lambda: kept(store).counters["failed_saves"] > 0)
            await caller.settled()


async def test_slots_that_move_are_found_again(tmp_path: Path) -> None:
    with valkey_cluster(tmp_path) as nodes:
        async with opened(nodes[0].url, memory_bytes=1024 * PAGE_BYTES) as (store, caller):
            await put(caller)
            await saved(store, NUM_PAGES)
            await store.flush()
            for node in (nodes[1], nodes[0], nodes[2]):
                with node.client() as client, nodes[1].client() as target:
                    name = target.execute_command("CLUSTER", "MYID")
                    pipeline = client.pipeline(transaction=False)
                    for slot in range(4000):
                        pipeline.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)
                    pipeline.execute()
            await put(caller, 40)
            await until(lambda: kept(store).counters["backend_redirections"] > 0)
            async with asyncio.timeout(60):
                is_kept = False
                while not is_kept:
                    chain, content = await put(caller, 40)
                    await asyncio.sleep(0.3)
                    names = {name for node in nodes for name in node.page_names()}
                    is_kept = all(value_name("weft", key) in names for key in chain.keys)
        async with opened(nodes[0].url) as (_, caller):
            assert await caller.look_up(chain) == 40
            check(await caller.fill(chain), content, 40)
