"""Tenants' API keys: who is let in, what each may see of others, and how keys come and go."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import secrets
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from weft.common.admin import read_token
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import (
    ConfigError,
    InvalidApiKey,
    PermissionDenied,
    Unauthenticated,
)
from weft.gateway.admission.authenticate import ApiKeys
from weft.gateway.admission.keys import KeySet, Tenant, new_key, parse_hash, read_keys, write_keys
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import admin_pb2, admin_pb2_grpc, decode_pb2, gateway_pb2

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NOW = datetime.datetime.now(datetime.UTC)
FACE_CALLS: list[tuple[str, Any]] = [
    ("Chat", gateway_pb2.ChatRequest()),
    ("Complete", gateway_pb2.CompleteRequest()),
    ("Tokenize", gateway_pb2.TokenizeRequest()),
    ("Detokenize", gateway_pb2.DetokenizeRequest()),
    ("ListModels", gateway_pb2.ListModelsRequest()),
    ("GetModel", gateway_pb2.GetModelRequest()),
    ("Cancel", gateway_pb2.CancelRequest()),
    ("EndSession", gateway_pb2.EndSessionRequest(session_id="chat")),
]


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
    return from_rpc_error(caught.value)


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65, 66]])


def hello(salt: str = "") -> gateway_pb2.CompleteRequest:
    return gateway_pb2.CompleteRequest(text="hello", cache_salt=salt)


async def salt_of(mesh: Harness, key: str, salt: str = "") -> str:
    """The salt that a tenant's request has on the worker."""
    assert [m async for m in mesh.typed.Complete(hello(salt), metadata=bearer(key))]
    return str(mesh.workers[0].submits[-1].cache_salt)


