"""Writes the Helm chart k8s/chart from what kustomize renders of k8s/base and k8s/components.

The base is rendered with each component and with each two of them. Where the results differ, a
template asks for the component; where values.yaml has a setting, a template takes it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml
from go_toolchain import build_tool, find_go

ROOT = Path(__file__).resolve().parent.parent
K8S = ROOT / "k8s"
CHART = K8S / "chart"
NAMESPACE = "weft-release-namespace"
"""Stands for the namespace of a release."""
IN_NAMESPACE = "weft-planner.weft.svc"
"""A name in the manifests that has the namespace in it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that switches components."""

    value: str
    """Its path in values.yaml."""
    components: Mapping[bool | str, tuple[str, ...]]
    """By what the value may be, the default first."""
    help: str

    @property
    def options(self) -> tuple[bool | str, ...]:
        return tuple(self.components)


def _switch(component: str, text: str) -> Choice:
    return Choice(f"{component}.enabled", {False: (), True: (component,)}, text)


CHOICES = (
    _switch("disaggregated", "Prefill workers and a KV store."),
    _switch("adapters", "A volume for LoRA adapters, which gateways write and workers read."),
    _switch("embeddings", "Workers with an embedder, a reranker or a classifier."),
    _switch("vision", "Room for images, and the way to hosts from which gateways fetch them."),
    _switch(
        "hosts",
        "Decode workers of several hosts, beside the others: `replicas` workers of `size` hosts. "
        "They need LeaderWorkerSet.",
    ),
    Choice(
        "inferencePool.enabled",
        {False: (), True: ("inference-pool",)},
        "An InferencePool of the REST edges, for gateways with the Gateway API's inference "
        "extension.",
    ),
    Choice(
        "inferencePool.plainHttp",
        {False: (), True: ("inference-pool-http",)},
        "REST edges serve HTTP without TLS, as most such gateways speak to the pods of a pool.",
    ),
    Choice(
        "scaling.by",
        {
            "load": (),
            "advice": ("planner",),
            "keda": ("planner", "scale-by-keda"),
            "metric": ("planner", "scale-by-metric"),
            "planner": ("planner", "scale-by-planner"),
        },
        "What the numbers of workers follow: load = of the workers; keda, metric = a planner that "
        "KEDA asks or whose metric is read; planner = it sets them itself; advice = load, and a "
        "planner that only tells. A planner needs `disaggregated`, and scales no workers beside "
        "those of `hosts`.",
    ),
)
"""In the order in which an overlay lists the components."""

Variant = tuple[bool | str, ...]
"""What each choice is."""


def variants() -> list[Variant]:
    """The defaults, and each combination of one or two other choices."""
    found = [tuple(choice.options[0] for choice in CHOICES)]
    others = [[(at, one) for one in choice.options[1:]] for at, choice in enumerate(CHOICES)]
    for number in (1, 2):
        for some in itertools.combinations(others, number):
            for changes in itertools.product(*some):
                variant = list(found[0])
                for at, one in changes:
                    variant[at] = one
                found.append(valid(tuple(variant)))
    return list(dict.fromkeys(found))


def valid(variant: Variant) -> Variant:
    """The variant with what its choices need, and without what they exclude."""
    chosen = {choice.value: one for choice, one in zip(CHOICES, variant, strict=True)}
    if chosen["scaling.by"] != "load":
        chosen["disaggregated.enabled"] = True
    if chosen["inferencePool.plainHttp"]:
        chosen["inferencePool.enabled"] = True
    if chosen["scaling.by"] not in ("load", "advice"):
        chosen["hosts.enabled"] = False
    return tuple(chosen.values())


def components(variant: Variant) -> list[str]:
    """The components of a variant, in order."""
    chosen = (choice.components[one] for choice, one in zip(CHOICES, variant, strict=True))
    return list(itertools.chain.from_iterable(chosen))


def values_of(variant: Variant) -> dict[str, Any]:
    """The values that make a variant."""
    values: dict[str, Any] = {}
    for choice, one in zip(CHOICES, variant, strict=True):
        _put(values, choice.value, one)
    return values


def overlay(folder: Path, names: Sequence[str], namespace: str) -> None:
    """Writes a kustomization of the base with some components into a folder."""
    base, parts = (os.path.relpath(K8S / name, folder) for name in ("base", "components"))
    (folder / "kustomization.yaml").write_text(
        json.dumps(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "namespace": namespace,
                "resources": [base],
                "components": [f"{parts}/{name}" for name in names],
            }
        )
    )


def _render(kustomize: Path, variant: Variant) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        overlay(Path(folder), components(variant), NAMESPACE)
        return _objects(kustomize, Path(folder))


def _objects(kustomize: Path, folder: Path) -> dict[str, Any]:
    """Objects by kind and name, without their namespace."""
    done = subprocess.run(
        [kustomize, "build", str(folder)], capture_output=True, text=True, timeout=120
    )
    if done.returncode != 0:
        raise RuntimeError(f"kustomize cannot build {folder}:\n{done.stderr}")
    items = [_object(text) for text in done.stdout.split("\n---\n")]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in items}


@functools.cache
def _object(text: str) -> dict[str, Any]:
    """Most objects are the same in most variants, and are read once."""
    item: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)
    item["metadata"].pop("namespace", None)
    return item


# What several variants have in common, and what they have not.

Guard = tuple[str, ...]
"""Conditions that must all hold."""


@dataclass(slots=True)
class Leaf:
    """A value, or several by condition."""

    texts: list[tuple[Guard, str]]


@dataclass(slots=True)
class Node:
    """A mapping, whose entries have a key, or a sequence, whose entries have none."""

    entries: list[tuple[Guard, str | None, Node | Leaf]]

    def __getitem__(self, key: str) -> Node:
        found = self.find(key)
        assert isinstance(found, Node), f"{key} is no mapping or sequence"
        return found

    def find(self, key: str) -> Node | Leaf | None:
        return next((child for _, name, child in self.entries if name == key), None)

    def set(self, key: str, template: str) -> None:
        """Replaces a value, or adds it, by a template on its line."""
        found = self.find(key)
        if found is None:
            self.entries.append(((), key, Leaf([((), template)])))
        else:
            assert isinstance(found, Leaf), f"{key} is no plain value"
            found.texts = [((), template)]


def _merge(found: Mapping[Variant, Any]) -> Node | Leaf:
    first = next(iter(found.values()))
    if all(isinstance(one, dict) for one in found.values()):
        return _merge_entries(found, lambda one: one.items(), has_keys=True)
    if all(isinstance(one, list) for one in found.values()) and any(found.values()):
        return _merge_entries(found, lambda one: zip(_identities(one), one, strict=True))
    different = {json.dumps(one): one for one in found.values()}
    if len(different) == 1:
        return Leaf([((), _scalar(first))])
    texts = []
    for text, one in different.items():
        there = {variant for variant, value in found.items() if json.dumps(value) == text}
        texts.append((_guard(set(found), there), _scalar(one)))
    return Leaf(texts)


def _merge_entries(
    found: Mapping[Variant, Any],
    entries: Callable[[Any], Iterable[tuple[str, Any]]],
    has_keys: bool = False,
) -> Node:
    by_key: dict[str, dict[Variant, Any]] = {}
    order: TopologicalSorter[str] = TopologicalSorter()
    for variant, value in found.items():
        before = None
        for key, one in entries(value):
            by_key.setdefault(key, {})[variant] = one
            order.add(key, *([] if before is None else [before]))
            before = None if has_keys else key
    keys = list(by_key) if has_keys else list(order.static_order())
    node = Node([])
    for key in keys:
        guard = _guard(set(found), set(by_key[key]))
        node.entries.append((guard, key if has_keys else None, _merge(by_key[key])))
    return node


def _identities(items: Sequence[Any]) -> Iterator[str]:
    """What makes an item of a list the same one in several variants."""
    seen: dict[str, int] = {}
    for item in items:
        named = isinstance(item, dict) and "name" in item
        text = f"name {item['name']}" if named else json.dumps(item)
        seen[text] = seen.get(text, 0) + 1
        yield f"{text} {seen[text]}"


def _guard(all_of: set[Variant], there: set[Variant]) -> Guard:
    """The fewest conditions that hold for some variants of all and for no others."""
    conditions: dict[str, Callable[[Variant], bool]] = {}
    for at, choice in enumerate(CHOICES):
        name = f".Values.{choice.value}"
        if choice.options == (False, True):
            conditions[name] = lambda variant, at=at: bool(variant[at])  # type: ignore[misc]
            conditions[f"not {name}"] = lambda variant, at=at: not variant[at]  # type: ignore[misc]
            continue
        for one in choice.options:
            quoted = json.dumps(one)
            conditions[f"eq {name} {quoted}"] = lambda v, at=at, one=one: v[at] == one  # type: ignore[misc]
            conditions[f"ne {name} {quoted}"] = lambda v, at=at, one=one: v[at] != one  # type: ignore[misc]
    for number in range(4):
        for chosen in itertools.combinations(conditions, number):
            if {v for v in all_of if all(conditions[one](v) for one in chosen)} == there:
                return chosen
    raise RuntimeError(f"no condition of components tells {sorted(map(str, there))} from others")


def _scalar(value: Any) -> str:
    if isinstance(value, str) and NAMESPACE in value:
        return _template(".Release.Namespace")
    if isinstance(value, str) and value.startswith(IN_NAMESPACE):
        rest = value.removeprefix(IN_NAMESPACE)
        return _template(f'printf "weft-planner.%s.svc{rest}" .Release.Namespace | quote')
    text = json.dumps(value)
    return text if "{{" not in text else _template(f"`{text}`")


def _template(expression: str) -> str:
    return f"{{{{ {expression} }}}}"


# Values.


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values.setdefault(name, {})
    values[last] = value


MESH = {
    "model-dir": "model.dir",
    "model-name": "model.name",
    "embed-model-dir": "embeddings.model.dir",
    "embed-model-name": "embeddings.model.name",
    "embed-task": "embeddings.model.task",
}
"""Keys of the ConfigMap that are values."""
CLAIMS = {"weft-models": "model.claim", "weft-adapters": "adapters.claim"}
SERVICES = {"weft-decode-hosts": "hosts"}
"""Objects whose values are not called as they are."""
LEADERS = "leaderWorkerTemplate"
BOUNDS = {
    "HorizontalPodAutoscaler": ("minReplicas", "maxReplicas"),
    "ScaledObject": ("minReplicaCount", "maxReplicaCount"),
}
PLANNED = {
    "--least-prefill": ".Values.prefill.replicas.min",
    "--least-decode": ".Values.decode.replicas.min",
    "--budget": "add .Values.prefill.replicas.max .Values.decode.replicas.max",
}
"""Flags of the planner that the bounds of autoscalers make."""
POD = ("nodeSelector", "tolerations", "affinity")
"""What pods of a service may have besides."""


class _Values:
    """Puts values into merged objects, and collects their defaults from what was rendered."""

    def __init__(self, rendered: Sequence[Mapping[str, Any]]) -> None:
        self.defaults: dict[str, Any] = {}
        for choice in CHOICES:
            _put(self.defaults, choice.value, choice.options[0])
        self._rendered = rendered
        self._images: set[str] = set()

    def _default(self, path: str, kind: str, *steps: str | int) -> None:
        """Takes the default of a value from the first variant that has it."""
        for objects in self._rendered:
            found: Any = objects.get(kind)
            for step in steps:
                if isinstance(found, dict):
                    found = found.get(str(step))
                elif isinstance(found, list) and isinstance(step, int):
                    found = found[step] if step < len(found) else None
            if found is not None:
                _put(self.defaults, path, found)
                return
        raise RuntimeError(f"no variant has {kind} {steps}")

    def put(self, name: str, item: Node) -> None:
        kind, _, own = name.partition("/")
        service = SERVICES.get(own, own.removeprefix("weft-"))
        if kind in ("Deployment", "StatefulSet"):
            self._put_workload(name, service, item["spec"])
        elif kind == "LeaderWorkerSet":
            self._put_groups(name, service, item["spec"])
        elif kind in BOUNDS:
            for bound, short in zip(BOUNDS[kind], ("min", "max"), strict=True):
                path = f"{service}.replicas.{short}"
                self._default(path, name, "spec", bound)
                item["spec"].set(bound, _template(f".Values.{path}"))
            self._put_model(item["spec"])
        elif name == "ConfigMap/weft-mesh":
            for key, path in MESH.items():
                if item["data"].find(key) is not None:
                    self._default(path, name, "data", key)
                    item["data"].set(key, _template(f".Values.{path} | quote"))

    def _put_workload(self, name: str, service: str, spec: Node) -> None:
        # Of a StatefulSet, whose pods others know by name, the manifests alone have the number.
        if name.startswith("Deployment/") and spec.find("replicas") is not None:
            self._default(f"{service}.replicas", name, "spec", "replicas")
            spec.set("replicas", _template(f".Values.{service}.replicas"))
        self._put_pod(service, spec["template"]["spec"])

    def _put_groups(self, name: str, service: str, spec: Node) -> None:
        groups = spec["leaderWorkerTemplate"]
        for node, key, steps in ((spec, "replicas", ()), (groups, "size", (LEADERS,))):
            self._default(f"{service}.{key}", name, "spec", *steps, key)
            node.set(key, _template(f".Values.{service}.{key}"))
        for pods in ("leaderTemplate", "workerTemplate"):
            self._put_pod(service, groups[pods]["spec"])

    def _put_model(self, spec: Node) -> None:
        """The model in the selector of an external metric."""
        metrics = spec.find("metrics")
        for _, _, metric in metrics.entries if isinstance(metrics, Node) else ():
            external = metric.find("external") if isinstance(metric, Node) else None
            if isinstance(external, Node):
                labels = external["metric"]["selector"]["matchLabels"]
                labels.set("model", _template(".Values.model.name | quote"))

    def _put_bounds(self, container: Node) -> None:
        """The planner's bounds are those of the autoscalers."""
        for _, _, argument in container["args"].entries:
            assert isinstance(argument, Leaf)
            flag = json.loads(argument.texts[0][1]).partition("=")[0]
            if flag in PLANNED:
                template = f'printf "{flag}=%v" ({PLANNED[flag]}) | quote'
                argument.texts = [((), _template(template))]

    def _put_pod(self, service: str, pod: Node) -> None:
        values = f".Values.{service}"
        for _, _, container in pod["containers"].entries:
            assert isinstance(container, Node)
            image = container.find("image")
            assert isinstance(image, Leaf)
            short = json.loads(image.texts[0][1]).removeprefix("weft-")
            self._images.add(short)
            expression = f'include "weft.image" (dict "images" .Values.images "name" "{short}")'
            container.set("image", _template(f"{expression} | quote"))
            if service == "planner":
                self._put_bounds(container)
            self._more(container, "args", f"{values}.extraArgs")
            self._more(container, "env", f"{values}.extraEnv")
            self._instead(container, "resources", f"{values}.resources")
        for key in ("extraArgs", "extraEnv", "tolerations"):
            _put(self.defaults, f"{service}.{key}", [])
        for key in ("resources", "nodeSelector", "affinity"):
            _put(self.defaults, f"{service}.{key}", {})
        for key in POD:
            self._optional(pod, key, f"{values}.{key}")
        self._optional(pod, "imagePullSecrets", ".Values.images.pullSecrets")
        for _, _, volume in pod["volumes"].entries:
            assert isinstance(volume, Node)
            claim = volume.find("persistentVolumeClaim")
            if isinstance(claim, Node):
                leaf = claim.find("claimName")
                assert isinstance(leaf, Leaf)
                path = CLAIMS[default := json.loads(leaf.texts[0][1])]
                _put(self.defaults, path, default)
                claim.set("claimName", _template(f".Values.{path} | quote"))

    def _more(self, node: Node, key: str, value: str) -> None:
        """Adds what a value lists to a list."""
        if node.find(key) is None:
            return self._optional(node, key, value)
        at = _lines(f"{{{{- with {value} }}}}", "{{ toYaml . | indent @ }}", "{{- end }}")
        node[key].entries.append(((), None, Leaf([((), at)])))

    def _optional(self, node: Node, key: str, value: str) -> None:
        at = _lines(
            f"{{{{- with {value} }}}}", f"@{key}:", "{{ toYaml . | indent @+ }}", "{{- end }}"
        )
        node.entries.append(((), None, Leaf([((), at)])))

    def _instead(self, node: Node, key: str, value: str) -> None:
        """Takes a value that is not empty, else what is there."""
        index = next(at for at, one in enumerate(node.entries) if one[1] == key)
        guard, _, child = node.entries[index]
        assert not guard
        assert isinstance(child, Node)
        head = _lines(f"@{key}:", f"{{{{- with {value} }}}}", "{{ toYaml . | indent @+ }}")
        child.entries.insert(0, ((), None, Leaf([((), _lines("{{- else }}"))])))
        child.entries.append(((), None, Leaf([((), _lines("{{- end }}"))])))
        node.entries[index] = ((), None, Leaf([((), head)]))
        node.entries.insert(index + 1, ((), "", child))

    def finish(self) -> dict[str, Any]:
        images: dict[str, Any] = {"registry": "", "tag": "", "pullSecrets": []}
        images |= dict.fromkeys(sorted(self._images), "")
        self.defaults["images"] = images
        return self.defaults


