"""LangChain: a picture in its own form of parts, over chats and responses, and an agent that calls
a tool for a screenshot and looks at it.
"""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pictures import ANSWER, BARE, DATA_URL, MODEL, QUESTION, is_named

image = {"type": "image", "base64": BARE, "mime_type": "image/jpeg"}
for use_responses in (False, True):
    llm = ChatOpenAI(model=MODEL, max_tokens=24, temperature=0, use_responses_api=use_responses)
    ask = HumanMessage(content=[image, {"type": "text", "text": QUESTION}])
    assert llm.invoke([ask]).text == ANSWER
    assert "".join(chunk.text for chunk in llm.stream([ask])) == ANSWER


@tool
def screenshot() -> list[dict[str, object]]:
    """Takes a screenshot."""
    return [{"type": "image_url", "image_url": {"url": DATA_URL}}]


llm = ChatOpenAI(model=MODEL, max_tokens=48, temperature=0)
turns = [HumanMessage(content="Take a screenshot.")]
called = llm.bind_tools([screenshot], tool_choice="screenshot").invoke(turns)
turns += [called, *(screenshot.invoke(call) for call in called.tool_calls)]
looked = llm.invoke([*turns, HumanMessage(content=QUESTION)])
assert is_named(looked.text)
