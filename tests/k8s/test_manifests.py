"""The manifests: valid by Kubernetes' own schemas, and in step with the code."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from weft.checkpoint.demo import demo_dir
from weft.common.rpc.server import LIVENESS
from weft.common.settings import ServiceSettings, load_settings
from weft.common.worker.metrics import EngineCollector
from weft.contract.cache_folder import cache_folder
from weft.contract.reports import LoadReport
from weft.decode.main import DecodeSettings
from weft.gateway.settings import GatewaySettings
from weft.kvstore.settings import KvStoreSettings
from weft.prefill.main import PrefillSettings
from weft.testing.k8s.manifests import (
    OVERLAYS,
    ROOT,
    Object,
    Workload,
    named,
    of_kind,
    render,
    render_folder,
    selects,
    workloads,
)
from weft.testing.meshes.metric_names import documented

VERSION = "1.36"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "kvstore": KvStoreSettings,
}
FRONT = ("gateway", "rest")
WORKERS = ("decode", "prefill")
DISAGGREGATED = ("cpu-demo", "gpu")
"""Overlays with prefill workers and a KV store."""
READY_GRACE_S = 5
"""Time for others to see that a pod leaves, in which it still takes requests."""
STOP_MARGIN_S = 5
"""After the grace a server ends what is left, and an engine goes."""

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(900)]


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return render(request.param)


def is_disaggregated(objects: tuple[Object, ...]) -> bool:
    return any(objects is render(overlay) for overlay in DISAGGREGATED)


def settings_of(workload: Workload, objects: tuple[Object, ...]) -> Any:
    """The settings that its flags make; an unknown flag or a bad value ends the test."""
    return load_settings(SETTINGS[workload.service], workload.flags(objects), {})


def test_every_object_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    # It reads megabytes of schemas for each object otherwise.
    reading = functools.cache(kubernetes_validate.utils.schema_contents)
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", reading)
    seen = []
    for overlay in OVERLAYS:
        for item in render(overlay):
            if item not in seen:
                kubernetes_validate.validate(item, VERSION, strict=True)
                seen.append(item)
    assert len(seen) > len(render(OVERLAYS[0]))


def test_the_check_is_strict() -> None:
    item = workloads(render("cpu-demo"))[0].item
    for change in ({"replicaz": 1}, {"replicas": "many"}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(
                {**item, "spec": {**item["spec"], **change}}, VERSION, strict=True
            )


def test_every_service_is_there_once(objects: tuple[Object, ...]) -> None:
    names = {workload.service for workload in workloads(objects)}
    more = {"kvstore", "prefill"} if is_disaggregated(objects) else set()
    assert names == {"decode", "gateway", "rest"} | more
    assert len(names) == len(workloads(objects))
    identities = [(i["kind"], i["metadata"]["name"]) for i in objects]
    assert len(identities) == len(set(identities))
    spaces = {i["metadata"].get("namespace") for i in objects if i["kind"] != "Namespace"}
    assert spaces == {i["metadata"]["name"] for i in of_kind(objects, "Namespace")}


def test_flags_are_settings_and_ports_agree(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        if workload.service == "rest":
            continue
        settings = settings_of(workload, objects)
        assert workload.ports == {
            "grpc": settings.port,
            "metrics": settings.metrics_port,
            "health": settings.health_port,
        }
        assert settings.has_tls
        assert not settings.insecure
        assert settings.exposure == ""
        assert settings.admin_host == "127.0.0.1"
        assert settings.admin_port not in workload.ports.values()


def test_engines_take_their_settings(objects: tuple[Object, ...]) -> None:
    """What an engine refuses whatever the machine is would let its pod start again for ever."""
    roles = [workload.service for workload in workloads(objects) if workload.service in WORKERS]
    assert roles
    for workload in workloads(objects):
        if workload.service in WORKERS:
            settings = settings_of(workload, objects)
            config = settings.engine_config(workload.service, settings.worker_id)
            assert config.role == workload.service


def test_the_rest_edge_knows_its_flags(objects: tuple[Object, ...], rest_binary: Path) -> None:
    """Wrong flags end it with status 2; here it gets as far as the certificate, which is away."""
    workload = Workload(named(objects, "Deployment", "weft-rest"))
    flags = dict(flag[2:].split("=", 1) for flag in workload.flags(objects))
    for flag, port in (("listen", "https"), ("metrics-listen", "metrics")):
        assert flags[flag] == f"0.0.0.0:{workload.ports[port]}"
    command = [str(rest_binary), *workload.flags(objects)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "/etc/weft/tls/tls.crt" in done.stderr


def test_images_are_those_of_the_dockerfiles(objects: tuple[Object, ...]) -> None:
    images = {path.stem for path in (ROOT / "k8s" / "images").glob("*.Dockerfile")}
    for workload in workloads(objects):
        name = workload.container["image"].rpartition("/")[2].partition(":")[0]
        assert name.removeprefix("weft-") in images
        role = [a for a in workload.container["args"] if not a.startswith("-")]
        assert role == ([workload.service] if name == "weft-worker" else [])


def test_probes_ask_what_the_services_answer(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        container = workload.container
        live, ready = container["livenessProbe"], container["readinessProbe"]
        if workload.service == "rest":
            paths = {"livenessProbe": "/healthz", "readinessProbe": "/readyz"}
            for probe, path in paths.items():
                http = container[probe]["httpGet"]
                assert (http["path"], http["scheme"]) == (path, "HTTPS")
                assert http["port"] in workload.ports
            continue
        health = workload.ports["health"]
        assert ready["grpc"]["port"] == health
        assert ready["grpc"].get("service", "") == ""
        for probe in (live, container["startupProbe"]):
            assert probe["grpc"] == {"port": health, "service": LIVENESS}


def test_what_stands_still_is_ended_soon_and_leaves_its_dumps(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        # Without it a stalled pod would get the whole grace of a drain.
        assert workload.container["livenessProbe"]["terminationGracePeriodSeconds"] == 10
        if workload.service in WORKERS:
            folder = settings_of(workload, objects).crash_dir
            mounts = {m["mountPath"]: m["name"] for m in workload.container["volumeMounts"]}
            name = mounts[str(folder.parent)]
            (volume,) = [v for v in workload.pod["volumes"] if v["name"] == name]
            # It lasts when the container starts again.
            assert "emptyDir" in volume


def test_there_is_time_to_drain(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        flags = dict(flag[2:].split("=", 1) for flag in workload.flags(objects))
        if workload.service in ("rest", "gateway"):
            # They say that they leave while they still serve, so they need no pause before SIGTERM.
            assert "lifecycle" not in workload.container
            wait = float(flags["ready-grace-s"])
        else:
            wait = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert wait == READY_GRACE_S
        if workload.service == "rest":
            grace = float(flags["drain-timeout"].removesuffix("s"))
        else:
            grace = settings_of(workload, objects).drain_grace_s
        needed = wait + grace + STOP_MARGIN_S
        assert workload.pod["terminationGracePeriodSeconds"] >= needed, workload.name


def test_selectors_find_their_pods(objects: tuple[Object, ...]) -> None:
    all_workloads = workloads(objects)
    for workload in all_workloads:
        assert selects(workload.item["spec"]["selector"], workload.labels)
    for item in of_kind(objects, "Service", "PodDisruptionBudget"):
        selector = item["spec"]["selector"]
        selector = {"matchLabels": selector} if item["kind"] == "Service" else selector
        found = [w.name for w in all_workloads if selects(selector, w.labels)]
        assert found == [item["metadata"]["name"]]
    for kind in ("Service", "PodDisruptionBudget"):
        there = {item["metadata"]["name"] for item in of_kind(objects, kind)}
        assert there == {w.name for w in all_workloads}


def test_services_lead_to_ports(objects: tuple[Object, ...]) -> None:
    by_name = {workload.name: workload for workload in workloads(objects)}
    for item in of_kind(objects, "Service"):
        workload = by_name[item["metadata"]["name"]]
        for port in item["spec"]["ports"]:
            number = workload.ports[port["targetPort"]]
            if item["spec"].get("clusterIP") == "None":  # nobody translates ports then
                assert port["port"] == number
    for item in of_kind(objects, "StatefulSet"):
        service = named(objects, "Service", item["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]


def test_names_in_flags_are_services(objects: tuple[Object, ...]) -> None:
    by_service = {workload.service: workload for workload in workloads(objects)}

    def check(address: str, service: str) -> None:
        host, _, port = address.partition(":")
        pod, _, name = host.rpartition(".")
        assert name == f"weft-{service}"
        assert pod in ("", f"weft-{service}-0")
        ports = named(objects, "Service", name)["spec"]["ports"]
        assert int(port) in {p["port"] for p in ports if p["name"] == "grpc"}

    gateway = settings_of(by_service["gateway"], objects)
    assert gateway.discovery == "kubernetes"
    for role in WORKERS:
        assert len(getattr(gateway, role)) == (role in by_service)
        for name in getattr(gateway, role):
            service, _, port = name.partition(":")
            assert service == f"weft-{role}"
            assert port in {p["name"] for p in named(objects, "Service", service)["spec"]["ports"]}
    for role in by_service.keys() & WORKERS:
        worker = settings_of(by_service[role], objects)
        assert worker.worker_id == f"weft-{role}-0"
        check(worker.advertise, role)
        assert bool(worker.kvstore) == is_disaggregated(objects)
        if worker.kvstore:
            check(worker.kvstore, "kvstore")
    flags = dict(flag[2:].split("=", 1) for flag in by_service["rest"].flags(objects))
    check(flags["backend"], "gateway")


def test_files_in_flags_are_mounted(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        mounts = {mount["mountPath"]: mount for mount in workload.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in workload.pod["volumes"]}
        for flag in workload.flags(objects):
            _, _, value = flag.partition("=")
            if value.startswith("/"):
                place = next(path for path in mounts if value.startswith(f"{path}/"))
                is_written = flag.startswith(("--crash-dir=", "--profile-dir="))
                assert mounts[place].get("readOnly", False) == (not is_written), flag
        # A service has its own certificate and nobody else's.
        tls = volumes[mounts["/etc/weft/tls"]["name"]]["secret"]
        assert tls["secretName"] == f"weft-tls-{workload.service}"
        assert {mount["name"] for mount in mounts.values()} <= set(volumes)


def test_no_variable_is_taken_for_a_setting(objects: tuple[Object, ...]) -> None:
    """Services of the names weft-* would add variables as WEFT_DECODE_PORT, which are settings."""
    for workload in workloads(objects):
        assert workload.pod["enableServiceLinks"] is False
        prefix = f"WEFT_{workload.service.upper()}_"
        names = [variable["name"] for variable in workload.container.get("env", ())]
        assert not [name for name in names if name.startswith(prefix)]


def test_pods_have_no_more_rights_than_they_need(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        pod = workload.pod
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (workload.container, *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
        talks_to_api = workload.service == "gateway"
        assert pod["automountServiceAccountToken"] is talks_to_api
        assert ("serviceAccountName" in pod) is talks_to_api
    (role,) = of_kind(objects, "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    (binding,) = of_kind(objects, "RoleBinding")
    account = workloads(objects)[0].pod.get("serviceAccountName", "weft-gateway")
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    assert not list(of_kind(objects, "ClusterRole", "ClusterRoleBinding", "Secret"))


def may_flow(
    objects: tuple[Object, ...],
    source: Mapping[str, str],
    target: Mapping[str, str],
    port: int,
    outside: bool = False,
) -> bool:
    """Whether the policies let a TCP connection through; `outside`: from another namespace."""

    def allows(labels: Mapping[str, str], peer: Mapping[str, str], way: str) -> bool:
        for item in of_kind(objects, "NetworkPolicy"):
            if not selects(item["spec"]["podSelector"], labels):
                continue
            for rule in item["spec"].get(way, ()):
                peers = rule.get("from" if way == "ingress" else "to", [{}])
                ports = rule.get("ports", [{}])
                is_peer = any(
                    (
                        ("namespaceSelector" in p) == outside
                        and selects(p.get("podSelector"), peer)
                        and "ipBlock" not in p
                    )
                    or p == {}
                    for p in peers
                )
                is_port = any(
                    p.get("protocol") == "TCP" and p["port"] <= port <= p.get("endPort", p["port"])
                    for p in ports
                )
                if is_peer and is_port:
                    return True
        return False

    return allows(target, source, "ingress") and (outside or allows(source, target, "egress"))


def test_network_policies_let_through_what_is_needed_and_no_more(
    objects: tuple[Object, ...],
) -> None:
    by_service = {workload.service: workload for workload in workloads(objects)}
    pools = ("decode", "prefill", "kvstore") if is_disaggregated(objects) else ()
    needed = {
        ("rest", "gateway", "grpc"),
        ("gateway", "decode", "grpc"),
        ("gateway", "prefill", "grpc"),
        ("gateway", "kvstore", "grpc"),
        ("decode", "prefill", "grpc"),
        *((worker, "kvstore", "grpc") for worker in ("decode", "prefill")),
        *((source, target, "nixl") for source in pools for target in pools),
    }
    first, last = (51000, 51999)
    if pools:
        ports = named(objects, "ConfigMap", "weft-mesh")["data"]["nixl-ports"]
        assert ports == f"{first}-{last}"
    for source, target in itertools.product(by_service, by_service):
        ports = {**by_service[target].ports, "admin": 50058}
        numbers = list(ports.items())
        numbers += [("nixl", first), ("nixl", last)]
        for name, number in numbers:
            labels = by_service[source].labels, by_service[target].labels
            expected = (source, target, name) in needed
            assert may_flow(objects, *labels, number) == expected, (source, target, name)
    for service in pools:
        for port in (first - 1, last + 1):
            assert not may_flow(
                objects, by_service["decode"].labels, by_service[service].labels, port
            )
    client = {"weft.dev/client": "true"}
    gateway = by_service["gateway"]
    assert may_flow(objects, client, gateway.labels, gateway.ports["grpc"], outside=True)
    assert not may_flow(objects, {}, gateway.labels, gateway.ports["grpc"], outside=True)
    assert not may_flow(
        objects, client, by_service["decode"].labels, by_service["decode"].ports["grpc"], True
    )


def test_nixl_listens_where_policies_expect_it(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        names = {variable["name"] for variable in workload.container.get("env", ())}
        has_nixl = workload.service in ("decode", "prefill", "kvstore") and (
            settings_of(workload, objects).transport != "data"
        )
        assert has_nixl == (is_disaggregated(objects) and workload.service not in FRONT)
        assert ("UCX_TCP_PORT_RANGE" in names) == has_nixl


def test_nodes_can_be_drained(objects: tuple[Object, ...]) -> None:
    """A budget that spares no pod of the fewest there may be stops every eviction for good."""
    fewest = {
        item["spec"]["scaleTargetRef"]["name"]: item["spec"]["minReplicas"]
        for item in of_kind(objects, "HorizontalPodAutoscaler")
    }
    for item in of_kind(objects, "PodDisruptionBudget"):
        (workload,) = [w for w in workloads(objects) if selects(item["spec"]["selector"], w.labels)]
        replicas = fewest.get(workload.name) or workload.item["spec"]["replicas"]
        spared = item["spec"].get("maxUnavailable", replicas - item["spec"].get("minAvailable", 0))
        assert spared >= 1, workload.name


def test_prometheus_finds_the_metrics(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        port = workload.ports["metrics"]
        assert workload.item["spec"]["template"]["metadata"]["annotations"] == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(port),
            "prometheus.io/path": "/metrics",
        }
        assert may_flow(objects, {}, workload.labels, port, outside=True)


def worker_samples() -> list[tuple[str, Mapping[str, str]]]:
    """Names and labels of what a worker shows."""
    hints = typing.get_type_hints(LoadReport)
    required = [field.name for field in fields(LoadReport) if field.default is MISSING]
    empty = LoadReport(**{name: hints[name]() for name in required})
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: empty, lambda: 0.0))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [(sample.name, sample.labels) for family in families for sample in family.samples]


def test_autoscalers_have_targets_and_metrics(objects: tuple[Object, ...]) -> None:
    """The metrics are gauges that the pods show, and that the adapter's rule takes."""
    rule = re.search(r'__name__=~"([^"]+)"', (ROOT / "docs" / "kubernetes.md").read_text())
    assert rule is not None
    # A running mesh is held to that list by tests/mesh/operations/test_observability.py.
    gateway = {metric.name for metric in documented()["Gateway"] if metric.kind == "gauge"}
    shown = {"decode": worker_samples(), "prefill": worker_samples()}
    shown["gateway"] = [(name, {}) for name in gateway]
    for item in of_kind(objects, "HorizontalPodAutoscaler"):
        target = item["spec"]["scaleTargetRef"]
        workload = named(objects, target["kind"], target["name"])
        assert workload["apiVersion"] == target["apiVersion"]
        assert "replicas" not in workload["spec"], "two owners of one number"
        for metric in item["spec"]["metrics"]:
            if metric["type"] == "Pods":
                wanted = metric["pods"]["metric"]
                samples = shown[Workload(workload).service]
                assert [
                    name
                    for name, labels in samples
                    if name == wanted["name"] and selects(wanted.get("selector"), labels)
                ], wanted
                assert re.fullmatch(rule[1], wanted["name"])
    autoscalers = of_kind(objects, "HorizontalPodAutoscaler")
    scaled = {item["spec"]["scaleTargetRef"]["name"] for item in autoscalers}
    names = {workload.name for workload in workloads(objects)}
    assert scaled == {"weft-gateway", "weft-prefill", "weft-decode"} & names


