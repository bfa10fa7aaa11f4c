"""Empties the workers' caches of the benchmark's own mesh, so that only the store has the pages."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from weft.cli.main import COMMANDS
from weft.v1 import kvstore_pb2, kvstore_pb2_grpc

from serving.load import LoadError
from serving.mesh import WEFT

SETTLE_S = 0.4
"""The store has everything when so long nothing was added."""
SETTLE_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 10.0


def find_flush(state: Path) -> Callable[[], None] | None:
    """A function that empties the caches of all workers of a mesh; None if there is no store or no
    way.

    Args:
        state: State folder of the mesh.
    """
    run = state / "run"
    workers = sorted(path.stem for path in run.glob("*.json") if is_worker(path.stem))
    stores = sorted(run.glob("kvstore-*.json"))
    if not stores or not workers or "flush" not in COMMANDS:
        return None
    if not all(_ready(run / f"{name}.json").get("admin_address") for name in workers):
        return None
    address = _ready(stores[0])["address"]

    def flush() -> None:
        _wait_for_store(address)
        command = [*WEFT, "flush", *workers, "--state-dir", str(state)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SETTLE_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise LoadError(f"`weft flush`: status {done.returncode}: {done.stderr[-300:]}")

    return flush


def is_worker(name: str) -> bool:
    """A service that computes, by its name."""
    return name.startswith(("prefill-", "decode-"))


def _wait_for_store(address: str) -> None:
    """Returns once the store has stopped growing.

    Raises:
        LoadError: It does not answer, or does not stop.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        known, since = -1, time.monotonic()
        while time.monotonic() < deadline:
            try:
                stats = stub.Stats(kvstore_pb2.StatsRequest(), timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                raise LoadError(f"the store does not answer: {error}") from error
            num_held = stats.cached_pages
            if num_held != known or stats.pinned_pages or not num_held:
                known, since = num_held, time.monotonic()
            elif time.monotonic() - since >= SETTLE_S:
                return
            time.sleep(0.05)
    raise LoadError(f"the store still grows after {SETTLE_TIMEOUT_S:.0f} s")


def _ready(path: Path) -> dict[str, str]:
    content: dict[str, str] = json.loads(path.read_text())
    return content
