"""Contents of messages, collected from the parts of a dialect."""

from __future__ import annotations

from weft.gateway.long_text import LongText
from weft.gateway.request import FileKind, MediaFile
from weft.gateway.text.parts import MEDIA_PARTS, Content, Part, instead_of, text_part
from weft.gateway.validate import invalid
from weft.gateway.warnings import warn

_COARSE = "low"
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus")
"""Formats that a part of audio may name."""
_DETAILS = (None, "auto", "low", "high", "original")


class ContentBuilder:
    """Collects the parts of one message in their order, and its images and clips in `files`, which
    the messages of a conversation share. `is_of_tool` says that a tool has returned the content.
    """

    def __init__(self, files: list[MediaFile], *, is_of_tool: bool = False) -> None:
        self._files = files
        self.is_of_tool = is_of_tool
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
        refused once it is read. The other arguments are of `MediaFile`, but for OpenAI's `detail`,
        and its path.
        """
        if detail not in _DETAILS:
            raise invalid(detail_param, "must be auto, low or high")
        self.add_file(
            source,
            modality="image",
            kind=kind,
            where=where,
            type_param=type_param,
            is_coarse=detail == _COARSE,
        )

    def add_file(
        self,
        source: str | bytes | LongText | None,
        *,
        modality: FileKind,
        kind: str,
        where: str,
        type_param: str,
        is_coarse: bool = False,
    ) -> None:
        """Adds a file of any modality, as `add_image` does an image."""
        self._files.append(
            MediaFile(
                source=source or "",
                where=where,
                kind=kind,
                type_param=type_param,
                modality=modality,
                is_coarse=is_coarse,
                is_of_tool=self.is_of_tool,
            )
        )
        self._parts.append(MEDIA_PARTS[modality])

    def add_input_audio(
        self, data: str | bytes | LongText | None, format: str | None, place: str
    ) -> None:
        """Adds OpenAI's part `input_audio` at the path `place`. The file's own bytes overrule the
        format, but it must be one of those that are known.
        """
        where = f"{place}.input_audio"
        if format is not None and format not in AUDIO_FORMATS:
            raise invalid(f"{where}.format", f"must be one of {', '.join(AUDIO_FORMATS)}")
        self.add_file(
            data,
            modality="audio",
            kind="input_audio",
            where=f"{where}.data",
            type_param=f"{place}.type",
        )

    def leave_out(self, kind: str, where: str) -> None:
        """Puts a text in place of a part of a tool's result that no model reads."""
        warn(where, f"left out (content `{kind[:80]}`)")
        self.add_text(instead_of(kind))

    @property
    def content(self) -> Content:
        """A text, if there is nothing else."""
        if any(part["type"] != "text" for part in self._parts):
            return self._parts
        return "\n".join([part["text"] for part in self._parts])
