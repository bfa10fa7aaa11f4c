"""Reasoning before constraints, and calls in place of them, through a whole mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer
from weft.testing.meshes.tiny_mesh import MODEL, TinyMesh

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(400)]
LIKELY, NEVER = 12.0, -100.0
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}assistant: <think>{% endif %}{# </think> <tool_call> #}"
)


class Pet(BaseModel):
    """What is asked for."""

    name: str = Field(max_length=8)
    legs: int = Field(ge=0, le=8)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    """Prompts are shipped, so that samples begin with filled pages."""
    flags = ("--local-prefill-max-tokens", "0", "--prefill", "1", "--decode", "1")
    mesh = TinyMesh(
        tmp_path_factory.mktemp("reasoning"),
        *flags,
        marks=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        alike=("</think>", '"', "}"),
        chat_template=TEMPLATE,
    )
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def bias(mesh: TinyMesh, **more: float) -> Any:
    """The end of the reasoning and what closes JSON are likely, the end of the text is not.

    Sixteen tokens come before the end of the reasoning, on average; one of 16 samples has none.
    """
    tokenizer = Tokenizer.from_file(str(mesh.model_dir / "tokenizer.json"))
    likely = {"</think>": LIKELY - 2, '"': LIKELY, "}": LIKELY, "<|im_end|>": NEVER, **more}
    return {str(tokenizer.token_to_id(mark)): value for mark, value in likely.items()}


@pytest.mark.parametrize("has_tools", [False, True])
async def test_a_model_thinks_and_then_answers_in_a_type(mesh: TinyMesh, has_tools: bool) -> None:
    tools: Any = [openai.pydantic_function_tool(Pet)] if has_tools else openai.NOT_GIVEN
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as sdk:
        answer = await sdk.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Which pet?"}],
            response_format=Pet,
            tools=tools,
            n=8,
            logit_bias=bias(mesh, **{"<tool_call>": NEVER}),
        )
    assert any(getattr(choice.message, "reasoning", "") for choice in answer.choices)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Pet)
        assert choice.finish_reason == "stop"


async def test_a_demanded_call_comes_behind_the_reasoning(mesh: TinyMesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as sdk:
        answer = await sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Which pet?"}],
            tools=[openai.pydantic_function_tool(Pet)],
            tool_choice={"type": "function", "function": {"name": "Pet"}},
            n=8,
            logit_bias=bias(mesh),
        )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        Pet.model_validate_json(call.function.arguments)


async def test_a_token_that_begins_a_call_lifts_the_constraint(mesh: TinyMesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as sdk:
        answer = await sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Which pet?"}],
            tools=[openai.pydantic_function_tool(Pet)],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "pet", "schema": Pet.model_json_schema()},
            },
            max_tokens=20,
            logit_bias=bias(mesh, **{"<tool_call>": 70.0, "</think>": 100.0}),
        )
    (choice,) = answer.choices
    # What it writes behind the token is noise, and so is content.
    assert choice.finish_reason == "length"
    assert (choice.message.content or "").startswith("<tool_call>")
