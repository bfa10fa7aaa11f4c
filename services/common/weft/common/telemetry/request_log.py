"""The request log: one JSON line per prompt, written when it has ended, and read for replays.

It contains texts and tokens only if the settings ask for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

import msgspec
from google.protobuf.json_format import MessageToDict
from weft.contract.errors import ConfigError
from weft.v1 import common_pb2

_log = logging.getLogger(__name__)

MAX_QUEUED = 4096
"""Most lines waiting to be written; more are dropped and counted."""
MAX_QUEUED_TOKENS = 2_000_000
"""Most tokens in the waiting lines, at some 36 bytes each."""
CLOSE_TIMEOUT_S = 5.0


class LoggedSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer to a prompt."""

    finish_reason: str = ""
    """Reason: stop, length or cancelled; empty: it had not ended."""
    num_tokens: int = 0
    ids: list[int] | None = None
    text: str | None = None


class LoggedPrompt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt and its outcome."""

    time: float
    """Unix time of its arrival."""
    request_id: str
    """Request id as returned to the client; with several prompts followed by `-0`, `-1`, ..."""
    client_request_id: str = ""
    """Name given by the client or the REST edge (`X-Request-Id`); empty: none."""
    header_request_id: str = ""
    """The `X-Request-Id` where the body gives another name; empty: none."""
    trace_id: str = ""
    model: str = ""
    adapter: str = ""
    """Name of the requested LoRA adapter; empty: none."""
    sampling: dict[str, Any] = {}
    """weft.v1.SamplingParams as protobuf's JSON, with the seed that was used."""
    stop: dict[str, Any] = {}
    """weft.v1.StopCriteria as protobuf's JSON."""
    is_pooled: bool = False
    """Whether vectors were wanted in place of tokens; they are not logged."""
    top_logprobs: int | None = None
    num_prompt_tokens: int = 0
    prompt_ids: list[int] | None = None
    prompt_text: str | None = None
    outcome: str = ""
    """ok, or the failure's reason in lower case; empty: it was running when the service ended."""
    duration_s: float = 0.0
    samples: list[LoggedSample] = []


def terms(
    sampling: common_pb2.SamplingParams, stop: common_pb2.StopCriteria, *, has_content: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling and stop criteria in the form of a log line. The client's constraint and stop
    strings are included only with `has_content`.
    """
    found = tuple(MessageToDict(one, preserving_proto_field_name=True) for one in (sampling, stop))
    if not has_content:
        found[0].pop("constraint", None)
        found[1].pop("stop", None)
        found[1].pop("stop_regex", None)
    return found[0], found[1]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LoggedPrompt)


def to_line(prompt: LoggedPrompt) -> str:
    """Formats a prompt as a line of the log, without line break."""
    return _encoder.encode(prompt).decode()


def read_log(file: TextIO) -> Iterator[LoggedPrompt]:
    """Reads the prompts of a log.

    Raises:
        ConfigError: A line, which the message names, is not of such a log.
    """
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} is not of a request log: {error}") from error


_Finish = Callable[[LoggedPrompt], None]


class RequestLog:
    """Writes prompts to a file that rotates, in its own thread; callers never wait.

    Args:
        path: Path of the newest file; older ones end in `.1`, `.2`, ...
        max_bytes: Most bytes of each file.
        num_files: Number of files that are kept, the newest included.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int, num_files: int) -> None:
        try:
            self._file = _PrivateFile(path, max_bytes, num_files)
        except OSError as error:
            raise ConfigError(f"--request-log {path}: {error.strerror}") from error
        self._queue: queue.Queue[tuple[LoggedPrompt, _Finish] | None] = queue.Queue(MAX_QUEUED)
        self._tokens_put = 0
        self._tokens_taken = 0
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def write(self, prompt: LoggedPrompt, finish: _Finish = lambda prompt: None) -> None:
        """Queues a prompt; drops it when the file cannot keep up. `finish` is called in the writing
        thread before the line is written, to add fields that take time.
        """
        num_tokens = _num_tokens(prompt)
        try:
            if self._tokens_put - self._tokens_taken + num_tokens > MAX_QUEUED_TOKENS:
                raise queue.Full
            self._queue.put_nowait((prompt, finish))
            self._tokens_put += num_tokens
        except queue.Full:
            self._drop("cannot keep up")

    def close(self) -> None:
        """Writes what is queued, for a bounded time."""
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        with contextlib.suppress(OSError):  # What cannot be written was told of.
            self._file.close()

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            prompt, finish = given
            try:
                finish(prompt)
                self._file.write_line(to_line(prompt))
            except OSError as error:
                self._drop(f"cannot be written ({error.strerror})")
            except Exception:
                _log.exception("a prompt could not be logged")
            self._tokens_taken += _num_tokens(prompt)

    def _drop(self, why: str) -> None:
        self.num_dropped += 1
        if self.num_dropped.bit_count() == 1:  # 1, 2, 4, ...
            _log.warning("the request log %s: %d dropped", why, self.num_dropped)


def _num_tokens(prompt: LoggedPrompt) -> int:
    return sum(len(ids or ()) for ids in (prompt.prompt_ids, *(one.ids for one in prompt.samples)))


class _PrivateFile(RotatingFileHandler):
    """A rotating file that only its owner can read."""

    def __init__(self, path: Path, max_bytes: int, num_files: int) -> None:
        super().__init__(
            path, maxBytes=max_bytes, backupCount=num_files - 1, encoding="utf-8", delay=False
        )

    def _open(self) -> Any:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, "a", encoding="utf-8", opener=opener)

    def doRollover(self) -> None:
        """The base class would go on writing to the only file if no older ones are kept; here it
        begins anew.
        """
        if not self.backupCount and self.stream is not None:
            self.stream.truncate(0)
        super().doRollover()

    def write_line(self, line: str) -> None:
        self.emit(logging.makeLogRecord({"msg": line}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Passes errors such as a full disk on to the caller, which the base class prints."""
        raise
