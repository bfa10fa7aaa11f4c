"""Prompts that begin alike wait for one another's pages; prompts with other images do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from weft.contract.keys import MediaNames, PageKeys, PromptMedia
from weft.contract.spans import MediaSpan
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.sharing import PrefixSharing
from weft.pages.memory.tree import NO_MATCH

SIZE, NAMESPACE = 4, bytes(32)
TOKENS = [9, 7, 7, 7, 7, 7, 3, 4, 5]


def request_with(image: int, names: MediaNames) -> Any:
    span = MediaSpan(position=1, length=5, digest=bytes([image]) * 32)
    keys = PageKeys(NAMESPACE, SIZE, media=PromptMedia([span], bytes(32)), names=names)
    return SimpleNamespace(
        tokens=TOKENS,
        num_tokens=len(TOKENS),
        num_reusable_tokens=len(TOKENS) - 1,
        num_launched=4,
        keys=keys,
        state=State.PREFILLING,
        held=SimpleNamespace(num_published=0, leaf=None),
        sharing=SimpleNamespace(leader=None, num_leader_pages=0, has_followed=False),
    )


@pytest.mark.parametrize("image", [1, 2])
def test_only_the_same_image_is_waited_for(image: int) -> None:
    names = MediaNames()
    leader, other = request_with(1, names), request_with(image, names)
    found = PrefixSharing(SIZE).waits(cast(Request, other), NO_MATCH, [cast(Request, leader)])
    assert found == (image == 1)
