"""Pages of a request that are still being loaded while a step already reads them."""

from __future__ import annotations

import threading


class IncomingPages:
    """Outcome of a load by layer, which its thread reports and the engine's thread awaits.

        coming ──> whole     all pages are there, with the digests that they were saved with
          └──────> lost      the result of a step that read them must not be used

    Until it is `whole`, nobody but the request may read the pages.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._is_whole = False
        self.is_stopped = False
        """Whether nobody waits for the pages any more, so that the load may end."""

    def end(self, *, is_whole: bool) -> None:
        """Reports the outcome, in any thread. Of several reports the first counts."""
        if not self._ended.is_set():
            self._is_whole = is_whole
            self._ended.set()

    def stop(self) -> None:
        self.is_stopped = True

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the outcome. Whether the pages are whole; False also after the timeout, and the
        load is then given up.
        """
        if not self._ended.wait(timeout_s):
            self.stop()
            return False
        return self._is_whole