_LINES = "\n"


def _lines(*lines: str) -> str:
    """Lines of a template; @ is the number of their indentation, or that indentation at a start."""
    return _LINES + _LINES.join(lines)


# Text.


def _emit(node: Node | Leaf, indent: int) -> Iterator[str]:
    assert isinstance(node, Node), "a plain value has no lines of its own"
    for guard, entries in itertools.groupby(node.entries, key=lambda entry: entry[0]):
        if guard:
            yield _if(guard)
        for _, key, child in entries:
            yield from _emit_entry(key, child, indent)
        if guard:
            yield "{{- end }}"


def _emit_entry(key: str | None, child: Node | Leaf, indent: int) -> Iterator[str]:
    pad = " " * indent
    head = f"{pad}-" if key is None else f"{pad}{key}:"
    if isinstance(child, Leaf) and child.texts[0][1].startswith(_LINES):
        for line in child.texts[0][1].removeprefix(_LINES).split(_LINES):
            if line.startswith("@"):
                yield pad + line[1:]
            else:
                yield line.replace("@+", str(indent + 2)).replace("@", str(indent))
        return
    if isinstance(child, Leaf):
        if len(child.texts) == 1:
            yield f"{head} {child.texts[0][1]}"
            return
        word = "if"
        for guard, text in child.texts:
            yield _if(guard, word)
            yield f"{head} {text}"
            word = "else if"
        yield "{{- end }}"
        return
    if key == "":
        yield from _emit(child, indent + 2)
        return
    if not child.entries:
        yield f"{head} {{}}"
        return
    lines = list(_emit(child, indent + 2))
    is_plain = lines[0].startswith(" " * (indent + 2)) and not lines[0].lstrip().startswith("{{-")
    if key is None and is_plain:
        yield f"{head} {lines[0][indent + 2 :]}"
        yield from lines[1:]
    else:
        yield head
        yield from lines


