"""The Helm chart: what kustomize renders, with values for what users change."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from weft.testing.k8s.manifests import (
    K8S,
    ROOT,
    Object,
    Workload,
    kustomize,
    named,
    of_kind,
    render,
    render_folder,
    workloads,
)

sys.path.insert(0, str(ROOT / "scripts"))
import gen_helm_chart as chart

HELM = K8S / "tools" / "bin" / "helm"
NAMESPACE = "weft"
RELEASE = ("--kube-version", "1.36.0")

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(900)]


def test_the_chart_is_what_its_script_writes() -> None:
    texts = chart.files(kustomize())
    there = {str(path.relative_to(chart.CHART)) for path in chart.CHART.rglob("*.*")}
    assert there == set(texts), "run scripts/gen_helm_chart.py"
    for name, text in texts.items():
        assert (chart.CHART / name).read_text() == text, f"{name}: run scripts/gen_helm_chart.py"


def helm(*arguments: str | Path) -> str:
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def template(folder: Path, values: Mapping[str, Any], *more: Path) -> tuple[Object, ...]:
    """Objects of a release with some values, with their namespace as an overlay writes it."""
    own = folder / "values.json"
    own.write_text(json.dumps(values))
    files = [one for path in (*more, own) for one in ("-f", path)]
    text = helm("template", "any", chart.CHART, *RELEASE, "--namespace", NAMESPACE, *files)
    objects = [item for item in yaml.load_all(text, yaml.CSafeLoader) if item is not None]
    for item in objects:
        item["metadata"].setdefault("namespace", NAMESPACE)
    return tuple(objects)


def by_identity(objects: Sequence[Object]) -> dict[tuple[str, str], Object]:
    found = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    assert len(found) == len(objects)
    return found


def of_variant(folder: Path, variant: chart.Variant) -> tuple[Object, ...]:
    chart.overlay(folder, chart.components(variant), NAMESPACE)
    return render_folder(folder)


@pytest.mark.needs("helm")
def test_the_default_values_are_the_base(tmp_path: Path) -> None:
    expected = by_identity(of_variant(tmp_path, chart.variants()[0]))
    assert by_identity(template(tmp_path, {})) == expected
    assert len(expected) > 15


@pytest.mark.needs("helm")
def test_each_value_that_switches_is_its_component(tmp_path: Path) -> None:
    """Also some of three and more, which the script has not looked at."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    drawn = [tuple(draw.choice(choice.options) for choice in chart.CHOICES) for _ in range(8)]
    drawn.append(tuple(choice.options[-1] for choice in chart.CHOICES))
    for variant in {*chart.variants(), *map(chart.valid, drawn)}:
        expected = by_identity(of_variant(tmp_path, variant))
        assert by_identity(template(tmp_path, chart.values_of(variant))) == expected, variant


@pytest.mark.needs("helm")
def test_values_for_gpus_are_the_overlay_for_gpus(tmp_path: Path) -> None:
    made = by_identity(template(tmp_path, {}, chart.CHART / "values-gpu.yaml"))
    expected = by_identity(render("gpu"))
    # The overlay brings a namespace and a claim, which are not a release's.
    apart = {("Namespace", "weft"), ("PersistentVolumeClaim", "weft-models")}
    assert made == {name: item for name, item in expected.items() if name not in apart}


