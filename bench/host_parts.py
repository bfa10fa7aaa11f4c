"""Where the host's time of an engine's steps goes, part by part, with drafts and without.

Each part is timed around its call, so a part contains work of the device only if the host waits for
it (`end`). `other` is the time between the parts: taking the inbox, commits, events. With drafts
the gate is fixed, so that all steps are alike. With several successive requests of a stream, turns
whose step brings prompts are reported apart from others.

With `--turns` the engine's own gate decides, as in service, and turns are told by what they begin:
how many there are of each kind, and what share of the time they take.

    python bench/host_parts.py --device cuda                        the demo model and its head
    python bench/host_parts.py --device cuda --streams 8 --drafts 0,3,5 --temperature 0.8
    python bench/host_parts.py --device cuda --streams 64 --rounds 4 --tokens 96
    python bench/host_parts.py --device cuda --streams 8 --drafts 5 --rounds 8 --turns
    python bench/host_parts.py --device cuda --streams 8 --drafts 0,5 --json-answers
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, cycle, islice, product
from typing import Any, NamedTuple

from draft_cost import Watch
from gpu_trace import counted_waits
from harness import Harness, Run, numbers
from speculation import ANSWER, DRAFT, PROMPTS, ServedModel, lasting, read_prompts
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.drafts import DraftShape
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.llm import LLM
from weft.engine.scheduler.plan import Plan

NUM_SKIPPED = 10
"""First steps of a run, which are not timed."""


class Case(NamedTuple):
    """What the steps of a run contain."""

    streams: int
    """Number of requests that run together."""
    drafts: int
    """Drafts of each request in a step."""


class Parts:
    """Wraps methods of an engine's objects, and sums up what each takes in a turn."""

    def __init__(self) -> None:
        self.turns: list[dict[str, float]] = []
        self.has_prompts = False
        """Whether the step planned last brings prompts."""
        self._now: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Counts the method's own time, without wrapped ones that it calls, as `name`."""
        call: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                seconds = time.perf_counter() - began
                self._now[name] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        setattr(owner, method, timed)

    def end_turn(self) -> None:
        """Begins the next turn."""
        self.turns.append(dict(self._now))
        self._now.clear()


def watch_engine(llm: LLM) -> Parts:
    """Wraps the parts of a step."""
    engine, parts = llm.engine, Parts()
    pipeline, executor = engine.pipeline, engine.parts.local
    plan_step = engine.scheduler.plan

    def plan(*arguments: Any) -> Any:
        found = plan_step(*arguments)
        parts.has_prompts = bool(found.chunks)
        return found

    engine.scheduler.plan = plan  # type: ignore[method-assign]
    parts.wrap(engine, "turn", "other")
    parts.wrap(engine.scheduler, "plan", "plan")
    parts.wrap(engine.scheduler, "commit", "commit")
    parts.wrap(pipeline, "_start", "start")
    parts.wrap(pipeline, "_draw", "draw: other")
    parts.wrap(pipeline, "_end", "end")
    parts.wrap(pipeline._owner, "step_done", "tokens")
    parts.wrap(engine._step_sampler, "prepare", "draw: prepare")
    parts.wrap(engine._step_sampler._constraints, "begin_masks", "draw: masks")
    parts.wrap(engine._step_sampler._constraints, "take_masks", "draw: masks")
    parts.wrap(engine._step_sampler._sampler, "begin", "draw: sampler")
    parts.wrap(engine._step_sampler._sampler, "begin_captured", "draw: sampler")
    parts.wrap(executor, "launch", "launch: arrays")
    parts.wrap(executor, "_hidden", "forward: graph")
    parts.wrap(executor, "_launch_decodes", "forward: graph")
    parts.wrap(executor, "_launch_requests", "forward: graph")
    parts.wrap(executor, "_logits_of", "draw: logits")
    parts.wrap(executor, "keep", "draw: keep")
    if executor._draws is not None:
        parts.wrap(executor._draws, "begin", "draw: graph")
    if executor.graphs is not None:
        assert executor.inputs is not None
        parts.wrap(executor.inputs, "send_decodes", "forward: send")
        parts.wrap(executor.inputs, "send_ragged", "forward: send")
        parts.wrap(executor.inputs, "send_requests", "forward: send")
        parts.wrap(executor.inputs, "send_drafting", "forward: send")
    drafter = engine.drafter
    if drafter is not None:
        parts.wrap(drafter, "draft", "drafts")
    if isinstance(drafter, EagleDrafter) and drafter._graphs is not None:
        parts.wrap(drafter._graphs, "forward", "drafts")
        parts.wrap(drafter._graphs, "forward_sent", "drafts")
    return parts


