"""Fields that are not this server's: those of other servers are refused by name or known to be
harmless, and those of none are refused.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai.types as openai_types
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import from_rpc_error
from weft.gateway.api.openai.bodies import Body, ChatBody, CompletionBody
from weft.gateway.api.openai.foreign import HARMLESS, UNSERVED, refuse_foreign
from weft.gateway.api.pooling.bodies import EmbeddingsBody
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, openai_pb2_grpc

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

# What the request models of these servers had in 2026, but for OpenAI's own fields.
VLLM = """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id
session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
repetition_detection thinking_token_budget include_reasoning stream_interval prompt_embeds
return_prompt_text guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern logits_processors"""
SGLANG = """return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details return_token_ids return_prompt_token_ids return_meta_info top_k min_p
min_tokens json_schema regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
ignore_eos skip_special_tokens lora_path session_id session_params custom_params
custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority
custom_labels continue_final_message separate_reasoning stream_reasoning chat_template_kwargs
max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids task"""
LLAMA_CPP = """cache_prompt return_tokens n_predict max_tokens n_indent n_keep n_discard n_cmpl
n_cache_reuse t_max_prompt_ms t_max_predict_ms response_fields top_k top_p min_p top_n_sigma
xtc_probability xtc_threshold typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n
repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length
dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta seed n_probs min_keep
post_sampling_probs speculative.n_min speculative.n_max speculative.p_min lora json_schema grammar
grammar_lazy grammar_triggers chat_format reasoning_format thinking_forced_open parse_tool_calls
chat_parser preserved_tokens logit_bias ignore_eos stop samplers id_slot timings_per_token
return_progress"""
DEFAULTS = {
    "typical_p": 1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "xtc_probability": 0.0,
    "top_n_sigma": -1.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "n_predict": -1,
    "n_probs": 0,
    "min_keep": 0,
    "cache_prompt": True,
    "id_slot": -1,
    "grammar": "",
    "samplers": [],
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "data_parallel_rank": None,
    "thinking_token_budget": -1,
    "lora_path": None,
    "bad_words": [],
    "reasoning_format": "auto",
    "verbosity": "medium",
    "add_special_tokens": False,
    "seed": -1,
}


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[7]])


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    async with gateway(tmp_path, script) as harness:
        yield harness


async def refused(mesh: Harness, method: str, body: dict[str, Any]) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.post(method, body)
    return from_rpc_error(caught.value)


async def warnings(mesh: Harness, method: str, body: dict[str, Any]) -> str:
    """The header that names what was left out of a request."""
    stub = openai_pb2_grpc.OpenAIServiceStub(mesh.channel)
    call = getattr(stub, method)(HttpBody(data=json.dumps(body).encode()), timeout=60)
    assert [message async for message in call]
    return dict(await call.initial_metadata()).get("x-weft-warnings", "")


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (ChatBody, openai_types.chat.completion_create_params.CompletionCreateParamsStreaming),
        (CompletionBody, openai_types.completion_create_params.CompletionCreateParamsStreaming),
        (EmbeddingsBody, openai_types.EmbeddingCreateParams),
    ],
)
def test_every_field_of_openai_is_known(model: type[Body], params: type) -> None:
    names = params.__annotations__.keys()
    assert {"model", "user"} <= names
    assert not names - model.model_fields.keys() - model.of_others


@pytest.mark.parametrize("names", [VLLM, SGLANG, LLAMA_CPP], ids=["vllm", "sglang", "llama.cpp"])
def test_every_field_of_a_server_is_accounted_for(names: str) -> None:
    supported = {*ChatBody.model_fields, *CompletionBody.model_fields}
    for name in names.split():
        places = [name in where for where in (supported, UNSERVED, HARMLESS)]
        assert places.count(True) == 1, name


def test_no_field_is_in_two_places() -> None:
    supported = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert not UNSERVED.keys() & HARMLESS
    assert not supported & (UNSERVED.keys() | HARMLESS)


@pytest.mark.parametrize("method", ["ChatCompletions", "Completions"])
async def test_refusals_name_the_field(mesh: Harness, method: str) -> None:
    body: dict[str, Any] = {"messages": USER} if method == "ChatCompletions" else {"prompt": "x"}
    asking = {name: False for name, one in UNSERVED.items() if one.is_asked(False)}
    for name, one in UNSERVED.items():
        asked = {**body, name: asking.get(name, "x")}
        if one.is_left_out:
            assert f"{name}: left out" in await warnings(mesh, method, asked)
            mesh.workers[0].submits.clear()
            continue
        error = await refused(mesh, method, asked)
        assert (error.http_status, error.param) == (400, name)
        assert error.message.startswith(f"{name}: not supported")
        assert not mesh.workers[0].submits


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_object", "schema": {}, "pattern": "a"}}, "pattern"),
    ],
)
async def test_fields_of_response_format(mesh: Harness, change: Any, param: str) -> None:
    error = await refused(mesh, "ChatCompletions", {"messages": USER, **change})
    assert error.param == f"response_format.{param}"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [*USER, {"role": "assistant", "content": "x", "prefix": True}]}, "prefix"),
        ({"messages": [*USER, {"role": "user", "content": "x", "images": ["data"]}]}, "images"),
    ],
)
async def test_fields_of_messages(mesh: Harness, change: Any, param: str) -> None:
    error = await refused(mesh, "ChatCompletions", change)
    assert error.param == f"messages[1].{param}"


async def test_refusals_name_what_to_give_instead(mesh: Harness) -> None:
    change: dict[str, Any]
    for change, told in (
        ({"repeat_penalty": 1.2}, "give repetition_penalty instead"),
        ({"session_id": "", "end_session": True}, "needs a session_id that is not empty"),
    ):
        error = await refused(mesh, "ChatCompletions", {"messages": USER, **change})
        assert told in error.message


async def test_fields_of_tools(mesh: Harness) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    plain = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    assert not await warnings(mesh, "ChatCompletions", {"messages": USER, "tools": [plain]})
    other = {"type": "function", "function": {**function, "name": "g"}}
    for tool, param in (
        ({**other, "defer_loading": True}, "tools[1].defer_loading"),
        (
            {**other, "function": {**other["function"], "defer_loading": True}},
            "tools[1].function.defer_loading",
        ),
    ):
        body = {"messages": USER, "tools": [plain, tool]}
        assert f"{param}: left out" in await warnings(mesh, "ChatCompletions", body)
    error = await refused(
        mesh,
        "ChatCompletions",
        {"messages": USER, "tools": [{"type": "web_search", "x": 1}, {**other, "surprise": 1}]},
    )
    assert error.param == "tools[1].surprise"


async def test_defaults_and_harmless_fields_are_welcome(mesh: Harness) -> None:
    for name in UNSERVED:
        refuse_foreign({name: None})
    harmless = {name: {"any": ["thing"]} for name in HARMLESS}
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    body = {"messages": USER, **DEFAULTS, **harmless}
    await mesh.json("ChatCompletions", body)
    await mesh.post("ChatCompletions", {**body, **options})
    await mesh.json("Completions", {"prompt": "x", **DEFAULTS, **harmless})


@pytest.mark.parametrize(
    ("change", "param", "meant"),
    [
        ({"temprature": 0}, "temprature", "temperature"),
        ({"max_token": 3}, "max_token", "max_tokens"),
        ({"no_such_field": [1]}, "no_such_field", None),
        (
            {"stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "include_usage",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
            "response_format.json_schema.shema",
            "schema",
        ),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "regex"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
            "tools[0].function.paramters",
            "parameters",
        ),
    ],
)
async def test_unknown_fields_are_refused(
    mesh: Harness, change: dict[str, Any], param: str, meant: str | None
) -> None:
    error = await refused(mesh, "ChatCompletions", {"messages": USER, "stream": True, **change})
    assert (error.http_status, error.param) == (400, param)
    where = param[: param.rfind(".") + 1]
    assert error.message.endswith("leave it out" if meant is None else f"mean {where}{meant}?")
    assert not mesh.workers[0].submits


async def test_unknown_fields_of_every_body(mesh: Harness) -> None:
    for method, body in (
        ("Completions", {"prompt": "x"}),
        ("TokenizeText", {"prompt": "x"}),
        ("DetokenizeTokens", {"tokens": [5]}),
    ):
        await mesh.json(method, {**body, "no_such_field": None})
        error = await refused(mesh, method, {**body, "no_such_field": 1})
        assert error.param == "no_such_field"


async def test_messages_may_have_fields_of_other_servers(mesh: Harness) -> None:
    history = [*USER, {"role": "assistant", "content": "x", "annotations": [], "provider": "y"}]
    await mesh.json("ChatCompletions", {"messages": [*history, *USER]})


async def test_a_gateway_can_ignore_unknown_fields(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, ignore_unknown_fields=True) as harness:
        format_ = {"type": "text", "no_such_field": 1}
        change = {"no_such_field": 1, "response_format": format_}
        await harness.json("ChatCompletions", {"messages": USER, **change})
        error = await refused(harness, "ChatCompletions", {"messages": USER, "mirostat": 2})
        assert error.param == "mirostat"


async def test_a_seed_of_minus_one_is_drawn(mesh: Harness) -> None:
    for _ in range(3):
        await mesh.json("Completions", {"prompt": "x", "seed": -1})
    seeds = {submit.sampling.seed for submit in mesh.workers[0].submits}
    assert len(seeds) == 3
    assert 2**64 - 1 not in seeds


@pytest.mark.parametrize("name", ["request_id", "rid"])
async def test_names_of_requests_are_checked(mesh: Harness, name: str) -> None:
    for value, more in (("two words", {}), ("a", {"rid": "b", "request_id": "c"})):
        error = await refused(mesh, "Completions", {"prompt": "x", name: value, **more})
        assert error.param in ("rid", name)


async def test_images_of_tool_results_become_a_text(mesh: Harness) -> None:
    parts = [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": "x"}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": parts},
    ]
    told = await warnings(mesh, "ChatCompletions", {"messages": messages})
    assert "messages[2].content[1]: left out" in told
    shown = mesh.tokenizer.decode(mesh.workers[0].prompts[-1])
    assert "The tool returned content of type image_url" in shown
    error = await refused(
        mesh, "ChatCompletions", {"messages": [{"role": "user", "content": parts}]}
    )
    assert error.param == "messages[0].content[1].type"
    assert f"`{mesh.app.model.name}` takes no images" in error.message
