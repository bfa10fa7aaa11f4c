"""What the prefix cache costs: match, insert, evict at a million cached tokens.

The tree is filled with conversations: a few system prompts, each shared by many, and turns of
their own behind it. Beside it the simplest index is measured: a dictionary from chained page keys
to pages that evicts the least recently used one, with the hashing of keys that it needs.
Found pages are compared between the two in the same run. Times are processor time of the thread.

    python bench/radix.py                       1 million tokens, prompts of 2,000
    python bench/radix.py --tokens 4000000      four times as many
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from weft.contract.keys import PageKeys
from weft.engine.base.config import EvictionName
from weft.engine.memory.eviction import EVICTION_POLICIES
from weft.engine.memory.page_memory import PageMemory
from weft.engine.memory.prefix_cache import PageKeyCache
from weft.engine.memory.tree import PrefixTree

PAGE_SIZE = 16
NAMESPACE = bytes(32)
VOCAB_SIZE = 50_000
NUM_SYSTEM_PROMPTS = 20
SYSTEM_TOKENS = 500
"""Length of system prompts, not a whole number of pages: new conversations match inside a page."""


@dataclass(frozen=True, slots=True)
class Row:
    """Times of one operation, in microseconds."""

    operation: str
    index: str
    median_us: float
    p90_us: float
    num_pages: int
    """Pages that one operation is about."""


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


def timed(action: Callable[..., Result], *arguments: object) -> tuple[float, Result]:
    """Processor seconds of this thread, and what the action returns."""
    started_s = time.thread_time()
    result = action(*arguments)
    return time.thread_time() - started_s, result


def measure(index: Index, prompts: Conversations, held: list[list[int]], count: int) -> list[Row]:
    """Measures the rows of one full index.

    Args:
        index: Filled with `held`, oldest first.
        prompts: Generates further prompts.
        held: Prompts in the index; new ones are appended.
        count: Repetitions.
    """
    times: dict[str, tuple[list[float], int]] = {}

    def note(operation: str, seconds: float, num_pages: int) -> None:
        times.setdefault(operation, ([], num_pages))[0].append(seconds)

    rng = random.Random(5)
    num_pages = len(held[0]) // PAGE_SIZE
    for _ in range(count):
        known = rng.choice(held[-len(held) // 2 :])
        for name, tokens in (
            ("match, all of it cached", known),
            ("match, half of it cached", prompts.next_turn(known)),
            ("match, a system prompt cached", prompts.new()),
        ):
            seconds, pages = timed(index.match, tokens)
            note(name, seconds, num_pages)
            seconds, _ = timed(index.memory.release, pages)
            note("release what was matched", seconds, num_pages)
        tokens = prompts.new()
        pages = index.match(tokens)
        first = len(pages)
        seconds, taken = timed(index.memory.allocate, num_pages - first, NAMESPACE)
        note("evict and allocate", seconds, num_pages - first)
        pages += taken
        seconds, _ = timed(index.insert, tokens, pages, first)
        note("insert (with its keys)", seconds, num_pages - first)
        index.memory.release(pages)
        held.append(tokens)
    rows = []
    for operation, (seconds_each, pages_each) in times.items():
        ordered = sorted(seconds_each)
        p90 = ordered[len(ordered) * 9 // 10]
        rows.append(
            Row(operation, index.name, statistics.median(ordered) * 1e6, p90 * 1e6, pages_each)
        )
    return rows


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


def eviction_rows(num_pages: int, num_tokens: int, count: int) -> list[Row]:
    """Measures the eviction of a prompt's pages under each policy."""
    rows = []
    for policy in EVICTION_POLICIES:
        tree, prompts = Tree(num_pages, policy), Conversations(num_tokens, 2)
        filled(tree, prompts, num_pages)
        wanted, seconds = num_tokens // PAGE_SIZE, []
        for _ in range(count):
            seconds_each, pages = timed(tree.memory.allocate, wanted, NAMESPACE)
            seconds.append(seconds_each)
            tree.insert(prompts.new(), pages, 0)
            tree.memory.release(pages)
        seconds.sort()
        row = Row(
            f"evict and allocate, {policy}",
            tree.name,
            statistics.median(seconds) * 1e6,
            seconds[len(seconds) * 9 // 10] * 1e6,
            wanted,
        )
        rows.append(row)
    return rows


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="cached tokens")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=300, help="repetitions of each operation")
    parser.add_argument("--json", type=Path, help="also write all rows there")
    arguments = parser.parse_args(argv)
    num_pages = arguments.tokens // PAGE_SIZE
    check(Tree(400), Dictionary(100_000), Conversations(800, 9), 8)
    rows: list[Row] = []
    for index in (Tree(num_pages), Dictionary(num_pages)):
        prompts = Conversations(arguments.prompt, 1)
        held = filled(index, prompts, num_pages)
        rows += measure(index, prompts, held, arguments.count)
    rows.sort(key=lambda row: row.operation)
    rows += eviction_rows(num_pages, arguments.prompt, arguments.count)
    size = bytes_per_page(min(num_pages, 20_000), arguments.prompt)
    print_table(rows, arguments.tokens, size)
    if arguments.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
            f"{platform.python_version()}",
            "cached_tokens": arguments.tokens,
            "prompt_tokens": arguments.prompt,
            "page_size": PAGE_SIZE,
            "repetitions": arguments.count,
            "bytes_per_page": size,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def print_table(rows: Sequence[Row], num_tokens: int, size: float) -> None:
    """Prints one row per operation and index."""
    title = f"Prefix cache at {num_tokens:,} cached tokens, microseconds"
    table = Table(title=title, title_justify="left")
    for column in ("operation", "index", "median", "p90", "pages", "a page"):
        table.add_column(column, justify="left" if column in ("operation", "index") else "right")
    for row in rows:
        cells = [f"{row.median_us:.1f}", f"{row.p90_us:.1f}", str(row.num_pages)]
        table.add_row(row.operation, row.index, *cells, f"{row.median_us / row.num_pages:.2f}")
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(f"The tree takes {size:.0f} bytes of host memory a cached page.")


if __name__ == "__main__":
    sys.exit(main())
