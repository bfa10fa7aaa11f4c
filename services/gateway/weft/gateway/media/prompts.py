"""Media in prompts: which tokens stand for one, and how they get their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from weft.contract.spans import Media, MediaSpan


class BadFile(Exception):
    """A file that cannot be used; the message says why."""


class Run(NamedTuple):
    """Consecutive tokens that have rows of one medium."""

    start: int
    """Index of the first in the tokens of its file."""
    length: int
    medium: int
    """Number of the medium among those of its file."""
    offset: int
    """Row of the medium that the first has."""
    time: int = 0
    """As in `MediaSpan`."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The tokens of one file."""

    ids: tuple[int, ...]
    runs: tuple[Run, ...]


class MediaForm(Protocol):
    """How files of one kind become media. Immutable."""

    name: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """Arguments that make the same form in another process."""
        ...

    def __hash__(self) -> int: ...


class MediaPrompts(Protocol):
    """How one model takes files of one kind. Safe to use from several threads."""

    @property
    def form(self) -> MediaForm: ...

    @property
    def place_id(self) -> int:
        """The token that the chat template writes for a file."""
        ...

    @property
    def tokens(self) -> Sequence[str]:
        """Tokens that a conversation's texts must not make."""
        ...

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest file; 0: only its content tells how many it has."""
        ...

    def expansion(self, *size: int, is_coarse: bool = False) -> Expansion:
        """The tokens of a file, by its size alone: height and width of an image, the number of
        samples of a clip. Raises BadFile for a size that the model does not take.
        """
        ...

    def with_texts_around(self, rendered: str) -> str:
        """A rendered conversation with the texts that are around each file's place."""
        ...


def put_in(
    ids: Sequence[int], files: Mapping[int, Sequence[tuple[Expansion, Sequence[Media]]]]
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Replaces each token that stands for a file by the tokens of that file. Returns the ids, and
    spans for the files whose media are given. `files` are by these tokens, in the order of their
    places, each as many as there are places.
    """
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    waiting: dict[int, Iterator[tuple[Expansion, Sequence[Media]]]]
    waiting = {place: iter(those) for place, those in files.items()}
    for id_ in ids:
        if id_ not in waiting:
            expanded.append(id_)
            continue
        expansion, media = next(waiting[id_])
        start = len(expanded)
        if media:
            spans += [
                MediaSpan(
                    position=start + run.start,
                    length=run.length,
                    digest=media[run.medium].digest,
                    offset=run.offset,
                    shape=media[run.medium].shape,
                    time=run.time,
                )
                for run in expansion.runs
            ]
        expanded += expansion.ids
    return expanded, tuple(spans)
