"""When a worker counts as stalled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import pytest
from weft.cli.up import liveness


class AskedEnough(Exception):
    """There is no further answer."""


def asked(monkeypatch: pytest.MonkeyPatch, answers: Iterable[tuple[float, bool]]) -> Any:
    """Looks at a worker on a clock of its own: how long each takes, and what it says."""
    now, looks = 0.0, iter(answers)
    monkeypatch.setattr(time, "monotonic", lambda: now)

    async def is_alive() -> bool:
        nonlocal now
        look = next(looks, None)
        if look is None:
            raise AskedEnough
        took_s, alive = look
        now += took_s
        return alive

    return is_alive


async def test_only_a_worker_that_stays_away_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(1.0, False)] * 9 + [(1.0, True)] + [(1.0, False)] * 10
    left = iter(answers)
    await liveness.wait_stalled(asked(monkeypatch, left), 10.0, 0.0)
    assert not list(left)


async def test_a_supervisor_that_was_suspended_kills_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first look after a machine's sleep may come before the worker's own loop turned."""
    is_alive = asked(monkeypatch, [(3600.0, False), *[(1.0, True)] * 3])
    with pytest.raises(AskedEnough):
        await liveness.wait_stalled(is_alive, 10.0, 0.0)


async def test_a_worker_that_does_not_answer_is_not_alive() -> None:
    is_alive = liveness.health_checker(None)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    assert not await is_alive("decode-0", address)
