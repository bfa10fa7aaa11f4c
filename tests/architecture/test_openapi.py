"""The published OpenAPI document against the routes that the contract declares."""

import re
from collections.abc import Iterator
from typing import Any

from google.api import annotations_pb2
from weft.gateway.api.openai.document import openapi_document
from weft.v1 import dialects_pb2, openai_pb2

METHODS = {"get", "put", "post", "delete", "patch"}


def declared_routes(*, with_body: bool = False) -> set[tuple[str, str]]:
    """(method, path) of every google.api.http rule of the services that have some.

    Args:
        with_body: Only those that take a body.
    """
    services = [
        service
        for file in (openai_pb2, dialects_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    ]
    rules = [
        rule
        for service in services
        for method in service.methods
        for main in [method.GetOptions().Extensions[annotations_pb2.http]]
        for rule in (main, *main.additional_bindings)
        if rule.body or not with_body
    ]
    kinds = [str(rule.WhichOneof("pattern")) for rule in rules]
    return {
        (kind, re.sub(r"\{(\w+)=[^}]*\}", r"{\1}", getattr(rule, kind)))
        for rule, kind in zip(rules, kinds, strict=True)
    }


def references(node: Any) -> Iterator[str]:
    """Every `$ref` in a document."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_route_is_described_and_no_other() -> None:
    document = openapi_document()
    assert document["openapi"].startswith("3.1")
    described = {
        (method, path)
        for path, operations in document["paths"].items()
        for method in operations.keys() & METHODS
    }
    assert described == declared_routes() - {("get", "/openapi.json")}


def test_references_lead_somewhere() -> None:
    document = openapi_document()
    found = set(references(document))
    assert found
    for reference in found:
        node: Any = document
        assert reference.startswith("#/"), reference
        for part in reference[2:].split("/"):
            assert part in node, reference
            node = node[part]


def test_operations_answer_and_are_named() -> None:
    names: list[str] = []
    for path, operations in openapi_document()["paths"].items():
        for method in operations.keys() & METHODS:
            operation = operations[method]
            assert "200" in operation["responses"], path
            if (method, path) in declared_routes(with_body=True):
                (form,) = operation["requestBody"]["content"]
                assert form in ("application/json", "multipart/form-data"), path
            names.append(operation["operationId"])
    assert len(set(names)) == len(names)
