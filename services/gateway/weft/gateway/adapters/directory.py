"""The contents that adapter names refer to now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from weft.common.adapters.manifest import AdaptersOff, Entry, Manifest
from weft.common.adapters.registry import Registry, Stamp
from weft.contract.errors import WeftError

_log = logging.getLogger(__name__)


class AdapterDirectory:
    """Follows the adapter registry. Without one the gateway was started without an adapter root."""

    def __init__(self, registry: Registry | None) -> None:
        self._registry = registry
        self.manifest = Manifest()
        """The manifest as this gateway has last read it."""
        self._serving: dict[str, Entry] = {}
        self._stamp: Stamp | None = None
        self._reading = asyncio.Lock()
        self._is_broken = False

    @property
    def registry(self) -> Registry:
        """Raises AdaptersOff if there is none."""
        if self._registry is None:
            raise AdaptersOff(
                "this gateway knows no adapters: start it and its workers with --adapter-root",
                stage="validate",
            )
        return self._registry

    @property
    def is_on(self) -> bool:
        return self._registry is not None

    def find(self, name: str) -> Entry | None:
        """The entry that a name refers to; None: there is none."""
        return self._serving.get(name)

    def serving(self) -> list[Entry]:
        """All entries that names refer to, in the order of the names."""
        return list(self._serving.values())

    async def refresh(self) -> None:
        """Reads the registry if it has changed. If it cannot be read, the last state is kept."""
        if self._registry is None:
            return
        async with self._reading:
            try:
                await self._read(self._registry)
            except WeftError as error:
                if not self._is_broken:
                    _log.error(
                        "the registry cannot be read, known adapters are kept: %s", error.message
                    )
                self._is_broken = True

    async def change(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Changes the registry, as `Registry.change` does."""
        registry = self.registry
        # Otherwise an older state, read before, could replace the new one.
        async with self._reading:
            manifest = await asyncio.to_thread(registry.change, change)
            self._take(manifest)
        return manifest

    async def _read(self, registry: Registry) -> None:
        # The stamp is read first, so that a change in between shows at the next look.
        stamp = await asyncio.to_thread(registry.stamp)
        if stamp != self._stamp:
            self._take(await asyncio.to_thread(registry.read))
        self._stamp, self._is_broken = stamp, False

    def _take(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._serving = {entry.name: entry for entry in manifest.in_state("serving")}
