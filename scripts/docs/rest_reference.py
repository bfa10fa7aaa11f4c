"""The reference of the REST API, from the OpenAPI document, of all settings, and of all metrics."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markup import escape, inline
from weft.cli.rest_settings import RestSettings
from weft.cli.up.settings import UpSettings
from weft.common.settings import Settings, env_prefix
from weft.decode.main import DecodeSettings
from weft.gateway.api.openai.document import openapi_document
from weft.gateway.api.openai.foreign import HARMLESS, UNSERVED
from weft.gateway.settings import GatewaySettings
from weft.kvstore.settings import KvStoreSettings
from weft.prefill.main import PrefillSettings

ROOT = Path(__file__).resolve().parents[2]
METRICS = ROOT / "dashboards" / "metrics.toml"
METHODS = ("get", "post", "put", "patch", "delete")
PROGRAMS: tuple[type[Settings], ...] = (
    UpSettings,
    GatewaySettings,
    DecodeSettings,
    PrefillSettings,
    KvStoreSettings,
    RestSettings,
)


def pages() -> Iterator[tuple[str, str]]:
    """(Name, Markdown) of the pages."""
    document = openapi_document()
    yield "rest", "\n".join(["# REST API", "", *routes(document), *schemas(document)])
    yield "foreign-fields", "\n".join(foreign_fields())
    yield "settings", "\n".join(settings())
    yield "metrics", "\n".join(metrics())


def routes(document: Mapping[str, Any]) -> list[str]:
    """A section for each method of each path."""
    lines = []
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method in operations:
                operation = operations[method]
                lines += [f"## {method.upper()} {escape(path)}", ""]
                lines += [inline(operation.get("summary", "")), ""]
                body = operation.get("requestBody", {}).get("content", {})
                lines += [f"- body: {kind(content)}" for content in _kinds(body)]
                for status, answer in operation["responses"].items():
                    for form, content in answer.get("content", {}).items():
                        lines.append(f"- {status}, `{form}`: {kind(content.get('schema', {}))}")
                lines.append("")
    return lines


def _kinds(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for described in content.values():
        yield described.get("schema", {})


def kind(schema: Mapping[str, Any]) -> str:
    """What a schema allows, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for join in ("anyOf", "oneOf"):
        if join in schema:
            return " or ".join(dict.fromkeys(kind(one) for one in schema[join]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def schemas(document: Mapping[str, Any]) -> list[str]:
    """A section for each body and answer."""
    lines = []
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += [f"## {name}", "", inline(schema.get("description", "")), ""]
        needed = schema.get("required", ())
        fields = schema.get("properties", {})
        if fields:
            lines += ["| field | | |", "| --- | --- | --- |"]
        for field, described in fields.items():
            text = inline(described.get("description", ""))
            text = text if field not in needed else f"{text} (required)".strip()
            lines.append(f"| `{field}` | {kind(described)} | {text} |")
        lines.append("")
    return lines


def settings() -> Iterator[str]:
    """The settings of all programs, from the fields that they are read into, with the values that
    the Kubernetes manifests give.
    """
    yield "# Settings"
    yield ""
    yield "Flags, and in brackets their defaults. Each is an environment variable with the given"
    yield "prefix, and a key of a TOML file too ([operations](docs/operations.md#settings)); the"
    yield "REST edge has no file. The last column has the values of the"
    yield "[Kubernetes manifests](docs/kubernetes.md), overlays apart."
    yield ""
    for program in PROGRAMS:
        in_manifests = manifest_flags(program.program)
        yield f"## {program.command} {program.program}"
        yield ""
        yield f"Environment: `{env_prefix(program)}<NAME>`."
        yield ""
        yield "| flag | | Kubernetes |"
        yield "| --- | --- | --- |"
        for name, field in program.model_fields.items():
            default = "required" if field.is_required() else f"{field.default}"
            text = inline(field.description or "")
            flag = f"--{name.replace('_', '-')}"
            given = f"`{in_manifests[flag]}`" if flag in in_manifests else ""
            yield f"| `{flag}` | {text} ({escape(default)}) | {given} |"
        yield ""


def manifest_flags(program: str) -> dict[str, str]:
    """Flags that a service's manifest gives, with their values."""
    found: dict[str, str] = {}
    for path in (ROOT / "k8s").glob(f"*/**/{program}/workload.yaml"):
        found |= dict(re.findall(r"^ +- (--[a-z0-9-]+)=(.*)$", path.read_text(), re.MULTILINE))
    return found


def foreign_fields() -> Iterator[str]:
    """Fields of other servers' APIs, and what becomes of them."""
    yield "# Fields of other servers"
    yield ""
    yield (
        "Chats and completions refuse these fields by name, unless their value asks for nothing. "
        "Those that are marked so are left out, and `x-weft-warnings` names them."
    )
    yield ""
    yield "| field | what it asks for, or what to use instead |"
    yield "| --- | --- |"
    for name, unserved in sorted(UNSERVED.items()):
        mark = " (left out)" if unserved.is_left_out else ""
        yield f"| `{name}` | {inline(unserved.what)}{mark} |"
    yield ""
    yield "These are ignored, because the answer is the same without them:"
    yield ", ".join(f"`{name}`" for name in sorted(HARMLESS)) + "."


def metrics() -> Iterator[str]:
    """The metrics of all services, from the list that tests compare with a running mesh."""
    yield "# Metrics"
    for service, listed in tomllib.loads(METRICS.read_text()).items():
        yield f"\n## {service}\n"
        yield "| name | type | what |"
        yield "| --- | --- | --- |"
        for name, metric in listed.items():
            labels = ", ".join(metric.get("labels", ()))
            shown = f"{name}{{{labels}}}" if labels else name
            yield f"| `{shown}` | {metric['type']} | {inline(metric['what'])} |"