@pytest.mark.needs("helm")
def test_values_are_what_users_expect(tmp_path: Path) -> None:
    resources = {"limits": {"memory": "11Gi", "example.org/card": 2}, "requests": {"cpu": "7"}}
    toleration = {"key": "example.org/card", "operator": "Exists"}
    objects = template(
        tmp_path,
        {
            "images": {"registry": "r.example.org/x/", "tag": "1.2", "pullSecrets": [{"name": "s"}]}
            | {"rest": "elsewhere.example.org/edge@sha256:" + "0" * 64},
            "model": {"dir": "/models/big", "name": "big:one", "claim": "shelf"},
            "decode": {
                "replicas": {"min": 3, "max": 5},
                "resources": resources,
                "extraArgs": ["--kv-dtype=int8"],
                "extraEnv": [{"name": "A", "value": "b"}],
                "tolerations": [toleration],
                "nodeSelector": {"card": "yes"},
            },
            "rest": {"replicas": 4},
        },
    )
    by_service = {workload.service: workload for workload in workloads(objects)}
    images = {name: one.container["image"] for name, one in by_service.items()}
    assert images == {
        "decode": "r.example.org/x/weft-worker:1.2",
        "gateway": "r.example.org/x/weft-gateway:1.2",
        "rest": "elsewhere.example.org/edge@sha256:" + "0" * 64,
    }
    decode, gateway = by_service["decode"], by_service["gateway"]
    assert {"--model-name=big:one", "--kv-dtype=int8"} <= set(decode.flags(objects))
    assert "--model-dir=/models/big" in gateway.flags(objects)
    assert decode.container["resources"] == resources
    assert decode.container["env"][-1] == {"name": "A", "value": "b"}
    assert decode.pod["tolerations"] == [toleration]
    assert decode.pod["nodeSelector"] == {"card": "yes"}
    assert "nodeSelector" not in gateway.pod
    for workload in by_service.values():
        assert workload.pod["imagePullSecrets"] == [{"name": "s"}]
    for workload in (decode, gateway):
        (models,) = [one for one in workload.pod["volumes"] if one["name"] == "models"]
        assert models["persistentVolumeClaim"]["claimName"] == "shelf"
    autoscaler = named(objects, "HorizontalPodAutoscaler", "weft-decode")["spec"]
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (3, 5)
    assert Workload(named(objects, "Deployment", "weft-rest")).item["spec"]["replicas"] == 4


@pytest.mark.needs("helm")
def test_a_planner_keeps_the_bounds_of_the_values(tmp_path: Path) -> None:
    values = {
        "disaggregated": {"enabled": True},
        "scaling": {"by": "keda"},
        "prefill": {"replicas": {"min": 1, "max": 3}},
        "decode": {"replicas": {"min": 4, "max": 9}},
        "model": {"name": "big"},
    }
    objects = template(tmp_path, values)
    planner = Workload(named(objects, "Deployment", "weft-planner"))
    flags = planner.flags(objects)
    assert {"--least-prefill=1", "--least-decode=4", "--budget=12"} <= set(flags)
    decode = named(objects, "ScaledObject", "weft-decode")["spec"]
    assert (decode["minReplicaCount"], decode["maxReplicaCount"]) == (4, 9)
    objects = template(tmp_path, {**values, "scaling": {"by": "metric"}})
    (metric,) = named(objects, "HorizontalPodAutoscaler", "weft-prefill")["spec"]["metrics"]
    assert metric["external"]["metric"]["selector"]["matchLabels"]["model"] == "big"
    text = helm(
        "template", "any", chart.CHART, *RELEASE, "--namespace", "elsewhere",
        "-f", tmp_path / "values.json", "--set", "scaling.by=keda",
    )  # fmt: skip
    assert "weft-planner.elsewhere.svc:50061" in text
    assert "weft-planner.weft" not in text


@pytest.mark.needs("helm")
def test_names_that_the_chart_has_not_are_refused(tmp_path: Path) -> None:
    for values, name in (
        ({"decode": {"replica": 3}}, "replica"),
        ({"kvstore": {"replicas": 2}}, "replicas"),
        ({"disaggregated": {"enabled": "yes"}}, "enabled"),
        ({"scaling": {"by": "hope"}}, "scaling"),
        ({"scaling": {"by": "keda"}}, "a planner needs disaggregated.enabled"),
        (
            {
                "scaling": {"by": "planner"},
                "disaggregated": {"enabled": True},
                "hosts": {"enabled": True},
            },
            "a planner would take workers of several hosts",
        ),
    ):
        (tmp_path / "values.json").write_text(json.dumps(values))
        command = [HELM, "template", "any", chart.CHART, *RELEASE, "-f", tmp_path / "values.json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode != 0
        assert name in done.stderr


@pytest.mark.needs("helm")
def test_helm_finds_nothing_to_say() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", chart.CHART)


@pytest.mark.needs("helm")
def test_releases_live_in_their_namespace(tmp_path: Path) -> None:
    text = helm("template", "any", chart.CHART, *RELEASE, "--namespace", "elsewhere")
    objects = tuple(item for item in yaml.load_all(text, yaml.CSafeLoader) if item)
    bindings = list(of_kind(objects, "RoleBinding"))
    assert bindings
    for item in bindings:
        assert [one["namespace"] for one in item["subjects"]] == ["elsewhere"]
    assert chart.NAMESPACE not in text
