"""Answers of tokens in and tokens out, in the shapes of SGLang and of vLLM."""

from __future__ import annotations

import base64
import io
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from weft.contract.request import LogprobsMode
from weft.gateway.api.openai.answers import PromptLogprobAnswers, WeightSpan
from weft.gateway.api.openai.chunks import FINISH_NAMES, to_json
from weft.gateway.api.openai.logprobs import finite
from weft.gateway.api.openai.prompt_logprobs import PromptLogprobs
from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.generation.generation import Generation, SampleOutput
from weft.v1 import common_pb2

SglangLogprob = tuple[float | None, int, str | None]
"""Log-probability, token id and, if asked for, text."""


class FinishAnswer(BaseModel):
    """Why a sample has ended, in SGLang's form."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = Field(None, description="with stop: the string or the token")
    length: int | None = Field(None, description="with length: number of tokens")
    message: str | None = Field(None, description="with abort")


class MetaInfo(BaseModel):
    """The field `meta_info`."""

    id: str
    finish_reason: FinishAnswer | None = Field(description="null until the sample's last event")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str = Field(
        description="which weights have drawn the last token; `default`: those of the start"
    )
    weight_versions: list[WeightSpan] | None = Field(None, description="once weights were changed")
    e2e_latency: float = Field(description="seconds")
    logprobs_mode: LogprobsMode | None = Field(None, description="of which distribution they are")
    output_token_logprobs: list[SglangLogprob] | None = None
    output_top_logprobs: list[list[SglangLogprob]] | None = None
    input_token_logprobs: list[SglangLogprob] | None = Field(
        None, description="from `logprob_start_len` on; null for the prompt's first token"
    )
    input_top_logprobs: list[list[SglangLogprob] | None] | None = None
    routed_experts: str | None = Field(
        None,
        description="base64 of int32, little-endian, [tokens - 1, layers, k]: the experts of each "
        "token of prompt and sample but the last, in ascending order, from "
        "`routed_experts_start_len` on; zeros in layers without experts",
    )


class TokensAnswer(BaseModel):
    """Answer to POST /generate, of one prompt and one sample; of several a list of these, in order.
    An event of a stream has all of a sample so far, and with several its `index`.
    """

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


class TokenTopLogprob(BaseModel):
    """An alternative token."""

    token: str = Field(description="`token_id:` and the id")
    logprob: float
    bytes: list[int]


class TokenLogprobAnswer(TokenTopLogprob):
    """Log-probability of one token."""

    top_logprobs: list[TokenTopLogprob]


class TokenLogprobs(BaseModel):
    """Log-probabilities of a choice."""

    content: list[TokenLogprobAnswer]


class TokensChoice(BaseModel):
    """One sample; in an event of a stream what it has gained."""

    index: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None = None
    weight_versions: list[WeightSpan] | None = Field(
        None, description="at its end, once weights were changed"
    )
    routed_experts: str | None = Field(
        None,
        description="base64 of a .npy file, uint8, or uint16 with more than 256 experts, "
        "[tokens - 1, layers, k]: the experts of each token of prompt and sample but the last, in "
        "ascending order, from `routed_experts_prompt_start` on; zeros in layers without experts",
    )


class ContinuedAnswer(BaseModel):
    """Answer to POST /inference/v1/generate, and event of its stream."""

    request_id: str
    choices: list[TokensChoice]
    logprobs_mode: LogprobsMode | None = None
    prompt_logprobs: PromptLogprobAnswers | None = None
    usage: dict[str, Any] | None = None
    kv_transfer_params: None = None


@dataclass(slots=True)
class _Sample:
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    last: Delta | None = None
    """Its last delta, once it has ended."""


def _spans(sample: SampleOutput) -> list[dict[str, object]]:
    return [
        {"version": span.version, "start": span.start, "end": span.end}
        for span in sample.weight_versions
    ]


class _Writer:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._n = answer.request.sampling.n
        num_samples = sum(len(one.samples) for one in answer.generations)
        self._samples = [_Sample() for _ in range(num_samples)]

    def push(self, delta: Delta) -> None:
        """Takes what a sample has gained."""
        sample = self._samples[delta.sample]
        sample.text.append(delta.text)
        sample.ids += delta.ids
        sample.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            sample.last = delta

    @property
    def num_tokens(self) -> int:
        """Entries that the answer shows, of all samples; one for each layer that has experts."""
        shown = sum(len(one.ids) + len(one.logprobs) for one in self._samples)
        routes = (self._routes(number) for number in range(len(self._samples)))
        return shown + sum(math.prod(one.shape[:2]) for one in routes if one is not None)

    def _routes(self, number: int) -> NDArray[np.generic] | None:
        """[tokens - 1, layers, k]; None: they are not wanted, or were lost with their worker."""
        generation, output = self._place(number)
        if output.routes is None:
            return None
        return output.routes.array(len(generation.prompt.ids) + len(output.ids))

    def _place(self, number: int) -> tuple[Generation, SampleOutput]:
        generation = self._answer.generations[number // self._n]
        return generation, generation.samples[number % self._n]


class SglangWriter(_Writer):
    """Args:
    names: Names of the prompts in the answer; empty: made of the request's.
    scores_from: Position in the prompts from which on their log-probabilities are shown; None:
        none are.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        is_list: bool,
        names: Sequence[str],
        scores_from: int | None,
        shows_texts: bool,
    ) -> None:
        super().__init__(answer)
        self._is_list = is_list
        self._names = names
        self._scores_from = scores_from
        self._shows_texts = shows_texts
        self._begin = time.monotonic()

    def event(self, delta: Delta) -> bytes:
        """The event after a delta that `push` has taken: all of its sample so far."""
        index = {"index": delta.sample} if self._is_list else {}
        return b"data: " + to_json({**self._one(delta.sample), **index}) + b"\n\n"

    def whole(self) -> object:
        """The whole answer, once its usage is known."""
        found = [self._one(number) for number in range(len(self._samples))]
        return found if self._is_list else found[0]

    def _one(self, number: int) -> dict[str, object]:
        sample = self._samples[number]
        return {
            "text": "".join(sample.text),
            "output_ids": list(sample.ids),
            "meta_info": self._meta(number, sample),
        }

    def _meta(self, number: int, sample: _Sample) -> dict[str, object]:
        generation, output = self._place(number)
        request, spans = self._answer.request, _spans(output)
        name = request.raw.own_id or request.request_id
        if self._names:
            name = self._names[number // self._n]
        elif self._is_list:
            name = f"{name}-{number}"
        told: dict[str, object] = {
            "id": name,
            "finish_reason": _finish(sample),
            "prompt_tokens": generation.num_prompt_tokens,
            "completion_tokens": len(sample.ids),
            "cached_tokens": generation.cached_prompt_tokens,
            "weight_version": spans[-1]["version"] if spans else "default",
            **({"weight_versions": spans} if spans else {}),
            "e2e_latency": time.monotonic() - self._begin,
        }
        if output.routes is not None and sample.last is not None:
            routes = self._routes(number)
            told["routed_experts"] = (
                None if routes is None else _base64(routes.astype("<i4").tobytes())
            )
        if request.top_logprobs is None:
            return told
        told["logprobs_mode"] = request.logprobs_mode
        told["output_token_logprobs"] = [self._of_token(one) for one in sample.logprobs]
        if request.top_logprobs:
            told["output_top_logprobs"] = [self._top(one) for one in sample.logprobs]
        if self._scores_from is not None:
            told |= self._of_prompt(generation, self._scores_from, request.top_logprobs)
        return told

    def _of_prompt(self, generation: Generation, start: int, most: int) -> dict[str, object]:
        assert generation.prompt_scores is not None, "they were asked for"
        entries = generation.prompt_scores.entries
        own: list[object] = [self._of_token(one) for one in entries[max(0, start - 1) :]]
        top: list[object] = [self._top(one) for one in entries[max(0, start - 1) :]]
        if not start:
            first = generation.prompt.ids[0]
            own.insert(0, (None, first, self._text(first)))
            top.insert(0, None)
        return {"input_token_logprobs": own, **({"input_top_logprobs": top} if most else {})}

    def _of_token(
        self, entry: common_pb2.TokenLogprob | common_pb2.TopLogprob
    ) -> tuple[float, int, str | None]:
        return (finite(entry.logprob), entry.token_id, self._text(entry.token_id))

    def _top(self, entry: common_pb2.TokenLogprob) -> list[tuple[float, int, str | None]]:
        return [self._of_token(one) for one in entry.top]

    def _text(self, token_id: int) -> str | None:
        return self._answer.card.vocabulary.token_text(token_id) if self._shows_texts else None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _npy(routes: NDArray[np.generic] | None) -> str | None:
    if routes is None:
        return None
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return _base64(file.getvalue())


def _finish(sample: _Sample) -> dict[str, object] | None:
    if sample.last is None or sample.last.finish_reason is None:
        return None
    kind = FINISH_NAMES[sample.last.finish_reason]
    if kind == "length":
        return {"type": kind, "length": len(sample.ids)}
    if kind == "abort":
        return {"type": kind, "message": "cancelled"}
    matched = sample.last.stop_reason
    if matched is None and sample.ids:
        matched = sample.ids[-1]
    return {"type": kind, "matched": matched}


class VllmWriter(_Writer):
    def event(self, delta: Delta) -> bytes:
        """The event of one delta."""
        return self._event([self._choice(delta.sample, delta.ids, delta.logprobs, delta)])

    def last_event(self, fields: Mapping[str, object]) -> bytes:
        return self._event([], fields)

    def whole(self, usage: Mapping[str, object]) -> dict[str, object]:
        """The whole answer, once its usage is known."""
        choices = [
            self._choice(number, one.ids, one.logprobs, one.last)
            for number, one in enumerate(self._samples)
        ]
        answer, most = self._answer, self._answer.request.prompt_logprobs
        scores: object = None
        if most is not None:
            made = PromptLogprobs(answer.card.vocabulary, answer.generations, num_listed=most)
            scores = made.of_chat()["prompt_logprobs"]
        return {
            **self._frame(),
            "choices": choices,
            "prompt_logprobs": scores,
            "usage": usage,
            "kv_transfer_params": None,
        }

    def _frame(self) -> dict[str, object]:
        request = self._answer.request
        mode = {"logprobs_mode": request.logprobs_mode}
        return {
            "request_id": request.raw.own_id or request.request_id,
            **(mode if request.top_logprobs is not None else {}),
        }

    def _event(
        self, choices: Sequence[object], fields: Mapping[str, object] | None = None
    ) -> bytes:
        frame = {**self._frame(), "choices": choices, **(fields or {})}
        return b"data: " + to_json(frame) + b"\n\n"

    def _choice(
        self,
        number: int,
        ids: Sequence[int],
        logprobs: Sequence[common_pb2.TokenLogprob],
        last: Delta | None,
    ) -> dict[str, object]:
        reason = None if last is None else last.finish_reason
        entries = None
        if self._answer.request.top_logprobs is not None:
            entries = {"content": [self._entry(one) for one in logprobs]}
        choice: dict[str, object] = {
            "index": number,
            "token_ids": list(ids),
            "logprobs": entries,
            "finish_reason": None if reason is None else FINISH_NAMES[reason],
            "stop_reason": None if last is None else last.stop_reason,
        }
        output = self._place(number)[1]
        if output.routes is not None and reason is not None:
            choice["routed_experts"] = _npy(self._routes(number))
        spans = _spans(output)
        return {**choice, **({"weight_versions": spans} if spans and reason is not None else {})}

    def _entry(self, entry: common_pb2.TokenLogprob) -> dict[str, object]:
        return {**self._described(entry), "top_logprobs": [self._described(x) for x in entry.top]}

    def _described(
        self, entry: common_pb2.TokenLogprob | common_pb2.TopLogprob
    ) -> dict[str, object]:
        return {
            "token": f"token_id:{entry.token_id}",
            "logprob": finite(entry.logprob),
            "bytes": list(self._answer.card.vocabulary.token_bytes(entry.token_id)),
        }
