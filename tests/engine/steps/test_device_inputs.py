"""A step's inputs as a device gets them (here a CPU), whatever graph they are padded for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.checkpoint.adapters.projections import projections_of
from weft.checkpoint.config import ModelConfig
from weft.engine.base.config import EngineConfig
from weft.engine.base.drafts import LaterDrafts
from weft.engine.executor.adapter_rows import LoraPool, plan_lora
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.encodings import ALL_BEFORE, StepArrays, StepDecodes
from weft.engine.executor.ragged_columns import RaggedColumns
from weft.engine.loop.encode import step_input
from weft.engine.model.step import Step
from weft.engine.requests.request import Request
from weft.engine.scheduler.columns import RequestColumns
from weft.engine.scheduler.plan import Plan, PlanItem, VerifyItem
from weft.kernels.ops.step_rows.spec import SlotTokens
from weft.pages.memory.page_table import PageTable
from weft.testing.models.tiny_models import make_tiny
from weft.testing.scheduling.bare_request import bare_request

PAGE, MAX_PAGES, NUM_SLOTS, VOCAB = 4, 12, 6, 517
COPIES = {"decode": 1, "eager": 1, "ragged": 1}
"""From the host for a step; adapters are one more."""


class Bench:
    """Requests at random positions, and what their slots drew last."""

    def __init__(self, lora: LoraPool | None = None) -> None:
        self.num_adapters = lora.max_slots - 1 if lora is not None else 0
        self.table = PageTable(NUM_SLOTS, MAX_PAGES, keeps_changes=True)
        no_tokens = torch.zeros((4, NUM_SLOTS + 1), dtype=torch.int64)
        self.known = SlotTokens(no_tokens, no_tokens[0].clone())
        self.last_tokens = no_tokens[0]
        most = NUM_SLOTS * MAX_PAGES * PAGE
        self.inputs = DeviceInputs(self.table, PAGE, NUM_SLOTS, self.known, lora, most)
        self.num_copies = 0
        """From the host, since the begin."""
        copies = self.inputs._copies
        send, sent = copies.send, copies.pinned.sent

        def count_send(*arrays: Any) -> Any:
            self.num_copies += 1  # On a CPU it takes no pinned memory.
            return send(*arrays)

        def count_sent() -> None:
            self.num_copies += 1
            sent()

        copies.send = count_send  # type: ignore[method-assign]
        copies.pinned.sent = count_sent  # type: ignore[method-assign]
        self.free_pages = random.sample(range(1, 5000), 2000)
        self.requests = {slot: self.request(slot) for slot in range(NUM_SLOTS)}

    def request(self, slot: int) -> Request:
        """Another one in a slot."""
        self.table.clear(slot)
        length = random.randint(2, MAX_PAGES * PAGE - 8)
        tokens = [random.randrange(3, VOCAB) for _ in range(length)]
        adapter_slot = random.randint(0, self.num_adapters)
        request = bare_request(tokens, PAGE, bytes(32), slot=slot, adapter_slot=adapter_slot)
        request.held.pages = [self.free_pages.pop() for _ in range(-(-(length + 8) // PAGE))]
        return request

    def plan(self, slots: list[int], num_decodes: int) -> tuple[Plan, list[int], list[int]]:
        """A plan, and the tokens and positions that it brings."""
        chosen = [self.requests[slot] for slot in slots]
        starts = [len(request.tokens) + random.randint(0, 6) for request in chosen[:num_decodes]]
        tokens = [int(self.last_tokens[slot]) for slot in slots[:num_decodes]]
        positions = list(starts)
        chunks = []
        for request in chosen[num_decodes:]:
            start = random.randrange(len(request.tokens))
            end = random.randint(start + 1, len(request.tokens))
            chunks.append(PlanItem(request, start, end - start, random.random() < 0.7))
            tokens += request.tokens[start:end]
            positions += range(start, end)
        columns = (np.array(column, np.int64) for column in (slots[:num_decodes], starts))
        plan = Plan(chosen[:num_decodes], *columns, chunks)
        plan.columns = RequestColumns.of(plan.decodes)
        return plan, tokens, positions


def check(bench: Bench, plan: Plan, batch: Step, tokens: list[int], at: list[int]) -> None:
    """The batch says what the plan says, and nothing more but padding."""
    items = list(plan)
    assert batch.token_ids[: len(tokens)].tolist() == tokens
    assert batch.positions[: len(at)].tolist() == at
    ends = np.cumsum([item.num_tokens for item in items])
    assert batch.groups[0].cu_q_lens[: len(items) + 1].tolist() == [0, *ends]
    assert bool((batch.groups[0].cu_q_lens[len(items) + 1 :] >= ends[-1]).all())
    rows = [row - 1 for row, item in zip(ends, items, strict=True) if item.draws]
    assert batch.logits_rows[: len(rows)].tolist() == rows
    drawing = [item.request.slot for item in items if item.draws]
    assert bench.inputs.drawing_slots.tolist() == drawing
    at_slot = iter(batch.groups[0].places.tolist())
    for index, (request, start, count, *_) in enumerate(items):
        assert batch.groups[0].kv_lens[index] == start + count
        num_pages = -(-(start + count) // PAGE)
        assert (
            batch.groups[0].page_table[index, :num_pages].tolist() == request.held.pages[:num_pages]
        )
        for position in range(start, start + count):
            page = request.held.pages[position // PAGE]
            assert next(at_slot) == page * PAGE + position % PAGE
    assert all(slot < PAGE for slot in at_slot), "rows of no request write to the null page"


def check_adapters(plan: Plan, batch: Step) -> None:
    """Each token has its request's adapter; tokens of one adapter are one segment."""
    items = list(plan)
    wanted = [item.request.adapter_slot for item in items for _ in range(item.num_tokens)]
    if not any(wanted):
        return  # A graph with adapters may run it all the same; the engine takes the other one.
    assert batch.lora is not None
    segments = batch.lora.segments
    wanted += [0] * (batch.token_ids.shape[0] - len(wanted))
    assert segments.token_slots.tolist() == wanted
    order, starts = segments.order.tolist(), segments.starts.tolist()
    assert order == sorted(range(len(wanted)), key=lambda row: wanted[row])
    found = {
        slot: order[starts[index] : starts[index + 1]]
        for index, slot in enumerate(segments.slots.tolist())
        if starts[index] < starts[index + 1]
    }
    assert found == {
        slot: [row for row, other in enumerate(wanted) if other == slot] for slot in set(wanted)
    }


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> LoraPool:
    """Memory for three adapters."""
    config = EngineConfig(model_dir=Path(), max_loras=3)
    model = ModelConfig.load(make_tiny("llama", tmp_path_factory.mktemp("tiny")))
    projections = projections_of(model, ())
    limits = plan_lora(config, projections, torch.float32)
    device = torch.device("cpu")
    return LoraPool(limits, projections, model, Path(), 16, torch.float32, device)


