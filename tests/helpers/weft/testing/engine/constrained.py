"""Runs constrained and free requests on an engine in this process."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer
from weft.contract.errors import WeftError
from weft.contract.messages import Inbox
from weft.contract.request import Constraint, SamplingParams, StopCriteria, TokenLogprob
from weft.contract.submits import SampleProgress, Submit
from weft.engine.loop.engine import Engine
from weft.testing.engine.random_schemas import Schema
from weft.testing.models.tiny_models import EOS_TOKEN_ID

TIMEOUT_S = 200.0


@dataclass
class Outcome:
    """Outcome of one sample."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    """Number of accepted drafts."""


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
        """Text of the sample, without special tokens."""
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
        frequency_penalty: float = 0.0,
    ) -> Submit:
        """Creates a request, which is not sent yet."""
        return Submit(
            gateway=0,
            request_id=str(next(self._ids)),
            attempt=1,
            prompt=prompt,
            sampling=SamplingParams(
                temperature=temperature,
                seed=seed,
                n=n,
                constraint=constraint,
                logit_bias=logit_bias or {},
                frequency_penalty=frequency_penalty,
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
        """Runs all requests; returns all samples of each."""
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
            for batch in outbox.gateways:
                for scores in batch.prompt_logprobs:
                    sample = groups[scores.request_id][0]
                    assert scores.first_position == 1 + len(sample.prompt_logprobs)
                    assert not sample.ids, "they come before the first token"
                    sample.prompt_logprobs += scores.logprobs
                for tokens in batch.all_tokens():
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
                    errors[failed.request_id] = failed.failure.to_error()
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


def check_valid(desk: Desk, outcome: Outcome | WeftError, schema_: Schema) -> None:
    """Checks that the text ended by itself, is JSON, and is valid."""
    assert isinstance(outcome, Outcome), outcome
    assert outcome.reason == "stop", (schema_, desk.text(outcome))
    assert outcome.ids[-1] == EOS_TOKEN_ID
    jsonschema.Draft202012Validator(schema_).validate(json.loads(desk.text(outcome)))


def bias_to_endings(desk: Desk) -> dict[int, float]:
    """A bias towards what ends an answer: a model that writes at random hardly ever finds the end.

    "x" ends the one pattern of `random_schemas` that has no bound.
    """
    biases = {**dict.fromkeys('"}]', 12.0), ",": 6.0, "x": 6.0}
    of_tokens = {desk.tokenizer.token_to_id(symbol): bias for symbol, bias in biases.items()}
    return {**of_tokens, EOS_TOKEN_ID: 12.0}


def check_schemas(desk: Desk, schemas: Sequence[Schema], temperature: float) -> None:
    """Answers are valid under their schemas, in one batch with free requests.

    Each gets the same tokens alone.
    """
    # A greedy model would repeat itself for ever where a schema lets it.
    settings: dict[str, Any] = {
        "temperature": temperature,
        "logit_bias": bias_to_endings(desk),
        "frequency_penalty": 0.0 if temperature else 0.5,
    }

    def prompt() -> list[int]:
        return [random.randrange(3, desk.tokenizer.get_vocab_size()) for _ in range(5)]

    submits = [desk.submit(schema(s), prompt(), seed=i, **settings) for i, s in enumerate(schemas)]
    limit = StopCriteria(max_tokens=60, ignore_eos=True)
    free = [desk.submit(None, prompt(), temperature=temperature, stop=limit) for _ in range(6)]
    together = desk.run(*submits, *free)
    for outcome, given in zip(together, schemas, strict=False):
        check_valid(desk, outcome, given)
    for submit, outcome in zip([*submits, *free], together, strict=True):
        assert isinstance(outcome, Outcome)
        alone = desk.submit(None, submit.prompt, stop=submit.stop)
        assert desk.one(replace(alone, sampling=submit.sampling)).ids == outcome.ids
