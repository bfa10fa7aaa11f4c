"""A stand-in for a service under a supervisor: a ready file, perhaps an engine, bad manners.

A worker has an engine and takes reports of exits; a stubborn one does not end by SIGTERM. While
there is a file NAME.mute beside the record, one of that name never says that it is ready.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
from weft.cli.up.process import LAUNCHER
from weft.v1 import worker_pb2, worker_pb2_grpc

SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def start_engine() -> int:
    """A process that does not end by SIGTERM, in a session of its own, dying with its parent."""
    command = [sys.executable, str(LAUNCHER), str(os.getpid()), sys.executable, "-c", SLEEP]
    return subprocess.Popen(command, start_new_session=True).pid


def is_alive(pid: int) -> bool:
    """Whether the process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Records reported exits, with the engines that lived on at that moment."""

    def __init__(self, record: Path) -> None:
        self._record = record

    async def ReportExit(
        self,
        request: worker_pb2.ReportExitRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_pb2.ReportExitResponse:
        starts = [json.loads(line) for line in self._record.read_text().splitlines()]
        pids = [s["pid"] for s in starts if s.get("epoch") == request.epoch]
        pids += [s["engine_pid"] for s in starts if s.get("epoch") == request.epoch]
        alive = [pid for pid in pids if is_alive(pid)]
        report = {"report": request.worker_id, "of": request.epoch, "alive": alive}
        append(self._record, report)
        return worker_pb2.ReportExitResponse(released_pages=3)


def append(path: Path, entry: dict[str, Any]) -> None:
    """Appends one JSON line."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


async def serve(arguments: argparse.Namespace) -> None:
    server = grpc.aio.server()
    ready: dict[str, Any] = {"address": arguments.address, "pid": os.getpid()}
    if arguments.worker:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(arguments.record), server)
        ready |= {"engine_pid": start_engine(), "worker_id": arguments.name}
        ready |= {"epoch": secrets.randbits(64)}
    server.add_insecure_port(arguments.address)
    await server.start()
    stop = asyncio.Event()
    # Before it says that it is ready: it may be told to end from then on.
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, (lambda: None) if arguments.stubborn else stop.set
    )
    append(arguments.record, {"start": arguments.name, **ready})
    if not (arguments.record.parent / f"{arguments.name}.mute").exists():
        arguments.ready_file.write_text(json.dumps(ready))
    await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--name", "--address"):
        parser.add_argument(name, required=True)
    for name in ("--ready-file", "--record"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--worker", "--stubborn", "--fail"):
        parser.add_argument(name, action="store_true")
    arguments = parser.parse_args()
    if arguments.fail:
        sys.exit("the fake fails as told")
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
