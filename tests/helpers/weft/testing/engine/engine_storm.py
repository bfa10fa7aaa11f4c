"""Random load and random faults on an `EnginePair`; every sample is followed to its end."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from weft.contract.fills import FillCommand
from weft.contract.handle import FillEvent
from weft.contract.messages import Outbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.store import (
    StoreAnswer,
    StoreLookup,
    StorePut,
    StorePutResult,
    StoreSegment,
)
from weft.contract.submits import Cancel, Submit
from weft.engine.loop.engine import Engine
from weft.testing.engine.engine_pair import EnginePair, ManualClock, num_quarantined

NUM_SESSIONS = 3


@dataclass(frozen=True)
class Text:
    """A prompt, how it is sampled, and the right tokens of each sample."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    samples: tuple[tuple[int, ...], ...]


@dataclass
class Sent:
    """One request and its outcome."""

    submit: Submit
    text: Text
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    is_abandoned: bool = False
    """Whether its session was closed, so that nobody listens any more."""

    @property
    def is_over(self) -> bool:
        """Whether everything has been reported."""
        return bool(self.failures) or len(self.reasons) == self.submit.sampling.n

    def check(self) -> None:
        """Checks that each sample ended once, and that its reported text is right."""
        what = (self.submit.request_id, self.reasons, self.failures)
        assert len(self.failures) <= 1, what
        broken = ("not finite", "a step failed")
        assert not any(text in failure for failure in self.failures for text in broken), what
        assert all(len(reasons) == 1 for reasons in self.reasons.values()), what
        assert self.is_over or self.is_abandoned, what
        assert max([*self.reasons, *self.tokens, 0]) < self.submit.sampling.n, what
        for sample, tokens in self.tokens.items():
            right = list(self.text.samples[sample][: self.submit.stop.max_tokens])
            assert tokens == right[: len(tokens)], what
            if self.reasons.get(sample) == ["length"]:
                assert tokens == right, what


