"""Runs constrained and free requests on an engine in this process."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from weft.engine.engine import Engine
from weft.engine.errors import WeftError
from weft.engine.llm import to_error
from weft.engine.messages import Inbox, SampleProgress, Submit
from weft.engine.request import Constraint, SamplingParams, StopCriteria, TokenLogprob

TIMEOUT_S = 200.0


@dataclass
class Outcome:
    """What became of one sample."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    """Of the drafts."""


def schema(value: object) -> Constraint:
    """A JSON schema as a constraint."""
    return Constraint(kind="json_schema", text=json.dumps(value))


class Desk:
    """Sends requests to an engine, and turns it until all have ended."""

    _ids = itertools.count()

    def __init__(self, engine: Engine, model_dir: Path) -> None:
        self.engine = engine
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def text(self, outcome: Outcome) -> str:
        """What the sample says, special tokens left out."""
        return str(self.tokenizer.decode(outcome.ids, skip_special_tokens=True))

    def submit(
        self,
        constraint: Constraint | None,
        prompt: list[int],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        n: int = 1,
        stop: StopCriteria | None = None,
        top_logprobs: int | None = None,
        progress: list[SampleProgress] | None = None,
        logit_bias: dict[int, float] | None = None,
    ) -> Submit:
        """A request; not sent yet."""
        return Submit(
            session=0,
            request_id=str(next(self._ids)),
            attempt=1,
            prompt=prompt,
            sampling=SamplingParams(
                temperature=temperature,
                seed=seed,
                n=n,
                constraint=constraint,
                logit_bias=logit_bias or {},
            ),
            stop=stop or StopCriteria(max_tokens=1500),
            top_logprobs=top_logprobs,
            progress=progress or [],
        )

    def run(self, *submits: Submit) -> list[Outcome | WeftError]:
        """The first sample of each, or the error that its request ended in."""
        return [
            samples if isinstance(samples, WeftError) else samples[0]
            for samples in self.run_all(*submits)
        ]

    def run_all(self, *submits: Submit) -> list[list[Outcome] | WeftError]:
        """All samples of each."""
        groups: dict[str, list[Outcome]] = {
            s.request_id: [Outcome() for _ in range(s.sampling.n)] for s in submits
        }
        errors: dict[str, WeftError] = {}
        num_open = sum(s.sampling.n for s in submits)
        inbox: Inbox | None = Inbox(submits=list(submits))
        deadline = time.monotonic() + TIMEOUT_S
        while num_open:
            assert time.monotonic() < deadline, f"{num_open} samples are still open"
            outbox = self.engine.turn(inbox)
            inbox = None
            if not self.engine.ran_step:
                time.sleep(0.002)
            for batch in outbox.sessions:
                for tokens in batch.tokens:
                    groups[tokens.request_id][tokens.sample].ids += tokens.ids
                    groups[tokens.request_id][tokens.sample].logprobs += tokens.logprobs
                for finished in batch.finished:
                    sample = groups[finished.request_id][finished.sample]
                    sample.reason = finished.reason
                    sample.num_preemptions = finished.timeline.num_preemptions
                    sample.num_drafted = finished.timeline.num_drafted_tokens
                    sample.num_accepted = finished.timeline.num_accepted_tokens
                    num_open -= 1
                for failed in batch.failed:
                    errors[failed.request_id] = to_error(failed.failure)
                    num_open -= len(groups[failed.request_id])
        while self.engine.pipeline.num_steps:
            self.engine.turn()
        return [errors.get(s.request_id) or groups[s.request_id] for s in submits]

    def one(self, submit: Submit) -> Outcome:
        """The outcome of a request that must not fail."""
        (outcome,) = self.run(submit)
        if isinstance(outcome, WeftError):
            raise outcome
        return outcome
