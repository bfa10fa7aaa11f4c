"""A complete request has the parameters that its client gave, in every dialect, and all others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from weft.contract.errors import InvalidRequest
from weft.gateway.admission.keys import Tenant
from weft.gateway.admission.tenants import TenantTerms
from weft.gateway.api.anthropic.bodies import MessagesBody
from weft.gateway.api.anthropic.translate import messages_request
from weft.gateway.api.ollama.bodies import ChatBody as OllamaBody
from weft.gateway.api.ollama.translate import chat_request as ollama_request
from weft.gateway.api.openai.bodies import Body, ChatBody, CompletionBody
from weft.gateway.api.openai.parse import parse_body
from weft.gateway.api.openai.translate import chat_request, completion_request
from weft.gateway.api.responses.bodies import ResponsesBody
from weft.gateway.api.responses.translate import response_request
from weft.gateway.api.trainer.token_bodies import ContinueTokensBody, GenerateTokensBody
from weft.gateway.api.trainer.token_requests import continue_request, generate_request
from weft.gateway.generation.complete import complete
from weft.gateway.request import CallFacts, GenerateRequest, RawRequest, Targets, TextPrompt
from weft.gateway.text.model_card import ModelCard, load_model_card
from weft.testing.models.tiny_tokenizers import write_model_dir

OWN = {"temperature": 0.3, "min_p": 0.25}
FACTS = CallFacts("r")


@dataclass(frozen=True)
class Dialect:
    body: type[Body]
    needed: dict[str, Any]
    translate: Callable[[Any], RawRequest | None]
    parameters: str
    """Names of the parameters that it has, as OpenAI's chats name them."""
    names: dict[str, str] = field(default_factory=dict)
    """Its names where they differ."""
    beside: dict[str, Any] = field(default_factory=dict)
    """What `top_logprobs` needs."""


USER = [{"role": "user", "content": "hi"}]
DRAWING = "temperature top_p top_k seed stop"
COMMON = f"{DRAWING} cache_salt priority session_id end_session"
PENALTIES = "min_p top_n_sigma repetition_penalty presence_penalty frequency_penalty"
CHAT = "logit_bias min_tokens stop_regex ignore_eos routing_key"
ALONE = (
    "n speculate stop_token_ids include_stop_str_in_output skip_special_tokens prompt_logprobs "
    "logprobs_mode timeout ttft_timeout ttft_target_ms itl_target_ms"
)
OF_PARAMS = (
    f"{DRAWING} {PENALTIES} logit_bias min_tokens max_tokens stop_regex ignore_eos n speculate "
    "stop_token_ids include_stop_str_in_output skip_special_tokens"
)
DIALECTS = {
    "chat": Dialect(
        ChatBody,
        {"messages": USER},
        lambda body: chat_request(body, FACTS),
        f"{COMMON} {PENALTIES} {CHAT} {ALONE} max_tokens top_logprobs",
        beside={"logprobs": True},
    ),
    "completion": Dialect(
        CompletionBody,
        {"prompt": "hi"},
        lambda body: completion_request(body, FACTS),
        f"{COMMON} {PENALTIES} {CHAT} {ALONE} max_tokens top_logprobs",
        names={"top_logprobs": "logprobs"},
    ),
    "responses": Dialect(
        ResponsesBody,
        {"input": "hi"},
        lambda body: response_request(body, FACTS, lambda _: {}).raw,
        f"{COMMON} {PENALTIES} {CHAT} max_tokens top_logprobs",
        names={"max_tokens": "max_output_tokens"},
        beside={"include": ["message.output_text.logprobs"]},
    ),
    "anthropic": Dialect(
        MessagesBody,
        {"messages": USER, "max_tokens": 9},
        lambda body: messages_request(body, FACTS),
        f"{COMMON} max_tokens",
        names={"stop": "stop_sequences"},
    ),
    "ollama": Dialect(
        OllamaBody,
        {"messages": USER},
        lambda body: ollama_request(body, FACTS),
        f"{COMMON} {PENALTIES} max_tokens top_logprobs",
        names={
            **{
                name: f"options.{name}"
                for name in ["temperature", "top_p", "top_k", "seed", "stop"]
            },
            **{name: f"options.{name}" for name in PENALTIES.split()},
            "repetition_penalty": "options.repeat_penalty",
            "max_tokens": "options.num_predict",
        },
        beside={"logprobs": True},
    ),
    "sglang": Dialect(
        GenerateTokensBody,
        {"text": "hi"},
        lambda body: generate_request(body, FACTS),
        f"{COMMON} {PENALTIES} {CHAT} {ALONE} max_tokens top_logprobs".replace(
            "prompt_logprobs ", ""
        ),
        names={
            **{name: f"sampling_params.{name}" for name in OF_PARAMS.split()},
            "max_tokens": "sampling_params.max_new_tokens",
            "min_tokens": "sampling_params.min_new_tokens",
            "seed": "sampling_params.sampling_seed",
            "include_stop_str_in_output": "sampling_params.no_stop_trim",
            "top_logprobs": "top_logprobs_num",
        },
        beside={"return_logprob": True},
    ),
    "vllm": Dialect(
        ContinueTokensBody,
        {"token_ids": [1, 2], "sampling_params": {}},
        lambda body: continue_request(body, FACTS),
        f"{COMMON} {PENALTIES} {CHAT} {ALONE} max_tokens top_logprobs".replace(
            "skip_special_tokens ", ""
        ),
        names={
            **{name: f"sampling_params.{name}" for name in OF_PARAMS.split()},
            "top_logprobs": "sampling_params.logprobs",
            "prompt_logprobs": "sampling_params.prompt_logprobs",
        },
    ),
}


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = write_model_dir(tmp_path_factory.mktemp("m") / "m")
    (folder / "generation_config.json").write_text(json.dumps(OWN))
    return load_model_card(folder)