class Storm(EnginePair):
    """Chances are by message or turn.

    Args:
        owner: Owner engine.
        fillers: Of prompts; as KV stores too, where the owner has one.
        clock: Shared by all.
        texts: What is asked for.
        rng: Decides everything.
    """

    def __init__(
        self,
        owner: Engine,
        fillers: Sequence[Engine],
        clock: ManualClock,
        texts: Sequence[Text],
        rng: random.Random,
    ) -> None:
        super().__init__(owner, fillers, clock)
        self.rng = rng
        self.texts = texts
        self.sent: list[Sent] = []
        self.num_preempted = 0
        self.faults: Counter[str] = Counter()
        self.is_calm = False
        """Whether no more faults are injected."""
        self._open: dict[tuple[int, str], Sent] = {}
        self._sessions = list(range(1, NUM_SESSIONS + 1))
        self._held: list[tuple[int, Callable[[], None]]] = []
        """Messages that are late, and the turn in which they come."""
        self._num_turns = 0
        self.on_command = self._spoil_command
        self.on_event = self._spoil_event

    @property
    def num_open(self) -> int:
        """Requests that are not over, and that somebody waits for."""
        return len(self._open)

    def turn(self) -> None:
        """Takes one turn of every engine, with the storm's additions."""
        self._num_turns += 1
        due = [deliver for at, deliver in self._held if at <= self._num_turns]
        self._held = [item for item in self._held if item[0] > self._num_turns]
        for deliver in due:
            deliver()
        if not self.is_calm:
            self._disturb()
        super().turn()

    def run_some(self, num_turns: int) -> None:
        """Takes turns."""
        for _ in range(num_turns):
            self.turn()

    def submit_any(self) -> None:
        """Sends a random request."""
        rng = self.rng
        text = rng.choice(self.texts)
        names = rng.sample(sorted(self.fillers), rng.randint(0, len(self.fillers)))
        submit = Submit(
            gateway=rng.choice(self._sessions),
            request_id=f"s{len(self.sent)}",
            attempt=rng.randint(1, 3),
            prompt=list(text.prompt),
            sampling=replace(text.sampling, n=rng.choice([1, 1, 2, 4])),
            stop=StopCriteria(max_tokens=rng.randint(1, len(text.samples[0])), ignore_eos=True),
            candidates=[self.candidate(name) for name in names],
            total_timeout_s=rng.choice([1.0, 600.0, 600.0, 600.0]),
        )
        sent = Sent(submit, text)
        self.sent.append(sent)
        self._open[submit.gateway, submit.request_id] = sent
        self.send(submits=[submit])

    # -- what goes wrong -------------------------------------------------------------------------

    def _disturb(self) -> None:
        rng = self.rng
        if rng.random() < 0.002:
            self.clock.offset_s += rng.choice([0.2, 0.2, 2.0, 6.0, 11.0])
            self.faults["stall"] += 1
        if rng.random() < 0.003 and self.paused:
            self.paused.clear()
        elif rng.random() < 0.002 and self.fillers:
            self.paused.add(rng.choice(sorted(self.fillers)))
            self.faults["pause"] += 1
        if rng.random() < 0.001:
            self._close_session()
        if rng.random() < 0.01:
            self.send(flush_cache=[1])
        if self._open and rng.random() < 0.03:
            self._cancel(rng.choice(list(self._open.values())).submit)
        if self._open and rng.random() < 0.005:
            self.faults["repeated submit"] += 1
            self.send(submits=[rng.choice(list(self._open.values())).submit])

    def _cancel(self, submit: Submit) -> None:
        sample = self.rng.choice([None, self.rng.randrange(submit.sampling.n)])
        self.faults["cancel" if sample is None else "cancel of a sample"] += 1
        cancel = Cancel(
            gateway=submit.gateway,
            request_id=submit.request_id,
            attempt=submit.attempt,
            sample=sample,
        )
        self.send(cancels=[cancel])

    def _close_session(self) -> None:
        self.faults["closed session"] += 1
        closed = self._sessions.pop(0)
        self._sessions.append(max(self._sessions) + 1)
        self.send(closed_gateways=[closed])
        for key in [key for key in self._open if key[0] == closed]:
            self._open.pop(key).is_abandoned = True

    def _spoil_command(self, command: FillCommand) -> list[FillCommand]:
        if command.action == "report":
            return []  # of a corrupt page, to a store that is none
        chance = 1.0 if self.is_calm else self.rng.random()
        if chance < 0.01:
            self.faults[f"lost {command.action}"] += 1
            return []
        if chance < 0.03:
            self.faults[f"late {command.action}"] += 1
            self._later(lambda: self._to_filler_inbox(command))
            return []
        return [command]

    def _spoil_event(self, event: FillEvent) -> list[FillEvent]:
        chance = 1.0 if self.is_calm else self.rng.random()
        if chance < 0.005:
            self.faults[f"lost {event.kind}"] += 1
            return []
        if chance < 0.01:
            self.faults[f"cut before {event.kind}"] += 1
            return [FillEvent(kind="broken", message="cut")]
        if chance < 0.015:
            self.faults[f"twice {event.kind}"] += 1
            return [event, event]
        if chance < 0.04 and event.kind == "written":
            self.faults["digest"] += 1
            return [replace(event, digests=[d ^ 1 for d in event.digests])]
        return [event]

    def _later(self, deliver: Callable[[], None]) -> None:
        self._held.append((self._num_turns + self.rng.randint(1, 200), deliver))

    # -- what the owner says ---------------------------------------------------------------------

    def _take_owner(self, outbox: Outbox) -> None:
        for batch in outbox.gateways:
            for failed in batch.failed:
                if (sent := self._open.get((batch.gateway, failed.request_id))) is not None:
                    sent.failures.append(str(failed.failure.to_error()))
            for tokens in batch.all_tokens():
                if (sent := self._open.get((batch.gateway, tokens.request_id))) is not None:
                    known = sent.tokens.setdefault(tokens.sample, [])
                    assert tokens.first_index <= len(known), "tokens are missing"
                    assert (
                        known[tokens.first_index :] == tokens.ids[: len(known) - tokens.first_index]
                    )
                    known += tokens.ids[len(known) - tokens.first_index :]
            for finished in batch.finished:
                if (sent := self._open.get((batch.gateway, finished.request_id))) is not None:
                    assert finished.completion_tokens == len(sent.tokens.get(finished.sample, []))
                    sent.reasons.setdefault(finished.sample, []).append(finished.reason)
            self.num_preempted += len(batch.preempted)
        self._open = {key: sent for key, sent in self._open.items() if not sent.is_over}
        for lookup in outbox.store_lookups:
            self._answer(lookup)
        for put in outbox.store_puts:
            self._store(put)
        rest = Outbox(fill_commands=outbox.fill_commands)
        super()._take_owner(rest)

    def _answer(self, lookup: StoreLookup) -> None:
        """A filler plays the store; sometimes it claims to hold part of the prompt."""
        name = self.rng.choice(sorted(self.fillers))
        num_pages = self.rng.choice([0, self.rng.randint(0, len(lookup.keys))])
        epoch = self.fillers[name].info.epoch
        segment = StoreSegment(num_pages=num_pages, store_id=name, address=name, epoch=epoch)
        answer = StoreAnswer(
            lookup=lookup.lookup,
            segments=[segment] if num_pages else [],
            epochs={name: epoch},
        )
        self._later(lambda: self.send(store_answers=[answer]))

    def _store(self, put: StorePut) -> None:
        is_answered = self.rng.random() < 0.8
        result = StorePutResult(
            put=put.put, is_answered=is_answered, stored_pages=len(put.pages) * is_answered
        )
        self._later(lambda: self.send(store_put_results=[result]))


