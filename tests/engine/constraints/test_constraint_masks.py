"""Masks of a step: made in a thread, together or each for itself, and never waited for without a
bound.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import xgrammar
from weft.engine.config import EngineConfig
from weft.engine.constraints import masks
from weft.engine.constraints.constraints import Constraints
from weft.engine.constraints.masks import ConstraintState, Mask, MaskJob, MaskMaker, Masks
from weft.engine.errors import Internal, InvalidRequest, Overloaded, WeftError
from weft.engine.request import Constraint, SamplingParams
from weft.engine.scheduler.plan import DraftTree, parents_of
from weft.engine.scheduler.state import State
from weft.testing.kernels.kernel_checks import fresh_seed

END = 256
VOCAB = 257
BYTES = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(END)] + [b"<end>"], vocab_size=VOCAB, stop_token_ids=[END]
)
PATTERNS = ["(ab|ac)*d", "[0-9]{1,3}(,[0-9]{1,3})*", "x+y?z", "(foo|bar|foobar)!", '[^"]*"']
Result = Masks | Exception


def grammar(pattern: str) -> xgrammar.CompiledGrammar:
    compiler = xgrammar.GrammarCompiler(BYTES, max_threads=1, cache_enabled=False)
    return compiler.compile_grammar(xgrammar.Grammar.from_regex(pattern))


def allowed(result: Result) -> set[int]:
    """What a sample without drafts may draw."""
    assert isinstance(result, list)
    (mask,) = result
    return tokens_of(mask)


def tokens_of(mask: Mask | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def random_drafts(followed: list[int], of: xgrammar.CompiledGrammar) -> list[int] | DraftTree:
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
    return DraftTree(drafts, parents) if is_tree else drafts


def path_to(row: int, drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The drafts that lead to a row, which is the last token (0) or a draft."""
    path: list[int] = []
    while row:
        path.insert(0, drafts[row - 1])
        row = parents[row - 1]
    return path


def next_tokens(of: xgrammar.CompiledGrammar, followed: Sequence[int]) -> set[int] | None:
    """What may come behind a text, by a matcher of its own; None: the text is wrong."""
    try:
        return allowed(ConstraintState(of, VOCAB).next_masks(followed))
    except Internal:
        return None


class Walk:
    """A sample of a random text of a pattern, and a state that follows it alone: the reference."""

    def __init__(self, pattern: str, *, is_tame: bool = False) -> None:
        self.grammar, self.is_tame = grammar(pattern), is_tame
        self.state = ConstraintState(self.grammar, VOCAB, is_tame=is_tame)
        self.followed: list[int] = []
        self.new: list[int] = []
        self.drafts: list[int] = []

    def job(self, *, has_drafts: bool = False) -> MaskJob:
        self.followed += self.new
        self.drafts = random_drafts(self.followed, self.grammar) if has_drafts else []
        return MaskJob(self.state, self.new, self.drafts)

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
            self.state = ConstraintState(self.grammar, VOCAB, is_tame=self.is_tame)
            self.followed, self.new = [], []