async def test_calls_without_a_good_key_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key, entry = new_key("acme")
    stranger, _ = new_key("acme")
    expired, old = new_key("acme", lifetime=datetime.timedelta(days=-1))
    file = tmp_path / "keys.json"
    write_keys(file, [entry, old])
    forged = f"{key[:21]}{stranger[21:]}"  # a known id with another secret
    attempts: list[Any] = [
        (),
        bearer(stranger),
        bearer(expired),
        bearer(forged),
        bearer(key[:-1]),
        bearer(key + "x"),
        bearer(""),
        bearer("x" * 5000),
        (("authorization", key),),
        (("authorization", f"Basic {key}"),),
        (*bearer(key), *bearer(stranger)),
    ]
    async with gateway(tmp_path, script, api_keys_file=file) as mesh:
        for metadata in attempts:
            error = await refusal(mesh.typed.ListModels(FACE_CALLS[4][1], metadata=metadata))
            assert isinstance(error, InvalidApiKey), metadata
            assert (error.http_status, error.reason) == (401, "INVALID_API_KEY")
        for name, request in FACE_CALLS:
            assert isinstance(await refusal(getattr(mesh.typed, name)(request)), InvalidApiKey)
        for method in ("ChatCompletions", "Completions", "TokenizeText", "DetokenizeTokens"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await mesh.post(method, CHAT)
            assert isinstance(from_rpc_error(caught.value), InvalidApiKey)
        assert not mesh.workers[0].submits
        # What probes and operators need, the key for everything else.
        await mesh.openai.Ready(Empty())
        await mesh.openai.OpenApi(Empty())
        await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
        for metadata in ((), bearer(key)):
            order = gateway_pb2.DrainWorkerRequest(worker_id="decode-0")
            refused = await refusal(mesh.typed.DrainWorker(order, metadata=metadata))
            assert isinstance(refused, PermissionDenied)
        assert (await mesh.typed.ListModels(FACE_CALLS[4][1], metadata=bearer(key))).models
        assert await salt_of(mesh, key)
    assert "a call had no valid API key" in caplog.text
    for secret in (key, stranger, expired, forged):
        assert secret[-20:] not in caplog.text


async def test_tenants_share_no_cached_prefixes_unless_told_to(tmp_path: Path) -> None:
    one, first = new_key("one")
    again, second = new_key("one")
    other, third = new_key("other")
    member, fourth = new_key("member", "family")
    cousin, fifth = new_key("cousin", "family")
    lookalike, sixth = new_key("family")
    file = tmp_path / "keys.json"
    write_keys(file, [first, second, third, fourth, fifth, sixth])
    async with gateway(tmp_path, script, api_keys_file=file) as mesh:
        salts = {name: await salt_of(mesh, name) for name in (one, again, other, lookalike)}
        assert salts[one] == salts[again]
        assert len({salts[one], salts[other], salts[lookalike]}) == 3
        family = await salt_of(mesh, member)
        assert await salt_of(mesh, cousin) == family
        # Workers are told whom to charge.
        charged = [submit.tenant for submit in mesh.workers[0].submits]
        assert charged == ["one", "one", "other", "family", "member", "cousin"]
        assert family not in salts.values()
        # A client's own salt separates within its tenant, and reaches into nobody else's.
        own = await salt_of(mesh, one, "s")
        assert own not in (salts[one], await salt_of(mesh, other, "s"))
        assert await salt_of(mesh, other, salts[one]) != salts[one]
        assert all(len(salt.encode()) <= 128 for salt in (*salts.values(), family, own))


async def test_chats_of_one_name_are_each_tenants_own(tmp_path: Path) -> None:
    """Also where tenants share cached prefixes, and so a salt."""
    keys = [new_key(name, "family") for name in ("member", "member", "cousin")]
    file = tmp_path / "keys.json"
    write_keys(file, [entry for _, entry in keys])
    async with gateway(tmp_path, script, api_keys_file=file) as mesh:
        (worker,) = mesh.workers
        chats, ends = [], []
        for key, _ in keys:
            request = hello("")
            request.session_id = "chat"
            assert [m async for m in mesh.typed.Complete(request, metadata=bearer(key))]
            chats.append((worker.submits[-1].cache_salt, worker.submits[-1].session_id))
            end = gateway_pb2.EndSessionRequest(session_id="chat")
            assert (await mesh.typed.EndSession(end, metadata=bearer(key))).workers == 1
            await mesh.wait(lambda: len(worker.session_ends) > len(ends))
            ends.append((worker.session_ends[-1].cache_salt, worker.session_ends[-1].session_id))
    assert chats == ends
    assert chats[0] == chats[1] != chats[2]
    assert chats[0][0] == chats[2][0]
    assert all(len(session.encode()) <= 128 for _, session in chats)


async def test_a_tenant_cannot_cancel_for_another(tmp_path: Path) -> None:
    def endless(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[65] * 400])

    one, first = new_key("one")
    other, second = new_key("other")
    file = tmp_path / "keys.json"
    write_keys(file, [first, second])
    async with gateway(tmp_path, endless, api_keys_file=file, step_s=0.05) as mesh:
        request = gateway_pb2.CompleteRequest(text="hello", stream=True)
        call = mesh.typed.Complete(request, metadata=bearer(one))
        request_id = (await call.read()).request_id
        cancel = gateway_pb2.CancelRequest(request_id=request_id)
        assert not (await mesh.typed.Cancel(cancel, metadata=bearer(other))).found
        assert (await mesh.typed.Cancel(cancel, metadata=bearer(one))).found
        call.cancel()


