"""Links between GPUs of several hosts over NCCL.

Each two consecutive stages have a communicator of two members. Its name, which the first of them
makes, goes over the connection of their hosts, which both trust.

first of two                        second
name, version of NCCL            -> checks the version
waits                            <- version
joins the communicator              the same
a byte for the rows of each         lets the receiving operation begin
  large step, once written       ->
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import logging
import os
import queue
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import torch
from weft.contract.errors import ConfigError, GroupFailed
from weft.engine.base.device_copies import Mark
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.host_sockets import receive_exactly
from weft.engine.parallel.linked_stages import LinkedStages
from weft.engine.parallel.nccl import Communicator, nccl_version, new_id, within
from weft.engine.parallel.stage_links import StageEnds

logger = logging.getLogger(__name__)

_MEET_S = 120.0
"""Longest wait for a stage that has said that it comes to the communicator."""
_MAX_BLOCKS = 4
"""A link that waits for rows holds as many processors, which steps lack meanwhile."""
_GATED_BYTES = 1 << 20
"""Rows of this size or more are received only from when they are there to be sent, since an
operation that waits takes processors from steps. A product whose blocks fill a GPU may take twice
as long without a few of them. For fewer rows the byte would take longer than they do.
"""
_PROBE_BYTES = 1 << 23
_LOOK_S = 0.0002
_AT_LEAST = 0
"""How the GPU's driver compares a word with what a stream waits for."""
_WORD = 1 << 32
_NAMED = struct.Struct("<128sq")
_VERSION = struct.Struct("<q")
_INTERFACE = "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_REQUEST_BYTES = 256


class _Sender:
    """Says at the sending end which rows are there to be sent.

    Args:
        end: Connection to the other end.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end, self._is_over = end, False
        self._written: queue.SimpleQueue[Mark | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="rows-ready", daemon=True).start()

    def tell(self, written: Mark) -> None:
        self._written.put(written)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # The other end is gone, which others notice.
            while (written := self._written.get()) is not None:
                while not self._is_over and not written.is_reached():
                    time.sleep(_LOOK_S)
                if not self._is_over:
                    self._end.sendall(b"\0")

    def close(self) -> None:
        self._is_over = True
        self._written.put(None)


class _Gate:
    """Makes a stream of the receiving end wait, without a processor, until rows are there.

    Args:
        end: Connection to the other end.
    """

    def __init__(self, end: socket.socket) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._end, self._is_over = end, False
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._number = self._word.numpy().view(np.uint32)
        self._num_held = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="rows-ready", daemon=True).start()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Raises GroupFailed if the driver refuses it."""
        self._num_held += 1
        status = self._library.cuStreamWaitValue32_v2(
            *(ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(self._word.data_ptr())),
            *(ctypes.c_uint32(self._num_held % _WORD), ctypes.c_uint(_AT_LEAST)),
        )
        if status:
            raise GroupFailed(f"cuStreamWaitValue32: error {status}")

    def _run(self) -> None:
        count = 0
        with contextlib.suppress(OSError):
            self._end.settimeout(None)
            while ready := len(self._end.recv(64)):
                count += ready
                with self._lock:
                    if not self._is_over:
                        self._number[0] = count % _WORD

    def close(self) -> None:
        """Lets the stream go on."""
        with self._lock:
            self._is_over = True
            self._number[0] = (self._num_held + (1 << 30)) % _WORD


