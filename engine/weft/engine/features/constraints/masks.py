"""Token masks of constrained samples, computed on the host while the model computes the logits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from weft.engine.base.cores import num_cores
from weft.engine.base.drafts import parents_of
from weft.engine.base.errors import Internal, InvalidRequest, WeftError
from weft.engine.features.constraints.constraints import TOO_SLOW
from weft.engine.scheduler.ports import Made, MaskRows, Masks

if TYPE_CHECKING:
    from weft.engine.features.constraints.after_reasoning import AfterReasoning

logger = logging.getLogger(__name__)


SLOW_MASK_S = 5e-3
"""CPU seconds beyond which a mask counts as slow; llguidance ends it at about 20 ms."""
MAX_SLOW_S = 1.0
"""CPU seconds of all its slow masks beyond which a sample is ended."""
SLOW_TOGETHER_S = 2e-2
"""Seconds beyond which masks that are computed together are timed one by one for a while."""
NUM_ALONE = 16
"""Number of masks that a sample gets by itself after it was in a slow group."""
MAX_THREADS = 8
MIN_SHARED = 8
"""Number of masks from which on several threads share them, if they are of enough grammars."""
MIN_GRAMMARS = 4
"""Copies of one grammar share a lexer behind a lock, so that threads would wait for each other."""
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
        self.grammar = grammar
        self.matcher = grammar.deep_copy()
        """Has consumed all tokens of the sample that were followed."""
        self.eos_token_ids = eos_token_ids
        self._slow_s = 0.0
        self._num_words = -(-vocab_size // 32)
        self.num_accepted = 0
        """Number of tokens that it has followed."""
        self.num_alone = 0
        """Number of masks that are to be computed by themselves, so that each is timed."""
        self.is_lost = False
        """It gets no mask any more: its grammar is too slow."""

    @property
    def in_group(self) -> ConstraintState | None:
        """The state to be followed together with those of other samples; None: by itself."""
        return None if self.num_alone > 0 or self.is_lost else self

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
            if token in self.eos_token_ids or not self.matcher.consume_token(token):
                raise self.refusal(token)
            self.num_accepted += 1

    def refusal(self, token: int) -> WeftError:
        """Why the matcher has not consumed the next token."""
        told = self.matcher.get_error()
        is_wrong = any(wrong in told for wrong in _WRONG_TOKEN)
        message = f"token {token} behind {self.num_accepted} is not of the sample's grammar"
        return (None if is_wrong else self.problem()) or Internal(message, stage="decode")

    def problem(self) -> InvalidRequest | None:
        """The error if the grammar takes too much, or no text goes on from here."""
        if not self.matcher.is_error():
            return None
        if "NoExtension" not in self.matcher.get_error():
            return _too_slow()
        message = "no text satisfies it that goes on from here"
        return InvalidRequest(message, stage="decode", param="constraint")

    def _check(self) -> None:
        if (error := self.problem()) is not None:
            raise error

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
        words = np.zeros((1 + len(drafts), self._num_words), np.uint32)
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
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def _fill_behind(self, drafts: Sequence[int], words: npt.NDArray[np.uint32]) -> None:
        """Writes the mask behind each draft into its row, from one to the next of them."""
        paths: list[list[int] | None] = [[]]
        """Rows that lead to each row, itself included; None: the grammar does not allow them."""
        behind: list[int] = []
        """Those that the matcher has followed."""
        for row, (token, parent) in enumerate(zip(drafts, parents_of(drafts), strict=True), 1):
            before = paths[parent]
            is_allowed = words[parent, token // 32] >> token % 32 & 1
            if before is None or not is_allowed or token in self.eos_token_ids:
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
            self.matcher.rollback(len(behind) - same)
        for row in path[same:]:
            self.matcher.consume_token(drafts[row - 1])
        self._check()


def _too_slow() -> InvalidRequest:
    return InvalidRequest(TOO_SLOW, stage="decode", param="constraint")


class MaskJob(NamedTuple):
    """One constrained sample that draws a token in the current step."""

    state: ConstraintState | AfterReasoning
    tokens: Sequence[int]
    """Tokens since its last job; not changed until the masks are taken."""
    drafts: Sequence[int] = ()
    """Drafts behind them, of which each gets a mask too."""
    slot: int = -1
    """Slot whose row its mask may be written to; negative: there is none."""


_Member = tuple[int, ConstraintState, MaskJob]
"""A job whose mask is made together with others: its place among the jobs, its state."""


class MaskMaker:
    """Computes the masks of a step: in a thread of its own while the model computes, or at once
    where the caller would only wait for them.

    Args:
        num_threads: Threads for the masks that are made together.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._orders: queue.SimpleQueue[tuple[Sequence[MaskJob], MaskRows | None] | None]
        self._orders = queue.SimpleQueue()
        self._made: queue.SimpleQueue[list[Made]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if num_threads is None:
            num_threads = min(MAX_THREADS, num_cores() // 2)
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None

    def begin(
        self,
        jobs: Sequence[MaskJob],
        rows: MaskRows | None = None,
        *,
        is_awaited: bool = False,
    ) -> None:
        """Starts on the masks of a step; those of the previous step must have been taken.

        Args:
            jobs: Of the step.
            rows: Where those of the jobs' slots are written until the masks are taken; None: none.
            is_awaited: The caller has nothing else to do until they are there.
        """
        if is_awaited:
            self._made.put(self._masks_of(jobs, rows))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            self._thread.start()
        self._orders.put((jobs, rows))

    def take(self) -> list[Made]:
        """Waits for what becomes of each job."""
        return self._made.get()

    def close(self) -> None:
        """Stops the thread."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread = None

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._made.put(self._masks_of(*order))

    def _masks_of(self, jobs: Sequence[MaskJob], rows: MaskRows | None) -> list[Made]:
        """The masks of each job; those that need not be timed are made together."""
        made: list[Made] = [None] * len(jobs)
        group: list[_Member] = []
        for place, job in enumerate(jobs):
            is_single = rows is not None and job.slot >= 0 and not job.drafts
            state = job.state.in_group if is_single else None
            if state is None:
                made[place] = _alone(job)
            else:
                group.append((place, state, job))
        if rows is not None and group:
            self._make_together(group, rows, made)
        return made

    def _make_together(self, group: list[_Member], rows: MaskRows, made: list[Made]) -> None:
        """Writes the mask of each member into the row of its slot, and its error into `made`."""
        began = time.monotonic()
        executor = self._executor_for(group)
        _follow(group, made, executor)
        wanted = [(state.matcher, job.slot) for place, state, job in group if made[place] is None]
        address, row_bytes = rows.ctypes.data, rows.shape[1] * rows.itemsize
        if executor is not None and wanted:
            executor.unsafe_compute_mask_ptr(wanted, address, row_bytes, len(rows))
        else:
            for matcher, slot in wanted:
                matcher.unsafe_compute_mask_ptr(address + slot * row_bytes, row_bytes)
        for place, state, _ in group:
            if state.matcher.is_error():
                made[place] = made[place] or state.problem()
        if time.monotonic() - began > min(SLOW_TOGETHER_S, SLOW_MASK_S * len(group)):
            for _, state, _ in group:
                state.num_alone = NUM_ALONE

    def _executor_for(self, group: list[_Member]) -> LLExecutor | None:
        """The threads that make the masks of a group, which is sorted for them; None: this one."""
        if self._executor is None or len(group) < MIN_SHARED:
            return None
        num_grammars = len({id(state.grammar) for _, state, _ in group})
        if num_grammars < MIN_GRAMMARS:
            return None
        if num_grammars < len(group):
            # A thread gets neighbours.
            group.sort(key=lambda member: id(member[1].grammar))
        return self._executor


def _follow(group: list[_Member], made: list[Made], executor: LLExecutor | None) -> None:
    """Has states follow their tokens, mostly one each; writes what fails into `made`."""
    single: list[_Member] = []
    pairs: list[tuple[LLMatcher, int]] = []
    for member in group:
        place, state, job = member
        tokens = job.tokens
        if len(tokens) == 1 and tokens[0] not in state.eos_token_ids:
            single.append(member)
            pairs.append((state.matcher, tokens[0]))
            continue
        try:
            state.follow(tokens)
        except Exception as error:  # whatever it is, it is this sample's alone
            made[place] = _failure(error)
    if executor is not None and pairs:
        are_right = executor.consume_token_par(pairs)
    else:
        are_right = [matcher.consume_token(token) for matcher, token in pairs]
    for (place, state, job), is_right in zip(single, are_right, strict=True):
        if is_right:
            state.num_accepted += 1
        else:
            made[place] = state.refusal(job.tokens[0])


def _alone(job: MaskJob) -> Made:
    try:
        return job.state.next_masks(job.tokens, job.drafts)
    except Exception as error:  # like above
        return _failure(error)


def _failure(error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    logger.warning("a mask failed", exc_info=error)
    return Internal(f"no mask: {type(error).__name__}: {error}", stage="decode")
