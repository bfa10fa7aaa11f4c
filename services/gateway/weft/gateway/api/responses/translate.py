"""Conversion of Responses bodies to the gateway's own request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from weft.contract.request import Constraint
from weft.gateway.api.contents import ContentBuilder
from weft.gateway.api.hosted import HostedTool, own_tools
from weft.gateway.api.parameters import client_names, given_parameters, settle_logprobs
from weft.gateway.api.responses.bodies import (
    FormatBody,
    ItemBody,
    NamespaceBody,
    PartBody,
    ResponsesBody,
    ToolBody,
    ToolChoiceBody,
    qualified,
)
from weft.gateway.api.tools import ToolUse, check_tools, past_call, use_tools
from weft.gateway.api.unserved import leave_out
from weft.gateway.request import CallFacts, ChatPrompt, MediaFile, RawRequest
from weft.gateway.text.answer.demand import ANY_OBJECT
from weft.gateway.text.parts import MEDIA_PARTS, Content, Part
from weft.gateway.validate import invalid, unsupported

NAMES = {"messages": "input"}
"""Names of fields in the Responses API, by those of the internal request."""
PARTS = {".function.": "."}
TOO_LONG = (
    "Your input exceeds the context window of this model: its maximum context length is {context} "
    "tokens, but the input has {tokens}; shorten it"
)
LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
    }
)
_FILE = "image"
"""Key of a file in a stored message, whatever it is."""
_ROLES = frozenset({"system", "developer", "user", "assistant"})
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})

Message = Mapping[str, Any]


class History(NamedTuple):
    """Messages of a conversation, in order, with their files."""

    messages: Sequence[Message] = ()
    files: Sequence[MediaFile] = ()

    def to_json(self) -> Any:
        """As a value of JSON, in which each file is in its place among the messages."""
        files = iter(self.files)
        return [
            {**message, "content": [_kept(part, files) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in self.messages
        ]

    @classmethod
    def from_json(cls, messages: Sequence[dict[str, Any]]) -> History:
        """Reads what `to_json` has made."""
        files: list[MediaFile] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                message["content"] = [_read(part, files) for part in content]
        return cls(messages, files)


def _kept(part: Part, files: Iterator[MediaFile]) -> Part:
    return part if part["type"] == "text" else {_FILE: asdict(next(files))}


def _read(part: Part, files: list[MediaFile]) -> Part:
    if _FILE not in part:
        return part
    files.append(MediaFile(**part[_FILE]))
    return MEDIA_PARTS[files[-1].modality]


class AskedResponse(NamedTuple):
    """The request of a body, without the conversation that it continues."""

    raw: RawRequest
    """Its prompt has the instructions and the input alone."""
    num_instructions: int
    """Messages of the prompt that are not stored."""

    @property
    def stored(self) -> History:
        """The input's messages, images and clips."""
        (prompt,) = self.raw.prompts
        assert isinstance(prompt, ChatPrompt)
        return History(prompt.messages[self.num_instructions :], prompt.files)


FindItem = Callable[[str], Mapping[str, Any]]
"""Finds an output item of a stored response by its id; raises if there is none."""


def response_request(body: ResponsesBody, facts: CallFacts, find: FindItem) -> AskedResponse:
    """Translates a body; `find` finds items that the input refers to. Raises InvalidRequest if the
    body asks for what is not supported, or its fields contradict each other.
    """
    _check_output(body)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages, files = input_messages(body.input, find)
    if not messages and body.previous_response_id is None:
        raise invalid("input", "is missing; give a text or items")
    tools = _allowed(body, _tools(body))
    use = _use_of(body, tools)
    constraint, param = use.constraint, use.param
    wanted = _format(None if body.text is None else body.text.format)
    if wanted is not None and constraint is None:  # Otherwise the answer consists of calls.
        constraint, param = wanted, "text.format.schema"
    prompt = ChatPrompt(
        messages=(*instructions, *messages),
        files=tuple(files),
        tools=() if body.tool_choice == "none" else tools,
        template_variables={**_effort(body), **(body.chat_template_kwargs or {})},
    )
    given = given_parameters(body, "responses")
    settle_logprobs(given, f'include: ["{LOGPROBS}"]', is_wanted=LOGPROBS in (body.include or ()))
    if not (given.get("routing_key") or facts.routing_key or given.get("session_id")):
        # The key for OpenAI's own cache.
        given["routing_key"] = body.prompt_cache_key or ""
    raw = RawRequest(
        call=facts,
        model=body.model or "",
        prompts=(prompt,),
        given=given,
        names={**client_names("responses"), "constraint": param},
        constraint=constraint,
        calls=use.calls,
        lowers_max_tokens=True,
    )
    return AskedResponse(raw, len(instructions))


