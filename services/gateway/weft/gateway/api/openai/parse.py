"""Parses the bytes of a body into a checked object, or an error that names the field."""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from google.api.httpbody_pb2 import HttpBody
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from weft.common.rpc.interceptors import TakenBody
from weft.contract.errors import InvalidRequest
from weft.gateway.api.hosted import blank_hosted
from weft.gateway.api.openai.bodies import OWN_TOOLS, Body, names_of
from weft.gateway.api.openai.foreign import objects_at
from weft.gateway.long_text import BodyBytes, cut
from weft.gateway.validate import invalid

B = TypeVar("B", bound=Body)
T = TypeVar("T")

# In a location pydantic mixes field names with the names of union members.
_UNION_MEMBER = re.compile(
    r"(str|int|float|bool|(list|dict|constrained)\b.*|function-\w+\[.*|literal\[.*|[A-Z]\w*)"
)
_MAX_SHOWN_CHARS = 80
_LARGE_BYTES = 64 << 10
"""Size from which bodies are not parsed on the event loop."""
_MAX_BRACKETS = 1 << 18
"""Most opening brackets: lists and objects take far more memory than their text. Brackets inside
strings count as well, since some strings are parsed as JSON later, such as calls' arguments; those
of files do not.
"""
_MAX_DEPTH = 200
"""Levels of lists and objects that the parser surely takes."""
_ALIKE = 0.7
"""Similarity, 0 to 1, from which a field is suggested in place of an unknown one."""
_JSON_KINDS = {"list_type": "array", "dict_type": "object", "model_type": "object"}
"""JSON's names for kinds of values for which pydantic has Python's."""


class BodyTooLarge(InvalidRequest):
    """The body exceeds the gateway's limit."""

    reason = "REQUEST_TOO_LARGE"
    http_status = 413


class BodyParser:
    """Parses and converts bodies; large ones in a thread, one at a time, so that streams go on."""

    def __init__(self, max_bytes: int, *, ignores_unknown: bool = False) -> None:
        self._max_bytes = max_bytes
        self._ignores_unknown = ignores_unknown
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def parse(
        self, cls: type[B], request: HttpBody | TakenBody, translate: Callable[[B], T]
    ) -> tuple[B, T]:
        """Returns the body, and what `translate` makes of it. Takes the data out of `request`,
        because the caller holds that until it has answered. Raises InvalidRequest if the body or
        `translate` refuses.
        """

        if isinstance(request, TakenBody):
            data = BodyBytes(request.message, request.start, request.end)
            request.remove()
        else:
            data = BodyBytes.of(request.data)
            request.data = b""

        def work() -> tuple[B, T]:
            body = parse_body(cls, data, self._max_bytes, ignores_unknown=self._ignores_unknown)
            return body, translate(body)

        return await self.run(len(data), work)

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs work whose time grows with a body's size, in a thread if the body is large."""
        if num_bytes <= _LARGE_BYTES:
            return work()
        # Warnings of the call are also collected there.
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: context.run(work)
        )


def parse_body(
    cls: type[B], body_bytes: BodyBytes | bytes, max_bytes: int, *, ignores_unknown: bool = False
) -> B:
    """Raises InvalidRequest if the body is too large or too deep, is not JSON, or a field has a
    wrong type, is one of another server that would change the answer, or is unknown.
    `ignores_unknown` lets unknown fields pass where the body does not forbid them.
    """
    data = body_bytes if isinstance(body_bytes, BodyBytes) else BodyBytes.of(body_bytes)
    if len(data) > max_bytes:
        raise BodyTooLarge(
            f"the body has {len(data)} bytes; at most {max_bytes} are accepted", stage="validate"
        )
    num_brackets = 0

    def count_brackets(part: BodyBytes) -> None:
        nonlocal num_brackets
        num_brackets += sum(map(part.count, b"[{"))
        if num_brackets > _MAX_BRACKETS:
            raise InvalidRequest(
                f"the body has more than {_MAX_BRACKETS} opening brackets", stage="validate"
            )

    short = cut(data)
    count_brackets(BodyBytes.of(short.data))
    try:
        value = from_json(short.data)
        if short.texts:
            fields = _file_fields(cls, value)
            value = short.put_back(value, fields, lambda text: count_brackets(text.within))
    except ValueError as error:
        problem = f"is not valid JSON: {error}"
        if str(error).startswith("recursion limit"):
            problem = f"is nested too deeply: at most {_MAX_DEPTH} levels are accepted"
        raise InvalidRequest(f"the body {problem}", stage="validate") from None
    try:
        # Not model_validate_json: its own tree of nested lists is several times as large.
        body = cls.model_validate(value)
    except ValidationError as error:
        raise explain(error.errors(include_url=False)) from None
    body.settle(ignores_unknown=ignores_unknown)
    if not cls.keeps_unknown:
        judged = blank_hosted(value, OWN_TOOLS) if value.get("tools") else value
        cls.check_given(judged)
        if not ignores_unknown:
            _refuse_unknown(cls, judged)
    return body


