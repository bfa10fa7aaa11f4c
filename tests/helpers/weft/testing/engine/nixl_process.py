"""A process with a pool and NIXL agents, driven by JSON lines: an owner, a filler, or both.

Run as a script it is that process; imported, it offers `NixlProcess` to start and drive one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

LEASE = bytes(range(16))
EPOCH = 7


class RemoteError(Exception):
    """An exception raised by a call in the process."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(f"{answer['error']}: {answer['message']}")
        self.kind: str = answer["error"]
        self.may_still_arrive: bool | None = answer["may_still_arrive"]


class NixlProcess:
    """Drives one process; `lanes` is UCX_TLS, empty for UCX's own choice."""

    def __init__(self, num_pages: int, page_bytes: int, lanes: str = "") -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
        if lanes:
            environment["UCX_TLS"] = lanes
        command = [sys.executable, str(Path(__file__)), str(num_pages), str(page_bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.pid = self._process.pid

    def send(self, op: str, **arguments: Any) -> None:
        """Starts a call; `receive` gives its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = 60.0) -> Any:
        """Result of the call that was sent."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        text = b""
        deadline = time.monotonic() + timeout_s
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"process {self.pid} did not answer")
            part = os.read(fd, 1 << 16)
            if not part:
                raise EOFError(f"process {self.pid} ended with {self._process.wait()}")
            text += part
        answer = json.loads(text)
        if "error" in answer:
            raise RemoteError(answer)
        return answer["result"]

    def call(self, op: str, **arguments: Any) -> Any:
        """Runs an operation of `Operations` there."""
        self.send(op, **arguments)
        return self.receive()

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stops the process and waits until all of its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def end(self) -> None:
        """Kills the process if it lives, and waits."""
        self._process.kill()
        self._process.communicate()


class Operations:
    """Operations of the process. Arguments and results are JSON."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        from weft.pages.transfer import nixl

        self.nixl = nixl
        self.pool = np.zeros((num_pages, page_bytes), np.uint8)
        self.randomise()
        self.receive_agent: Any = None
        self.send_agents: Any = None
        self.read_agents: Any = None
        self.writes: list[Any] = []
        self._num_settled = 0
        self.reads: list[Any] = []

    def randomise(self) -> None:
        """Fresh random bytes in all pages."""
        self.pool[:] = np.random.default_rng().integers(0, 256, self.pool.shape, dtype=np.uint8)

    def fill(self, value: int) -> None:
        self.pool[:] = value

    def digests(self, pages: list[int] | None = None) -> list[int]:
        from weft.pages.transfer.digest import digest_pages

        return digest_pages(self.pool, range(len(self.pool)) if pages is None else pages).tolist()

    def changed_bytes(self, value: int) -> int:
        return int((self.pool != value).sum())

    # The owner's side.

    def open_owner(self) -> dict[str, Any]:
        region = self.nixl.PoolRegion.of_array(self.pool)
        self.receive_agent = self.nixl.ReceiveAgent("decode-test", region)
        return self._target_json()

    def reopen(self) -> dict[str, Any]:
        self.receive_agent.reopen()
        return self._target_json()

    def wait_notifications(self, count: int, timeout_s: float = 30.0) -> list[list[Any]]:
        """(epoch, lease, chunk) of the next `count` notifications, or of those in time."""
        found: list[Any] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < deadline:
            found += self.receive_agent.poll()
            time.sleep(0.0005)
        return [[n.owner_epoch, n.lease_id.hex(), n.chunk] for n in found]

    def digest_on_notification(self, pages_of_chunks: list[list[int]]) -> dict[str, list[int]]:
        """Digests of each chunk's pages, taken at once when its notification is seen."""
        found: dict[str, list[int]] = {}
        deadline = time.monotonic() + 60.0
        while len(found) < len(pages_of_chunks) and time.monotonic() < deadline:
            for notification in self.receive_agent.poll():
                chunk = notification.chunk
                found[str(chunk)] = self.digests(pages_of_chunks[chunk])
        return found

    def num_garbage(self) -> int:
        return int(self.receive_agent.num_garbage)

    def ucx_log_settings(self) -> list[str]:
        return sorted(name for name in os.environ if name.startswith("UCX_LOG"))

    def describe(self) -> str:
        return str((self.receive_agent or self.send_agents).describe())

    # The filler's side.

    def open_filler(self, **options: Any) -> None:
        if self.send_agents is not None:
            self.send_agents.close()
        region = self.nixl.PoolRegion.of_array(self.pool)
        region = dataclasses.replace(region, settle=self._settle)
        self.send_agents = self.nixl.SendAgents("prefill-test", region, **options)

    def num_settled(self) -> int:
        return self._num_settled

    def _settle(self) -> None:
        self._num_settled += 1

    def connect(self, peer: str, target: dict[str, Any], epoch: int = EPOCH) -> None:
        self.send_agents.connect((peer, epoch), _target_of(target))

    def write(
        self,
        peer: str,
        target: dict[str, Any],
        local: list[int],
        remote: list[int],
        chunk: int = 0,
        epoch: int = EPOCH,
        notification: str | None = None,
    ) -> int:
        """Posts; the result is the number of the write for `wait` and `poll`."""
        message = (
            self.nixl.encode_notification(epoch, LEASE, chunk)
            if notification is None
            else bytes.fromhex(notification)
        )
        target_info = _target_of(target)
        handle = self.send_agents.write((peer, epoch), target_info, local, remote, message)
        self.writes.append(handle)
        return len(self.writes) - 1

    def write_in_threads(self, writes: list[dict[str, Any]]) -> list[int]:
        """Runs each write in a thread, all at once."""
        numbers: list[int] = []
        threads = [
            threading.Thread(target=lambda w=write: numbers.append(self.write(**w)))
            for write in writes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return numbers

    def write_while_closing(self, target: dict[str, Any], rounds: int) -> dict[str, int]:
        """Two threads write and poll while this one closes the peer; counts what came of it."""
        outcomes = {"done": 0, "TransferError": 0, "closed": 0}
        is_over = threading.Event()
        target_info = _target_of(target)
        message = self.nixl.encode_notification(EPOCH, LEASE, 0)

        def write(pages: list[int]) -> None:
            while not is_over.is_set():
                try:
                    handle = self.send_agents.write(
                        ("a", EPOCH), target_info, pages, pages, message
                    )
                    while handle.poll() == "pending":
                        time.sleep(0.0002)
                    outcomes["done"] += 1
                except self.nixl.TransferError:
                    outcomes["TransferError"] += 1

        half = len(self.pool) // 2
        both = (list(range(half)), list(range(half, 2 * half)))
        threads = [threading.Thread(target=write, args=(pages,)) for pages in both]
        for thread in threads:
            thread.start()
        try:
            deadline = time.monotonic() + 60  # Each round may be too short for a write to end.
            while not outcomes["done"] and time.monotonic() < deadline:
                time.sleep(0.001)
            for _ in range(rounds):
                time.sleep(random.random() * 0.05)
                self.send_agents.close_peer(("a", EPOCH))
                outcomes["closed"] += 1
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        return outcomes

    def poll(self, number: int) -> str:
        return str(self.writes[number].poll())

    def wait(self, number: int, timeout_s: float = 30.0) -> str:
        """Polls until done or until the time is over; raises what the write raises."""
        deadline = time.monotonic() + timeout_s
        while self.writes[number].poll() == "pending":
            if time.monotonic() > deadline:
                return "pending"
            time.sleep(0.001)
        return "done"

    def num_pending(self, peer: str, epoch: int = EPOCH) -> int:
        return int(self.send_agents.num_pending((peer, epoch)))

    def close_peer(self, peer: str, epoch: int = EPOCH) -> bool:
        return bool(self.send_agents.close_peer((peer, epoch)))

    def close_idle(self) -> int:
        return int(self.send_agents.close_idle())

    def close_filler(self) -> bool:
        return bool(self.send_agents.close())

    def num_peers(self) -> int:
        return self.send_agents.describe().count(" to ")

    # A reader's side.

    def open_reader(self, lanes: list[str] | None = None, **options: Any) -> None:
        """`lanes` count as one-sided beside those that are."""
        from weft.pages.transfer.nixl_peer import ONE_SIDED_READ_LANES

        ONE_SIDED_READ_LANES.update(lanes or [])
        region = self.nixl.PoolRegion.of_array(self.pool)
        self.read_agents = self.nixl.ReadAgents("store-test", region, **options)

    def read(
        self,
        peer: str,
        target: dict[str, Any],
        remote: list[int],
        local: list[int],
        epoch: int = EPOCH,
    ) -> int:
        """Posts; the result is the number of the read for `wait_read`."""
        handle = self.read_agents.read((peer, epoch), _target_of(target), remote, local)
        self.reads.append(handle)
        return len(self.reads) - 1

    def wait_read(self, number: int, timeout_s: float = 30.0) -> str:
        """Polls until done or until the time is over; raises what the read raises."""
        deadline = time.monotonic() + timeout_s
        while self.reads[number].poll() == "pending":
            if time.monotonic() > deadline:
                return "pending"
            time.sleep(0.001)
        return "done"

    def close_read_peer(self, peer: str, epoch: int = EPOCH) -> None:
        self.read_agents.close_peer((peer, epoch))

    def describe_reader(self) -> str:
        return str(self.read_agents.describe())

    def _target_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self.receive_agent.target())
        return {k: v.hex() if isinstance(v, bytes) else v for k, v in fields.items()}


def _target_of(fields: dict[str, Any]) -> Any:
    from weft.contract.handle import NixlTargetInfo

    binary = ("agent_metadata", "agent_metadata_digest")
    return NixlTargetInfo(**{k: bytes.fromhex(v) if k in binary else v for k, v in fields.items()})


def main() -> None:
    """Answers one line a call until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    operations = Operations(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        call = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(operations, call.pop("op"))(**call)}
        except Exception as error:
            may_still_arrive = getattr(error, "may_still_arrive", None)
            answer = {
                "error": type(error).__name__,
                "message": str(error),
                "may_still_arrive": may_still_arrive,
            }
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
