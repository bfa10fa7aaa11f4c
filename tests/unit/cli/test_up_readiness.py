"""Whether `weft up` finds out that its mesh answers."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from weft.cli import certs
from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.readiness import _get_readyz
from weft.cli.up.settings import KEYS_VARIABLE, UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings


class Edge(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()


@contextmanager
def edge(context: ssl.SSLContext | None) -> Iterator[str]:
    """An edge that is ready; its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Edge)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_edge_is_asked_whatever_its_certificate_names(tmp_path: Path) -> None:
    """It may be one for the name that clients use, or of another authority."""
    assert certs.main([str(tmp_path)]) == 0
    files = certs.files_of(tmp_path, "decode")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    with edge(context) as address:
        assert _get_readyz(f"https://{address}", None) is None
        assert _get_readyz(f"http://{address}", None)
    with edge(None) as address:
        assert _get_readyz(f"http://{address}", None) is None


@pytest.mark.parametrize("flags", [["--https-cert", "c"], ["--https-cert=c"], []])
def test_an_edge_with_a_certificate_of_its_own_is_asked_by_https(
    tmp_path: Path, flags: list[str]
) -> None:
    settings = load_settings(UpSettings, [f"--rest-args={' '.join(flags)}"], {})
    models = [ModelFolder("tiny", tmp_path)]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, Path("weft-rest"))
    assert plan.rest_scheme == ("https" if flags else "http")


def test_who_can_be_asked_for_its_health(tmp_path: Path) -> None:
    """A hung gateway is found as a hung worker is; the edge has no gRPC."""
    settings = load_settings(UpSettings, ["--gateways", "2", "--kvstore", "1"], {})
    models = [ModelFolder("tiny", tmp_path)]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, Path("weft-rest"))
    asked = {spec.name for spec in plan.services if spec.tells_health}
    assert asked == {"gateway-0", "gateway-1", "prefill-0", "decode-0", "kvstore-0"}


def test_keys_that_gateways_take_from_the_environment_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first request that is shown brings one."""
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "keys.json"))
    settings = load_settings(UpSettings, [], {})
    plan = plan_mesh(
        settings, StateFolder(tmp_path / "state"), [ModelFolder("tiny", tmp_path)], None
    )
    assert plan.needs_key
