"""The endpoint picker beside lwepp, the one that the inference extension's own conformance tests
run: both may pick the same endpoints of a pool.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format, struct_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from weft.cli.up.ports import free_ports
from weft.extproc import external_processor_pb2 as extproc
from weft.extproc import external_processor_pb2_grpc
from weft.testing.k8s.envoy import DESTINATION
from weft.testing.k8s.kube_api import BIN, KubeApi
from weft.testing.k8s.manifests import Object, named, render
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, gateway
from weft.testing.services.processes import ServiceProcess
from weft.v1 import decode_pb2

pytestmark = [pytest.mark.needs("go", "kube-apiserver", "lwepp"), pytest.mark.timeout(300)]

HOSTS = ("127.0.0.2", "127.0.0.3")
ASKS = 24
"""Of each subset: a picker that may pick two endpoints has then picked both."""
TIMEOUT_S = 60.0
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 4])


def apply_pool(api: KubeApi, port: int) -> list[Object]:
    """A pool of ready pods that have the edges' addresses."""
    spec = named(render("gpu"), "Deployment", "weft-rest")["spec"]["template"]["spec"]
    meta = {"namespace": "weft", "labels": {"app": "compared"}}
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"namespace": "weft", "name": "compared"},
        "spec": {
            "selector": {"matchLabels": {"app": "compared"}},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {"name": "compared", "port": {"number": 9002}},
        },
    }
    items = [pool]
    for number, host in enumerate(HOSTS):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**meta, "name": f"compared-{number}"},
            "spec": copy.deepcopy(spec),
        }
        items.append(pod)
        answer = api.apply(pod, dry_run=False)
        assert answer.is_success, answer.text
        status = {
            "phase": "Running",
            "podIP": host,
            "podIPs": [{"ip": host}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        with api.client() as client:
            answer = client.patch(
                f"{api.path(pod)}/status",
                json={"status": status},
                headers={"content-type": "application/merge-patch+json"},
            )
        assert answer.is_success, answer.text
    answer = api.apply(pool, dry_run=False)
    assert answer.is_success, answer.text
    return items


@contextmanager
def reference(api: KubeApi, folder: Path) -> Iterator[str]:
    """Address of lwepp, which follows the pool at the server."""
    port, health_port, metrics_port = free_ports("127.0.0.1", 3)
    command = [
        *(str(BIN / "lwepp"), "--pool-name", "compared", "--pool-namespace", "weft"),
        *("--grpc-port", str(port), "--grpc-health-port", str(health_port)),
        *("--metrics-port", str(metrics_port), "--secure-serving=false", "--health-checking"),
        *("--kubeconfig", str(api.kubeconfig())),
    ]
    with (folder / "lwepp.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def ours(folder: Path, binary: Path, port: int) -> AsyncIterator[str]:
    """Address of the picker of edges that have the pods' addresses."""
    (picker_port,) = free_ports("127.0.0.1", 1)
    edges = [f"{host}:{port}" for host in HOSTS]
    async with gateway(folder, script) as mesh:
        common = [str(binary), "--backend", mesh.app.server.address]
        common += ["--metrics-listen", "127.0.0.1:0"]
        with ExitStack() as stack:
            for address in edges:
                command = [*common, "--listen", address]
                edge = stack.enter_context(ServiceProcess(f"edge-{address}", command, folder))
                await edge.ready()
            command = [*common, "--listen", "127.0.0.1:0", "--picker-endpoints", ",".join(edges)]
            command += ["--picker-listen", f"127.0.0.1:{picker_port}"]
            await stack.enter_context(ServiceProcess("picker", command, folder)).ready()
            yield f"127.0.0.1:{picker_port}"


def headers_of(subset: object, *, has_body: bool) -> extproc.ProcessingRequest:
    """As a proxy sends them; `subset` is the value of the key, None: there is no key."""
    message = extproc.ProcessingRequest()
    message.protocol_config.request_body_mode = extproc.FULL_DUPLEX_STREAMED
    message.protocol_config.response_body_mode = extproc.FULL_DUPLEX_STREAMED
    message.request_headers.end_of_stream = not has_body
    sent = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
    for key, value in sent.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    if subset is not None:
        told = json_format.ParseDict({f"{DESTINATION}-subset": subset}, struct_pb2.Struct())
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(told)
    return message


async def pick(channel: grpc.aio.Channel, subset: object, *, has_body: bool) -> str:
    """What a proxy would send the request to; empty: it is refused."""
    call = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process()
    try:
        await call.write(headers_of(subset, has_body=has_body))
        body = json.dumps({"model": MODEL, "prompt": "hi" * random.randrange(9)}).encode()
        cut = random.randrange(len(body)) if has_body else 0
        for piece in (body[:cut], body[cut:]) if has_body else ():
            message = extproc.ProcessingRequest()
            message.request_body.body = piece
            message.request_body.end_of_stream = piece == body[cut:]
            await call.write(message)
        answer = await call.read()
        # The reference answers each piece of a body at once.
        while answer is not grpc.aio.EOF and answer.HasField("request_body"):
            answer = await call.read()
        assert answer is not grpc.aio.EOF
        if answer.HasField("immediate_response"):
            assert answer.immediate_response.status.code == 503
            return ""
        (option, *_) = answer.request_headers.response.header_mutation.set_headers
        assert option.header.key == DESTINATION
        told = json_format.MessageToDict(answer.dynamic_metadata)
        endpoint = option.header.raw_value.decode()
        assert told == {"envoy.lb": {DESTINATION: endpoint}}
        assert answer.request_headers.response.clear_route_cache
        return endpoint.split(",")[0]
    except grpc.aio.AioRpcError as error:
        # The reference ends the stream, which proxies answer as they do errors.
        if error.code() is not grpc.StatusCode.INTERNAL:
            raise
        return ""
    finally:
        call.cancel()


async def picked(address: str, subset: object, *, has_body: bool) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        return {await pick(channel, subset, has_body=has_body) for _ in range(ASKS)}


async def wait_for(address: str, edges: set[str]) -> None:
    """Returns once a picker has found all."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                if await picked(address, None, has_body=False) == edges:
                    return
            except (grpc.aio.AioRpcError, AssertionError):
                pass
            await asyncio.sleep(0.1)


async def test_both_pick_the_same_endpoints(
    api: KubeApi, tmp_path: Path, rest_binary: Path
) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    edges = [f"{host}:{port}" for host in HOSTS]
    items = await asyncio.to_thread(apply_pool, api, port)
    parts = [*edges, *HOSTS, f"{HOSTS[0]}:{port + 1}", "192.0.2.7:1", "", "no address"]
    subsets: list[object] = [None, "", [], edges, ", ".join(edges), list(HOSTS), 5.0, [5.0]]
    for _ in range(12):
        some = random.choices(parts, k=random.randrange(1, 4))
        subsets += [some, random.choice([",", ", "]).join(some), [",".join(some), *some[:1]]]
    try:
        async with ours(tmp_path, rest_binary, port) as own:
            with reference(api, tmp_path) as theirs:
                for address in (own, theirs):
                    await wait_for(address, set(edges))
                for subset in subsets:
                    has_body = random.random() < 0.5
                    found, expected = [
                        await picked(address, subset, has_body=has_body)
                        for address in (own, theirs)
                    ]
                    assert found == expected, subset
                for address in (own, theirs):
                    async with grpc.aio.insecure_channel(address) as channel:
                        question = health_pb2.HealthCheckRequest(service=SERVICE)
                        answer = await health_pb2_grpc.HealthStub(channel).Check(question)
                        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        for item in items:
            await asyncio.to_thread(api.delete, item)
