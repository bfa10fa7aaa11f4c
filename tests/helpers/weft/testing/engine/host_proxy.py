"""The project's own fault proxy between the hosts of an engine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from weft.chaos.proxy import FaultProxy, Mode


class ProxyThread:
    """A proxy in a thread, in front of host 0's rendezvous."""

    def __init__(self, target: str, host: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.proxy = FaultProxy(target, host)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self.proxy.start())

    def _run(self, task: Any) -> None:
        asyncio.run_coroutine_threadsafe(task, self._loop).result(30)

    def set_mode(self, mode: Mode, delay_s: float = 0.0) -> None:
        self._loop.call_soon_threadsafe(self.proxy.set_mode, mode, delay_s)

    def close(self) -> None:
        self._run(self.proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
