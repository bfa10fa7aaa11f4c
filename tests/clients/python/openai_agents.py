"""OpenAI's agents SDK over the Responses API and over chats: a run, a tool, a typed answer."""

import asyncio
from typing import Annotated

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from settings import MODEL, QUESTION


class City(BaseModel):
    """What an answer is to be."""

    name: str = Field(max_length=20)


asked: list[str] = []


@function_tool
def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """Tells the weather of a city."""
    asked.append(city)
    return f"It is sunny in {city}."


async def main() -> None:
    """Runs the tutorial's agents on both APIs."""
    set_tracing_disabled(True)
    client = AsyncOpenAI()
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=client)
        short = ModelSettings(max_tokens=400, temperature=0)
        plain = await Runner.run(
            Agent("plain", "Be brief.", model=model, model_settings=short), QUESTION
        )
        assert plain.final_output
        streamed = Runner.run_streamed(
            Agent("plain", "Be brief.", model=model, model_settings=short), QUESTION
        )
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds
        asked.clear()
        caller = Agent(
            "caller",
            "Use the tool.",
            model=model,
            tools=[get_weather],
            model_settings=ModelSettings(max_tokens=400, temperature=0, tool_choice="required"),
            tool_use_behavior="stop_on_first_tool",
        )
        called = await Runner.run(caller, "How is the weather in Paris?")
        assert asked
        assert called.final_output == f"It is sunny in {asked[0]}."
        typed = Agent("typed", model=model, output_type=City, model_settings=short)
        assert isinstance((await Runner.run(typed, "Name a city.")).final_output, City)
        # A tool and a typed answer at once: in each turn the model does one or the other.
        asked.clear()
        both = Agent(
            "both", model=model, tools=[get_weather], output_type=City, model_settings=short
        )
        try:
            result = await Runner.run(both, "Name a city.", max_turns=4)
            assert isinstance(result.final_output, City)
        except MaxTurnsExceeded:
            assert len(asked) >= 4


asyncio.run(main())
