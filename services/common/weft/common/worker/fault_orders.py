"""Fault orders in the engine's process, on a separate socket.

A fault may hold up the engine's thread for minutes. A separate thread obeys the orders, so that
such a fault can be listed and cleared.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

from weft.common.worker.frames import HEADER, MAX_FRAME_BYTES, EngineMessages, frame, parse_inbox
from weft.contract import faults
from weft.contract.errors import WeftError
from weft.contract.faults import FaultState
from weft.contract.messages import FaultOrder, Outbox

logger = logging.getLogger(__name__)


def obey_orders(sock: socket.socket) -> None:
    """Starts the thread, which ends when the other end of the socket closes. Inboxes with fault
    orders alone arrive on the socket, and outboxes with the replies leave on it.
    """
    sock.setblocking(True)
    threading.Thread(target=_obey_all, args=(sock,), name="fault-orders", daemon=True).start()


def _obey_all(sock: socket.socket) -> None:
    with sock, sock.makefile("rb") as stream, contextlib.suppress(ConnectionError):
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            (length,) = HEADER.unpack(header)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            inbox = parse_inbox(stream.read(length))
            replies = [_obey(order) for order in inbox.fault_orders]
            sock.sendall(frame(EngineMessages(outbox=Outbox(fault_replies=replies))))


def _obey(order: FaultOrder) -> tuple[int, list[FaultState]]:
    """The server has validated the order."""
    try:
        if order.clear is not None:
            faults.BOARD.clear(order.clear)
        if order.add is not None:
            faults.BOARD.arm(order.add)
    except WeftError as error:
        logger.error("a fault order was not obeyed: %s", error.message)
    return order.query, faults.BOARD.states()
