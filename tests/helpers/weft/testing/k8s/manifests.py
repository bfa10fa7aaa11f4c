"""Renders k8s/ with kustomize, and looks up objects."""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[5]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
WORKLOADS = ("Deployment", "StatefulSet")

sys.path.insert(0, str(ROOT / "scripts"))
from go_toolchain import build_tool, find_go  # noqa: E402

Object = dict[str, Any]


@functools.cache
def kustomize() -> Path:
    """The program; it is there until the tests are over."""
    go = find_go()
    assert go is not None
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return build_tool(go, K8S / "tools" / "kustomize", "kustomize", Path(folder.name))


@functools.cache
def render(overlay: str) -> tuple[Object, ...]:
    """Renders all objects of an overlay."""
    return render_folder(K8S / "overlays" / overlay)


def render_folder(folder: Path) -> tuple[Object, ...]:
    """Renders all objects of a folder with a kustomization."""
    done = subprocess.run(
        [kustomize(), "build", str(folder)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Object, ...], *kinds: str) -> Iterator[Object]:
    """The objects of some kinds."""
    return (item for item in objects if item["kind"] in kinds)


def named(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    """The object of a kind and name."""
    (found,) = (item for item in of_kind(objects, kind) if item["metadata"]["name"] == name)
    return found


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet whose pods have one container."""

    item: Object

    @property
    def name(self) -> str:
        return str(self.item["metadata"]["name"])

    @property
    def service(self) -> str:
        """Name of the service as on the command line: gateway, decode..."""
        return self.name.removeprefix("weft-")

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.item["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def pod(self) -> Object:
        pod: Object = self.item["spec"]["template"]["spec"]
        return pod

    @property
    def container(self) -> Object:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def flags(self, objects: tuple[Object, ...]) -> list[str]:
        """Arguments with their variables put in, without the name of the service."""
        values = {}
        for variable in self.container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "configMapKeyRef" in source:
                reference = source["configMapKeyRef"]
                data = named(objects, "ConfigMap", reference["name"])["data"]
                values[variable["name"]] = data[reference["key"]]
            elif "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == "metadata.name"
                values[variable["name"]] = f"{self.name}-0"
            else:
                values[variable["name"]] = variable["value"]
        flags = []
        for argument in self.container["args"]:
            for name, value in values.items():
                argument = argument.replace(f"$({name})", value)
            assert "$(" not in argument, argument
            if argument.startswith("--"):
                flags.append(argument)
        return flags


def workloads(objects: tuple[Object, ...]) -> list[Workload]:
    """All workloads."""
    return [Workload(item) for item in of_kind(objects, *WORKLOADS)]


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector fits; an empty one fits everything."""
    selector = selector or {}
    wanted = selector.get("matchLabels", {})
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(rule["key"]) in rule["values"] for rule in rules
    )