def test_a_worker_has_one_gpu() -> None:
    objects = render("gpu")
    for service in WORKERS:
        workload = Workload(named(objects, "StatefulSet", f"weft-{service}"))
        resources = workload.container["resources"]
        for side in ("requests", "limits"):
            assert resources[side]["nvidia.com/gpu"] == "1"
        settings = settings_of(workload, objects)
        assert settings.device == "cuda"
        assert settings.engine_config(service, "any").ships_pages
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    for workload in workloads(objects):
        for volume in workload.pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_demo_serves_the_demo_model() -> None:
    objects = render("cpu-demo")
    for service in ("gateway", "prefill", "decode"):
        kind = "Deployment" if service == "gateway" else "StatefulSet"
        workload = Workload(named(objects, kind, f"weft-{service}"))
        (init,) = workload.pod["initContainers"]
        assert init["command"] == ["weft", "model", "convert"]
        (cache,) = [e["value"] for e in init["env"] if e["name"] == "WEFT_CACHE_DIR"]
        expected = Path(cache) / demo_dir().relative_to(cache_folder())
        assert settings_of(workload, objects).model_dir == expected
        places = {mount["mountPath"]: mount["name"] for mount in init["volumeMounts"]}
        assert places[cache] == "models"
        (models,) = [v for v in workload.pod["volumes"] if v["name"] == "models"]
        assert "emptyDir" in models


