"""Pydantic AI: text, a stream, typed answers by schema and by tool."""

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from settings import MODEL, QUESTION


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


asked: list[str] = []
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL)
    short = {"max_tokens": 48, "temperature": 0.0}
    assert Agent(model, model_settings=short).run_sync(QUESTION).output
    for output in (NativeOutput(City), ToolOutput(City)):
        agent = Agent(model, output_type=output, model_settings=short, retries=3)
        assert isinstance(agent.run_sync("Name a city.").output, City)

    weather = Agent(model, output_type=NativeOutput(City), model_settings=short, retries=3)

    @weather.tool_plain
    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        return f"It is sunny in {city}."

    # In each turn the model calls or answers.
    asked.clear()
    try:
        run = weather.run_sync("Name a city.", usage_limits=UsageLimits(request_limit=4))
        assert isinstance(run.output, City)
    except UsageLimitExceeded:
        assert len(asked) >= 4
