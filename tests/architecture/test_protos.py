"""The contract's style, and that the committed stubs are what the protos say."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from google.protobuf import descriptor_pb2
from weft.gateway.admission.authenticate import FACES
from weft.v1 import dialects_pb2, openai_pb2

ROOT = Path(__file__).resolve().parent.parent.parent
GO_PACKAGE = "weft.dev/weft/services/rest/gen/weft/v1;weftv1"

# Messages that do not follow <Rpc>Request and <Rpc>Response, and why.
SHARED_SHAPES = {
    "weft.v1.FillControl": "one shape for every filler",
    "weft.v1.FillEvent": "one shape for every filler",
    "weft.v1.FillStatusRequest": "one shape for every filler",
    "weft.v1.FillStatusResponse": "one shape for every filler",
    "weft.v1.SessionEvent": "events answer no single request",
    "google.api.HttpBody": "OpenAI's JSON passes through",
    "google.protobuf.Empty": "OpenAI's JSON passes through",
}


# Numbers whose names tell the unit or the kind need no comment.
TELLING = ("_tokens", "_token", "_bytes", "_pages", "_page", "_requests", "_pid", "_id", "epoch")
NUMBERS = {
    getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name}")
    for name in ("DOUBLE", "FLOAT", "INT32", "INT64", "UINT32", "UINT64", "FIXED32", "FIXED64")
}


class Element(NamedTuple):
    """One declaration of a .proto file with the comment before it."""

    kind: str
    name: str
    comment: str
    needs_comment: bool = True


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("protos") / "set.pb"
    google = Path(descriptor_pb2.__file__).parent.parent.parent
    protos = sorted(str(path) for path in (ROOT / "protos").glob("weft/v1/*.proto"))
    flags = [f"-I{ROOT / 'protos'}", f"-I{google}", "--include_source_info"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *flags, f"--descriptor_set_out={out}"]
    subprocess.run([*command, *protos], check=True)
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def elements(file: descriptor_pb2.FileDescriptorProto) -> Iterator[Element]:
    """Every service, rpc, message, field, enum and enum value of a file."""
    comments = {
        tuple(location.path): location.leading_comments + location.trailing_comments
        for location in file.source_code_info.location
    }

    def walk_message(
        message: descriptor_pb2.DescriptorProto, path: tuple[int, ...], outer: str
    ) -> Iterator[Element]:
        name = f"{outer}.{message.name}"
        if message.options.map_entry:
            return
        # The rpc, or the field of a oneof, tells what these are.
        told = message.name.endswith(("Request", "Response")) or len(path) > 2
        yield Element("message", name, comments.get(path, ""), not told)
        for index, field in enumerate(message.field):
            bare = field.type in NUMBERS and not field.name.endswith(TELLING)
            comment = comments.get((*path, 2, index), "")
            yield Element("field", f"{name}.{field.name}", comment, bare)
        for index, nested in enumerate(message.nested_type):
            yield from walk_message(nested, (*path, 3, index), name)

    for index, message in enumerate(file.message_type):
        yield from walk_message(message, (4, index), file.package)
    for index, enum in enumerate(file.enum_type):
        yield Element("enum", f"{file.package}.{enum.name}", comments.get((5, index), ""))
    for index, service in enumerate(file.service):
        name = f"{file.package}.{service.name}"
        yield Element("service", name, comments.get((6, index), ""))
        for position, method in enumerate(service.method):
            comment = comments.get((6, index, 2, position), "")
            yield Element("rpc", f"{name}.{method.name}", comment)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def test_files_share_one_package(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    for file in files:
        assert (file.package, file.syntax) == ("weft.v1", "proto3"), file.name
        assert file.options.go_package == GO_PACKAGE, file.name


def test_declarations_are_documented(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    bare: list[str] = []
    for file in files:
        declared = list(elements(file))
        # A field name that comes again (attempt, sample) is explained once in a file.
        explained = {_last(element.name) for element in declared if element.comment.strip()}
        bare += [
            f"{element.kind} {element.name}"
            for element in declared
            if element.needs_comment and not element.comment.strip()
            if element.kind != "field" or _last(element.name) not in explained
        ]
    assert not bare, "no comment:\n" + "\n".join(bare)


def test_enums_start_unspecified_and_carry_their_name(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    for file in files:
        for enum in file.enum_type:
            prefix = "".join(
                f"_{char}" if char.isupper() and position else char
                for position, char in enumerate(enum.name)
            ).upper()
            assert enum.value[0].name == f"{prefix}_UNSPECIFIED", enum.name
            assert enum.value[0].number == 0, enum.name
            assert all(value.name.startswith(f"{prefix}_") for value in enum.value), enum.name


def test_rpcs_have_messages_of_their_own(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    used: dict[str, str] = {}
    for file in files:
        for service in file.service:
            assert service.name.endswith("Service"), service.name
            for method in service.method:
                pairs = ((method.input_type, "Request"), (method.output_type, "Response"))
                for full_name, suffix in pairs:
                    name = full_name.removeprefix(".")
                    if name in SHARED_SHAPES:
                        continue
                    assert name == f"weft.v1.{method.name}{suffix}", method.name
                    assert name not in used, f"{name} serves {used[name]} and {method.name}"
                    used[name] = method.name


def test_clients_services_ask_for_keys_and_forward_their_streams() -> None:
    """What a new service with routes is easily left out of."""
    forwarders = (ROOT / "services" / "rest" / "gen" / "weft" / "v1" / "forward.go").read_text()
    for file in (openai_pb2, dialects_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            assert f"/{service.full_name}/" in FACES, service.full_name
            for method in service.methods:
                if method.server_streaming:
                    name = f"forward_{service.name}_{method.name}_0"
                    assert re.search(rf"{name}\s+= forward\.Stream", forwarders), name


def test_committed_stubs_are_fresh() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gen_protos.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_edge_forwards_every_stream_itself() -> None:
    """The generated handlers' own forwarder loses errors that come before the first message."""
    folder = ROOT / "services" / "rest" / "gen" / "weft" / "v1"
    generated = "".join(path.read_text() for path in folder.glob("*.pb.gw.go"))
    streams = set(re.findall(r"(forward_\w+)\s*= runtime\.ForwardResponseStream", generated))
    assert streams
    assert streams == set(
        re.findall(r"(forward_\w+) = forward", (folder / "forward.go").read_text())
    )
