"""Submits on the wire: what a gateway says is what the engine gets, and what is out of its range is
refused by name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from weft.contract.errors import InvalidRequest
from weft.contract.request import (
    BeamParams,
    Constraint,
    Reasoning,
    SamplingParams,
    StopCriteria,
    TimeTokens,
)
from weft.contract.spans import MediaSpan
from weft.contract.submits import SampleProgress, Submit
from weft.contract.tasks import PoolingParams
from weft.contract.timeline import FillCandidate
from weft.contract.token_ids import token_ids
from weft.decode.assembly import Assembly
from weft.v1 import common_pb2, decode_pb2

DAY_S = 86_400.0
IDS = [random.getrandbits(32) for _ in range(20)]


def decoded(message: decode_pb2.Submit, session: int = 3) -> Submit:
    """Through bytes, as a Session does."""
    arrived = decode_pb2.Submit.FromString(message.SerializeToString())
    return Assembly(arrived).submit(session)


def a_submit() -> decode_pb2.Submit:
    """With every field set, each to a value that is not its default."""
    message = decode_pb2.Submit(
        request_id="r-1",
        attempt=2,
        prompt={"ids": IDS},
        prompt_length=len(IDS),
        sampling={
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "min_p": 0.125,
            "top_n_sigma": 1.5,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 2.0,
            "logit_bias": {5: -100.0, 2**32 - 1: 0.5},
            "seed": 2**64 - 1,
            "n": 3,
            "constraint": {
                "json_schema": "{}",
                "reasoning": {"begin": 4, "end": [5, 6], "until": 0},
                "alternatives": [9],
                "whitespace_pattern": "[ ]?",
            },
            "speculate": False,
            "time_tokens": {"first": 9, "end": 8, "max_initial": 50},
            "beams": {"width": 5, "length_penalty": 0.5, "patience": 2.0},
        },
        stop={"max_tokens": 9, "min_tokens": 2, "stop_token_ids": [0, 1], "ignore_eos": True},
        logprobs={"top_logprobs": 20, "scaled": True},
        prompt_logprobs={},
        prefill_candidates=[
            {
                "worker_id": "p",
                "address": "h:1",
                "epoch": 2**64 - 1,
                "match_tokens": 3,
                "queued_tokens": 4,
                "tokens_per_second": 0.1,
            },
            {"worker_id": "q", "tokens_per_second": math.nan},
        ],
        first_token_timeout={"seconds": 1, "nanos": 500_000_000},
        total_timeout={"seconds": 2},
        traceparent="t",
        cache_salt="é" * 64,
        model="m",
        progress=[{"sample": 1, "num_tokens": 2, "tokens": {"ids": [8, 9]}, "finished": True}],
        priority=-1_000_000,
        tenant="x" * 64,
        adapter={"name": "a", "digest": bytes(range(32))},
        session_id="s" * 128,
        end_session=True,
        routes_from=3,
        stream=7,
        pool={
            "output": decode_pb2.POOL_OUTPUT_LABEL_LOGITS,
            "label_ids": [1, 2],
            "dimensions": 0,
            "normalize": False,
            "segment_start": 6,
        },
        spans=[
            {
                "position": 5,
                "length": 6,
                "digest": bytes(range(32)),
                "offset": 7,
                "shape": [4, 5, 3],
            }
        ],
    )
    assert {field.name for field, _ in message.ListFields()} == set(
        decode_pb2.Submit.DESCRIPTOR.fields_by_name
    )
    return message


def test_every_field_reaches_the_engine() -> None:
    assert decoded(a_submit()) == Submit(
        gateway=3,
        request_id="r-1",
        attempt=2,
        prompt=token_ids(IDS),
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            top_n_sigma=1.5,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=2.0,
            logit_bias={5: -100.0, 2**32 - 1: 0.5},
            seed=2**64 - 1,
            n=3,
            constraint=Constraint(kind="json_schema", text="{}", whitespace="[ ]?"),
            time_tokens=TimeTokens(first=9, end=8, max_initial=50),
            beams=BeamParams(width=5, length_penalty=0.5, patience=2.0),
            speculates=False,
        ),
        stop=StopCriteria(max_tokens=9, min_tokens=2, stop_token_ids=(0, 1), ignore_eos=True),
        top_logprobs=20,
        scales_logprobs=True,
        prompt_logprobs=0,
        pool=PoolingParams(
            output="label_logits",
            label_ids=(1, 2),
            dimensions=0,
            normalises=False,
            segment_start=6,
        ),
        candidates=[
            FillCandidate(
                worker_id="p",
                address="h:1",
                epoch=2**64 - 1,
                match_tokens=3,
                queued_tokens=4,
                tokens_per_second=0.1,
            ),
            FillCandidate(worker_id="q", address="", epoch=0),
        ],
        first_token_timeout_s=1.5,
        total_timeout_s=2.0,
        cache_salt="é" * 64,
        traceparent="t",
        priority=-1_000_000,
        tenant="x" * 64,
        adapter=bytes(range(32)),
        session_id="s" * 128,
        ends_session=True,
        routes_from=3,
        progress=[SampleProgress(sample=1, tokens=[8, 9], is_finished=True)],
        spans=[MediaSpan(position=5, length=6, digest=bytes(range(32)), offset=7, shape=(4, 5, 3))],
    )
    constraint = decoded(a_submit()).sampling.constraint
    assert constraint is not None
    assert constraint.reasoning == Reasoning(begin=4, end=(5, 6), until=0)
    assert constraint.alternatives == (9,)


def test_what_is_absent_has_its_default() -> None:
    assert decoded(decode_pb2.Submit(request_id="r")) == Submit(
        gateway=3,
        request_id="r",
        attempt=0,
        prompt=token_ids(),
        sampling=SamplingParams(),
        stop=StopCriteria(),
        first_token_timeout_s=DAY_S,
        total_timeout_s=DAY_S,
    )
    constraint = decoded(
        decode_pb2.Submit(
            request_id="r",
            sampling={"constraint": {"choice": {"choices": ["a", "b"]}, "reasoning": {"end": [1]}}},
            pool={"output": decode_pb2.POOL_OUTPUT_SPARSE},
        )
    )
    assert constraint.sampling.constraint == Constraint(kind="choice", choices=("a", "b"))
    assert constraint.sampling.constraint is not None
    assert constraint.sampling.constraint.reasoning == Reasoning(end=(1,))
    assert constraint.pool == PoolingParams(output="sparse")


def test_times_are_brought_within_a_day() -> None:
    message = decode_pb2.Submit(request_id="r", first_token_timeout={"seconds": -5})
    message.total_timeout.seconds = 10**9
    submit = decoded(message)
    assert (submit.first_token_timeout_s, submit.total_timeout_s) == (0.0, DAY_S)


def sampling(**changes: object) -> Callable[[decode_pb2.Submit], None]:
    def change(message: decode_pb2.Submit) -> None:
        message.sampling.MergeFrom(common_pb2.SamplingParams(**changes))  # type: ignore[arg-type]

    return change


def constraint(**changes: object) -> Callable[[decode_pb2.Submit], None]:
    def change(message: decode_pb2.Submit) -> None:
        message.sampling.constraint.MergeFrom(
            common_pb2.Constraint(**changes)  # type: ignore[arg-type]
        )

    return change


def candidates(message: decode_pb2.Submit) -> None:
    message.prefill_candidates.extend([decode_pb2.PrefillCandidate()] * 63)


BAD: list[tuple[str, Callable[[decode_pb2.Submit], object]]] = [
    ("request_id", lambda m: m.ClearField("request_id")),
    ("request_id", lambda m: setattr(m, "request_id", "é" * 33)),
    ("prefill_candidates", candidates),
    ("cache_salt", lambda m: setattr(m, "cache_salt", "é" * 65)),
    ("priority", lambda m: setattr(m, "priority", 1_000_001)),
    ("priority", lambda m: setattr(m, "priority", -1_000_001)),
    ("tenant", lambda m: setattr(m, "tenant", "é" * 33)),
    ("adapter", lambda m: setattr(m.adapter, "digest", bytes(31))),
    ("adapter", lambda m: m.adapter.ClearField("digest")),
    ("session_id", lambda m: setattr(m, "session_id", "s" * 129)),
    ("logprobs", lambda m: setattr(m.logprobs, "top_logprobs", 21)),
    ("prompt_logprobs", lambda m: setattr(m.prompt_logprobs, "top_logprobs", 2**32 - 1)),
    ("pool", lambda m: m.pool.ClearField("output")),
    ("pool", lambda m: setattr(m.pool, "output", 77)),
    ("temperature", sampling(temperature=-0.5)),
    ("temperature", sampling(temperature=100.5)),
    ("temperature", sampling(temperature=math.nan)),
    ("temperature", sampling(temperature=math.inf)),
    ("top_p", sampling(top_p=1.5)),
    ("top_k", sampling(top_k=2**31)),
    ("min_p", sampling(min_p=-0.1)),
    ("top_n_sigma", sampling(top_n_sigma=-0.5)),
    ("repetition_penalty", sampling(repetition_penalty=0.0)),
    ("presence_penalty", sampling(presence_penalty=2.5)),
    ("frequency_penalty", sampling(frequency_penalty=-2.5)),
    ("n", sampling(n=0)),
    ("n", sampling(n=129)),
    ("logit_bias", sampling(logit_bias={3: 100.5})),
    ("logit_bias", sampling(logit_bias={3: math.nan})),
    ("constraint", lambda m: m.sampling.constraint.ClearField("json_schema")),
    ("constraint", constraint(whitespace_pattern="x")),
    ("constraint", constraint(whitespace_pattern=" " * 257)),
    ("constraint", constraint(alternatives=range(16))),
    ("constraint", constraint(reasoning={"end": range(15)})),
    ("constraint", lambda m: m.sampling.constraint.reasoning.ClearField("end")),
    ("progress", lambda m: m.progress.add(sample=1)),
    ("prompt", lambda m: setattr(m, "prompt_length", 5 << 20)),
]


@pytest.mark.parametrize(("param", "change"), BAD)
def test_what_is_out_of_range_is_refused_by_name(
    param: str, change: Callable[[decode_pb2.Submit], object]
) -> None:
    message = a_submit()
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        decoded(message)
    assert caught.value.param == param