def test_adapters_are_off_until_their_component_is_added(tmp_path: Path) -> None:
    for overlay in OVERLAYS:
        for workload in workloads(render(overlay)):
            assert not any("adapter" in flag for flag in workload.flags(render(overlay)))
    for number, overlay in enumerate(DISAGGREGATED):
        folder = tmp_path / str(number)
        folder.mkdir()
        components = os.path.relpath(ROOT / "k8s" / "components", folder)
        overlays = os.path.relpath(ROOT / "k8s" / "overlays", folder)
        (folder / "kustomization.yaml").write_text(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
            f"resources: [{overlays}/{overlay}]\ncomponents: [{components}/adapters]\n"
        )
        objects = render_folder(folder)
        takers = {"gateway", *WORKERS}
        for workload in workloads(objects):
            if workload.service not in takers:
                continue
            settings = settings_of(workload, objects)
            (mount,) = [
                one for one in workload.container["volumeMounts"] if one["name"] == "adapters"
            ]
            assert settings.adapter_root == Path(mount["mountPath"])
            is_worker = workload.service in WORKERS
            assert mount.get("readOnly", False) == is_worker, "only gateways write"
            volume = next(one for one in workload.pod["volumes"] if one["name"] == "adapters")
            assert volume["persistentVolumeClaim"]["claimName"] == "weft-adapters"
            if is_worker:
                assert settings.engine_config(workload.service, settings.worker_id).enable_lora
        for item in objects:
            kubernetes_validate.validate(item, VERSION, strict=True)


