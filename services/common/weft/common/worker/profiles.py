"""Profiles of this worker's engine, from the command to the file."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from weft.common.tasks import start_logged
from weft.common.telemetry.merge_profile import MergeOrder, Part
from weft.common.telemetry.profile_folder import ProfileFolder, discard, read_chunks
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.service import Queries
from weft.contract.codec.pairs import PROFILED_ENGINE
from weft.contract.errors import ProfileNotFound, ProfileRunning
from weft.contract.messages import Outbox
from weft.contract.profiles import ProfileEnd, ProfileOptions
from weft.v1 import profile_pb2

logger = logging.getLogger(__name__)

END_GRACE_S = 60.0
"""Seconds by which an engine's end of a profile may come after its limit, since it prepares before
it records, and may be in a long step.
"""
WRITING_LIMIT_S = 60.0
"""Seconds for the ranks to write their parts once the engine has ended a profile."""
_LOOK_EVERY_S = 0.05
_NOTE_CHARS = 200


class _OpenProfile(NamedTuple):
    options: ProfileOptions
    working: Path
    end: asyncio.Future[ProfileEnd]


class WorkerProfiles:
    """Begins profiles, one at a time, and keeps the newest.

    Args:
        queries: To the engine that is profiled.
    """

    def __init__(
        self, folder: ProfileFolder, engine: EngineClient, queries: Queries, worker_id: str
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._queries = queries
        self._worker_id = worker_id
        self._open: dict[str, _OpenProfile] = {}
        self._made: dict[str, asyncio.Task[profile_pb2.ProfileSummary]] = {}

    def on_outbox(self, outbox: Outbox) -> None:
        for end in outbox.profile_ends:
            if (ended := self._open.get(end.profile)) is not None and not ended.end.done():
                ended.end.set_result(end)

    async def start(self, profile: str, options: ProfileOptions) -> None:
        """Raises ProfileRunning if one runs, ProfilesDisabled without a folder."""
        if self._open:
            raise ProfileRunning(f"{self._worker_id} is being profiled already", stage="profile")
        working = self._folder.make_working(profile)
        end: asyncio.Future[ProfileEnd] = asyncio.get_running_loop().create_future()
        opened = self._open[profile] = _OpenProfile(options, working, end)
        try:
            await self._queries.command_profile(profile, str(working.resolve()), options)
        except BaseException:
            # The engine may have begun it after all, as after a step that took too long.
            self._queries.drop_profile(profile)
            del self._open[profile]
            discard(working)
            raise
        self._made[profile] = start_logged(self._make(profile, opened))

    async def stop(self, profile: str) -> None:
        """Ends a profile early, if it has not ended. Raises ProfileNotFound for an unknown one."""
        self._find(profile)
        if profile in self._open:
            await self._queries.command_profile(profile)

    async def read(self, profile: str) -> tuple[profile_pb2.ProfileSummary, AsyncIterator[bytes]]:
        """Waits until the trace is written. Raises what went wrong with it."""
        summary = await asyncio.shield(self._find(profile))
        return summary, read_chunks(self._folder.find(summary))

    def _find(self, profile: str) -> asyncio.Task[profile_pb2.ProfileSummary]:
        if profile not in self._made:
            raise ProfileNotFound(f"there is no profile {profile!r}", stage="profile")
        return self._made[profile]

    async def _make(self, profile: str, opened: _OpenProfile) -> profile_pb2.ProfileSummary:
        began_s = time.time()
        try:
            end = await self._end_of(opened)
            if end is None:
                # What a dead engine has recorded is gone with it, but the profile says so.
                notes = [f"{self._worker_id}: its engine did not end the profile; nothing is left"]
                end = ProfileEnd(
                    profile=profile,
                    steps=0,
                    reason="lost",
                    ranks=0,
                    began_s=began_s,
                    ended_s=time.time(),
                    pause_s=0.0,
                )
            else:
                notes = await self._await_parts(opened.working, end.ranks)
            return await self._merge(opened.working, end, notes)
        finally:
            del self._open[profile]
            discard(opened.working)
            self._forget_old()

    async def _end_of(self, opened: _OpenProfile) -> ProfileEnd | None:
        limit_s = opened.options.limit_s + END_GRACE_S
        await asyncio.wait(
            (opened.end, self._engine.gone),
            timeout=limit_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        return opened.end.result() if opened.end.done() else None

    async def _await_parts(self, working: Path, ranks: int) -> list[str]:
        """Waits for the parts of all ranks; returns what is missing, in words."""
        deadline = time.monotonic() + WRITING_LIMIT_S
        missing = set(range(ranks))
        notes = list[str]()
        while missing:
            for rank in sorted(missing):
                if (failed := working / f"rank-{rank}.error").exists():
                    text = failed.read_text(errors="replace")[:_NOTE_CHARS]
                    notes.append(f"{self._worker_id} rank {rank}: {text}")
                    missing.remove(rank)
                elif (working / f"rank-{rank}.json").exists():
                    missing.remove(rank)
            if not missing or self._engine.gone.done() or time.monotonic() >= deadline:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        return notes + [f"{self._worker_id} rank {rank}: wrote nothing" for rank in sorted(missing)]

    async def _merge(
        self, working: Path, end: ProfileEnd, notes: list[str]
    ) -> profile_pb2.ProfileSummary:
        paths = [working / f"rank-{rank}.json" for rank in range(end.ranks)]
        parts = [
            Part(path=str(path), label=f"{self._worker_id} rank {rank}")
            for rank, path in enumerate(paths)
            if path.exists()
        ]
        out = self._folder.path_of(end.profile)
        order = MergeOrder(
            out=str(out.resolve()),
            parts=parts,
            began_s=end.began_s,
            ended_s=end.ended_s,
            notes=notes,
        )
        await self._folder.merge(order, working)
        summary = profile_pb2.ProfileSummary(
            profile_id=end.profile,
            path=order.out,
            trace_bytes=out.stat().st_size,
            engines=[PROFILED_ENGINE.encode(end, worker_id=self._worker_id)],
            notes=notes,
        )
        summary.start_time.FromNanoseconds(int(end.began_s * 1e9))
        summary.end_time.FromNanoseconds(int(end.ended_s * 1e9))
        logger.info(
            "profile written",
            extra={"path": order.out, "steps": end.steps, "pause_s": round(end.pause_s, 3)},
        )
        return summary

    def _forget_old(self) -> None:
        done = [name for name, task in self._made.items() if name not in self._open]
        for name in done[: -self._folder.max_profiles]:
            del self._made[name]
