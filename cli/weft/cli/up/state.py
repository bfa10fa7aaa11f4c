"""The folder of one mesh: lock, logs, ready files, the operators' token."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.contract.errors import ConfigError

_ROOM_BYTES = 1 << 20
"""Room that the folder's disk must have for the files of a start. A service that cannot write them
ends without a message.
"""


@dataclass(frozen=True, slots=True)
class StateFolder:
    root: Path

    @property
    def logs(self) -> Path:
        """Logs of the latest mesh, one per service."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Ready files; empty while no mesh runs."""
        return self.root / "run"

    @property
    def crashes(self) -> Path:
        """Dumps of engines that stalled or died. They outlive the mesh."""
        return self.root / "crashes"

    @property
    def profiles(self) -> Path:
        """Profiles of the mesh. They outlive it."""
        return self.root / "profiles"

    @property
    def worker_profiles(self) -> Path:
        """Each worker's part of them, in a folder of its own."""
        return self.root / "worker-profiles"

    @property
    def admin_token(self) -> Path:
        """The token of the services' operators' ports; new for every mesh."""
        return self.root / "admin-token"

    @property
    def workers_file(self) -> Path:
        """Addresses of the workers, where they come and go."""
        return self.root / "workers.json"

    @property
    def supervisor_file(self) -> Path:
        """Address of the port that takes orders for workers; there while it is open."""
        return self.root / "supervisor.json"

    @contextlib.contextmanager
    def supervised_at(self, address: str) -> Iterator[None]:
        """Keeps `supervisor_file` inside the block."""
        temporary = self.supervisor_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"address": address}), encoding="utf-8")
        temporary.replace(self.supervisor_file)
        try:
            yield
        finally:
            self.supervisor_file.unlink(missing_ok=True)


@contextlib.contextmanager
def locked_state_folder(root: Path) -> Iterator[StateFolder]:
    """Makes the folder and locks it for one mesh. Drops the logs of the mesh before.

    Raises:
        ConfigError: Another mesh uses the folder, it cannot be created, or its disk is full.
    """
    folder = StateFolder(root)
    try:
        for path in (folder.logs, folder.run):
            path.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(root, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"a mesh is already running in {root}; stop it, or give this one another "
                "--state-dir"
            ) from error
        try:
            for old in (*folder.logs.glob("*.log"), *folder.run.iterdir()):
                old.unlink()
            _write_token(folder.admin_token)
            with tempfile.TemporaryFile(dir=root) as room:
                os.posix_fallocate(room.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            raise _unusable(root, error) from error
        yield folder
    finally:
        os.close(lock)  # Closing the file releases the lock.


def _unusable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use {root}: {error.strerror}; choose another folder with --state-dir"
    )


def _write_token(path: Path) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