class Lost(ConstraintState):
    """A sample whose mask takes until `release` is set."""

    def __init__(
        self, release: threading.Event, of: xgrammar.CompiledGrammar | None = None
    ) -> None:
        super().__init__(of or grammar("a*"), VOCAB)
        self.release = release
        self.num_calls = 0

    def next_masks(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Masks:
        self.num_calls += 1
        self.release.wait(60)
        return super().next_masks(tokens, drafts)


def hang_with(
    monkeypatch: pytest.MonkeyPatch, matcher: xgrammar.GrammarMatcher, release: threading.Event
) -> None:
    """Makes groups that contain a matcher take until `release` is set."""
    fill = masks._fill

    def hanging(matchers: list[xgrammar.GrammarMatcher], words: npt.NDArray[np.int32]) -> None:
        if any(one is matcher for one in matchers):
            release.wait(60)
        fill(matchers, words)

    monkeypatch.setattr(masks, "_fill", hanging)


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
    jobs = [*(walk.job(has_drafts=random.random() < drafted) for walk in walks), *others]
    maker.begin(jobs, is_awaited=random.random() < 0.8)
    found: list[Result] = list(maker.take())
    for walk, mask in zip(walks, found, strict=False):
        walk.check(mask)
    return found[len(walks) :]


@pytest.mark.parametrize("drafted", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_masks_are_those_of_each_sample_alone(count: int, drafted: float) -> None:
    """Drafts are looked at, and change nothing about the sample."""
    fresh_seed()
    maker, share = MaskMaker(), random.choice([0.0, 0.5, 1.0])
    walks = [Walk(random.choice(PATTERNS), is_tame=random.random() < share) for _ in range(count)]
    for _ in range(40):
        turn(maker, random.sample(walks, random.randint(1, count)), drafted=drafted)
    maker.close()


def test_a_sample_that_fails_leaves_the_others_theirs() -> None:
    fresh_seed()
    maker, walks = MaskMaker(), [Walk(pattern) for pattern in PATTERNS]
    wrong, ended = (ConstraintState(grammar("ab"), VOCAB) for _ in range(2))
    turn(maker, walks, MaskJob(wrong, []), MaskJob(ended, []))
    (mask, error) = turn(maker, walks, MaskJob(ended, [*b"ab"]), MaskJob(wrong, [*b"b"]))
    assert allowed(mask) == {END}
    assert isinstance(error, Internal)
    assert "token 98 behind 0 " in error.message
    # Nothing comes behind the end: the matcher refuses to go on, as part of a group as well.
    (error,) = turn(maker, walks, MaskJob(ended, [END]))
    assert isinstance(error, Internal)
    for _ in range(20):
        turn(maker, walks)
    maker.close()


@pytest.mark.parametrize("is_quick", [True, False])
def test_whatever_fails_is_the_failure_of_its_sample(
    is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the thread either."""
    monkeypatch.setattr(masks, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(masks, "TIMEOUT_TOGETHER_S", 60.0)
    fresh_seed()
    maker, walks = MaskMaker(), [Walk(pattern, is_tame=is_quick) for pattern in PATTERNS]
    has_room = True

    class State(ConstraintState):
        @property
        def matcher(self) -> xgrammar.GrammarMatcher:
            if not has_room:
                raise MemoryError
            return super().matcher

    failing = State(grammar("ab"), VOCAB, is_tame=is_quick)
    turn(maker, walks, MaskJob(failing, []))
    has_room = False
    began = time.monotonic()
    (error,) = turn(maker, walks, MaskJob(failing, [*b"a"]))
    assert time.monotonic() - began < 30
    assert isinstance(error, Internal)
    assert "MemoryError" in error.message
    for _ in range(5):
        turn(maker, walks)
    maker.close()


def test_tokens_that_come_at_once_are_followed() -> None:
    maker, states = MaskMaker(), [ConstraintState(grammar("abc|abd"), VOCAB) for _ in range(2)]
    maker.begin([MaskJob(states[0], [*b"ab"]), MaskJob(states[1], [])])
    first, second = maker.take()
    assert allowed(first) == {*b"cd"}
    assert allowed(second) == {*b"a"}
    assert [state.num_accepted for state in states] == [2, 0]
    maker.close()


def test_a_grammar_that_never_answers_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    monkeypatch.setattr(masks, "TIMEOUT_S", 1.5)
    monkeypatch.setattr(masks, "TIMEOUT_TOGETHER_S", 0.1)
    release = threading.Event()
    lost, maker = Lost(release), MaskMaker()
    hang_with(monkeypatch, lost.matcher, release)
    walks = [Walk(pattern) for pattern in PATTERNS]
    turn(maker, walks)
    for _ in range(3):  # What is lost stays so: its thread is still there.
        (error,) = turn(maker, walks, MaskJob(lost, []))
        assert isinstance(error, InvalidRequest)
        assert error.param == "constraint"
    release.set()
    for _ in range(2 * masks.NUM_ALONE):
        turn(maker, walks)
    assert lost.num_calls == 1
    maker.close()


def test_samples_of_one_slow_grammar_are_given_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would have the step wait as long, again and again."""
    fresh_seed()
    monkeypatch.setattr(masks, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(masks, "TIMEOUT_TOGETHER_S", 0.1)
    release, maker, slow = threading.Event(), MaskMaker(), grammar("a*")
    alike = [Lost(release, slow) for _ in range(5)]
    hang_with(monkeypatch, alike[2].matcher, release)
    walks = [Walk(pattern) for pattern in PATTERNS]
    found = turn(maker, walks, *(MaskJob(one, []) for one in alike))
    assert all(isinstance(one, InvalidRequest) for one in found)
    assert sum(one.num_calls for one in alike) == 1
    assert all(one.is_lost for one in alike)
    release.set()
    turn(maker, walks)
    maker.close()


def test_a_step_of_many_slow_grammars_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(masks, "TIMEOUT_BEHIND_LOST_S", 0.3)
    monkeypatch.setattr(masks, "TIMEOUT_TOGETHER_S", 0.1)
    monkeypatch.setattr(masks, "TIMEOUT_STEP_S", 0.8)
    release, maker = threading.Event(), MaskMaker()
    slow = [Lost(release) for _ in range(12)]
    hang_with(monkeypatch, slow[0].matcher, release)
    maker.begin([MaskJob(one, []) for one in slow])
    found = list(maker.take())
    assert isinstance(found[0], InvalidRequest)
    assert isinstance(found[-1], Overloaded)
    assert all(isinstance(one, InvalidRequest | Overloaded) for one in found)
    # Those that were not begun have lost nothing but this step.
    assert not slow[-1].is_lost
    assert slow[-1].num_calls == 0
    release.set()
    walks = [Walk(pattern) for pattern in PATTERNS]
    (mask,) = turn(maker, walks, MaskJob(slow[-1], []))
    assert allowed(mask) == {*b"a", END}
    maker.close()


def test_a_group_that_is_given_up_goes_on_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    monkeypatch.setattr(masks, "TIMEOUT_TOGETHER_S", 0.1)
    monkeypatch.setattr(masks, "TIMEOUT_S", 60.0)  # Of one alone, also before any has begun.
    release, maker = threading.Event(), MaskMaker()
    walks = [Walk(pattern) for pattern in PATTERNS]
    for _ in range(5):
        turn(maker, walks)
    hang_with(monkeypatch, walks[0].state.matcher, release)
    states = [walk.state for walk in walks]
    turn(maker, walks)
    assert {state.num_alone for state in states} == {masks.NUM_ALONE - 1}
    # Its thread goes on, with matchers that nobody uses any more.
    release.set()
    for _ in range(3 * masks.NUM_ALONE):
        turn(maker, walks)
    maker.close()


def test_a_thread_that_is_left_alone_meets_nobody_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was following the first sample of a group, and then follows the others."""
    fresh_seed()
    monkeypatch.setattr(masks, "TIMEOUT_TOGETHER_S", 0.1)
    is_given_up, has_ended = threading.Event(), threading.Event()
    give, together = masks._Work.give, masks._together

    class Held:
        """A matcher that takes a token once its group was given up."""

        def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
            self.accept = matcher.accept_token

        def accept_token(self, token: int) -> bool:
            assert is_given_up.wait(60)
            return bool(self.accept(token))

    class Later(ConstraintState):
        """Its matcher is made anew only when the old thread has ended."""

        @property
        def matcher(self) -> xgrammar.GrammarMatcher:
            if is_given_up.is_set() and self._matcher is None:
                assert has_ended.wait(60)
            return super().matcher

    def noted_give(work: masks._Work, thread: masks._MaskThread) -> None:
        give(work, thread)
        if work._left and all(work.jobs[index].state.num_alone for index in [*work._left]):
            is_given_up.set()

    def noted_together(jobs: Sequence[MaskJob]) -> list[Masks | WeftError] | None:
        try:
            return together(jobs)
        finally:
            if is_given_up.is_set():
                has_ended.set()

    maker, first = MaskMaker(), Walk("[a-z]{200}")
    first.state = Later(first.grammar, VOCAB)
    walks = [first, *(Walk(pattern) for pattern in PATTERNS)]
    for _ in range(3):
        turn(maker, walks)
    first.state._matcher = Held(first.state.matcher)  # type: ignore[assignment]
    monkeypatch.setattr(masks._Work, "give", noted_give)
    monkeypatch.setattr(masks, "_together", noted_together)
    for _ in range(2 * masks.NUM_ALONE):
        turn(maker, walks)
    assert has_ended.is_set()
    maker.close()


def test_what_is_not_begun_is_not_taken() -> None:
    """A step whose masks could not be begun fails; the next one has nothing of it."""
    constraints = Constraints(EngineConfig(model_dir=Path("model")), VOCAB, [END], lambda: None)

    def begin(jobs: Sequence[MaskJob], *, is_awaited: bool) -> None:
        raise MemoryError

    request = SimpleNamespace(
        key=1,
        sample=0,
        params=SamplingParams(constraint=Constraint(kind="regex", text="a*")),
        state=State.RUNNING,
        tokens=[5],
        num_prompt_tokens=1,
    )
    constraints._grammars[1] = grammar("a*")  # type: ignore[index]
    for _ in range(2):
        constraints._maker = MaskMaker()
        constraints.begin_masks([request])  # type: ignore[list-item]
        ((_, found),) = constraints.take_masks()
        assert allowed(found) == {*b"a", END}
        constraints._maker.begin = begin  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            constraints.begin_masks([request])  # type: ignore[list-item]
        assert constraints.take_masks() == []


def test_a_sample_whose_masks_are_slow_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, states = MaskMaker(), [ConstraintState(grammar("a*"), VOCAB) for _ in range(2)]
    maker.begin([MaskJob(state, []) for state in states])
    assert [allowed(mask) for mask in maker.take()] == 2 * [{*b"a", END}]
    monkeypatch.setattr(masks, "SLOW_MASK_S", 0.0)
    monkeypatch.setattr(masks, "MAX_SLOW_S", 1e-3)
    num_masks, found = 0, list[Result]()
    while not any(isinstance(mask, InvalidRequest) for mask in found):
        maker.begin([MaskJob(state, [*b"a"]) for state in states])
        found, num_masks = list(maker.take()), num_masks + 1
        assert num_masks < 1_000
    # What takes a microsecond or some adds up.
    assert num_masks > 3
    maker.close()


def test_many_masks_may_take_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "TIMEOUT_S", 1.0)

    class Slow(ConstraintState):
        is_alone = True

        def next_masks(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Masks:
            time.sleep(0.4)
            return super().next_masks(tokens, drafts)

    maker = MaskMaker()
    texts = [b"a", b"c", b"", b"a", b"c"]
    maker.begin([MaskJob(Slow(grammar("ab|cd"), VOCAB), [*text]) for text in texts])
    wanted = [{*next_ones} for next_ones in (b"b", b"d", b"ac", b"b", b"d")]
    assert [allowed(mask) for mask in maker.take()] == wanted
    maker.close()


@pytest.mark.parametrize("is_tame", [True, False])
def test_quick_masks_that_are_waited_for_need_no_other_thread(
    is_tame: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones do, and those behind slow ones; and all of grammars that may become slow."""
    here, threads = threading.current_thread(), list[threading.Thread]()

    class Noted(ConstraintState):
        def next_masks(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Masks:
            threads.append(threading.current_thread())
            return super().next_masks(tokens, drafts)

    maker, state = MaskMaker(), Noted(grammar("a*"), VOCAB, is_tame=is_tame)
    for index in range(6):
        monkeypatch.setattr(masks, "QUICK_S", 0.0 if index == 3 else 10.0)
        maker.begin([MaskJob(state, [*b"a"] if index else [])], is_awaited=index != 4)
        (found,) = maker.take()
        assert allowed(found) == {*b"a", END}
    quick = [False, True, True, False, False, True]
    assert [thread is here for thread in threads] == [is_tame and one for one in quick]
    maker.close()
