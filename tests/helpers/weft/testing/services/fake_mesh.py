"""Runs fake services under the supervisor of `weft up`; events go to the record file.

`python -m weft.testing.services.fake_mesh FOLDER SERVICE...`, a SERVICE being `name[:flag[:flag]]`.
"""

import asyncio
import os
import sys
from pathlib import Path

from weft.cli.up.exits import report_exit
from weft.cli.up.mesh import run_mesh
from weft.cli.up.plan import BACK, FRONT
from weft.cli.up.ports import free_ports
from weft.cli.up.process import ExitedEarly, ServiceSpec
from weft.cli.up.supervisor import Supervisor
from weft.testing.services.fake_service import append

FAKE = Path(__file__).with_name("fake_service.py")


class Recorder:
    """A Reporter that writes down what it hears."""

    def __init__(self, record: Path) -> None:
        self._record = record

    def starting(self, name: str) -> None:
        append(self._record, {"event": "starting", "name": name})

    def loading(self, name: str, done: int, total: int, what: str) -> None:
        append(self._record, {"event": "loading", "name": name, "done": done, "total": total})

    def ready(self, name: str, seconds: float) -> None:
        append(self._record, {"event": "ready", "name": name})

    def died(self, name: str, how: str) -> None:
        append(self._record, {"event": "died", "name": name, "how": how})

    def stalled(self, name: str, seconds: float) -> None:
        append(self._record, {"event": "stalled", "name": name})

    def restarting(self, name: str, delay_s: float) -> None:
        append(self._record, {"event": "restarting", "name": name, "delay_s": delay_s})

    def failed(self, name: str, how: str) -> None:
        append(self._record, {"event": "failed", "name": name, "how": how})

    def stopping(self, grace_s: float) -> None:
        append(self._record, {"event": "stopping"})

    def killed(self, name: str, *, is_late: bool) -> None:
        append(self._record, {"event": "killed", "name": name, "is_late": is_late})


def main() -> int:
    folder = Path(sys.argv[1])
    record = folder / "record.jsonl"
    record.touch()
    services, decode = [], {}
    for text, port in zip(sys.argv[2:], free_ports("127.0.0.1", len(sys.argv) - 2), strict=True):
        name, *flags = text.split(":")
        address = f"127.0.0.1:{port}"
        if name.startswith("decode"):
            decode[name] = address
        command = [sys.executable, str(FAKE), "--name", name, "--address", address]
        command += ["--record", str(record), *(f"--{flag}" for flag in flags)]
        services.append(
            ServiceSpec(
                name=name,
                command=tuple(command),
                ready_file=folder / f"{name}.json",
                log_file=folder / f"{name}.log",
                stop_phase=BACK if "worker" in flags else FRONT,
            )
        )

    async def tell(worker_id: str, epoch: int) -> None:
        await report_exit(decode, worker_id, epoch)

    async def wait_ready() -> None:
        return None

    def on_ready(supervisor: Supervisor) -> None:
        append(record, {"event": "mesh ready"})

    try:
        asyncio.run(
            run_mesh(
                services,
                Recorder(record),
                tell,
                wait_ready,
                on_ready,
                float(os.environ.get("FAKE_DRAIN_GRACE_S", "30")),
                max_restart_delay_s=30.0,
                ready_timeout_s=float(os.environ.get("FAKE_READY_TIMEOUT_S", "300")),
            )
        )
    except ExitedEarly:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
