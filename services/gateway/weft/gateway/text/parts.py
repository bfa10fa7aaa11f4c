"""Contents of messages: a text or, in messages with images, a list of parts in their order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.gateway.request import ChatPrompt, ImageFile
from weft.gateway.validate import unsupported
from weft.gateway.warnings import warn

Part = Mapping[str, Any]
Content = str | list[Part]
IMAGE: Part = {"type": "image"}


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


def instead_of(kind: str) -> str:
    """The text that stands for a part of a tool's result that the model cannot read. A session goes
    on whatever its tools return.
    """
    return f"[The tool returned content of type {kind[:80]}. This model reads text alone.]"


def without_images(prompt: ChatPrompt, problem: str) -> ChatPrompt:
    """A conversation for a model that takes text alone: a text stands for each image that a tool
    has returned. `problem` says why the model's own images are not served; empty: it has none.
    Raises InvalidRequest for other images.
    """
    images = iter(prompt.images)
    messages: list[Mapping[str, Any]] = []
    for message in prompt.messages:
        content = message.get("content")
        if not isinstance(content, list):
            messages.append(message)
            continue
        texts: list[str] = []
        for part in content:
            if part["type"] == "text":
                texts.append(part["text"])
                continue
            image = next(images)
            what = f"content `{image.kind[:80]}`"
            if not image.is_of_tool:
                raise unsupported(image.type_param, f"{what}: {problem}" if problem else what)
            warn(image.type_param.removesuffix(".type"), f"left out ({what})")
            texts.append(instead_of(image.kind))
        messages.append({**message, "content": "\n".join(texts)})
    return replace(prompt, messages=tuple(messages), images=())


def without_image(prompt: ChatPrompt, image: ImageFile, problem: str) -> ChatPrompt:
    """The conversation with a text in place of one of its images."""
    place = next(number for number, one in enumerate(prompt.images) if one is image)
    warn(image.where, f"left out: {problem}")
    text = text_part(f"[The tool returned an image. It {problem}.]")
    numbers = itertools.count()
    messages = tuple(
        {
            **message,
            "content": [
                text if part == IMAGE and next(numbers) == place else part
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else message
        for message in prompt.messages
    )
    images = (*prompt.images[:place], *prompt.images[place + 1 :])
    return replace(prompt, messages=messages, images=images)


def _merged(parts: list[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if merged and part["type"] == merged[-1]["type"] == "text":
            part = text_part(merged.pop()["text"] + part["text"])
        merged.append(part)
    return merged