def measure(
    llm: LLM, parts: Parts, prompts: list[list[int]], case: Case, arguments: argparse.Namespace
) -> dict[bool, dict[str, float]]:
    """Median microseconds of each part in the turns in which all streams have a request that runs:
    by whether the turn's step brings prompts.
    """
    drafter = llm.engine.drafter
    if drafter is not None:
        watch = Watch(drafter, DraftShape.chain(case.drafts), case.streams)
        llm.engine.scheduler.running_plans.gate = watch
    parts.turns.clear()
    turn = llm.engine.turn

    def counted(*arguments: Any) -> Any:
        began = time.perf_counter()
        outbox = turn(*arguments)
        seconds = time.perf_counter() - began
        parts.end_turn()
        parts.turns[-1]["turn"] = seconds
        parts.turns[-1]["beside"] = parts.has_prompts
        parts.turns[-1]["missing"] = case.streams - len(llm.engine.scheduler.running)
        return outbox

    llm.engine.turn = counted  # type: ignore[method-assign]
    try:
        stop = StopCriteria(max_tokens=arguments.tokens, ignore_eos=True)
        sampling = arguments.sampling
        count = case.streams * arguments.rounds
        chosen = list(islice(cycle(prompts), count))
        llm.generate(chosen, sampling, stop, max_at_once=case.streams)
    finally:
        llm.engine.turn = turn  # type: ignore[method-assign]
    # Beside prompts, those that they belong to run in the next step only.
    most_missing = case.streams // 4 if arguments.rounds > 1 else 0
    whole = [found for found in parts.turns if found.pop("missing") <= most_missing]
    whole = whole[NUM_SKIPPED:-1]
    by_kind: dict[bool, dict[str, float]] = {}
    for beside in (False, True):
        turns = [found for found in whole if found["beside"] == beside]
        names = {name for found in turns for name in found} - {"beside"}
        found = {n: 1e6 * statistics.median(turn.get(n, 0.0) for turn in turns) for n in names}
        by_kind[beside] = found | {"turns": len(turns)}
    return by_kind


class Turns(NamedTuple):
    """Times of the engine's turns of one kind."""

    kind: str
    number: int
    turn_us: float
    """Median time of a turn, microseconds."""
    wait_us: float
    """Median time in which a turn waits for the device, microseconds."""
    share: float
    """Share of all time that turns of this kind take, each until the next one begins."""
    mean_us: float
    """Mean time from the begin of such a turn to that of the next one, microseconds."""


def turns_by_kind(
    llm: LLM, prompts: list[list[int]], streams: int, arguments: argparse.Namespace
) -> list[Turns]:
    """Runs prompts with the engine's own gate, after as many to warm up; most time first."""
    engine, stop = llm.engine, StopCriteria(max_tokens=arguments.tokens)
    sampling = arguments.sampling
    chosen = list(islice(cycle(prompts), streams * arguments.rounds))
    llm.generate(chosen, sampling, stop, max_at_once=streams)
    taken: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    turn, plan_step, planned = engine.turn, engine.scheduler.plan, [Plan()]

    def plan(*inputs: Any) -> Plan:
        planned[0] = plan_step(*inputs)
        return planned[0]

    last: list[tuple[str, float, float, float]] = []

    def timed(*inputs: Any) -> Any:
        planned[0], waited = Plan(), waits.seconds
        began = time.perf_counter()
        if last:
            kind, before, spent, waited_s = last.pop()
            taken[kind].append((spent, waited_s, began - before))
        outbox = turn(*inputs)
        spent = time.perf_counter() - began
        last.append((kind_of(planned[0]), began, spent, waits.seconds - waited))
        return outbox

    engine.scheduler.plan = plan  # type: ignore[method-assign]
    engine.turn = timed  # type: ignore[method-assign]
    try:
        with counted_waits() as waits:
            llm.generate(chosen, sampling, stop, max_at_once=streams)
    finally:
        engine.turn, engine.scheduler.plan = turn, plan_step  # type: ignore[method-assign]
    whole_s = sum(each for turns in taken.values() for _, _, each in turns)
    found = []
    for kind, turns in taken.items():
        spent, waited, each = zip(*turns, strict=True)
        medians = (1e6 * statistics.median(spent), 1e6 * statistics.median(waited))
        mean_us = 1e6 * statistics.mean(each)
        found.append(Turns(kind, len(turns), *medians, sum(each) / whole_s, mean_us))
    return sorted(found, key=lambda one: -one.share)


