"""A worker's profiles beside an engine that refuses, is late, or dies."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest
from weft.common.telemetry.profile_folder import ProfileFolder
from weft.common.worker import profiles
from weft.common.worker.profiles import WorkerProfiles
from weft.contract.errors import PeerUnavailable, ProfileNotFound, ProfileRunning
from weft.contract.messages import Outbox
from weft.contract.profiles import ProfileEnd, ProfileOptions


class Engine:
    """Stands for an engine and the queries to it."""

    def __init__(self) -> None:
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.refusal: Exception | None = None
        self.folder = Path()
        self.stopped: list[str] = []

    async def command_profile(
        self, profile: str, folder: str = "", options: ProfileOptions | None = None
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        if options is None:
            self.stopped.append(profile)
        self.folder = Path(folder)

    def drop_profile(self, profile: str) -> None:
        self.stopped.append(profile)


def worker(engine: Engine, root: Path) -> WorkerProfiles:
    return WorkerProfiles(ProfileFolder(root, 2), cast(Any, engine), cast(Any, engine), "decode-0")


def end_of(profile: str, ranks: int) -> ProfileEnd:
    return ProfileEnd(
        profile=profile,
        steps=3,
        reason="steps",
        ranks=ranks,
        began_s=1_790_000_000.0,
        ended_s=1_790_000_001.0,
        pause_s=0.25,
    )


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_ranks_that_wrote_nothing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "WRITING_LIMIT_S", 0.0)
    engine = Engine()
    made = worker(engine, tmp_path)
    await made.start("one", ProfileOptions(steps=3))
    with pytest.raises(ProfileRunning):
        await made.start("two", ProfileOptions())
    (engine.folder / "rank-0.json").write_text(json.dumps({"traceEvents": []}))
    (engine.folder / "rank-2.error").write_text("no CUPTI")
    made.on_outbox(Outbox(profile_ends=[end_of("one", 3)]))
    summary, chunks = await made.read("one")
    assert list(summary.notes) == ["decode-0 rank 2: no CUPTI", "decode-0 rank 1: wrote nothing"]
    (ended,) = summary.engines
    assert (ended.worker_id, ended.steps, ended.reason, ended.ranks) == ("decode-0", 3, "steps", 3)
    assert ended.pause.ToNanoseconds() == 250_000_000
    content = b"".join([chunk async for chunk in chunks])
    assert len(content) == summary.trace_bytes
    assert json.loads(gzip.decompress(content))["otherData"]["notes"] == list(summary.notes)
    assert names(tmp_path) == ["one.json.gz"]
    with pytest.raises(ProfileNotFound):
        await made.read("two")


async def test_an_engine_that_is_late_is_told_to_forget(tmp_path: Path) -> None:
    engine = Engine()
    engine.refusal = PeerUnavailable("late", stage="engine")
    made = worker(engine, tmp_path)
    with pytest.raises(PeerUnavailable):
        await made.start("one", ProfileOptions())
    assert engine.stopped == ["one"]
    assert names(tmp_path) == []
    engine.refusal = None
    await made.start("two", ProfileOptions())
    await made.stop("two")
    assert engine.stopped == ["one", "two"]
    engine.gone.set_result("killed")
    summary, _ = await made.read("two")
    assert summary.engines[0].reason == "lost"
    assert "did not end the profile" in summary.notes[0]
