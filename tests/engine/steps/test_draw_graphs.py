"""Drawing as graphs record it, on a CPU: the tokens, and what is kept of them, are those of single
calls on the host, whatever a step is padded to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.drafts import LaterDrafts
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.drafts.keeping import DraftKeeper
from weft.engine.executor.draw_graphs import DrawGraphs
from weft.engine.executor.encodings import StepArrays, StepDecodes
from weft.engine.executor.graphs import GraphBucket
from weft.engine.executor.step_input import StepInput
from weft.engine.loop.encode import step_input
from weft.engine.requests.request import Request
from weft.engine.sampling.device_draws import WAYS, Way
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.engine.sampling.sampler import Sampler, SamplerRow
from weft.engine.scheduler.plan import Plan, PlanItem, VerifyItem
from weft.kernels.ops.sampling.spec import Field
from weft.kernels.ops.step_rows import keep_tokens
from weft.kernels.ops.step_rows.spec import SlotTokens
from weft.pages.memory.page_table import PageTable
from weft.testing.engine.captured_drafts import capture
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.tree_cases import random_parents, words_of
from weft.testing.scheduling.bare_request import bare_request

pytestmark = pytest.mark.needs("triton-interpreter")

SLOTS, DRAFTS, PAGE, VOCAB, HIDDEN, LAYERS = 5, 3, 4, 130, 16, 2
DECODE = GraphBucket(8, 8, "decode")
VERIFY = GraphBucket(8 * (1 + DRAFTS), 8, "verify", drafts=DRAFTS)
TREE = GraphBucket(4 * (1 + DRAFTS), 4, "tree", drafts=DRAFTS)
RAGGED = GraphBucket(40, 8, "ragged", drafts=DRAFTS)
ON_DEVICE = GraphBucket(8 * 2, 8, "verify", drafts=1)
"""Also of steps in which only the device knows where requests begin, and none has drafts."""
BUCKETS = {bucket.kind: bucket for bucket in (DECODE, VERIFY, TREE, RAGGED)} | {"late": ON_DEVICE}


class States:
    """Hidden states by slot, as a draft head keeps them."""

    def __init__(self) -> None:
        self.rows = torch.randn(64, HIDDEN)
        self.kept = torch.zeros(SLOTS + 1, HIDDEN)

    def keep_accepted(self, rows: torch.Tensor, slots: torch.Tensor, states: None) -> None:
        """See `DraftedModel.keep_accepted`."""
        self.kept[slots] = self.rows[rows]


class Desk:
    """Requests in slots, captured drawing, and what single calls make of the same."""

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, HIDDEN)
        self.table = PageTable(SLOTS, 16, keeps_changes=True)
        tokens = torch.randint(0, VOCAB, (1 + DRAFTS, SLOTS + 1))
        self.known = SlotTokens(tokens, torch.zeros_like(tokens[0]), torch.full_like(tokens, -1))
        self.states, self.pool = States(), torch.randn(SLOTS * 16 + 1, 1, LAYERS, 2, PAGE, 8)
        self.inputs = DeviceInputs(self.table, PAGE, 8, self.known)
        self.inputs.keep_ragged(max(b.columns.num_bytes for b in (VERIFY, TREE, RAGGED)))
        self.hidden = {b: torch.randn(b.tokens, HIDDEN) for b in BUCKETS.values()}
        self.sampler = Sampler(VOCAB, SLOTS, device=torch.device("cpu"))
        self.host = Sampler(VOCAB, SLOTS)
        graphs: Any = SimpleNamespace(
            results=self._results, capture=capture, send_nothing=self._send_nothing
        )
        self.keeper = DraftKeeper(self.known, self.pool, self.states)
        model: Any = SimpleNamespace(logits=lambda hidden, lora=None: hidden @ self.weight.T)
        tables = self.sampler.plain_tensors
        self.draws = DrawGraphs(model, graphs, self.inputs, self.keeper, tables, WAYS)

    def _results(self) -> Iterator[tuple[GraphBucket, torch.Tensor]]:
        yield from self.hidden.items()

    def _send_nothing(self, bucket: GraphBucket) -> None:
        arrays = StepArrays.of_step(step_input(self.plan(1, 0), self.table, PAGE), self.table, PAGE)
        if bucket.kind == "decode":
            self.inputs.send_decodes(StepDecodes.of_arrays(arrays), bucket.tokens)
        else:
            self.inputs.send_ragged(arrays, bucket.columns)

    def request(self, slot: int) -> Request:
        """A request whose tokens are random, in a slot whose sampler row is set."""
        length = random.randint(2, 20)
        request = bare_request([random.randrange(VOCAB) for _ in range(length)], PAGE, bytes(32))
        request.slot = slot
        request.held.pages = [1 + slot * 16 + page for page in range(16)]
        self.table.clear(slot)
        return request

    def add(self, slot: int, params: SamplingParams) -> None:
        """Gives a slot's sample its parameters; the one before is gone."""
        row = SamplerRow(
            params=params, stop=StopCriteria(max_tokens=9), seed=slot, eos_token_ids=()
        )
        for sampler in (self.sampler, self.host):
            if slot in sampler._rows:
                sampler.remove(slot)
            sampler.add(slot, row, (), ())

    def plan(self, num_decodes: int, num_verified: int, num_prompts: int = 0) -> Plan:
        """That many requests, in random slots."""
        slots = random.sample(range(SLOTS), num_decodes + num_verified + num_prompts)
        requests = [self.request(slot) for slot in slots]
        starts = [len(request.tokens) - 1 for request in requests]
        columns = (np.array(column[:num_decodes], np.int64) for column in (slots, starts))
        plan = Plan(requests[:num_decodes], *columns, [])
        counts = [random.randint(0, DRAFTS) for _ in range(num_verified)]
        verified = zip(requests[num_decodes:], starts[num_decodes:], counts, strict=False)
        plan.verifies = [VerifyItem(*item) for item in verified]
        for request in requests[num_decodes + num_verified :]:
            begin, samples = random.randrange(len(request.tokens)), random.random() < 0.7
            count = min(6, len(request.tokens) - begin)
            plan.chunks = [*plan.chunks, PlanItem(request, begin, count, samples)]
        plan.drafts = LaterDrafts(counts)
        return plan

    def state(self) -> list[torch.Tensor]:
        """All that is kept but for the dummy slot."""
        known = (self.known.tokens[:, :-1], self.known.starts[:-1], self.states.kept[:-1])
        return [*known, self.pool[1:]]


