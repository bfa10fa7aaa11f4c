"""Media in a prompt: which of its tokens stand for what, and what the media are."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from weft.contract.errors import InvalidRequest
from weft.contract.wire import wire

MEDIA_DIGEST_BYTES = 32
MAX_SPANS = 4096
"""Most spans of a prompt."""
MediaKind = Literal["image", "audio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """Consecutive placeholder tokens of a prompt, which take their rows from one medium."""

    position: int = field(metadata=wire(low=0))
    """Position in the prompt of the first token."""
    length: int = field(metadata=wire(low=1))
    """Tokens."""
    digest: bytes = field(metadata=wire(least=MEDIA_DIGEST_BYTES, most=MEDIA_DIGEST_BYTES))
    """`Media.digest` of the medium."""
    offset: int = field(default=0, metadata=wire(low=0))
    """Row of the medium that stands at `position`; the others follow in order."""
    shape: tuple[int, ...] = field(default=(), metadata=wire(most=3))
    """`Media.shape` of the medium, which workers without an encoder need where a model rotates by
    rows and columns; empty: not told.
    """
    time: int = field(default=0, metadata=wire(low=0))
    """Where a model rotates by time too: 0 for a picture or a video's first frames, else one more
    than the steps from these to the span's, which follows the span before directly.
    """

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One medium, processed so far that only a model's encoder is left to run.

    An image is one picture of the shape [height, width, 3], uint8; in a video consecutive frames
    that an encoder joins are one, as [height, width, 3 * frames]. Encoders that look at tiles get
    one medium for each tile. A clip of audio is its log-mel spectrogram, little-endian float32, as
    [mels, frames, 4].
    """

    kind: MediaKind
    processor: str
    """Names the processing and its options."""
    shape: tuple[int, ...]
    """Of `data`, whose entries are bytes."""
    data: bytes
    digest: bytes
    """Of everything that its rows depend on beside the model (`media_digest`)."""

    @classmethod
    def of(cls, kind: MediaKind, processor: str, shape: Sequence[int], data: bytes) -> Media:
        """Makes one and computes its digest."""
        digest = media_digest(kind, processor, shape, data)
        return cls(kind=kind, processor=processor, shape=tuple(shape), data=data, digest=digest)


def media_digest(kind: MediaKind, processor: str, shape: Sequence[int], data: bytes) -> bytes:
    """Identity of processed media: BLAKE2b-256 over framed fields (test vectors:
    protos/vectors/media_key.json). Content of another shape or processing has another digest.
    """
    hasher = MediaHasher(kind, processor, shape, len(data))
    hasher.update(data)
    return hasher.digest()


class MediaHasher:
    """`media_digest` of content that comes in parts, `num_bytes` in all."""

    def __init__(
        self, kind: MediaKind, processor: str, shape: Sequence[int], num_bytes: int
    ) -> None:
        sizes = b"".join(size.to_bytes(8, "little") for size in shape)
        state = hashlib.blake2b(digest_size=MEDIA_DIGEST_BYTES, person=b"weft-media")
        for part in (kind.encode(), processor.encode(), b"uint8", sizes):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        state.update(num_bytes.to_bytes(8, "little"))
        self.update, self.digest = state.update, state.digest


def spans_within(
    spans: Sequence[MediaSpan], start: int, end: int
) -> Iterator[tuple[MediaSpan, int, int]]:
    """Yields the spans that touch the positions [start, end), in order, each with the first of
    these positions that it has and the one after the last. `spans` are in order.
    """
    for index in range(bisect_right(spans, start, key=lambda span: span.end), len(spans)):
        span = spans[index]
        if span.position >= end:
            return
        yield span, max(span.position, start), min(span.end, end)


def has_media_rows(spans: Sequence[MediaSpan], start: int, end: int) -> bool:
    """Whether computing the tokens [start, end) takes rows of media. A head may need those of the
    token before the first one too. `spans` are in order.
    """
    return next(spans_within(spans, max(0, start - 1), end), None) is not None


def spans_before(spans: Sequence[MediaSpan], end: int) -> list[MediaSpan]:
    """The spans, or parts of spans, at positions before `end`."""
    return [
        replace(span, length=last - span.position) for span, _, last in spans_within(spans, 0, end)
    ]


def spans_from(spans: Sequence[MediaSpan], start: int) -> list[MediaSpan]:
    """The spans, or parts of spans, at positions from `start` on."""
    index = bisect_right(spans, start, key=lambda span: span.end)
    found = list(spans[index:])
    if found and (num_before := start - found[0].position) > 0:
        first = found[0]
        found[0] = replace(
            first,
            position=start,
            length=first.length - num_before,
            offset=first.offset + num_before,
        )
    return found


def before_span(spans: Sequence[MediaSpan], position: int) -> int:
    """The position itself, or the first one of the span that it cuts. `spans` are in order."""
    index = bisect_right(spans, position, key=lambda span: span.end)
    return min(position, spans[index].position) if index < len(spans) else position


def border_before_span(spans: Sequence[MediaSpan], position: int, page_size: int) -> int:
    """The last page border that is not after a position and cuts no span."""
    border = position // page_size * page_size
    while (first := before_span(spans, border)) < border:
        border = first // page_size * page_size
    return border


def check_spans(spans: Sequence[MediaSpan], num_tokens: int) -> None:
    """Raises InvalidRequest unless the spans are in order, apart from each other and within the
    prompt.
    """
    if len(spans) > MAX_SPANS:
        raise InvalidRequest(
            f"the prompt has {len(spans)} spans of media; at most {MAX_SPANS} are allowed",
            stage="validate",
            param="spans",
        )
    end = 0
    for span in spans:
        if span.position < end or span.end > num_tokens:
            raise InvalidRequest(
                f"a span of media has the tokens {span.position} to {span.end - 1} of a prompt of "
                f"{num_tokens}; spans lie in order within the prompt",
                stage="validate",
                param="spans",
            )
        end = span.end
