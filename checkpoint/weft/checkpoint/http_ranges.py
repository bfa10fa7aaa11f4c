"""Ranges of a file over HTTP, read into the same memory again and again."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_BUFFER_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_TRIES = 2
"""A connection that was kept may have been closed by the server meanwhile."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Write = Callable[[memoryview, int], None]
"""Takes bytes and their offset in the file; the memory is used again afterwards."""


class HttpRanges:
    """One file of a server. Each thread that reads has a connection and a buffer of its own, which
    end with the thread.
    """

    def __init__(self, host: str, target: str, size: int, tls: ssl.SSLContext | None) -> None:
        self._host = host
        self._target = target
        self._size = size
        self._tls = tls
        self._of_thread = threading.local()
        self._is_refused = False

    @classmethod
    def of(cls, url: str, size: int) -> Self | None:
        """None: the URL is of another scheme, or a proxy has to be asked."""
        parts = urlsplit(url)
        is_direct = parts.scheme not in getproxies() or proxy_bypass(parts.hostname or "")
        if parts.scheme not in ("http", "https") or not is_direct or "@" in parts.netloc:
            return None
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.netloc, target, size, tls)

    def read(self, begin: int, end: int, write: Write) -> bool:
        """Hands bytes begin to end to `write`, in pieces. False: the server cannot be reached, or
        answers with anything but these bytes of a file of this size; some of the range may have
        been written then. Once a server has answered otherwise, it is not asked again.
        """
        for _ in range(_TRIES):
            if self._is_refused:
                return False
            try:
                return self._read(begin, end, write)
            except (OSError, HTTPException):
                self._drop_connection()
        return False

    def _read(self, begin: int, end: int, write: Write) -> bool:
        connection = self._connection()
        connection.request("GET", self._target, headers={"Range": f"bytes={begin}-{end - 1}"})
        response = connection.getresponse()
        if not self._is_asked_for(response, begin, end):
            self._is_refused = True
            self._drop_connection()
            return False
        buffer: memoryview = self._of_thread.buffer
        for at in range(begin, end, _BUFFER_BYTES):
            whole = buffer[: end - at]
            filled = 0
            while filled < len(whole):
                count = response.readinto(whole[filled:])
                if not count:
                    raise HTTPException("the connection has ended in the middle of a range")
                filled += count
            write(whole, at)
        return True

    def _is_asked_for(self, response: HTTPResponse, begin: int, end: int) -> bool:
        found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        return (
            response.status == 206
            and found is not None
            and tuple(map(int, found.groups())) == (begin, end - 1, self._size)
            and response.length == end - begin
            and response.headers.get("Content-Encoding", "identity") == "identity"
        )

    def _connection(self) -> HTTPConnection:
        local = self._of_thread
        if getattr(local, "connection", None) is None:
            local.buffer = memoryview(bytearray(_BUFFER_BYTES))
            if self._tls is None:
                local.connection = HTTPConnection(self._host, timeout=_TIMEOUT_S)
            else:
                local.connection = HTTPSConnection(
                    self._host, timeout=_TIMEOUT_S, context=self._tls
                )
        connection: HTTPConnection = local.connection
        return connection

    def _drop_connection(self) -> None:
        connection = getattr(self._of_thread, "connection", None)
        if connection is not None:
            connection.close()
            self._of_thread.connection = None
