"""A whole engine whose steps, drafts and drawing run as a GPU's graphs do, padded and in fixed
memory: its text is that of one without any."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.executor import graphs
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.port import Launched, Logits
from weft.engine.executor.step_input import StepInput
from weft.engine.features.speculative.fixed_gate import FixedGate
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.engine.requests.request import Request
from weft.engine.sampling.pending import PendingTokens
from weft.engine.sampling.sampler import SamplerRow
from weft.engine.scheduler import running
from weft.engine.scheduler.plan import Plan
from weft.kernels.shared import cpu
from weft.testing.engine.captured_drafts import capture_chains
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.engine.constrained import Desk, Outcome
from weft.testing.engine.drafters import KnownGraphs, RandomGate, texts_of
from weft.testing.engine.eagle3_cases import NotedChains, check_chains
from weft.testing.models.choices import check_same
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.needs("triton-interpreter"),
]

PAGE, VOCAB, MAX_REQUESTS, DRAFTS = 4, 517, 4, 5


def check_texts(
    target_dir: Path,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    found: Sequence[GeneratedSample],
    expected: Sequence[GeneratedSample],
) -> None:
    """Padded steps add up in another order: texts are the same as far as float32 can tell."""
    load = partial(load_reference, target_dir)
    for prompt, drawn, one, other in zip(prompts, params, found, expected, strict=True):
        check_same(load, prompt, one.token_ids, other.token_ids, drawn)


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [
        ("none", 0.0),
        pytest.param("none", 1.0, marks=pytest.mark.full),
        pytest.param("known", 1.0, marks=pytest.mark.full),
        pytest.param("head", 0.0, marks=pytest.mark.full),
        ("head", 1.0),
    ],
)
def test_graphs_change_no_token(
    drafter: str, temperature: float, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    target_dir = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB, num_hidden_layers=4)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    prompts = [[random.randrange(3, VOCAB) for _ in range(random.randint(1, 20))] for _ in range(6)]
    params = SamplingParams(temperature=temperature, seed=5)
    stop = StopCriteria(
        max_tokens=12, ignore_eos=True, stop_token_ids=tuple(random.sample(range(3, VOCAB), 3))
    )
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 16, "max_context_tokens": 64}
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate(prompts, params, stop)
    if drafter != "none":
        settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "max_draft_tokens": DRAFTS}
    with LLM(target_dir, poison_free_pages=True, overlap="on", **settings) as captured:
        engine = captured.engine
        steps = RecordedSteps(engine, DRAFTS if drafter != "none" else 0)
        if drafter == "known":
            texts = texts_of(prompts, [[sample] for sample in expected], 5)
            KnownGraphs(engine, texts, VOCAB, 0.7)
        elif drafter == "head":
            capture_chains(engine, DRAFTS)
            plans = engine.scheduler.running_plans
            plans.drafts_on_device = True
            plans.gate = FixedGate(DRAFTS)
        found = captured.generate(prompts, params, stop)
        check_texts(target_dir, prompts, [params] * len(prompts), found, expected)
        kinds = {"ragged", "decode" if drafter == "none" else "verify"}
        assert kinds <= set(steps.num_replays)
        draws = engine.parts.local._draws
        assert draws is not None
        assert kinds <= {
            key.bucket.kind for key, (graph, _) in draws._graphs.items() if graph.num_own
        }
        counters = engine.counters()
        assert bool(counters["verified_runs"]) == (drafter != "none")
        assert bool(counters["accepted_tokens"]) or drafter != "known"


def test_prompts_with_nothing_before_them_have_graphs_of_their_own(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention gains by that: in no other step, and in each that is one."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    monkeypatch.setattr(graphs, "is_faster_when_cold", lambda dtype, dim, tokens: tokens > 16)
    target_dir = make_tiny("llama", tmp_path, seed, vocab_size=VOCAB)
    # Some come in chunks, and some share a page that the cache has.
    lengths = [random.randint(33, 40), *(random.randint(1, 40) for _ in range(8))]
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    prompts += [prompts[0][:6] + prompt for prompt in prompts[:3]]
    stop = StopCriteria(max_tokens=9, ignore_eos=True)
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 32, "max_context_tokens": 64}
    greedy = SamplingParams(temperature=0.0)
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate(prompts, greedy, stop)
    with LLM(target_dir, poison_free_pages=True, overlap="on", **settings) as captured:
        steps = RecordedSteps(captured.engine, 0)
        forward = steps.forward

        def checked(
            arrays: StepArrays, bucket: graphs.GraphBucket, step: StepInput | None
        ) -> torch.Tensor:
            pieces = np.split(arrays.positions, arrays.cu_q_lens[1:-1])
            is_cold = all(len(piece) == 1 or piece[0] == 0 for piece in pieces)
            if bucket.kind != "decode":
                assert (bucket.kind == "prompts") == (is_cold and bucket.tokens > 16)
            return forward(arrays, bucket, step)

        monkeypatch.setattr(steps, "forward", checked)
        found = captured.generate(prompts, greedy, stop)
        check_texts(target_dir, prompts, [greedy] * len(prompts), found, expected)
        assert {"decode", "ragged", "prompts"} <= set(steps.num_replays)


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_with_penalties_and_min_tokens_are_drafted_for(
    temperature: float, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts and what is drawn count on the device, before the host knows what was accepted; and
    the device knows up to where tokens that would end a sample are masked.
    """
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    target_dir = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB, num_hidden_layers=4)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    prompts = [[random.randrange(3, VOCAB) for _ in range(random.randint(1, 20))] for _ in range(6)]
    # Some tokens alone are likely, so that penalties choose among them.
    few = dict.fromkeys(random.sample(range(3, VOCAB), 5), 30.0)
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.4, "logit_bias": few}
    params = [
        SamplingParams(temperature=temperature, seed=5, **(penalties if index % 3 else {}))
        for index in range(len(prompts))
    ]
    stop = StopCriteria(
        max_tokens=18, min_tokens=9, ignore_eos=True, stop_token_ids=tuple([*few][:2])
    )
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 16, "max_context_tokens": 64}
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate(prompts, params, stop)
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "max_draft_tokens": DRAFTS}
    with LLM(target_dir, poison_free_pages=True, overlap="on", **settings) as captured:
        engine = captured.engine
        RecordedSteps(engine, DRAFTS)
        texts = texts_of(prompts, [[sample] for sample in expected], 5)
        known = KnownGraphs(engine, texts, VOCAB, 0.7)
        found = captured.generate(prompts, params, stop)
        check_texts(target_dir, prompts, params, found, expected)
        assert known.num_late > 5
        num_made = sum(len(sample.token_ids) for sample in expected)
        assert engine.counters()["accepted_tokens"] > num_made // 5
    for index, sample in enumerate(expected):
        assert len(sample.token_ids) >= stop.min_tokens
        if index % 3:
            assert 1 < len(set(sample.token_ids)) <= len(few)
    assert any(len(sample.token_ids) < stop.max_tokens for sample in expected)


