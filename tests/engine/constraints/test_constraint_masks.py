"""Masks of a step: made together or each for itself, by a thread or at once, and bounded."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from weft.contract.errors import Internal, InvalidRequest
from weft.contract.request import Constraint, SamplingParams
from weft.engine.base.config import EngineConfig
from weft.engine.base.token_trees import TokenTree, parents_of
from weft.engine.executor.graphs import without_collection
from weft.engine.features.constraints import grammar_state, masks
from weft.engine.features.constraints.constraints import Constraints
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.grammar_state import ChargedTime, ConstraintState
from weft.engine.features.constraints.masks import (
    MaskJob,
    MaskMaker,
)
from weft.engine.features.constraints.vocabulary import tokenizer_of
from weft.engine.requests.request import State
from weft.engine.scheduler.ports import Mask, MaskRows, Masks
from weft.testing.kernels.kernel_checks import fresh_seed

END = 256
VOCAB = 257
SOURCE = GrammarSource(tokenizer_of([*(bytes([byte]) for byte in range(END)), b""], [END]))
PATTERNS = ["(ab|ac)*d", "[0-9]{1,3}(,[0-9]{1,3})*", "x+y?z", "(foo|bar|foobar)!", '[^"]*"']
Result = Masks | Exception


def grammar(pattern: str) -> LLMatcher:
    return SOURCE.compile(Constraint(kind="regex", text=pattern))


def state_of(of: LLMatcher) -> ConstraintState:
    return ConstraintState(of, VOCAB, frozenset({END}))


def allowed(result: Result) -> set[int]:
    """What a sample without drafts may draw."""
    assert isinstance(result, list)
    (mask,) = result
    return tokens_of(mask)


def tokens_of(mask: Mask | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def random_drafts(followed: list[int], of: LLMatcher) -> list[int] | TokenTree:
    """Chains and trees, many of whose tokens the grammar allows."""
    count, is_tree = random.randint(1, 7), random.random() < 0.5
    parents = [random.randint(0, row) if is_tree else row for row in range(count)]
    drafts: list[int] = []
    for parent in parents:
        path = followed + path_to(parent, drafts, parents)
        may_come = None if END in path else next_tokens(of, path)
        is_wrong = not may_come or random.random() < 0.2
        drafts.append(
            random.randrange(VOCAB) if is_wrong else random.choice(sorted(may_come or ()))
        )
    return TokenTree(drafts, parents) if is_tree else drafts


def path_to(row: int, drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The drafts that lead to a row, which is the last token (0) or a draft."""
    path: list[int] = []
    while row:
        path.insert(0, drafts[row - 1])
        row = parents[row - 1]
    return path


def next_tokens(of: LLMatcher, followed: Sequence[int]) -> set[int] | None:
    """What may come behind a text, by a matcher of its own; None: the text is wrong."""
    try:
        return allowed(state_of(of).next_masks(followed))
    except Internal:
        return None


class Walk:
    """A sample of a random text of a pattern, and a state that follows it alone: the reference."""

    def __init__(self, pattern: str, of: LLMatcher | None = None) -> None:
        self.grammar = of or grammar(pattern)
        self.state = state_of(self.grammar)
        self.followed: list[int] = []
        self.new: list[int] = []
        self.drafts: list[int] = []

    def job(self, slot: int, *, has_drafts: bool = False) -> MaskJob:
        self.followed += self.new
        self.drafts = random_drafts(self.followed, self.grammar) if has_drafts else []
        return MaskJob(self.state, self.new, self.drafts, slot)

    def check(self, masks: Result) -> None:
        """Compares masks, and draws the next token; a text that ends begins anew."""
        assert isinstance(masks, list)
        assert len(masks) == 1 + len(self.drafts)
        for row, mask in enumerate(masks):
            path = path_to(row, self.drafts, parents_of(self.drafts))
            if END in path[:-1]:
                continue
            before = next_tokens(self.grammar, self.followed + path[:-1])
            if before is None:
                continue  # Whatever may come behind what may not.
            if not path or (path[-1] in before and path[-1] != END):
                assert tokens_of(mask) == next_tokens(self.grammar, self.followed + path)
            else:
                assert not tokens_of(mask)
        self.new = [random.choice(sorted(tokens_of(masks[0])))]
        if self.new == [END]:
            self.state = state_of(self.grammar)
            self.followed, self.new = [], []