def ways() -> Iterator[tuple[str, Callable[[], SamplingParams]]]:
    yield "greedy", lambda: SamplingParams(temperature=0.0)
    yield (
        "any",
        lambda: SamplingParams(
            temperature=random.choice([0.0, 0.7, 1.3]),
            top_p=random.choice([1.0, 0.8]),
            top_k=random.choice([0, 5]),
        ),
    )


def check_limits(requests: StepInput, plan: Plan) -> None:
    """Chains end where their requests do; those that nobody wants have no room at all."""
    assert requests.draft_limits is not None
    draft_limits = requests.draft_limits.tolist()
    assert draft_limits[: len(plan.decodes)] == [1] * len(plan.decodes)
    for item, limit in zip(plan.verifies, draft_limits[len(plan.decodes) :], strict=True):
        last = item.request.num_prompt_tokens + item.request.max_tokens
        assert limit == (min(len(item.request.held.pages) * PAGE, last) if item.max_drafts else 1)


@pytest.mark.full_after(3)
@pytest.mark.parametrize("kind", BUCKETS)
def test_a_graph_draws_and_keeps_as_single_calls_do(kind: str) -> None:
    fresh_seed()
    desk = Desk()
    bucket = BUCKETS[kind]
    num_right = 0
    for way, params in ways():
        for _ in range(8):
            count = random.randint(1, 4)
            is_plain = kind in ("decode", "late")
            num_decodes = count if is_plain else random.randint(0, count - 1)
            num_verified = count - num_decodes
            if kind == "ragged" and random.random() < 0.3:
                num_verified = 0
            num_prompts = SLOTS - count if kind == "ragged" else 0
            plan = desk.plan(num_decodes, num_verified, num_prompts)
            if kind == "late":
                plan.is_late = np.array([True, *[random.random() < 0.5] * 3])[:count]
            for slot in range(SLOTS):
                desk.add(slot, params())
            desk.known.tokens.random_(0, VOCAB)
            desk.known.starts.random_(0, 40)
            if kind == "tree":
                for slot in range(SLOTS):
                    desk.known.words[:, slot] = torch.tensor(words_of(random_parents(1 + DRAFTS)))
            given = step_input(plan, desk.table, PAGE)
            arrays = StepArrays.of_step(given, desk.table, PAGE)
            if kind == "decode":
                desk.inputs.send_decodes(StepDecodes.of_arrays(arrays), bucket.tokens)
                desk.inputs.decode_batch(bucket.tokens)
            else:
                if kind == "tree":
                    arrays.ancestors = np.full(len(arrays.token_ids), -1)
                requests = given if given.is_by_requests else None
                assert (requests is not None) == (kind != "ragged")
                if requests is not None:
                    check_limits(requests, plan)
                if requests is None or (kind != "late" and random.random() < 0.5):
                    desk.inputs.send_ragged(arrays, bucket.columns)
                else:
                    desk.inputs.send_requests(requests, bucket.columns)
                desk.inputs.ragged_batch(bucket.columns)
                assert requests is None or [column.tolist() for column in requests.rows()] == [
                    arrays.drawing_slots.tolist(),
                    (arrays.drawing_positions - 1).tolist(),
                ]
            step, rows = desk.inputs.step, len(arrays.logits_rows)
            assert step is not None
            if not rows:
                continue
            hidden = desk.hidden[bucket].normal_()
            # A single row would be added up in another order.
            logits = (hidden @ desk.weight.T)[:rows]
            positions = step.positions[arrays.logits_rows].numpy() + 1
            slots = arrays.drawing_slots
            expected = desk.host.draw(logits, slots, positions).token_ids
            # Some drafts are right: those of rows whose tokens are drawn before them.
            for own in () if arrays.verify_rows is None else arrays.verify_rows:
                for before, row in itertools.pairwise(own):
                    if row >= 0 and random.random() < 0.7:
                        step.token_ids[row] = int(expected[before])
                        num_right += 1
            before = [tensor.clone() for tensor in desk.state()]
            assert desk.sampler.common_way(slots) in (way, "greedy")
            begun = desk.sampler.begin_captured(
                partial(desk.draws.begin, bucket, positions),
                way,
                slots,
            )
            assert begun.are_kept
            assert begun.wait().token_ids.tolist() == expected.tolist()
            verified = np.arange(rows)[:, None] if kind == "late" else arrays.verify_rows
            num_verifying = 0 if verified is None else int((verified >= 0).sum())
            if num_verifying:
                assert begun.rows is not None
                rows_of, words = (column[:num_verifying] for column in begun.rows())
                assert rows_of.tolist() == step.token_ids[:num_verifying].tolist()
                if step.ancestors is not None:
                    assert words.tolist() == step.ancestors[:num_verifying].tolist()
            found = [tensor.clone() for tensor in desk.state()]
            for tensor, value in zip(desk.state(), before, strict=True):
                tensor.copy_(value)
            tokens = torch.from_numpy(expected)
            if verified is not None:
                _, requests_of, _ = desk.inputs.ragged_step(bucket.columns)
                whole = requests_of._replace(rows=requests_of.rows[: len(verified)])
                desk.keeper.accept(tokens, step, whole)
            keep_tokens(tokens[num_verifying:], torch.from_numpy(slots[num_verifying:]), desk.known)
            for one, other in zip(found, desk.state(), strict=True):
                assert torch.equal(one, other)
    assert num_right or is_plain


