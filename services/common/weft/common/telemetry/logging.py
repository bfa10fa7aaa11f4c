"""Structured logs: JSON lines for machines, readable text on a terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

from weft.common.settings import LogFormat, LogLevel

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current task's request; added to every log record."""

trace_id: ContextVar[str] = ContextVar("trace_id", default="")
"""Trace id of that request, 32 hex digits; added as well."""

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(service: str, level: LogLevel = "info", fmt: LogFormat = "auto") -> None:
    """Sends the process's logs to standard error, with `service` in every record. `fmt` `auto` is
    text on a terminal and JSON elsewhere.
    """
    text = fmt == "text" or (fmt == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter(service) if text else JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # gRPC reports every handled exception of a cancelled stream; our interceptor logs real ones.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


class JsonFormatter(logging.Formatter):
    """Formats records as JSON, one object per line: time, level, logger, message, request and trace
    id, and extras.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            entry["request_id"] = current
        if traced := trace_id.get():
            entry["trace_id"] = traced
        entry.update(_extras(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`12:00:00.123 gateway warning message key=value`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [
            f"{clock}.{int(record.msecs):03d}",
            self._service,
            record.levelname.lower(),
            record.getMessage(),
        ]
        if current := request_id.get():
            parts.append(f"request_id={current}")
        parts += [f"{key}={value}" for key, value in _extras(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _PLAIN}


def _timestamp(created: float) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{seconds}.{int(created % 1 * 1000):03d}Z"
