"""The references of the site name everything that there is."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from weft.gateway.api.openai.document import openapi_document
from weft.v1 import admin_pb2, common_pb2, decode_pb2, gateway_pb2, kv_pb2, kvstore_pb2, worker_pb2

FOLDER = Path(__file__).parents[2] / "scripts" / "docs"
CONTRACT = (admin_pb2, common_pb2, decode_pb2, gateway_pb2, kv_pb2, kvstore_pb2, worker_pb2)


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module(request.param)
    sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("reference", ["contract_reference"], indirect=True)
def test_the_contract_is_whole(reference: ModuleType) -> None:
    pages = dict(reference.pages())
    for module in CONTRACT:
        file = module.DESCRIPTOR
        page = pages[f"proto.{Path(file.name).stem}"]
        for service in file.services_by_name.values():
            assert f"## {service.name}\n" in page
            assert all(f"- `{method.name}(" in page for method in service.methods)
        for message in file.message_types_by_name.values():
            section = page.split(f"## {message.name}\n", 1)[1]
            assert all(f"| `{f.name}` = {f.number} |" in section for f in message.fields)


@pytest.mark.parametrize("reference", ["rest_reference"], indirect=True)
def test_routes_bodies_and_settings_are_whole(reference: ModuleType) -> None:
    pages = dict(reference.pages())
    document = openapi_document()
    headings = set(re.findall(r"^## (.*)$", pages["rest"], re.MULTILINE))
    assert document["components"]["schemas"].keys() <= headings
    assert len(headings) - len(document["components"]["schemas"]) == sum(
        len(operations.keys() & set(reference.METHODS)) for operations in document["paths"].values()
    )
    for program in reference.PROGRAMS:
        section = pages["settings"].split(f"## {program.command} {program.program}\n")[1]
        for name in program.model_fields:
            assert f"| `--{name.replace('_', '-')}` |" in section


@pytest.mark.full
def test_the_site_is_built_without_a_warning() -> None:
    pytest.importorskip("sphinx", reason="`make docs` installs what the site needs")
    sys.path.insert(0, str(FOLDER))
    try:
        assert importlib.import_module("build").main() == 0
    finally:
        sys.path.remove(str(FOLDER))
