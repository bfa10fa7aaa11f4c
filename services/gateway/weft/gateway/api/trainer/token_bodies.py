"""Bodies of tokens in and tokens out: SGLang's /generate and vLLM's /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator
from weft.contract.request import CallParams, SamplingParams, StopCriteria
from weft.gateway.api.dialect_bodies import STRICT, DialectBody, StrictPart
from weft.gateway.api.openai.bodies import Prompts, StreamOptions, StructuredOutputs
from weft.gateway.api.parameters import Ids, Int, parameter_field, with_parameters
from weft.gateway.api.unserved import left_out, refused, unused
from weft.gateway.validate import unsupported

OF_PARAMS = (SamplingParams, StopCriteria)
"""Parameters that the field `sampling_params` has."""
if TYPE_CHECKING:
    _SglangParams = StrictPart
    _VllmParams = StrictPart
    _SglangBody = DialectBody
    _VllmBody = DialectBody
else:
    _SglangParams = with_parameters(StrictPart, "sglang", Int, OF_PARAMS)
    _VllmParams = with_parameters(StrictPart, "vllm", Int, OF_PARAMS)
    _SglangBody = with_parameters(DialectBody, "sglang", Int, (CallParams,))
    _VllmBody = with_parameters(DialectBody, "vllm", Int, (CallParams,))
_CODE = "code of the request's own"
_SHIPPED = "prompts are shipped between workers without it"
_PER_PROMPT = (
    *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("lora_path", "return_hidden_states", "custom_logit_processor"),
)
"""Fields of which SGLang takes a list, with an entry for each prompt."""


class SglangParams(_SglangParams):
    """The field `sampling_params` of SGLang."""

    refuses_unknown = True

    max_new_tokens: Int | None = parameter_field(
        "max_tokens", "most tokens generated of each sample, default 128"
    )
    skip_special_tokens: bool | None = parameter_field("skip_special_tokens")
    json_schema: str | None = Field(None, description="a JSON schema, as text")
    regex: str | None = Field(None, description="matches the whole text")
    ebnf: str | None = Field(None, description="GBNF, beginning at `root`")
    structural_tag: str | None = Field(None, description="its form, as text")
    spaces_between_special_tokens: bool | None = unused("texts have no further blanks")
    custom_params: dict[str, Any] | None = refused(_CODE)
    stream_interval: Int | None = unused("a slow client gets fewer events")


class GenerateTokensBody(_SglangBody):
    """Body of POST /generate."""

    text: str | Prompts[str] | None = Field(None, description="a text, or texts")
    input_ids: Ids | Prompts[Ids] | None = Field(
        None, description="token ids, or lists of them, in place of a text"
    )
    sampling_params: SglangParams | None = Field(None, description="sampling and limits")
    return_logprob: bool | None = Field(None, description="return log-probabilities")
    logprob_start_len: Int | None = Field(
        None,
        description="also those of the prompt's tokens from this position on, only with n: 1, not "
        "streamed; -1, the default: none",
    )
    return_text_in_logprobs: bool | None = Field(None, description="with each token's text")
    stream: bool | None = Field(
        None, description="answer as server-sent events, each with all of a sample so far"
    )
    rid: str | Prompts[str] | None = Field(
        None, description="the request's name in logs and answers, or one for each prompt"
    )
    lora_path: str | None = Field(None, description="an adapter's name, in place of `model`")
    token_ids_logprob: list[Any] | None = refused("log-probabilities of given tokens")
    return_hidden_states: bool | str | None = refused("hidden states")
    return_routed_experts: bool | None = Field(
        None,
        description="return which experts each token was routed to; needs workers with "
        "--enable-return-routed-experts; streams have them in a sample's last event",
    )
    routed_experts_start_len: Int | None = Field(
        None, description="position of the first token whose experts are returned; default 0"
    )
    return_indexer_topk: bool | None = refused("choices of an index")
    return_sampling_mask: bool | None = refused("masks of sampling")
    return_entropy: bool | None = refused("entropies")
    return_flat_raw_top_logprobs: bool | None = refused("flat log-probabilities")
    return_prompt_token_ids: bool | None = left_out("they are in the request")
    input_embeds: list[Any] | None = refused("embeddings in place of tokens")
    positional_embed_overrides: Any = refused("embeddings in place of tokens")
    image_data: Any = refused("images; use /v1/chat/completions")
    video_data: Any = refused("videos")
    audio_data: Any = refused("sound")
    session_params: dict[str, Any] | None = refused("give session_id")
    custom_logit_processor: str | None = refused(_CODE)
    extra_key: str | Prompts[str] | None = refused("give cache_salt")
    max_thinking_tokens: Int | None = refused("a limit of the reasoning", asks_when_empty=True)
    data_parallel_rank: Int | None = refused("give the header X-Data-Parallel-Rank")
    routed_dp_rank: Int | None = refused("give the header X-Data-Parallel-Rank")
    bootstrap_host: Any = left_out(_SHIPPED)
    bootstrap_port: Any = left_out(_SHIPPED)
    bootstrap_room: Any = left_out(_SHIPPED)
    bootstrap_pair_key: Any = left_out(_SHIPPED)
    disagg_prefill_dp_rank: Any = left_out(_SHIPPED)
    conversation_id: str | None = unused()
    modalities: list[str] | None = unused()
    log_metrics: bool | None = unused()
    no_logs: bool | None = unused("texts are never logged")
    custom_labels: dict[str, str] | None = unused()
    background: bool | None = unused()
    require_reasoning: bool | None = unused()

    @property
    def named_model(self) -> str:
        """The name of what is to answer; empty: the one model."""
        return self.lora_path or self.model or ""

    @model_validator(mode="before")
    @classmethod
    def _same_for_all(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        one_each = {}
        for name in _PER_PROMPT:
            given = value.get(name)
            if isinstance(given, list) and given:
                if any(one != given[0] for one in given):
                    raise unsupported(name, "entries that differ; send their prompts apart")
                one_each[name] = given[0]
        return {**value, **one_each}


class StructuredTokens(StructuredOutputs, StrictPart):
    """The field `structured_outputs` of `sampling_params`; exactly one of its fields is set."""

    model_config = STRICT

    refuses_unknown = True


class VllmParams(_VllmParams):
    """The field `sampling_params` of vLLM."""

    refuses_unknown = True

    max_tokens: Int | None = parameter_field("max_tokens", "most tokens generated, default 16")
    logprobs: Int | None = parameter_field("top_logprobs")
    prompt_logprobs: Int | None = parameter_field("prompt_logprobs")
    skip_special_tokens: bool | None = unused("the answer has no text")
    spaces_between_special_tokens: bool | None = unused("the answer has no text")
    detokenize: bool | None = unused("the answer has no text")
    structured_outputs: StructuredTokens | None = Field(None, description="what it must match")
    output_kind: Int | None = unused("`stream` says it")
    flat_logprobs: bool | None = unused()
    skip_clone: bool | None = unused()
    skip_reading_prefix_cache: bool | None = refused("a prompt that is computed anew")
    bad_words: list[Any] | None = refused("words that must not come")
    allowed_token_ids: list[Any] | None = refused("a list of allowed tokens")
    logprob_token_ids: list[Any] | None = refused("log-probabilities of given tokens")
    truncate_prompt_tokens: Int | None = refused("cutting the prompt", asks_when_empty=True)
    thinking_token_budget: Int | None = refused(
        "a limit of the reasoning", -1, asks_when_empty=True
    )
    repetition_detection: Any = refused("an end of repetitions")
    logits_processors: list[Any] | None = refused(_CODE)
    extra_args: dict[str, Any] | None = refused(_CODE)


class ContinueTokensBody(_VllmBody):
    """Body of POST /inference/v1/generate."""

    token_ids: Ids = Field(description="the prompt")
    sampling_params: VllmParams = Field(description="sampling and limits")
    stream: bool | None = Field(None, description="answer as server-sent events, with new tokens")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    request_id: str | None = Field(
        None, description="the request's name in logs and its answer; 1 to 64 of `A-Za-z0-9._:-`"
    )
    features: Any = refused("images; use /v1/chat/completions")
    kv_transfer_params: dict[str, Any] | None = left_out(_SHIPPED)
    ec_transfer_params: dict[str, Any] | None = left_out(_SHIPPED)
    return_routed_experts: bool | None = Field(
        None,
        description="return which experts each token was routed to; needs workers with "
        "--enable-return-routed-experts; streams have them in a sample's last event; "
        "`routed_experts_prompt_start` asks too",
    )
    routed_experts_prompt_start: Int | None = Field(
        None, description="position of the first token whose experts are returned; default 0"
    )
