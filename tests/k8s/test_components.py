"""Components for planners and for workers of several hosts: in step with the code."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from weft.common.settings import load_settings
from weft.decode.main import DecodeSettings
from weft.keda import externalscaler_pb2
from weft.planner.actuators.kubernetes import ScaleTarget
from weft.planner.scaler import trigger_of
from weft.planner.settings import PlannerSettings
from weft.testing.k8s.manifests import (
    ROOT,
    Object,
    Workload,
    named,
    of_kind,
    render_folder,
    selects,
    workloads,
)

sys.path.insert(0, str(ROOT / "scripts"))
import gen_helm_chart as chart

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(900)]

SCALED = ("keda", "metric", "planner")


@functools.cache
def mesh(*components: str) -> tuple[Object, ...]:
    """The base with components; tests only read it."""
    with tempfile.TemporaryDirectory() as folder:
        chart.overlay(Path(folder), components, "weft")
        return render_folder(Path(folder))


def planned(*more: str) -> tuple[Object, ...]:
    return mesh("disaggregated", "planner", *more)


def planner_settings(objects: tuple[Object, ...]) -> PlannerSettings:
    workload = Workload(named(objects, "Deployment", "weft-planner"))
    return load_settings(PlannerSettings, workload.flags(objects), {})


def targets_of(objects: tuple[Object, ...]) -> dict[str, tuple[str, str]]:
    """Kinds of what sets the replicas of workers, by its name, and the version of that kind."""
    return {
        item["spec"]["scaleTargetRef"]["name"]: (item["kind"], item["apiVersion"])
        for item in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
    }


def test_a_planner_asks_all_gateways_at_their_operators_port() -> None:
    objects = planned()
    settings = planner_settings(objects)
    planner = Workload(named(objects, "Deployment", "weft-planner"))
    gateway = Workload(named(objects, "Deployment", "weft-gateway"))
    flags = dict(flag[2:].split("=", 1) for flag in gateway.flags(objects))
    assert settings.gateway == [f"dns:weft-gateway:{flags['admin-port']}"]
    assert named(objects, "Service", "weft-gateway")["spec"]["clusterIP"] == "None"
    assert flags["admin-host"] == "0.0.0.0"
    assert settings.has_tls
    assert settings.exposure == ""
    assert settings.act == []
    assert planner.container["command"] == ["weft", "serve", "planner"]
    ports = {
        "grpc": settings.port,
        "metrics": settings.metrics_port,
        "health": settings.health_port,
    }
    assert planner.ports == ports
    assert planner.item["spec"]["replicas"] > 1, "another one takes over"
    # It has no part in requests: workers are scaled by their load as before.
    kinds = {kind for kind, _ in targets_of(objects).values()}
    assert kinds == {"HorizontalPodAutoscaler"}


@pytest.mark.parametrize("by", SCALED)
def test_one_owner_has_the_numbers_of_workers(by: str) -> None:
    objects = planned(f"scale-by-{by}")
    owners = targets_of(objects)
    workers = {"weft-decode", "weft-prefill"}
    settings = planner_settings(objects)
    if by == "planner":
        assert not workers & owners.keys()
        targets = {(one.role, str(one)) for one in settings.scale_targets}
        assert targets == {(w.removeprefix("weft-"), f"statefulsets/{w}") for w in workers}
        assert {one.model for one in settings.scale_targets} == {"served"}
        assert settings.act == ["kubernetes"]
    else:
        assert workers <= owners.keys()
        assert settings.act == []
    for item in of_kind(objects, "StatefulSet"):
        if item["metadata"]["name"] in workers:
            assert "replicas" not in item["spec"], "two owners of one number"
    # What the planner may want is what the autoscalers let through.
    least, most = 0, 0
    for item in of_kind(planned(), "HorizontalPodAutoscaler"):
        if item["metadata"]["name"] in workers:
            least += item["spec"]["minReplicas"]
            most += item["spec"]["maxReplicas"]
    assert settings.least_prefill + settings.least_decode == least
    assert settings.budget == most


def test_keda_asks_the_planner_for_each_role() -> None:
    objects = planned("scale-by-keda")
    settings = planner_settings(objects)
    scaled = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "ScaledObject")}
    assert scaled.keys() == {"weft-decode", "weft-prefill"}
    for name, spec in scaled.items():
        target = spec["scaleTargetRef"]
        workload = Workload(named(objects, target["kind"], target["name"]))
        (trigger,) = spec["triggers"]
        assert (trigger["type"], trigger["metricType"]) == ("external", "AverageValue")
        metadata: Mapping[str, str] = trigger["metadata"]
        host, _, port = metadata["scalerAddress"].partition(":")
        assert host == "weft-planner.weft.svc"
        assert int(port) == settings.port
        # KEDA puts the value of the workers' variable into the request.
        variable = metadata["modelFromEnv"]
        (entry,) = [one for one in workload.container["env"] if one["name"] == variable]
        key = entry["valueFrom"]["configMapKeyRef"]["key"]
        model = named(objects, "ConfigMap", "weft-mesh")["data"][key]
        sent = externalscaler_pb2.ScaledObjectRef(
            name=name, scalerMetadata={**metadata, "modelFromEnv": model}
        )
        assert trigger_of(sent) == (model, name.removeprefix("weft-"))
        access = named(objects, "TriggerAuthentication", trigger["authenticationRef"]["name"])
        parameters = {one["parameter"] for one in access["spec"]["secretTargetRef"]}
        assert parameters == {"caCert", "tlsClientCert", "tlsClientKey"}
        assert metadata["enableTLS"] == "true"
    planner = Workload(named(objects, "Deployment", "weft-planner"))
    (policy,) = [
        item["spec"]
        for item in of_kind(objects, "NetworkPolicy")
        if item["metadata"]["name"] == "weft-planner"
    ]
    assert selects(policy["podSelector"], planner.labels)
    (rule,) = policy["ingress"]
    assert [one["port"] for one in rule["ports"]] == [settings.port]


def test_autoscalers_read_the_planners_metric() -> None:
    objects = planned("scale-by-metric")
    model = named(objects, "ConfigMap", "weft-mesh")["data"]["model-name"]
    for role in ("decode", "prefill"):
        (metric,) = named(objects, "HorizontalPodAutoscaler", f"weft-{role}")["spec"]["metrics"]
        external = metric["external"]
        assert external["metric"] == {
            "name": "weft_desired_replicas",
            "selector": {"matchLabels": {"role": role, "model": model}},
        }
        # The number itself, however many there are.
        assert external["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_a_planner_that_acts_may_scale_its_workers_and_nothing_else() -> None:
    objects = planned("scale-by-planner")
    rules = named(objects, "Role", "weft-planner")["rules"]
    assert rules == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [
                one.name for one in reversed(planner_settings(objects).scale_targets)
            ],
            "verbs": ["get", "patch"],
        }
    ]
    pod = Workload(named(objects, "Deployment", "weft-planner")).pod
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (
        "weft-planner",
        True,
    )
    (subject,) = named(objects, "RoleBinding", "weft-planner")["subjects"]
    assert (subject["name"], subject["namespace"]) == ("weft-planner", "weft")
    for by in ("keda", "metric"):
        pod = Workload(named(planned(f"scale-by-{by}"), "Deployment", "weft-planner")).pod
        assert pod["automountServiceAccountToken"] is False


def test_targets_that_are_none_are_refused() -> None:
    target = ScaleTarget.parse("a:b=c:decode=statefulsets/weft-decode")
    assert target == ("a:b=c", "decode", "statefulsets", "weft-decode")
    for text in (
        "decode=statefulsets/x",
        "m:both=statefulsets/x",
        "m:decode=pods/x",
        "m:decode=deployments/",
        "m:decode=deployments/a/b",
        "m:decode=deployments/../x",
        "m:decode",
    ):
        with pytest.raises(ValueError, match=r"is not MODEL|is no name"):
            ScaleTarget.parse(text)


# Workers of several hosts.


def group(objects: tuple[Object, ...]) -> tuple[Object, list[Workload]]:
    """The LeaderWorkerSet, and its first host and another one as workloads."""
    item = named(objects, "LeaderWorkerSet", "weft-decode-hosts")
    templates = item["spec"]["leaderWorkerTemplate"]
    hosts = [templates["leaderTemplate"], templates["workerTemplate"]]
    return item, [
        Workload({"metadata": {"name": "weft-decode"}, "spec": {"template": one}}) for one in hosts
    ]


def as_started(template: Object, rank: int, size: int) -> Object:
    """A pod's template as LeaderWorkerSet and the kubelet would have it: with their variables."""
    container = template["spec"]["containers"][0]
    leader = "weft-decode-hosts-0.weft-decode-hosts.weft"
    own = {"LWS_LEADER_ADDRESS": leader, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(rank)}
    variables = [{"name": name, "value": value} for name, value in own.items()]
    for entry in container["env"]:
        place = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if place == "status.podIP":
            entry = {"name": entry["name"], "value": "10.1.2.3"}
        elif "value" in entry:
            value = entry["value"].replace("$(LWS_LEADER_ADDRESS)", leader)
            entry = {"name": entry["name"], "value": value}
        variables.append(entry)
    return {
        **template,
        "spec": {**template["spec"], "containers": [{**container, "env": variables}]},
    }


