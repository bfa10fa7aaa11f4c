"""Tokens in and tokens out, in SGLang's and vLLM's forms, against what the worker has drawn."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.message import Message
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import WeftError
from weft.gateway.api.trainer.token_answers import ContinuedAnswer, TokensAnswer
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir
from weft.testing.services.fake_decode import Script, prompt_score
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, dialects_pb2, dialects_pb2_grpc

TOKENIZER = byte_level_bpe()
SIZE = TOKENIZER.get_vocab_size()
TEXT = "An answer, 你好."
END = TOKENIZER.token_to_id("<|im_end|>")
TOKENS = [*TOKENIZER.encode(TEXT, add_special_tokens=False).ids, END]
OTHERS = [*TOKENIZER.encode("Another.", add_special_tokens=False).ids, END]
PROMPT = list(range(40, 75))


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    most = submit.stop.max_tokens
    return Script(tokens=[TOKENS[:most], OTHERS[:most]], chunk=3)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    async with gateway(tmp_path, script, rl=True) as harness:
        yield harness


async def post(mesh: Harness, method: str, body: dict[str, Any]) -> list[Any]:
    stub = dialects_pb2_grpc.TrainerServiceStub(mesh.channel)
    call = getattr(stub, method)(HttpBody(data=json.dumps(body).encode()))
    data = b"".join([message.data async for message in call])
    if not body.get("stream"):
        return [json.loads(data)]
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def refusal(mesh: Harness, method: str, body: dict[str, Any]) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await post(mesh, method, body)
    return from_rpc_error(caught.value)


async def test_sglangs_client_gets_the_tokens_that_were_drawn(mesh: Harness) -> None:
    """What slime sends for a rollout."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {
            **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 100},
            **{"stop": None, "stop_token_ids": None, "skip_special_tokens": False},
            "spaces_between_special_tokens": True,
        },
        "return_logprob": True,
        "lora_path": None,
    }
    (answer,) = await post(mesh, "GenerateTokens", body)
    TokensAnswer.model_validate(answer)
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (TEXT, TOKENS)
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[one, None] for one in TOKENS]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(TOKENS))
    assert meta["finish_reason"] == {"type": "stop", "matched": END}
    assert "output_top_logprobs" not in meta
    assert meta["logprobs_mode"] == "raw_logprobs"
    assert mesh.workers[0].prompts == [PROMPT]
    assert mesh.workers[0].submits[0].stop.max_tokens == 100


@pytest.mark.parametrize("start", [0, 1, 7])
async def test_a_prompts_log_probabilities_begin_where_the_client_says(
    mesh: Harness, start: int
) -> None:
    body = {
        **{"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": start},
        **{"top_logprobs_num": 2, "return_text_in_logprobs": True},
    }
    (answer,) = await post(mesh, "GenerateTokens", body)
    meta = answer["meta_info"]
    assert len(meta["output_top_logprobs"]) == len(TOKENS)
    shown = meta["input_token_logprobs"]
    assert [entry[1] for entry in shown] == PROMPT[start:]
    assert [entry[2] for entry in shown] == [TOKENIZER.decode([one]) for one in PROMPT[start:]]
    for position, (entry, top) in enumerate(
        zip(shown, meta["input_top_logprobs"], strict=True), start
    ):
        if not position:
            assert (entry[0], top) == (None, None)
            continue
        right = prompt_score(position, PROMPT[position], 2, SIZE)
        assert entry[0] == pytest.approx(right.logprob)
        assert [one[1] for one in top] == [one.token_id for one in right.top]


async def test_lists_and_several_samples_are_answered_in_order(mesh: Harness) -> None:
    body: dict[str, Any] = {
        "input_ids": [PROMPT, PROMPT[:9]],
        "sampling_params": [{"n": 2, "max_new_tokens": 4}] * 2,
        "rid": ["a", "b"],
    }
    (answer,) = await post(mesh, "GenerateTokens", body)
    assert [one["output_ids"] for one in answer] == [TOKENS[:4], OTHERS[:4]] * 2
    assert [one["meta_info"]["id"] for one in answer] == ["a", "a", "b", "b"]
    assert [one["meta_info"]["prompt_tokens"] for one in answer] == [35, 35, 9, 9]
    (answer,) = await post(mesh, "GenerateTokens", {"text": ["Hi there."], "rid": "x"})
    assert [one["meta_info"]["id"] for one in answer] == ["x-0"]
    events = await post(mesh, "GenerateTokens", {**body, "stream": True})
    last = {event["index"]: event for event in events}
    assert [last[number]["output_ids"] for number in range(4)] == [TOKENS[:4], OTHERS[:4]] * 2


async def test_a_stream_of_sglangs_has_all_so_far(mesh: Harness) -> None:
    body = {"input_ids": PROMPT, "stream": True, "return_logprob": True}
    events = await post(mesh, "GenerateTokens", body)
    assert len(events) > 1
    for event in events:
        ids = event["output_ids"]
        assert ids == TOKENS[: len(ids)]
        assert [one[1] for one in event["meta_info"]["output_token_logprobs"]] == ids
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    assert events[-1]["output_ids"] == TOKENS


