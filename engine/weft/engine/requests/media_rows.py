"""Which media have their rows on the device. The scheduler asks it before it plans a chunk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import Int64Array
from weft.contract.errors import InvalidRequest
from weft.contract.spans import Media, MediaSpan, check_spans, has_media_rows, spans_within
from weft.engine.requests.media_axes import MediaAxes
from weft.engine.requests.media_store import MediaStore
from weft.engine.requests.request import Request, RequestKey

_NOT_FIRST = (
    "a prompt of this model begins with all rows of one clip of audio, and other tokens "
    "follow; ask for a transcription"
)
GROUP_ROWS = 16
"""Rows that are given to a medium together."""


EncodeRun = Callable[[Sequence[tuple[Media, Int64Array]]], None]


class EncoderFacts(NamedTuple):
    """What the loop knows of a model's encoder."""

    rows_of: Callable[[Sequence[int]], int]
    """Rows of a medium of this shape. Raises InvalidRequest for one that the encoder cannot
    take.
    """
    cost_of: Callable[[Sequence[int]], int]
    """Patches of a medium of this shape."""
    sees_both_ways: bool = False
    """Whether tokens of a medium attend to one another both ways."""
    is_first: bool = False
    """Whether each prompt begins with all rows of one medium, to which its other tokens attend."""