def made(maker: MaskMaker, jobs: Sequence[MaskJob], *, is_awaited: bool = True) -> list[Result]:
    """Has masks made, and checks that rows of other slots stay as they are."""
    before = np.full((50, -(-VOCAB // 32)), random.getrandbits(32), np.uint32)
    rows = before.copy()
    maker.begin(jobs, random.choice([rows, None]), is_awaited=is_awaited)
    found, results = maker.take(), list[Result]()
    for job, one in zip(jobs, found, strict=True):
        results.append([rows[job.slot]] if one is None else one)
    others = [slot for slot in range(50) if slot not in {job.slot for job in jobs}]
    assert (rows[others] == before[others]).all()
    return results


def turn(
    maker: MaskMaker, walks: Sequence[Walk], *others: MaskJob, drafted: float = 0.0
) -> list[Result]:
    """Has a step's masks made, checks those of walks and returns the others.

    Args:
        maker: Makes them.
        walks: Samples.
        others: Jobs beside them.
        drafted: Share of the walks that have drafts.
    """
    slots = random.sample(range(-1, 50), len(walks) + len(others))
    jobs = [
        *(walk.job(slots.pop(), has_drafts=random.random() < drafted) for walk in walks),
        *(job._replace(slot=slots.pop()) for job in others),
    ]
    found = made(maker, jobs, is_awaited=random.random() < 0.8)
    for walk, mask in zip(walks, found, strict=False):
        walk.check(mask)
    return found[len(walks) :]


@pytest.mark.parametrize("drafted", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_masks_are_those_of_each_sample_alone(
    count: int, drafted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are looked at, and change nothing about the sample."""
    fresh_seed()
    monkeypatch.setattr(masks, "num_cores", lambda: random.choice([1, 8]))
    monkeypatch.setattr(masks, "MIN_SHARED", random.choice([2, 16]))
    monkeypatch.setattr(masks, "MIN_GRAMMARS", random.choice([1, 4]))
    maker, grammars = MaskMaker(), {pattern: grammar(pattern) for pattern in PATTERNS}
    walks = [
        Walk(pattern, random.choice([None, grammars[pattern]]))
        for pattern in random.choices(PATTERNS, k=count)
    ]
    for _ in range(40):
        turn(maker, random.sample(walks, random.randint(1, count)), drafted=drafted)
    maker.close()


def test_a_sample_that_fails_leaves_the_others_theirs() -> None:
    fresh_seed()
    maker, walks = MaskMaker(), [Walk(pattern) for pattern in PATTERNS]
    wrong, ended = (state_of(grammar("ab")) for _ in range(2))
    turn(maker, walks, MaskJob(wrong, []), MaskJob(ended, []))
    (mask, error) = turn(maker, walks, MaskJob(ended, [*b"ab"]), MaskJob(wrong, [*b"b"]))
    assert allowed(mask) == {END}
    assert isinstance(error, Internal)
    assert "token 98 behind 0 " in error.message
    # Nothing comes behind the end.
    (error,) = turn(maker, walks, MaskJob(ended, [END]))
    assert isinstance(error, Internal)
    for _ in range(20):
        turn(maker, walks)
    maker.close()


@pytest.mark.parametrize("num_others", [0, 5])
def test_whatever_fails_is_the_failure_of_its_sample(
    num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    maker, walks = MaskMaker(), [Walk(pattern) for pattern in PATTERNS[:num_others]]
    failing = state_of(grammar("ab"))
    turn(maker, walks, MaskJob(failing, []))
    # Several tokens, as behind drafts: a single one is followed together with those of others.

    def fail(tokens: Sequence[int]) -> None:
        raise MemoryError

    monkeypatch.setattr(failing, "follow", fail)
    (error,) = turn(maker, walks, MaskJob(failing, [*b"ab"]))
    assert isinstance(error, Internal)
    assert "MemoryError" in error.message
    for _ in range(5):
        turn(maker, walks)
    maker.close()


def test_a_thread_that_fails_fails_the_step_that_takes_its_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker, walks = MaskMaker(), [Walk(pattern) for pattern in PATTERNS]

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(maker, "_masks_of", fail)
        maker.begin([walks[0].job(0)], None, is_awaited=False)
        with pytest.raises(MemoryError):
            maker.take()
    for _ in range(5):
        turn(maker, walks)
    maker.close()


def test_tokens_that_come_at_once_are_followed() -> None:
    maker, states = MaskMaker(), [state_of(grammar("abc|abd")) for _ in range(2)]
    jobs = [MaskJob(states[0], [*b"ab"], (), 3), MaskJob(states[1], [], (), 1)]
    first, second = made(maker, jobs)
    assert allowed(first) == {*b"cd"}
    assert allowed(second) == {*b"a"}
    assert [state.num_accepted for state in states] == [2, 0]
    maker.close()


ATTACKS = [
    "((a{1,100}){1,100}){1,100}",
    "(a?){1000}a{1000}",
    "(a|a?)+(b|c)*" * 1000,
    "(a|b)*a(a|b){30}",
    ".*a.{300}b.{300}",
]


@pytest.mark.parametrize("pattern", ATTACKS)
def test_a_grammar_that_takes_too_much_has_a_bound(pattern: str) -> None:
    """It is compiled in moments or not at all; each mask takes some milliseconds, or is the end."""
    began = time.thread_time()
    try:
        state = state_of(grammar(pattern))
    except ValueError:
        return
    finally:
        assert time.thread_time() - began < 3.0
    tokens: list[int] = []
    for _ in range(200):
        began = time.thread_time()
        try:
            (mask,) = state.next_masks(tokens)
        except InvalidRequest:
            return
        finally:
            assert time.thread_time() - began < 1.0
        may_come = sorted(tokens_of(mask) - {END})
        if not may_come:
            return
        tokens = [random.choice(may_come)]


def test_what_is_not_begun_is_not_taken() -> None:
    """A step whose masks could not be begun fails; the next one has nothing of it."""
    constraints = Constraints(EngineConfig(model_dir=Path("model")), VOCAB, [END], lambda: None)

    def begin(jobs: Sequence[MaskJob], rows: MaskRows | None, **how: object) -> None:
        raise MemoryError

    class Sample:
        key, sample, slot, state = 1, 0, 0, State.RUNNING
        params = SamplingParams(constraint=Constraint(kind="regex", text="a*"))
        tokens: Sequence[int] = (5,)
        num_prompt_tokens = 1

    request = Sample()
    constraints.grammars[1] = grammar("a*")  # type: ignore[index]
    for _ in range(2):
        constraints._maker = MaskMaker()
        constraints.begin_masks([request])  # type: ignore[list-item]
        ((_, found),) = constraints.take_masks()
        assert found is not None
        assert allowed(found) == {*b"a", END}
        constraints._maker.begin = begin  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            constraints.begin_masks([request])  # type: ignore[list-item]
        assert constraints.take_masks() == []


class Drawing:
    """A running request with a constraint, whose texts go on at random."""

    num_prompt_tokens = 2

    def __init__(self, number: int, slot: int) -> None:
        self.key, self.sample, self.slot, self.state = number, 0, slot, State.RUNNING
        text = random.choice(PATTERNS)
        self.params = SamplingParams(constraint=Constraint(kind="regex", text=text))
        self.grammar = grammar(text)
        self.tokens = [7, 8]

    def draw(self, words: Mask) -> None:
        """Checks a mask, and takes a token of it."""
        may_come = next_tokens(self.grammar, self.tokens[2:])
        assert tokens_of(words) == may_come
        assert may_come
        self.tokens.append(random.choice(sorted(may_come)))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_requests_come_go_and_change_their_slots(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the same requests share what was prepared; each mask is that of its own text."""
    fresh_seed()
    monkeypatch.setattr(masks, "MIN_SHARED", 2)
    monkeypatch.setattr(masks, "MIN_GRAMMARS", 2)
    monkeypatch.setattr(masks, "MIN_MEMBERS", 2)
    for limit in ("SLOW_TOGETHER_S", "SLOW_MASK_S"):  # A busy machine makes any group slow.
        monkeypatch.setattr(masks, limit, math.inf)
    constraints = Constraints(EngineConfig(model_dir=Path("model")), VOCAB, [END], lambda: None)
    constraints._maker = MaskMaker(num_threads)
    free, running, num_shared = list(range(40)), list[Any](), 0
    rows = np.zeros((40, -(-VOCAB // 32)), np.uint32)
    for step in range(120):
        if step % 8 == 0:
            random.shuffle(free)
            for request in running[:2]:  # Preempted, and back at once.
                free.append(request.slot)
                request.slot = free.pop(0)
            for _ in range(random.randint(1, 4)):
                running.append(Drawing(100 * step + len(running), free.pop(0)))
                constraints.grammars[running[-1].key] = running[-1].grammar
        group = constraints._group
        is_awaited = random.random() < 0.5
        constraints.begin_masks(running, rows=lambda: rows, is_awaited=is_awaited)
        num_shared += group is not None and constraints._group is group
        found: dict[Any, Any] = dict(constraints.take_masks())
        going_on = [request for request in running if request.state is State.RUNNING]
        assert set(found) == set(going_on)
        for request in going_on:
            words = found[request]
            request.draw(rows[request.slot] if words is None else words[0])
            if request.tokens[-1] == END or random.random() < 0.02:
                # Ended requests may be in the step that follows.
                request.state = State.FINISHED
                constraints.end(request, is_last=True)
        for request in set(running) - set(going_on):
            running.remove(request)
            free.append(request.slot)
    assert num_shared > 10
    constraints.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_sample_whose_masks_are_slow_is_ended(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are computed together are timed one by one once they take long."""
    maker, states = MaskMaker(), [state_of(grammar("a*")) for _ in range(count)]
    jobs = [MaskJob(state, [], (), slot) for slot, state in enumerate(states)]
    assert [allowed(mask) for mask in made(maker, jobs)] == count * [{*b"a", END}]
    monkeypatch.setattr(masks, "SLOW_MASK_S", 0.0)
    monkeypatch.setattr(grammar_state, "SLOW_MASK_S", 0.0)
    monkeypatch.setattr(grammar_state, "MAX_SLOW_S", 1e-3)
    num_masks, found = 0, list[Result]()
    with without_collection():  # Which may take longer than all masks.
        while not any(isinstance(mask, InvalidRequest) for mask in found):
            jobs = [MaskJob(state, [*b"a"], (), slot) for slot, state in enumerate(states)]
            found, num_masks = made(maker, jobs), num_masks + 1
            assert num_masks < 2_000
    # What takes a microsecond or some adds up.
    assert num_masks > 3
    maker.close()


def test_many_samples_of_a_request_may_not_slow_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No mask alone is slow. The samples of other requests go on."""
    monkeypatch.setattr(masks, "SLOW_STEP_S", 0.0)
    monkeypatch.setattr(masks, "MAX_CHARGED_S", 5e-3)
    maker, charged, slow = MaskMaker(), ChargedTime(), grammar("(a*)")
    states = [ConstraintState(slow, VOCAB, frozenset({END}), charged) for _ in range(8)]
    other = state_of(grammar("a*"))
    other.charged.seconds = -1e9
    states.append(other)
    for state in states:
        state.num_alone = 1 << 30  # Each is timed.
    found, num_masks = list[Result](), 0
    while not any(isinstance(mask, InvalidRequest) for mask in found):
        jobs = [MaskJob(state, [*b"a"] if num_masks else []) for state in states]
        found, num_masks = made(maker, jobs), num_masks + 1
        assert num_masks < 10_000
    assert [isinstance(mask, InvalidRequest) for mask in found] == [True] * 8 + [False]
    assert num_masks > 1
    maker.close()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_masks_that_are_waited_for_need_no_other_thread(is_awaited: bool) -> None:
    threads = list[threading.Thread]()

    class Noted(ConstraintState):
        def next_masks(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Masks:
            threads.append(threading.current_thread())
            return super().next_masks(tokens, drafts)

    maker, state = MaskMaker(), Noted(grammar("a*"), VOCAB, frozenset({END}))
    for index in range(3):
        maker.begin([MaskJob(state, [*b"a"] if index else [])], is_awaited=is_awaited)
        (found,) = maker.take()
        assert allowed(found) == {*b"a", END}
    assert all((thread is threading.current_thread()) == is_awaited for thread in threads)
    maker.close()
