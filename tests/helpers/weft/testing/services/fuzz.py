"""Messages for fuzzing: any message of a type, and bytes that are nearly one."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_FIELD = FieldDescriptor
_INTEGERS: dict[int, tuple[int, int]] = {
    _FIELD.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _FIELD.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _FIELD.CPPTYPE_UINT32: (0, 2**32 - 1),
    _FIELD.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_MAX_DEPTH = 4


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _INTEGERS:
        least, most = _INTEGERS[kind]
        edges = st.sampled_from([least, 0, 1, 2, 16, 33, most])
        return edges | st.integers(least, most)
    if kind == _FIELD.CPPTYPE_ENUM:
        return st.integers(-1, 20) | st.integers(-(2**31), 2**31 - 1)
    if kind == _FIELD.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (_FIELD.CPPTYPE_DOUBLE, _FIELD.CPPTYPE_FLOAT):
        return st.floats(width=64 if kind == _FIELD.CPPTYPE_DOUBLE else 32)
    if field.type == _FIELD.TYPE_BYTES:
        # Ids, keys and digests have 16 or 32 bytes.
        return (
            st.binary(max_size=40)
            | st.binary(min_size=16, max_size=16)
            | st.binary(min_size=32, max_size=32)
        )
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
        ["tiny", "target", "decode-0", "prefill-0", "json", "user"]
    )


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """A valid message with any values."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            continue
        if nested is not None:
            if depth >= _MAX_DEPTH:
                continue
            count = draw(st.integers(0, 2)) if field.is_repeated else 1
            for _ in range(count):
                value = draw(messages(nested, depth + 1))
                place = getattr(message, field.name)
                (place.add() if field.is_repeated else place).CopyFrom(value)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(_scalars(field), max_size=8)))
        else:
            setattr(message, field.name, draw(_scalars(field)))
    return message


@st.composite
def payloads(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """Bytes: a message, one that was damaged, or anything."""
    kind = draw(st.sampled_from(["message", "message", "damaged", "noise"]))
    if kind == "noise":
        return draw(st.binary(max_size=64))
    data = bytearray(draw(messages(descriptor)).SerializeToString())
    if kind == "damaged" and data:
        for _ in range(draw(st.integers(1, 3))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        if draw(st.booleans()):
            del data[draw(st.integers(0, len(data) - 1)) :]
    return bytes(data)


def json_values() -> st.SearchStrategy[Any]:
    """Any JSON value, and some that Python's JSON accepts beyond the standard."""
    scalars = (
        st.none()
        | st.booleans()
        | st.integers(-(10**30), 10**30)
        | st.floats()
        | st.text(max_size=20)
        | st.sampled_from(["hi", "user", "tiny", "stop", {"role": "user", "content": "hi"}])
    )
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=8,
    )


def bodies(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """A JSON object with some of these fields, sane or not."""
    sane = {
        "model": st.just("tiny"),
        "prompt": st.just("hi") | st.just([5, 6, 7]),
        "messages": st.just([{"role": "user", "content": "hi"}]),
        "max_tokens": st.integers(1, 4),
        "tokens": st.just([5, 6, 7]),
    }
    fields = {name: sane.get(name, st.nothing()) | json_values() for name in names}
    # Short answers, nearly always: the service is what is tested, not the model.
    short = {"max_tokens": fields.pop("max_tokens", st.just(1))}
    return st.fixed_dictionaries(short, optional=fields)