def _if(guard: Guard, word: str = "if") -> str:
    conditions = guard[0] if len(guard) == 1 else f"and {' '.join(f'({one})' for one in guard)}"
    return f"{{{{- {word} {conditions} }}}}"


HELPERS = """{{- /* Generated by scripts/gen_helm_chart.py. */ -}}
{{- define "weft.image" -}}
{{- with index .images .name -}}
{{ . }}
{{- else -}}
{{ .images.registry }}weft-{{ .name }}{{ with .images.tag }}:{{ . }}{{ end }}
{{- end -}}
{{- end -}}
"""
NEEDS = """{{- /* Generated by scripts/gen_helm_chart.py. */ -}}
{{- if and (ne .Values.scaling.by "load") (not .Values.disaggregated.enabled) }}
{{- fail "scaling.by: a planner needs disaggregated.enabled" }}
{{- end }}
{{- if and .Values.inferencePool.plainHttp (not .Values.inferencePool.enabled) }}
{{- fail "inferencePool.plainHttp: only the edges of a pool serve without TLS; enable the pool" }}
{{- end }}
{{- if and .Values.hosts.enabled (not (has .Values.scaling.by (list "load" "advice"))) }}
{{- fail "hosts.enabled: a planner would take workers of several hosts for those that it scales" }}
{{- end }}
"""
CHART_FILE = """# Generated by scripts/gen_helm_chart.py.
apiVersion: v2
name: weft
description: A mesh that serves language models
type: application
version: {version}
appVersion: {version}
kubeVersion: ">=1.30.0-0"
"""
GPU_WORDS = """# Generated by scripts/gen_helm_chart.py from k8s/overlays/gpu: a GPU a worker.
# `images.registry` is a placeholder.
"""
WORDS = {
    "images": "An image is `registry`weft-NAME:`tag`, or what its name here says. `registry` ends "
    "in a slash.",
    "model": "A model's directory in the volume of the claim, and the name under which it is "
    "served.",
    "service": "`extraArgs` are flags; empty `resources` mean those of the manifests:",
}


