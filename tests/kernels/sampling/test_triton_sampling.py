"""Sampling on the device, by Triton's interpreter at small sizes: the tokens of the host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from weft.kernels.ops.sampling import noise
from weft.kernels.ops.sampling import triton_draw as gpu_sampling
from weft.kernels.ops.sampling.device import draw_rows, top_logits
from weft.kernels.ops.sampling.reference import top_rows_reference
from weft.kernels.ops.sampling.spec import (
    ERROR_NO_CANDIDATE,
    ERROR_NOT_FINITE,
    MASKED_LOGIT,
    DraftedRows,
    Field,
    SlotParams,
    SlotTensors,
    pack_slot,
)
from weft.testing.kernels import naive_sampling
from weft.testing.kernels.device_sampling_cases import (
    DrawCase,
    draw_on_host,
    make_case,
    slot_params,
    tables_of,
)
from weft.testing.kernels.gpu_kernels import PoisonedTorch, kernel_module
from weft.testing.kernels.naive_sampling import NaiveParams

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves out of a result shows."""
    monkeypatch.setattr(gpu_sampling, "torch", PoisonedTorch())


VECTORS = json.loads((Path(__file__).parent / "noise_vectors.json").read_text())


def draw(case: DrawCase, module: ModuleType | None = None) -> list[int]:
    slots, positions = torch.from_numpy(case.slots), torch.from_numpy(case.positions)
    tables = tables_of(case, torch.device("cpu"))
    draw_of = draw_rows if module is None else module.draw_rows
    tokens: list[int] = draw_of(case.logits, slots, positions, tables).tolist()
    return tokens


