"""Profiles of the mesh: of several workers at the same time, as one trace with the spans of the
requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.common.tasks import start_logged
from weft.common.telemetry.merge_profile import AROUND_S, MergeOrder, Part
from weft.common.telemetry.profile_folder import (
    MERGE_LIMIT_S,
    SUFFIX,
    ProfileFolder,
    discard,
    read_chunks,
)
from weft.common.telemetry.tracing import TraceServicer
from weft.contract.codec.pairs import PROFILE_OPTIONS
from weft.contract.errors import (
    PeerUnavailable,
    ProfileNotFound,
    ProfileRunning,
    WeftError,
)
from weft.contract.profiles import ProfileOptions, check_id
from weft.gateway.console.relay import OperatorsRelay
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.validate import invalid
from weft.v1 import admin_pb2, profile_pb2, trace_pb2

_log = logging.getLogger(__name__)

MAX_SPANS = 4000
"""Most spans of each service in a trace."""
_ORDER_TIMEOUT_S = 10.0
_PART_GRACE_S = 120.0 + MERGE_LIMIT_S
"""Seconds after a profile's limit in which a worker's part must have come."""
_NOTE_CHARS = 300
_ID_BYTES = 4


@dataclass(slots=True)
class MeshProfile:
    profile_id: str
    options: ProfileOptions
    out: Path
    token: str
    members: list[str]
    notes: list[str] = field(default_factory=list)
    made: asyncio.Task[profile_pb2.ProfileSummary] | None = None

    @property
    def is_running(self) -> bool:
        return self.made is None or not self.made.done()


class MeshProfiles:
    """One profile at a time; the newest are remembered.

    Args:
        spans: Finds the spans of this gateway and of the services behind it.
    """

    def __init__(
        self, folder: ProfileFolder, relay: OperatorsRelay, fleet: Fleet, spans: TraceServicer
    ) -> None:
        self._folder = folder
        self._relay = relay
        self._fleet = fleet
        self._spans = spans
        self._profiles: list[MeshProfile] = []

    async def start(
        self,
        options: ProfileOptions,
        token: str,
        *,
        members: Sequence[str] = (),
        prefix: str = "",
        folder: str = "",
    ) -> MeshProfile:
        """Begins a profile of the workers named, or of all that are healthy, with the operators'
        token.

        Raises:
            ProfileRunning: One runs already, here or on a worker.
            ProfilesDisabled: This gateway, or a worker that was named, has no folder for profiles.
            InvalidRequest: The folder is not below this gateway's folder for profiles.
            WeftError: A worker that was named cannot be profiled, or none can.
        """
        if self._profiles and self._profiles[-1].is_running:
            raise ProfileRunning(
                f"profile {self._profiles[-1].profile_id} runs; wait for its end, or stop it",
                stage="profile",
            )
        out = self._out(prefix, folder)
        profile_id = out.name.removesuffix(SUFFIX)
        healthy, notes = self._healthy()
        wanted = list(members) or healthy
        if not wanted:
            message = "; ".join(["there is no healthy worker to profile", *notes])
            raise PeerUnavailable(message, stage="profile")
        profile = MeshProfile(profile_id, options, out, token, [], [] if members else notes)
        working = self._folder.make_working(profile_id)
        self._profiles.append(profile)
        try:
            await self._start_all(profile, wanted, is_each_needed=bool(members))
        except BaseException:
            self._profiles.remove(profile)
            discard(working)
            # The caller may have left while some workers had begun.
            profile.members = [*wanted]
            start_logged(self._stop_all(profile))
            raise
        profile.made = start_logged(self._make(profile, working))
        del self._profiles[: -self._folder.max_profiles]
        return profile

    async def stop(self, profile_id: str = "") -> MeshProfile:
        """Ends a profile early, by default the one that began last, if it has not ended. Raises
        ProfileNotFound if there is none.
        """
        profile = self._find(profile_id)
        if profile.is_running:
            await self._stop_all(profile)
        return profile

    async def summary(self, profile_id: str) -> profile_pb2.ProfileSummary:
        """Waits until a profile's trace is written."""
        profile = self._find(profile_id)
        assert profile.made is not None
        return await asyncio.shield(profile.made)

    async def read(
        self, profile_id: str
    ) -> tuple[profile_pb2.ProfileSummary, AsyncIterator[bytes]]:
        """Waits until a profile's trace is written; returns what it has, and its bytes."""
        summary = await self.summary(profile_id)
        return summary, read_chunks(self._folder.find(summary))

    def covering(self, start_ns: int, end_ns: int) -> Iterator[profile_pb2.ProfileSummary]:
        """Profiles with a trace that overlap a time in Unix nanoseconds."""
        for profile in self._profiles:
            made = profile.made
            if made is None or not made.done() or made.cancelled() or made.exception() is not None:
                continue
            summary = made.result()
            if (
                summary.start_time.ToNanoseconds() <= end_ns
                and summary.end_time.ToNanoseconds() >= start_ns
            ):
                yield summary

    def _find(self, profile_id: str) -> MeshProfile:
        for profile in reversed(self._profiles):
            if profile_id in ("", profile.profile_id) and profile.made is not None:
                return profile
        which = f"no profile {profile_id!r}" if profile_id else "no profile"
        raise ProfileNotFound(f"this gateway has {which}", stage="profile")

    def _healthy(self) -> tuple[list[str], list[str]]:
        """Healthy workers, and why others are not profiled."""
        now = asyncio.get_running_loop().time()
        healthy, notes = list[str](), list[str]()
        for worker in self._fleet.workers():
            if problem := worker.health_problem(now):
                who = worker.endpoint.address if worker.info is None else worker.info.worker_id
                notes.append(f"{who}: {problem}"[:_NOTE_CHARS])
            elif worker.info is not None:
                healthy.append(worker.info.worker_id)
        return healthy, notes

    def _out(self, prefix: str, folder: str) -> Path:
        if prefix:
            check_id(prefix, "prefix")
        root = self._folder.root.resolve()
        wanted = (root / folder).resolve()
        if not wanted.is_relative_to(root):
            raise invalid("folder", "must be below the gateway's --profile-dir")
        if any(part.startswith(".") for part in wanted.relative_to(root).parts):
            raise invalid("folder", "no part of it may begin with a dot")
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"{prefix[:32]}{'-' if prefix else ''}{stamp}-{secrets.token_hex(_ID_BYTES)}"
        return self._folder.path_of(str(wanted.relative_to(root) / name))

    async def _start_all(
        self, profile: MeshProfile, wanted: Sequence[str], *, is_each_needed: bool
    ) -> None:
        starts = (self._start(profile, member) for member in wanted)
        problems = dict(zip(wanted, await asyncio.gather(*starts), strict=True))
        profile.members = [member for member, problem in problems.items() if problem is None]
        failed = [(member, error) for member, error in problems.items() if error is not None]
        for member, error in failed:
            # A part of the workers would be profiled by somebody else at the same time.
            is_final = is_each_needed or isinstance(error, ProfileRunning) or not profile.members
            if is_final:
                raise error
            profile.notes.append(_note(member, error))

    async def _start(self, profile: MeshProfile, member: str) -> WeftError | None:
        options = PROFILE_OPTIONS.encode(profile.options)
        request = admin_pb2.StartProfileRequest(profile_id=profile.profile_id, options=options)
        try:
            async with self._relay.reach(member) as stub:
                await stub.StartProfile(
                    request, timeout=_ORDER_TIMEOUT_S, metadata=_metadata(profile)
                )
        except WeftError as error:
            return error
        return None

    async def _stop_all(self, profile: MeshProfile) -> None:
        await asyncio.gather(*(self._stop(profile, member) for member in profile.members))

    async def _stop(self, profile: MeshProfile, member: str) -> None:
        request = admin_pb2.StopProfileRequest(profile_id=profile.profile_id)
        try:
            async with self._relay.reach(member) as stub:
                await stub.StopProfile(
                    request, timeout=_ORDER_TIMEOUT_S, metadata=_metadata(profile)
                )
        except WeftError as error:
            profile.notes.append(_note(member, error))

    async def _make(self, profile: MeshProfile, working: Path) -> profile_pb2.ProfileSummary:
        began_s = time.time()
        try:
            paths = [working / f"{number}.json.gz" for number in range(len(profile.members))]
            fetches = [
                self._fetch(profile, member, path)
                for member, path in zip(profile.members, paths, strict=True)
            ]
            found = await asyncio.gather(*fetches)
            summaries = [one for one in found if one is not None]
            summary = profile_pb2.ProfileSummary(
                profile_id=profile.profile_id,
                path=str(profile.out),
                engines=[engine for one in summaries for engine in one.engines],
            )
            starts = [one.start_time.ToNanoseconds() for one in summaries] or [int(began_s * 1e9)]
            ends = [one.end_time.ToNanoseconds() for one in summaries] or [time.time_ns()]
            summary.start_time.FromNanoseconds(min(starts))
            summary.end_time.FromNanoseconds(max(ends))
            spans = await self._find_spans(profile, summary)
            summary.notes.extend(
                [*profile.notes, *(note for one in summaries for note in one.notes)]
            )
            (working / "spans.pb").write_bytes(spans.SerializeToString())
            order = MergeOrder(
                out=str(profile.out),
                parts=[
                    Part(path=str(path))
                    for path, one in zip(paths, found, strict=True)
                    if one is not None
                ],
                began_s=min(starts) / 1e9,
                ended_s=max(ends) / 1e9,
                spans=str(working / "spans.pb"),
                notes=list(summary.notes),
                about={"profile_id": profile.profile_id},
            )
            await self._folder.merge(order, working)
            summary.trace_bytes = profile.out.stat().st_size
            _log.info("profile written", extra={"path": str(profile.out)})
            return summary
        finally:
            discard(working)

    async def _fetch(
        self, profile: MeshProfile, member: str, path: Path
    ) -> profile_pb2.ProfileSummary | None:
        """Waits for a worker's part; None: it did not come."""
        request = admin_pb2.ReadProfileRequest(profile_id=profile.profile_id)
        limit_s = profile.options.limit_s + _PART_GRACE_S
        summary: profile_pb2.ProfileSummary | None = None
        try:
            async with self._relay.reach(member) as stub:
                stream = stub.ReadProfile(request, timeout=limit_s, metadata=_metadata(profile))
                with path.open("wb") as file:
                    async for message in stream:
                        if message.HasField("summary"):
                            summary = message.summary
                        await asyncio.to_thread(file.write, message.data)
        except WeftError as error:
            profile.notes.append(_note(member, error))
            return None
        return summary

    async def _find_spans(
        self, profile: MeshProfile, summary: profile_pb2.ProfileSummary
    ) -> trace_pb2.ListSpansResponse:
        request = trace_pb2.ListSpansRequest(max_spans=MAX_SPANS, fan_out=True)
        around_ns = int(AROUND_S * 1e9)
        request.start_time.FromNanoseconds(summary.start_time.ToNanoseconds() - around_ns)
        request.end_time.FromNanoseconds(summary.end_time.ToNanoseconds() + around_ns)
        found = await self._spans.find(request)
        profile.notes += [f"{one.address}: no spans, {one.problem}" for one in found.silent]
        return found


def _metadata(profile: MeshProfile) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {profile.token}"),)


def _note(member: str, error: WeftError) -> str:
    return f"{member}: {error.message}"[:_NOTE_CHARS]