def _values_text(defaults: Mapping[str, Any], rendered: Sequence[Mapping[str, Any]]) -> str:
    lines = ["# Generated by scripts/gen_helm_chart.py from k8s/base and k8s/components."]
    help_of: dict[str, str] = {}
    for choice in CHOICES:
        name, _, last = choice.value.partition(".")
        first = help_of.get(name)
        help_of[name] = choice.help if first is None else f"{first} `{last}`: {choice.help}"
    order = [name for name in ("images", "model") if name in defaults]
    order += [name for name in help_of if name in defaults]
    order += sorted(set(defaults) - set(order))
    for name in order:
        value = defaults[name]
        lines.append("")
        if name in help_of:
            lines += _comment(help_of[name])
        elif name in WORDS:
            lines += _comment(WORDS[name])
        if isinstance(value, dict) and "resources" in value:
            lines.append(f"# {WORDS['service']}")
            lines.append(f"# {json.dumps(_resources(name, rendered))}")
        text = yaml.dump({name: value}, Dumper=yaml.CSafeDumper, sort_keys=False, width=100)
        lines += text.rstrip().split("\n")
    return "\n".join(lines) + "\n"


def gpu_values(kustomize: Path) -> dict[str, Any]:
    """Values by which the chart makes the workloads of the overlay `gpu`.

    Raises:
        RuntimeError: The overlay changes what no value can.
    """
    with_store = (True, *(choice.options[0] for choice in CHOICES[1:]))
    ours = copy.deepcopy(_render(kustomize, with_store))
    theirs = copy.deepcopy(_objects(kustomize, K8S / "overlays" / "gpu"))
    values = values_of(with_store)
    images = set()
    for name, item in ours.items():
        changed = theirs[name]
        if name.partition("/")[0] not in ("Deployment", "StatefulSet"):
            continue
        service = name.partition("/")[2].removeprefix("weft-")
        pod, other = (one["spec"]["template"]["spec"] for one in (item, changed))
        container, wanted = pod["containers"][0], other["containers"][0]
        images.add(wanted.pop("image").replace(container.pop("image"), "@"))
        more = wanted["args"][len(container["args"]) :]
        del wanted["args"][len(container["args"]) :]
        tolerations = other.pop("tolerations", [])
        resources = wanted["resources"]
        for path, value, is_own in (
            ("resources", resources, resources != container["resources"]),
            ("extraArgs", more, bool(more)),
            ("tolerations", tolerations, bool(tolerations)),
        ):
            if is_own:
                _put(values, f"{service}.{path}", value)
        container["resources"] = resources
        if item != changed:
            raise RuntimeError(f"the overlay `gpu` changes {name} as no value of the chart can")
    if len(images) != 1:
        raise RuntimeError(f"the overlay `gpu` takes images from several places: {images}")
    registry, _, tag = images.pop().partition("@")
    values["images"] = {"registry": registry, "tag": tag.removeprefix(":")}
    off = [dict.fromkeys(one, False) if isinstance(one, dict) else None for one in values.values()]
    return {name: one for (name, one), none in zip(values.items(), off, strict=True) if one != none}


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")