def request_of(dialect: Dialect, given: dict[str, Any], card: ModelCard) -> GenerateRequest:
    """The complete request of a body with these parameters, under OpenAI's names."""
    body: dict[str, Any] = {**dialect.needed}
    if "top_logprobs" in given:
        body |= dialect.beside
    for name, value in given.items():
        own = dialect.names.get(name, name)
        if "." in own:
            outer, inner = own.split(".")
            body[outer] = {**body.get(outer, {}), inner: value}
        else:
            body[own] = value
    parsed = parse_body(dialect.body, json.dumps(body).encode(), 1 << 20)
    raw = dialect.translate(parsed)
    assert raw is not None
    return complete(raw, card, TenantTerms(), max_prompts=8)


def drawn(name: str) -> Any:
    """A value that is allowed, and not the default."""
    rng = random.Random()
    values: dict[str, Any] = {
        **{one: round(rng.uniform(0.01, 1.9), 3) for one in PENALTIES.split()},
        "temperature": round(rng.uniform(0, 100), 3),
        **{one: round(rng.uniform(0.01, 0.99), 3) for one in ("top_p", "min_p")},
        "top_k": rng.randint(1, 2**31 - 1),
        "seed": rng.randrange(2**64),
        "n": rng.randint(2, 128),
        "stop": rng.sample(["a", "bc", "é"], 2),
        "stop_regex": [r"\d+"],
        "stop_token_ids": [rng.randrange(100)],
        "logit_bias": {str(rng.randrange(100)): rng.uniform(-100, 100)},
        "min_tokens": 3,
        "max_tokens": rng.randint(3, 2**31 - 1),
        **dict.fromkeys(("ignore_eos", "end_session", "include_stop_str_in_output"), True),
        **dict.fromkeys(("speculate", "skip_special_tokens"), False),
        **dict.fromkeys(("cache_salt", "session_id", "routing_key"), "x" * rng.randint(1, 128)),
        "logprobs_mode": "processed_logprobs",
        "priority": rng.randint(-(10**6), 10**6),
        **{one: rng.randint(0, 20) for one in ("top_logprobs", "prompt_logprobs")},
        **{one: rng.uniform(1, 3.6e6) for one in ("ttft_target_ms", "itl_target_ms")},
        **{one: rng.uniform(0.1, 1e4) for one in ("timeout", "ttft_timeout")},
    }
    return values[name]


