"""Workers that a trainer's update has not reached get no requests."""

from __future__ import annotations

import pytest
from weft.gateway.fleet.versions import ServedVersions

OLD, NEW, NEWEST = b"old", b"new", b"newest"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def versions(clock: Clock) -> ServedVersions:
    versions = ServedVersions(clock)
    for worker in ("a", "b"):
        versions.report("m", worker, OLD)
    versions.report("m", "other-dtype", b"old-32")
    versions.report("n", "a", OLD)
    return versions


def outdated(versions: ServedVersions, model: str = "m") -> set[str]:
    return {one for one in ("a", "b", "other-dtype") if versions.is_outdated(model, one)}


def test_without_updates_workers_may_differ(versions: ServedVersions) -> None:
    assert outdated(versions) == set()


def test_those_that_an_update_has_not_reached_wait_for_it(
    versions: ServedVersions, clock: Clock
) -> None:
    versions.update("m", {"a": NEW, "other-dtype": b"new-32"})
    assert outdated(versions) == {"b"}
    assert outdated(versions, "n") == set()
    # A report that was under way is older than the update.
    versions.report("m", "a", OLD)
    assert outdated(versions) == {"b"}
    clock.now += 10.0
    versions.report("m", "b", NEW)
    assert outdated(versions) == set()
    # A worker that starts anew has the weights of its files; one that fails has a mixture.
    versions.report("m", "a", OLD)
    versions.report("m", "other-dtype", b"")
    assert outdated(versions) == {"a", "other-dtype"}
    versions.update("m", {"a": NEWEST, "b": NEWEST, "other-dtype": b"newest-32"})
    assert outdated(versions) == set()
    # An update that nobody has ended changes nothing.
    versions.update("m", {})
    assert outdated(versions) == set()


def test_updates_through_another_gateway_count(versions: ServedVersions, clock: Clock) -> None:
    versions.update("m", {"a": NEW, "b": NEW})
    clock.now += 10.0
    for worker in ("a", "b", "other-dtype"):
        versions.report("m", worker, NEWEST)
    assert outdated(versions) == set()
    versions.forget("m", "a")
    assert not versions.is_outdated("m", "a")
