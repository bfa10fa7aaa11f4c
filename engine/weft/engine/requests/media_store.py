"""The content of media in host memory, by digest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.contract.errors import MediaMissing
from weft.contract.spans import Media, MediaSpan


@dataclass(slots=True)
class _Held:
    media: Media
    num_pins: int = 0


class MediaStore:
    """Keeps media that gateways have brought. What an unfinished request has is never dropped; of
    the others the least recently used ones are, beyond `max_bytes` of content.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self.num_bytes = 0
        """Bytes of content that is held."""

    def __len__(self) -> int:
        return len(self._held)

    def put(self, media: Media) -> None:
        """Keeps a medium, unless pinned ones leave no room for it."""
        held = self._held.get(media.digest)
        if held is not None:
            self._held.move_to_end(media.digest)
            return
        if self._make_room(len(media.data)):
            self._held[media.digest] = _Held(media)
            self.num_bytes += len(media.data)

    def get(self, digest: bytes) -> Media:
        """A medium that is pinned, or was just checked."""
        return self._held[digest].media

    def check(self, spans: Sequence[MediaSpan]) -> None:
        """Raises MediaMissing if the content of one is not held."""
        missing = {span.digest for span in spans if span.digest not in self._held}
        if missing:
            raise MediaMissing(
                f"the worker lacks {len(missing)} of the prompt's images; put them first",
                stage="queue",
            )

    def pin(self, spans: Sequence[MediaSpan]) -> None:
        """Keeps the content until `unpin` is called with the same spans."""
        for digest in _digests(spans):
            self._held[digest].num_pins += 1

    def unpin(self, spans: Sequence[MediaSpan]) -> None:
        for digest in _digests(spans):
            self._held[digest].num_pins -= 1
            self._held.move_to_end(digest)
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> bool:
        if self.num_bytes + num_bytes > self._max_bytes:
            unpinned = [digest for digest, held in self._held.items() if not held.num_pins]
            for digest in unpinned:
                if self.num_bytes + num_bytes <= self._max_bytes:
                    break
                self.num_bytes -= len(self._held.pop(digest).media.data)
        return self.num_bytes + num_bytes <= self._max_bytes


def _digests(spans: Sequence[MediaSpan]) -> Iterable[bytes]:
    """Each medium once, in the order of the prompt."""
    return dict.fromkeys(span.digest for span in spans)
