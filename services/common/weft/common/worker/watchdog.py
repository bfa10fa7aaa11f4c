"""Detects an engine that stalls or dies, and writes what is known about it to a folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from weft.common.telemetry.request_log import LoggedPrompt, to_line
from weft.common.worker.black_box import PLAN, STACKS, STACKS_SIGNAL, STATE, STATE_SIGNAL
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.settings import WorkerSettings
from weft.contract.errors import ConfigError
from weft.engine.loop.flight import read_plan

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
STATE_TIMEOUT_S = 2.0
"""Seconds to wait for a stalled engine's state, which it may not be able to report."""
_STACKS_S = 0.2
"""Time for faulthandler to write."""


class CrashDumps:
    """Folders of crash dumps, the newest few of all workers that share the folder. `worker_id` is
    part of the dumps' names.

    Raises:
        ConfigError: The folder cannot be made.
    """

    def __init__(self, root: Path, max_dumps: int, worker_id: str) -> None:
        self._root = root
        self._max_dumps = max_dumps
        self._name = re.sub(r"[^\w.-]", "_", worker_id)
        self.live = root / f".live-{self._name}"
        """File to which the engine process writes its traces."""
        try:
            for left in (self.live, *root.glob(f".[0-9]*-{self._name}-*")):
                shutil.rmtree(left, ignore_errors=True)
            self.live.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--crash-dir {root}: {error.strerror}") from error

    def write(
        self, kind: str, report: Mapping[str, object], requests: Iterable[LoggedPrompt]
    ) -> Path:
        """Writes a dump, and deletes the oldest ones beyond the limit; returns its folder. `kind`
        is stall or crash; `requests` were running.

        Raises:
            OSError: The dump cannot be written; no part of it is left.
        """
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"{time.time() % 1:.3f}"[1:]
        folder = self._root / f"{stamp}-{self._name}-{kind}"
        # The folder has another name until it is complete, since others may read a dump as soon as
        # they find it.
        partial = self._root / f".{folder.name}"
        partial.mkdir(mode=0o700)
        try:
            self._fill(partial, report, requests)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(folder)
        for old in sorted(self._root.glob("[0-9]*-*"))[: -self._max_dumps]:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def _fill(
        self, folder: Path, report: Mapping[str, object], requests: Iterable[LoggedPrompt]
    ) -> None:
        whole = {**report, "plan": read_plan(self.live / PLAN)}
        (folder / "report.json").write_text(json.dumps(whole, indent=2, default=str) + "\n")
        lines = "".join(to_line(prompt) + "\n" for prompt in requests)
        (folder / "requests.jsonl").write_text(lines, encoding="utf-8")
        for name in (STACKS, STATE):
            with contextlib.suppress(OSError):
                shutil.copyfile(self.live / name, folder / name)

    def close(self) -> None:
        """Deletes the engine's traces."""
        shutil.rmtree(self.live, ignore_errors=True)


class Watchdog:
    """Watches one engine.

    Args:
        settings: Limits, and the content of dumps.
        requests: Returns the running requests.
        about: Further facts about the worker, for reports.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engine: EngineClient,
        dumps: CrashDumps,
        requests: Callable[[], list[LoggedPrompt]],
        about: Mapping[str, object],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._dumps = dumps
        self._requests = requests
        self._about = about

    async def run(self) -> None:
        """Writes one dump for each stall, until cancelled."""
        has_dumped = False
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            limit_s = self._limit_s()
            if limit_s is None or self._engine.gone.done():
                continue
            if self._engine.loop_age_s <= limit_s:
                has_dumped = False
            elif not has_dumped:
                has_dumped = True
                await self._dump_stall(limit_s)

    async def dump_crash(self, why: str) -> None:
        """Writes a dump after the engine died without being stopped."""
        await self._dump("crash", {"why": why})

    def _limit_s(self) -> float | None:
        if self._settings.stall_dump_after_s is not None:
            return self._settings.stall_dump_after_s
        return None if self._engine.load is None else self._engine.load.stale_after_s

    async def _dump_stall(self, limit_s: float) -> None:
        age_s = self._engine.loop_age_s
        state = self._dumps.live / STATE
        state.unlink(missing_ok=True)
        for number in (STACKS_SIGNAL, STATE_SIGNAL):
            if self._engine.info is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._engine.info.engine_pid, number)
            # The signals are sent one after the other; with two pending, another thread may get the
            # first.
            await asyncio.sleep(_STACKS_S)
        deadline = time.monotonic() + STATE_TIMEOUT_S
        while not state.exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        why = f"the engine's loop has not turned for {age_s:.1f} s; the limit is {limit_s:.1f} s"
        await self._dump("stall", {"why": why, "has_state": state.exists()})

    async def _dump(self, kind: str, report: dict[str, object]) -> None:
        load = self._engine.load
        report |= {
            **self._about,
            "kind": kind,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "loop_age_s": round(self._engine.loop_age_s, 3),
            "load": None if load is None else asdict(load),
            "settings": self._settings.describe(),
        }
        try:
            folder = await asyncio.to_thread(self._dumps.write, kind, report, self._requests())
        except OSError as error:
            logger.error("no dump could be written: %s", error)
        else:
            logger.error("engine %s: %s; see %s", kind, report["why"], folder)
