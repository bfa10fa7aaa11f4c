"""The constrained requests of an engine: their grammars, and the grammar state of each sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft.checkpoint.vocabularies import TOKENIZER_FILE
from weft.contract.errors import InvalidRequest, WeftError
from weft.contract.request import MAX_CONSTRAINT_BYTES, Constraint
from weft.engine.base.config import EngineConfig
from weft.engine.features.constraints.compiling import TOO_SLOW, VocabularyConfig
from weft.engine.features.constraints.grammars import Grammars
from weft.engine.requests.request import Request, RequestKey, State
from weft.engine.scheduler.ports import Made, MaskRows

if TYPE_CHECKING:
    from weft.engine.features.constraints.after_reasoning import AfterReasoning
    from weft.engine.features.constraints.grammar_state import ChargedTime, ConstraintState
    from weft.engine.features.constraints.masks import MaskGroup, MaskJob, MaskMaker
    from weft.engine.features.constraints.unique import Matcher

MAX_REFUSED = 64
"""Number of too slow constraints that are remembered."""


class Constraints:
    """Grammars and masks of constrained requests. Used by the engine's thread; unconstrained
    requests cost nothing.

    Args:
        eos_token_ids: End-of-text token ids of the model: how a complete text ends.
        wake: Called from another thread when `take_compiled` has something.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        wake: Callable[[], None],
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._model_dir = config.model_dir
        vocabulary = VocabularyConfig(config.model_dir, vocab_size, tuple(eos_token_ids))
        self._compiled = Grammars(
            vocabulary, config.constraint_compile_s, config.constraint_cache, wake
        )
        self._waiting: dict[Constraint, list[RequestKey]] = {}
        self.grammars: dict[RequestKey, Matcher] = {}
        """Each unfinished request's matcher at the beginning of a text; samples get copies."""
        self._states: dict[Request, ConstraintState | AfterReasoning] = {}
        """Grammar state of each sample, from its first step on this engine."""
        self._charged: dict[RequestKey, ChargedTime] = {}
        """CPU seconds of slow steps that the samples of each unfinished request were charged."""
        self._maker: MaskMaker | None = None
        self._group: MaskGroup | None = None
        """Serves while steps have the same requests."""
        self._masked: list[Request] = []
        """Requests whose masks are being computed for the current step."""
        self.lost_s = 0.0
        self._begin_s = 0.0
        """Seconds that `begin_masks` took in this step: masks that are awaited at once are computed
        in it.
        """
        self._refused: dict[Constraint, None] = {}
        """Constraints whose masks took too long; the oldest first."""

    def admit(self, request: Request) -> bool:
        constraint = request.params.constraint
        if constraint is None:
            return True
        self._check(constraint)
        grammar = self._compiled.find(constraint)
        if grammar is not None:
            self.grammars[request.key] = grammar
            return True
        self._compiled.order(constraint)
        self._waiting.setdefault(constraint, []).append(request.key)
        return False

    def expect(self) -> None:
        """Starts reading the vocabulary before the first constrained request comes."""
        if not self._lacks():
            self._compiled.start()

    def _check(self, constraint: Constraint) -> None:
        message = self._lacks() or (TOO_SLOW if constraint in self._refused else "")
        if constraint.num_bytes > MAX_CONSTRAINT_BYTES:
            message = f"has {constraint.num_bytes:,} bytes, at most {MAX_CONSTRAINT_BYTES:,} fit"
        if message:
            raise InvalidRequest(message, stage="compile", param="constraint")

    def _lacks(self) -> str:
        """Empty if the model lacks nothing that constraints need."""
        if not (self._model_dir / TOKENIZER_FILE).is_file():
            return f"constrained output needs the model's {TOKENIZER_FILE}, which is not here"
        if not self._eos_token_ids:
            return "constrained output needs an end-of-sequence token, which this model lacks"
        return ""

    def take_compiled(self) -> list[tuple[RequestKey, WeftError | None]]:
        ready: list[tuple[RequestKey, WeftError | None]] = []
        for constraint, outcome in self._compiled.take():
            keys, error = self._waiting.pop(constraint, ()), None
            if isinstance(outcome, WeftError):
                error = outcome
            else:
                self._compiled.keep(constraint, outcome)
                self.grammars.update(dict.fromkeys(keys, outcome))
            ready += [(key, error) for key in keys]
        return ready

    def end(self, request: Request, *, is_last: bool) -> None:
        constraint = request.params.constraint
        if constraint is None:
            return
        self._states.pop(request, None)
        self._group = None
        if not is_last:
            return
        self.grammars.pop(request.key, None)
        self._charged.pop(request.key, None)
        keys = self._waiting.get(constraint, [])
        if request.key in keys:
            keys.remove(request.key)

    def begin_masks(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]] | None = None,
        ahead: Sequence[Sequence[int]] | None = None,
        *,
        rows: Callable[[], MaskRows] | None = None,
        is_awaited: bool = False,
    ) -> None:
        self._masked = []
        if not self.grammars:
            return
        from weft.engine.features.constraints.masks import MIN_MEMBERS, MaskMaker

        is_plain = rows is not None and accepted is None and ahead is None
        group, tokens = self._group if is_plain else None, None
        if group is not None:
            tokens = group.next_tokens(requests)
        if group is None or tokens is None:
            masked, jobs = self._jobs(requests, accepted, ahead)
        else:
            masked, jobs = self._jobs(group.others)
            masked += group.requests
        if not masked:
            return
        maker = self._maker = self._maker or MaskMaker()
        steady = None if group is None or tokens is None else (group, tokens)
        if is_plain and steady is None and len(jobs) >= MIN_MEMBERS:
            states = [job.state for job in jobs]
            self._group = maker.group(requests, zip(masked, states, strict=True))
        began = time.monotonic()
        maker.begin(jobs, None if rows is None else rows(), group=steady, is_awaited=is_awaited)
        self._begin_s = time.monotonic() - began
        self._masked = masked

    def _jobs(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]] | None = None,
        ahead: Sequence[Sequence[int]] | None = None,
    ) -> tuple[list[Request], list[MaskJob]]:
        """The constrained requests among these, except ended ones, and a job for each."""
        from weft.engine.features.constraints.masks import MaskJob

        masked, jobs = list[Request](), list[MaskJob]()
        for index, request in enumerate(requests):
            if request.params.constraint is None or request.state is State.FINISHED:
                continue
            state = self._states.get(request) or self._begun(request)
            begin = request.num_prompt_tokens + state.num_accepted
            tokens = request.tokens[begin:]
            if accepted is not None:
                tokens += accepted[index][max(0, begin - len(request.tokens)) :]
            behind = () if ahead is None else ahead[index]
            jobs.append(MaskJob(state, tokens, behind, request.slot))
            masked.append(request)
        return masked, jobs

    def _begun(self, request: Request) -> ConstraintState | AfterReasoning:
        from weft.engine.features.constraints.after_reasoning import AfterReasoning
        from weft.engine.features.constraints.grammar_state import ChargedTime, ConstraintState

        grammar = self.grammars[request.key]
        constraint = request.params.constraint
        charged = self._charged.setdefault(request.key, ChargedTime())
        state: ConstraintState | AfterReasoning
        state = ConstraintState(grammar, self._vocab_size, self._eos_token_ids, charged)
        if constraint is not None and (constraint.reasoning or constraint.alternatives):
            lifted = constraint.alternatives
            state = AfterReasoning(state, self._vocab_size, constraint.reasoning, lifted)
        self._states[request] = state
        return state

    def take_masks(self) -> list[tuple[Request, Made]]:
        if not self._masked:
            return []
        assert self._maker is not None
        masked, self._masked = self._masked, []
        began = time.monotonic()
        masks = self._maker.take()
        made = list(zip(masked, masks, strict=True))
        failed = [(request, found) for request, found in made if isinstance(found, InvalidRequest)]
        if failed:
            self.lost_s += self._begin_s + time.monotonic() - began
        for request, error in failed:
            constraint = request.params.constraint
            if error.message == TOO_SLOW and constraint is not None:
                self._refuse(constraint, masked)
        return made

    def _refuse(self, constraint: Constraint, others: Sequence[Request]) -> None:
        """Remembers a constraint as too slow, and ends all other samples that have it."""
        self._refused[constraint] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        for request in others:
            if request.params.constraint == constraint:
                self._states[request].is_lost = True

    def sizes(self) -> dict[str, int]:
        return {
            "constrained_requests": len(self.grammars),
            "constrained_samples": len(self._states),
            "compiling": self._compiled.num_open,
        }

    def close(self) -> None:
        self._compiled.close()
        if self._maker is not None:
            self._maker.close()