def kind_of(plan: Plan) -> str:
    """Names the kind of a step."""
    if not len(plan):
        return "nothing"
    num_drafts = max((item.max_drafts for item in plan.verifies), default=0)
    kind = f"{num_drafts} drafts" if plan.verifies else "no drafts"
    kind += " behind drafts" if plan.is_late is not None else ""
    return kind + (", prompts" if plan.chunks else "")


harness = Harness(__file__, __doc__)
harness.flag("--streams", type=numbers, default=[1, 8, 64], help="requests, by commas")
harness.flag("--drafts", type=numbers, default=[0, 3, 5], help="a step, by commas")
harness.flag("--rounds", type=int, default=1, help="requests of each stream")
harness.flag("--tokens", type=int, default=160, help="of each request")
harness.flag("--temperature", type=float, default=0.0)
harness.flag("--model", default="demo", help="demo, or a directory of that shape")
harness.flag("--dummy-weights", action="store_true", help="drafts are never right then")
harness.flag("--json-answers", action="store_true", help="constrained, and long enough")
harness.flag("--kinds", default="", help="of text, by commas; default: all")
harness.flag("--device", default="cuda")


@harness.check
def complete(options: argparse.Namespace) -> None:
    """How all requests draw."""
    constraint = ANSWER if options.json_answers else None
    options.sampling = SamplingParams(temperature=options.temperature, constraint=constraint)


def open_engine(run: Run, *, has_prefixes: bool) -> tuple[LLM, list[list[int]]]:
    """An engine, and prompts."""
    options, model_dir = run.options, resolve_model(run.options.model)
    by_kind = read_prompts(PROMPTS, model_dir, 32)
    texts = [p for kind in options.kinds.split(",") if kind for p in by_kind[kind]]
    texts = texts or list(chain.from_iterable(by_kind.values()))
    settings: dict[str, Any] = {"dtype": resolve_dtype("auto", options.device)}
    settings |= {"device": options.device, "kv_memory_bytes": 4 << 30}
    settings |= {"prefix_cache": has_prefixes, "dummy_weights": options.dummy_weights}
    settings |= {"max_running_requests": max(options.streams)}
    if max(options.drafts):
        settings |= {"draft_dir": DRAFT, "drafter": "eagle3"}
        settings |= {"max_draft_tokens": max(options.drafts)}
    llm = run.stack.enter_context(LLM(model_dir, **settings))
    if options.json_answers:
        texts = lasting([ServedModel(llm, b"", options.sampling)], texts, options.tokens)
    gc.collect()
    gc.freeze()
    return llm, texts


@harness.part
def parts(run: Run) -> None:
    """Microseconds of a turn by part."""
    options = run.options
    llm, texts = open_engine(run, has_prefixes=False)
    watched = watch_engine(llm)
    for case in (Case(*case) for case in product(options.streams, options.drafts)):
        measure(llm, watched, texts, case, options)
        found = measure(llm, watched, texts, case, options)
        for beside, times in found.items():
            turns = times.pop("turns")
            for name in sorted(times) if turns else ():
                title = f"{turns:.0f} turns of {case.streams} streams, {case.drafts} drafts"
                title += ", beside prompts" * beside
                run.row(table=title, part=name, us=times[name])


@harness.part_if_named
def turns(run: Run) -> None:
    """Turns by what they begin, with the engine's own gate."""
    llm, texts = open_engine(run, has_prefixes=True)
    for streams in run.options.streams:
        for row in turns_by_kind(llm, texts, streams, run.options):
            run.row(row, table=f"{streams} streams")


if __name__ == "__main__":
    sys.exit(harness.main())