async def test_keys_come_and_go_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    environment_key, entry = new_key("env")
    hashes = [f"{entry.tenant}:{entry.id}:{entry.sha256}"]
    models = gateway_pb2.ListModelsRequest()

    def weft_keys(*words: str) -> str:
        command = [sys.executable, "-m", "weft.cli", "keys", words[0], "--file", str(file)]
        done = subprocess.run([*command, *words[1:]], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    first = await asyncio.to_thread(weft_keys, "add", "acme")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first not in file.read_text()
    async with gateway(tmp_path, script, api_keys_file=file, api_key_hashes=hashes) as mesh:

        async def is_good(key: str) -> bool:
            try:
                await mesh.typed.ListModels(models, metadata=bearer(key))
            except grpc.aio.AioRpcError:
                return False
            return True

        async def becomes(key: str, good: bool) -> None:
            async with asyncio.timeout(60):
                while await is_good(key) != good:
                    await asyncio.sleep(0.1)

        assert await is_good(first)
        assert await is_good(environment_key)
        second = await asyncio.to_thread(weft_keys, "add", "acme", "--days", "3")
        await becomes(second, good=True)
        listed = await asyncio.to_thread(weft_keys, "list")
        assert listed.count("acme") == 2
        assert "manages" not in listed
        await asyncio.to_thread(weft_keys, "add", "other", "--adapters")
        lines = (await asyncio.to_thread(weft_keys, "list")).splitlines()
        assert ["other" in line for line in lines] == ["manages" in line for line in lines]
        assert second not in listed
        await asyncio.to_thread(weft_keys, "revoke", first.split("-")[2])
        await becomes(first, good=False)
        file.write_text("{")
        async with asyncio.timeout(60):
            while "known API keys are kept" not in caplog.text:
                assert await is_good(second)  # a broken file changes nothing
                await asyncio.sleep(0.1)
        assert await is_good(second)
        file.unlink()
        await asyncio.sleep(1.5)
        assert await is_good(second)
        assert await is_good(environment_key)


async def test_keys_and_operators_tokens_are_no_substitute_for_each_other(tmp_path: Path) -> None:
    key, entry = new_key("acme")
    file, token_file = tmp_path / "keys.json", tmp_path / "token"
    write_keys(file, [entry])
    token_file.write_text(secrets.token_urlsafe(32))
    async with gateway(
        tmp_path, script, api_keys_file=file, admin_port=0, admin_token_file=token_file
    ) as mesh:
        token = read_token(token_file)
        async with grpc.aio.insecure_channel(mesh.app.server.admin_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            dump = admin_pb2.DumpStateRequest()
            assert isinstance(
                await refusal(stub.DumpState(dump, metadata=bearer(key))), Unauthenticated
            )
            assert "acme" not in (await stub.DumpState(dump, metadata=bearer(token))).state
        models = gateway_pb2.ListModelsRequest()
        error = await refusal(mesh.typed.ListModels(models, metadata=bearer(token)))
        assert isinstance(error, InvalidApiKey)


def test_changes_at_once_all_count(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    command = [sys.executable, "-m", "weft.cli", "keys"]
    adding = [
        subprocess.Popen(
            [*command, "add", f"t{number}", "--file", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(6)
    ]
    assert [process.wait(120) for process in adding] == [0] * 6
    assert sorted(entry.tenant for entry in read_keys(path)) == [f"t{n}" for n in range(6)]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    _, entry = new_key("acme")
    good = entry.model_dump(mode="json", exclude_defaults=True)
    file = tmp_path / "keys.json"
    cases: list[tuple[str, str]] = [
        ("", "not JSON"),
        ("[]", "not JSON"),
        (json.dumps({"keys": [{**good, "sha256": "hunter2"}]}), "keys.0.sha256"),
        (json.dumps({"keys": [{**good, "tenant": "a b"}]}), "keys.0.tenant"),
        (json.dumps({"keys": [good], "kyes": []}), "kyes"),
        (json.dumps({"keys": [good, good]}), "two API keys"),
    ]
    for content, message in cases:
        file.write_text(content)
        with pytest.raises(ConfigError, match=message) as caught:
            ApiKeys(file, [])
        assert "hunter2" not in caught.value.message
    with pytest.raises(ConfigError, match="weft keys add"):
        ApiKeys(tmp_path / "none", [])
    for text in ("acme", "acme:0:0", f"a b:{entry.id}:{entry.sha256}"):
        with pytest.raises(ValueError, match="TENANT:ID:SHA256"):
            parse_hash(text)


def test_lookup() -> None:
    pairs: Mapping[str, Any] = dict(new_key(f"t{number}") for number in range(50))
    keys = KeySet(pairs.values())
    for key, entry in pairs.items():
        assert keys.find(key, NOW) == Tenant(entry.tenant, f"tenant {entry.tenant}")
        assert keys.find(key.upper(), NOW) is None
    assert len(pairs) == 50
    assert keys.find("", NOW) is None
    assert keys.find("sk-weft-\ud800", NOW) is None
