"""A captured step launches what a committed list says, so that a further launch is seen."""

from __future__ import annotations

import json

import pytest
from weft.testing.engine.listed_launches import KINDS, LISTS, launches_of

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_what_is_listed(kind: str) -> None:
    """If it is meant to launch other things, `weft.testing.engine.listed_launches` writes the list
    anew.
    """
    assert launches_of(kind) == json.loads(LISTS.read_text())[kind]
