"""Tools that only their own server or client can run, such as a web search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from weft.gateway.api.unserved import leave_out
from weft.gateway.validate import unsupported

T = TypeVar("T", bound=BaseModel)
_SHOWN_CHARS = 80


class HostedTool(BaseModel):
    """A tool of a type that the model is never shown: left out where there are functions too."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    type: str = Field(description="any other type: the tool is left out with a warning")


def is_hosted(tool: object, own: Sequence[str]) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return isinstance(tool, HostedTool) or (isinstance(kind, str) and kind not in own)


def blank_hosted(body: Mapping[str, Any], own: Sequence[str]) -> Mapping[str, Any]:
    """A body whose hosted tools are empty objects, so that nobody judges their fields."""
    tools = body.get("tools")
    if not isinstance(tools, list) or not any(is_hosted(tool, own) for tool in tools):
        return body
    return {**body, "tools": [{} if is_hosted(tool, own) else tool for tool in tools]}


def kind_of_tool(*own: str) -> Callable[[Any], str]:
    """A discriminator between the tools of a body's `own` types and hosted ones. Its tags are
    written like names of classes, which paths of errors leave out.
    """
    return lambda tool: "Hosted" if is_hosted(tool, own) else "Own"


def own_tools(
    tools: Sequence[T | HostedTool] | None, *, is_wanted: bool = True
) -> list[tuple[int, T]]:
    """The tools that the model can be shown, each with its place in the body. The others are left
    out with a warning. Raises InvalidRequest if all of them are hosted, so that nothing would be
    left of the request. With `is_wanted` False the answer may call none.
    """
    own: list[tuple[int, T]] = []
    hosted: list[tuple[int, HostedTool]] = []
    for number, tool in enumerate(tools or ()):
        if isinstance(tool, HostedTool):
            hosted.append((number, tool))
        else:
            own.append((number, tool))
    for number, tool in hosted:
        what = f"tools of type `{tool.type[:_SHOWN_CHARS]}`"
        if is_wanted and not own:
            raise unsupported(f"tools[{number}].type", f"{what}, without other tools")
        leave_out(f"tools[{number}]", what)
    return own
