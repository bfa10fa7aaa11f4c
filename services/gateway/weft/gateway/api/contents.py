"""Contents of messages, collected from the parts of a dialect."""

from __future__ import annotations

from weft.gateway.long_text import LongText
from weft.gateway.request import ImageFile
from weft.gateway.text.parts import IMAGE, Content, Part, instead_of, text_part
from weft.gateway.validate import invalid
from weft.gateway.warnings import warn

_COARSE = "low"
_DETAILS = (None, "auto", "low", "high", "original")


class ContentBuilder:
    """Collects the parts of one message in their order, and its images in `images`, which the
    messages of a conversation share. `is_of_tool` says that a tool has returned the content.
    """

    def __init__(self, images: list[ImageFile], *, is_of_tool: bool = False) -> None:
        self._images = images
        self._is_of_tool = is_of_tool
        self._parts: list[Part] = []

    def add_text(self, text: str) -> None:
        self._parts.append(text_part(text))

    def add_image(
        self,
        source: str | bytes | LongText | None,
        *,
        kind: str,
        where: str,
        type_param: str,
        detail: str | None = None,
        detail_param: str = "",
    ) -> None:
        """Adds an image from a URL, base64 or a file's bytes; None: the part has none, which is
        refused once it is read. The other arguments are of `ImageFile`, but for OpenAI's `detail`,
        and its path.
        """
        if detail not in _DETAILS:
            raise invalid(detail_param, "must be auto, low or high")
        self._images.append(
            ImageFile(
                source=source or "",
                where=where,
                kind=kind,
                type_param=type_param,
                is_coarse=detail == _COARSE,
                is_of_tool=self._is_of_tool,
            )
        )
        self._parts.append(IMAGE)

    def leave_out(self, kind: str, where: str) -> None:
        """Puts a text in place of a part of a tool's result that no model reads."""
        warn(where, f"left out (content `{kind[:80]}`)")
        self.add_text(instead_of(kind))

    @property
    def content(self) -> Content:
        """A text, if there are no images."""
        if IMAGE in self._parts:
            return self._parts
        return "\n".join([part["text"] for part in self._parts])
