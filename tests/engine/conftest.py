"""Fixtures of whole engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weft.engine.base.config import EngineConfig
from weft.testing.models.threads import one_thread


@pytest.fixture(scope="module", params=["in-turn", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that use it run with engines whose `overlap` is off, and with ones where it is on.

    Fixtures that make engines for a whole module must ask for it too.
    """
    with pytest.MonkeyPatch.context() as patch:
        is_overlapped = request.param == "overlapped"
        patch.setattr(EngineConfig, "is_overlapped", property(lambda _: is_overlapped))
        yield


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """See `one_thread`."""
    with one_thread():
        yield