@dataclass(slots=True, eq=False)
class _Encoded:
    """A medium whose rows are on the device, or will be once the orders so far are done."""

    groups: Int64Array
    num_uses: int = 0
    """Steps, planned or under way, that may read the rows."""
    is_lost: bool = False
    """Whether it could not be encoded."""

    def places(self, first: int, count: int) -> Int64Array:
        rows = np.arange(first, first + count)
        return self.groups[rows // GROUP_ROWS] * GROUP_ROWS + rows % GROUP_ROWS


class _Tail(NamedTuple):
    slot: int
    first: int
    """Position whose row is the first one of the slot's."""


class FilledMedia:
    """Media of prompts on a worker without an encoder: other workers compute the tokens for which
    rows are needed, or send the rows of those after a fill's last page, which this worker computes.

    Args:
        slot_rows: Rows for each slot in the executor's memory: as many as a page has and one more;
            0: no rows are sent.
    """

    def __init__(self, axes: MediaAxes, slot_rows: int = 0) -> None:
        self.axes = axes
        self.slot_rows = slot_rows
        self._tails: dict[RequestKey, _Tail] = {}
        """A request's samples share its rows, until another one's take their place."""
        self._keys: dict[int, RequestKey] = {}
        """By slot."""
        self._stranded: list[Request] = []

    def check(self, spans: Sequence[MediaSpan], num_tokens: int, *, is_part: bool = False) -> None:
        """Raises InvalidRequest if the tokens that an owner runs itself need rows."""
        check_spans(spans, num_tokens)
        self.axes.check(spans)
        if has_media_rows(spans, num_tokens - 1, num_tokens):
            raise InvalidRequest(
                "the prompt ends with an image, and this worker has no image tower "
                "(language_model_only); let two tokens of text follow",
                stage="validate",
                param="spans",
            )

    def begin(self, request: Request) -> None:
        self.axes.begin(request, [span.shape for span in request.spans])

    def end(self, request: Request) -> None: ...

    def begin_plan(self, *, has_running: bool) -> None: ...

    @property
    def fills_step(self) -> bool:
        return False

    def encode(self, run: EncodeRun) -> None: ...

    def begin_step(self, number: int) -> None: ...

    def end_step(self, number: int) -> None: ...

    def limit(self, request: Request, start: int, num_tokens: int) -> int:
        """As `MediaRows.limit`. A request that lacks rows is stranded: no filler is left."""
        needs_rows = has_media_rows(request.spans, start, start + num_tokens)
        if not needs_rows or self.has_rows(request, start):
            return num_tokens
        self._stranded.append(request)
        return 0

    def places_in(
        self, request: Request, first: int, end: int
    ) -> Iterator[tuple[Int64Array, Int64Array]]:
        """As `MediaRows.places_in`."""
        for _, begin, last in spans_within(request.spans, first, end):
            places = self._places(self._tails[request.key], begin, last)
            yield np.arange(begin - first, last - first), places

    def has_rows(self, request: Request, start: int) -> bool:
        """Whether the rows are here that the tokens from `start` on take."""
        tail = self._tails.get(request.key)
        return tail is not None and tail.first <= max(0, start - 1)

    def take_rows(self, request: Request, start: int) -> list[int]:
        """Places for the rows that the tokens from `start` on take, which the caller fills."""
        tail = _Tail(request.slot, max(0, start - 1))
        if (former := self._keys.get(request.slot)) is not None:
            self._tails.pop(former, None)
        if (own := self._tails.get(request.key)) is not None:
            del self._keys[own.slot]
        self._tails[request.key], self._keys[request.slot] = tail, request.key
        found = spans_within(request.spans, tail.first, request.num_tokens)
        return [
            place for _, begin, last in found for place in self._places(tail, begin, last).tolist()
        ]

    def _places(self, tail: _Tail, begin: int, end: int) -> Int64Array:
        return tail.slot * self.slot_rows + np.arange(begin, end) - tail.first

    def take_stranded(self) -> Sequence[Request]:
        """The requests that were stranded since the last call."""
        stranded, self._stranded = self._stranded, []
        return stranded


def check_media(
    media: MediaRows | FilledMedia | None,
    spans: Sequence[MediaSpan],
    num_tokens: int,
    *,
    is_part: bool = False,
) -> None:
    """As `MediaRows.check`, also where prompts have no media: then InvalidRequest if one has."""
    if media is not None:
        if spans or (isinstance(media, MediaRows) and media.are_needed):
            media.check(spans, num_tokens, is_part=is_part)
    elif spans:
        raise InvalidRequest("this worker takes no images", stage="validate", param="spans")


class MediaRows:
    """Rows of media in the executor's memory, by digest. Rows that a step reads stay until the step
    has ended. Those of other media stay until their place is needed, the least recently used ones
    first. A medium is encoded in the turn in which a chunk first needs it, and again if its rows
    are gone. Beside running requests the chunk follows in the next turn, so that these do not wait
    for both at once, and no prompt that came meanwhile shares its step (`fills_step`).

    Args:
        num_rows: Rows of the executor's memory.
        max_step_cost: Patches that a step encodes beside running requests. The first medium of a
            step may have more.
        max_step_tokens: Prompt tokens that a step can have.
        axes: Rotations of requests; None: they are by tokens' positions.
    """

    def __init__(
        self,
        store: MediaStore,
        facts: EncoderFacts,
        num_rows: int,
        max_step_cost: int,
        max_step_tokens: int,
        axes: MediaAxes | None = None,
    ) -> None:
        self.store = store
        self.axes = axes or MediaAxes(None)
        self._facts = facts
        self._num_groups = num_rows // GROUP_ROWS
        self._free = list(range(self._num_groups - 1, -1, -1))
        self._held: OrderedDict[bytes, _Encoded] = OrderedDict()
        self._max_step_cost = max_step_cost
        self._max_step_tokens = max_step_tokens
        self._room = 0
        self._has_running = False
        self._encoded: frozenset[bytes] = frozenset()
        """Media that the last turn encoded beside running requests."""
        self._waited_for = self._encoded
        """Media that the turn before this one encoded beside running requests."""
        self.fills_step = False
        """Whether a planned chunk has media that running requests have waited for, so that no
        further prompt joins it.
        """
        self._due: list[tuple[Media, _Encoded]] = []
        self._planned: dict[bytes, _Encoded] = {}
        self._steps: dict[int, list[_Encoded]] = {}
        self.num_encoded = 0
        """Media encoded since the start."""
        self.num_patches = 0
        """Their patches."""
        self.num_reused = 0
        """Times that a step took rows of a medium which an earlier step had encoded."""

    # -- requests --------------------------------------------------------------------------------

    def check(self, spans: Sequence[MediaSpan], num_tokens: int, *, is_part: bool = False) -> None:
        """Raises InvalidRequest if a prompt can never run with these media, and MediaMissing if the
        content of one is not held.

        Args:
            is_part: Whether the tokens are a prompt's first pages, which a fill ends anywhere.
        """
        check_spans(spans, num_tokens)
        if self._facts.is_first:
            self._check_first(spans, num_tokens + is_part)
        self.store.check(spans)
        self.axes.check_times(spans)
        for span in spans:
            media = self.store.get(span.digest)
            num_rows = self._facts.rows_of(media.shape)
            if span.shape not in ((), media.shape):
                raise InvalidRequest(
                    f"an image has the shape {list(media.shape)}, its span says {list(span.shape)}",
                    stage="validate",
                    param="spans",
                )
            if span.offset + span.length > num_rows:
                raise InvalidRequest(
                    f"an image has {num_rows} rows, and the prompt wants {span.length} from row "
                    f"{span.offset}",
                    stage="validate",
                    param="spans",
                )
            if -(-num_rows // GROUP_ROWS) > self._num_groups:
                raise InvalidRequest(
                    f"an image has {num_rows} rows; this worker has room for "
                    f"{self._num_groups * GROUP_ROWS} (media_rows)",
                    stage="validate",
                    param="spans",
                )
            if self._facts.sees_both_ways:
                self._check_whole(span, num_rows)
            if self._facts.is_first and not is_part and span.length != num_rows:
                raise InvalidRequest(_NOT_FIRST, stage="validate", param="spans")

    @property
    def are_needed(self) -> bool:
        """Whether each prompt has media."""
        return self._facts.is_first

    def _check_first(self, spans: Sequence[MediaSpan], num_tokens: int) -> None:
        is_one = len(spans) == 1 and spans[0].position == spans[0].offset == 0
        if not is_one or spans[0].end >= num_tokens:
            raise InvalidRequest(_NOT_FIRST, stage="validate", param="spans")

    def _check_whole(self, span: MediaSpan, num_rows: int) -> None:
        if span.length < num_rows:
            problem = f"an image has {num_rows} rows, all of which this model needs in the prompt"
        elif num_rows > self._max_step_tokens:
            problem = (
                f"an image has {num_rows} tokens, which this model computes in one step; a step "
                f"has at most {self._max_step_tokens} (max_step_tokens)"
            )
        else:
            return
        raise InvalidRequest(problem, stage="validate", param="spans")

    def begin(self, request: Request) -> None:
        """Keeps the content of a request's media until `end`."""
        self.store.pin(request.spans)
        self.store.pin(request.tail_spans)
        self.axes.begin(request, [self.store.get(span.digest).shape for span in request.spans])

    def end(self, request: Request) -> None:
        self.store.unpin(request.spans)
        self.store.unpin(request.tail_spans)

    # -- steps -----------------------------------------------------------------------------------

    def begin_plan(self, *, has_running: bool) -> None:
        self._waited_for, self._encoded = self._encoded, frozenset()
        self._room, self._has_running = self._max_step_cost, has_running
        self.fills_step = False

    def limit(self, request: Request, start: int, num_tokens: int) -> int:
        """Tokens of a chunk whose media have rows in this step, from none to all. Gives media that
        lack rows their place and makes them due, as far as there is room.
        """
        # A head may need the hidden state of the token before the first one again. Models whose
        # prompts begin with a clip have none.
        first = start if self._facts.is_first else max(0, start - 1)
        for span, _, _ in spans_within(request.spans, first, start + num_tokens):
            if not self._use(span.digest):
                return max(0, span.position - start)
        if start + num_tokens == request.num_tokens:
            # Then they are here when the fill is packed (`encode_now`).
            for span in request.tail_spans:
                if not self._use(span.digest):
                    return max(0, num_tokens - 1)
        return num_tokens

    def encode_now(self, spans: Sequence[MediaSpan], run: EncodeRun) -> list[int] | None:
        """The places of the spans' rows, which are encoded if they are not there. No step keeps
        them, so the caller reads them at once. None: there is no room for them.
        """
        held = list[_Encoded]()
        try:
            for span in spans:
                encoded = self._held.get(span.digest) or self._reserve(span.digest, is_now=True)
                if encoded is None:
                    return None
                encoded.num_uses += 1
                held.append(encoded)
            self.encode(run)
            found = zip(spans, held, strict=True)
            return [
                place
                for span, encoded in found
                for place in encoded.places(span.offset, span.length).tolist()
            ]
        finally:
            for encoded in held:
                self._leave(encoded)

    def encode(self, run: EncodeRun) -> None:
        """Encodes the media that the planned step needs and that have no rows yet, if there are
        any: calls `run` with each of them and the places of its rows. If that raises, none of them
        has rows.
        """
        if not self._due:
            return
        due, self._due = self._due, []
        try:
            run([(one, made.places(0, self._facts.rows_of(one.shape))) for one, made in due])
        except BaseException:
            for media, encoded in due:
                encoded.is_lost = True
                del self._held[media.digest]
            raise
        if self._has_running:
            self._encoded |= {media.digest for media, _ in due}
        self.num_encoded += len(due)
        self.num_patches += sum(self._facts.cost_of(media.shape) for media, _ in due)

    def places_in(
        self, request: Request, first: int, end: int
    ) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yields, for each of a request's spans within the positions [first, end): the positions,
        counted from `first`, and the places of their rows.
        """
        for span, begin, last in spans_within(request.spans, first, end):
            encoded = self._held[span.digest]
            places = encoded.places(span.offset + begin - span.position, last - begin)
            yield np.arange(begin - first, last - first), places

    def begin_step(self, number: int) -> None:
        """The planned step begins."""
        if self._planned:
            self._steps[number] = list(self._planned.values())
            self._planned = {}

    def end_step(self, number: int) -> None:
        for encoded in self._steps.pop(number, ()):
            self._leave(encoded)

    def sizes(self) -> dict[str, int]:
        """Media held in host memory, media with rows on the device, and steps that read some."""
        return {
            "media": len(self.store),
            "media_with_rows": len(self._held),
            "media_steps": len(self._steps),
        }

    def _leave(self, encoded: _Encoded) -> None:
        encoded.num_uses -= 1
        if encoded.is_lost and not encoded.num_uses:
            self._free += encoded.groups.tolist()

    def _use(self, digest: bytes) -> bool:
        if digest not in self._planned:
            encoded = self._held.get(digest)
            if encoded is None:
                encoded = self._reserve(digest)
                if encoded is None:
                    return False
            else:
                self.num_reused += 1
            self._held.move_to_end(digest)
            encoded.num_uses += 1
            self._planned[digest] = encoded
            self.fills_step |= digest in self._waited_for
        return not self._has_running or all(media.digest != digest for media, _ in self._due)

    def _reserve(self, digest: bytes, *, is_now: bool = False) -> _Encoded | None:
        media = self.store.get(digest)
        cost = self._facts.cost_of(media.shape)
        if not is_now and self._has_running and cost > self._room and self._due:
            return None
        num_groups = -(-self._facts.rows_of(media.shape) // GROUP_ROWS)
        if not self._make_room(num_groups):
            return None
        groups = [self._free.pop() for _ in range(num_groups)]
        encoded = self._held[digest] = _Encoded(np.array(groups, np.int64))
        self._due.append((media, encoded))
        self._room -= cost
        return encoded

    def _make_room(self, num_groups: int) -> bool:
        if len(self._free) < num_groups:
            unused = [digest for digest, one in self._held.items() if not one.num_uses]
            for digest in unused:
                if len(self._free) >= num_groups:
                    break
                self._free += self._held.pop(digest).groups.tolist()
        return len(self._free) >= num_groups
