"""What every index of pages refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.prefix_cache import PageIndex, PageKeyCache
from weft.pages.memory.state_index import StateIndex
from weft.pages.memory.tree import PrefixTree
from weft.pages.memory.window_index import WindowIndex
from weft.testing.scheduling.scheduler_bench import window_group

PAGE = 4
INDEXES: dict[str, Callable[[], PageIndex]] = {
    "tree": lambda: PrefixTree(PAGE),
    "window": lambda: WindowIndex(PrefixTree(PAGE), window_group(9), PAGE),
    "states": lambda: StateIndex(PrefixTree(PAGE)),
    "keys": PageKeyCache,
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_page_that_nobody_has_cannot_be_retained(kind: str) -> None:
    memory = PageMemory(10, INDEXES[kind]())
    pages = memory.allocate(2)
    memory.release(pages)
    with pytest.raises(KeyError):
        memory.retain(pages)
