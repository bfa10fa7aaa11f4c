"""What a model's text means to a client of chats: content, reasoning, calls of tools."""

from weft.gateway.text.answer.parser import (
    AnswerParser,
    AnswerPart,
    CallPart,
    NamedCallParser,
    TextParser,
    joined,
)

__all__ = ["AnswerParser", "AnswerPart", "CallPart", "NamedCallParser", "TextParser", "joined"]
