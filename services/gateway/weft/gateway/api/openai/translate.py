"""Conversion of OpenAI bodies to the gateway's own request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from weft.contract.request import MAX_TOP_LOGPROBS, Constraint
from weft.gateway.api.edge import CallFacts, check_client_id, earliest
from weft.gateway.api.hosted import own_tools
from weft.gateway.api.openai.bodies import (
    AllowedToolsBody,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    TokenizeBody,
    ToolBody,
    ToolChoiceBody,
)
from weft.gateway.api.openai.constrain import (
    CONSTRAINING,
    GivenConstraint,
    constraint_of,
    whitespace_of,
)
from weft.gateway.api.sampling import given_numbers
from weft.gateway.api.tools import (
    NO_TOOLS,
    ToolUse,
    check_tools,
    instead_of,
    only_tools,
    past_call,
    use_tools,
)
from weft.gateway.api.unserved import leave_out
from weft.gateway.request import (
    ChatPrompt,
    GenerateRequest,
    Prompt,
    Sampling,
    Stopping,
    Targets,
    TextPrompt,
    TokenPrompt,
)
from weft.gateway.validate import (
    check_not_streamed,
    check_range,
    given_salt,
    invalid,
    unsupported,
)

_DEFAULT_COMPLETION_TOKENS = 16
"""Default for completions, as OpenAI's and vLLM's; a chat may fill the context."""

_OF_THE_REQUEST = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Names that are fields of the request, and so must not be template variables."""


