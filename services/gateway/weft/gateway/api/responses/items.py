"""Items of responses' input, as they are stored and listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.gateway.api.responses.bodies import ItemBody
from weft.gateway.api.responses.translate import FindItem, is_reference
from weft.gateway.validate import check_range, invalid
from weft.v1 import dialects_pb2

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
_TEXT_KINDS = {"assistant": "output_text"}

Item = Mapping[str, Any]


def shown_items(given: str | Sequence[ItemBody] | None, find: FindItem, suffix: str) -> list[Item]:
    """The items of a body's input, each with an id and its content as parts. `find` finds items
    that the input refers to. `suffix` makes the ids of items unique that have none.
    """
    if isinstance(given, str):
        given = [ItemBody.model_validate({"role": "user", "content": given})]
    return [
        find(item.id or "") if is_reference(item) else _shown(item, f"{suffix}_in{number}")
        for number, item in enumerate(given or ())
    ]


def _shown(item: ItemBody, suffix: str) -> Item:
    kind = item.type or "message"
    shown = item.model_dump(exclude_none=True) | {"type": kind}
    shown.setdefault("id", f"{_PREFIXES.get(kind, 'item')}_{suffix}")
    if kind == "message" and isinstance(item.content, str):
        part: dict[str, Any] = {"type": _TEXT_KINDS.get(item.role or "", "input_text")}
        part["text"] = item.content
        if part["type"] == "output_text":
            part["annotations"] = []
        shown["content"] = [part]
    if kind == "reasoning":
        shown.setdefault("summary", [])
    else:
        shown["status"] = "completed"
    return shown


def page_of(items: Sequence[Item], request: dialects_pb2.ListInputItemsRequest) -> Item:
    """The part of a list of items that a request asks for. Raises InvalidRequest if the request
    names an unknown order, or no item of the list.
    """
    if request.order not in ("", "asc", "desc"):
        raise invalid("order", "must be asc or desc")
    limit = request.limit if request.HasField("limit") else _DEFAULT_LIMIT
    check_range("limit", limit, 1, _MAX_LIMIT)
    ordered = list(items) if request.order == "asc" else list(reversed(items))
    begin = 0
    if request.after:
        begin = 1 + _place(ordered, request.after)
    data = ordered[begin : begin + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + limit < len(ordered),
    }


def _place(items: Sequence[Item], id_: str) -> int:
    for number, item in enumerate(items):
        if item["id"] == id_:
            return number
    raise invalid("after", f"the response has no item `{id_[:80]}`")
