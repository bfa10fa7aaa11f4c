"""Fixtures of whole engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weft.engine.config import EngineConfig


@pytest.fixture(scope="module", params=["in-turn", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that use it run with engines whose `overlap` is off, and with ones where it is on.

    Fixtures that make engines for a whole module must ask for it too.
    """
    with pytest.MonkeyPatch.context() as patch:
        is_overlapped = request.param == "overlapped"
        patch.setattr(EngineConfig, "is_overlapped", property(lambda _: is_overlapped))
        yield
