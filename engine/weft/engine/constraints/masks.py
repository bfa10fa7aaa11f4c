"""Token masks of constrained samples, computed on the host while the model computes the logits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xgrammar
from weft.engine.errors import Internal, InvalidRequest, WeftError

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.uint32]
"""[ceil(vocab_size / 32)]: bit i % 32 of word i / 32 allows token i."""

SLOW_MASK_S = 0.05
"""CPU seconds beyond which a mask counts as slow: the whole batch waits for it."""
MAX_SLOW_MASKS = 16
"""Number of slow masks beyond which a sample is ended."""
TIMEOUT_S = 3.0
"""Seconds after which a mask is given up; up to twice as many pass until that is noticed."""


class ConstraintState:
    """The position of one sample in its grammar: a function of the grammar and the tokens so far.

    Args:
        grammar: Compiled for the model's vocabulary.
        vocab_size: Vocabulary size of the model.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocab_size = vocab_size
        self.num_accepted = 0
        """Number of tokens that it has followed."""
        self.is_lost = False
        """A thread is still computing its mask, and must not meet another one there."""
        self._num_slow = 0

    def next_mask(self, tokens: Sequence[int]) -> Mask | None:
        """Follows more tokens of the sample, then returns the mask of the next one.

        Args:
            tokens: Those from `num_accepted` on.

        Returns:
            A new array, its bits from vocab_size on 0; None: every token may come.

        Raises:
            Internal: A token is not of the grammar.
            InvalidRequest: The grammar takes too long to follow.
        """
        began = time.thread_time()
        for token in tokens:
            if not self._matcher.accept_token(token):
                message = f"token {token} at {self.num_accepted} is not of the sample's grammar"
                raise Internal(message, stage="decode")
            self.num_accepted += 1
        words = np.zeros((1, -(-self._vocab_size // 32)), np.int32)
        is_restricted = self._matcher.fill_next_token_bitmask(words)
        self._num_slow += time.thread_time() - began > SLOW_MASK_S
        if self._num_slow > MAX_SLOW_MASKS:
            raise _too_slow()
        return words.view(np.uint32)[0] if is_restricted else None


def _too_slow() -> InvalidRequest:
    message = "the grammar is too ambiguous: following it takes too long"
    return InvalidRequest(message, stage="decode", param="constraint")


class MaskJob(NamedTuple):
    """One constrained sample that draws a token in the current step."""

    state: ConstraintState
    tokens: Sequence[int]
    """Tokens since its last job; not changed until the masks are taken."""


class MaskMaker:
    """Computes the masks of a step in a thread of its own. Used by the engine's thread."""

    def __init__(self) -> None:
        self._work: _Work | None = None
        self._thread: _MaskThread | None = None

    def begin(self, jobs: Sequence[MaskJob]) -> None:
        """Starts on the masks of a step; those of the previous step must have been taken."""
        if self._thread is None:
            self._thread = _MaskThread()
        self._work = _Work(jobs)
        self._thread.begin(self._work)

    def take(self) -> list[Mask | WeftError | None]:
        """Waits for the masks, one per job; an error for each that failed."""
        work, self._work = self._work, None
        assert work is not None
        num_done = -1
        while not work.is_done.wait(TIMEOUT_S):
            if len(work.results) == num_done:
                return self._give_up(work)
            num_done = len(work.results)
        return work.results

    def _give_up(self, work: _Work) -> list[Mask | WeftError | None]:
        """Leaves the thread alone with the mask that it is lost in; another one goes on behind."""
        with work.lock:
            work.is_abandoned = True
            done, is_lost = list(work.results), work.num_begun > len(work.results)
        self.close()
        if is_lost:
            logger.warning("a mask took more than %g s", TIMEOUT_S)
            work.jobs[len(done)].state.is_lost = True
            done.append(_too_slow())
        self.begin(work.jobs[len(done) :])
        return done + self.take()

    def close(self) -> None:
        """Stops the thread."""
        if self._thread is not None:
            self._thread.begin(None)
            self._thread = None


class _Work:
    def __init__(self, jobs: Sequence[MaskJob]) -> None:
        self.jobs = jobs
        self.results: list[Mask | WeftError | None] = []
        self.num_begun = 0
        """Number of jobs whose masks are computed, or have been."""
        self.is_done = threading.Event()
        self.lock = threading.Lock()
        self.is_abandoned = False
        """Whether the jobs behind the current one are computed elsewhere."""


def _mask_of(job: MaskJob) -> Mask | None:
    """The mask of a job's next token, unless its state is another thread's for good."""
    if job.state.is_lost:
        raise _too_slow()
    return job.state.next_mask(job.tokens)


class _MaskThread:
    def __init__(self) -> None:
        self._has_work = threading.Semaphore(0)
        self._work: _Work | None = None
        threading.Thread(target=self._run, name="masks", daemon=True).start()

    def begin(self, work: _Work | None) -> None:
        """Passes on the next work; None ends the thread after its current work."""
        self._work = work
        self._has_work.release()

    def _run(self) -> None:
        while True:
            self._has_work.acquire()
            work = self._work
            if work is None:
                return
            for job in work.jobs:
                with work.lock:
                    if work.is_abandoned:
                        return
                    work.num_begun += 1
                try:
                    work.results.append(_mask_of(job))
                except WeftError as error:
                    work.results.append(error)
                except RuntimeError as error:
                    work.results.append(Internal(f"no mask: {error}", stage="decode"))
            work.is_done.set()
