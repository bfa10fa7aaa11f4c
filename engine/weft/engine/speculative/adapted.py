"""Drafts for requests with adapters that bring a draft adapter of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.engine.errors import WeftError
from weft.engine.lora.files import DRAFT_FOLDER
from weft.engine.messages import AdapterOrder
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.speculative.drafter import Drafter
from weft.engine.tiers.mover import Mover

logger = logging.getLogger(__name__)

MOST_HEADS = 64
"""Adapted ones at once: each is one chain more in a step."""
MOST_BYTES = 1 << 30
"""Of all adapted heads together, beside the first one: each is a copy of the head's layer."""


class AdaptedDrafter:
    """A drafter for each draft adapter, and one for all other requests.

    Args:
        plain: For requests without an adapter, or with one that brings nothing for drafts.
        make: From the folder of a draft adapter; called by a thread of its own.
        head_bytes: What each made one takes.
        wake: Called from that thread when something was made.
    """

    def __init__(
        self,
        plain: Drafter,
        make: Callable[[Path], Drafter],
        head_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self._plain = plain
        self._make = make
        self._most = min(MOST_HEADS, max(1, MOST_BYTES // head_bytes))
        self._reader = Mover("weft-draft-read", wake)
        self._wanted: set[bytes] = set()
        """Adapters that are loaded, or being loaded."""
        self.drafters: dict[bytes, Drafter] = {}
        """By the digest of the adapter that brought the draft adapter."""

    def order(self, order: AdapterOrder) -> None:
        """Follows what the engine is told to load and to unload.

        A draft adapter that cannot be used is logged; its requests are drafted for without.
        """
        self._reader.take()
        digest = order.digest
        if order.action == "unload":
            self._wanted.discard(digest)
            self.drafters.pop(digest, None)
        elif digest not in self._wanted:
            self._wanted.add(digest)
            self._reader.give(_Read(self, digest, Path(order.directory) / DRAFT_FOLDER))

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        self._reader.take()
        if not self.drafters:
            return self._plain.draft(items)
        groups: dict[bytes, list[int]] = {}
        for index, item in enumerate(items):
            digest = item.request.adapter
            groups.setdefault(digest if digest in self.drafters else b"", []).append(index)
        drafts: list[Sequence[int]] = [()] * len(items)
        for digest, members in groups.items():
            drafter = self.drafters.get(digest, self._plain)
            found = drafter.draft([items[index] for index in members])
            for index, tokens in zip(members, found, strict=True):
                drafts[index] = tokens
        return drafts

    def forget(self, slot: int) -> None:
        """See `Drafter.forget`."""
        self._plain.forget(slot)

    def close(self) -> None:
        """Ends the thread."""
        self._reader.close()

    def sizes(self) -> dict[str, int]:
        """Adapted heads, and reads that have not ended."""
        return {"draft_adapters": len(self.drafters), "draft_adapter_reads": self._reader.num_open}

    def made(self, digest: bytes, drafter: Drafter | None) -> None:
        """A draft adapter was read; None: it is not there, or cannot be used."""
        if drafter is None:
            self._wanted.discard(digest)  # The next order to load it reads it again.
        elif digest in self._wanted:
            if len(self.drafters) < self._most:
                self.drafters[digest] = drafter
            else:
                logger.warning("drafts of one more adapter go without its own: %s", self._most)

    def make(self, folder: Path) -> Drafter | None:
        """Reads a folder, if there is one; called by the thread."""
        if not folder.is_dir():
            return None
        try:
            return self._make(folder)
        except (WeftError, RuntimeError, ValueError) as error:
            logger.warning("drafts go without %s: %s", folder, error)
            return None


class _Read:
    """A `Move`."""

    def __init__(self, owner: AdaptedDrafter, digest: bytes, folder: Path) -> None:
        self._owner, self._digest, self._folder = owner, digest, folder
        self._found: Drafter | None = None

    def run(self) -> None:
        """See `Move.run`."""
        self._found = self._owner.make(self._folder)

    def end(self) -> None:
        """See `Move.end`."""
        self._owner.made(self._digest, self._found)
