"""Rows that follow from the step before: by single operations, and by the GPU's kernels, which
Triton's interpreter runs, against plain loops."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops import step_rows
from weft.kernels.ops.step_rows import triton_rows as gpu_step_rows
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.testing.kernels.gpu_kernels import change_kernels, notices
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

SLOTS, MAX_DRAFTS, PAGE, PAGES_EACH, VOCAB = 9, 5, 4, 6, 50


def make_known() -> tuple[SlotTokens, torch.Tensor]:
    """Tokens and starts of all slots, and a page table whose last row is the null page's."""
    tokens = torch.randint(0, VOCAB, (1 + MAX_DRAFTS, SLOTS + 1))
    starts = torch.randint(0, PAGE * PAGES_EACH - MAX_DRAFTS - 1, (SLOTS + 1,))
    table = 1 + torch.randperm(SLOTS * PAGES_EACH, dtype=torch.int32).view(SLOTS, PAGES_EACH)
    return SlotTokens(tokens, starts), torch.cat([table, torch.zeros_like(table[:1])])


@pytest.mark.parametrize("module", [step_rows, gpu_step_rows], ids=["reference", "gpu"])
def test_late_rows_go_on_where_the_step_before_ended(module: ModuleType) -> None:
    fresh_seed()
    known, table = make_known()
    slots = random.sample(range(SLOTS), 6)
    lengths = [1, *(random.randint(1, 1 + MAX_DRAFTS) for _ in slots[2:]), 4]
    late = [False, True, *(random.random() < 0.6 for _ in slots[3:]), False]
    # The last one is a prompt's: its rows are the host's alone.
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    rows, num_first = int(bounds[-1]), int(bounds[-2])
    step = StepRows(
        *(torch.randint(100, 200, (rows,)) for _ in range(3)),
        bounds.to(torch.int32),
        torch.randint(100, 200, (len(slots),), dtype=torch.int32),
    )
    wanted = StepRows(*(column.clone() for column in step[:5]))
    sources, owners = [], []
    for request, (slot, length, is_late) in enumerate(zip(slots, lengths, late, strict=True)):
        for behind in range(length if request < len(slots) - 1 else 0):
            sources.append(behind * (SLOTS + 1) + slot)
            owners.append(request if is_late else -1)
            row = int(bounds[request]) + behind
            wanted.token_ids[row] = known.tokens[behind, slot]
            if is_late:
                position = int(known.starts[slot]) + behind
                wanted.positions[row] = position
                page = int(table[slot, position // PAGE])
                wanted.places[row] = page * PAGE + position % PAGE
                wanted.kv_lens[request] = int(known.starts[slot]) + length
    assert len(sources) == num_first
    columns = (torch.tensor(sources), torch.tensor(owners))
    module.resolve_rows(step, *columns, known, table, PAGE)
    for found, expected in zip(step[:5], wanted[:5], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("module", [step_rows, gpu_step_rows], ids=["reference", "gpu"])
def test_drafts_are_followed_as_far_as_they_are_right(module: ModuleType) -> None:
    fresh_seed()
    for most in (0, 1, MAX_DRAFTS):
        known, _ = make_known()
        before = SlotTokens(known.tokens.clone(), known.starts.clone())
        num_decodes, slots = random.randint(0, 3), random.sample(range(SLOTS), 5)
        counts = [1 + most, *(random.randint(1, 1 + most) for _ in slots[1:])]
        bounds = [num_decodes]
        for count in counts:
            bounds.append(bounds[-1] + count)
        # The last ones are no requests.
        rows = torch.full((len(counts) + 2, 1 + most), -1)
        for index, count in enumerate(counts):
            rows[index, :count] = torch.arange(bounds[index], bounds[index] + count)
        drawn = torch.randint(0, VOCAB, (bounds[-1],))
        tokens = torch.randint(0, VOCAB, drawn.shape)
        for row in range(num_decodes, bounds[-1] - 1):
            if random.random() < 0.7:
                tokens[row + 1] = drawn[row]
        drawn[torch.rand(drawn.shape) < 0.1] = -1  # Drawing has ended, or failed.
        owners = torch.zeros(num_decodes, dtype=torch.int64)
        drawing = torch.cat([owners, torch.tensor(slots).repeat_interleave(torch.tensor(counts))])
        positions = torch.randint(0, 1000, drawn.shape)
        nothing = torch.zeros(0, dtype=torch.int32)
        step = StepRows(tokens, positions, positions, nothing, nothing)
        last_rows, own_slots = module.accept_drafts(drawn, step, Verified(rows, drawing), known)
        assert own_slots.tolist() == [*slots, SLOTS, SLOTS]
        assert last_rows[-2:].tolist() == [0, 0]
        for index, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            last = bounds[index]
            while (
                last + 1 < bounds[index] + count
                and drawn[last] == tokens[last + 1]
                and drawn[last + 1] >= 0
            ):
                last += 1
            assert last_rows[index] == last
            assert known.tokens[0, slot] == max(0, int(drawn[last]))
            assert known.starts[slot] == positions[last] + 1
        others = [slot for slot in range(SLOTS) if slot not in slots]
        assert torch.equal(known.tokens[:, others], before.tokens[:, others])
        assert torch.equal(known.starts[others], before.starts[others])
        assert torch.equal(known.tokens[1:], before.tokens[1:])


@pytest.mark.parametrize("module", [step_rows, gpu_step_rows], ids=["reference", "gpu"])
def test_chains_leave_pages_that_are_not_theirs_alone(module: ModuleType) -> None:
    fresh_seed()
    known, table = make_known()
    depth, slots = 4, torch.tensor([*random.sample(range(SLOTS), 5), SLOTS, SLOTS])
    starts = torch.where(torch.rand(7) < 0.5, -1, torch.randint(0, PAGE * PAGES_EACH - depth, (7,)))
    firsts = torch.where(starts < 0, known.starts[slots], starts)
    limits = (firsts + torch.randint(-2, depth + 2, (7,))).clamp(min=1)
    starts[5:], limits[5:], firsts[5:] = 0, 1, 0
    places_at = (slots, starts, limits, known.starts, table, depth, PAGE)
    positions, places, kv_lens = module.chain_places(*places_at)
    for request in range(7):
        for step in range(depth):
            wanted, limit = int(firsts[request]) + step, int(limits[request])
            position = min(wanted, limit - 1)
            page = int(table[slots[request], position // PAGE])
            place = page * PAGE + position % PAGE if wanted < limit else 0
            assert positions[step, request] == position
            assert places[step, request] == place
            assert kv_lens[step, request] == position + 1


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (test_late_rows_go_on_where_the_step_before_ended,
         ("mask=row < count, other=-1", "mask=row < count - 1, other=-1")),
        (test_late_rows_go_on_where_the_step_before_ended,
         ("behind = source // slots", "behind = source // slots + 1")),
        (test_drafts_are_followed_as_far_as_they_are_right,
         ("(found != draft) | (then < 0)", "found != draft")),
        (test_chains_leave_pages_that_are_not_theirs_alone,
         ("tl.where(wanted < limit, page", "tl.where(wanted <= limit, page")),
    ],
)  # fmt: skip
@pytest.mark.full
def test_a_mutated_kernel_is_noticed(
    check: Callable[[ModuleType], None],
    change: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_kernels(monkeypatch, gpu_step_rows, tmp_path, change)
    assert notices(lambda: check(gpu_step_rows))
