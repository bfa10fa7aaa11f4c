"""Prompts whose pages a filler has at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.contract.handle import KvHandle


class ReadyPrompts:
    """Implements `Jobs`; all prompts have the same pages."""

    def __init__(self, pages: list[int]) -> None:
        self._pages = pages
        self.jobs: dict[bytes, Any] = {}
        """By lease."""

    def why_not(self, handle: KvHandle) -> tuple[str, str]:
        return "", ""

    def waits_s(self, job: Any) -> tuple[float, float]:
        return 0.0, 0.0

    def begin(self, handle: KvHandle, *_: object) -> Any:
        job = self.jobs[handle.lease_id] = SimpleNamespace(
            lease_id=handle.lease_id,
            tokens=handle.tokens,
            pages=self._pages,
            num_computed=0,
            num_cached_tokens=0,
            digests=None,
        )
        return job

    def end(self, job: Any) -> None:
        pass