def test_hosts_know_their_number_and_where_the_first_one_is() -> None:
    objects = mesh("hosts")
    item, hosts = group(objects)
    size = item["spec"]["leaderWorkerTemplate"]["size"]
    settings = []
    for rank in range(size):
        template = hosts[min(rank, 1)].item["spec"]["template"]
        started = as_started(template, rank, size)
        workload = Workload({"metadata": {"name": "weft-decode"}, "spec": {"template": started}})
        made = load_settings(DecodeSettings, workload.flags(objects), {})
        config = made.engine_config("decode", made.worker_id)
        assert (config.hosts, config.host_rank, config.pp) == (size, rank, size)
        assert not config.moves_pages
        assert made.exposure == ""
        assert made.has_tls
        settings.append(made)
    first, *others = settings
    assert first.rendezvous == "10.1.2.3:29600"
    leader = "weft-decode-hosts-0.weft-decode-hosts.weft"
    assert {one.rendezvous for one in others} == {f"{leader}:29600"}
    assert first.advertise == f"{leader}:{first.port}"
    apart = {"host_rank", "rendezvous"}
    for other in others:
        assert other.model_dump(exclude=apart) == first.model_dump(exclude=apart)
    assert item["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_gateways_see_the_first_hosts() -> None:
    objects = mesh("hosts")
    item, (first, other) = group(objects)
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    service = named(objects, "Service", "weft-decode-leaders")["spec"]
    assert service["clusterIP"] == "None"
    assert item["metadata"]["name"] != "weft-decode-leaders", "LeaderWorkerSet makes that Service"
    selector = {"matchLabels": service["selector"]}
    assert selects(selector, {**first.labels, index: "0"})
    assert not selects(selector, {**other.labels, index: "1"})
    gateway = Workload(named(objects, "Deployment", "weft-gateway"))
    assert "--decode=weft-decode-leaders:grpc" in gateway.flags(objects)
    for port in service["ports"]:
        assert first.ports[port["targetPort"]] == port["port"]
    assert "livenessProbe" in first.container
    # Another host has no port that could be asked; it ends with the first one.
    assert not {"livenessProbe", "readinessProbe", "startupProbe", "ports"} & other.container.keys()


def test_other_hosts_stay_until_the_first_one_has_drained() -> None:
    objects = mesh("hosts")
    _, (first, other) = group(objects)
    flags = [one for one in first.container["args"] if one.startswith("--drain-grace-s=")]
    waits = [host.container["lifecycle"]["preStop"]["sleep"]["seconds"] for host in (first, other)]
    drain_s = waits[0] + float(flags[0].partition("=")[2])
    assert waits[1] >= drain_s
    for host, wait in zip((first, other), (drain_s, waits[1]), strict=True):
        assert host.pod["terminationGracePeriodSeconds"] >= wait + 5
    budget = named(objects, "PodDisruptionBudget", "weft-decode-hosts")["spec"]
    assert all(selects(budget["selector"], host.labels) for host in (first, other))


def test_hosts_reach_one_another_and_nobody_else() -> None:
    objects = mesh("hosts")
    _, (first, other) = group(objects)
    policies = [
        item["spec"]
        for item in of_kind(objects, "NetworkPolicy")
        if selects(item["spec"]["podSelector"], first.labels)
        and item["metadata"]["name"] != "weft-default"
    ]
    assert len(policies) == 1
    assert selects(policies[0]["podSelector"], other.labels)

    def reached(
        rules: Sequence[Mapping[str, Any]], side: str, labels: Mapping[str, str]
    ) -> set[int]:
        return {
            port["port"]
            for rule in rules
            if any(selects(peer.get("podSelector"), labels) for peer in rule[side])
            for port in rule["ports"]
        }

    between = {29600, 32768}
    assert reached(policies[0]["ingress"], "from", other.labels) == between
    assert reached(policies[0]["egress"], "to", other.labels) == between
    gateway = Workload(named(objects, "Deployment", "weft-gateway"))
    assert reached(policies[0]["ingress"], "from", gateway.labels) == {50052}
    assert reached(policies[0]["egress"], "to", gateway.labels) == set()
    for workload in workloads(objects):
        if workload.name == "weft-gateway":
            continue
        assert reached(policies[0]["ingress"], "from", workload.labels) == set()


# A pool for gateways with the inference extension.


def test_the_pools_endpoints_are_the_edges() -> None:
    objects = mesh("inference-pool")
    rest = Workload(named(objects, "Deployment", "weft-rest"))
    pool = named(objects, "InferencePool", "weft")["spec"]
    assert selects(pool["selector"], rest.labels)
    assert [one["number"] for one in pool["targetPorts"]] == [rest.ports["https"]]
    picker = pool["endpointPickerRef"]
    service = named(objects, "Service", picker["name"])["spec"]
    assert selects({"matchLabels": service["selector"]}, rest.labels)
    (port,) = service["ports"]
    assert port["port"] == picker["port"]["number"]
    flags = dict(flag[2:].split("=", 1) for flag in rest.flags(objects))
    assert flags["picker-listen"] == f"0.0.0.0:{rest.ports[port['targetPort']]}"
    # A name with all edges' addresses, as the pool has them.
    host, _, number = flags["picker-endpoints"].partition(":")
    edges = named(objects, "Service", host)["spec"]
    assert edges["clusterIP"] == "None"
    assert selects({"matchLabels": edges["selector"]}, rest.labels)
    assert int(number) == rest.ports["https"]
    (policy,) = [
        item["spec"]
        for item in of_kind(objects, "NetworkPolicy")
        if item["metadata"]["name"] == "weft-rest"
    ]
    incoming = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert incoming == {rest.ports["https"], rest.ports["picker"]}
    assert rest.ports["https"] in {
        port["port"]
        for rule in policy["egress"]
        if any(selects(peer["podSelector"], rest.labels) for peer in rule["to"])
        for port in rule["ports"]
    }


def test_an_edge_that_picks_knows_its_flags(rest_binary: Path) -> None:
    """Wrong flags end it with status 2; here it gets as far as the certificate, which is away."""
    objects = mesh("inference-pool")
    flags = Workload(named(objects, "Deployment", "weft-rest")).flags(objects)
    done = subprocess.run(
        [str(rest_binary), *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "/etc/weft/tls/tls.crt" in done.stderr


def test_edges_of_a_plain_pool_serve_http_and_are_asked_so(rest_binary: Path) -> None:
    objects = mesh("inference-pool", "inference-pool-http")
    item = named(objects, "Deployment", "weft-rest")
    (container,) = item["spec"]["template"]["spec"]["containers"]
    flags = Workload(item).flags(objects)
    assert "--insecure" in flags
    assert not [flag for flag in flags if flag.startswith("--https")]
    # The calls to gateways keep their certificates.
    assert {"--tls-cert=/etc/weft/tls/tls.crt", "--tls-key=/etc/weft/tls/tls.key"} <= set(flags)
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness")]
    assert [probe["scheme"] for probe in probes] == ["HTTP", "HTTP"]
    for name in ("weft-rest", "weft-rest-edges"):
        (port,) = named(objects, "Service", name)["spec"]["ports"]
        assert port["appProtocol"] == "http"
    done = subprocess.run(
        [str(rest_binary), *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "/etc/weft/tls/" in done.stderr
