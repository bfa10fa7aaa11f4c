"""Clients that send requests without pause, and checks of the answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.chaos.inject import Injector
from weft.chaos.requests import ChaosRequest, Pace, Reply, send
from weft.contract.errors import DeadlineExceeded, PeerUnavailable

LATE_S = 4.0
"""A request counts as late this many seconds after its deadline. Machines that run chaos are
busy.
"""
AFFLICTED_LATE_S = 14.0
"""The same limit for requests whose gateway stood still meanwhile."""
TIMEOUT_S = 20.0
RESUME_S = 12.0
"""Seconds within which any request must end once a decode worker is healthy."""
_PAUSE_AFTER_ERROR_S = 0.3
_SALTS = ("shared-a", "shared-b", "shared-c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """An invariant that did not hold."""

    invariant: int
    """1 to 6, as docs/operations.md numbers them."""
    what: str


@dataclass(frozen=True, slots=True)
class Known:
    """Requests to a model, and its answers to them without faults."""

    model: str
    asks: Sequence[ChaosRequest]
    expected: Mapping[int, Reply]
    """Answers by number of the request."""


@dataclass(slots=True)
class LoadResult:
    """Results of all clients."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """`ok`, `cancelled`, the failure's reason in lower case, or `cut off` (by the transport)."""
    violations: list[Violation] = field(default_factory=list)
    num_resumed: int = 0
    """Answers to which more than one owner contributed."""
    num_drafted: int = 0
    """Answers with verified drafts, according to their timelines."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    slowest_s: float = 0.0


class ChaosLoad:
    """Sends requests of a catalogue, at all paces, through all gateways, which are host:port by
    name.
    """

    def __init__(
        self,
        gateways: Mapping[str, str],
        known: Known,
        injector: Injector,
        seed: int,
    ) -> None:
        self._gateways = dict(gateways)
        self._known = known
        self._injector = injector
        self._seed = seed
        self._is_over = False
        self._unserved: list[tuple[str, Reply]] = []
        """Requests that hung or ended with an error, with their names."""
        self.result = LoadResult()

    async def run(self, num_clients: int) -> None:
        """Runs clients until `stop`. Each completes its last request."""
        await asyncio.gather(*(self._client(number) for number in range(num_clients)))

    def stop(self) -> None:
        self._is_over = True

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        while not self._is_over:
            ask, gateway = draw.choice(self._known.asks), draw.choice(list(self._gateways))
            pace = draw_pace(draw)
            reply = await send(self._gateways[gateway], self._known.model, ask, pace)
            self._note(gateway, ask, pace, reply)
            if reply.error is not None:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    def _note(self, gateway: str, ask: ChaosRequest, pace: Pace, reply: Reply) -> None:
        result = self.result
        result.violations += self._violations(gateway, ask, pace, reply)
        result.slowest_s = max(result.slowest_s, reply.ended_s - reply.started_s)
        if reply.error is not None:
            result.outcomes[reply.error.reason.lower() if reply.is_typed else "cut off"] += 1
        else:
            result.outcomes["cancelled" if reply.is_cancelled else "ok"] += 1
        if reply.timeline is not None:
            result.num_resumed += bool(reply.timeline.lost_attempts)
            result.num_drafted += bool(reply.timeline.drafted_tokens)
            result.drafted_tokens += reply.timeline.drafted_tokens
            result.accepted_tokens += reply.timeline.accepted_tokens

    def _violations(
        self, gateway: str, ask: ChaosRequest, pace: Pace, reply: Reply
    ) -> list[Violation]:
        found: list[Violation] = []
        name = f"request {ask.number} at {gateway}"
        took_s = reply.ended_s - reply.started_s
        is_afflicted = self._is_afflicted((gateway,), reply)
        if took_s > pace.timeout_s + (AFFLICTED_LATE_S if is_afflicted else LATE_S):
            what = f"{name} took {took_s:.1f} s, its deadline was {pace.timeout_s:.1f} s"
            found.append(Violation(invariant=1, what=what))
        if reply.error is not None and not reply.is_typed and not is_afflicted:
            what = f"{name} failed without a typed error: {reply.error.message}"
            found.append(Violation(invariant=1, what=what))
        is_given_up = isinstance(reply.error, PeerUnavailable) and reply.is_typed
        is_hung = isinstance(reply.error, DeadlineExceeded) and pace.timeout_s >= TIMEOUT_S
        if (is_given_up or is_hung) and not is_afflicted:
            self._unserved.append((name, reply))
        if (
            reply.error is None
            and not reply.is_cancelled
            and (problem := whole_problem(ask, reply)) is not None
        ):
            found.append(Violation(invariant=1, what=f"{name} {problem}"))
            return found
        if (problem := text_problem(self._known.expected[ask.number], reply)) is not None:
            found.append(Violation(invariant=2, what=f"{name} {problem}"))
        return found

    def unserved(self) -> list[Violation]:
        """Violations by requests that hung or were given up. Call it when the mesh is whole again:
        only then is it known which workers were about to end.
        """
        found = []
        for name, reply in self._unserved:
            took_s = reply.ended_s - reply.started_s
            is_hung = isinstance(reply.error, DeadlineExceeded)
            if well := self._well_since(reply, RESUME_S if is_hung else took_s):
                how = f"hung for {took_s:.1f} s" if is_hung else "was given up"
                what = f"{name} {how} though {well[0]} was well: {reply.error}"
                found.append(Violation(invariant=1 if is_hung else 2, what=what))
        return found

    def _well_since(self, reply: Reply, seconds: float) -> list[str]:
        """Decode workers that ran, and that no fault affected, in the last seconds of a request, so
        that it should have continued there. A worker may also end because faults of others have
        filled its quarantine.
        """
        since_s = reply.ended_s - seconds
        mesh = self._injector.mesh
        away = {
            absence.name for absence in mesh.absences if absence.overlaps(since_s, reply.ended_s)
        }
        return [
            name
            for name in mesh.named("decode")
            if name not in away and not self._is_afflicted((name,), reply, since_s)
        ]

    def _is_afflicted(
        self, names: Sequence[str], reply: Reply, since_s: float | None = None
    ) -> bool:
        start_s = reply.started_s if since_s is None else since_s
        return any(
            injection.overlaps(names, start_s, reply.ended_s) for injection in self._injector.done
        )


def draw_pace(draw: random.Random) -> Pace:
    """Most clients read everything; some go away, are slow, or have short deadlines."""
    salt = draw.choice(_SALTS) if draw.random() < 0.4 else f"{draw.randrange(1 << 62):x}"
    kind = draw.random()
    if kind < 0.1:
        return Pace(TIMEOUT_S, cancel_after=draw.randint(1, 5), salt=salt)
    if kind < 0.2:
        return Pace(TIMEOUT_S, pause_s=0.03, salt=salt)
    if kind < 0.3:
        return Pace(draw.uniform(0.2, 1.5), salt=salt)
    return Pace(TIMEOUT_S, salt=salt)


def whole_problem(ask: ChaosRequest, reply: Reply) -> str | None:
    """Why a finished answer is incomplete; None: each token index came exactly once."""
    num_tokens = sum(map(len, reply.tokens))
    if not all(reply.reasons):
        return "ended well without the end of every sample"
    if any(len(reasons) > 1 for reasons in reply.reasons):
        return "told the end of a sample more than once"
    if reply.completion_tokens is None:
        return None if reply.has_left else "ended without its usage"
    if num_tokens != reply.completion_tokens:
        return f"brought {num_tokens} tokens, and {reply.completion_tokens} by its usage"
    if num_tokens > ask.max_tokens * ask.n:
        return f"brought {num_tokens} tokens, {ask.max_tokens} for each sample were asked for"
    return None


def text_problem(expected: Reply, reply: Reply) -> str | None:
    """Where an answer, or its received part, differs from the answer without faults; None: it is
    equal.
    """
    for sample, (wanted, found) in enumerate(zip(expected.tokens, reply.tokens, strict=True)):
        if wanted[: len(found)] != found:
            pairs = zip(wanted, found, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted))
            return f"differs in sample {sample} from token {at} on"
        if reply.is_whole and len(found) != len(wanted):
            return f"has {len(found)} tokens in sample {sample}, not {len(wanted)}"
        text, received = expected.texts[sample], reply.texts[sample]
        if not text.startswith(received) or (reply.is_whole and text != received):
            return f"has another text in sample {sample}, of the same tokens"
        if reply.is_whole and expected.reasons[sample] != reply.reasons[sample]:
            return f"ended for another reason in sample {sample}"
    return None