WRONG: dict[str, Any] = {
    **{one: [-0.001, 1.001] for one in ("top_p", "min_p")},
    "temperature": [-0.1, 100.5],
    "repetition_penalty": [0, 101],
    **{one: [-2.1, 2.1] for one in ("presence_penalty", "frequency_penalty")},
    "top_k": [-2, 2**31],
    "top_n_sigma": [-0.5, 100.5],
    "seed": [2**64],
    "n": [0, 129],
    "stop": [[""], ["x" * 257]],
    "stop_regex": [[""], ["("]],
    "stop_token_ids": [[10**9]],
    "logit_bias": [{"1": 101}, {"x": 1}],
    "min_tokens": [-1],
    "max_tokens": [0, 2**31],
    "cache_salt": ["", "x" * 129],
    "session_id": ["x" * 129],
    "routing_key": ["x" * 257],
    "logprobs_mode": ["scaled", ""],
    "priority": [10**6 + 1],
    **{one: [-1, 21] for one in ("top_logprobs", "prompt_logprobs")},
    **{one: [0.5, 3.7e6] for one in ("ttft_target_ms", "itl_target_ms")},
    **{one: [0] for one in ("timeout", "ttft_timeout")},
}


def found(request: GenerateRequest, name: str) -> Any:
    """A parameter of a complete request, as OpenAI's chats show it."""
    places: dict[str, Any] = {
        "speculate": request.sampling.speculates,
        "include_stop_str_in_output": request.stop.include_stop_in_output,
        "logit_bias": {str(one): bias for one, bias in request.sampling.logit_bias.items()},
        "stop": list(request.stop.stop),
        "stop_regex": list(request.stop.stop_regex),
        "stop_token_ids": list(request.stop.stop_token_ids),
    }
    if name in places:
        return places[name]
    holders = (request.sampling, request.stop, request)
    return next(getattr(one, name) for one in holders if hasattr(one, name))


@pytest.mark.parametrize("kind", DIALECTS)
def test_what_a_client_gives_is_what_its_request_has(kind: str, card: ModelCard) -> None:
    dialect = DIALECTS[kind]
    for name in dialect.parameters.split():
        given = {name: drawn(name)}
        if name == "end_session":
            given["session_id"] = "s"
        request = request_of(dialect, given, card)
        assert found(request, name) == given[name], name


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_parameter_out_of_its_range_is_refused_under_the_clients_name(
    kind: str, card: ModelCard
) -> None:
    dialect = DIALECTS[kind]
    for name in dialect.parameters.split():
        for value in WRONG.get(name, ()):
            with pytest.raises(InvalidRequest) as caught:
                request_of(dialect, {name: value}, card)
            shown = dialect.names.get(name, name)
            assert caught.value.param in (shown, shown.split(".")[-1]), (name, value)


def test_a_parameter_that_nobody_gives_has_the_models_value_or_the_default(
    card: ModelCard,
) -> None:
    for kind, dialect in DIALECTS.items():
        request = request_of(dialect, {}, card)
        assert request.sampling.temperature == OWN["temperature"], kind
        assert request.sampling.min_p == OWN["min_p"], kind
        assert request.sampling.top_p == 1.0, kind
        assert (request.sampling.n, request.priority, request.cache_salt) == (1, 0, ""), kind
        expected = {"completion": 16, "anthropic": 9, "sglang": 128, "vllm": 16}
        assert request.stop.max_tokens == expected.get(kind), kind


def test_equal_prompts_get_different_seeds_unless_the_client_gives_one(card: ModelCard) -> None:
    body = replace(DIALECTS["completion"], needed={"prompt": ["hi"] * 8})
    assert len(set(request_of(body, {}, card).seeds)) == 8
    assert set(request_of(body, {"seed": -3}, card).seeds) == {2**64 - 3}


def test_a_tenants_salt_session_and_targets_are_its_own(card: ModelCard) -> None:
    tenant = Tenant(name="t", cache_group="g")
    call = CallFacts("r", tenant=tenant, targets=Targets(between_tokens_s=0.5))
    raw = RawRequest(
        call=call,
        prompts=(TextPrompt(text="x"),),
        given={"cache_salt": "a", "session_id": "b"},
    )
    terms = TenantTerms(ttft_target_ms=200, itl_target_ms=100)
    request = complete(raw, card, terms, max_prompts=1)
    assert request.cache_salt == tenant.salt("a") != "a"
    assert request.session_id == tenant.session("b") != "b"
    assert request.routing_key == "b"
    assert request.targets == Targets(0.2, 0.5)
    assert request.targets.pace_s == 0.5
