"""Contents of messages: a text or, in messages with media, a list of parts in their order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.gateway.request import ChatPrompt, FileKind, MediaFile
from weft.gateway.validate import invalid
from weft.gateway.warnings import warn

Part = Mapping[str, Any]
Content = str | list[Part]
MEDIA_PARTS: Mapping[FileKind, Part] = {
    "image": {"type": "image"},
    "audio": {"type": "audio"},
    "video": {"type": "video"},
}
"""What a chat template is given for a file, in place of its content."""


def text_part(text: str) -> Part:
    """The part of a text."""
    return {"type": "text", "text": text}


def parts_of(content: Content) -> list[Part]:
    """A content as parts."""
    return [text_part(content)] if isinstance(content, str) else content


def text_of(content: object) -> str:
    """The texts of a content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join([part["text"] for part in content if part["type"] == "text"])


def wrapped(content: Content, before: str = "", after: str = "") -> Content:
    """A content with a text ahead of it and a text after it."""
    return joined(joined(before, content), after)


def joined(first: Content, second: Content, between: str = "") -> Content:
    """Two contents as one, with a text between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    parts = [*parts_of(first), text_part(between), *parts_of(second)]
    return _merged([part for part in parts if part.get("text") != ""])


def instead_of(kind: str, reads: str = "text alone") -> str:
    """The text that stands for a part of a tool's result that the model cannot read. A session goes
    on whatever its tools return.
    """
    return f"[The tool returned content of type {kind[:80]}. This model reads {reads}.]"


def without_unread(prompt: ChatPrompt, unread: Mapping[FileKind, str], reads: str) -> ChatPrompt:
    """A conversation for a model that does not take all kinds of media: a text stands for each such
    file that a tool has returned.

    Args:
        unread: The kinds that it does not take, and why not.
        reads: What it does take, for that text.

    Raises:
        InvalidRequest: A client has sent such a file.
    """
    if not any(file.modality in unread for file in prompt.files):
        return prompt
    waiting, kept = iter(prompt.files), list[MediaFile]()
    messages: list[Mapping[str, Any]] = []
    for message in prompt.messages:
        content = message.get("content")
        if not isinstance(content, list):
            messages.append(message)
            continue
        parts: list[Part] = []
        for part in content:
            if part["type"] == "text":
                parts.append(part)
                continue
            file = next(waiting)
            problem = unread.get(file.modality)
            if problem is None:
                parts.append(part)
                kept.append(file)
                continue
            what = f"content `{file.kind[:80]}`"
            if not file.is_of_tool:
                raise invalid(file.type_param, f"{what} cannot be read: {problem}; leave it out")
            warn(file.type_param.removesuffix(".type"), f"left out ({what})")
            parts.append(text_part(instead_of(file.kind, reads)))
        is_text = all(part["type"] == "text" for part in parts)
        messages.append({**message, "content": text_of(parts) if is_text else parts})
    return replace(prompt, messages=tuple(messages), files=tuple(kept))


def without_file(prompt: ChatPrompt, file: MediaFile, problem: str) -> ChatPrompt:
    """The conversation with a text in place of one of its images or clips."""
    place = next(number for number, one in enumerate(prompt.files) if one is file)
    warn(file.where, f"left out: {problem}")
    what = {"image": "an image", "audio": "audio", "video": "a video"}[file.modality]
    text = text_part(f"[The tool returned {what}. It {problem}.]")
    numbers = itertools.count()
    messages = tuple(
        {
            **message,
            "content": [
                text if part["type"] != "text" and next(numbers) == place else part
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else message
        for message in prompt.messages
    )
    files = (*prompt.files[:place], *prompt.files[place + 1 :])
    return replace(prompt, messages=messages, files=files)


def _merged(parts: list[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if merged and part["type"] == merged[-1]["type"] == "text":
            part = text_part(merged.pop()["text"] + part["text"])
        merged.append(part)
    return merged