@pytest.mark.parametrize("has_lora", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize("kind", ["eager", "decode", "ragged"])
def test_a_device_gets_what_was_planned(kind: str, has_lora: bool, lora: LoraPool) -> None:
    bench = Bench(lora if has_lora else None)
    most = NUM_SLOTS * MAX_PAGES * PAGE
    if kind == "ragged":
        bench.inputs.ragged_batch(RaggedColumns(most, NUM_SLOTS, NUM_SLOTS))  # Largest first.
    for _ in range(60):
        bench.last_tokens[:NUM_SLOTS] = torch.randint(3, VOCAB, (NUM_SLOTS,))
        count = random.randint(1, NUM_SLOTS)
        slots = random.sample(range(NUM_SLOTS), count)
        num_decodes = count if kind == "decode" else random.randint(0, count)
        plan, tokens, positions = bench.plan(slots, num_decodes)
        # Their new pages come with the step itself; the host's table has them then.
        is_plain = kind == "decode" and random.random() < 0.8
        given = step_input(plan, bench.table, PAGE)
        decodes = StepDecodes.of_step(given) if is_plain else None
        if given.pages is not None and not is_plain:
            new = np.flatnonzero(given.pages >= 0)
            bench.table.note(given.slots[new], given.max_starts[new] // PAGE)
        arrays = StepArrays.of_step(given, bench.table, PAGE)
        copies_before = bench.num_copies
        last = [int(end) for end in np.cumsum([item.num_tokens for item in plan])]
        wanted = [item.start + item.num_tokens for item in plan if item.draws]
        assert arrays.drawing_positions.tolist() == wanted
        assert arrays.is_decode == (last == list(range(1, count + 1)) and len(wanted) == count)
        if kind == "decode":
            rows = random.randint(count, NUM_SLOTS)
            bench.inputs.send_decodes(decodes or StepDecodes.of_arrays(arrays), rows)
            batch = bench.inputs.decode_batch(rows, has_lora=has_lora)
            assert bench.inputs.pages.tolist()[-1] == [0] * MAX_PAGES
            assert batch.groups[0].kv_lens[count:].tolist() == [0] * (rows - count)
        elif kind == "ragged":
            rows, requests = random.randint(last[-1], most), random.randint(count, NUM_SLOTS)
            columns = RaggedColumns(rows, requests, random.randint(len(wanted), min(rows, 6)))
            bench.inputs.send_ragged(arrays, columns)
            batch = bench.inputs.ragged_batch(columns, has_lora=has_lora)
        else:
            batch = bench.inputs.batch(arrays)
        if arrays.is_decode:
            there = bench.inputs.drawing_rows(arrays, has_slots=True)
            assert there.slots is not None
            assert there.slots.tolist() == arrays.drawing_slots.tolist()
            assert there.positions.tolist() == wanted
            assert bench.inputs.drawing_rows(arrays, has_slots=False).slots is None
            same = bench.inputs.drawing_rows_of(count, has_slots=True)
            assert torch.equal(there.positions, same.positions)
            assert same.slots is there.slots
        check(bench, plan, batch, tokens, positions)
        check_adapters(plan, batch)
        has_adapters = arrays.adapter_slots is not None
        assert bench.num_copies - copies_before == COPIES[kind] + has_adapters
        assert has_lora or batch.lora is None
        replaced = random.choice(list(bench.requests))
        bench.requests[replaced] = bench.request(replaced)


def test_a_page_that_a_step_brings_is_sent_once() -> None:
    """Requests that go on get one page at a time, and nothing but the step brings it."""
    bench = Bench()
    chosen = [bench.requests[slot] for slot in random.sample(range(NUM_SLOTS), 4)]
    slots = np.array([request.slot for request in chosen])
    starts = np.array([len(request.tokens) - 1 for request in chosen])
    pages = [request.held.pages for request in chosen]
    for step in range(2 * PAGE):
        for request, own, start in zip(chosen, pages, starts.tolist(), strict=True):
            request.held.pages = own[: start // PAGE + 1]  # As requests grow.
        decodes = StepDecodes.of_step(step_input(Plan(chosen, slots, starts), bench.table, PAGE))
        is_new = (starts % PAGE == 0) & (starts // PAGE > 0) & (step > 0)
        brought = np.broadcast_to(np.array(decodes.pages), starts.shape)
        assert (brought[is_new] >= 0).all()
        changes = bench.table.take_changes()
        assert step == 0 or not len(changes.indices)
        if len(changes.indices):
            bench.inputs.pages.view(-1)[changes.indices] = torch.from_numpy(changes.pages)
        bench.inputs.send_decodes(decodes, NUM_SLOTS)
        batch = bench.inputs.decode_batch(NUM_SLOTS)
        for row, request in enumerate(chosen):
            count = len(request.held.pages)
            assert batch.groups[0].page_table[row, :count].tolist() == request.held.pages
        starts = starts + 1


@pytest.mark.parametrize("kind", ["eager", "ragged"])
def test_a_device_goes_on_where_only_it_knows_the_step_before_ends(kind: str) -> None:
    """Of requests with drafts on the device; beside them decodes, and prompts."""
    bench = Bench()
    most = NUM_SLOTS * MAX_PAGES * PAGE
    columns = RaggedColumns(most, NUM_SLOTS, most, 4)
    bench.inputs.ragged_batch(columns)
    for _ in range(40):
        bench.known.tokens.random_(3, VOCAB)
        slots = random.sample(range(NUM_SLOTS), random.randint(1, NUM_SLOTS))
        first, end = sorted(random.randint(0, len(slots)) for _ in range(2))
        plan, tokens, positions = bench.plan([*slots[:first], *slots[end:]], first)
        counts = [random.randint(0, 3) for _ in slots[first:end]]
        verifies, expected = [], []
        for slot, count in zip(slots[first:end], counts, strict=True):
            request = bench.requests[slot]
            start = len(request.tokens) + random.randint(0, 2)
            is_late = random.random() < 0.6
            request.num_verifying = (count > 0) + is_late
            bench.known.starts[slot] = start if is_late else -9
            # All that the host knows is a bound.
            bound = start + random.randint(0, 2) if is_late else start
            verifies.append(VerifyItem(request, bound, count))
            expected += [
                (int(bench.known.tokens[row, slot]), start + row, request, start + count + 1)
                for row in range(1 + count)
            ]
        plan.verifies, plan.drafts = verifies, LaterDrafts(counts)
        arrays = StepArrays.of_step(step_input(plan, bench.table, PAGE), bench.table, PAGE)
        if kind == "ragged":
            bench.inputs.send_ragged(arrays, columns)
            batch = bench.inputs.ragged_batch(columns)
        else:
            batch = bench.inputs.batch(arrays)
        found = list(zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True))
        rows = first + len(expected)
        others = list(zip(tokens, positions, strict=True))
        assert found[:first] == others[:first]
        assert found[first:rows] == [(token, position) for token, position, *_ in expected]
        assert found[rows : len(expected) + len(others)] == others[first:]
        owners = np.repeat(np.arange(len(counts)), [1 + count for count in counts])
        for row, owner in enumerate(owners.tolist()):
            _, position, request, kv_len = expected[row]
            page = request.held.pages[position // PAGE]
            assert batch.groups[0].places[first + row] == page * PAGE + position % PAGE
            assert batch.groups[0].kv_lens[first + owner] == kv_len
        if counts:
            drawing = bench.inputs.drawing_positions(arrays)[first:rows].tolist()
            assert drawing == [position + 1 for _, position, *_ in expected]
        for request in bench.requests.values():
            request.num_verifying = 0
        replaced = random.choice(list(bench.requests))
        bench.requests[replaced] = bench.request(replaced)


@pytest.mark.parametrize("kind", ["eager", "ragged"])
def test_words_of_trees_come_with_the_step(kind: str) -> None:
    """In one copy with it; and what the device writes where they are is what runs."""
    bench = Bench()
    most = NUM_SLOTS * MAX_PAGES * PAGE
    bench.inputs.keep_ragged(RaggedColumns(most, NUM_SLOTS, most, has_trees=True).num_bytes)
    for has_trees in (True, False, True):
        plan, tokens, positions = bench.plan(random.sample(range(NUM_SLOTS), 3), 1)
        arrays = StepArrays.of_step(step_input(plan, bench.table, PAGE), bench.table, PAGE)
        words = np.random.randint(-(1 << 62), 1 << 62, len(tokens))
        arrays.ancestors = words if has_trees else None
        copies_before = bench.num_copies
        if kind == "ragged":
            columns = RaggedColumns(len(tokens) + 5, NUM_SLOTS, len(tokens), 1, has_trees)
            bench.inputs.send_ragged(arrays, columns)
            batch = bench.inputs.ragged_batch(columns)
        else:
            batch = bench.inputs.batch(arrays)
        assert bench.num_copies - copies_before == COPIES[kind]
        check(bench, plan, batch, tokens, positions)
        if not has_trees:
            assert batch.groups[0].ancestors is None
            continue
        assert batch.groups[0].ancestors is not None
        assert batch.groups[0].ancestors[: len(words)].tolist() == words.tolist()
        assert bool((batch.groups[0].ancestors[len(words) :] == ALL_BEFORE).all())
        step = bench.inputs.step
        assert step is not None
        assert step.ancestors is not None
        step.ancestors[1], step.positions[1] = 3, 5
        assert (int(batch.groups[0].ancestors[1]), int(batch.positions[1])) == (3, 5)
