"""The folder in which a service keeps its last profiles."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from weft.common.telemetry.merge_profile import MergeOrder, write_order
from weft.contract.errors import Internal, ProfileNotFound, ProfilesDisabled
from weft.v1 import profile_pb2

CHUNK_BYTES = 1 << 20
MERGE_LIMIT_S = 300.0
SUFFIX = ".json.gz"
_WORKING = ".weft-profile-"
"""What the names of folders with parts begin with."""
_LEFT_AFTER_S = 3600.0
"""Age from which such a folder was left by a service that died."""


class ProfileFolder:
    """Makes traces in processes of their own, and keeps the newest. Only its owner can read them.

    Args:
        root: None: there is no folder, and every use of it is refused.
    """

    def __init__(self, root: Path | None, max_profiles: int) -> None:
        self._root = root
        self.max_profiles = max_profiles

    @property
    def root(self) -> Path:
        """Raises ProfilesDisabled if there is none."""
        if self._root is None:
            message = "there is no folder for profiles: start the service with --profile-dir"
            raise ProfilesDisabled(message, stage="profile")
        return self._root

    def path_of(self, name: str) -> Path:
        """Where the trace of this name lies once it is whole. `name` may begin with folders."""
        return self.root / f"{name}{SUFFIX}"

    def find(self, summary: profile_pb2.ProfileSummary) -> Path:
        """Path of a trace. Raises ProfileNotFound if it is no longer kept."""
        path = Path(summary.path)
        if not path.exists():
            message = f"the profile {summary.profile_id!r} is no longer kept"
            raise ProfileNotFound(message, stage="profile")
        return path

    def make_working(self, name: str) -> Path:
        """Makes a folder for the parts of a profile.

        Raises:
            ProfilesDisabled: There is no folder for profiles, or it cannot be written to.
        """
        working = self.root / f"{_WORKING}{name}"
        try:
            working.mkdir(parents=True, mode=0o700)
            for left in self.root.glob(f"{_WORKING}*"):
                if time.time() - left.stat().st_mtime > _LEFT_AFTER_S:
                    discard(left)
        except OSError as error:
            message = f"--profile-dir {self.root}: {error.strerror}"
            raise ProfilesDisabled(message, stage="profile") from error
        return working

    async def merge(self, order: MergeOrder, working: Path) -> None:
        """Makes a trace in another process, and deletes the oldest ones beyond the limit.

        Raises:
            Internal: It failed, or took longer than `MERGE_LIMIT_S`.
        """
        out, path = Path(order.out), working / "order.json"
        out.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        write_order(order, path)
        command = (sys.executable, "-m", "weft.common.telemetry.merge_profile", str(path))
        await asyncio.to_thread(_run, command)
        found = [path for path in self.root.rglob(f"*{SUFFIX}") if path.parent != working]
        for old in sorted(found, key=lambda path: path.stat().st_mtime)[: -self.max_profiles]:
            old.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> None:
    """Not by the event loop's own means: uvloop forks, and gRPC's threads may crash the child."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MERGE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"the profile was not merged within {MERGE_LIMIT_S:.0f} s"
        raise Internal(message, stage="profile") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        message = f"the profile was not merged: exit status {done.returncode}, {said}"
        raise Internal(message, stage="profile")


def discard(working: Path) -> None:
    """Deletes the parts of a profile."""
    shutil.rmtree(working, ignore_errors=True)


async def read_chunks(path: Path) -> AsyncIterator[bytes]:
    """The content of a file, at most `CHUNK_BYTES` at a time, read in a thread."""
    with await asyncio.to_thread(path.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
