"""Reads keys that are typed while the screen is drawn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator

_NAMES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down"}


def split_keys(typed: bytes) -> list[str]:
    """The keys in a terminal's bytes: characters, and up, down, page up, page down. Other escape
    sequences are dropped.
    """
    keys: list[str] = []
    while typed:
        length = 1
        if typed.startswith((b"\x1b[", b"\x1bO")):
            length = 3
            while length < len(typed) and not 0x40 <= typed[length - 1] <= 0x7E:
                length += 1
        key, typed = typed[:length], typed[length:]
        if (name := _NAMES.get(key.replace(b"\x1bO", b"\x1b["))) is not None:
            keys.append(name)
        elif length == 1 and key.isascii():
            keys.append(key.decode())
    return keys


@contextlib.contextmanager
def reading_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` on the running loop for each key, without waiting for the end of a line. If
    standard input is no terminal there are no keys.
    """
    if not sys.stdin.isatty():
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in split_keys(os.read(number, 1024)):
            on_key(key)

    tty.setcbreak(number)
    loop.add_reader(number, read)
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
