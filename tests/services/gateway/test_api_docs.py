"""The documents name what there is: errors, methods and services."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from weft.common.adapters.manifest import AdapterExists, AdaptersOff
from weft.contract import errors
from weft.contract.errors import WeftError
from weft.gateway.api.openai.parse import BodyTooLarge
from weft.gateway.api.responses.service import ResponseNotFound
from weft.gateway.api.server.service import MetricsNotServed
from weft.gateway.api.trainer.service import TrainersOff, WeightsDiffer
from weft.gateway.console.access import ConsoleOff
from weft.gateway.console.relay import MemberNotFound
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import gateway
from weft.v1 import (
    admin_pb2,
    decode_pb2,
    gateway_pb2,
    kvstore_pb2,
    mesh_pb2,
    prefill_pb2,
    trace_pb2,
    worker_pb2,
)

ROOT = Path(__file__).resolve().parents[3]


def section(document: str, title: str) -> str:
    text = (ROOT / document).read_text()
    return re.split(r"^## ", text.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_the_table_of_errors_is_complete() -> None:
    found = {value for value in vars(errors).values() if isinstance(value, type)}
    kinds = {cls for cls in found if issubclass(cls, WeftError)} - {WeftError}
    kinds |= {BodyTooLarge, AdapterExists, AdaptersOff, ResponseNotFound, MetricsNotServed}
    kinds |= {ConsoleOff, MemberNotFound, TrainersOff, WeightsDiffer}
    expected = {
        (f"`{cls.reason}`", str(cls.http_status), cls.grpc_code, "yes" if cls.retryable else "no")
        for cls in kinds
    }
    written = {tuple(row[:4]) for row in rows(section("docs/api.md", "Errors"))}
    assert written - {("code", "HTTP", "gRPC", "retry"), ("---",) * 4} == expected


@pytest.mark.parametrize(
    "service",
    [
        gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"],
        decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
        prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
        kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"],
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
        mesh_pb2.DESCRIPTOR.services_by_name["MeshService"],
        trace_pb2.DESCRIPTOR.services_by_name["TraceService"],
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    ],
    ids=lambda service: service.name,
)
def test_every_method_of_a_service_is_named(service: ServiceDescriptor) -> None:
    (row,) = [row for row in rows(section("docs/api.md", "gRPC")) if row[0] == f"`{service.name}`"]
    assert {method.name for method in service.methods} <= set(re.findall(r"`(\w+)`", row[2]))


async def test_the_page_lists_what_reflection_does(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[70]])

    async with gateway(tmp_path, script) as mesh:
        stub = reflection_pb2_grpc.ServerReflectionStub(mesh.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([ask]))]
    listed = [service.name for service in answers[0].list_services_response.service]
    page = (ROOT / "docs" / "api.md").read_text()
    shown = page.split("50051 list\n", 1)[1].split("\n$ ", 1)[0].splitlines()
    assert shown == sorted(listed)