def chat_request(body: ChatBody, facts: CallFacts) -> GenerateRequest:
    """Translates a chat body.

    Raises:
        InvalidRequest: It asks for what is not supported, or fields contradict each other.
    """
    for name in ("functions", "function_call"):
        if getattr(body, name) not in (None, "none", []):
            raise unsupported(name, "functions are given as tools, chosen by tool_choice")
    if body.modalities is not None and set(body.modalities) - {"text"}:
        raise unsupported("modalities", "output other than text")
    if body.echo:
        raise unsupported("echo", "chats do not repeat their messages")
    if body.add_special_tokens:
        raise unsupported("add_special_tokens", "special tokens beside the chat template's")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    tokens = body.max_completion_tokens
    prompt, tool_use = chat_prompt(body), NO_TOOLS
    if body.tools or body.tool_choice is not None:
        prompt, tool_use = _chosen_tools(body, prompt)
    return _request(
        body,
        facts,
        prompts=(prompt,),
        tool_use=tool_use,
        max_tokens=body.max_tokens if tokens is None else tokens,
        max_tokens_param="max_tokens" if tokens is None else "max_completion_tokens",
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _chosen_tools(body: ChatBody, prompt: ChatPrompt) -> tuple[ChatPrompt, ToolUse]:
    """The prompt with the tools that the body's choice leaves, and what the answer may be."""
    choice = body.tool_choice
    if choice == "none":
        prompt = replace(prompt, tools=())
    if isinstance(choice, AllowedToolsBody):
        allowed, choice = choice.allowed_tools, choice.allowed_tools.mode
        names = [one.function.name for one in allowed.tools]
        prompt = replace(prompt, tools=only_tools(prompt.tools, names))
    tool_use = use_tools(
        prompt.tools,
        choice.function.name if isinstance(choice, ToolChoiceBody) else choice or "auto",
        is_named=isinstance(choice, ToolChoiceBody),
        most=1 if body.parallel_tool_calls is False else None,
    )
    return prompt, tool_use


def completion_request(body: CompletionBody, facts: CallFacts) -> GenerateRequest:
    """Translates a completions body: every prompt becomes one of the request's.

    Raises:
        InvalidRequest: It asks for what is not supported, or fields contradict each other.
    """
    if body.include_reasoning is False:
        raise unsupported("include_reasoning", "the text of a completion is not taken apart")
    return _request(
        body,
        facts,
        prompts=_text_prompts(body),
        max_tokens=_completion_tokens(body),
        top_logprobs=body.logprobs,
        top_logprobs_param="logprobs",
        echoed_logprobs=body.logprobs if body.echo else None,
    )


def is_echo_alone(body: CompletionBody) -> bool:
    """Whether the answer is the prompt, with nothing behind it."""
    return bool(body.echo) and body.max_tokens == 0 and not body.stream


def _completion_tokens(body: CompletionBody) -> int:
    if is_echo_alone(body):
        return 1  # To score a prompt, one token is drawn, which is not shown.
    return _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def tokenize_prompt(body: TokenizeBody) -> Prompt:
    """Translates a tokenize body.

    Raises:
        InvalidRequest: The body does not have exactly one of prompt and messages.
    """
    if body.messages is not None and body.prompt is not None:
        raise invalid("prompt", "contradicts messages: give one of prompt and messages")
    if body.messages is not None:
        return chat_prompt(body)
    if body.prompt is None:
        raise invalid("prompt", "give a prompt or messages")
    return TextPrompt(text=body.prompt, add_special_tokens=body.add_special_tokens is not False)


def chat_prompt(body: ChatBody | TokenizeBody) -> ChatPrompt:
    """The conversation of a body, its content parts joined.

    Raises:
        InvalidRequest: A message is empty or has content other than text, or fields contradict
            each other.
    """
    if not body.messages:
        raise invalid("messages", "at least one message is needed")
    variables = body.chat_template_kwargs or {}
    for name in _OF_THE_REQUEST:
        if variables.get(name) is not None:
            raise invalid(
                "chat_template_kwargs", f"`{name}` is a field of the request; give it there"
            )
    continues = bool(body.continue_final_message)
    add_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and add_prompt:
        raise invalid(
            "continue_final_message", "contradicts add_generation_prompt: true; set one of them"
        )
    return ChatPrompt(
        messages=tuple(_message(i, message) for i, message in enumerate(body.messages)),
        add_generation_prompt=add_prompt,
        continue_final_message=continues,
        template_variables={**_effort(body), **variables},
        tools=_tools(body),
    )


def _request(
    body: GenerationBody,
    facts: CallFacts,
    *,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    top_logprobs: int | None,
    max_tokens_param: str = "max_tokens",
    top_logprobs_param: str = "top_logprobs",
    echoed_logprobs: int | None = None,
    tool_use: ToolUse = NO_TOOLS,
) -> GenerateRequest:
    if body.best_of not in (None, given_numbers(body, "openai").get("n", 1)):
        raise unsupported("best_of", "choosing among more answers than n")
    is_free = body.model_fields_set.isdisjoint(CONSTRAINING)
    constraint = None if is_free else constraint_of(body)
    whitespace = None if is_free else whitespace_of(body)
    if constraint is not None and tool_use.constraint is not None and not _is_format(constraint):
        raise invalid(
            constraint.param,
            "contradicts tool_choice, under which the answer is calls; set tool_choice to auto",
        )
    if tool_use.constraint is not None:
        constraint = GivenConstraint(tool_use.param, tool_use.constraint)
    if constraint is not None and whitespace is not None:
        value = replace(constraint.value, whitespace=whitespace)
        constraint = GivenConstraint(constraint.param, value)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream: true")
    prompt_logprobs, prompt_logprobs_param = _prompt_logprobs(body, echoed_logprobs)
    name = _own_name(body)
    return GenerateRequest(
        request_id=facts.request_id,
        client_request_id=name or facts.client_request_id,
        # The REST edge gives every call an id, also where the client sent none.
        header_request_id=facts.client_request_id if name else "",
        model=body.model or "",
        prompts=prompts,
        sampling=_sampling(body, None if constraint is None else constraint.value),
        stopping=replace(
            _stopping(body, max_tokens),
            is_echo_alone=isinstance(body, CompletionBody) and is_echo_alone(body),
        ),
        top_logprobs=top_logprobs,
        calls=tool_use.calls,
        constraint_param="constraint" if constraint is None else constraint.param,
        max_tokens_param=max_tokens_param,
        top_logprobs_param=top_logprobs_param,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_param=prompt_logprobs_param,
        skip_special_tokens=body.skip_special_tokens is not False,
        timeout_s=earliest(facts.timeout_s, body.timeout),
        first_token_timeout_s=earliest(facts.first_token_timeout_s, body.ttft_timeout),
        cache_salt=given_salt(body.cache_salt),
        priority=body.priority or 0,
        routing_key=body.routing_key or facts.routing_key or body.session_id or "",
        session_id=body.session_id or "",
        ends_session=bool(body.end_session),
        worker=facts.worker,
        traceparent=facts.traceparent,
        targets=_targets(body).over(facts.targets),
        tenant=facts.tenant,
    )


def _own_name(body: GenerationBody) -> str:
    """The client's name for the request; empty: none."""
    if body.request_id and body.rid and body.request_id != body.rid:
        raise invalid("rid", "contradicts request_id; give one of them")
    for param, name in (("request_id", body.request_id), ("rid", body.rid)):
        if name:
            check_client_id(param, name)
            return name
    return ""


def _prompt_logprobs(body: GenerationBody, echoed: int | None) -> tuple[int | None, str]:
    """The number of alternatives at a prompt's positions, and the field that asks for them.

    Args:
        body: The body, which may have a field for them.
        echoed: Alternatives shown with an echoed prompt; None: the prompt is not echoed.
    """
    listed = body.prompt_logprobs
    if listed is None and echoed is None:
        return None, "prompt_logprobs"
    param = "echo" if listed is None else "prompt_logprobs"
    check_not_streamed(param, bool(body.stream))
    if listed is None or echoed is None:
        return (echoed if listed is None else listed), param
    check_range(param, listed, 0, MAX_TOP_LOGPROBS)  # The number of the other field may be larger.
    return max(listed, echoed), param


def _targets(body: GenerationBody) -> Targets:
    first, between = body.ttft_target_ms, body.itl_target_ms
    return Targets(
        None if first is None else first / 1e3, None if between is None else between / 1e3
    )


def _sampling(body: GenerationBody, constraint: Constraint | None) -> Sampling:
    return Sampling(
        numbers=given_numbers(body, "openai"),
        logit_bias=logit_bias(body.logit_bias or {}),
        constraint=constraint,
        speculate=body.speculate is not False,
    )


def logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """The biases by token id.

    Raises:
        InvalidRequest: A key is no token id.
    """
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise invalid("logit_bias", f"{key[:20]!r} is not a token id")
        bias[int(key)] = value
    return bias


def _stopping(body: GenerationBody, max_tokens: int | None) -> Stopping:
    stop, regex = body.stop, body.stop_regex
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_regexes=(regex,) if isinstance(regex, str) else tuple(regex or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
    )


def _message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.function_call is not None:
        raise unsupported(f"{where}.function_call", "calls are given as tool_calls")
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal or ""  # SDKs send back a turn without text with a `refusal`.
    if content is None:
        raise invalid(f"{where}.content", "is missing; give a text")
    if not isinstance(content, str):
        texts: list[str] = []
        for number, part in enumerate(content):
            if part.type not in ("text", "refusal") and message.role == "tool":
                leave_out(f"{where}.content[{number}]", f"content `{part.type[:80]}`")
                texts.append(instead_of(part.type))
                continue
            if part.type not in ("text", "refusal"):
                raise unsupported(f"{where}.content[{number}].type", f"content `{part.type}`")
            text = part.text if part.type == "text" else part.refusal
            if text is None:
                raise invalid(f"{where}.content[{number}].{part.type}", "is missing")
            texts.append(text)
        content = "\n".join(texts)
    translated: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            translated[name] = value
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        # Chat templates know it by either name.
        translated |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        translated["tool_calls"] = [
            past_call(call.id or "", call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    return translated


def _is_format(constraint: GivenConstraint) -> bool:
    """Whether the constraint is a `response_format`, which applies to content and not to calls."""
    return constraint.param.startswith("response_format")


def _effort(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """The reasoning effort for the chat template."""
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    told = {} if effort is None else {"reasoning_effort": effort}
    return {"enable_thinking": False, **told} if effort == "none" else told


def _tools(body: ChatBody | TokenizeBody) -> tuple[Mapping[str, Any], ...]:
    is_wanted = not isinstance(body, ChatBody) or body.tool_choice != "none"
    own = own_tools(body.tools, is_wanted=is_wanted)
    return check_tools([(number, _tool(tool)) for number, tool in own])


def _tool(tool: ToolBody) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    function = tool.function
    given = {"description": function.description, "parameters": function.parameters}
    described = {name: value for name, value in given.items() if value is not None}
    return {"type": tool.type, "function": {"name": function.name, **described}}


def _text_prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    prompt = body.prompt
    add_special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return (TextPrompt(text=prompt, add_special_tokens=add_special),)
    if prompt and isinstance(prompt[0], int):
        return (TokenPrompt(ids=tuple(prompt)),)
    return tuple(
        TextPrompt(text=item, add_special_tokens=add_special)
        if isinstance(item, str)
        else TokenPrompt(ids=tuple(item))
        for item in cast("list[str] | list[list[int]]", prompt)
    )
