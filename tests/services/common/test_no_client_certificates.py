"""A gateway with TLS that asks callers for no certificate: operators have their own port."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from weft.cli.certs import files_of
from weft.common.rpc.channel import open_blocking_channel
from weft.testing.meshes.local_mesh import WEFT
from weft.testing.models.tiny_tokenizers import write_model_dir
from weft.testing.services.certificates import identity, make_certificates
from weft.testing.services.processes import ServiceProcess
from weft.v1 import gateway_pb2, gateway_pb2_grpc, trace_pb2, trace_pb2_grpc

NOWHERE = "127.0.0.1:1"


class OpenGateway(NamedTuple):
    """The gateway, whose only worker is away, and what its operators have."""

    ready: dict[str, Any]
    tls: Path
    token_file: Path

    def weft(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*WEFT, *words, "--tls-dir", str(self.tls)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    @property
    def operators(self) -> list[str]:
        """Flags of the way over the operators' port."""
        address = self.ready["admin_address"]
        return ["--admin-address", address, "--token-file", str(self.token_file)]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenGateway]:
    folder = tmp_path_factory.mktemp("open")
    make_certificates(folder / "tls")
    token_file = folder / "token"
    token_file.write_text(secrets.token_urlsafe(32))
    files = files_of(folder / "tls", "gateway")
    command = [sys.executable, "-m", "weft.gateway", "--no-client-certificates", "--port", "0"]
    command += ["--model-dir", str(write_model_dir(folder / "tiny")), "--decode", NOWHERE]
    command += ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    command += ["--tls-ca", str(files.ca)]
    command += ["--admin-port", "0", "--admin-token-file", str(token_file)]
    with ServiceProcess("gateway", command, folder) as process:
        yield OpenGateway(process.wait_ready(), folder / "tls", token_file)


@pytest.mark.parametrize("command", [("status",), ("trace", "cmpl-1")], ids=lambda c: c[0])
def test_the_main_port_says_where_to_ask(gateway: OpenGateway, command: tuple[str, ...]) -> None:
    done = gateway.weft(*command, "--address", gateway.ready["address"])
    assert done.returncode == 1
    assert "--no-client-certificates" in done.stderr
    assert "--admin-address" in done.stderr


def test_the_operators_port_answers(gateway: OpenGateway) -> None:
    done = gateway.weft("status", "--json", *gateway.operators)
    assert done.returncode == 0, done.stderr
    (worker,) = json.loads(done.stdout)["workers"]
    assert (worker["address"], worker["role"], worker["healthy"]) == (NOWHERE, "decode", False)
    done = gateway.weft("trace", "cmpl-1", *gateway.operators)
    assert "no spans of cmpl-1" in done.stderr


def test_the_token_is_needed(gateway: OpenGateway, tmp_path: Path) -> None:
    flag, address, *_ = gateway.operators
    done = gateway.weft("status", flag, address)
    assert done.returncode == 1
    assert "--admin-address needs --token-file" in done.stderr
    other = tmp_path / "other"
    other.write_text(secrets.token_urlsafe(32))
    done = gateway.weft("status", flag, address, "--token-file", str(other))
    assert done.returncode == 1
    assert "the admin port needs" in done.stderr


@pytest.mark.parametrize(
    ("caller", "method", "code"),
    [
        ("cli", "GetFleet", "OK"),
        ("cli", "ListSpans", "OK"),
        # A gateway may ask others for spans, but not as an operator.
        ("gateway", "ListSpans", "PERMISSION_DENIED"),
        ("client", "GetFleet", "PERMISSION_DENIED"),
        # What tenants need a key for is not there.
        ("cli", "ListModels", "UNIMPLEMENTED"),
    ],
)
def test_it_answers_operators_alone(
    gateway: OpenGateway, caller: str, method: str, code: str
) -> None:
    address = gateway.ready["admin_address"]
    metadata = (("authorization", f"Bearer {gateway.token_file.read_text()}"),)
    with open_blocking_channel(address, "gateway", identity(gateway.tls, caller)) as channel:
        fleet = gateway_pb2_grpc.GatewayServiceStub(channel)
        spans = trace_pb2_grpc.TraceServiceStub(channel)
        calls: dict[str, tuple[Any, Any]] = {
            "GetFleet": (fleet.GetFleet, gateway_pb2.GetFleetRequest()),
            "ListModels": (fleet.ListModels, gateway_pb2.ListModelsRequest()),
            "ListSpans": (spans.ListSpans, trace_pb2.ListSpansRequest(id="x")),
        }
        call, request = calls[method]
        got = grpc.StatusCode.OK
        try:
            call(request, timeout=60, metadata=metadata)
        except grpc.RpcError as error:
            got = error.code()
        assert got.name == code
