"""Token masks of constrained samples, computed on the host while the model computes the logits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from llguidance import LLExecutor, LLMatcher
from weft.contract.cores import num_cores
from weft.contract.errors import Internal, WeftError
from weft.engine.features.constraints.grammar_state import (
    SLOW_MASK_S,
    ChargedTime,
    ConstraintState,
    too_slow,
)
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.ports import Made, MaskRows

if TYPE_CHECKING:
    from weft.engine.features.constraints.after_reasoning import AfterReasoning
    from weft.engine.features.constraints.unique import Matcher

logger = logging.getLogger(__name__)


SLOW_TOGETHER_S = 2e-2
"""Seconds that a group's masks may take; above that, its members are timed one by one for a
while.
"""
NUM_ALONE = 16
"""Number of masks that a sample gets outside groups after it was in a slow group."""
SLOW_STEP_S = 5e-2
"""CPU seconds that the masks of a request's samples may take in a step before they are charged."""
MAX_CHARGED_S = 2.0
"""CPU seconds that may be charged to a request; above that, all of its samples are ended."""
MAX_THREADS = 8
MIN_MEMBERS = 4
"""Least number of members of a `MaskGroup`: keeping fewer takes longer than it saves."""
MIN_SHARED = 8
"""Least number of masks that several threads share, if there are also `MIN_GRAMMARS`."""
MIN_GRAMMARS = 4
"""Least number of different grammars that threads share: copies of one grammar share a lexer with a
lock, so threads would wait for each other.
"""


class MaskJob(NamedTuple):
    """One constrained sample that draws a token in the current step."""

    state: ConstraintState | AfterReasoning
    tokens: Sequence[int]
    """Tokens since the sample's last job; not changed until the masks are taken."""
    ahead: Sequence[int] = ()
    """Tokens that may follow; each gets a mask too."""
    slot: int = -1
    """Slot in whose row the mask may be written; negative: in none."""


_Member = tuple[int, ConstraintState, MaskJob]
"""A job whose mask is made in a group: its index among the jobs, its state, the job."""


