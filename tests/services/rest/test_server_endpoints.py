"""What tools, probes and load balancers made for other servers ask for, through the Go edge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from weft.gateway.admission.keys import new_key, write_keys
from weft.gateway.api.server import service
from weft.testing.services.dialect_edge import DialectEdge, dialect_edge
from weft.testing.services.gateway_harness import MODEL

pytestmark = pytest.mark.needs("go")

PAGE = "https://chat.example.org"


@pytest.fixture
async def edge(rest_binary: Path, tmp_path: Path) -> AsyncIterator[DialectEdge]:
    async with dialect_edge(rest_binary, tmp_path, edge_flags=("--allowed-origins", PAGE)) as made:
        yield made


async def get(edge: DialectEdge, path: str) -> httpx.Response:
    return await edge.http.get(f"{edge.url}{path}")


async def test_versions_and_probes(edge: DialectEdge) -> None:
    version = (await get(edge, "/version")).json()
    assert version["version"] == (await get(edge, "/api/version")).json()["weft"]
    assert version["version"]
    for method in ("GET", "POST"):
        assert (await edge.http.request(method, f"{edge.url}/ping")).status_code == 200
    await edge.mesh.workers[0].stop()
    await edge.mesh.wait(lambda: edge.mesh.app.catalogue.first.problem())
    assert (await get(edge, "/ping")).status_code == 503


async def test_the_tokenizer_is_described(edge: DialectEdge) -> None:
    info = (await get(edge, "/tokenizer_info")).json()
    assert info["model"] == MODEL
    assert info["vocab_size"] == edge.mesh.tokenizer.get_vocab_size()
    assert info["eos_token_ids"] == [edge.mesh.end]
    assert info["added_tokens_decoder"][str(edge.mesh.end)]["content"] == "<|im_end|>"
    assert (await get(edge, "/tokenizer_info?model=other")).status_code == 404


async def test_a_probe_generates_one_token_for_all_who_ask(
    edge: DialectEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_PROBE_AGE_S", 60.0)
    answers = await asyncio.gather(*[get(edge, "/health_generate") for _ in range(20)])
    assert {answer.status_code for answer in answers} == {200}
    (submit,) = edge.mesh.workers[0].submits
    assert submit.stop.max_tokens == 1


async def test_a_probe_of_a_mesh_that_cannot_generate_fails(
    rest_binary: Path, tmp_path: Path
) -> None:
    async with dialect_edge(rest_binary, tmp_path, request_timeout_s=2.0) as edge:
        edge.hang_after = 0
        answer = await get(edge, "/health_generate")
        assert answer.status_code == 504
        edge.hang_after = 10**9
        async with asyncio.timeout(60):  # A busy machine may miss the limit as well.
            while (await get(edge, "/health_generate")).status_code != 200:
                pass


async def test_metrics_are_off_unless_allowed(rest_binary: Path, tmp_path: Path) -> None:
    keys = {
        name: new_key("t", manages_adapters=name == "operator") for name in ("user", "operator")
    }
    write_keys(tmp_path / "keys.json", [entry for _, entry in keys.values()])
    async with dialect_edge(rest_binary, tmp_path / "off") as edge:
        off = await get(edge, "/metrics")
        assert (off.status_code, off.json()["error"]["code"]) == (404, "metrics_not_served")
    async with dialect_edge(
        rest_binary,
        tmp_path / "on",
        rest_metrics=True,
        metrics_port=0,
        api_keys_file=tmp_path / "keys.json",
    ) as edge:
        for name, status in (("user", 403), ("operator", 200)):
            headers = {"Authorization": f"Bearer {keys[name][0]}"}
            answer = await edge.http.get(f"{edge.url}/metrics", headers=headers)
            assert answer.status_code == status
        assert answer.headers["content-type"].startswith("text/plain")
        assert "weft_requests_running" in answer.text
        assert (await get(edge, "/metrics")).status_code == 401
        # Probes bring no key.
        for path in ("/ping", "/version", "/health_generate", "/api/version"):
            assert (await get(edge, path)).status_code == 200


async def test_head_is_answered_wherever_get_is(edge: DialectEdge) -> None:
    paths = ("/healthz", "/readyz", "/v1/models", "/api/tags", "/version", "/openapi.json", "/ping")
    for path in paths:
        head, whole = await edge.http.head(f"{edge.url}{path}"), await get(edge, path)
        assert head.status_code == whole.status_code == 200, path
        assert head.content == b""
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path != "/ping":
            assert head.headers["content-length"] == str(len(whole.content))
    missing = await edge.http.head(f"{edge.url}/v1/models/other")
    assert missing.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/v1/messages", "x-api-key, anthropic-version, anthropic-beta, content-type"),
        ("POST", "/v1/responses", "authorization, content-type"),
        ("DELETE", "/v1/responses/resp_1", "authorization"),
        ("POST", "/api/chat", "content-type"),
        ("GET", "/metrics", "authorization"),
    ],
)
async def test_pages_of_allowed_origins_may_ask(
    edge: DialectEdge, method: str, path: str, headers: str
) -> None:
    for origin, is_allowed in ((PAGE, True), ("https://evil.example.org", False)):
        answer = await edge.http.options(
            f"{edge.url}{path}",
            headers={
                "Origin": origin,
                "Access-Control-Request-Method": method,
                "Access-Control-Request-Headers": headers,
            },
        )
        told = answer.headers
        assert (told.get("access-control-allow-origin") == origin) == is_allowed
        assert (told.get("access-control-allow-methods") == method) == is_allowed
