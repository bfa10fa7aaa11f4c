"""The manifests and the gateway's discovery against a real kube-apiserver: `make test-k8s`."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from weft.common.kubernetes import ApiServer
from weft.contract.errors import ConfigError, PeerUnavailable
from weft.gateway.fleet.discovery.kubernetes import KubernetesDiscovery
from weft.planner.actuators.kubernetes import KubernetesActuator, ScaleTarget
from weft.planner.forecast import Counts
from weft.testing.k8s.kube_api import KubeApi
from weft.testing.k8s.kube_pods import KubePods, node
from weft.testing.k8s.manifests import (
    OVERLAYS,
    ROOT,
    Object,
    named,
    of_kind,
    render,
    render_folder,
)
from weft.v1 import mesh_pb2

sys.path.insert(0, str(ROOT / "scripts"))
import gen_helm_chart as chart

pytestmark = [pytest.mark.needs("go", "kube-apiserver"), pytest.mark.timeout(900)]

TIMEOUT_S = 60.0
PODS_TIMEOUT_S = 120.0


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
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TIMEOUT_S
        while not self.seen or self.seen[-1] != set(expected):
            assert not self._task.done()
            assert loop.time() < deadline, f"{self.seen[-1:]} instead of {expected}"
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
        # The tests of pods look for the slices of real controllers alone.
        with api.client() as client:
            slices = "/apis/discovery.k8s.io/v1/namespaces/weft/endpointslices"
            client.delete(slices).raise_for_status()
    with api.client("gateway") as client:
        for path in ("/api/v1/namespaces/weft/secrets", "/api/v1/namespaces/weft/pods"):
            assert client.get(path).status_code == 403
        slices = "/apis/discovery.k8s.io/v1/namespaces/weft-demo/endpointslices"
        assert client.get(slices).status_code == 403


def of_variant(folder: Path, **choices: bool | str) -> tuple[Object, ...]:
    """Objects of the base with components, by the words of the chart's values."""
    names = [
        choice.value.removesuffix(".enabled").removesuffix(".by").replace(".", "_")
        for choice in chart.CHOICES
    ]
    defaults = [choice.options[0] for choice in chart.CHOICES]
    values = {**dict(zip(names, defaults, strict=True)), **choices}
    variant = chart.valid(tuple(values[name] for name in names))
    chart.overlay(folder, chart.components(variant), "weft")
    return render_folder(folder)


CUSTOM: dict[str, set[str]] = {
    "keda": {"InferencePool", "ScaledObject", "TriggerAuthentication"},
    "metric": {"InferencePool"},
    "planner": {"InferencePool"},
    "advice": {"InferencePool", "LeaderWorkerSet"},
}
"""Kinds that others define, by what the numbers of workers follow."""


@pytest.mark.parametrize("by", CUSTOM)
def test_every_component_is_accepted(api: KubeApi, tmp_path: Path, by: str) -> None:
    """With the definitions of KEDA, LeaderWorkerSet and the inference extension."""
    objects = of_variant(
        tmp_path,
        adapters=True,
        embeddings=True,
        vision=True,
        hosts=True,
        inferencePool=True,
        scaling=by,
    )
    every = {kind for kinds in CUSTOM.values() for kind in kinds}
    assert every & {item["kind"] for item in objects} == CUSTOM[by]
    for item in objects:
        answer = api.apply(item, dry_run=True)
        assert answer.is_success, f"{item['kind']} {item['metadata']['name']}: {answer.text}"
        assert "warning" not in answer.headers, answer.headers["warning"]


def test_pods_of_hosts_are_accepted(api: KubeApi, tmp_path: Path) -> None:
    """The definition that is kept here leaves the schemas of pods out."""
    item = named(of_variant(tmp_path, hosts=True), "LeaderWorkerSet", "weft-decode-hosts")
    templates = item["spec"]["leaderWorkerTemplate"]
    for place in ("leaderTemplate", "workerTemplate"):
        template = templates[place]
        workload = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": place.lower(), "namespace": "weft"},
            "spec": {
                "serviceName": "any",
                "selector": {"matchLabels": template["metadata"]["labels"]},
                "template": template,
            },
        }
        answer = api.apply(workload, dry_run=True)
        assert answer.is_success, answer.text
        assert "warning" not in answer.headers, answer.headers["warning"]


