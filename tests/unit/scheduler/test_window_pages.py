"""Pages of a window group: right whatever the load, and no more than the window needs."""

from __future__ import annotations

import math
import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.contract.keys import PageKeys
from weft.contract.layout import CacheLayout, PagedPlane, PageGroup
from weft.engine.base.config import PolicyName
from weft.engine.executor.memory_plan import divide_pages
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import State
from weft.engine.requests.window_companion import WindowCompanion
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.policies import make_queue
from weft.engine.scheduler.scheduler import Scheduler
from weft.pages.memory.page_memory import PageMemory, step_reserve
from weft.pages.memory.page_table import PageTable
from weft.pages.memory.tree import PrefixTree
from weft.pages.memory.window_index import WindowIndex
from weft.testing.scheduling.bare_request import bare_request
from weft.testing.scheduling.scheduler_bench import NAMESPACE, PAGE, Bench, window_group

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
STEM = [random.Random(11).randrange(100) for _ in range(120)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(20, 60),
    st.integers(1, 6),
    st.integers(1, 30),
    st.sampled_from(POLICIES),
    st.booleans(),
)
def test_rows_find_their_window_whatever_the_load(
    seed: int,
    num_pages: int,
    max_running: int,
    reach: int,
    policy: PolicyName,
    is_overlapped: bool,
) -> None:
    """Prompts that begin alike, fills, loads and copies to tiers, ends that nobody foresees,
    cancels and preemptions.
    """
    rng = random.Random(seed)
    max_step_tokens = max_running + rng.choice([1, 16])
    limits = SchedulerLimits(
        PAGE,
        max_step_tokens,
        rng.choice([4, 8, 16]),
        max_running,
        by_priority=policy == "priority",
        preemption_threshold=rng.choice([None, 1, 3]) if policy == "priority" else None,
    )
    least = 1 + window_group(reach).most_pages(PAGE) + step_reserve(max_step_tokens, PAGE)
    bench = Bench(
        rng,
        num_pages,
        limits,
        policy,
        is_overlapped=is_overlapped,
        stop_chance=rng.choice([0.0, 0.1]),
        reach=reach,
        num_window_pages=min(num_pages, least + rng.randrange(rng.choice([20, 60]))),
    )
    assert bench.window is not None
    requests, capacity = [], bench.memory.num_usable_pages * PAGE
    of_window, share = bench.window.memory, rng.choice([3, 6])
    for _ in range(rng.randint(1, 14)):
        num_prompt = rng.randint(1, capacity * 2 // share)
        most = rng.randint(1, min(30, capacity - num_prompt))
        running = bench.scheduler.running
        known = rng.choice(running).tokens if running and rng.random() < 0.7 else STEM
        prefix = known[: rng.randint(0, len(known))]
        of_request = {"prefix": prefix, "priority": rng.randint(-3, 3)}
        request = bench.add(num_prompt, most, remote=rng.random() < 0.6, **of_request)
        requests.append(request)
        for _ in range(rng.randint(0, rng.choice([1, 9]))):
            bench.step()
        if rng.random() < 0.2:
            bench.scheduler.finish(rng.choice(requests))
        if rng.random() < 0.1:
            bench.memory.flush_cache()
        if rng.random() < 0.6:  # Others take what is cached.
            of_window.release(of_window.allocate(of_window.num_available_pages))
        bench.window.hold_some(rng)
    bench.window.let_go()
    bench.run(*requests)
    for memory in (bench.memory, of_window):
        counts = memory.counts()
        assert counts.free + counts.cached == counts.total
    assert not len(bench.window.pages)
    assert bench.window.pages._reserved == (0, 0)
    assert not any(bench.scheduler.sizes().values())


@pytest.mark.parametrize("reach", [1, 2, 4, 5, 9, 30])
def test_a_match_ends_where_every_row_behind_it_finds_its_window(reach: int) -> None:
    rng = random.Random()
    tree = PrefixTree(PAGE)
    index = WindowIndex(tree, window_group(reach), PAGE)
    tokens = [rng.randrange(100) for _ in range(40 * PAGE)]
    pages = list(range(1, 41))
    leaf, path = tree.insert(PageKeys(NAMESPACE, PAGE), tokens, pages, 0, 40, None)
    for chance in (0.0, 0.5, 0.9, 1.0):
        held = {page for page in pages if rng.random() < chance}
        for node in path:
            if node.page in held:
                index.add(node, 100 + node.page)
        for num_pages in range(41):
            expected = max(
                end
                for end in range(num_pages + 1)
                if all(
                    pages[position // PAGE] in held
                    for position in range(max(0, end * PAGE - reach + 1), end * PAGE)
                )
            )
            assert index.continuable(path, num_pages) == expected
        for node in path:
            if node.page in held:
                index._forget(100 + node.page)
    assert leaf is path[-1]


def test_pages_left_behind_go_before_those_that_a_match_has_used() -> None:
    tree = PrefixTree(PAGE)
    index = WindowIndex(tree, window_group(9), PAGE)
    memory = PageMemory(10, index)
    tokens = list(range(6 * PAGE))
    _, path = tree.insert(PageKeys(NAMESPACE, PAGE), tokens, [21, 22, 23, 24, 25, 26], 0, 6, None)
    pages = memory.allocate(6)
    for node, page in zip(path, pages, strict=True):
        assert index.add(node, page)
    index.note_found(pages[:2])
    behind = pages[:4]
    memory.release(behind)
    index.leave_behind(behind)
    memory.release(pages[4:])
    order = [pages[2], pages[3], pages[1], pages[0], pages[5], pages[4]]
    path[4].num_pins = path[5].num_pins = 1
    assert index.num_evictable_pages == 6
    memory.allocate(3)  # Those that were free.
    for page in order:
        assert memory.allocate(1) == [page]


SIZE = 16


def most_at_once(num_pages: int, windows: tuple[WindowCompanion, ...], context: int) -> int:
    """How many requests of so many tokens are admitted at once."""
    limits = SchedulerLimits(SIZE, 2048, 2048, 64)
    pages = RequestPages(PageMemory(num_pages, None), None, SIZE, windows)
    waiting = make_queue("fcfs", 30.0, pages.num_cached_tokens, 2048)
    done: list[object] = []
    scheduler = Scheduler(limits, pages, waiting, None, done.append, lambda slot: None)
    tokens = list(range(context))
    for number in range(64):
        fields = {"num_prompt_tokens": context, "max_tokens": 500, "arrival": number}
        scheduler.add(bare_request(tokens.copy(), SIZE, NAMESPACE, **fields))
    most = 0
    while not done:
        plan = scheduler.plan(0.0)
        drawing = [item.request for item in plan if item.draws]
        number = scheduler.launch(plan)
        scheduler.commit(number, plan)
        for request in drawing:
            if request.state is State.RUNNING:
                request.tokens.append(7)
                if request.num_generated >= request.max_tokens:
                    scheduler.finish(request)
        most = max(most, len(scheduler.running) + len(scheduler.prefilling))
    return most


@pytest.mark.parametrize(
    ("layers", "reach", "context", "gain", "shipped"),
    [
        # Halves, and a window of one in 64 of the context; of gpt-oss one in 256.
        pytest.param((12, 12), 128, 8192, 1.8, 0.51, id="halves"),
        # A window in every layer, of which the first keeps its pages: Mistral 7B.
        pytest.param((1, 31), 4096, 32_000, 4.0, 0.16, id="every-layer"),
    ],
)
def test_more_requests_in_equal_memory(
    layers: tuple[int, int], reach: int, context: int, gain: float, shipped: float
) -> None:
    """And a prompt that is shipped whole in one fill takes a share of the bytes."""
    kept, windowed = (PagedPlane(layers=n, heads=8, dim=64, dtype="bfloat16") for n in layers)
    layout = CacheLayout(SIZE, (PageGroup((kept,)), PageGroup((windowed,), reach)))
    all_kept = (20 if gain < 2 else 8) * context // SIZE
    num_pages, num_window_pages = divide_pages(layout, all_kept, 64, 2048, context + 500)
    sizes = [group.page_bytes(SIZE) for group in layout.groups]
    spent = num_pages * sizes[0] + num_window_pages * sizes[1]
    assert spent <= all_kept * sum(sizes)
    table = PageTable(64, num_pages, keeps_changes=False)
    memory = PageMemory(num_window_pages, None)
    window = WindowCompanion(memory, None, table, layout.groups[1], SIZE, 2048)
    before = most_at_once(all_kept, (), context)
    after = most_at_once(num_pages, (window,), context)
    print(f"{before} requests with all pages kept, {after} with those behind the window freed")
    assert after >= gain * before
    carriers = -(-window.num_needed(0, context) * sizes[1] // sizes[0])
    sent = (context // SIZE + carriers) * sizes[0] / (context // SIZE * sum(sizes))
    assert round(sent, 2) == shipped


def test_memory_is_divided_by_what_windows_need() -> None:
    full = PageGroup((PagedPlane(layers=5, heads=2, dim=8, dtype="float32"),))
    windowed = PageGroup((PagedPlane(layers=25, heads=2, dim=8, dtype="float32"),), 1024)
    layout, context = CacheLayout(SIZE, (full, windowed)), 131_072
    assert divide_pages(CacheLayout(SIZE, (full,)), 77, 64, 512, context) == (77,)
    # Where memory is short, requests of few tokens need as many pages of each group.
    assert divide_pages(layout, 900, 64, 512, 900) == (900, 900)
    assert divide_pages(layout, 900, 64, 512, context) == (900 + 225 * 5, 675)
    # The window of one request always fits.
    assert divide_pages(layout, 150, 64, 512, context)[1] == 1 + 64 + 9 + windowed.most_pages(SIZE)
    needed = 64 * windowed.most_pages(SIZE) + step_reserve(512, SIZE)
    num_pages, of_window = divide_pages(layout, 100_000, 64, 512, context)
    assert needed < of_window < needed + 100_000 // 10
    assert num_pages == 100_000 + (100_000 - of_window) * 5
    assert divide_pages(layout, 100_000, 64, 512, context, is_fixed=True) == (100_000, of_window)
    assert math.isclose(num_pages * 1 + of_window * 5, 600_000, rel_tol=1e-4)
