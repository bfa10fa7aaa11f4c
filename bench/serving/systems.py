"""The systems in this process: the bare engine and transformers, on the same prompts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.utils import logging as transformers_logging
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.loop.llm import LLM

from serving.answers import Answer, Arrivals, Outcome

KV_MEMORY_BYTES = 512 << 20
GREEDY = SamplingParams(temperature=0.0)


class EngineSystem:
    """The bare engine as a library: no processes, no network, tokens in and out."""

    name = "engine"

    def __init__(self, model_dir: Path, dtype: str, num_threads: int) -> None:
        self._llm = LLM(
            model_dir, dtype=dtype, num_threads=num_threads, kv_memory_bytes=KV_MEMORY_BYTES
        )
        self._engine = self._llm.engine
        self._ids = itertools.count()
        self._open: dict[str, Answer] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of this model in this dtype."""
        return self._engine.info.page_bytes

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> Outcome:
        started_s = time.perf_counter()
        answers = self._submit(prompts, num_tokens)
        while self._open:
            self._turn(None)
        return Outcome(time.perf_counter() - started_s, answers)

    def run_with_arrivals(
        self, prompts: Sequence[list[int]], num_tokens: int, arrivals: Arrivals
    ) -> tuple[Outcome, list[Answer]]:
        started_s = time.perf_counter()
        answers = self._submit(prompts, num_tokens)
        while min(len(answer.event_times_s) for answer in answers) < arrivals.num_events_before:
            self._turn(None)
        waiting, arrived = list(arrivals.prompts), list[Answer]()
        send_s = time.perf_counter()
        while self._open:
            one_ended = any(len(answer.token_ids or ()) == num_tokens for answer in answers)
            if waiting and not one_ended and time.perf_counter() >= send_s:
                arrived += self._submit([waiting.pop(0)], 1)
                send_s += arrivals.interval_s
            else:
                self._turn(None)
        return Outcome(time.perf_counter() - started_s, answers), arrived

    def close(self) -> None:
        self._llm.close()

    def _submit(self, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
        """Queues prompts and runs one turn."""
        stop = StopCriteria(max_tokens=num_tokens, ignore_eos=True)
        submits = [
            Submit(
                gateway=0,
                request_id=str(next(self._ids)),
                attempt=1,
                prompt=prompt,
                sampling=GREEDY,
                stop=stop,
            )
            for prompt in prompts
        ]
        sent_s = time.perf_counter()
        answers = [Answer([], sent_s=sent_s) for _ in prompts]
        self._open |= {s.request_id: a for s, a in zip(submits, answers, strict=True)}
        self._turn(Inbox(submits=submits))
        return answers

    def _turn(self, inbox: Inbox | None) -> None:
        outbox = self._engine.turn(inbox)
        now_s = time.perf_counter()
        for batch in outbox.gateways:
            for failed in batch.failed:
                self._open.pop(failed.request_id, None)
                raise failed.failure.to_error()
            for tokens in batch.all_tokens():
                answer = self._open[tokens.request_id]
                assert answer.token_ids is not None
                answer.token_ids += tokens.ids
                answer.event_times_s.append(now_s)
            for finished in batch.finished:
                del self._open[finished.request_id]


class TransformersSystem:
    """`generate` of transformers: a left-padded static batch."""

    name = "transformers"

    def __init__(self, model_dir: Path, dtype: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = load_transformers(model_dir, dtype)

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> Outcome:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        clock = _StepClock()
        started_s = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([clock]),
            )
        wall_s = time.perf_counter() - started_s
        rows = output[:, width:].tolist()
        answers = [Answer(row, None, started_s, list(clock.times_s)) for row in rows]
        return Outcome(wall_s, answers)

    def prompt(self, prompt: list[int]) -> Outcome:
        """Runs one forward pass over a prompt; returns the next token."""
        started_s = time.perf_counter()
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt]), logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
        ended_s = time.perf_counter()
        return Outcome(ended_s - started_s, [Answer([token], None, started_s, [ended_s])])

    def close(self) -> None:
        del self._model


class _StepClock(LogitsProcessor):
    """Changes nothing; notes when each token of a batch is about to be chosen."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return scores


def load_transformers(model_dir: Path, dtype: str) -> Any:
    """The model in transformers; its `generate` goes on past end-of-sequence tokens."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
