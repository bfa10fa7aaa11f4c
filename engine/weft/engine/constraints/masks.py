"""Token masks of constrained samples, computed on the host while the model computes the logits."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xgrammar
from weft.engine.cores import num_cores
from weft.engine.errors import Internal, InvalidRequest, Overloaded, WeftError
from weft.engine.scheduler.plan import parents_of

if TYPE_CHECKING:
    from weft.engine.constraints.after_reasoning import AfterReasoning

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.uint32]
"""[ceil(vocab_size / 32)]: bit i % 32 of word i / 32 allows token i."""

Masks = list[Mask | None]
"""The masks of a sample in one step: of the next token, and of the one behind each of its drafts.
None: every token may come.
"""

SLOW_MASK_S = 0.05
"""CPU seconds beyond which a mask counts as slow: the whole batch waits for it."""
MAX_SLOW_S = 1.0
"""CPU seconds of all its slow masks beyond which a sample is ended."""
TIMEOUT_S = 3.0
"""Seconds after which a mask is given up; up to twice as many pass until that is noticed."""
TIMEOUT_TOGETHER_S = 1.0
"""Seconds after which masks that are computed together are computed one by one."""
TIMEOUT_BEHIND_LOST_S = 0.5
"""`TIMEOUT_S` for those left in a step in which one was given up: many may be as slow."""
TIMEOUT_STEP_S = 10.0
"""Seconds of a step beyond which all that is left is given up when a mask times out."""
NUM_ALONE = 16
"""Number of masks that a sample gets by itself after it was in a slow group."""
QUICK_S = 5e-3
"""Seconds of masks behind which the next ones are computed by the engine's thread itself: to wake
another one and to be woken by it takes longer.
"""
MAX_THREADS = 8
MASKS_OF_A_THREAD = 16
"""Number of masks for which another thread pays."""


class ConstraintState:
    """The position of one sample in its grammar: a function of the grammar and the tokens so far.

    Args:
        grammar: Compiled for the model's vocabulary.
        vocab_size: Vocabulary size of the model.
        is_tame: No mask of the grammar can take thousands of times as long as the one before.
    """

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, vocab_size: int, *, is_tame: bool = False
    ) -> None:
        self.grammar = grammar
        self._matcher: xgrammar.GrammarMatcher | None = None
        self._followed: list[int] = []
        self._slow_s = 0.0
        self.vocab_size = vocab_size
        self._is_tame = is_tame
        self.last_s = float("inf")
        """Seconds that its last masks took, with others of a group."""
        self.num_alone = 0
        """Number of masks that are to be computed by themselves, so that each is timed."""
        self.is_lost = False
        """It gets no mask any more: it is too slow, or a thread is still computing one and must not
        meet another one there.
        """

    @property
    def is_alone(self) -> bool:
        """Whether its next mask is to be computed by itself."""
        return self.is_lost or self.num_alone > 0

    @property
    def is_quick(self) -> bool:
        """Whether its next masks need no thread that can be left alone with them."""
        return self._is_tame and not self.is_lost and self.last_s < QUICK_S

    @property
    def num_accepted(self) -> int:
        """Number of tokens that it has followed."""
        return len(self._followed)

    @property
    def matcher(self) -> xgrammar.GrammarMatcher:
        """Behind the tokens that it has followed; of a group whose masks are computed, further."""
        if self._matcher is None:
            matcher = xgrammar.GrammarMatcher(self.grammar)
            for token in self._followed:
                matcher.accept_token(token)
            self._matcher = matcher
        return self._matcher

    def next_masks(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Masks:
        """Follows more tokens of the sample, then returns the masks of what may come behind them.

        Args:
            tokens: Those from `num_accepted` on.
            drafts: Drafts behind them, a chain or a `DraftTree`, which are not followed for good.

        Returns:
            New arrays, their bits from vocab_size on 0; of the next token, then behind each draft:
            none may come behind one that is not of the grammar, any behind what would follow that.

        Raises:
            Internal: A token is not of the grammar.
            InvalidRequest: The grammar takes too long to follow.
        """
        began = time.thread_time()
        for token in tokens:
            if not self.matcher.accept_token(token):
                raise self.not_of_grammar(token)
            self._followed.append(token)
        words = np.full((1 + len(drafts), -(-self.vocab_size // 32)), -1, np.int32)
        is_restricted = True
        if drafts and not self.matcher.is_terminated():
            first, following, ids = map(torch.from_numpy, _links(drafts))
            self.matcher.traverse_draft_tree(first, following, ids, torch.from_numpy(words))
        else:
            is_restricted = self.matcher.fill_next_token_bitmask(words)
        self.num_alone = max(0, self.num_alone - 1)
        self.last_s = taken_s = time.thread_time() - began
        self._slow_s += taken_s if taken_s > SLOW_MASK_S else 0.0
        if self._slow_s > MAX_SLOW_S:
            raise _too_slow()
        return list(_masks(words, self.vocab_size)) if is_restricted else [None]

    def not_of_grammar(self, token: int) -> Internal:
        """The error of a token that may not come."""
        message = f"token {token} behind {self.num_accepted} is not of the sample's grammar"
        return Internal(message, stage="decode")

    def keep(self, tokens: Sequence[int]) -> None:
        """Counts tokens that the matcher has accepted in a group as followed."""
        self._followed.extend(tokens)

    def go_alone(self) -> None:
        """Leaves the matcher, which others may still use, and goes on by itself for a while."""
        self._matcher = None
        self.num_alone = NUM_ALONE


def _masks(words: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.uint32]:
    """Masks from the words that xgrammar writes, whose last bits may be of no token."""
    if vocab_size % 32:
        words[:, -1] &= (1 << vocab_size % 32) - 1
    return words.view(np.uint32)


def _links(drafts: Sequence[int]) -> tuple[npt.NDArray[np.int64], ...]:
    """For the last token and each draft: the first that follows it, the next that follows the same
    one (-1: none), and its token (of the last one any).
    """
    first, following = (np.full(1 + len(drafts), -1, np.int64) for _ in range(2))
    newest: dict[int, int] = {}
    for row, parent in enumerate(parents_of(drafts), 1):
        if parent in newest:
            following[newest[parent]] = row
        else:
            first[parent] = row
        newest[parent] = row
    return first, following, np.array([0, *drafts], np.int64)


def _too_slow() -> InvalidRequest:
    message = "the grammar is too ambiguous: following it takes too long"
    return InvalidRequest(message, stage="decode", param="constraint")


def _none_in_time() -> Overloaded:
    message = "the grammars of other requests took too long to follow; try again"
    return Overloaded(message, stage="decode", retry_after_s=1.0)


class MaskJob(NamedTuple):
    """One constrained sample that draws a token in the current step."""

    state: ConstraintState | AfterReasoning
    tokens: Sequence[int]
    """Tokens since its last job; not changed until the masks are taken."""
    drafts: Sequence[int] = ()
    """Drafts behind them, of which each gets a mask too."""

    @property
    def is_alone(self) -> bool:
        """Whether its masks are to be computed by themselves."""
        return len(self.drafts) > 0 or self.state.is_alone


class MaskMaker:
    """Computes the masks of a step in a thread of its own; beside it, in the engine's thread, which
    uses it, quick ones that are awaited.

    All together; where that is slow, each by itself for a while, to find and end the sample that it
    is slow for.
    """

    def __init__(self) -> None:
        self._work: _Work | None = None
        """Of the thread; None: it has nothing to do."""
        self._is_quick: list[bool] = []
        """Whether the masks of each job are among the quick ones."""
        self._quick: list[Masks | WeftError] = []
        self._thread: _MaskThread | None = None

    def begin(self, jobs: Sequence[MaskJob], *, is_awaited: bool = False) -> None:
        """Starts on the masks of a step; those of the previous step must have been taken.

        Args:
            jobs: Of the step.
            is_awaited: The caller has nothing else to do until they are there.
        """
        self._is_quick = [is_awaited and job.state.is_quick for job in jobs]
        slow = [job for job, is_quick in zip(jobs, self._is_quick, strict=True) if not is_quick]
        if slow:
            self._work = _Work(slow)
            self._thread = self._thread or _MaskThread()
            self._work.give(self._thread)
        quick = [job for job, is_quick in zip(jobs, self._is_quick, strict=True) if is_quick]
        self._quick = _at_once(quick)

    def take(self) -> list[Masks | WeftError]:
        """Waits for the masks of each job; an error for each that failed."""
        if self._work is None:
            return self._quick
        work, self._work = self._work, None
        num_left, began = len(work.jobs), time.monotonic()
        while not work.is_done.wait(work.timeout_s):
            is_over = time.monotonic() - began > TIMEOUT_STEP_S
            if is_over or work.num_left == num_left:
                # The thread is left alone with what it is lost in.
                self.close()
                self._thread = None if is_over else _MaskThread()
                work.give(self._thread)
            num_left = work.num_left
        quick, slow = iter(self._quick), iter(work.results)
        return [next(quick) if own else next(slow) for own in self._is_quick]

    def close(self) -> None:
        """Stops the thread."""
        if self._thread is not None:
            self._thread.begin(None)
            self._thread = None


class _Work:
    """The masks of a step, which one thread computes in groups."""

    def __init__(self, jobs: Sequence[MaskJob]) -> None:
        self.jobs = jobs
        self.results: list[Masks | WeftError] = [[]] * len(jobs)
        self.is_done = threading.Event()
        self._left = dict.fromkeys(range(len(jobs)))
        """Indexes of the jobs without a result, in order."""
        self._group: list[int] = []
        """Jobs under way."""
        self._thread: _MaskThread | None = None
        self._has_lost = False
        self._lock = threading.Lock()

    @property
    def num_left(self) -> int:
        """Number of jobs without a result."""
        return len(self._left)

    @property
    def timeout_s(self) -> float:
        """Seconds in which some mask is expected."""
        # Several are computed at once, or will be.
        if sum(not self.jobs[index].is_alone for index in list(self._left)) > 1:
            return TIMEOUT_TOGETHER_S
        return TIMEOUT_BEHIND_LOST_S if self._has_lost else TIMEOUT_S

    def give(self, thread: _MaskThread | None) -> None:
        """Has a thread compute what is left, behind what another one is lost in: a single job is
        given up, those of a group are left to do, one by one. Without a thread all are given up.
        """
        with self._lock:
            self._thread, group, self._group = thread, self._group, []
            if len(group) == 1:
                logger.warning("a mask took too long: its sample is ended")
                self._lose(group[0], _too_slow())
            else:
                self._part(group)
            if thread is None:
                logger.warning("masks of a step took more than %g s", TIMEOUT_STEP_S)
                for index in list(self._left):
                    self._set(index, _none_in_time())
        if thread is not None:
            thread.begin(self)

    def run(self, thread: _MaskThread) -> None:
        """Computes all that is left, unless it was given to another thread than this one."""
        while group := self._next_group(thread):
            jobs = [self.jobs[index] for index in group]
            self._end(group, [_alone(jobs[0])] if len(jobs) == 1 else _together(jobs))

    def _next_group(self, thread: _MaskThread) -> list[int]:
        """Jobs to begin together; none: all have begun, or another thread goes on."""
        with self._lock:
            if thread is not self._thread:
                return []
            together = [index for index in self._left if not self.jobs[index].is_alone]
            self._group = together or list(self._left)[:1]
            return self._group

    def _end(self, group: list[int], masks: Sequence[Masks | WeftError] | None) -> None:
        """Takes the masks of a group; None: they have to be computed one by one."""
        with self._lock:
            if group is not self._group:
                return
            self._group = []
            if masks is None:
                self._part(group)
                return
            for index, found in zip(group, masks, strict=True):
                if len(group) > 1:
                    self.jobs[index].state.keep(self.jobs[index].tokens)
                if isinstance(found, InvalidRequest):
                    self._lose(index, found)
                else:
                    self._set(index, found)

    def _lose(self, index: int, error: InvalidRequest) -> None:
        """Ends a sample that is too slow, and those left whose grammar is the same: each would have
        the step wait as long.
        """
        self._has_lost = True
        grammar = self.jobs[index].state.grammar
        for other in [one for one in self._left if self.jobs[one].state.grammar is grammar]:
            self.jobs[other].state.is_lost = True
            self._set(other, error)

    def _part(self, group: list[int]) -> None:
        for index in group:
            self.jobs[index].state.go_alone()

    def _set(self, index: int, masks: Masks | WeftError) -> None:
        self.results[index] = masks
        del self._left[index]
        if not self._left:
            self.is_done.set()


class _MaskThread:
    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="masks", daemon=True).start()

    def begin(self, work: _Work | None) -> None:
        """Passes on the next work; None ends the thread after its current work."""
        self._orders.put(work)

    def _run(self) -> None:
        while (work := self._orders.get()) is not None:
            work.run(self)


def _at_once(jobs: Sequence[MaskJob]) -> list[Masks | WeftError]:
    """The masks of jobs whose states are quick."""
    if len(jobs) > 1 and not any(job.is_alone for job in jobs):
        found = _together(jobs)
        for job in jobs:
            if found is None:
                job.state.go_alone()
            else:
                job.state.keep(job.tokens)
        if found is not None:
            return found
    return [_alone(job) for job in jobs]


def _alone(job: MaskJob) -> Masks | WeftError:
    """The masks of a job, unless its state is another thread's for good."""
    if job.state.is_lost:
        return _too_slow()
    try:
        return job.state.next_masks(job.tokens, job.drafts)
    except WeftError as error:
        return error
    except Exception as error:  # whatever it is, it is this sample's alone
        logger.warning("a mask failed", exc_info=error)
        return Internal(f"no mask: {type(error).__name__}: {error}", stage="decode")