def continued(asked: AskedResponse, history: History) -> RawRequest:
    """The request with the conversation that it continues, which follows its own instructions."""
    (prompt,) = asked.raw.prompts
    assert isinstance(prompt, ChatPrompt)
    instructions = prompt.messages[: asked.num_instructions]
    messages = (*instructions, *history.messages, *asked.stored.messages)
    files = (*history.files, *prompt.files)
    return replace(asked.raw, prompts=(replace(prompt, messages=messages, files=files),))


def _check_output(body: ResponsesBody) -> None:
    for number, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            leave_out(f"include[{number}]", f"there is no `{name[:80]}`")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream: true")


def _effort(body: ResponsesBody) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    told = {} if effort is None else {"reasoning_effort": effort}
    return {"enable_thinking": False, **told} if effort == "none" else told


def _format(given: FormatBody | None) -> Constraint | None:
    if given is None or given.type == "text":
        return None
    schema = ANY_OBJECT
    if given.type == "json_schema":
        if given.schema_ is None:
            raise invalid("text.format.schema", "is needed with type json_schema")
        schema = given.schema_
    return Constraint(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))


def _tools(body: ResponsesBody) -> tuple[Mapping[str, Any], ...]:
    given = [
        HostedTool(type=tool.type)
        if isinstance(tool, NamespaceBody) and not tool.functions
        else tool
        for tool in body.tools or ()
    ]
    tools: list[tuple[int, Mapping[str, Any]]] = []
    is_wanted = body.tool_choice != "none"
    own: list[tuple[int, ToolBody | NamespaceBody]] = own_tools(given, is_wanted=is_wanted)
    for number, tool in own:
        where = f"tools[{number}]"
        if isinstance(tool, NamespaceBody):
            for inner, hosted in enumerate(tool.tools):
                if isinstance(hosted, HostedTool):
                    leave_out(f"{where}.tools[{inner}]", f"tools of type `{hosted.type[:80]}`")
            tools += [
                (number, _tool(f"{where}.tools[{inner}]", function, tool))
                for inner, function in tool.functions
            ]
        else:
            tools.append((number, _tool(where, tool)))
    return check_tools(tools)


def _tool(where: str, tool: ToolBody, within: NamespaceBody | None = None) -> dict[str, Any]:
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise unsupported(f"{where}.allowed_callers", "calls by other tools alone")
    texts = (None if within is None else within.description, tool.description)
    described = {
        "description": "\n".join(filter(None, texts)) or None,
        "parameters": tool.parameters,
    }
    more = {name: value for name, value in described.items() if value is not None}
    name = qualified(None if within is None else within.name, tool.name or "")
    return {"type": "function", "function": {"name": name, **more}}


def _use_of(body: ResponsesBody, tools: Sequence[Mapping[str, Any]]) -> ToolUse:
    most = 1 if body.parallel_tool_calls is False else None
    choice = body.tool_choice
    if not isinstance(choice, ToolChoiceBody):
        return use_tools(tools, choice or "auto", most=most)
    if choice.type == "function":
        if not choice.name:
            raise invalid("tool_choice.name", "is needed with type function")
        name = qualified(choice.namespace, choice.name)
        return use_tools(tools, name, is_named=True, most=most)
    return use_tools(tools, choice.mode or "auto", most=most)


def _allowed(
    body: ResponsesBody, tools: tuple[Mapping[str, Any], ...]
) -> tuple[Mapping[str, Any], ...]:
    choice = body.tool_choice
    if not isinstance(choice, ToolChoiceBody) or choice.type == "function":
        return tools
    if choice.type != "allowed_tools":
        raise unsupported("tool_choice.type", f"a choice of type `{choice.type[:80]}`")
    known = {tool["function"]["name"]: tool for tool in tools}
    allowed = []
    for number, one in enumerate(choice.tools or ()):
        kind = one.get("type")
        if isinstance(kind, str) and kind != "function":
            leave_out(f"tool_choice.tools[{number}]", f"tools of type `{kind[:80]}`")
            continue
        name = qualified(one.get("namespace"), str(one.get("name")))
        if kind is None or name not in known:
            raise invalid(f"tool_choice.tools[{number}]", "is none of the functions in tools")
        allowed.append(known[name])
    if not allowed:
        raise invalid("tool_choice.tools", "allows no tool; set tool_choice to none")
    return tuple(allowed)


def referred_items(body: ResponsesBody) -> list[str]:
    """Ids of the items that the input refers to, without their contents."""
    given = body.input if isinstance(body.input, list) else ()
    return [item.id for item in given if item.id and is_reference(item)]