def _file_fields(cls: type[Body], value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    for path in cls.file_fields:
        for _, parent in objects_at(value, path[:-1]):
            yield cast("dict[str, Any]", parent), path[-1]


def _refuse_unknown(cls: type[Body], value: Mapping[str, Any]) -> None:
    """Refuses the first field, unless it is null, that neither this server nor any other is known
    to have. Most of them are misspelt: without a refusal, `temprature: 0` would be answered at the
    model's own temperature. Fields of messages are not judged: clients send back what other servers
    have answered.
    """
    _check_level(cls, cls.of_others, value, "")
    for part in cls.parts:
        for where, level in objects_at(value, part.path):
            _check_level(part.model, part.of_others, level, where)


def _check_level(
    cls: type[BaseModel], others: frozenset[str], level: Mapping[str, Any], where: str
) -> None:
    own = names_of(cls)
    for name, given in level.items():
        if given is not None and name not in own and name not in others:
            raise _unknown(name, own, where)


def _unknown(name: str, own: frozenset[str], where: str) -> InvalidRequest:
    alike = difflib.get_close_matches(name[:64], own, n=1, cutoff=_ALIKE)
    advice = f"did you mean {where}{alike[0]}?" if alike else "leave it out"
    return invalid(f"{where}{name[:80]}", f"this server knows no such field; {advice}")


def explain(errors: list[ErrorDetails], where: str = "") -> InvalidRequest:
    """Converts pydantic's errors, at least one, to one error. `where` is the beginning of the
    fields' names, for a part of a body.
    """
    error = _explain(errors)
    if where and error.param is not None:
        error.message, error.param = where + error.message, where + error.param
    return error


def _explain(errors: list[ErrorDetails]) -> InvalidRequest:
    first = errors[0]
    if not first["loc"]:
        return InvalidRequest("the body must be a JSON object", stage="validate")
    same_field = [item for item in errors if item["loc"][0] == first["loc"][0]]
    for item in same_field:
        if item["type"] == "too_long":
            return _failure(item, f"at most {item['ctx']['max_length']} are accepted")
        if item["type"] == "string_too_long":
            return _failure(item, f"at most {item['ctx']['max_length']} characters are accepted")
        if item["type"] == "string_too_short" or (
            item["type"] == "too_short" and item["ctx"]["actual_length"] == 0
        ):
            return _failure(item, "is empty")
        if item["type"] == "too_short":
            return _failure(item, f"at least {item['ctx']['min_length']} are needed")
        if item["type"] == "extra_forbidden":
            return _failure(item, "this server knows no such field; leave it out")
    # A union reports an error for each alternative; the one with the deepest path says the most.
    deepest = max(len(_path(item)) for item in same_field)
    told = [item for item in same_field if len(_path(item)) == deepest]
    told = [item for item in told if _path(item) == _path(told[0])]
    if told[0]["type"] == "missing":
        return _failure(told[0], "this field is required")
    kinds = " or ".join(dict.fromkeys([_kind(item) for item in told]))
    return _failure(told[0], f"must be {kinds}, not {_short(told[0]['input'])}")


def _failure(item: ErrorDetails, problem: str) -> InvalidRequest:
    param = _shown(_path(item))
    return InvalidRequest(f"{param}: {problem}", stage="validate", param=param)


def _kind(item: ErrorDetails) -> str:
    message = item["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return _JSON_KINDS.get(item["type"], message)


class _Short(reprlib.Repr):
    """Computes the beginning of a value without formatting all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = _MAX_SHOWN_CHARS

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        return "{...}" if x else "{}"  # The library's own function sorts all keys.

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"


def _short(value: object) -> str:
    text = _Short().repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _path(item: ErrorDetails) -> tuple[int | str, ...]:
    return tuple(
        part for part in item["loc"] if isinstance(part, int) or not _UNION_MEMBER.fullmatch(part)
    )


def _shown(path: tuple[int | str, ...]) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + part[:_MAX_SHOWN_CHARS]
    return text