def _resources(service: str, rendered: Sequence[Mapping[str, Any]]) -> Any:
    for objects in rendered:
        for kind in ("Deployment", "StatefulSet"):
            if item := objects.get(f"{kind}/weft-{service}"):
                return item["spec"]["template"]["spec"]["containers"][0]["resources"]
        if service == "hosts" and (item := objects.get("LeaderWorkerSet/weft-decode-hosts")):
            pods = item["spec"][LEADERS]["leaderTemplate"]
            return pods["spec"]["containers"][0]["resources"]
    raise RuntimeError(f"no variant has the service {service}")


def _schema(value: Any) -> dict[str, Any]:
    """A schema that refuses names that the chart has not."""
    if isinstance(value, dict) and value:
        names = {name: _schema(one) for name, one in value.items()}
        return {"type": "object", "properties": names, "additionalProperties": False}
    kinds = {dict: "object", list: "array", bool: "boolean", int: "integer", str: "string"}
    return {"type": kinds[type(value)]}


def _schema_text(defaults: Mapping[str, Any]) -> str:
    schema = _schema(dict(defaults))
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    # Helm's own, for charts that have this one as a part.
    schema["properties"]["global"] = {"type": "object"}
    for choice in CHOICES:
        place = schema
        for name in choice.value.split("."):
            place = place["properties"][name]
        place["enum"] = list(choice.options)
    return json.dumps(schema, indent=1) + "\n"