async def test_vllms_client_gets_the_tokens_that_were_drawn(mesh: Harness) -> None:
    body: dict[str, Any] = {
        "token_ids": PROMPT,
        "sampling_params": {
            **{"n": 2, "temperature": 0.7, "max_tokens": 100, "logprobs": 1, "output_kind": 2},
            **{"detokenize": False, "stop": [], "bad_words": None, "top_k": -1},
        },
        "request_id": "r-1",
        "logprobs_mode": "processed_logprobs",
        **{"cache_salt": "s", "priority": 0, "features": None, "kv_transfer_params": None},
    }
    (answer,) = await post(mesh, "ContinueTokens", body)
    ContinuedAnswer.model_validate(answer)
    assert answer["request_id"] == "r-1"
    assert [choice["token_ids"] for choice in answer["choices"]] == [TOKENS, OTHERS]
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert [len(one["top_logprobs"]) for one in content] == [1] * len(content)
        assert choice["finish_reason"] == "stop"
    assert mesh.workers[0].submits[0].cache_salt == "s"
    assert answer["logprobs_mode"] == "processed_logprobs"
    assert mesh.workers[0].submits[0].logprobs.scaled
    events = await post(
        mesh,
        "ContinueTokens",
        {**body, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(TOKENS) + len(OTHERS)
    gained: dict[int, list[int]] = {0: [], 1: []}
    for event in events[:-1]:
        for choice in event["choices"]:
            gained[choice["index"]] += choice["token_ids"]
    assert gained == {0: TOKENS, 1: OTHERS}


async def test_vllms_prompt_log_probabilities(mesh: Harness) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"prompt_logprobs": 1, "max_tokens": 1}}
    (answer,) = await post(mesh, "ContinueTokens", body)
    listed = answer["prompt_logprobs"]
    assert listed[0] is None
    assert [str(one) in entry for one, entry in zip(PROMPT[1:], listed[1:], strict=True)]
    right = prompt_score(5, PROMPT[5], 1, SIZE)
    assert listed[5][str(PROMPT[5])]["logprob"] == pytest.approx(right.logprob)


SGLANG: list[tuple[str, dict[str, Any]]] = [
    ("input_ids", {}),
    ("input_ids", {"text": "x", "input_ids": [1]}),
    ("input_ids", {"input_ids": [10**6]}),
    ("return_hidden_states", {"text": "x", "return_hidden_states": True}),
    ("image_data", {"text": "x", "image_data": ["a"]}),
    ("data_parallel_rank", {"text": "x", "data_parallel_rank": 1}),
    ("sampling_params", {"text": ["x", "y"], "sampling_params": [{"n": 1}, {"n": 2}]}),
    ("sampling_params.bad", {"text": "x", "sampling_params": {"bad": 1}}),
    ("sampling_params.max_new_tokens", {"text": "x", "sampling_params": {"max_new_tokens": 0}}),
    ("top_logprobs_num", {"text": "x", "top_logprobs_num": 1}),
    ("logprob_start_len", {"text": "x", "return_logprob": True, "logprob_start_len": -2}),
    (
        "logprob_start_len",
        {"text": "x", "return_logprob": True, "logprob_start_len": 0, "stream": True},
    ),
    ("rid", {"text": ["x", "y"], "rid": ["a"]}),
    (
        "sampling_params.ebnf",
        {"text": "x", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}},
    ),
]
VLLM: list[tuple[str, dict[str, Any]]] = [
    ("token_ids", {"sampling_params": {}}),
    ("sampling_params", {"token_ids": [1]}),
    ("token_ids", {"token_ids": [10**6], "sampling_params": {}}),
    ("features", {"token_ids": [1], "sampling_params": {}, "features": {"a": 1}}),
    ("sampling_params.extra_args", {"token_ids": [1], "sampling_params": {"extra_args": {"a": 1}}}),
    (
        "sampling_params.structured_outputs.grammar",
        {
            "token_ids": [1],
            "sampling_params": {"structured_outputs": {"regex": "a", "grammar": "root ::= x"}},
        },
    ),
    (
        "sampling_params.structured_outputs.regexp",
        {"token_ids": [1], "sampling_params": {"structured_outputs": {"regexp": "a"}}},
    ),
]


async def test_what_is_not_served_is_refused_by_name(mesh: Harness) -> None:
    for method, cases in (("GenerateTokens", SGLANG), ("ContinueTokens", VLLM)):
        for param, body in cases:
            error = await refusal(mesh, method, body)
            assert (error.http_status, error.param) == (400, param), (body, error)
            assert param in error.message


async def test_they_are_off_unless_the_gateway_serves_trainers(tmp_path: Path) -> None:
    async with gateway(tmp_path, script) as mesh:
        for method, body in (
            ("GenerateTokens", {"text": "x"}),
            ("ContinueTokens", {"token_ids": [1], "sampling_params": {}}),
        ):
            error = await refusal(mesh, method, body)
            assert (error.http_status, error.reason) == (404, "TRAINERS_OFF")


async def test_weights_of_several_models_are_not_changed_as_if_they_were_one(
    tmp_path: Path,
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token := secrets.token_urlsafe(32))
    other = write_model_dir(tmp_path / "other", TOKENIZER, 512)
    async with gateway(
        tmp_path,
        script,
        rl=True,
        console="operate",
        admin_token_file=token_file,
        models=[f"another={other}"],
    ) as mesh:
        stub = dialects_pb2_grpc.TrainerServiceStub(mesh.channel)
        tensors = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]}
        group = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 9}
        orders: list[tuple[str, Message]] = [
            (method, HttpBody(data=json.dumps(body).encode()))
            for method, body in (
                ("UpdateWeightsFromDisk", {"model_path": "/x", "abort_all_requests": True}),
                ("InitWeightsUpdateGroup", group),
                ("BeginWeightUpdate", {}),
                ("UpdateWeightsFromDistributed", {**tensors, "abort_all_requests": True}),
                ("EndWeightUpdate", {}),
            )
        ]
        orders.append(("SleepWorkers", dialects_pb2.SleepWorkersRequest(level=2)))
        for method, order in orders:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(stub, method)(order, metadata=[("authorization", f"Bearer {token}")])
            error = from_rpc_error(caught.value)
            assert (error.http_status, error.reason) == (400, "INVALID_REQUEST"), (method, error)
            assert "`another`" in error.message
