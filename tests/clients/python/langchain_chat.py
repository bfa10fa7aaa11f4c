"""LangChain: invoke, stream, tools, structured output, an agent with a provider's schema."""

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from settings import MODEL, QUESTION


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


@tool
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city}."


for use_responses in (False, True):
    llm = ChatOpenAI(model=MODEL, max_tokens=48, temperature=0, use_responses_api=use_responses)
    message = llm.invoke(QUESTION)
    assert message.text
    assert "".join(chunk.text for chunk in llm.stream(QUESTION)) == message.text
    calls = llm.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?")
    assert calls.tool_calls[0]["name"] == "get_weather"
    city = llm.with_structured_output(City, method="json_schema").invoke("Name a city.")
    assert isinstance(city, City)
    agent = create_agent(llm, tools=[get_weather], response_format=ProviderStrategy(City))
    question = {"messages": [{"role": "user", "content": "Name a city."}]}
    found = agent.invoke(question, {"recursion_limit": 12})
    assert isinstance(found["structured_response"], City)
