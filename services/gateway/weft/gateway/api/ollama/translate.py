"""Conversion of Ollama's bodies to the gateway's own request."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from weft.contract.request import PARAMETERS, Constraint
from weft.gateway.api.edge import CallFacts, call_fields
from weft.gateway.api.hosted import own_tools
from weft.gateway.api.ollama.bodies import (
    ChatBody,
    EmbedBody,
    EmbeddingBody,
    EmbedPromptBody,
    GenerateBody,
    GenerationBody,
    MessageBody,
    OptionsBody,
    ToolBody,
)
from weft.gateway.api.sampling import given_numbers
from weft.gateway.api.tools import (
    NO_TOOLS,
    ToolUse,
    check_tools,
    instead_of,
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
    TextPrompt,
    Wants,
)
from weft.gateway.validate import invalid, unsupported

_TAG = ":latest"
_DEFAULT_LAST_N = 64
"""Ollama's default of `repeat_last_n`, which its clients send unasked."""
_ZERO = re.compile(r"[+-]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
"""A duration of nothing, as Ollama reads them."""
NAMES = {
    **{
        name: f"options.{own}" for name, one in PARAMETERS.items() if (own := one.name_in("ollama"))
    },
    "stop": "options.stop",
}
"""Ollama's names of fields, by those of the internal request."""
TOO_LONG = (
    "prompt too long; exceeded max context length by {above} tokens: it has {tokens} of at most "
    "{context}"
)


def model_name(name: str | None) -> str:
    """A model's name without the tag that Ollama's clients append."""
    return (name or "").removesuffix(_TAG)


def unloads(body: GenerationBody) -> bool:
    """Whether a request without a prompt asks to unload the model; otherwise it asks to load it."""
    wanted = body.keep_alive
    if isinstance(wanted, str):
        return _ZERO.fullmatch(wanted.strip()) is not None
    return wanted == 0


def embed_request(body: EmbedBody, facts: CallFacts) -> GenerateRequest | None:
    """Translates a body for vectors; None: there are no texts."""
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    cut = None if body.truncate is False else 0
    wants = Wants(
        output="embedding", dimensions=body.dimensions, normalises=True, truncate_tokens=cut
    )
    return _vectors(body, facts, texts, wants)


def embed_prompt_request(body: EmbedPromptBody, facts: CallFacts) -> GenerateRequest | None:
    """Translates a body for one vector; None: there is no text."""
    texts = [body.prompt] if body.prompt else []
    wants = Wants(output="embedding", normalises=False, truncate_tokens=0)
    return _vectors(body, facts, texts, wants)


def _vectors(
    body: EmbeddingBody, facts: CallFacts, texts: Sequence[str], wants: Wants
) -> GenerateRequest | None:
    if not texts:
        return None
    return GenerateRequest(
        **{**call_fields(body, facts), "model": model_name(body.model)},
        prompts=tuple(TextPrompt(text=text) for text in texts),
        wants=wants,
    )


def chat_request(body: ChatBody, facts: CallFacts) -> GenerateRequest | None:
    """Translates a chat; None: it only asks for the model to be loaded.

    Raises:
        InvalidRequest: It asks for what is not supported, or fields contradict each other.
    """
    tools = check_tools([(number, _tool(tool)) for number, tool in own_tools(body.tools)])
    messages = [_message(number, one) for number, one in enumerate(body.messages or ())]
    if not messages:
        return None
    is_continued = messages[-1]["role"] == "assistant"
    prompt = ChatPrompt(
        messages=tuple(messages),
        tools=tools,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        template_variables=_thinking(body),
    )
    return _request(body, facts, prompt, use_tools(tools, "auto"))


def generation_request(body: GenerateBody, facts: CallFacts) -> GenerateRequest | None:
    """Translates a generation; None: it only asks for the model to be loaded.

    Raises:
        InvalidRequest: It asks for what is not supported, or fields contradict each other.
    """
    if not body.prompt:
        return None
    if body.raw:
        if body.system:
            raise invalid("system", "contradicts raw: write it into the prompt")
        if body.think is not None:
            raise invalid("think", "contradicts raw: write it into the prompt")
        return _request(body, facts, TextPrompt(text=body.prompt), NO_TOOLS)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    prompt = ChatPrompt(messages=tuple(messages), template_variables=_thinking(body))
    return _request(body, facts, prompt, NO_TOOLS)


def _request(
    body: GenerationBody, facts: CallFacts, prompt: Prompt, use: ToolUse
) -> GenerateRequest:
    options = body.options or OptionsBody.model_validate({})
    constraint = _constraint(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    return GenerateRequest(
        **{**call_fields(body, facts), "model": model_name(body.model)},
        prompts=(prompt,),
        sampling=_sampling(options, constraint),
        stopping=_stopping(options),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        calls=use.calls,
        constraint_param="format" if constraint is not None else "constraint",
        max_tokens_param="options.num_predict",
    )


def _sampling(options: OptionsBody, constraint: Constraint | None) -> Sampling:
    given = given_numbers(options, "ollama")
    if options.repeat_last_n == 0:
        given.pop("repetition_penalty", None)
    elif given.get("repetition_penalty", 1) == 1:
        pass
    elif options.repeat_last_n == _DEFAULT_LAST_N:
        leave_out("options.repeat_last_n", "repeat_penalty applies to the whole text")
    elif options.repeat_last_n not in (None, -1):
        raise unsupported("options.repeat_last_n", "a penalty over a part of the text")
    return Sampling(numbers=given, constraint=constraint)


def _stopping(options: OptionsBody) -> Stopping:
    most, stop = options.num_predict, options.stop
    return Stopping(
        max_tokens=None if most in (None, -1, -2) else most,
        is_bounded=True,
        stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
    )


def _constraint(body: GenerationBody) -> Constraint | None:
    given = body.format
    if given is None or given == "":
        return None
    if given == "json":
        given = {"type": "object", "additionalProperties": True}
    if isinstance(given, str):
        raise invalid("format", f'must be "json" or a JSON schema, not {given[:80]!r}')
    return Constraint(kind="json_schema", text=json.dumps(given, ensure_ascii=False))


def _thinking(body: GenerationBody) -> dict[str, Any]:
    """Variables about reasoning for the chat template."""
    think = body.think
    if think is None:
        return {}
    effort = {} if isinstance(think, bool) else {"reasoning_effort": think}
    return {"enable_thinking": bool(think), **effort}


def _message(number: int, message: MessageBody) -> dict[str, Any]:
    where = f"messages[{number}]"
    content = message.content
    if message.images and message.role == "tool":
        leave_out(f"{where}.images", "content other than text")
        content = "\n".join(filter(None, (content, instead_of("image"))))
    elif message.images:
        raise unsupported(f"{where}.images", "content other than text")
    if content is None and not message.tool_calls:
        raise invalid(f"{where}.content", "is missing; give a text")
    translated: dict[str, Any] = {"role": message.role, "content": content or ""}
    named = {
        "reasoning_content": message.thinking,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
    translated |= {name: value for name, value in named.items() if value}
    if message.tool_calls:
        translated["tool_calls"] = [
            past_call(
                call.id or "",
                call.function.name,
                json.dumps(call.function.arguments or {}, ensure_ascii=False),
            )
            for call in message.tool_calls
        ]
    return translated


def _tool(tool: ToolBody) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    function = tool.function
    given = {"description": function.description, "parameters": function.parameters}
    described = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": function.name, **described}}