def test_a_graph_draws_for_nobody_who_needs_more() -> None:
    """Penalties, biases and log-probabilities are left to single calls; masks are not."""
    sampler = Sampler(VOCAB, SLOTS, device=torch.device("cpu"))
    for slot, params in enumerate([{}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {}]):
        row = SamplerRow(
            params=SamplingParams(temperature=0.7, **params),
            stop=StopCriteria(max_tokens=9),
            seed=1,
            eos_token_ids=(),
            top_logprobs=2 if slot == 3 else None,
        )
        sampler.add(slot, row, (), ())
    assert sampler.common_way(np.array([0])) == "any"
    sampler.set_mask(0, np.full(-(-VOCAB // 32), 0xFFFF, np.uint32))
    assert sampler.common_way(np.array([0, sampler.null_slot])) == "any"
    for slot in (1, 2, 3):
        assert sampler.common_way(np.array([0, slot])) is None


def test_a_graph_draws_for_a_slot_that_became_free_as_it_was() -> None:
    """Not as the sample before it did, whose counts and biases have rows that graphs lack."""
    sampler = Sampler(VOCAB, SLOTS, device=torch.device("cpu"))
    logits, slots = torch.randn(1, VOCAB), np.array([0])

    def add(**params: float) -> None:
        row = SamplerRow(
            params=SamplingParams(temperature=0.7, **params),
            stop=StopCriteria(max_tokens=9),
            seed=1,
            eos_token_ids=(),
        )
        sampler.add(0, row, (), ())

    add(presence_penalty=0.5)
    sampler.begin(logits, slots, np.array([1])).wait()
    sampler.remove(0)
    assert sampler.common_way(slots) is None
    add(top_p=0.9)
    sampler.remove(0)
    tables = sampler.plain_tensors
    assert tables is not None
    assert sampler.common_way(slots) == "any"
    seen: list[int] = []

    def draw(way: Way, slot_override: object) -> PendingTokens:
        seen.append(int(tables.params[0, Field.COUNT_ROW]))
        nothing = SampledRows(np.zeros(1, np.int64), [None])
        return PendingTokens(torch.from_numpy(nothing.token_ids), slots, lambda: nothing)

    sampler.begin_captured(draw, "any", slots)
    assert seen == [-1]
