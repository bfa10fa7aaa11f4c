"""What the prefix cache costs: match, insert, evict at a million cached tokens.

The tree is filled with conversations: a few system prompts, each shared by many, and turns of
their own behind it. Beside it the simplest index is measured: a dictionary from chained page keys
to pages that evicts the least recently used one, with the hashing of keys that it needs.
Found pages are compared between the two in the same run. Times are processor time of the thread.

    python bench/radix.py                       1 million tokens, prompts of 2,000
    python bench/radix.py --tokens 4000000      four times as many
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import TypeVar

from harness import Harness, Run, spread
from weft.contract.keys import PageKeys
from weft.engine.base.config import EvictionName
from weft.pages.memory.eviction import EVICTION_POLICIES
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.prefix_cache import PageKeyCache
from weft.pages.memory.tree import PrefixTree

PAGE_SIZE = 16
NAMESPACE = bytes(32)
VOCAB_SIZE = 50_000
NUM_SYSTEM_PROMPTS = 20
SYSTEM_TOKENS = 500
"""Length of system prompts, not a whole number of pages: new conversations match inside a page."""


class Tree:
    """The engine's index, used as the engine does."""

    name = "radix tree"

    def __init__(self, num_pages: int, policy: EvictionName = "lru") -> None:
        self.cache = PrefixTree(PAGE_SIZE, EVICTION_POLICIES[policy])
        self.memory = PageMemory(num_pages + 1, self.cache)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages found, with a reference each."""
        found = self.cache.find(
            NAMESPACE, PageKeys(NAMESPACE, PAGE_SIZE).packed(tokens, 0, len(tokens) - 1)
        )
        pages = [node.page for node in found.path]
        self.memory.retain(pages)
        if found.path:
            self.cache.touch(found.path[-1], 0)
        return pages

    def num_matched_tokens(self, tokens: Sequence[int]) -> int:
        """Number of matched tokens, exact to the token; changes nothing."""
        found = self.cache.find(
            NAMESPACE, PageKeys(NAMESPACE, PAGE_SIZE).packed(tokens, 0, len(tokens) - 1)
        )
        return len(found.path) * PAGE_SIZE + found.num_partial_tokens

    def insert(self, tokens: Sequence[int], pages: Sequence[int], first: int) -> None:
        """Publishes all full pages of a prompt, of which the first ones were found."""
        keys = PageKeys(NAMESPACE, PAGE_SIZE)
        path = self.cache.find(NAMESPACE, keys.packed(tokens, 0, len(tokens) - 1)).path
        keys.adopt([node.key for node in path[:first]])
        end = len(tokens) // PAGE_SIZE
        leaf = path[first - 1] if first else None
        self.cache.insert(keys, tokens, pages, first, end, leaf)


class Dictionary:
    """An index by page key."""

    name = "dictionary of keys"

    def __init__(self, num_pages: int) -> None:
        self.cache = PageKeyCache()
        self.memory = PageMemory(num_pages + 1, self.cache)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages found, with a reference each."""
        num_pages = (len(tokens) - 1) // PAGE_SIZE
        pages = self.cache.match(PageKeys(NAMESPACE, PAGE_SIZE).upto(tokens, num_pages))
        self.memory.retain(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], first: int) -> None:
        """Publishes all full pages of a prompt, of which the first ones were found."""
        keys = PageKeys(NAMESPACE, PAGE_SIZE).upto(tokens, len(tokens) // PAGE_SIZE)
        for index in range(first, len(keys)):
            self.cache.insert(keys[index], pages[index])


Index = Tree | Dictionary
Result = TypeVar("Result")


class Conversations:
    """Prompts that share system prompts.

    Args:
        num_tokens: of each prompt.
        seed: of everything.
    """

    def __init__(self, num_tokens: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_tokens = num_tokens
        self._systems = [self._random(SYSTEM_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS)]

    def new(self) -> list[int]:
        """The first turn of a new conversation."""
        system = self._rng.choice(self._systems)
        return system + self._random(self._num_tokens - SYSTEM_TOKENS)

    def next_turn(self, before: list[int]) -> list[int]:
        """The same conversation, its second half another one."""
        half = len(before) // 2
        return before[:half] + self._random(self._num_tokens - half)

    def _random(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(count)]


def use(index: Index, tokens: list[int]) -> None:
    """Runs one prompt through an index: match, allocate (evicting), publish, release."""
    pages = index.match(tokens)
    first = len(pages)
    pages += index.memory.allocate(len(tokens) // PAGE_SIZE - first, NAMESPACE)
    index.insert(tokens, pages, first)
    index.memory.release(pages)


def clocked(action: Callable[..., Result], *arguments: object) -> tuple[float, Result]:
    """Processor seconds of this thread, and what the action returns."""
    started_s = time.thread_time()
    result = action(*arguments)
    return time.thread_time() - started_s, result


def measure(run: Run, index: Index, prompts: Conversations, held: list[list[int]]) -> None:
    """The rows of one full index.

    Args:
        run: Is told the rows.
        index: Filled with `held`, oldest first.
        prompts: Generates further prompts.
        held: Prompts in the index; new ones are appended.
    """
    times: dict[str, tuple[list[float], int]] = {}

    def note(operation: str, seconds: float, num_pages: int) -> None:
        times.setdefault(operation, ([], num_pages))[0].append(seconds)

    rng = random.Random(5)
    num_pages = len(held[0]) // PAGE_SIZE
    for _ in range(run.options.repeats):
        known = rng.choice(held[-len(held) // 2 :])
        for name, tokens in (
            ("match, all of it cached", known),
            ("match, half of it cached", prompts.next_turn(known)),
            ("match, a system prompt cached", prompts.new()),
        ):
            seconds, pages = clocked(index.match, tokens)
            note(name, seconds, num_pages)
            seconds, _ = clocked(index.memory.release, pages)
            note("release what was matched", seconds, num_pages)
        tokens = prompts.new()
        pages = index.match(tokens)
        first = len(pages)
        seconds, taken = clocked(index.memory.allocate, num_pages - first, NAMESPACE)
        note("evict and allocate", seconds, num_pages - first)
        pages += taken
        seconds, _ = clocked(index.insert, tokens, pages, first)
        note("insert (with its keys)", seconds, num_pages - first)
        index.memory.release(pages)
        held.append(tokens)
    for operation, (taken_s, pages_each) in times.items():
        run.row(operation=operation, index=index.name, us=spread(taken_s, 1e6), pages=pages_each)


def check(tree: Tree, dictionary: Dictionary, prompts: Conversations, count: int) -> None:
    """Checks that both find the same pages after the same history, and the tree at least as many
    tokens.
    """
    for _ in range(count):
        tokens = prompts.new()
        use(tree, tokens)
        use(dictionary, tokens)
        for asked in (tokens, prompts.next_turn(tokens), prompts.new()):
            of_tree, of_dictionary = tree.match(asked), dictionary.match(asked)
            assert len(of_tree) == len(of_dictionary)
            exact = tree.num_matched_tokens(asked)
            assert len(of_tree) * PAGE_SIZE <= exact < (len(of_tree) + 1) * PAGE_SIZE
            tree.memory.release(of_tree)
            dictionary.memory.release(of_dictionary)
    tree.memory.check_integrity()
    tree.cache.check_integrity()


def filled(index: Index, prompts: Conversations, num_pages: int) -> list[list[int]]:
    """Fills an index to the last page; returns the inserted prompts, oldest first."""
    held = []
    while index.memory.counts().free > num_pages // 1000:
        held.append(prompts.new())
        use(index, held[-1])
    return held


def measure_eviction(run: Run, num_pages: int, num_tokens: int) -> None:
    """The eviction of a prompt's pages under each policy."""
    for policy in EVICTION_POLICIES:
        tree, prompts = Tree(num_pages, policy), Conversations(num_tokens, 2)
        filled(tree, prompts, num_pages)
        wanted, seconds = num_tokens // PAGE_SIZE, []
        for _ in range(run.options.repeats):
            seconds_each, pages = clocked(tree.memory.allocate, wanted, NAMESPACE)
            seconds.append(seconds_each)
            tree.insert(prompts.new(), pages, 0)
            tree.memory.release(pages)
        figures = {"us": spread(seconds, 1e6), "pages": wanted}
        run.row({"operation": f"evict and allocate, {policy}", "index": tree.name} | figures)


def bytes_per_page(num_pages: int, num_tokens: int) -> float:
    """Host memory that the tree takes for a cached page, its key included."""
    prompts = Conversations(num_tokens, 3)
    tokens = [prompts.new() for _ in range(num_pages * PAGE_SIZE // num_tokens)]
    tree = Tree(num_pages)
    tracemalloc.start()
    for one in tokens:
        use(tree, one)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / tree.memory.counts().cached


harness = Harness(__file__, __doc__, repeats=300)
harness.flag("--tokens", type=int, default=1_000_000, help="cached tokens")
harness.flag("--prompt", type=int, default=2000, help="tokens of a prompt")


@harness.part
def prefixes(run: Run) -> None:
    """Both indexes."""
    options, num_pages = run.options, run.options.tokens // PAGE_SIZE
    check(Tree(400), Dictionary(100_000), Conversations(800, 9), 8)
    for index in (Tree(num_pages), Dictionary(num_pages)):
        prompts = Conversations(options.prompt, 1)
        measure(run, index, prompts, filled(index, prompts, num_pages))
    measure_eviction(run, num_pages, options.prompt)
    size = bytes_per_page(min(num_pages, 20_000), options.prompt)
    run.note(f"the tree takes {size:.0f} bytes of host memory a cached page")


if __name__ == "__main__":
    sys.exit(harness.main())
