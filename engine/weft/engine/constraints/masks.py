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
from llguidance import LLExecutor, LLMatcher
from weft.engine.constraints.constraints import TOO_SLOW
from weft.engine.cores import num_cores
from weft.engine.errors import Internal, InvalidRequest, WeftError
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

SLOW_MASK_S = 5e-3
"""CPU seconds beyond which a mask counts as slow; llguidance ends it at about 20 ms."""
MAX_SLOW_S = 1.0
"""CPU seconds of all its slow masks beyond which a sample is ended."""
SLOW_TOGETHER_S = 2e-2
"""Seconds beyond which masks that are computed together are timed one by one for a while."""
NUM_ALONE = 16
"""Number of masks that a sample gets by itself after it was in a slow group."""
MAX_THREADS = 8
MASKS_OF_A_THREAD = 16
"""Number of masks for which another thread pays."""
_WRONG_TOKEN = ("doesn't satisfy the grammar", "parser stopped in consume_token")
"""In messages of llguidance about tokens that may not come; all others are about its limits."""


class ConstraintState:
    """The position of one sample in its grammar: a function of the grammar and the tokens so far.

    Args:
        grammar: At the beginning of a text.
        vocab_size: Vocabulary size of the model.
        eos_token_ids: Tokens that end a text; a matcher never sees them.
    """

    def __init__(self, grammar: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = grammar.deep_copy()
        self._eos_token_ids = eos_token_ids
        self._slow_s = 0.0
        self.num_words = -(-vocab_size // 32)
        self.num_accepted = 0
        """Number of tokens that it has followed."""
        self.num_alone = 0
        """Number of masks that are to be computed by themselves, so that each is timed."""
        self.is_lost = False
        """It gets no mask any more: its grammar is too slow."""

    @property
    def matcher(self) -> LLMatcher:
        """The matcher, after it has consumed all tokens of the sample so far."""
        return self._matcher

    def follow(self, tokens: Sequence[int]) -> None:
        """Follows more tokens of the sample.

        Args:
            tokens: Those from `num_accepted` on.

        Raises:
            Internal: A token is not of the grammar.
            InvalidRequest: The grammar takes too long to follow.
        """
        if self.is_lost:
            raise _too_slow()
        for token in tokens:
            if token in self._eos_token_ids or not self._matcher.consume_token(token):
                told = self._matcher.get_error()
                if not any(wrong in told for wrong in _WRONG_TOKEN):
                    self.check()
                message = f"token {token} behind {self.num_accepted} is not of the sample's grammar"
                raise Internal(message, stage="decode")
            self.num_accepted += 1

    def check(self) -> None:
        """Raises InvalidRequest if the grammar takes too much, or no text goes on from here."""
        if not self._matcher.is_error():
            return
        if "NoExtension" not in self._matcher.get_error():
            raise _too_slow()
        message = "no text satisfies it that goes on from here"
        raise InvalidRequest(message, stage="decode", param="constraint")

    def next_masks(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Masks:
        """Follows more tokens of the sample, then returns the masks of what may come behind them.

        Args:
            tokens: Those from `num_accepted` on.
            drafts: Drafts behind them, a chain or a `DraftTree`, which are not followed for good.

        Returns:
            New arrays, their bits from vocab_size on 0; of the next token, then behind each draft:
            none may come behind one that is not of the grammar.

        Raises:
            Internal: A token is not of the grammar.
            InvalidRequest: The grammar takes too long to follow.
        """
        began = time.thread_time()
        self.follow(tokens)
        words = np.zeros((1 + len(drafts), self.num_words), np.uint32)
        self._fill(words[0])
        if drafts:
            self._fill_behind(drafts, words)
        self.num_alone = max(0, self.num_alone - 1)
        taken_s = time.thread_time() - began
        if taken_s > SLOW_MASK_S * len(words):
            self._slow_s += taken_s
        if self._slow_s > MAX_SLOW_S:
            raise _too_slow()
        return list(words)

    def _fill(self, row: npt.NDArray[np.uint32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.check()

    def _fill_behind(self, drafts: Sequence[int], words: npt.NDArray[np.uint32]) -> None:
        """Writes the mask behind each draft into its row, from one to the next of them."""
        paths: list[list[int] | None] = [[]]
        """Rows that lead to each row, itself included; None: the grammar does not allow them."""
        behind: list[int] = []
        """Those that the matcher has followed."""
        for row, (token, parent) in enumerate(zip(drafts, parents_of(drafts), strict=True), 1):
            before = paths[parent]
            is_allowed = words[parent, token // 32] >> token % 32 & 1
            if before is None or not is_allowed or token in self._eos_token_ids:
                paths.append(None)
                continue
            path = [*before, row]
            paths.append(path)
            self._go_from(behind, path, drafts)
            self._fill(words[row])
            behind = path
        self._go_from(behind, [], drafts)

    def _go_from(self, behind: list[int], path: list[int], drafts: Sequence[int]) -> None:
        """Has the matcher follow a path of drafts instead of the one that it is behind."""
        same = 0
        while same < min(len(behind), len(path)) and behind[same] == path[same]:
            same += 1
        if len(behind) > same:
            self._matcher.rollback(len(behind) - same)
        for row in path[same:]:
            self._matcher.consume_token(drafts[row - 1])
        self.check()


def _too_slow() -> InvalidRequest:
    return InvalidRequest(TOO_SLOW, stage="decode", param="constraint")


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
        return len(self.drafts) > 0 or self.state.num_alone > 0 or self.state.is_lost


class MaskMaker:
    """Computes the masks of a step: in a thread of its own while the model computes, or at once
    where the caller would only wait for them.
    """

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Sequence[MaskJob] | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[list[Masks | WeftError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, jobs: Sequence[MaskJob], *, is_awaited: bool = False) -> None:
        """Starts on the masks of a step; those of the previous step must have been taken.

        Args:
            jobs: Of the step.
            is_awaited: The caller has nothing else to do until they are there.
        """
        if is_awaited:
            self._made.put(_masks_of(jobs))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            self._thread.start()
        self._orders.put(jobs)

    def take(self) -> list[Masks | WeftError]:
        """Waits for the masks of each job; an error for each that failed."""
        return self._made.get()

    def close(self) -> None:
        """Stops the thread."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread = None

    def _run(self) -> None:
        while (jobs := self._orders.get()) is not None:
            self._made.put(_masks_of(jobs))


def _masks_of(jobs: Sequence[MaskJob]) -> list[Masks | WeftError]:
    """The masks of each job; those that need not be timed together."""
    found: list[Masks | WeftError] = [[]] * len(jobs)
    together = [place for place, job in enumerate(jobs) if not job.is_alone]
    alone = [place for place, job in enumerate(jobs) if job.is_alone]
    if len(together) < 2:
        alone, together = sorted(together + alone), []
    for place in alone:
        found[place] = _alone(jobs[place])
    for place, masks in zip(together, _together([jobs[p] for p in together]), strict=True):
        found[place] = masks
    return found


def _alone(job: MaskJob) -> Masks | WeftError:
    try:
        return job.state.next_masks(job.tokens, job.drafts)
    except Exception as error:  # whatever it is, it is this sample's alone
        return _failure(error)


def _failure(error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    logger.warning("a mask failed", exc_info=error)
    return Internal(f"no mask: {type(error).__name__}: {error}", stage="decode")


def _together(jobs: Sequence[MaskJob]) -> list[Masks | WeftError]:
    """The masks of several jobs without drafts, by several threads if they are many."""
    if not jobs:
        return []
    began = time.monotonic()
    found: list[Masks | WeftError] = [[]] * len(jobs)
    allowed: list[tuple[LLMatcher, int]] = []
    for place, job in enumerate(jobs):
        try:
            job.state.follow(job.tokens)
            allowed.append((job.state.matcher, place))
        except Exception as error:
            found[place] = _failure(error)
    words = np.zeros((len(jobs), jobs[0].state.num_words), np.uint32)
    _fill(allowed, words)
    for _, place in allowed:
        try:
            jobs[place].state.check()
            found[place] = [words[place]]
        except WeftError as error:
            found[place] = error
    if time.monotonic() - began > SLOW_TOGETHER_S:
        for job in jobs:
            job.state.num_alone = NUM_ALONE
    return found


def _fill(matchers: list[tuple[LLMatcher, int]], words: npt.NDArray[np.uint32]) -> None:
    """Writes the mask of each matcher into its row."""
    wanted = min(MAX_THREADS, num_cores() // 2, len(matchers) // MASKS_OF_A_THREAD)
    if wanted > 1:
        row_bytes = words.shape[1] * 4
        _executor(wanted).unsafe_compute_mask_ptr(
            matchers, words.ctypes.data, row_bytes, len(words)
        )
        return
    for matcher, place in matchers:
        row = words[place]
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


@functools.lru_cache(maxsize=MAX_THREADS)
def _executor(num_threads: int) -> LLExecutor:
    return LLExecutor(num_threads)
