"""The manifests and the gateway's discovery against a real kube-apiserver: `make test-k8s`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from weft.gateway.fleet.discovery.kubernetes import ApiServer, KubernetesDiscovery
from weft.testing.k8s.kube_api import KubeApi
from weft.testing.k8s.manifests import OVERLAYS, Object, named, of_kind, render

pytestmark = [pytest.mark.needs("go", "kube-apiserver"), pytest.mark.timeout(900)]

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    api = KubeApi(tmp_path_factory.mktemp("kube"))
    try:
        api.wait_ready()
        for overlay in OVERLAYS:
            for item in of_kind(render(overlay), "Namespace"):
                assert api.apply(item, dry_run=False).is_success
        yield api
    finally:
        api.stop()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_accepted(api: KubeApi, overlay: str) -> None:
    objects = render(overlay)
    for item in objects:
        answer = api.apply(item, dry_run=True)
        assert answer.is_success, f"{item['kind']} {item['metadata']['name']}: {answer.text}"
        # What policies about pods in the namespace would refuse comes as a warning here.
        assert "warning" not in answer.headers, answer.headers["warning"]
    assert len(objects) > 15


def test_wrong_manifests_are_refused(api: KubeApi) -> None:
    """The test above can fail: what it looks for is found."""
    objects = render(OVERLAYS[0])
    workload = named(objects, "Deployment", "weft-gateway")

    def refused(change: str, value: object) -> str:
        broken = copy.deepcopy(workload)
        *path, last = change.split("/")
        place = broken
        for step in path:
            place = place[int(step) if step.isdigit() else step]
        place[last] = value
        answer = api.apply(broken, dry_run=True)
        assert answer.is_error, change  # 500 for a field that no schema has, else 4xx
        return answer.text

    pod = "spec/template/spec"
    assert "replicaz" in refused("spec/replicaz", 1)
    assert "selector" in refused("spec/selector/matchLabels", {"app": "other"})
    assert "ports" in refused(f"{pod}/containers/0/ports/0/name", "a_bad_name")
    assert "volumeMounts" in refused(f"{pod}/containers/0/volumeMounts/0/name", "nothing")
    assert "quantities" in refused(f"{pod}/containers/0/resources/limits/memory", "many")


def endpoint_slice(name: str, service: str, port: int, addresses: Sequence[str]) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "weft",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]} for address in addresses],
        "ports": [{"name": "grpc", "port": port}, {"name": "metrics", "port": 9090}],
    }


class Followed:
    """What discovery says, with one of the server's users."""

    def __init__(self, api: KubeApi, folder: Path, user: str) -> None:
        token = folder / f"token-{user}"
        token.write_text(api.tokens[user])
        server = ApiServer(url=api.url, namespace="weft", token_file=token, ca_file=api.ca)
        self.seen: list[set[str]] = []
        self._task = asyncio.create_task(
            self._follow(KubernetesDiscovery(server, ["weft-decode:grpc"], ["weft-prefill:grpc"]))
        )

    async def _follow(self, discovery: KubernetesDiscovery) -> None:
        async for endpoints in discovery.watch():
            self.seen.append({f"{e.role} {e.address}" for e in endpoints})

    async def wait(self, *expected: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self.seen or self.seen[-1] != set(expected):
                assert not self._task.done()
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_workers_are_found_with_the_rights_of_the_manifests(
    api: KubeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the service account of the overlay's Role; slices written as the controller would."""

    def apply(item: Object) -> None:
        answer = api.apply(item, dry_run=False)
        assert answer.is_success, answer.text

    for item in of_kind(render("gpu"), "ServiceAccount", "Role", "RoleBinding"):
        await asyncio.to_thread(apply, item)
    decode = endpoint_slice("d-1", "weft-decode", 50052, ["10.1.0.1"])
    await asyncio.to_thread(apply, decode)
    followed = Followed(api, tmp_path, "gateway")
    stranger = Followed(api, tmp_path, "nobody")
    try:
        await followed.wait("decode 10.1.0.1:50052")
        await asyncio.to_thread(apply, endpoint_slice("p-1", "weft-prefill", 50053, ["10.1.1.1"]))
        await asyncio.to_thread(apply, endpoint_slice("x-1", "another", 1, ["10.1.2.1"]))
        await followed.wait("decode 10.1.0.1:50052", "prefill 10.1.1.1:50053")
        decode = endpoint_slice("d-1", "weft-decode", 50052, ["10.1.0.2", "10.1.0.3"])
        await asyncio.to_thread(apply, decode)
        here = ("decode 10.1.0.2:50052", "decode 10.1.0.3:50052")
        await followed.wait(*here, "prefill 10.1.1.1:50053")
        await asyncio.to_thread(
            api.delete, endpoint_slice("p-1", "weft-prefill", 50053, ["10.1.1.1"])
        )
        await followed.wait(*here)
        # The API server goes away and comes back: nobody is lost meanwhile, then all goes on.
        await asyncio.to_thread(api.restart)
        assert followed.seen[-1] == set(here)
        await asyncio.to_thread(apply, endpoint_slice("d-2", "weft-decode", 50052, ["10.1.0.9"]))
        await followed.wait(*here, "decode 10.1.0.9:50052")
        assert not stranger.seen
        assert "answered 403" in caplog.text
    finally:
        await followed.end()
        await stranger.end()
    with api.client("gateway") as client:
        for path in ("/api/v1/namespaces/weft/secrets", "/api/v1/namespaces/weft/pods"):
            assert client.get(path).status_code == 403
        slices = "/apis/discovery.k8s.io/v1/namespaces/weft-demo/endpointslices"
        assert client.get(slices).status_code == 403
