"""The store of responses: bounded, least recently used, tenants apart."""

from __future__ import annotations

import random

from weft.gateway.api.responses.store import (
    ENTRY_OVERHEAD_BYTES,
    MemoryResponses,
    StoredResponse,
)


def entry(num_bytes: int) -> StoredResponse:
    return StoredResponse(bytes(num_bytes // 2), bytes(num_bytes - num_bytes // 2))


async def test_any_order_of_calls_keeps_its_bounds_and_its_counts() -> None:
    rng = random.Random()
    max_bytes, most = 40 * ENTRY_OVERHEAD_BYTES, 12
    store = MemoryResponses(max_bytes, most)
    known: dict[tuple[str, str], StoredResponse] = {}
    for _ in range(5000):
        tenant, id_ = rng.choice("abc"), str(rng.randrange(20))
        kind = rng.randrange(3)
        if kind == 0:
            known[tenant, id_] = entry(rng.choice((0, 100, 3000, 10**6)))
            await store.put(tenant, id_, known[tenant, id_])
            is_kept = known[tenant, id_].num_bytes <= max_bytes
            assert (await store.get(tenant, id_) is not None) or not is_kept or store.num_responses
        elif kind == 1:
            found = await store.get(tenant, id_)
            assert found is None or found is known[tenant, id_]
            assert found is await store.get(tenant, id_)
        else:
            had = await store.get(tenant, id_) is not None
            assert await store.delete(tenant, id_) == had
            assert await store.get(tenant, id_) is None
        kept = [one for (owner, name) in known if (one := await store.get(owner, name)) is not None]
        assert store.num_responses == len(kept) <= most
        assert store.num_bytes == sum(one.num_bytes for one in kept) <= max_bytes


async def test_a_tenant_that_stores_much_loses_its_own() -> None:
    store = MemoryResponses(20 * ENTRY_OVERHEAD_BYTES, 1000)
    await store.put("small", "mine", entry(0))
    for number in range(100):
        await store.put("large", str(number), entry(0))
    assert await store.get("small", "mine") is not None
    assert await store.get("large", "99") is not None
    assert await store.get("large", "0") is None


async def test_what_was_read_lately_stays() -> None:
    store = MemoryResponses(10**6, 3)
    for id_ in "abc":
        await store.put("", id_, entry(0))
    await store.get("", "a")
    await store.put("", "d", entry(0))
    assert [id_ for id_ in "abcd" if await store.get("", id_)] == ["a", "c", "d"]


async def test_nothing_is_kept_without_room() -> None:
    store = MemoryResponses(0, 3)
    await store.put("", "a", entry(0))
    assert store.num_responses == store.num_bytes == 0
