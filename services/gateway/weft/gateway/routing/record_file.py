"""The file in which a gateway records its routing decisions."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
from weft.contract.errors import ConfigError
from weft.gateway.routing import Policy, PolicyOptions, make_policy
from weft.gateway.routing.record import AnyLine, RecordingPolicy

_log = logging.getLogger(__name__)

_MAX_QUEUED = 4096
_CLOSE_TIMEOUT_S = 5.0


class RoutingRecord:
    """A record of all pools of a gateway, written by its own thread; callers never wait.

    The record ends at `max_bytes`, or when the file cannot be written or cannot keep up. The part
    before can always be replayed; a part after a gap could not.

    Args:
        folder: Folder for one file, which only its owner can read, since it has the prompts'
            tokens.
        gateway_id: Id of this start of the gateway, which names the file.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, folder: Path, gateway_id: str, max_bytes: int) -> None:
        self.path = folder / f"{gateway_id}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"--routing-record-dir {folder}: {error.strerror}") from error
        self._file = os.fdopen(handle, "wb")
        self._left = max_bytes
        self._encoder = msgspec.json.Encoder()
        self._queue: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED)
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="routing-record", daemon=True)
        self._thread.start()

    def policy(self, pool: str, name: str, options: PolicyOptions) -> Policy:
        """Creates a policy, as `make_policy` does, whose choices are recorded."""
        if options.seed is None:
            options = replace(options, seed=secrets.randbits(32))
        return RecordingPolicy(make_policy, name, options, pool, self._write)

    def close(self) -> None:
        """Writes what is queued, within a time limit."""
        self._is_ended = True
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _write(self, line: AnyLine) -> None:
        if self._is_ended:
            return
        data = self._encoder.encode(line) + b"\n"
        self._left -= len(data)
        if self._left < 0:
            self._end("it has reached its bound")
            return
        try:
            self._queue.put_nowait(data)
        except queue.Full:
            self._end("its file cannot keep up")

    def _end(self, why: str) -> None:
        self._is_ended = True
        _log.warning("the record of routing %s ends: %s", self.path, why)

    def _run(self) -> None:
        try:
            with self._file as file:
                while (data := self._queue.get()) is not None:
                    file.write(data)
                    if self._queue.empty():
                        file.flush()
        except OSError as error:  # Closing writes the remaining lines, and may fail again.
            self._end(str(error))
