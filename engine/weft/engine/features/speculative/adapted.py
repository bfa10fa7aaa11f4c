"""Drafting for requests whose adapters bring a draft adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.checkpoint.adapters.files import DRAFT_FOLDER
from weft.contract.adapters import AdapterOrder
from weft.contract.errors import WeftError
from weft.engine.base.background import BackgroundThread
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.scheduler.ports import Drafter

logger = logging.getLogger(__name__)

MAX_HEADS = 64
"""Most adapted heads at once. Each one adds a chain of forward passes to a step."""
MAX_BYTES = 1 << 30
"""Most bytes of all adapted heads after the first. Each has a copy of the head's layer."""


class AdaptedDrafter(Drafter):
    """One drafter per draft adapter, and one for all other requests.

    Args:
        plain: Drafter for requests whose adapter, if any, has no draft adapter.
        make: Makes a drafter from the folder of a draft adapter. A background thread calls it.
        head_bytes: Memory of each drafter made.
        wake: Called from that thread when a drafter was made.
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
        self._most = min(MAX_HEADS, max(1, MAX_BYTES // head_bytes))
        self._reader = BackgroundThread("weft-draft-read", wake)
        self._wanted: set[bytes] = set()
        """Adapters that are loaded or being loaded."""
        self.drafters: dict[bytes, Drafter] = {}
        """Drafters by digest of the adapter that brought the draft adapter."""

    def order(self, order: AdapterOrder) -> None:
        """Follows the engine's orders to load and unload adapters. A draft adapter that cannot be
        used is logged, and the plain drafter serves its requests.
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
        self._plain.forget(slot)

    def close(self) -> None:
        self._reader.close()

    def sizes(self) -> dict[str, int]:
        return {"draft_adapters": len(self.drafters), "draft_adapter_reads": self._reader.num_open}

    def made(self, digest: bytes, drafter: Drafter | None) -> None:
        """Accepts a draft adapter that was read; None: it is missing or unusable."""
        if drafter is None:
            self._wanted.discard(digest)  # The next order to load it reads it again.
        elif digest in self._wanted:
            if len(self.drafters) < self._most:
                self.drafters[digest] = drafter
            else:
                logger.warning("drafts of one more adapter go without its own: %s", self._most)

    def make(self, folder: Path) -> Drafter | None:
        """The background thread calls it. None: the folder is missing or cannot be used, which is
        logged.
        """
        if not folder.is_dir():
            return None
        try:
            return self._make(folder)
        except (WeftError, RuntimeError, ValueError) as error:
            logger.warning("drafts go without %s: %s", folder, error)
            return None


class _Read:
    def __init__(self, owner: AdaptedDrafter, digest: bytes, folder: Path) -> None:
        self._owner, self._digest, self._folder = owner, digest, folder
        self._found: Drafter | None = None

    def run(self) -> None:
        self._found = self._owner.make(self._folder)

    def end(self) -> None:
        self._owner.made(self._digest, self._found)
