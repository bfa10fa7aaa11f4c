"""The gateway's log of finished requests."""

from __future__ import annotations

import time
from dataclasses import fields
from functools import partial

from tokenizers import Tokenizer
from weft.common.telemetry.request_log import LoggedPrompt, LoggedSample, RequestLog, terms
from weft.contract.codec.pairs import FINISH_REASONS
from weft.contract.request import StopCriteria
from weft.gateway.generation.answer import Answer
from weft.gateway.generation.generation import Generation
from weft.gateway.generation.submit import sampling_to_proto
from weft.gateway.settings import GatewaySettings
from weft.gateway.text.tokens import decode
from weft.v1 import common_pb2


class GatewayRequestLog:
    """Converts requests to lines of the log. The setting `request_log` must not be None. Raises
    ConfigError if the file cannot be written.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        assert settings.request_log is not None
        self._has_ids = settings.request_log_content != "none"
        self._has_texts = settings.request_log_content == "text"
        self._log = RequestLog(
            settings.request_log,
            settings.request_log_bytes,
            settings.request_log_files,
        )

    def write(self, answer: Answer) -> None:
        """Logs the prompts of a request that has ended. One without a stream has none."""
        if not answer.has_begun:
            return
        request, model, duration_s = answer.request, answer.card, answer.duration_s
        arrived_at = time.time() - duration_s
        add_texts = partial(_add_texts, model.tokenizer) if self._has_texts else _add_nothing
        for generation in answer.generations:
            sampling, stop = terms(
                sampling_to_proto(request, generation.prompt),
                _stop(request.stop, generation.prompt.max_tokens),
                has_content=self._has_ids,
            )
            self._log.write(
                LoggedPrompt(
                    time=arrived_at,
                    request_id=generation.wire_id,
                    client_request_id=answer.raw.client_request_id,
                    header_request_id=answer.raw.header_request_id,
                    trace_id=answer.trace.trace_id,
                    model=model.name,
                    adapter="" if request.adapter is None else request.adapter.name,
                    sampling=sampling,
                    stop=stop,
                    is_pooled=request.pooling is not None,
                    top_logprobs=request.top_logprobs,
                    num_prompt_tokens=generation.num_prompt_tokens,
                    prompt_ids=generation.prompt.ids if self._has_ids else None,
                    outcome=answer.outcome,
                    duration_s=round(duration_s, 6),
                    samples=self._samples(generation),
                ),
                add_texts,
            )

    def close(self) -> None:
        """Writes what is queued."""
        self._log.close()

    def _samples(self, generation: Generation) -> list[LoggedSample]:
        return [
            LoggedSample(
                finish_reason=_reason(sample.finish_reason),
                num_tokens=len(sample.ids),
                ids=list(sample.ids) if self._has_ids else None,
            )
            for sample in generation.samples
        ]


def _add_texts(tokenizer: Tokenizer, prompt: LoggedPrompt) -> None:
    """Runs in the log's thread, since detokenising takes time."""
    prompt.prompt_text = _text(tokenizer, prompt.prompt_ids or [])
    for sample in prompt.samples:
        sample.text = _text(tokenizer, sample.ids or [])


def _add_nothing(prompt: LoggedPrompt) -> None: ...


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    (text,) = decode(tokenizer, [ids])
    return text


def _reason(reason: common_pb2.FinishReason.ValueType | None) -> str:
    return "" if reason is None else FINISH_REASONS[reason]


def _stop(stop: StopCriteria, max_tokens: int) -> common_pb2.StopCriteria:
    given = {one.name: getattr(stop, one.name) for one in fields(stop)}
    return common_pb2.StopCriteria(**{**given, "max_tokens": max_tokens})