def make_texts(
    engine: Engine,
    clock: ManualClock,
    samplings: Sequence[SamplingParams],
    num_new: int,
    is_sure: Callable[[Text], bool] = lambda text: True,
) -> list[Text]:
    """Prompts that share prefixes, and what a quiet engine makes of each; it is closed then.

    Args:
        engine: To ask one by one.
        clock: Its clock.
        samplings: Of each text, with as many samples as a storm may ask for.
        num_new: Tokens of each sample.
        is_sure: Whether others make the same of a prompt, which is drawn anew if they do not.
    """
    page, vocab_size = engine.config.page_size, engine.info.vocab_size

    def tokens(count: int) -> list[int]:
        return [random.randrange(3, vocab_size) for _ in range(count)]

    stems = [tokens(12 * page) for _ in range(3)]
    pair, made = EnginePair(engine, [], clock), []
    left = list(samplings)
    # Of all lengths: short texts alone would never fill the pages of an engine.
    shares = random.sample(range(len(left)), len(left))
    while left:
        sampling = left[0]
        share = (shares[len(made)] + random.random()) / len(shares)
        stem = random.choice(stems)[: round(share * 12 * page)]
        prompt = stem + tokens(random.randint(1, 3 * page))
        request_id = pair.submit(prompt, num_new, sampling=sampling)
        pair.finish(request_id, samples=sampling.n)
        answer = pair.answers[request_id].tokens
        samples = tuple(tuple(answer[i]) for i in range(sampling.n))
        text = Text(tuple(prompt), sampling, samples)
        if is_sure(text):
            made.append(text)
            left.pop(0)
    pair.close()
    return made


MOST_TIMES = 10
"""A storm may be so much longer than asked for, until everything has been seen."""


def ride_out(
    storm: Storm,
    num_requests: int,
    max_open: int,
    has_seen_all: Callable[[], bool] = lambda: True,
) -> None:
    """Runs a storm and its end; all that was told is right, and nothing is open any more.

    Args:
        storm: That has not begun.
        num_requests: To send.
        max_open: At one time.
        has_seen_all: Whether what the storm is for has happened: chance may need more requests.
    """
    is_rising = True
    while len(storm.sent) < num_requests or (
        not has_seen_all() and len(storm.sent) < MOST_TIMES * num_requests
    ):
        if len(storm.sent) >= num_requests:
            # In waves: pages of running requests stay cached, and cached texts need no filler.
            if not storm.num_open:
                storm.send(flush_cache=[1])
            is_rising = storm.num_open < max_open if is_rising else not storm.num_open
        for _ in range(storm.rng.randint(0, 2)):
            if is_rising and storm.num_open < max_open:
                storm.submit_any()
        storm.turn()
    storm.is_calm = True
    storm.paused.clear()
    storm.run_some(2)  # Behind the jump, an answer that is under way would count as progress.
    storm.clock.offset_s += 30  # whatever still waits for a lost message is noticed
    storm.run(lambda: not storm.num_open, timeout_s=60)
    for _ in range(5):
        storm.clock.offset_s += 2  # lost answers are asked for again
        storm.run_some(300)
    storm.settle()
    for sent in storm.sent:
        sent.check()


def check_empty(engine: Engine) -> None:
    """Checks that nothing is held any more, in any place."""
    assert engine.is_idle
    until_s = time.monotonic() + 60
    # The thread that ships pages hears of a lease's end behind the engine.
    while left := {name: size for name, size in engine.sizes().items() if size}:
        assert time.monotonic() < until_s, left
        time.sleep(0.01)
    for memory in engine.memories:
        memory.check_integrity()
        counts = memory.counts()
        assert counts.free + counts.cached == counts.total, counts
    assert (num_quarantined(engine), engine.memory.num_promised_pages) == (0, 0)
    staging = engine.parts.transport.staging_counts()
    assert staging is None or staging.free == staging.total, staging
    for tier in engine.tiers.report() if engine.tiers is not None else ():
        assert tier.free_pages + tier.cached_pages == tier.total_pages, tier