def test_images_have_room_with_their_component(tmp_path: Path) -> None:
    components = os.path.relpath(ROOT / "k8s" / "components", tmp_path)
    base = os.path.relpath(ROOT / "k8s" / "base", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{base}]\ncomponents: [{components}/vision]\n"
    )
    objects = render_folder(tmp_path)
    by_service = {workload.service: workload for workload in workloads(objects)}
    settings = settings_of(by_service["gateway"], objects)
    assert f"--max-body-bytes={settings.image_body_bytes}" in by_service["rest"].flags(objects)
    held = settings.media_held_bytes + settings.media_memo_bytes
    limits = {
        service: by_service[service].container["resources"]["limits"]["memory"]
        for service in ("gateway", "rest")
    }
    assert int(limits["gateway"].removesuffix("Gi")) << 30 >= 2 * held
    # Four bodies as they come, and in messages for the gateway.
    assert int(limits["rest"].removesuffix("Gi")) << 30 >= 2 * 4 * settings.image_body_bytes
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    policy = policies["weft-gateway-images"]
    assert selects(policy["podSelector"], by_service["gateway"].labels)
    assert policy["policyTypes"] == ["Egress"]
    for address, is_open in {
        **{"93.184.216.34": True, "2606:2800:220:1::1": True, "169.254.169.254": False},
        **{"10.1.2.3": False, "172.20.0.1": False, "192.168.1.1": False, "fd00:ec2::254": False},
    }.items():
        assert reaches(policy["egress"], ip_address(address), 443) == is_open
    for item in objects:
        kubernetes_validate.validate(item, VERSION, strict=True)


