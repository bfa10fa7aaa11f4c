"""Paths of trees that were drawn, and their K and V moved, against plain loops."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops import step_rows, tree_rows
from weft.kernels.ops.step_rows import triton_rows as gpu_step_rows
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.kernels.ops.tree_rows import triton_rows as gpu_tree_rows
from weft.testing.kernels.gpu_kernels import change_kernels, notices
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.tree_cases import path_to, random_parents, words_of
from weft.testing.kernels.wide_pages import WidePages

pytestmark = pytest.mark.needs("triton-interpreter")

SLOTS = 9
VOCAB = 11
"""Few, so that wrong branches are right now and then."""


def make_known(most: int) -> SlotTokens:
    tokens = torch.randint(0, VOCAB, (1 + most, SLOTS + 1))
    words = torch.full_like(tokens, -1)
    return SlotTokens(tokens, torch.randint(50, 90, (SLOTS + 1,)), words)


@pytest.mark.parametrize("module", [tree_rows, gpu_tree_rows], ids=["reference", "gpu"])
def test_the_path_that_was_drawn_is_followed(module: ModuleType) -> None:
    fresh_seed()
    for most in (1, 3, 7, 31):
        known = make_known(most)
        before = SlotTokens(known.tokens.clone(), known.starts.clone())
        num_decodes, slots = random.randint(0, 3), random.sample(range(SLOTS), 6)
        counts = [1 + most, 1, *(random.randint(1, 1 + most) for _ in slots[2:])]
        bounds = [num_decodes]
        for count in counts:
            bounds.append(bounds[-1] + count)
        rows = torch.full((len(counts), 1 + most), -1)
        words = [-1] * num_decodes
        tokens = torch.randint(0, VOCAB, (bounds[-1],))
        drawn = torch.randint(0, VOCAB, (bounds[-1],))
        positions = torch.randint(100, 200, (bounds[-1],))
        wanted: list[list[int]] = []
        for index, count in enumerate(counts):
            first, parents = bounds[index], random_parents(count)
            is_chain = parents == list(range(-1, count - 1))
            words += [-1] * count if is_chain else words_of(parents)
            rows[index, :count] = torch.arange(first, first + count)
            path = path_to(parents, random.randrange(count))
            for row, child in itertools.pairwise(path):
                drawn[first + row] = tokens[first + child]
                # Siblings differ.
                for other in range(count):
                    if parents[other] == row and other != child:
                        tokens[first + other] = (tokens[first + child] + 1) % VOCAB
            if random.random() < 0.3:
                drawn[first + random.choice(path)] = -1
            # Any row behind the last may be one too; siblings of equal tokens: the first.
            reached = [0]
            while True:
                fits = [
                    row
                    for row in range(1, count)
                    if parents[row] == reached[-1]
                    and tokens[first + row] == drawn[first + reached[-1]]
                    and drawn[first + row] >= 0
                ]
                if not fits:
                    break
                reached.append(fits[0])
            wanted.append([first + row for row in reached])
        step = StepRows(
            tokens,
            positions,
            positions.clone(),
            torch.tensor([0, *bounds], dtype=torch.int32),
            torch.zeros(len(counts), dtype=torch.int32),
            torch.tensor(words),
        )
        by_row = torch.tensor(
            [SLOTS] * num_decodes
            + [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        )
        # The last one is no request.
        rows = torch.cat([rows, torch.full_like(rows[:1], -1)])
        last, own, paths = module.accept_trees(drawn, step, Verified(rows, by_row), known)
        assert own.tolist() == [*slots, SLOTS]
        assert last.tolist() == [*(path[-1] for path in wanted), 0]
        found = [[row for row in path if row >= 0] for path in paths.tolist()]
        assert found == [*wanted, []]
        for slot, path in zip(slots, wanted, strict=True):
            assert known.tokens[0, slot] == max(0, int(drawn[path[-1]]))
            assert known.starts[slot] == positions[path[-1]] + 1
        others = [slot for slot in range(SLOTS) if slot not in slots]
        assert torch.equal(known.tokens[:, others], before.tokens[:, others])
        assert torch.equal(known.tokens[1:], before.tokens[1:])
        assert torch.equal(known.starts[others], before.starts[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [tree_rows, gpu_tree_rows], ids=["reference", "gpu"])
def test_paths_move_to_where_chains_lie(module: ModuleType, dtype: torch.dtype) -> None:
    fresh_seed()
    page_size, dim = random.choice([(4, 24), (16, 64), (3, 16)])
    pool = torch.randn(40, 2, 3, 2, page_size, dim).to(dtype)
    counts = [32, 1, 9, 5]
    bounds = [2]
    for count in counts:
        bounds.append(bounds[-1] + count)
    places = torch.randperm(40 * page_size)[: bounds[-1]]
    rows = torch.full((len(counts), max(counts)), -1)
    paths = rows.clone()
    wanted = pool.clone()
    flat = wanted.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
    before = flat.clone()
    for index, count in enumerate(counts):
        first = bounds[index]
        rows[index, :count] = torch.arange(first, first + count)
        path = path_to(random_parents(count), random.randrange(count))
        for place, row in enumerate(path):
            paths[index, place] = first + row
            flat[places[first + place]] = before[places[first + row]]
    wanted = flat.unflatten(0, (40, page_size)).permute(0, 2, 3, 4, 1, 5)
    wide = WidePages(pool)
    for moved in (pool, wide.pool):
        module.move_paths(moved, places, rows, paths)
    assert torch.equal(pool, wanted)
    wide.check(wanted)


@pytest.mark.parametrize("module", [step_rows, gpu_step_rows], ids=["reference", "gpu"])
def test_rows_of_trees_that_only_the_device_knows(module: ModuleType) -> None:
    """Requests that start late and such that do not; places are those of chains."""
    fresh_seed()
    known, page_size = make_known(31), 8
    table = 1 + torch.randperm(SLOTS * 20, dtype=torch.int32).view(SLOTS, 20)
    table = torch.cat([table, torch.zeros_like(table[:1])])
    assert known.words is not None
    slots = random.sample(range(SLOTS), 4)
    counts = [1, 32, 17, random.randint(1, 32)]
    late = [False, True, False, True]
    bounds = torch.tensor([0, *counts]).cumsum(0)
    step = StepRows(
        *(torch.randint(100, 120, (int(bounds[-1]),)) for _ in range(3)),
        bounds.to(torch.int32),
        torch.randint(100, 200, (len(slots),), dtype=torch.int32),
        torch.full((int(bounds[-1]),), -1),
    )
    wanted = StepRows(*(column.clone() for column in step))
    assert wanted.ancestors is not None
    sources, owners = [], []
    for request, (slot, count, is_late) in enumerate(zip(slots, counts, late, strict=True)):
        parents = random_parents(count)
        known.words[1:count, slot] = torch.tensor(words_of(parents))[1:]
        first, start = int(bounds[request]), random.randint(100, 110)
        if is_late:
            start = int(known.starts[slot])
            wanted.kv_lens[request] = start + count
        for behind in range(count):
            sources.append(behind * (SLOTS + 1) + slot)
            owners.append(request if is_late else -1)
            row = first + behind
            if not is_late:
                step.positions[row] = start + behind
            else:
                place = start + behind
                page = int(table[slot, place // page_size])
                wanted.places[row] = page * page_size + place % page_size
            wanted.token_ids[row] = known.tokens[behind, slot]
            wanted.ancestors[row] = known.words[behind, slot]
            wanted.positions[row] = start + len(path_to(parents, behind)) - 1
    columns = (torch.tensor(sources), torch.tensor(owners))
    module.resolve_rows(step, *columns, known, table, page_size)
    for found, expected in zip(step, wanted, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("is_move", "change"),
    [
        (False, ("(parent == reached) & (draft == token)", "parent == reached")),
        (False, ("(own[None, :] < own[:, None])", "(own[None, :] + 1 < own[:, None])")),
        (True, ("(line < lines)[:, None]", "(line < lines - 1)[:, None]")),
        (True, ("step = 1\n    while", "step = 4\n    while")),
    ],
)
@pytest.mark.full
def test_a_mutated_kernel_is_noticed(
    is_move: bool, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = partial(test_the_path_that_was_drawn_is_followed, gpu_tree_rows)
    if is_move:
        check = partial(test_paths_move_to_where_chains_lie, gpu_tree_rows, torch.float32)
    change_kernels(monkeypatch, gpu_tree_rows, tmp_path, change)
    assert notices(check)
