"""Fields of other servers' APIs: refused by name where they would change the answer, else left out.

`bodies.py` has the supported fields. A field that is in neither file is unknown (`parse.py`).
The tables below have the fields that clients of vLLM, SGLang, llama.cpp and others send, so that
such a client learns which of its settings has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.gateway.api.unserved import Unserved


def _same(names: str, what: str, *neutral: object) -> dict[str, Unserved]:
    return {name: Unserved(what, neutral) for name in names.split()}


def _off(what: str) -> Unserved:
    """A switch that is always on here and cannot be turned off."""
    return Unserved(what, (True,), asks_when_empty=True)


UNSERVED: Mapping[str, Unserved] = {
    # Sampling.
    **_same("typical_p typical typ_p", "locally typical sampling", 1),
    **_same("nsigma", "give top_n_sigma instead", -1),
    **_same("tfs_z tfs", "tail-free sampling", 1),
    **_same("top_a epsilon_cutoff eta_cutoff", "another filter of candidates"),
    **_same("mirostat mirostat_mode", "mirostat sampling"),
    **_same("dry_multiplier", "the DRY penalty"),
    **_same("xtc_probability", "XTC sampling"),
    **_same("dynatemp_range dynamic_temperature", "a temperature that changes"),
    **_same("smoothing_factor penalty_alpha", "other shapes of the distribution"),
    **_same("no_repeat_ngram_size repetition_detection", "an end of repetitions"),
    **_same("guidance guidance_scale cfg_scale negative_prompt", "classifier-free guidance"),
    **_same("samplers sampler_order sampler_priority sampler_seq", "an order of samplers"),
    **_same("min_keep", "a least number of candidates", 1),
    **_same("repeat_penalty", "give repetition_penalty instead", 1),
    **_same("length_penalty", "a penalty of beam search", 1),
    **_same("use_beam_search early_stopping", "beam search"),
    **_same("watermark watermarking", "a watermark"),
    **_same("logits_processors custom_logit_processor", "code of the request's own"),
    **_same("custom_params vllm_xargs extra_args", "settings of extensions"),
    **_same("sampling_params extra_body", "its fields are given at the top of the body"),
    # Tokens and lengths.
    "allowed_token_ids": Unserved("a list of allowed tokens"),
    **_same("bad_words banned_strings banned_tokens custom_token_bans", "words that must not come"),
    **_same("max_new_tokens n_predict max_gen_len max_length", "give max_tokens instead", -1),
    **_same("min_new_tokens", "give min_tokens instead"),
    **_same("n_cmpl", "give n instead", 1),
    **_same("truncate_prompt_tokens truncate", "cutting the prompt"),
    **{
        name: Unserved("a limit of the reasoning", (-1,), asks_when_empty=True)
        for name in ("thinking_token_budget", "thinking_budget", "reasoning_budget")
    },
    **_same("t_max_predict_ms t_max_prompt_ms", "give timeout instead", -1),
    **_same("n_indent", "an indentation of lines"),
    **_same("no_stop_trim", "a stop string is kept with include_stop_str_in_output"),
    **_same("ban_eos_token", "give ignore_eos instead"),
    "spaces_between_special_tokens": _off("special tokens without spaces"),
    # Constraints.
    **_same("json_schema", "a schema is given as response_format or guided_json"),
    **_same("grammar ebnf grammar_string", "a grammar is given as guided_grammar"),
    **_same("regex", "a regular expression is given as guided_regex"),
    **_same("structural_tag", "given in structured_outputs, or as response_format"),
    **_same("grammar_lazy grammar_triggers", "constraints between tags"),
    # Prompts.
    **_same("input_ids", "token ids are the prompt of /v1/completions"),
    **_same("prompt_embeds input_embeds", "embeddings as a prompt"),
    **_same("suffix input_suffix input_prefix input_extra", "text behind the completion"),
    **_same("image_data audio_data video_data images images_config", "input other than text"),
    **_same("media_io_kwargs mm_processor_kwargs multi_modal_data", "input other than text"),
    **_same("max_dynamic_patch min_dynamic_patch use_audio_in_video", "input other than text"),
    **_same("audio", "output other than text"),
    **_same("moderation", "a judgement of the texts beside the answer"),
    **_same("chat_template", "a chat template of the request's own"),
    **_same("documents", "documents for the model"),
    "web_search_options": Unserved("documents for the model", asks_when_empty=True),
    "enable_thinking": Unserved("given in chat_template_kwargs", asks_when_empty=True),
    "thinking": Unserved("given in chat_template_kwargs", asks_when_empty=True),
    **_same("reasoning", "give reasoning_effort instead"),
    **_same("task", "tasks of one model"),
    "verbosity": Unserved("a length that the model aims at", ("medium",), is_left_out=True),
    "token_healing": Unserved("another last token of the prompt"),
    # Where it runs, and with what.
    **_same("lora_path", "an adapter is loaded with /v1/load_lora_adapter and named as model"),
    **_same("lora adapter_id", "an adapter is named as model"),
    **_same("extra_key", "cache entries are separated by cache_salt"),
    **_same("session_params", "a chat is named by session_id"),
    **_same("kv_transfer_params ec_transfer_params", "the mesh hands pages over by itself"),
    **_same("bootstrap_host bootstrap_port bootstrap_room", "the mesh hands pages over by itself"),
    **{
        name: Unserved("a worker is named by the header x-data-parallel-rank", asks_when_empty=True)
        for name in ("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank")
    },
    # What an answer shows.
    **_same("return_hidden_states return_routed_experts", "states of the model"),
    **_same("return_tokens_as_token_ids", "token ids in place of tokens"),
    **_same("return_tokens return_prompt_token_ids", "give return_token_ids instead"),
    **_same("logprob_token_ids", "log-probabilities of chosen tokens"),
    **_same("n_probs top_n_tokens", "give logprobs instead"),
    **_same("post_sampling_probs", "probabilities behind the filters"),
    **_same("return_prompt_text return_full_text", "the prompt is repeated with echo"),
    **_same("return_meta_info return_cached_tokens_details details", "more facts of the request"),
    **_same("response_fields", "a choice of the answer's fields"),
    **_same("timings_per_token return_progress", "times in every chunk"),
    "separate_reasoning": _off("reasoning within the content"),
    "stream_reasoning": _off("reasoning in one piece"),
    "reasoning_format": Unserved("another place of the reasoning", ("auto", "deepseek")),
    "parse_tool_calls": _off("calls left in the text"),
}
"""Fields of chats and completions."""

_NEEDS_REFUSED = (
    "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_range "
    "dry_sequence_breakers xtc_threshold dynatemp_exponent repeat_last_n smoothing_curve "
    "truncation_side routed_experts_start_len routed_experts_prompt_start penalize_nl "
    "preserved_tokens chat_format chat_parser thinking_forced_open"
)
_OF_SERVERS = (
    "cache_prompt id_slot n_keep n_discard n_cache_reuse ngram_corpus_id guided_decoding_backend "
    "stream_interval prediction speculative.n_min speculative.n_max speculative.p_min "
    "return_token_offsets return_mm_kwargs"
)
_OF_BOOKS = (
    "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options custom_labels"
)
HARMLESS = frozenset(" ".join((_NEEDS_REFUSED, _OF_SERVERS, _OF_BOOKS)).split())
"""Fields of chats and completions that are ignored, since the answer is the same without them:
they have no meaning without a refused field, choose how a server works, or serve billing and
monitoring.
"""

_OF_MESSAGES: Mapping[str, Unserved] = {
    **_same("prefix partial", "the last message is continued with continue_final_message"),
    **_same("audio images image_url", "content other than text"),
    **_same("tools", "tools are given at the top of the body"),
}
OF_TOOLS: Mapping[str, Unserved] = {
    "defer_loading": Unserved("the model is told of every tool", is_left_out=True),
    "input_examples": Unserved("examples of calls", is_left_out=True),
}
"""Unserved fields of tools and their functions."""
OF_FORMATS: Mapping[str, Unserved] = {
    **_same("grammar regex pattern", "give guided_grammar or guided_regex instead"),
}
"""Refused fields of response_format."""
LEVELS: tuple[tuple[tuple[str, ...], Mapping[str, Unserved]], ...] = (
    ((), UNSERVED),
    (("response_format",), OF_FORMATS),
    (("messages", "*"), _OF_MESSAGES),
    (("tools", "*"), OF_TOOLS),
    (("tools", "*", "function"), OF_TOOLS),
)
"""Refused fields by the path of their object; `*` is every item of a list."""


def refuse_foreign(body: Mapping[str, Any]) -> None:
    """Refuses fields that would change the answer and have no effect here. `body` is the JSON of a
    chat or a completion whose own fields are valid. Raises InvalidRequest, with the field's path as
    `param`.
    """
    for path, refused in LEVELS:
        for where, level in objects_at(body, path):
            refuse_listed(level, refused, where)


def refuse_listed(
    level: Mapping[str, Any], refused: Mapping[str, Unserved], where: str = ""
) -> None:
    """Refuses fields of one object that ask for something. Raises InvalidRequest, whose `param` is
    the field's path; `where` is the beginning of the paths.
    """
    for name in level:
        if name in refused:
            refused[name].judge(f"{where}{name}", level[name])


def objects_at(
    node: Any, path: tuple[str, ...], where: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the objects at a path of a body, each after its place, such as `tools[0].`, which
    errors put before a field's name. In the path `*` is every item of a list; `where` is the place
    of `node` itself.
    """
    if not path:
        if isinstance(node, dict):
            yield where, node
    elif path[0] == "*":
        for index, item in enumerate(node if isinstance(node, list) else ()):
            yield from objects_at(item, path[1:], f"{where.removesuffix('.')}[{index}].")
    elif isinstance(node, dict):
        yield from objects_at(node.get(path[0]), path[1:], f"{where}{path[0]}.")