@pytest.mark.parametrize(
    ("temperature", "has_edits"),
    [pytest.param(0.0, False, marks=pytest.mark.full), (1.0, True)],
)
def test_constrained_requests_are_drafted_for(
    temperature: float,
    has_edits: bool,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their drafts come to the host, which makes a mask for each of their rows. Graphs draw from
    these, unless there are requests with penalties, or whose ends are masked at first.
    """
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    model = {"vocab_size": VOCAB, "num_hidden_layers": 4, "tokenizer": True}
    target_dir = make_tiny("llama", tmp_path / "t", seed, **model)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    digits = Constraint(kind="regex", text="[0-9]{9,14}")
    words = Constraint(kind="regex", text="(ab|c[de]*f)(,(ab|c[de]*f)){4,9}")
    kinds: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"constraint": digits}, 0),
        ({"constraint": words}, 0),
        ({"constraint": words, "speculates": False}, 0),
    ]
    if has_edits:
        penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.2}
        kinds += [({"constraint": words, **penalties}, 0), ({"constraint": digits}, 12)]
    submits = [
        Submit(
            gateway=0,
            request_id=f"r{number}",
            attempt=1,
            prompt=[random.randrange(3, VOCAB) for _ in range(random.randint(1, 20))],
            sampling=SamplingParams(temperature=temperature, seed=5, **params),
            stop=StopCriteria(max_tokens=18, min_tokens=min_tokens),
        )
        for number, (params, min_tokens) in enumerate(2 * kinds)
    ]
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 16, "max_context_tokens": 64}

    def run(llm: LLM) -> list[Outcome]:
        outcomes = Desk(llm.engine, target_dir).run(*submits)
        found = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
        assert len(found) == len(submits), outcomes
        return found

    with LLM(target_dir, **settings) as plain:
        expected = run(plain)
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "max_draft_tokens": DRAFTS}
    with LLM(target_dir, poison_free_pages=True, overlap="on", **settings) as captured:
        engine = captured.engine
        RecordedSteps(engine, DRAFTS)
        texts = {
            (tuple(submit.prompt), 5): [*submit.prompt, *outcome.ids]
            for submit, outcome in zip(submits, expected, strict=True)
        }
        known = KnownGraphs(engine, texts, VOCAB, 0.9)
        draws = engine.parts.local._draws
        assert draws is not None
        sent = list[bool]()
        send = draws._send_slots

        def noted(slot_override: npt.NDArray[np.int64] | None) -> None:
            sent.append(slot_override is not None)
            send(slot_override)

        monkeypatch.setattr(draws, "_send_slots", noted)
        found = run(captured)
        assert known.num_late > 5
        assert has_edits or {True, False} == {*sent}, "graphs draw from rows with own masks"
    accepted, load = [0] * len(kinds), partial(load_reference, target_dir)
    for number, (outcome, wanted) in enumerate(zip(found, expected, strict=True)):
        params, min_tokens = kinds[number % len(kinds)]
        submit = submits[number]
        check_same(load, submit.prompt, outcome.ids, wanted.ids, submit.sampling)
        assert outcome.reason == wanted.reason or outcome.ids != wanted.ids, (number, params)
        assert len(wanted.ids) >= min_tokens
        accepted[number % len(kinds)] += outcome.num_accepted
    print(accepted)
    assert [count > 0 for count in accepted] == [p.get("speculates", True) for p, _ in kinds]


@pytest.mark.full_after(1)
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_chains_that_read_a_steps_requests_are_the_heads(
    overlap: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of other lengths, and such without drafts, lie beside each other's numbers."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    target_dir = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB, num_hidden_layers=4)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    prompts = [[random.randrange(3, VOCAB) for _ in range(5 * index + 1)] for index in range(9)]
    params = [SamplingParams(temperature=0.0, speculates=index % 3 > 0) for index in range(9)]
    stop = StopCriteria(max_tokens=18, ignore_eos=True)
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 16, "max_context_tokens": 64}
    settings |= {"prefix_cache": False}
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate(prompts, params, stop)
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "max_draft_tokens": DRAFTS}
    with LLM(target_dir, poison_free_pages=True, overlap=overlap, **settings) as captured:
        engine = captured.engine
        RecordedSteps(engine, DRAFTS)
        graphs = capture_chains(engine, DRAFTS)
        engine.scheduler.running_plans.drafts_on_device = True
        noted = NotedChains(engine, RandomGate((0, 1, 3, DRAFTS)))
        num_begun = [0, 0]

        def count(name: str, way: int) -> None:
            begin = getattr(graphs, name)

            def counted(*inputs: object) -> torch.Tensor:
                num_begun[way] += 1
                drafts: torch.Tensor = begin(*inputs)
                return drafts

            monkeypatch.setattr(graphs, name, counted)

        count("forward", 0)
        count("forward_sent", 1)
        # By chance none of the few steps that bring prompts may have drafts.
        while not num_begun[0]:
            found = captured.generate(prompts, params, stop)
            check_texts(target_dir, prompts, params, found, expected)
    assert 0 < num_begun[0] < num_begun[1], "few steps bring prompts"
    check_chains(noted, target_dir, draft_dir)


@pytest.mark.full_after(1)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_steps_in_which_somebody_has_ended_are_drawn_by_graphs(
    temperature: float, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device draws for those that have ended, too, unless they had penalties."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    target_dir = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB)
    prompts = [[random.randrange(3, VOCAB) for _ in range(4 + index)] for index in range(12)]
    params = [
        SamplingParams(temperature=temperature, seed=index, frequency_penalty=0.5 * (index == 2))
        for index in range(12)
    ]
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 16, "max_context_tokens": 64}
    with LLM(target_dir, **settings) as plain:
        free = plain.generate(prompts, params, StopCriteria(max_tokens=25, ignore_eos=True))
        # Each text has a token that ends it, one here, another there.
        ends = {sample.token_ids[5 + index] for index, sample in enumerate(free)}
        stop = StopCriteria(max_tokens=25, stop_token_ids=tuple(ends))
        expected = plain.generate(prompts, params, stop)
    with LLM(target_dir, overlap="on", **settings) as captured:
        engine = captured.engine
        RecordedSteps(engine, 0)
        sampler, edited = engine._step_sampler._sampler, set[int]()
        add, begin, draw = sampler.add, sampler.begin, engine._step_sampler.begin

        def added(slot: int, row: SamplerRow, *tokens: Sequence[int]) -> None:
            add(slot, row, *tokens)
            (edited.add if row.params.has_penalties else edited.discard)(slot)

        def drawn(plan: Plan, requests: Sequence[Request], logits: Logits) -> PendingTokens:
            num_eager[0] += not edited.isdisjoint(logits.slots.tolist())
            num_ended[0] += any(request.slot < 0 for request in requests)
            return draw(plan, requests, logits)

        def begun(*inputs: Any, **named: Any) -> PendingTokens:
            num_eager[1] += 1
            return begin(*inputs, **named)

        num_eager, num_ended = [0, 0], [0]
        monkeypatch.setattr(sampler, "add", added)
        monkeypatch.setattr(sampler, "begin", begun)
        monkeypatch.setattr(engine._step_sampler, "begin", drawn)
        found = captured.generate(prompts, params, stop, max_at_once=MAX_REQUESTS)
    check_texts(target_dir, prompts, params, found, expected)
    assert num_ended[0] > 2
    assert num_eager[0] == num_eager[1] > 0


@pytest.mark.parametrize("most_beside", [pytest.param(0, marks=pytest.mark.full), MAX_REQUESTS])
def test_what_is_drawn_beside_short_prompts_is_captured(
    most_beside: int, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose pages are there bring one row; beside many requests nothing is drafted."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    monkeypatch.setattr(running, "MAX_DRAFTED_BESIDE", most_beside)
    target_dir = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB, num_hidden_layers=4)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    prompts = [[random.randrange(3, VOCAB) for _ in range(8 + index)] for index in range(9)]
    # They end one after another.
    ends = tuple(random.sample(range(3, VOCAB), 50))
    stop = StopCriteria(max_tokens=25, ignore_eos=True, stop_token_ids=ends)
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": MAX_REQUESTS}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 16, "max_context_tokens": 64}
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate(prompts, None, stop)
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "max_draft_tokens": DRAFTS}
    with LLM(target_dir, overlap="on", **settings) as captured:
        engine = captured.engine
        RecordedSteps(engine, DRAFTS)
        capture_chains(engine, DRAFTS)
        plans = engine.scheduler.running_plans
        plans.drafts_on_device = True
        plans.gate = FixedGate(DRAFTS)
        captured.generate(prompts, None, stop)
        steps: list[tuple[bool, int]] = []
        launch = engine._executor.launch

        def noted(step: StepInput) -> Launched:
            launched = launch(step)
            if len(step.draws) and launched.logits is not None:
                num_drafts = 0 if step.drafts is None else sum(step.drafts.counts)
                steps.append((launched.logits.captured is not None, num_drafts))
            return launched

        monkeypatch.setattr(engine.parts.local, "launch", noted)
        found = captured.generate(prompts, None, stop, max_at_once=MAX_REQUESTS)
    check_texts(target_dir, prompts, [SamplingParams(temperature=0.0)] * 9, found, expected)
    assert steps
    assert all(is_captured for is_captured, _ in steps)
    assert any(num_drafts for _, num_drafts in steps) == (most_beside > 0)
