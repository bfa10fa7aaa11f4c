"""Continues the texts of beam searches with the candidates of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.contract.clock import Clock
from weft.contract.request import TokenLogprob
from weft.contract.submits import Tokens
from weft.engine.executor.orders import KeepTokens
from weft.engine.executor.port import Executor
from weft.engine.loop.draws import SampledTokens, StepSampler
from weft.engine.loop.groups import RequestGroups
from weft.engine.loop.intake import Intake
from weft.engine.loop.outgoing import Outgoing
from weft.engine.requests.beam_search import Continuation
from weft.engine.requests.request import Beams, Request, State, end_of
from weft.engine.scheduler.scheduler import Scheduler


class BeamSearches:
    """Applies each step to the searches that took part in it."""

    def __init__(
        self,
        groups: RequestGroups,
        scheduler: Scheduler,
        intake: Intake,
        sampler: StepSampler,
        executor: Executor,
        out: Outgoing,
        clock: Clock,
    ) -> None:
        self._groups = groups
        self._scheduler = scheduler
        self._intake = intake
        self._sampler = sampler
        self._executor = executor
        self._out = out
        self._clock = clock

    def take(self, drawn: SampledTokens) -> int:
        """Takes the rows of searches from a committed step. Returns the tokens of answers that are
        complete.
        """
        found = dict[Beams, dict[Request, TokenLogprob | None]]()
        for request, logprobs in zip(drawn.requests, drawn.logprobs, strict=True):
            if request.beams is not None and request.state is State.RUNNING:
                found.setdefault(request.beams, {})[request] = logprobs
        return sum(
            self._advance(beams, [rows[request] for request in beams.requests])
            for beams, rows in found.items()
        )

    def _advance(self, beams: Beams, rows: Sequence[TokenLogprob | None]) -> int:
        first, count = beams.requests[0], beams.requests[0].num_generated + 1
        candidates = [row.top for row in rows if row is not None]
        ends = partial(end_of, first, num_generated=count)
        following = beams.search.advance(candidates, ends)
        if not following:
            return self._end(beams)
        if len(beams.requests) == 1:
            self._begin(beams, following)
            following = following[:1]
        else:
            self._copy(beams.requests, following)
        parents = [beams.requests[one.parent] for one in following]
        own = beams.requests[: len(following)]
        self._sampler.continue_beams(own, parents, [one.token for one in following])
        for place, request in enumerate(beams.requests):
            request.tokens[request.num_prompt_tokens :] = beams.search.tokens_of(place)
        slots = [request.slot for request in beams.requests]
        last = [request.tokens[-1] for request in beams.requests]
        self._executor.order(KeepTokens(slots, last))
        return 0

    def _begin(self, beams: Beams, following: Sequence[Continuation]) -> None:
        first, now = beams.requests[0], self._clock()
        for place in range(1, len(following)):
            request = self._intake.sibling(first, place, [], now)
            self._groups.join(request)
            self._scheduler.add_beam(first, request)

    def _copy(self, requests: Sequence[Request], following: Sequence[Continuation]) -> None:
        for place, (request, (parent, _)) in enumerate(zip(requests, following, strict=True)):
            if parent != place:
                source = requests[parent]
                pairs = zip(source.tokens, request.tokens, strict=True)
                same = next(at for at, (one, other) in enumerate(pairs) if one != other)
                self._scheduler.pages.copy_beam(source, request, same)

    def _end(self, beams: Beams) -> int:
        first, best = beams.requests[0], beams.search.best
        assert best is not None
        first.tokens[first.num_prompt_tokens :] = best.tokens
        logprobs = list[TokenLogprob]()
        if beams.tells_logprobs:
            each = zip(best.tokens, best.logprobs, strict=True)
            logprobs = [TokenLogprob(token, logprob, ()) for token, logprob in each]
        key = first.key
        told = Tokens(key.request_id, key.attempt, first.sample, 0, list(best.tokens), logprobs)
        self._out.gateway(key.gateway).tokens.append(told)
        self._groups.end_sample(first, *best.end)
        return len(best.tokens)
