"""The reference of the contract, from the comments in protos/weft/v1."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2
from markup import inline

PROTOS = Path(__file__).resolve().parents[2] / "protos"
KINDS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}
# Numbers of fields in descriptor.proto, of which paths to comments are made.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM = 2, 3, 4
ENUM_VALUE = SERVICE_METHOD = 2


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """The contract with its comments, as protoc reads it."""
    spec = importlib.util.find_spec("google.api")
    assert spec is not None
    assert spec.submodule_search_locations
    common = Path(next(iter(spec.submodule_search_locations))).parent.parent
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("weft/v1/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "contract"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"-I{common}"]
        command += ["--include_source_info", f"--descriptor_set_out={out}", *names]
        subprocess.run(command, check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


def pages() -> Iterator[tuple[str, str]]:
    """(Name, Markdown) of a page for each file of the contract."""
    for file in descriptors().file:
        yield f"proto.{Path(file.name).stem}", "\n".join(_File(file).lines())


class _File:
    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(place.path): place.leading_comments or place.trailing_comments
            for place in file.source_code_info.location
        }

    def _comment(self, *path: int) -> str:
        return inline(self._comments.get(path, ""))

    def lines(self) -> list[str]:
        """The whole page."""
        lines = [f"# {self._file.name}", ""]
        for number, service in enumerate(self._file.service):
            lines += [f"## {service.name}", "", self._comment(FILE_SERVICE, number), ""]
            for place, method in enumerate(service.method):
                takes = "stream " * method.client_streaming + _short(method.input_type)
                gives = "stream " * method.server_streaming + _short(method.output_type)
                text = self._comment(FILE_SERVICE, number, SERVICE_METHOD, place)
                lines.append(f"- `{method.name}({takes})` returns `{gives}`. {text}")
            lines.append("")
        for number, message in enumerate(self._file.message_type):
            lines += self._message(message, message.name, (FILE_MESSAGE, number))
        for number, enum in enumerate(self._file.enum_type):
            lines += self._enum(enum, enum.name, (FILE_ENUM, number))
        return lines

    def _message(
        self, message: descriptor_pb2.DescriptorProto, name: str, path: Sequence[int]
    ) -> list[str]:
        if message.options.map_entry:
            return []
        lines = [f"## {name}", "", self._comment(*path), ""]
        if message.field:
            lines += ["| field | type | |", "| --- | --- | --- |"]
        for number, field in enumerate(message.field):
            kind = _short(field.type_name) or KINDS[field.type]
            if field.label == field.LABEL_REPEATED:
                kind = f"repeated {kind}"
            text = self._comment(*path, MESSAGE_FIELD, number)
            lines.append(f"| `{field.name}` = {field.number} | `{kind}` | {text} |")
        lines.append("")
        for number, nested in enumerate(message.nested_type):
            inner = f"{name}.{nested.name}"
            lines += self._message(nested, inner, (*path, MESSAGE_NESTED, number))
        for number, enum in enumerate(message.enum_type):
            lines += self._enum(enum, f"{name}.{enum.name}", (*path, MESSAGE_ENUM, number))
        return lines

    def _enum(
        self, enum: descriptor_pb2.EnumDescriptorProto, name: str, path: Sequence[int]
    ) -> list[str]:
        lines = [f"## {name}", "", self._comment(*path), ""]
        for number, value in enumerate(enum.value):
            text = self._comment(*path, ENUM_VALUE, number)
            lines.append(f"- `{value.name}` = {value.number}{'. ' + text if text else ''}")
        return [*lines, ""]


def _short(name: str) -> str:
    return name.rpartition(".")[2]