def _together(jobs: Sequence[MaskJob]) -> list[Masks | WeftError] | None:
    """The masks of several jobs without drafts, or None if one of them fails; changes nothing but
    the matchers.
    """
    began = time.monotonic()
    found: list[Masks | WeftError] = [[]] * len(jobs)
    try:
        allowed = []
        # All of them now: a thread that was left alone with one must not meet those that the others
        # go on with.
        matchers = [job.state.matcher for job in jobs]
        for place, ((state, tokens, _), matcher) in enumerate(zip(jobs, matchers, strict=True)):
            wrong = next((token for token in tokens if not matcher.accept_token(token)), None)
            if wrong is None:
                allowed.append((place, matcher))
            else:
                found[place] = state.not_of_grammar(wrong)
        vocab_size = jobs[0].state.vocab_size
        words = np.zeros((len(allowed), -(-vocab_size // 32)), np.int32)
        _fill([matcher for _, matcher in allowed], words)
    except Exception:  # one by one it shows whose it is
        return None
    for (place, _), mask in zip(allowed, _masks(words, vocab_size), strict=True):
        found[place] = [mask]
    taken_s = time.monotonic() - began
    for job in jobs:
        job.state.last_s = taken_s
        if taken_s > SLOW_MASK_S:
            job.state.num_alone = NUM_ALONE
    return found


def _fill(matchers: list[xgrammar.GrammarMatcher], words: npt.NDArray[np.int32]) -> None:
    """Writes the masks of the next tokens, [matchers, words of a mask], by some threads."""
    wanted = min(MAX_THREADS, num_cores() // 2, len(matchers) // MASKS_OF_A_THREAD)
    _filler(max(1, wanted), threading.get_ident()).batch_fill_next_token_bitmask(matchers, words)


@functools.lru_cache(maxsize=8)
def _filler(num_threads: int, thread: int) -> xgrammar.BatchGrammarMatcher:
    """Each thread has its own."""
    return xgrammar.BatchGrammarMatcher(num_threads)
