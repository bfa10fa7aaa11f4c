"""Steps laid out from a few numbers a request: by plain loops, and by the GPU's kernel, which
Triton's interpreter runs, against what the host would have sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.ragged_columns import RaggedColumns, requests_size, write_requests
from weft.engine.executor.step_input import StepInput
from weft.kernels.ops import step_requests
from weft.kernels.ops.step_requests import triton_requests as gpu_step_requests
from weft.kernels.ops.step_requests.spec import DecodeColumns
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows
from weft.testing.kernels.gpu_kernels import change_kernels, notices
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

SLOTS, PAGES_EACH = 20, 8


def laid_out(requests: StepInput, table: np.ndarray, page_size: int) -> StepArrays:
    """The rows of these requests; what only the device knows is zero."""
    columns: list[list[int]] = [[] for _ in range(5)]
    verify_rows = np.full((len(requests.slots), int(requests.counts.max())), -1)
    given = zip(requests.slots, requests.starts, requests.counts, strict=True)
    for index, (slot, start, count) in enumerate(given):
        for behind in range(count):
            position = behind + max(0, int(start))
            page = int(table[slot, position // page_size])
            place = 0 if start < 0 else page * page_size + position % page_size
            owner = index if start < 0 else -1
            verify_rows[index, behind] = len(columns[0])
            row = (position, place, int(slot), behind * (SLOTS + 1) + int(slot), owner)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    positions, places, slots, sources, owners = (np.array(column) for column in columns)
    lengths = np.where(requests.starts < 0, 0, requests.starts + requests.counts)
    return StepArrays(
        token_ids=np.zeros_like(positions),
        positions=positions,
        places=places,
        slots=requests.slots,
        cu_q_lens=np.concatenate([[0], np.cumsum(requests.counts)]).astype(np.int32),
        kv_lens=lengths.astype(np.int32),
        logits_rows=np.arange(len(positions)),
        max_q_len=int(requests.counts.max()),
        max_kv_len=1,
        drawing_slots=slots,
        verify_rows=verify_rows,
        sources=sources,
        owners=owners,
    )


@pytest.mark.parametrize("module", [step_requests, gpu_step_requests], ids=["reference", "gpu"])
def test_a_step_is_what_the_host_would_lay_out(module: ModuleType) -> None:
    fresh_seed()
    for _ in range(6):
        page_size, drafts = random.choice([(4, 5), (16, 7), (4, 31)])
        count = random.randint(1, SLOTS)
        slots = np.array(random.sample(range(SLOTS), count))
        room = page_size * PAGES_EACH - drafts
        counts = np.array([random.randint(1, 1 + drafts) for _ in slots])
        max_starts = np.array([random.randrange(max(1, room)) for _ in slots])
        counts = np.minimum(counts, page_size * PAGES_EACH - max_starts)
        starts = np.where(np.random.rand(count) < 0.5, -1, max_starts)
        num_rows, has_trees = int(counts.sum()), drafts == 31
        limits = np.random.randint(1, page_size * PAGES_EACH, count)
        requests = StepInput(
            slots=slots,
            starts=starts,
            max_starts=max_starts,
            counts=counts,
            draft_limits=limits,
            has_trees=has_trees,
        )
        table = np.random.permutation(np.arange(1, 1 + SLOTS * PAGES_EACH)).astype(np.int32)
        table = np.concatenate([table.reshape(SLOTS, -1), np.zeros((1, PAGES_EACH), np.int32)])
        rows, most = num_rows + random.randint(0, 150), count + random.randint(0, 5)
        columns = RaggedColumns(rows, most, rows, 1 + drafts, has_trees, has_requests=True)
        arrays = laid_out(requests, table, page_size)
        if has_trees:
            arrays.ancestors = np.full(num_rows, -1)
        wanted, found = (torch.randint(0, 255, (columns.num_bytes,)).byte() for _ in range(2))
        columns.write(wanted.numpy(), arrays, SLOTS, page_size)
        used = write_requests(found.numpy(), requests, most, SLOTS)
        assert used == 8 * requests_size(most)
        views = columns.views(found)
        views.token_ids[:num_rows] = 0
        if has_trees:
            assert views.ancestors is not None
            views.ancestors[:num_rows] = -1
        module.expand_requests(views, torch.from_numpy(table), page_size, SLOTS + 1)
        names = views._fields[1:]
        for name, ours, theirs in zip(names, views[1:], columns.views(wanted)[1:], strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs), name
        # Given by its rows, it stays as it is.
        before = wanted.clone()
        module.expand_requests(columns.views(wanted), torch.from_numpy(table), page_size, SLOTS + 1)
        assert torch.equal(wanted, before)


@pytest.mark.parametrize("module", [step_requests, gpu_step_requests], ids=["reference", "gpu"])
def test_decodes_are_what_the_host_would_lay_out(module: ModuleType) -> None:
    fresh_seed()
    some = random.randint(2, 150)
    for count, padding in ((1, 0), (127, 1), (128, 0), (random.randint(2, 300), some)):
        page_size, num_slots = random.choice([4, 16]), count + random.randint(0, 40)
        rows = count + padding
        known = SlotTokens(torch.randint(0, 900, (2, num_slots + 1)), torch.zeros(0))
        table = torch.randperm(num_slots * PAGES_EACH).view(num_slots, -1).int() + 1
        table = torch.cat([table, torch.zeros(1, PAGES_EACH, dtype=torch.int32)])
        slots = torch.randperm(num_slots)[:count]
        positions = torch.randint(0, page_size * PAGES_EACH, (count,))
        tokens = torch.where(torch.rand(count) < 0.3, torch.randint(0, 900, (count,)), -1)
        pages = torch.where(torch.rand(count) < 0.3, torch.randint(5000, 6000, (count,)), -1)
        given = torch.tensor([num_slots, 0, 0, -1]).repeat_interleave(rows).view(4, rows)
        given[:, :count] = torch.stack([slots, positions, tokens, pages])
        token_ids, places = torch.full((2, rows), 77)
        kv_lens = torch.full((rows,), 77, dtype=torch.int32)
        step = StepRows(token_ids, given[1], places, kv_lens, kv_lens)
        after, wanted = table.clone(), []
        for slot, position, token, page in given.T.tolist():
            if page >= 0:
                after[slot, position // page_size] = page
            place = int(after[slot, position // page_size]) * page_size + position % page_size
            token = int(known.tokens[0, slot]) if token < 0 else token
            wanted.append((token, place, 0 if slot == num_slots else position + 1))
        module.expand_decodes(DecodeColumns(*given), step, known, table, page_size)
        found = zip(token_ids.tolist(), places.tolist(), kv_lens.tolist(), strict=True)
        assert list(found) == wanted
        assert torch.equal(table, after)


STEPS, DECODES = (
    test_a_step_is_what_the_host_would_lay_out,
    test_decodes_are_what_the_host_would_lay_out,
)


@pytest.mark.parametrize(
    ("check", "original", "replacement"),
    [
        (STEPS, "(rest < num_rows)", "(rest < num_rows - 1)"),
        (STEPS, "tl.where((start < 0) | (count == 0), 0, start + count)", "start + count"),
        (STEPS, "(other < request, all_counts, 0)", "(other <= request, all_counts, 0)"),
        (DECODES, "is_row = row < count", "is_row = row < count - 1"),
        (DECODES, "mask=is_row & (new >= 0)", "mask=is_row & (new > 5100)"),
        (DECODES, "tl.where(slot == dummy, 0, position + 1)", "position + 1"),
        (DECODES, "tl.where(token < 0, last, token)", "last"),
    ],
)
@pytest.mark.full
def test_a_mutated_kernel_is_noticed(
    check: Callable[[ModuleType], None],
    original: str,
    replacement: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_kernels(monkeypatch, gpu_step_requests, tmp_path, (original, replacement))
    assert notices(lambda: check(gpu_step_requests))
