"""Segments of a transcript, and how times in a clip's tokens divide it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.gateway.api.audio.words import Word

FRAME_S = 0.01
"""Seconds of a spectrogram's frame."""
FRAMES_PER_TIME = 2
"""Frames from one time token to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The tokens that a model has drawn for one clip."""

    ids: tuple[int, ...]
    text: str
    """That of `ids` without times."""
    temperature: float
    avg_logprob: float
    """Mean over the tokens, the end included."""
    no_speech: float | None = None
    """Probability that nobody speaks; None: it was not asked for."""

    @property
    def logprob(self) -> float:
        """Log-probability of all tokens, the end included."""
        return self.avg_logprob * (len(self.ids) + 1)

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text over those of its compressed form: large where it repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript."""

    start_s: float
    end_s: float
    text: str
    ids: tuple[int, ...]
    seek: int
    """First frame of the clip in which it was found."""
    clip: Decoded
    words: tuple[Word, ...] = ()
    """Empty: they are not wanted."""


class Piece(NamedTuple):
    """Tokens between two times of a clip, in frames from its start."""

    start: int
    end: int
    ids: tuple[int, ...]
    first: int
    """Number of its first token in the clip."""


def divide(ids: Sequence[int], first_time: int, num_frames: int) -> tuple[list[Piece], int]:
    """The pieces of a clip's tokens, and the frames after which the next clip begins, as Whisper's
    own program finds them: a text that has no end yet is heard again.

    Args:
        first_time: The token of time 0.
        num_frames: Frames of the clip that are of the file.
    """

    def frame(token: int) -> int:
        return (token - first_time) * FRAMES_PER_TIME

    is_time = [one >= first_time for one in ids]
    ends_once = is_time[-2:] == [False, True]
    cuts = [n for n in range(1, len(ids)) if is_time[n] and is_time[n - 1]]
    if cuts:
        if ends_once:
            cuts.append(len(ids))
        pieces, last = [], 0
        for cut in cuts:
            part = tuple(ids[last:cut])
            pieces.append(Piece(frame(part[0]), frame(part[-1]), part, last))
            last = cut
        done = num_frames if ends_once else frame(ids[last - 1])
        return pieces, done if done > 0 else num_frames
    end = num_frames
    times = [one for one in ids if one >= first_time]
    if times and times[-1] != first_time:
        end = frame(times[-1])
    return [Piece(0, end, tuple(ids), 0)], num_frames
