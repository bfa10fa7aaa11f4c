"""Profiles of an engine that runs in this process."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.contract.messages import Inbox, Outbox
from weft.contract.profiles import ProfileCommand, ProfileEnd, ProfileOptions
from weft.contract.submits import Failure
from weft.engine.loop.engine import Engine

WRITING_S = 60.0


class EngineProfiles:
    """Sends commands with the engine's next turn, whoever calls it, and keeps what it answers."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.folder = folder
        self.failures: list[Failure | None] = []
        self.ends: list[ProfileEnd] = []
        self._commands: list[ProfileCommand] = []
        self._turn: Callable[[Inbox | None], Outbox] = engine.turn
        self._queries = itertools.count()
        engine.turn = self._with_commands  # type: ignore[method-assign]

    def begin(self, name: str, **options: Any) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        self._send(
            ProfileCommand(
                query=next(self._queries),
                profile=name,
                folder=str(self.folder / name),
                options=ProfileOptions(**options),
            )
        )

    def stop(self, name: str) -> None:
        self._send(ProfileCommand(query=next(self._queries), profile=name))

    def parts(self, end: ProfileEnd) -> list[dict[str, Any]]:
        """The trace of each rank, once it is written."""
        paths = [self.folder / end.profile / f"rank-{rank}.json" for rank in range(end.ranks)]
        deadline = time.monotonic() + WRITING_S
        while not all(path.exists() for path in paths):
            failed = [path.read_text() for path in (self.folder / end.profile).glob("*.error")]
            assert not failed, failed
            assert time.monotonic() < deadline, "a rank has written nothing"
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in paths]

    def _send(self, command: ProfileCommand) -> None:
        self._commands.append(command)

    def _with_commands(self, inbox: Inbox | None = None) -> Outbox:
        if self._commands:
            inbox = inbox or Inbox()
            inbox.profile_commands += self._commands
            self._commands = []
        outbox = self._turn(inbox)
        self.failures += [failure for _, failure in outbox.profile_replies]
        self.ends += outbox.profile_ends
        return outbox


def step_names(trace: dict[str, Any]) -> list[str]:
    """The steps of a rank's part, in their order."""
    steps = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith("step ")
    ]
    return [event["name"] for event in sorted(steps, key=lambda event: event["ts"])]