def plain_tables(vocab: int, rows: Sequence[np.ndarray]) -> SlotTensors:
    return SlotTensors(
        torch.from_numpy(np.stack(rows)),
        torch.zeros(len(rows), -(-vocab // 32), dtype=torch.int32),
        torch.zeros(1, vocab),
        torch.zeros(1, vocab, dtype=torch.int32),
    )


def test_noise_vectors_decide_which_of_equals_is_drawn() -> None:
    """With equal logits the token is that of the largest noise."""
    for vector in VECTORS["gumbel"][:4]:
        seed, position = int(vector["seed"], 16), int(vector["position"], 16)
        vocab = 300
        row = pack_slot(SlotParams(temperature=1.0, seed=seed))
        logits = torch.zeros(1, vocab)
        tokens = draw_rows(
            logits, torch.zeros(1, dtype=torch.int64), torch.tensor([position]),
            plain_tables(vocab, [row]),
        )  # fmt: skip
        assert tokens.item() == noise.gumbel_noise(seed, position, np.arange(vocab)).argmax()


@pytest.mark.parametrize("vocab", [1, 33, 517, 1024, 3001])
def test_tokens_equal_the_host(vocab: int) -> None:
    rng = np.random.default_rng()
    for _ in range(2):
        case = make_case(rng, vocab, num_rows=3, num_slots=5)
        before = case.logits.clone()
        assert draw(case) == draw_on_host(case), case
        assert torch.equal(case.logits, before)


@pytest.mark.parametrize(
    "params",
    [
        NaiveParams(temperature=0.8, top_p=0.999),  # A nucleus that no list holds.
        NaiveParams(temperature=1.0, top_k=1500, top_p=0.9),
        NaiveParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.02),
        NaiveParams(temperature=2.0, top_n_sigma=0.7),
        NaiveParams(temperature=1.0, top_p=0.9, top_n_sigma=1.3),
    ],
)
def test_flat_and_tied_rows_need_a_search(params: NaiveParams) -> None:
    rng = np.random.default_rng()
    vocab, seed, position = 2500, int(rng.integers(2**63)), int(rng.integers(2**30))
    logits = torch.stack((0.3 * torch.randn(vocab), torch.randint(0, 3, (vocab,)).float()))
    row = pack_slot(slot_params(params, seed))
    tokens = draw_rows(
        logits, torch.tensor([1, 0]), torch.tensor([position] * 2), plain_tables(vocab, [row] * 2)
    )
    expected = [naive_sampling.draw(logits[r].numpy(), params, seed, position) for r in range(2)]
    assert tokens.tolist() == expected


def test_rows_without_a_token_say_why_and_none_is_none() -> None:
    vocab = 1500
    logits = torch.randn(5, vocab)
    logits[0, 1499] = float("nan")
    logits[1, 0] = float("-inf")
    logits[2] = MASKED_LOGIT
    row = pack_slot(SlotParams(temperature=1.0, top_p=0.9, seed=3, top_k=7))
    masked = pack_slot(SlotParams(seed=3), mask_end=5)
    tables = plain_tables(vocab, [row, row, row, masked, masked])
    logits[4, 1400] = float("inf")  # A forbidden token's fault counts too.
    tables.masks[4, 0] = 1
    slots, positions = torch.arange(5), torch.arange(5)
    tokens = draw_rows(logits, slots, positions, tables)
    bad, empty = ERROR_NOT_FINITE, ERROR_NO_CANDIDATE
    assert tokens.tolist() == [bad, bad, empty, empty, bad]
    assert draw_rows(logits[:0], slots[:0], positions[:0], tables).shape == (0,)


def test_a_mask_ends_at_its_position() -> None:
    """Rows of one slot, as behind drafts: those before it draw what is allowed, others any."""
    vocab, allowed = 90, 37
    logits = torch.randn(4, vocab)
    logits[:, allowed] = -9.0
    row = pack_slot(SlotParams(), mask_end=22)
    tables = plain_tables(vocab, [row])
    tables.masks[0, allowed // 32] = 1 << allowed % 32
    tokens = draw_rows(logits, torch.zeros(4, dtype=torch.int64), torch.arange(20, 24), tables)
    assert tokens.tolist() == [allowed, allowed, *logits[2:].argmax(dim=1).tolist()]


def test_drawing_counts_and_rows_may_be_a_part() -> None:
    vocab = 90
    wide = torch.randn(2, vocab + 7)
    counted = pack_slot(SlotParams(frequency_penalty=1.5), count_row=1)
    plain = pack_slot(SlotParams())
    tables = plain_tables(vocab, [plain, counted])._replace(
        counts=torch.zeros(2, vocab, dtype=torch.int32)
    )
    output: list[int] = []
    slots, row = torch.tensor([1, 0]), wide[0, :vocab].numpy()
    for position in range(12):
        params = NaiveParams(temperature=0.0, frequency_penalty=1.5, output=tuple(output))
        tokens = draw_rows(wide[:, :vocab], slots, torch.tensor([position] * 2), tables).tolist()
        assert tokens[0] == naive_sampling.draw(row, params, 0, position)
        assert tokens[1] == int(wide[1, :vocab].argmax())
        output.append(tokens[0])
    assert len(set(output)) > 1
    assert tables.counts[1].tolist() == [2 * output.count(i) for i in range(vocab)]
    assert not tables.counts[0].any()


def penalised_tables(rng: np.random.Generator, vocab: int) -> SlotTensors:
    """Three slots that count what they draw, and have drawn something."""
    penalties = SlotParams(
        frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.3
    )._asdict()
    rows = []
    for count_row, (temperature, top_p) in enumerate(((1.0, 1.0), (0.0, 1.0), (0.8, 0.9))):
        own = {"temperature": temperature, "top_p": top_p, "seed": int(rng.integers(2**63))}
        rows.append(pack_slot(SlotParams(**{**penalties, **own}), count_row=count_row))
    counts = torch.from_numpy(rng.integers(0, 4, (len(rows), vocab))).int()
    return plain_tables(vocab, rows)._replace(counts=counts)


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
def test_rows_behind_drafts_count_those_before_them(chance: float, has_trees: bool) -> None:
    """As if each was drawn by itself, with the drafts before it as its text; what is drawn counts
    up to a wrong draft, and once where drafts beside each other are the same.
    """
    rng, vocab, num_drafts = np.random.default_rng(), 70, 5
    tables, slots = penalised_tables(rng, vocab), torch.tensor([2, *[0] * (num_drafts + 1), 1])
    parents = [-1, -1, *range(1, 1 + num_drafts), -1]
    if has_trees:
        parents[4:7] = [2, 1, 1]
    # Few tokens are likely: drafts repeat each other, and what was drawn before.
    logits = torch.from_numpy(rng.normal(0, 1, (len(slots), vocab)).astype(np.float32))
    logits[:, :6] += 4.0
    positions, row_tokens = torch.arange(40, 40 + len(slots)), torch.zeros_like(slots)
    counted = tables.counts.clone()
    paths: list[list[int]] = []
    expected: list[int] = []
    drafts: set[tuple[int, int]] = set()
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
        is_right = rng.random() < chance
        row_tokens[row] = expected[parent] if is_right and parent >= 0 else int(rng.integers(6))
        at, mine = slice(row, row + 1), tables.counts.clone()
        count_row = int(tables.params[slots[row], Field.COUNT_ROW])
        for draft in paths[row][1:]:
            mine[count_row, row_tokens[draft]] += 2
        alone = tables._replace(counts=mine)
        expected.append(int(draw_rows(logits[at], slots[at], positions[at], alone)))
        draft = (parent, int(row_tokens[row]))
        is_first = parent < 0 or draft not in drafts
        drafts.add(draft)
        is_right = all(expected[p] == row_tokens[draft] for p, draft in pairwise(paths[row]))
        if is_first and is_right:
            counted[count_row, expected[row]] += 2
    num_counted = int((counted - tables.counts).sum()) // 2
    assert chance < 1.0 or has_trees or num_counted == len(slots)
    words = torch.tensor([sum(1 << row - path[0] for row in path) for path in paths])
    firsts = torch.tensor([path[0] for path in paths])
    drafted = DraftedRows(firsts, row_tokens, words if has_trees else None)
    assert draw_rows(logits, slots, positions, tables, drafted).tolist() == expected
    assert torch.equal(tables.counts, counted)


def test_top_logits_of_heated_rows_equal_log_softmax() -> None:
    logits = 5 * torch.randn(4, 2100)
    tokens, rows = torch.randint(0, 2100, (4,)), torch.tensor([3, 1, 0])
    heats = torch.tensor([0.6, 1.0, 3.0], dtype=torch.float64)
    top = top_logits(logits, rows, tokens, 5, heats)
    right = (logits[rows].double() / heats[:, None]).log_softmax(-1)
    own = right.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
    assert torch.allclose(top.drawn - top.log_sums, own, atol=1e-4)
    assert torch.allclose(top.logits - top.log_sums[:, None], right.gather(1, top.ids), atol=1e-4)
    with pytest.raises(ValueError, match="2 divisors of 3 rows"):
        top_logits(logits, rows, tokens, 5, heats[:2])


@pytest.mark.parametrize(("vocab", "num_top"), [(1, 1), (19, 19), (1100, 0), (1100, 5), (2100, 20)])
def test_top_logits_equal_log_softmax(vocab: int, num_top: int) -> None:
    logits = 5 * torch.randn(4, vocab)
    logits[1] = logits[1].round()  # Ties.
    logits[3, vocab - 1] = float("nan")
    tokens, rows = torch.randint(0, vocab, (4,)), torch.tensor([3, 1, 0])
    top = top_logits(logits, rows, tokens, num_top)
    _, expected_ids = top_rows_reference(logits[rows].numpy(), num_top)
    assert top.log_sums[0].isnan()
    assert torch.allclose(top.log_sums[1:], logits[rows[1:]].double().logsumexp(-1), atol=1e-12)
    assert torch.equal(top.drawn[1:], logits[rows[1:], tokens[rows[1:]]])
    assert top.ids[1:].tolist() == expected_ids[1:].tolist()
    assert torch.equal(top.logits[1:], logits[rows[1:]].gather(1, top.ids[1:]))


@pytest.mark.parametrize(
    ("vocab", "params", "change"),
    [
        (
            2100,
            NaiveParams(),
            ("(column < source.vocab) & (keys >= bound)\n            kept = kept",
             "(column < source.vocab - 2000)\n            kept = kept"),
        ),
        (2100, NaiveParams(), ("tl.load(source.positions + row), first, TILE)",
                               "tl.load(source.positions + row), 0, TILE)")),
        (900, NaiveParams(top_p=0.9), ("limit = top_p * tl.where(has_top_k",
                                       "limit = 0.1 * top_p * tl.where(has_top_k")),
        (2500, NaiveParams(top_k=700), ("below, best, top_k.to(tl.float64), largest",
                                        "below, best, 0.1 * top_k.to(tl.float64), largest")),
    ],
    ids=["dropped tail", "noise of another tile", "less than a nucleus", "less than top-k"],
)  # fmt: skip
def test_the_comparison_sees_a_wrong_kernel(
    vocab: int, params: NaiveParams, change: tuple[str, str], tmp_path: Path
) -> None:
    num_rows = 14  # Of some rows, at most three in ten, a wrong kernel draws the right token.
    case = make_case(np.random.default_rng(), vocab, num_rows, num_rows, spread=0.3)
    case.params, case.is_masked[:] = [params] * num_rows, False
    with kernel_module("sampling.triton_draw", tmp_path, change) as module:
        assert draw(case, module) != draw_on_host(case)


def test_wrong_tensors_are_refused() -> None:
    vocab, index = 64, torch.zeros(1, dtype=torch.int64)
    row = pack_slot(SlotParams(temperature=1.0, seed=1))
    tables = plain_tables(vocab, [row])
    for logits in (torch.zeros(1, vocab).half(), torch.zeros(vocab), torch.zeros(1, vocab + 1)):
        with pytest.raises(ValueError):
            draw_rows(logits, index, index, tables)
    with pytest.raises(ValueError):
        draw_rows(torch.zeros(2, vocab), index, index, tables)
    with pytest.raises(ValueError):
        top_logits(torch.zeros(2, vocab), index, index, vocab + 1)