def test_wrong_custom_objects_are_refused(api: KubeApi, tmp_path: Path) -> None:
    """The definitions are strict: what the tests above look for is found."""
    objects = (
        *of_variant(tmp_path, hosts=True, inferencePool=True),
        *of_variant(tmp_path, scaling="keda"),
    )

    def refused(kind: str, name: str, change: str, value: object) -> str:
        broken = copy.deepcopy(named(objects, kind, name))
        *path, last = change.split("/")
        place = broken
        for step in path:
            place = place[step]
        place[last] = value
        answer = api.apply(broken, dry_run=True)
        assert answer.is_error, change
        return answer.text

    group = ("LeaderWorkerSet", "weft-decode-hosts")
    assert "replicaz" in refused(*group, "spec/replicaz", 1)
    assert "restartPolicy" in refused(*group, "spec/leaderWorkerTemplate/restartPolicy", "Never")
    assert "size" in refused(*group, "spec/leaderWorkerTemplate/size", "two")
    pool = ("InferencePool", "weft")
    assert "targetPorts" in refused(*pool, "spec/targetPorts", [])
    assert "endpointPicker" in refused(*pool, "spec/endpointPicker", "weft-picker")
    scaled = ("ScaledObject", "weft-decode")
    assert "triggers" in refused(*scaled, "spec/triggers", "external")
    assert "pollingIntervall" in refused(*scaled, "spec/pollingIntervall", 1)


def member(role: int) -> mesh_pb2.MeshMember:
    return mesh_pb2.MeshMember(role=role)  # type: ignore[arg-type]


def planners_actuator(
    api: KubeApi, folder: Path, *targets: str, user: str = "planner"
) -> KubernetesActuator:
    token = folder / f"token-{user}"
    token.write_text(api.tokens[user])
    server = ApiServer(url=api.url, namespace="weft", token_file=token, ca_file=api.ca)
    return KubernetesActuator(server, [ScaleTarget.parse(target) for target in targets])


def replicas_of(api: KubeApi, item: Object, order: int | None = None) -> int:
    """Replicas in the object's own `spec`; `order` sets them, as an operator would."""
    with api.client() as client:
        if order is not None:
            answer = client.patch(
                api.path(item),
                json={"spec": {"replicas": order}},
                headers={"content-type": "application/merge-patch+json"},
            )
            assert answer.is_success, answer.text
        return int(client.get(api.path(item)).json()["spec"]["replicas"])


async def test_a_planner_scales_with_the_rights_of_its_manifests(
    api: KubeApi, tmp_path: Path
) -> None:
    objects = of_variant(tmp_path, scaling="planner")
    workers = {role: named(objects, "StatefulSet", f"weft-{role}") for role in Counts._fields}
    access = [named(objects, kind, "weft-planner") for kind in ("ServiceAccount", "Role")]
    access.append(named(objects, "RoleBinding", "weft-planner"))
    for item in (*access, *workers.values()):
        answer = await asyncio.to_thread(api.apply, item, dry_run=False)
        assert answer.is_success, answer.text
    names = [f"m:{role}=statefulsets/weft-{role}" for role in Counts._fields]
    actuator = planners_actuator(api, tmp_path, *names)
    stranger = planners_actuator(api, tmp_path, *names, user="nobody")
    try:
        assert await actuator.ordered("another", {}) is None
        assert await actuator.ordered("m", {}) == Counts(1, 1)
        told = await actuator.order("m", Counts(2, 3), {})
        assert "statefulsets/weft-decode: 3 replicas (were 1)" in told
        assert "statefulsets/weft-prefill: 2 replicas (were 1)" in told
        there = [await asyncio.to_thread(replicas_of, api, workers[r]) for r in Counts._fields]
        assert Counts(*there) == await actuator.ordered("m", {}) == Counts(2, 3)
        assert await actuator.order("m", Counts(2, 3), {}) == "", "nothing to change"
        # Somebody else's edit is seen; the planner's policy makes an alarm of it.
        await asyncio.to_thread(replicas_of, api, workers["decode"], 5)
        assert await actuator.ordered("m", {}) == Counts(2, 5)
        with pytest.raises(ConfigError, match=r"403.*get and patch of statefulsets/scale"):
            await stranger.order("m", Counts(1, 1), {})
        with pytest.raises(ConfigError, match="403"):
            await stranger.ordered("m", {})
    finally:
        await actuator.close()
        await stranger.close()
    with api.client("planner") as client:
        space = "/apis/apps/v1/namespaces/weft/statefulsets"
        merge = {"content-type": "application/merge-patch+json"}
        for path in (space, f"{space}/weft-decode", "/api/v1/namespaces/weft/secrets"):
            assert client.get(path).status_code == 403
        change = {"spec": {"replicas": 9}}
        for name in ("weft-decode", "weft-kvstore/scale"):
            answer = client.patch(f"{space}/{name}", json=change, headers=merge)
            assert answer.status_code == 403
        assert client.delete(f"{space}/weft-decode").status_code == 403


