"""Values of declared types as protobuf messages, and back, with the checks of the declaration.

A `Codec` walks the fields of a dataclass and of its message once, when it is made, and keeps a
closure for each field. Fields declare themselves as `weft.contract.wire` says. A field that only
one of the two has must be named as `apart`, so that none is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache, partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from weft.contract.errors import InvalidRequest
from weft.contract.wire import Wire, cut

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_Convert = Callable[[Any], Any]

_NO_DECLARATION = Wire()
_NANOSECONDS = 10**9
_DURATION: str = Duration.DESCRIPTOR.full_name


class Codec(Generic[T, M]):
    """Converts between a declared type and its message.

    Args:
        apart: Names of fields of either that the codec leaves to its callers, to `more_plain` and
            to `more_values`.
        more_plain: Further fields of the message, from a value.
        more_values: Further fields of a value, from the message.
        is_part: Whether the message has only some of the type's fields.

    Raises:
        TypeError: A field has no counterpart and is not apart.
    """

    def __init__(
        self,
        kind: type[T],
        message: type[M],
        *,
        apart: Collection[str] = (),
        more_plain: Callable[[T], Mapping[str, Any]] | None = None,
        more_values: Callable[[M], Mapping[str, Any]] | None = None,
        is_part: bool = False,
    ) -> None:
        self._kind = kind
        self._message = message
        self._more_plain = more_plain
        self._more_values = more_values
        self._puts: list[tuple[str, str, str, Any, _Convert | None]] = []
        self._reads: list[tuple[str, _Convert]] = []
        same_puts: dict[str, str] = {}
        same_reads: dict[str, str] = {}
        descriptor: Any = message.DESCRIPTOR  # Its class is private to protobuf's C library.
        for one in _paired(kind, descriptor, frozenset(apart), is_part):
            if one.put is None and not one.inner:
                same_puts[one.name] = one.outer
            else:
                self._puts.append((one.name, one.outer, one.inner, one.default, one.put))
            if one.is_same:
                same_reads[one.name] = one.outer
            else:
                self._reads.append((one.name, one.reader()))
        self._put_heads, self._get_same = tuple(same_puts.values()), _getter(same_puts)
        self._read_names, self._read_same = tuple(same_reads), _getter(same_reads.values())
        _known[kind, descriptor.full_name] = self

    def encode(self, value: T, **given: Any) -> M:
        """The message of a value; `given` has further fields of the message."""
        return self._message(**{**self.plain(value), **given})

    def plain(self, value: T) -> Any:
        """The message as a mapping, which the constructor of a message takes in place of it. Its
        content is then not copied once more.
        """
        found: dict[str, Any] = dict(zip(self._put_heads, self._get_same(value), strict=True))
        for name, outer, inner, default, put in self._puts:
            item = getattr(value, name)
            if item is None or (inner and item == default):
                continue
            if put is not None:
                item = put(item)
            if inner:
                found.setdefault(outer, {})[inner] = item
            else:
                found[outer] = item
        if self._more_plain is not None:
            found.update(self._more_plain(value))
        return found

    def decode(self, message: M, **given: Any) -> T:
        """The value of a message; `given` has further fields of the value. Raises InvalidRequest if
        a field is not what its declaration allows.
        """
        values = dict(zip(self._read_names, self._read_same(message), strict=True))
        for name, read in self._reads:
            values[name] = read(message)
        if self._more_values is not None:
            values.update(self._more_values(message))
        return self._kind(**values, **given)


_known: dict[tuple[type, str], Codec[Any, Any]] = {}


def _codec_of(kind: type, message: Descriptor) -> Codec[Any, Any]:
    """The codec of a message in a field: an earlier one, or one in which every field is paired."""
    known = _known.get((kind, message.full_name))
    return known or Codec(kind, GetMessageClass(message))


class EnumNames:
    """The values of a proto enum by their names in lower case without the enum's own; the empty
    name is the unspecified value.
    """

    def __init__(self, enum: EnumDescriptor) -> None:
        own = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
        self.numbers: Mapping[str, Any] = {
            "" if one.number == 0 else one.name.removeprefix(own).lower(): one.number
            for one in enum.values
        }
        self._names = {number: name for name, number in self.numbers.items()}

    def __getitem__(self, number: int) -> str:
        return self._names.get(number, "")


@cache
def enum_names(enum: EnumDescriptor) -> EnumNames:
    return EnumNames(enum)


def duration(seconds: float) -> Duration:
    return Duration(**_duration_fields(seconds))


def _duration_fields(seconds: float) -> dict[str, int]:
    nanoseconds = int(seconds * 1e9)
    sign = -1 if nanoseconds < 0 else 1
    whole, rest = divmod(abs(nanoseconds), _NANOSECONDS)
    return {"seconds": sign * whole, "nanos": sign * rest}


def _seconds(message: Duration) -> float:
    return (message.seconds * _NANOSECONDS + message.nanos) / 1e9


class _Pair:
    """A field of a declared type and its counterpart in the message."""

    def __init__(
        self, one: Field[Any], hint: Any, declared: Wire, path: str, message: Descriptor
    ) -> None:
        self.name = one.name
        self.outer, _, self.inner = path.partition(".")
        field = outer = message.fields_by_name[self.outer]
        if self.inner:
            assert outer.message_type is not None
            field = outer.message_type.fields_by_name[self.inner]
        hint, self._is_optional = _without_none(hint)
        self.default = one.default
        self._factory = one.default_factory
        self._has_presence = outer.has_presence
        self.put, take = _conversion(hint, field, declared)
        checks = _Checks(declared, field, self.inner or self.outer, declared.param or self.outer)
        # Sizes first, so that too many entries are not converted.
        self._steps = [*checks.of_size(), *([take] if take else []), *checks.of_value()]
        self._getter = attrgetter(path)

    @property
    def is_same(self) -> bool:
        """Whether a value is read as the message has it, whether it is set or not."""
        return not self._steps and not (self._has_presence and self._may_lack)

    @property
    def _may_lack(self) -> bool:
        has_default = self.default is not MISSING or self._factory is not MISSING
        return self._is_optional or has_default

    def reader(self) -> _Convert:
        get, steps = self._getter, tuple(self._steps)
        if len(steps) == 1:
            (step,) = steps

            def read(message: Message) -> Any:
                return step(get(message))
        else:

            def read(message: Message) -> Any:
                value = get(message)
                for step in steps:
                    value = step(value)
                return value

        return self._or_absent(read) if self._has_presence and self._may_lack else read

    def _or_absent(self, read: _Convert) -> _Convert:
        outer = self.outer
        if self._factory is not MISSING:
            make: Callable[[], Any] = self._factory
        else:
            absent = None if self.default is MISSING else self.default

            def make() -> Any:
                return absent

        def read_if_there(message: Message) -> Any:
            return read(message) if message.HasField(outer) else make()

        return read_if_there


def _paired(kind: type, message: Descriptor, apart: frozenset[str], is_part: bool) -> list[_Pair]:
    hints = get_type_hints(kind)
    lacking = set(message.fields_by_name) - apart
    found: list[_Pair] = []
    for one in fields(kind):
        declared: Wire = one.metadata.get("wire", _NO_DECLARATION)
        path = declared.name or _name_of(one.name, message)
        outer = path.partition(".")[0]
        if one.name in apart or (is_part and outer not in message.fields_by_name):
            continue
        if outer not in message.fields_by_name:
            raise TypeError(f"{kind.__name__}.{one.name} is no field of {message.full_name}")
        lacking.discard(outer)
        found.append(_Pair(one, hints[one.name], declared, path, message))
    if lacking:
        names = ", ".join(sorted(lacking))
        raise TypeError(f"{message.full_name}: {names}: no fields of {kind.__name__}")
    return found


def _name_of(name: str, message: Descriptor) -> str:
    """The name that a field has in a message by the rule of `weft.contract.wire`."""
    if name in message.fields_by_name:
        return name
    for prefix in ("is_", "has_", "num_"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    if name.endswith("_s"):
        bare = name.removesuffix("_s")
        return bare if bare in message.fields_by_name else f"{bare}_time"
    return name


def _getter(names: Collection[str]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda value: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type without None, and whether it had None."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    rest = [one for one in get_args(hint) if one is not NoneType]
    return (rest[0] if len(rest) == 1 else hint), len(rest) < len(get_args(hint))


def _conversion(
    hint: Any, field: FieldDescriptor, declared: Wire
) -> tuple[_Convert | None, _Convert | None]:
    """How a value is put into a message and taken from it; None: unchanged."""
    origin = get_origin(hint)
    if origin is dict:
        return None, dict
    if origin not in (list, tuple):
        return _conversion_of_one(hint, field, declared)
    put, take = _conversion_of_one(get_args(hint)[0], field, declared)
    put_all: _Convert | None = None
    if declared.newest is not None or put is not None:
        last = slice(None) if declared.newest is None else slice(-declared.newest, None)
        each = put or (lambda item: item)

        def put_all(items: Any) -> Any:
            return [each(item) for item in items[last]]

    if take is None:
        return put_all, origin
    make, convert = origin, take
    return put_all, lambda items: make([convert(item) for item in items])


def _conversion_of_one(
    hint: Any, field: FieldDescriptor, declared: Wire
) -> tuple[_Convert | None, _Convert | None]:
    if field.enum_type is not None:
        names = enum_names(field.enum_type)
        return names.numbers.__getitem__, names.__getitem__
    if field.message_type is not None:
        if field.message_type.full_name == _DURATION:
            return _duration_fields, _seconds
        codec = _codec_of(hint, field.message_type)
        return codec.plain, codec.decode
    if (most := declared.cut_bytes) is not None:
        longest = most
        return lambda text: cut(text, longest), None
    return None, None


class _Checks:
    """The checks of what arrived in a field; each returns it, or the nearest value allowed."""

    def __init__(self, declared: Wire, field: FieldDescriptor, name: str, param: str) -> None:
        self._declared = declared
        self._is_repeated = field.is_repeated
        self._name = name
        self._param = param

    def of_size(self) -> Iterator[_Convert]:
        """Checks of texts, bytes and numbers of entries."""
        declared = self._declared
        if declared.least is not None or declared.most is not None:
            yield partial(self._bound_size, declared.least or 0, declared.most or math.inf)
        if declared.entry_bytes is not None:
            yield partial(self._bound_entries, declared.entry_bytes)

    def of_value(self) -> Iterator[_Convert]:
        """Checks of numbers and names, and the field's own check."""
        declared = self._declared
        if declared.is_required:
            yield self._require
        if declared.low is not None or declared.high is not None:
            low = -math.inf if declared.low is None else declared.low
            high = math.inf if declared.high is None else declared.high
            if declared.clamps:
                yield lambda value: min(max(low, value), high)
            else:
                yield partial(self._bound_all if self._is_repeated else self._bound, low, high)
        if declared.check is not None:
            yield partial(self._examine, declared.check)

    def _refusal(self, problem: str) -> InvalidRequest:
        return InvalidRequest(problem, param=self._param)

    def _bound_size(self, least: int, most: float, value: Any) -> Any:
        size = len(value.encode() if isinstance(value, str) else value)
        if not least <= size <= most:
            unit = "entries" if self._is_repeated else "bytes"
            span = f"{least}" if least == most else f"{least} to {most}"
            raise self._refusal(f"{self._name} has {size} {unit}, not {span}")
        return value

    def _bound_entries(self, num_bytes: int, entries: Any) -> Any:
        for entry in entries:
            if len(entry) != num_bytes:
                problem = f"{self._name}: an entry has {len(entry)} bytes, not {num_bytes}"
                raise self._refusal(problem)
        return entries

    def _require(self, name: str) -> str:
        if not name:
            raise self._refusal(f"{self._name}: none is named, or an unknown one")
        return name

    def _bound(self, low: float, high: float, value: float) -> float:
        if not low <= value <= high:
            raise self._refusal(f"{self._name} = {value}: must be {low} to {high}")
        return value

    def _bound_all(self, low: float, high: float, values: dict[Any, float]) -> dict[Any, float]:
        for value in values.values():
            if not low <= value <= high:
                self._bound(low, high, value)
        return values

    def _examine(self, check: Callable[[Any], object], value: Any) -> Any:
        try:
            check(value)
        except ValueError as error:
            raise self._refusal(f"{self._name} {error}") from None
        return value