class MaskGroup:
    """Samples that get one token and one mask in each step. What llguidance is told of them is
    prepared once, and holds as long as a step has the same requests.

    Args:
        requests: All requests of the step.
        members: Those whose masks are made together, and their states.
        others: The other constrained requests, and their states.
        executor: Shares the work among threads; None: one thread makes all masks.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        members: Sequence[tuple[Request, ConstraintState]],
        others: Sequence[tuple[Request, ConstraintState | AfterReasoning]],
        executor: LLExecutor | None,
    ) -> None:
        self._of_step = list(requests)
        self.requests = [request for request, _ in members]
        self.others = [request for request, _ in others]
        self._states = [state for _, state in members]
        self._states_of_others = [state for _, state in others]
        self._matchers = [state.matcher for state in self._states]
        self._slots = [request.slot for request in self.requests]
        self._targets = list(zip(self._matchers, self._slots, strict=True))
        self._executor = executor

    def next_tokens(self, requests: Sequence[Request]) -> list[int] | None:
        """The newest token of each member, which its matcher has not consumed; None: the group does
        not serve for a step of these requests.
        """
        own, states = self.requests, self._states
        if requests != self._of_step or [request.slot for request in own] != self._slots:
            return None
        if any(state.num_alone or state.is_lost for state in states):
            return None
        if any(state.in_group for state in self._states_of_others):
            return None
        for request, state in zip(own, states, strict=True):
            num_tokens = request.num_prompt_tokens + state.num_accepted + 1
            if len(request.tokens) != num_tokens or request.state is State.FINISHED:
                return None
        tokens = [request.tokens[-1] for request in own]
        return tokens if states[0].eos_token_ids.isdisjoint(tokens) else None

    def make(self, tokens: Sequence[int], rows: MaskRows) -> list[Made]:
        """Follows each member's token, then writes its mask into the row of its slot. Returns None
        or the error of each.
        """
        began = time.monotonic()
        made: list[Made] = [None] * len(tokens)
        targets = self._targets
        are_right = _consume(list(zip(self._matchers, tokens, strict=True)), self._executor)
        for place, (state, is_right) in enumerate(zip(self._states, are_right, strict=True)):
            if is_right:
                state.num_accepted += 1
            else:
                made[place] = state.refusal(tokens[place])
        if not all(are_right):
            targets = [one for one, is_right in zip(targets, are_right, strict=True) if is_right]
        _fill(targets, rows, self._executor)
        _finish(self._states, made, began)
        return made


class MaskMaker:
    """Computes the masks of a step, in a separate thread while the model computes. If the caller
    would only wait, it computes them at once in the caller's thread.

    Args:
        num_threads: Threads that share the masks of a group.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._orders: queue.SimpleQueue[Callable[[], list[Made]] | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[list[Made] | Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if num_threads is None:
            num_threads = min(MAX_THREADS, num_cores() // 2)
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None

    def begin(
        self,
        jobs: Sequence[MaskJob],
        rows: MaskRows | None = None,
        *,
        group: tuple[MaskGroup, Sequence[int]] | None = None,
        is_awaited: bool = False,
    ) -> None:
        """Starts computing the masks of a step; those of the previous step must have been taken.

        Args:
            rows: The masks of jobs with a slot are written here, until they are taken; None: `take`
                returns all masks.
            group: Samples that are no jobs, and their next tokens: what `take` returns of them
                follows that of the jobs. Needs `rows`.
            is_awaited: Whether the caller calls `take` at once.
        """
        order = partial(self._masks_of, jobs, rows, group)
        if is_awaited:
            self._made.put(order())
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def take(self) -> list[Made]:
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        return made

    def close(self) -> None:
        if self._thread is not None:
            self._orders.put(None)
            self._thread = None

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._made.put(order())
            except Exception as error:  # The step fails that takes the masks.
                self._made.put(error)

    def group(
        self,
        requests: Sequence[Request],
        constrained: Iterable[tuple[Request, ConstraintState | AfterReasoning]],
    ) -> MaskGroup | None:
        """A group for further steps of these requests; None: too few can be members."""
        members, others = list[tuple[Request, ConstraintState]](), []
        for request, state in constrained:
            own = state.in_group if request.slot >= 0 else None
            if own is None:
                others.append((request, state))
            else:
                members.append((request, own))
        if len(members) < MIN_MEMBERS:
            return None
        executor = self._executor_for([state for _, state in members])
        if executor is not None:
            members.sort(key=lambda member: id(member[1].grammar))
        return MaskGroup(requests, members, others, executor)

    def _masks_of(
        self,
        jobs: Sequence[MaskJob],
        rows: MaskRows | None,
        steady: tuple[MaskGroup, Sequence[int]] | None = None,
    ) -> list[Made]:
        """Computes the masks of each job, in a group where they need not be timed one by one."""
        made: list[Made] = [None] * len(jobs)
        group: list[_Member] = []
        times: dict[int, float] = {}
        for place, job in enumerate(jobs):
            is_single = rows is not None and job.slot >= 0 and not job.ahead
            state = job.state.in_group if is_single else None
            if state is None:
                began = time.thread_time()
                made[place] = _alone(job)
                times[place] = time.thread_time() - began
            else:
                group.append((place, state, job))
        if rows is not None and group:
            self._make_together(group, rows, made)
        if sum(times.values()) > SLOW_STEP_S:
            _charge(jobs, times, made)
        if steady is not None:
            assert rows is not None, "a group writes its masks into rows"
            made += steady[0].make(steady[1], rows)
        return made

    def _make_together(self, group: list[_Member], rows: MaskRows, made: list[Made]) -> None:
        """Writes the mask of each member into the row of its slot, and its error into `made`."""
        began = time.monotonic()
        executor = self._executor_for([state for _, state, _ in group])
        if executor is not None:
            group.sort(key=lambda member: id(member[1].grammar))
        _follow(group, made, executor)
        wanted = [(state.matcher, job.slot) for place, state, job in group if made[place] is None]
        _fill(wanted, rows, executor)
        found = [made[place] for place, _, _ in group]
        _finish([state for _, state, _ in group], found, began)
        for (place, _, _), one in zip(group, found, strict=True):
            made[place] = one

    def _executor_for(self, group: Sequence[ConstraintState]) -> LLExecutor | None:
        """None: this thread alone makes the group's masks. Each of the executor's threads gets a
        stretch of a list, so a list is sorted by grammar: copies of one go to the same thread.
        """
        if self._executor is None or len(group) < MIN_SHARED:
            return None
        num_grammars = len({id(state.grammar) for state in group})
        return self._executor if num_grammars >= MIN_GRAMMARS else None


def _consume(pairs: list[tuple[Matcher, int]], executor: LLExecutor | None) -> list[bool]:
    """Whether each matcher has consumed its token."""
    if executor is not None and pairs:
        return executor.consume_token_par(_of_llguidance(pairs))
    return [matcher.consume_token(token) for matcher, token in pairs]


def _fill(targets: list[tuple[Matcher, int]], rows: MaskRows, executor: LLExecutor | None) -> None:
    """Writes the mask of each matcher into its row."""
    address, row_bytes = rows.ctypes.data, rows.shape[1] * rows.itemsize
    if executor is not None and targets:
        executor.unsafe_compute_mask_ptr(_of_llguidance(targets), address, row_bytes, len(rows))
        return
    for matcher, row in targets:
        matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)


def _finish(states: Sequence[ConstraintState], made: list[Made], began: float) -> None:
    """Adds errors that came while masks were filled. If the group took long since `began`, its
    members are timed one by one for a while.
    """
    for place, state in enumerate(states):
        if state.matcher.is_error():
            made[place] = made[place] or state.problem()
    if time.monotonic() - began > min(SLOW_TOGETHER_S, SLOW_MASK_S * len(states)):
        for state in states:
            state.num_alone = NUM_ALONE


def _of_llguidance(pairs: list[tuple[Matcher, int]]) -> list[tuple[LLMatcher, int]]:
    """Changes only the type: `in_group` keeps other matchers out of groups."""
    return cast("list[tuple[LLMatcher, int]]", pairs)


def _follow(group: list[_Member], made: list[Made], executor: LLExecutor | None) -> None:
    """The members' matchers consume their tokens; errors go into `made`."""
    single: list[_Member] = []
    pairs: list[tuple[Matcher, int]] = []
    for member in group:
        place, state, job = member
        tokens = job.tokens
        if len(tokens) == 1 and tokens[0] not in state.eos_token_ids:
            single.append(member)
            pairs.append((state.matcher, tokens[0]))
            continue
        try:
            state.follow(tokens)
        except Exception as error:  # An error of one sample must not affect other samples.
            made[place] = _failure(error)
    for (place, state, job), is_right in zip(single, _consume(pairs, executor), strict=True):
        if is_right:
            state.num_accepted += 1
        else:
            made[place] = state.refusal(job.tokens[0])


def _charge(jobs: Sequence[MaskJob], times: Mapping[int, float], made: list[Made]) -> None:
    """Charges requests whose masks took long in this step, and ends the samples of those that are
    charged too much. Many samples may slow all others down although none of their masks is slow.

    Args:
        times: CPU seconds of the timed jobs, by their index.
        made: Gets the error of samples that are ended.
    """
    members: dict[ChargedTime, list[int]] = {}
    for place in times:
        members.setdefault(jobs[place].state.charged, []).append(place)
    for charged, places in members.items():
        taken_s = sum(times[place] for place in places)
        if taken_s > SLOW_STEP_S:
            charged.seconds += taken_s
        if charged.seconds > MAX_CHARGED_S:
            for place in places:
                made[place] = too_slow()


def _alone(job: MaskJob) -> Made:
    try:
        return job.state.next_masks(job.tokens, job.ahead)
    except Exception as error:  # like above
        return _failure(error)


def _failure(error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    logger.warning("a mask failed", exc_info=error)
    return Internal(f"no mask: {type(error).__name__}: {error}", stage="decode")