class NcclLink:
    """Implements `weft.engine.parallel.linked_stages.RowsLink`."""

    def __init__(self, name: bytes, rank: int, device: torch.device, end: socket.socket) -> None:
        """Waits for the other end. Raises GroupFailed.

        Args:
            rank: 0 at the end that sends, 1 at the other.
            end: Connection to the other end's host, which is this link's from now on.
        """
        self._end = end
        self._device, self._other = device, 1 - rank
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._communicator = Communicator(name, rank, 2, device, _MEET_S, _MAX_BLOCKS)
        self.gbit_s = 0.0
        """Rate at which rows come to this end."""
        probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)

        def connect() -> None:
            # Members connect when they first send, for which the host waits.
            for _ in range(3):
                began = time.perf_counter()
                with torch.cuda.stream(self._stream):
                    if rank == 0:
                        self._communicator.send(probe, self._other)
                    else:
                        self._communicator.receive(probe, self._other)
                self._stream.synchronize()
                self.gbit_s = 8e-9 * _PROBE_BYTES / (time.perf_counter() - began)

        try:
            within(connect, _MEET_S, "the stages have not connected over NCCL")
        except BaseException:
            self._communicator.abort()
            raise
        self._sender = _Sender(end) if rank == 0 else None
        self._gate = None if rank == 0 else _Gate(end)

    def send(self, rows: torch.Tensor, written: Mark) -> Mark:
        assert self._sender is not None
        if rows.nbytes >= _GATED_BYTES:
            self._sender.tell(written)
        written.hold(self._stream)
        with torch.cuda.stream(self._stream):
            self._communicator.send(rows, self._other)
            return Mark(self._device)

    def receive(self, out: torch.Tensor, left: Mark | None) -> Mark:
        assert self._gate is not None
        if left is not None:
            left.hold(self._stream)
        if out.nbytes >= _GATED_BYTES:
            self._gate.hold(self._stream)
        with torch.cuda.stream(self._stream):
            self._communicator.receive(out, self._other)
            return Mark(self._device)

    def abort(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._gate is not None:
            self._gate.close()
        self._communicator.abort()
        # Ends what a thread waits for, which closing alone would not.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._end, socket.SHUT_RDWR)
        self._end.close()


def link_over_nccl(
    ends: StageEnds,
    group: HostGroup,
    names: tuple[str, str],
    device: torch.device,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> LinkedStages:
    """Makes the links of this stage. Raises ConfigError if a stage beside is gone, or NCCL does not
    connect both.

    Args:
        ends: Connections of this host to those of the stages beside.
        names: As in `LinkedStages`.
    """
    before, after = None, None
    try:
        own = next(end for end in ends if end is not None).getsockname()[0]
        if interface := interface_of(own):
            os.environ.setdefault(_INTERFACE, f"={interface}")
        name = None
        if ends.after is not None:
            name = new_id()
            ends.after.settimeout(group.limit_s)
            ends.after.sendall(_NAMED.pack(name, nccl_version()))
        if ends.before is not None:
            before = NcclLink(_named(ends.before, group.limit_s, names[0]), 1, device, ends.before)
        if name is not None and ends.after is not None:
            _await_answer(ends.after, names[1])
            after = NcclLink(name, 0, device, ends.after)
    except (OSError, GroupFailed) as error:
        for link in (before, after):
            if link is not None:
                link.abort()
        told = error.message if isinstance(error, GroupFailed) else str(error)
        beside = " and ".join(
            name for name, end in zip(names, ends, strict=True) if end is not None
        )
        raise ConfigError(
            f"hosts: no link over NCCL to {beside}: {told}; NCCL_DEBUG=INFO says more, and "
            f"{_INTERFACE} chooses the network",
            param="hosts",
        ) from error
    how = _describe(0.0 if before is None else before.gbit_s)
    logger.info("%s", how)
    return LinkedStages(before, after, group, names, device, rows, width, dtype, how)


def _describe(gbit_s: float) -> str:
    major, rest = divmod(nccl_version(), 10_000)
    network = os.environ.get(_INTERFACE, "").removeprefix("=") or "a network of its choice"
    version = f"{major}.{rest // 100}.{rest % 100}"
    rate = f" at {gbit_s:.3g} Gbit/s" if gbit_s else ""
    return f"rows travel between hosts over NCCL {version} by {network}{rate}, without TLS"


def _named(end: socket.socket, limit_s: float, other: str) -> bytes:
    """The communicator's name, once the stage before has told it."""
    end.settimeout(limit_s)
    told = bytearray(_NAMED.size)
    receive_exactly(end, memoryview(told))
    name, version = _NAMED.unpack(told)
    end.sendall(_VERSION.pack(nccl_version()))
    _check_version(version, other)
    return bytes(name)


def _await_answer(end: socket.socket, other: str) -> None:
    told = bytearray(_VERSION.size)
    receive_exactly(end, memoryview(told))
    _check_version(_VERSION.unpack(told)[0], other)


def _check_version(version: int, other: str) -> None:
    if version != nccl_version():
        raise GroupFailed(f"{other} has NCCL {version}, this host {nccl_version()}")


def interface_of(address: str) -> str:
    """The network device of this host that has an address; empty: none is known to."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        known = Path("/proc/net/if_inet6")
        lines = known.read_text().split("\n") if known.exists() else []
        found = (line.split() for line in lines if line.strip())
        return next((parts[-1] for parts in found if parts[0] == wanted.packed.hex()), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode().ljust(_REQUEST_BYTES, b"\0")
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # It has no address.
            if answer[20:24] == wanted.packed:
                return name
    return ""