def files(kustomize: Path) -> dict[str, str]:
    """Texts of the chart's files by their paths in it."""
    found = {variant: _render(kustomize, variant) for variant in variants()}
    rendered = list(found.values())
    merged = _merge(found)
    assert isinstance(merged, Node)
    values = _Values(rendered)
    templates: dict[str, list[str]] = {}
    for guard, name, item in merged.entries:
        assert name is not None
        assert isinstance(item, Node)
        values.put(name, item)
        lines = [_if(guard)] if guard else []
        lines += ["---", *_emit(item, 0)]
        if guard:
            lines.append("{{- end }}")
        own = name.partition("/")[2].removeprefix("weft-")
        templates.setdefault(own, []).extend(lines)
    defaults = values.finish()
    (version,) = {
        line.partition('"')[2].rstrip('"\n')
        for line in (ROOT / "pyproject.toml").read_text().split("\n")
        if line.startswith("version = ")
    }
    texts = {
        f"templates/{name}.yaml": "\n".join(
            ["{{- /* Generated by scripts/gen_helm_chart.py. */ -}}", *lines, ""]
        )
        for name, lines in templates.items()
    }
    texts["templates/_image.tpl"] = HELPERS
    texts["templates/needs.yaml"] = NEEDS
    texts["Chart.yaml"] = CHART_FILE.format(version=version)
    texts["values.yaml"] = _values_text(defaults, rendered)
    texts["values.schema.json"] = _schema_text(defaults)
    gpu = yaml.dump(gpu_values(kustomize), Dumper=yaml.CSafeDumper, sort_keys=False)
    texts["values-gpu.yaml"] = f"{GPU_WORDS}{gpu}"
    return texts


@functools.cache
def _kustomize() -> Path:
    if on_path := shutil.which("kustomize"):
        return Path(on_path)
    go = find_go()
    if go is None:
        raise RuntimeError("neither kustomize nor Go was found")
    return build_tool(go, K8S / "tools" / "kustomize", "kustomize", Path(tempfile.mkdtemp()))


def main() -> int:
    texts = files(_kustomize())
    shutil.rmtree(CHART / "templates", ignore_errors=True)
    for name, text in texts.items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
