"""The mesh as a gateway streams it: what watchers see, and who may watch or change something."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from weft.common.adapters.manifest import Entry, Manifest
from weft.common.rpc.errors import from_rpc_error
from weft.common.settings import load_settings
from weft.contract.codec.walk import duration
from weft.gateway.admission.keys import new_key, write_keys
from weft.gateway.console.flows import MeshFlows
from weft.gateway.console.history import quantile
from weft.gateway.console.members import describe_store
from weft.gateway.console.service import hide_ids
from weft.gateway.console.stores import StoreState, StoreWatch
from weft.gateway.console.view import MAX_ADAPTERS, MAX_WATCHERS
from weft.gateway.settings import GatewaySettings
from weft.testing.services.dialect_edge import dialect_edge
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, gateway
from weft.v1 import (
    decode_pb2,
    gateway_pb2,
    kvstore_pb2,
    kvstore_pb2_grpc,
    mesh_pb2,
    mesh_pb2_grpc,
    trace_pb2,
)

TOKEN = "an operators' token of some length"
FAST = mesh_pb2.WatchMeshRequest(interval=duration(0.5))


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65, 66, 67, 68]], fill_by=0 if submit.prefill_candidates else None)


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),) if secret else ()


async def first(stub: Any, secret: str = "", request: Any = FAST) -> mesh_pb2.WatchMeshResponse:
    """The first message of a stream."""
    call = stub.WatchMesh(request, metadata=bearer(secret))
    message: mesh_pb2.WatchMeshResponse = await call.read()
    call.cancel()
    return message


async def reason(call: Any) -> str:
    """Why a call is refused; empty: it is not."""
    try:
        await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    call.cancel()
    return ""


async def test_watchers_see_members_flows_points_and_requests(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    token = tmp_path / "token"
    async with gateway(
        tmp_path, script, num_decode=2, num_prefill=1, admin_token_file=token
    ) as mesh:
        stub = mesh_pb2_grpc.MeshServiceStub(mesh.channel)
        call = stub.WatchMesh(FAST, metadata=bearer(TOKEN))
        before = await call.read()
        assert {member.member_id for member in before.members} > {"decode-0", "decode-1"}
        assert not before.ended_requests
        prompt = list(range(3, 103))
        request = gateway_pb2.CompleteRequest(token_ids={"ids": prompt})
        answers = [[m async for m in mesh.typed.Complete(request)] for _ in range(3)]
        ids = [answer[-1].request_id for answer in answers]
        seen: list[mesh_pb2.MeshRequest] = []
        points: list[mesh_pb2.MeshPoint] = []
        total = 0.0
        async with asyncio.timeout(60):
            # A point may end between the requests.
            while len(seen) < 3 or total < 11.5:
                news = await call.read()
                seen += news.ended_requests
                points += news.points
                spans_s = [one.span.ToNanoseconds() / 1e9 for one in points]
                rates = [one.output_tokens_per_second for one in points]
                total = float(np.dot(rates, spans_s))
        # What was sent once is not sent again, and a new watcher gets it all.
        assert [one.request_id for one in seen] == ids
        anew = await first(stub, TOKEN)
        assert [one.request_id for one in anew.ended_requests] == ids
        assert len(anew.points) >= len(points)
        assert all(one.trace_id for one in anew.ended_requests)
        # Without the token handles stand in for ids, the same ones for everybody.
        viewed = [one.ended_requests for one in (await first(stub), await first(stub))]
        assert viewed[0] == viewed[1]
        handles = [one.request_id for one in viewed[0]]
        assert len(set(handles)) == len(ids)
        assert all(re.fullmatch("[0-9a-f]{16}", one) for one in handles)
        assert not any(one.trace_id for one in viewed[0])

        for one in seen:
            assert (one.model, one.outcome, one.prompt_tokens) == (MODEL, "ok", len(prompt))
            assert one.output_tokens == 4
            assert one.worker_id in ("decode-0", "decode-1")
            assert 0 < one.first_token.ToNanoseconds() <= one.duration.ToNanoseconds()
        assert total == pytest.approx(12)
        assert any(one.first_token.p50_s > 0 for one in points)
        flows = {(one.source_id, one.target_id): one for one in news.flows}
        requests = [one for one in news.flows if one.kind == mesh_pb2.FLOW_KIND_REQUESTS]
        assert {one.source_id for one in requests} == {news.gateway_id}
        assert {one.target_id for one in requests} == {one.worker_id for one in seen}
        assert any(source == "prefill-0" for source, _ in flows)
        roles = {one.member_id: one.role for one in news.members}
        assert roles["prefill-0"] == mesh_pb2.MEMBER_ROLE_PREFILL
        assert roles[news.gateway_id] == mesh_pb2.MEMBER_ROLE_GATEWAY
        assert [(one.name, one.ready) for one in news.models] == [(MODEL, True)]

        for secret, given in ((TOKEN, ids[0]), (TOKEN, handles[0]), ("", handles[0])):
            spans = await stub.ListRequestSpans(
                mesh_pb2.ListRequestSpansRequest(id=given), metadata=bearer(secret)
            )
            assert spans.gateway_id == news.gateway_id
            assert {span.service for span in spans.spans} == {"gateway"}
            assert {one.address for one in spans.silent} == {one.address for one in mesh.workers}
            assert {span.request_id for span in spans.spans} == ({ids[0]} if secret else {""})
        assert not any(span.trace_id for span in spans.spans)
        assert not any(one in str(spans) for one in ids)

        await mesh.workers[0].stop()
        async with asyncio.timeout(60):
            while True:
                member = next(
                    one for one in (await call.read()).members if one.role == roles["decode-0"]
                )
                if not member.healthy:
                    break
        assert member.problem


async def test_running_requests_are_shown_and_names_of_clients_are_cut(tmp_path: Path) -> None:
    def endless(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[65] * 4000])

    (tmp_path / "token").write_text(TOKEN)
    async with gateway(
        tmp_path,
        endless,
        max_context_tokens=8192,
        max_connection_age_s=1,
        admin_token_file=tmp_path / "token",
    ) as mesh:
        stub = mesh_pb2_grpc.MeshServiceStub(mesh.channel)
        running = mesh.typed.Complete(
            gateway_pb2.CompleteRequest(text="x", stream=True, stop={"max_tokens": 4000})
        )
        message = await running.read()
        await reason(mesh.typed.Complete(gateway_pb2.CompleteRequest(model="m" * 9000, text="x")))
        seen = await first(stub, TOKEN)
        (one,) = seen.running_requests
        assert (one.request_id, one.outcome) == (message.request_id, "running")
        assert one.output_tokens > 0
        (refused,) = seen.ended_requests
        assert (refused.outcome, refused.model) == ("model_not_found", "m" * 128)
        (hidden,) = (await first(stub)).running_requests
        assert (len(hidden.request_id), hidden.trace_id) == (16, "")
        running.cancel()
        # A stream of the age of a connection ends, without an error.
        async with asyncio.timeout(60):
            assert [news async for news in stub.WatchMesh(FAST)]
        mesh.app._ending.set()
        assert await reason(stub.WatchMesh(FAST)) == "DRAINING"


@pytest.mark.parametrize("console", ["off", "view", "operate"])
@pytest.mark.parametrize("has_keys", [False, True])
async def test_who_may_watch_and_who_may_change_something(
    tmp_path: Path, console: str, has_keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text(TOKEN)
    user, manager = new_key("acme"), new_key("ops", manages_adapters=True)
    keys = {}
    if has_keys:
        write_keys(tmp_path / "keys.json", [user[1], manager[1]])
        keys = {"api_keys_file": tmp_path / "keys.json"}
    callers = {"": "", "wrong": "x" * 40, "user": user[0], "manager": manager[0], "token": TOKEN}
    async with gateway(
        tmp_path,
        script,
        console=console,
        admin_port=0,
        admin_token_file=tmp_path / "token",
        wait=False,
        **keys,
    ) as mesh:
        stub = mesh_pb2_grpc.MeshServiceStub(mesh.channel)
        # On the operators' port the token opens everything, whatever the setting.
        async with grpc.aio.insecure_channel(mesh.app.server.admin_address) as channel:
            operators = mesh_pb2_grpc.MeshServiceStub(channel)
            assert await reason(operators.WatchMesh(FAST)) == "UNAUTHENTICATED"
            message = await first(operators, TOKEN)
            assert message.can_operate
            # Latencies are shown there even where the main port shows nothing.
            mesh.app.metrics.time_to_first_token.observe(1.0)
            assert any(mesh.app.metrics.time_to_first_token.counts)
            gateway_id = message.gateway_id
            flush = mesh_pb2.FlushMemberRequest(member_id=gateway_id)
            assert not await reason(operators.FlushMember(flush, metadata=bearer(TOKEN)))
        may_watch = set(callers) if not has_keys else {"manager", "token"}
        if console == "off":
            may_watch = set()
        spans = mesh_pb2.ListRequestSpansRequest(id="none")
        for name, secret in callers.items():
            metadata = bearer(secret)
            watched = await reason(stub.WatchMesh(FAST, metadata=metadata))
            assert (not watched) == (name in may_watch), (name, watched)
            listed = await reason(stub.ListRequestSpans(spans, metadata=metadata))
            assert listed == watched
            flushed = await reason(stub.FlushMember(flush, metadata=metadata))
            may_change = console == "operate" and name == "token"
            assert (not flushed) == may_change, (name, flushed)
            changes: list[tuple[str, Any]] = [
                ("DrainMember", mesh_pb2.DrainMemberRequest(member_id="nobody")),
                ("UndrainMember", mesh_pb2.UndrainMemberRequest(member_id="nobody")),
                ("SetMemberLogLevel", mesh_pb2.SetMemberLogLevelRequest(level="info")),
                ("LoadMeshAdapter", mesh_pb2.LoadMeshAdapterRequest(name="a", path="a")),
                ("UnloadMeshAdapter", mesh_pb2.UnloadMeshAdapterRequest(name="a")),
            ]
            known = {"WORKER_NOT_FOUND", "MEMBER_NOT_FOUND", "ADAPTERS_OFF"}
            for method, request in changes:
                why = await reason(getattr(stub, method)(request, metadata=metadata))
                assert (why in known) == may_change, (name, method, why)
                if not may_change:
                    assert why == flushed
            if name in may_watch:
                assert (await first(stub, secret)).can_operate == may_change
        if has_keys and console == "view":
            # A key that is taken away ends the stream that it opened.
            watching = stub.WatchMesh(FAST, metadata=bearer(manager[0]), timeout=60)
            await anext(aiter(watching))
            write_keys(tmp_path / "keys.json", [user[1]])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [news async for news in watching]
            assert from_rpc_error(caught.value).reason == "INVALID_API_KEY"
    for secret in (user[0], manager[0], TOKEN):
        assert secret not in caplog.text


async def test_bad_questions_and_too_many_watchers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    async with gateway(tmp_path, script, wait=False, admin_token_file=tmp_path / "token") as mesh:
        stub = mesh_pb2_grpc.MeshServiceStub(mesh.channel)
        for interval_s in (0, 0.4, 61, -1):
            request = mesh_pb2.WatchMeshRequest(interval=duration(interval_s))
            assert await reason(stub.WatchMesh(request)) == "INVALID_REQUEST"
        calls = [stub.WatchMesh(FAST) for _ in range(MAX_WATCHERS)]
        await asyncio.gather(*(call.read() for call in calls))
        assert await reason(stub.WatchMesh(FAST)) == "OVERLOADED"
        # They lock no operator out.
        assert (await first(stub, TOKEN)).gateway_id
        # Stores are asked again, should the asking have failed.
        view = mesh.app._view
        assert view._asking is not None
        view._asking.cancel()
        await asyncio.gather(view._asking, return_exceptions=True)
        assert (await first(stub, TOKEN)).gateway_id
        assert not view._asking.done()
        for call in calls:
            call.cancel()
        async with asyncio.timeout(60):
            while await reason(stub.WatchMesh(FAST)):
                await asyncio.sleep(0.05)


async def test_events_over_rest_and_the_console_page(rest_binary: Path, tmp_path: Path) -> None:
    """The edge makes an event of each message, and ends at once though somebody watches."""
    (tmp_path / "token").write_text(TOKEN)
    async with dialect_edge(
        rest_binary, tmp_path, console="operate", admin_token_file=tmp_path / "token"
    ) as edge:
        http, url = edge.http, edge.url
        async with http.stream("GET", f"{url}/mesh/watch?interval=0.5s") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = answer.aiter_lines()
            data = [line async for line in _take(events, 3) if line]
            assert all(line.startswith("data: ") for line in data)
            message = json.loads(data[0][6:])
            assert {one["role"] for one in message["members"]} > {"MEMBER_ROLE_GATEWAY"}
            bad = await http.get(f"{url}/mesh/watch?interval=0.1s")
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "interval")
            headers = {"authorization": f"Bearer {TOKEN}"}
            level = {"member_id": message["gateway_id"], "level": "debug"}
            refused = await http.post(f"{url}/mesh/log_level", json=level)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "unauthenticated",
            )
            before = logging.getLogger().level
            changed = await http.post(f"{url}/mesh/log_level", json=level, headers=headers)
            assert changed.status_code == 200
            logging.getLogger().setLevel(before)
            other = {
                **headers,
                "origin": "https://elsewhere.example",
                "sec-fetch-site": "cross-site",
            }
            foreign = await http.post(f"{url}/mesh/log_level", json=level, headers=other)
            assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "cross_origin")

            page = await http.get(f"{url}/console")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "unsafe" not in page.headers["content-security-policy"]
            assert page.headers["x-content-type-options"] == "nosniff"
            assert (await http.get(f"{url}/console/../go.mod")).status_code == 404
            again = await http.get(f"{url}/console/app.js", headers={"if-none-match": '"none"'})
            assert again.status_code == 200
            tag = {"if-none-match": again.headers["etag"]}
            assert (await http.get(f"{url}/console/app.js", headers=tag)).status_code == 304
            edge.process.send(signal.SIGTERM)
            rest = [line async for line in events]
            assert "draining" in json.loads(rest[-2][6:])["error"]["code"]


async def test_adapters_are_looked_up_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.gateway.console.view._ADAPTERS_FRESH_S", 600.0)

    def manifest(generation: int, count: int) -> Manifest:
        entries = (
            Entry(
                name=f"adapter-{at}",
                digest="ab" * 32,
                model=MODEL,
                path="a",
                state="serving",
                generation=at,
                created=0.0,
            )
            for at in range(count)
        )
        return Manifest(generation=generation, entries=tuple(entries))

    async with gateway(tmp_path, script, wait=False) as mesh:
        stub = mesh_pb2_grpc.MeshServiceStub(mesh.channel)
        mesh.app.adapters.manifest = manifest(1, 150)
        watching = stub.WatchMesh(FAST)
        assert len((await watching.read()).adapters) == MAX_ADAPTERS
        # A registry that has not changed is not read again for a while, one that has is.
        mesh.app.adapters.manifest = manifest(1, 2)
        assert len((await watching.read()).adapters) == MAX_ADAPTERS
        mesh.app.adapters.manifest = manifest(2, 2)
        async with asyncio.timeout(60):
            while len((await watching.read()).adapters) != 2:
                pass
        watching.cancel()


def test_flows_of_a_store_have_one_name_and_its_state_is_not_kept() -> None:
    """A store is counted before its id is known, and after it."""
    worker = SimpleNamespace(
        endpoint=SimpleNamespace(role="prefill"),
        info=SimpleNamespace(worker_id="prefill-0", epoch=1, kvstores=["host:1"]),
        report=SimpleNamespace(counters={"store_stored_pages": 0, "store_hit_pages": 0}),
    )
    fleet: Any = SimpleNamespace(workers=lambda role="prefill": [worker] * (role == "prefill"))
    flows, stores = MeshFlows("gateway-0", fleet), StoreWatch(fleet, None)
    for _ in range(3):
        flows.tick()
        worker.report.counters["store_stored_pages"] += 10
        worker.report.counters["store_hit_pages"] += 5
    (puts, hits) = flows.describe({})
    assert (puts.source_id, puts.target_id) == ("prefill-0", "host:1")
    for address in ("host:1", "host:2"):
        info = kvstore_pb2.GetStoreInfoResponse(store_id=f"store of {address}", epoch=7)
        stores.states[address] = StoreState(info, kvstore_pb2.StatsResponse(total_pages=9))
    (puts, hits) = flows.describe(stores.ids())
    assert (puts.target_id, hits.source_id) == ("store of host:1", "store of host:1")
    assert puts.pages_per_second == pytest.approx(2 * hits.pages_per_second)

    stores.forget()
    assert set(stores.states) == {"host:1"}
    member = describe_store("host:1", stores.state("host:1"))
    assert (member.member_id, member.problem) == ("store of host:1", "not asked yet")
    assert not member.healthy
    assert not member.pages.total


async def test_facts_of_a_store_are_kept_without_its_state() -> None:
    class Half(kvstore_pb2_grpc.KvStoreServiceServicer):
        async def GetStoreInfo(self, request: Any, context: Any) -> Any:
            return kvstore_pb2.GetStoreInfoResponse(store_id="store-0", epoch=7)

    server = grpc.aio.server()
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(Half(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker = SimpleNamespace(info=SimpleNamespace(kvstores=[address]))
    fleet: Any = SimpleNamespace(workers=lambda: [worker])
    stores = StoreWatch(fleet, None)
    stores.states["host:gone"] = StoreState(None, None)
    try:
        await stores.ask_once()
    finally:
        await server.stop(None)
    assert stores.ids() == {address: "store-0"}
    assert stores.states.keys() == {address}
    assert stores.state(address).problem == "does not answer: UNIMPLEMENTED"


def test_spans_that_anybody_sees_quote_no_ids() -> None:
    span = trace_pb2.Span(
        trace_id=b"t" * 16,
        span_id=b"s" * 8,
        name="attempt 1",
        request_id="resp_1",
        error="RESPONSE_NOT_FOUND: there is no response resp_0",
    )
    span.attributes.update({"weft.client_request_id": "resp_1", "weft.attempt": 1})
    hide_ids(span)
    left = trace_pb2.Span(span_id=b"s" * 8, name="attempt 1", error="RESPONSE_NOT_FOUND")
    left.attributes.update({"weft.attempt": 1})
    assert span == left


def test_operating_needs_the_operators_token(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-dir", "m", "--decode", "127.0.0.1:1"]
    with pytest.raises(SystemExit):
        load_settings(GatewaySettings, [*flags, "--console", "operate"], {})
    assert "console = operate needs --admin-token-file" in capsys.readouterr().err


async def _take(lines: Any, count: int) -> Any:
    async for line in lines:
        yield line
        count -= 1
        if not count:
            return


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_quantile_lies_in_the_bucket_of_numpys(share: float) -> None:
    generator = random.Random()
    bounds = sorted(generator.uniform(0.01, 10) for _ in range(12))
    values = np.array([generator.lognormvariate(0, 1) for _ in range(500)])
    counts = np.histogram(values, [0, *bounds, np.inf])[0].tolist()
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    found = quantile(bounds, counts, share)
    at = int(np.searchsorted(bounds, exact))
    if at == len(bounds):
        assert found == bounds[-1]
    else:
        assert ([0.0, *bounds])[at] <= found <= bounds[at]
