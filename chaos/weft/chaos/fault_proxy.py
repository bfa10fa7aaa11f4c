"""`weft fault proxy`: a proxy on one link between two services, which misbehaves on command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
from typing import TextIO

from weft.chaos.proxy import FaultProxy, Mode
from weft.common.rpc.listen import bracket
from weft.common.settings import is_loopback
from weft.contract.errors import ConfigError

DEFAULT_DELAY_S = 1.0
SUMMARY = "pass a TCP link's bytes on, and lose, delay or cut them on request"
_MODES = {mode.value: mode for mode in Mode}
_ORDERS = f"{', '.join(_MODES)}, or status; a number of seconds may follow `delay`"
_DETAILS = f"""\
The one that dials TARGET is given the proxy's address instead. Orders are read from standard input,
one a line: {_ORDERS}. At the end of the input the last order stays; Ctrl-C ends the proxy.

  pass            everything goes through
  black-hole      bytes of both sides are taken and lost; new connections are taken too
  mute-server     what the client sends is delivered, what the server answers is lost
  mute-client     the other way round
  delay [S]       everything is delivered S seconds late, in order
  cut             every connection is ended, new ones at once
  cut-before-ack  what the client sends is delivered; at the server's answer the link is cut

Bytes that were lost stay lost: with the next `pass`, connections that miss some are ended.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `run` reads."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DETAILS
    parser.add_argument("target", metavar="TARGET", help="host:port of the service behind it")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="of the proxy; port 0 = any free one (default %(default)s)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow --listen beyond loopback: whoever reaches it is passed on to TARGET",
    )
    parser.add_argument(
        "--mode", choices=_MODES, default=Mode.PASS.value, help="to begin with (default pass)"
    )
    parser.add_argument(
        "--delay-s",
        type=float,
        default=DEFAULT_DELAY_S,
        metavar="S",
        help="of the mode delay, in seconds (default %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the proxy until SIGINT or SIGTERM; returns the exit status. Raises ConfigError if an
    address is not valid, or the port is taken.
    """
    _split("TARGET", arguments.target)
    host, port = _split("--listen", arguments.listen)
    if not is_loopback(host) and not arguments.insecure:
        raise ConfigError(
            f"--listen {arguments.listen} is open to other machines, and a fault proxy has no "
            "authentication; accept that with --insecure"
        )
    if not 0 <= arguments.delay_s < float("inf"):  # Comparisons with NaN are false.
        raise ConfigError(f"--delay-s {arguments.delay_s:g}: give 0 or more")
    return asyncio.run(_serve(arguments, host, port))


async def _serve(arguments: argparse.Namespace, host: str, port: int) -> int:
    try:
        proxy = FaultProxy(arguments.target, host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {arguments.listen}: {error.strerror}") from error
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await proxy.start()
    orders = Orders(proxy, sys.stdout, arguments.delay_s)
    orders.obey(arguments.mode)
    reading = threading.Thread(target=_read, args=(loop, orders), daemon=True)
    reading.start()
    await stop.wait()
    await proxy.close()
    return 0


def _read(loop: asyncio.AbstractEventLoop, orders: Orders) -> None:
    """The end of the input changes nothing."""
    for line in sys.stdin:
        with contextlib.suppress(RuntimeError):  # The event loop is closed.
            loop.call_soon_threadsafe(orders.obey, line)


class Orders:
    def __init__(self, proxy: FaultProxy, out: TextIO, delay_s: float) -> None:
        self._proxy = proxy
        self._out = out
        self._delay_s = delay_s

    def obey(self, line: str) -> None:
        words = line.split()
        if not words:
            return
        mode, seconds = _MODES.get(words[0]), self._seconds(words[1:])
        if seconds is None or (len(words) > 1 and mode is not Mode.DELAY):
            self._say(f"not an order: {line.strip()!r}; give {_ORDERS}")
        elif mode is not None:
            self._proxy.set_mode(mode, seconds)
            self._tell()
        elif words[0] == "status":
            self._tell()
        else:
            self._say(f"not an order: {line.strip()!r}; give {_ORDERS}")

    def _seconds(self, words: list[str]) -> float | None:
        if not words:
            return self._delay_s
        try:
            seconds = float(words[0])
        except ValueError:
            return None
        return seconds if len(words) == 1 and 0 <= seconds < float("inf") else None

    def _tell(self) -> None:
        proxy = self._proxy
        mode = proxy.mode.value
        if proxy.mode is Mode.DELAY:
            mode += f" {proxy.delay_s:g} s"
        count = proxy.num_connections
        self._say(f"{proxy.address} -> {proxy.target}: {mode}, {count} connections so far")

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


def _split(name: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535 or bracket(host) not in address:
        raise ConfigError(f"{name} {address}: give host:port")
    return host, int(port)
