"""Responses in a real Valkey server, which gateways share; a lost server is an error."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from weft.contract.errors import PeerUnavailable
from weft.gateway.admission.keys import new_key, write_keys
from weft.gateway.api.responses.shared_store import MAX_VALUE_BYTES, SharedResponses
from weft.gateway.api.responses.store import StoredResponse
from weft.testing.services.dialect_edge import dialect_edge
from weft.testing.services.gateway_harness import MODEL
from weft.testing.services.valkey_server import ValkeyServer, valkey_server

pytestmark = [pytest.mark.needs("valkey")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path) as made:
        yield made


def store_of(server: ValkeyServer, ttl_s: float = 60) -> SharedResponses:
    return SharedResponses([server.url], None, prefix="r", ttl_s=ttl_s, timeout_s=5)


@pytest.fixture
async def store(server: ValkeyServer) -> AsyncIterator[SharedResponses]:
    made = store_of(server)
    yield made
    await made.close()


def some() -> StoredResponse:
    return StoredResponse(secrets.token_bytes(100), secrets.token_bytes(1000))


async def test_every_store_finds_what_one_keeps(
    server: ValkeyServer, store: SharedResponses
) -> None:
    other, kept = store_of(server), some()
    await store.put("one", "a", kept)
    assert await other.get("one", "a") == kept
    assert await other.get("one", "b") is None
    assert await other.get("two", "a") is None
    assert await other.get("on", "ea") is None
    newer = some()
    await other.put("one", "a", newer)
    assert await store.get("one", "a") == newer
    assert await store.delete("one", "a")
    assert not await other.delete("one", "a")
    assert await other.get("one", "a") is None
    await other.close()


async def test_responses_expire_after_their_last_use(
    server: ValkeyServer, store: SharedResponses
) -> None:
    await store.put("", "a", some())
    with server.client() as client:
        (name,) = client.keys()
        assert 0 < client.pttl(name) <= 60_000
        client.pexpire(name, 10_000)
        assert await store.get("", "a") is not None
        assert client.pttl(name) > 50_000
        client.pexpire(name, 1)
    await asyncio.sleep(0.05)
    assert await store.get("", "a") is None


async def test_what_was_not_written_for_the_name_is_not_given(
    server: ValkeyServer, store: SharedResponses
) -> None:
    await store.put("one", "a", some())
    with server.client() as client:
        (mine,) = client.keys()
        whole = client.get(mine)
        await store.put("two", "a", some())
        (other,) = set(client.keys()) - {mine}
        client.set(other, whole)
        assert await store.get("two", "a") is None
        for value in (b"", b"x", whole[:-1], whole[:20], whole[:39], whole + b"x", bytes(300)):
            client.set(mine, value)
            assert await store.get("one", "a") is None
        client.delete(mine)
        client.lpush(mine, "x")
        with pytest.raises(PeerUnavailable):
            await store.get("one", "a")


async def test_a_response_that_is_too_large_is_not_kept(store: SharedResponses) -> None:
    await store.put("", "a", StoredResponse(b"", bytes(MAX_VALUE_BYTES)))
    assert await store.get("", "a") is None


async def test_a_lost_server_is_no_missing_response(
    server: ValkeyServer, store: SharedResponses
) -> None:
    await store.put("", "a", some())
    server.kill()
    await store.put("", "b", some())
    for call in (store.get, store.delete):
        with pytest.raises(PeerUnavailable):
            await call("", "a")


@pytest.mark.needs("go")
async def test_a_conversation_goes_on_at_another_gateway(
    rest_binary: Path, server: ValkeyServer, tmp_path: Path
) -> None:
    """Two gateways, streamed or not: continued, referred to, read, deleted; tenants stay apart."""
    made = [new_key(tenant) for tenant in ("one", "two")]
    write_keys(tmp_path / "keys.json", [entry for _, entry in made])
    settings = {
        "api_keys_file": tmp_path / "keys.json",
        "response_store_url": [server.url],
    }
    async with (
        dialect_edge(rest_binary, tmp_path / "first", **settings) as first,
        dialect_edge(rest_binary, tmp_path / "second", **settings) as second,
    ):
        here, there, stranger = (
            openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key=key, max_retries=0, timeout=60)
            for edge, key in ((first, made[0][0]), (second, made[0][0]), (second, made[1][0]))
        )
        first.text = "Blue."
        stream = await here.responses.create(model=MODEL, input="Which colour?", stream=True)
        ids = [event.response.id async for event in stream if event.type == "response.completed"]
        for id_ in (*ids, (await here.responses.create(model=MODEL, input="Which colour?")).id):
            await there.responses.create(model=MODEL, input="Why?", previous_response_id=id_)
            assert "user: Which colour?\nassistant: Blue.\nuser: Why?" in second.prompt
            response = await there.responses.retrieve(id_)
            assert response.output_text == "Blue."
            item = {"type": "item_reference", "id": response.output[0].id}
            await there.responses.create(model=MODEL, input=[item])  # type: ignore[list-item]
            assert "assistant: Blue." in second.prompt
            with pytest.raises(openai.NotFoundError, match="expired"):
                await stranger.responses.retrieve(id_)
            await there.responses.delete(id_)
            with pytest.raises(openai.NotFoundError) as caught:
                await here.responses.create(model=MODEL, input="x", previous_response_id=id_)
            assert caught.value.code == "response_not_found"
            assert caught.value.param == "previous_response_id"
        kept = await here.responses.create(model=MODEL, input="x")
        server.kill()
        with pytest.raises(openai.APIStatusError) as failed:
            await there.responses.create(model=MODEL, input="x", previous_response_id=kept.id)
        assert failed.value.status_code == 503
        assert (await here.responses.create(model=MODEL, input="x")).output_text == "Blue."
        for client in (here, there, stranger):
            await client.close()