def reaches(rules: Sequence[dict[str, Any]], address: Any, port: int) -> bool:
    """Whether rules of egress that name ranges allow a connection."""

    def is_in(cidr: str) -> bool:
        return address in ip_network(cidr)

    return any(
        is_in(peer["ipBlock"]["cidr"]) and not any(map(is_in, peer["ipBlock"].get("except", ())))
        for rule in rules
        if port in [one["port"] for one in rule["ports"]]
        for peer in rule["to"]
    )


def test_embedders_are_added_by_their_component(tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    folder.mkdir()
    components = os.path.relpath(ROOT / "k8s" / "components", folder)
    base = os.path.relpath(ROOT / "k8s" / "base", folder)
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{base}]\n"
        f"components: [{components}/embeddings, {components}/disaggregated]\n"
    )
    objects = render_folder(folder)
    by_service = {workload.service: workload for workload in workloads(objects)}
    assert set(by_service) == {"decode", "embed", "gateway", "kvstore", "prefill", "rest"}
    embed, gateway = by_service["embed"], settings_of(by_service["gateway"], objects)
    for item in objects:
        if item["metadata"]["name"] == "weft-embed":
            kubernetes_validate.validate(item, VERSION, strict=True)
    settings = load_settings(DecodeSettings, embed.flags(objects), {})
    assert settings.engine_config("decode", settings.worker_id).task == settings.task == "auto"
    assert (settings.model_name, settings.model_dir) in gateway.model_folders
    assert gateway.decode == ["weft-decode:grpc", "weft-embed:grpc"]
    assert settings.advertise == "weft-embed-0.weft-embed:50052"
    assert embed.ports == by_service["decode"].ports
    volumes = {volume["name"]: volume for volume in embed.pod["volumes"]}
    # Gateways expect the certificate of a decode worker.
    assert volumes["tls"]["secret"]["secretName"] == "weft-tls-decode"
    for source, workload in by_service.items():
        flows = may_flow(objects, workload.labels, embed.labels, embed.ports["grpc"])
        assert flows == (source == "gateway"), source
    for target in ("kvstore", "prefill", "decode"):
        labels, ports = by_service[target].labels, by_service[target].ports
        assert not may_flow(objects, embed.labels, labels, ports["grpc"])
    (scaler,) = [
        item
        for item in of_kind(objects, "HorizontalPodAutoscaler")
        if item["spec"]["scaleTargetRef"]["name"] == "weft-embed"
    ]
    (metric,) = scaler["spec"]["metrics"]
    wanted = metric["pods"]["metric"]
    shown = [labels for name, labels in worker_samples() if name == wanted["name"]]
    assert any(selects(wanted["selector"], labels) for labels in shown)
