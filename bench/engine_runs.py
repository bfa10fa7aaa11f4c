"""Requests that come together to an engine of this process, and what its steps take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_trace import counted_waits
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import GatewayBatch, Submit
from weft.engine.loop.llm import LLM

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Batch:
    """Tokens of a batch, and the time of its part in which all requests decoded."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    first_token_s: float = 0.0
    num_steps: int = 0
    seconds: float = 0.0
    host_s: list[float] = field(default_factory=list)
    """Of each of these steps the time not spent waiting for the device."""
    all_seconds: float = 0.0
    """Time until the last token of all requests."""

    def take(self, told: list[GatewayBatch]) -> None:
        """Takes the tokens out of `told`, and empties it."""
        for session in told:
            for tokens in session.all_tokens():
                self.tokens[int(tokens.request_id)].extend(tokens.ids)
        told.clear()


def random_prompts(vocab_size: int, batch: int, length: int) -> list[list[int]]:
    """The same for the same numbers, whatever was drawn before."""
    rng = random.Random(f"{batch} prompts of {length}")
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]


def run_batch(
    llm: LLM,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    on_decode: Callable[[int], None] = lambda step: None,
) -> Batch:
    """Submits random prompts and turns the engine until all are done.

    `on_decode` is called after a step in which all requests decoded, with its number.
    """
    prompts = random_prompts(llm.engine.info.vocab_size, batch, prompt_tokens)
    return run_requests(llm, prompts, [new_tokens] * batch, GREEDY, on_decode)


def run_requests(
    llm: LLM,
    prompts: list[list[int]],
    new_tokens: Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams],
    on_decode: Callable[[int], None] = lambda step: None,
    adapters: Sequence[bytes] | None = None,
) -> Batch:
    """`run_batch` of these prompts; each may draw in its own way and name an adapter."""
    engine = llm.engine
    run = Batch(prompts, [[] for _ in prompts])
    submits = [
        Submit(
            gateway=1,
            request_id=str(index),
            attempt=1,
            prompt=prompt,
            sampling=sampling if isinstance(sampling, SamplingParams) else sampling[index],
            stop=StopCriteria(max_tokens=count, ignore_eos=True),
            adapter=adapters[index] if adapters else b"",
        )
        for index, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
    ]
    inbox: Inbox | None = Inbox(submits=submits)
    began = time.perf_counter()
    all_began: float | None = None
    num_done, busy_until = 0, 0.0
    told: list[GatewayBatch] = []
    with counted_waits() as waits:
        while num_done < len(prompts):
            outbox = engine.turn(inbox)
            inbox = None
            for session in outbox.gateways:
                assert not session.failed, session.failed
                num_done += len(session.finished)
            told += outbox.gateways
            if all_began is None:
                # From here on tokens are taken only at the end, since taking them would count as
                # host time.
                run.take(told)
            now = time.perf_counter()
            busy = now - waits.seconds
            if all_began is None:
                if all(run.tokens):
                    all_began = now
                    run.first_token_s = now - began
            elif num_done == 0:
                run.num_steps += 1
                run.seconds = now - all_began
                run.host_s.append(busy - busy_until)
                on_decode(run.num_steps)
            busy_until = busy
    run.all_seconds = time.perf_counter() - began
    run.take(told)
    return run