def is_reference(item: ItemBody) -> bool:
    """Whether an item of the input only names one of a stored response."""
    return item.type == "item_reference" or (item.type is None and item.role is None)


def input_messages(given: str | Sequence[ItemBody] | None, find: FindItem) -> History:
    """Converts input items to messages for chat templates: the assistant's reasoning, text and
    calls of one turn become one message. Raises InvalidRequest if an item is of a kind that is not
    supported, or lacks what it needs.
    """
    if given is None:
        return History()
    if isinstance(given, str):
        return History([{"role": "user", "content": given}])
    conversation = Conversation()
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if is_reference(item):
            if not item.id:
                raise invalid(f"{where}.id", "is missing")
            item = ItemBody.model_validate(find(item.id))
        conversation.add(item, where)
    return History(conversation.messages, conversation.files)


class Conversation:
    """Collects items as messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """All messages so far."""
        self.files: list[MediaFile] = []
        """Their images and clips."""
        self._turn: dict[str, Any] | None = None
        """The assistant's message that its next items join; None: a new one begins."""

    def add(self, item: ItemBody, where: str) -> None:
        """Raises InvalidRequest if the item is of a kind that is not supported, or lacks what it
        needs.
        """
        kind = item.type or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            text = _text(item.content or "", f"{where}.content")
            text = text or _text(item.summary or "", f"{where}.summary")
            if text:
                self._join("reasoning_content", text)
        elif kind == "function_call":
            if not item.name:
                raise invalid(f"{where}.name", "is missing")
            turn = self._open()
            name = qualified(item.namespace, item.name)
            call = past_call(item.call_id or "", name, item.arguments or "")
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if not item.call_id:
                raise invalid(f"{where}.call_id", "is missing")
            content = self._content(item.output or "", f"{where}.output", is_of_tool=True)
            self._close({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            raise unsupported(f"{where}.type", f"items of type `{kind[:80]}`")

    def _message(self, item: ItemBody, where: str) -> None:
        if item.role not in _ROLES:
            raise invalid(f"{where}.role", "must be system, developer, user or assistant")
        if item.content is None:
            raise invalid(f"{where}.content", "is missing; give a text")
        if item.role != "assistant":
            built = self._content(item.content, f"{where}.content")
            self._close({"role": item.role, "content": built})
            return
        content = _text(item.content, f"{where}.content")
        if self._turn is not None and (self._turn["content"] or self._turn.get("tool_calls")):
            self._turn = None
        self._join("content", content)

    def _content(
        self, content: str | Sequence[PartBody], where: str, *, is_of_tool: bool = False
    ) -> Content:
        if isinstance(content, str):
            return content
        built = ContentBuilder(self.files, is_of_tool=is_of_tool)
        for number, part in enumerate(content):
            place = f"{where}[{number}]"
            if part.type == "input_image":
                if part.file_id and not part.image_url and not is_of_tool:
                    raise invalid(
                        f"{place}.file_id",
                        "no files are kept here; give image_url, as data:image/...;base64,...",
                    )
                built.add_image(
                    part.image_url,
                    kind=part.type,
                    where=f"{place}.image_url",
                    type_param=f"{place}.type",
                    detail=part.detail,
                    detail_param=f"{place}.detail",
                )
            elif part.type == "input_audio":
                given = part.input_audio
                built.add_input_audio(
                    given.data if given else None, given.format if given else None, place
                )
            elif part.type == "input_video":
                built.add_file(
                    part.video_url,
                    modality="video",
                    kind=part.type,
                    where=f"{place}.video_url",
                    type_param=f"{place}.type",
                )
            elif is_of_tool and part.type not in (*_TEXTS, "refusal"):
                built.leave_out(part.type, place)
            else:
                built.add_text(_text_of(part, place))
        return built.content

    def _open(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _join(self, name: str, text: str) -> None:
        if name == "reasoning_content" and self._turn is not None and self._turn["content"]:
            self._turn = None
        turn = self._open()
        turn[name] = f"{turn[name]}\n{text}" if turn.get(name) else text

    def _close(self, message: dict[str, Any]) -> None:
        self._turn = None
        self.messages.append(message)


def _text(content: str | Sequence[PartBody], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([_text_of(part, f"{where}[{i}]") for i, part in enumerate(content)])


def _text_of(part: PartBody, where: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in _TEXTS:
        raise unsupported(f"{where}.type", f"content `{part.type[:80]}`")
    if part.text is None:
        raise invalid(f"{where}.text", "is missing")
    return part.text