async def test_an_edit_that_comes_between_is_not_overwritten(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = copy.deepcopy(
        named(of_variant(tmp_path, disaggregated=True), "StatefulSet", "weft-decode")
    )
    item["metadata"]["name"] = "edited"
    answer = await asyncio.to_thread(api.apply, item, dry_run=False)
    assert answer.is_success, answer.text
    actuator = planners_actuator(api, tmp_path, "m:decode=statefulsets/edited", user="admin")
    read = actuator._read

    async def edited_after(target: ScaleTarget) -> object:
        scale = await read(target)
        await asyncio.to_thread(replicas_of, api, item, 7)
        return scale

    try:
        with monkeypatch.context() as patch:
            patch.setattr(actuator, "_read", edited_after)
            with pytest.raises(PeerUnavailable, match="somebody else has changed it"):
                await actuator.order("m", Counts(0, 4), {})
        assert await asyncio.to_thread(replicas_of, api, item) == 7
        # Roles that are not scaled count as they are.
        prefill = {"a": member(mesh_pb2.MEMBER_ROLE_PREFILL)}
        assert await actuator.ordered("m", prefill) == Counts(1, 7)
        assert "edited: 4 replicas" in await actuator.order("m", Counts(1, 4), prefill)
    finally:
        await actuator.close()
    missing = planners_actuator(api, tmp_path, "m:decode=deployments/edited", user="admin")
    with pytest.raises(ConfigError, match="there is none in weft"):
        await missing.ordered("m", {})
    await missing.close()


async def test_workers_of_several_hosts_are_scaled(api: KubeApi, tmp_path: Path) -> None:
    item = named(of_variant(tmp_path, hosts=True), "LeaderWorkerSet", "weft-decode-hosts")
    answer = await asyncio.to_thread(api.apply, item, dry_run=False)
    assert answer.is_success, answer.text
    target = "m:decode=leaderworkersets/weft-decode-hosts"
    actuator = planners_actuator(api, tmp_path, target, user="admin")
    try:
        assert await actuator.ordered("m", {}) == Counts(0, 1)
        assert "3 replicas" in await actuator.order("m", Counts(0, 3), {})
        assert await asyncio.to_thread(replicas_of, api, item) == 3
        # While the API server is away nothing is known, and that is said.
        await asyncio.to_thread(api.pause)
        try:
            with pytest.raises(PeerUnavailable, match="cannot be asked"):
                await actuator.ordered("m", {})
        finally:
            await asyncio.to_thread(api.resume)
        assert await actuator.ordered("m", {}) == Counts(0, 3)
    finally:
        await actuator.close()


# Pods that Kubernetes' own controllers make, and that kwok says are ready.


@pytest.fixture
def pods(api: KubeApi, tmp_path: Path) -> Iterator[KubePods]:
    space = "/apis/apps/v1/namespaces/weft/statefulsets"
    with api.client() as client:
        # Of other tests: there was nobody to make their pods.
        client.delete(space).raise_for_status()
    (tmp_path / "pods").mkdir()
    pods = KubePods(api, tmp_path / "pods")
    try:
        yield pods
    finally:
        pods.stop()
        with api.client() as client:
            now = {"gracePeriodSeconds": 0}
            client.delete(space).raise_for_status()
            client.delete("/api/v1/namespaces/weft/pods", params=now).raise_for_status()


def ready_pods(api: KubeApi, role: str) -> dict[str, str]:
    """Addresses of ready pods, by name."""
    query = {"labelSelector": f"app.kubernetes.io/name=weft-{role}"}
    with api.client() as client:
        found = client.get("/api/v1/namespaces/weft/pods", params=query).json()["items"]
    return {
        pod["metadata"]["name"]: pod["status"]["podIP"]
        for pod in found
        if "deletionTimestamp" not in pod["metadata"]
        and any(
            one["type"] == "Ready" and one["status"] == "True"
            for one in pod["status"].get("conditions", ())
        )
    }


async def until_ready(api: KubeApi, pods: KubePods, wanted: Counts) -> dict[str, str]:
    """Addresses of all workers once there are so many."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PODS_TIMEOUT_S
    while True:
        found = {role: await asyncio.to_thread(ready_pods, api, role) for role in Counts._fields}
        if Counts(*(len(found[role]) for role in Counts._fields)) == wanted:
            return {
                name: address for role in Counts._fields for name, address in found[role].items()
            }
        assert loop.time() < deadline, f"{found}\n{pods.log}"
        await asyncio.sleep(0.2)


def evict(api: KubeApi, name: str) -> httpx.Response:
    path = f"/api/v1/namespaces/weft/pods/{name}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction"}
    with api.client() as client:
        return client.post(path, json={**body, "metadata": {"name": name, "namespace": "weft"}})


@pytest.mark.needs("kwok")
async def test_pods_follow_a_planner_and_gateways_follow_pods(
    api: KubeApi, pods: KubePods, tmp_path: Path
) -> None:
    objects = of_variant(tmp_path, scaling="planner")
    items = [node("made-up")]
    for name in ("weft-planner", "weft-gateway"):
        items += [named(objects, kind, name) for kind in ("ServiceAccount", "Role", "RoleBinding")]
    for role in Counts._fields:
        workload = copy.deepcopy(named(objects, "StatefulSet", f"weft-{role}"))
        # Nothing schedules here.
        workload["spec"]["template"]["spec"]["nodeName"] = "made-up"
        workload["spec"]["replicas"] = 1
        items += [workload, named(objects, "Service", f"weft-{role}")]
        items.append(named(objects, "PodDisruptionBudget", f"weft-{role}"))
    for item in items:
        answer = await asyncio.to_thread(api.apply, item, dry_run=False)
        assert answer.is_success, answer.text
    targets = [f"m:{role}=statefulsets/weft-{role}" for role in Counts._fields]
    actuator = planners_actuator(api, tmp_path, *targets)
    followed = Followed(api, tmp_path, "gateway")
    try:
        for wanted in (Counts(1, 1), Counts(2, 3), Counts(1, 2)):
            await actuator.order("m", wanted, {})
            there = await until_ready(api, pods, wanted)
            await followed.wait(
                *(
                    f"{role} {address}:{port}"
                    for role, port in (("decode", 50052), ("prefill", 50053))
                    for name, address in there.items()
                    if name.startswith(f"weft-{role}")
                )
            )
        # A worker that an operator drains comes back, and no order changes by it.
        answer = await asyncio.to_thread(evict, api, "weft-decode-0")
        assert answer.is_success, answer.text
        await until_ready(api, pods, Counts(1, 2))
        assert await actuator.ordered("m", {}) == Counts(1, 2)
        assert await actuator.order("m", Counts(1, 2), {}) == ""
    finally:
        await followed.end()
        await actuator.close()
        for item in items:
            if item["kind"] != "StatefulSet":
                await asyncio.to_thread(api.delete, item)
