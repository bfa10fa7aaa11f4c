"""Fields of other servers that would change an answer, refused by name.

A field that no body of this API has is ignored, since clients send many that change nothing. These
would: a client that sends one expects another answer. A value that switches the field off is fine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from weft.gateway.validate import unsupported


class Foreign(NamedTuple):
    """What a field of another server asks for."""

    what: str
    """The request in words, or the field of this API that does it."""
    off: tuple[object, ...] = (False, "", 0)
    """Values that ask for nothing, beside null and empty lists and objects."""


_GIVEN = ()
"""For numbers of which zero asks for something too."""
_GENERATION: Mapping[str, Foreign] = {
    # SGLang
    "json_schema": Foreign("a schema is given as response_format"),
    "structural_tag": Foreign("structural tags are given in response_format"),
    "input_ids": Foreign("token ids are given as prompt of /v1/completions"),
    "input_embeds": Foreign("embeddings in place of a text"),
    "sampling_params": Foreign("parameters are fields of the body"),
    "max_new_tokens": Foreign("the limit is given as max_tokens", _GIVEN),
    "min_new_tokens": Foreign("the limit is given as min_tokens"),
    "extra_key": Foreign("cache entries are separated by cache_salt"),
    "return_hidden_states": Foreign("hidden states in the answer"),
    "session_params": Foreign("a chat's session is named by session_id"),
    "custom_params": Foreign("parameters of a logit processor"),
    "data_parallel_rank": Foreign("the choice of a worker in the body", _GIVEN),
    "bootstrap_host": Foreign("the choice of a prefill worker"),
    "bootstrap_room": Foreign("the choice of a prefill worker", _GIVEN),
    # vLLM
    "prompt_embeds": Foreign("embeddings in place of a text"),
    "kv_transfer_params": Foreign("the choice of a prefill worker"),
    "mm_processor_kwargs": Foreign("images and audio"),
    "repetition_detection": Foreign("the end of a text that repeats itself"),
    "logprob_token_ids": Foreign("log-probabilities of chosen tokens"),
    # llama.cpp, text-generation-webui, KoboldAI
    "grammar": Foreign("a grammar is given as guided_grammar"),
    "n_predict": Foreign("the limit is given as max_tokens", (-1,)),
    "n_probs": Foreign("alternatives are given as logprobs or top_logprobs"),
    "n_keep": Foreign("cutting the prompt"),
    "samplers": Foreign("the order of samplers"),
    "repeat_penalty": Foreign("the penalty is given as repetition_penalty", (1,)),
    "typical_p": Foreign("locally typical sampling", (1,)),
    "typical": Foreign("locally typical sampling", (1,)),
    "tfs_z": Foreign("tail-free sampling", (1,)),
    "top_a": Foreign("top-a sampling"),
    "top_n_sigma": Foreign("top-n-sigma sampling", (0, -1)),
    "mirostat": Foreign("mirostat sampling"),
    "mirostat_mode": Foreign("mirostat sampling"),
    "dynatemp_range": Foreign("a temperature that changes"),
    "dynamic_temperature": Foreign("a temperature that changes"),
    "dry_multiplier": Foreign("the DRY penalty"),
    "xtc_probability": Foreign("XTC sampling"),
    "smoothing_factor": Foreign("quadratic sampling"),
    "epsilon_cutoff": Foreign("epsilon sampling"),
    "eta_cutoff": Foreign("eta sampling"),
    "no_repeat_ngram_size": Foreign("a ban of repeated n-grams"),
    "guidance_scale": Foreign("classifier-free guidance", (1,)),
    "cfg_scale": Foreign("classifier-free guidance", (1,)),
    "negative_prompt": Foreign("classifier-free guidance"),
    "image_data": Foreign("images"),
    "image_url": Foreign("images"),
    # OpenAI
    "audio": Foreign("audio in the answer"),
    "web_search_options": Foreign("search in the web"),
}
_RESPONSE_FORMAT: Mapping[str, Foreign] = {
    "grammar": Foreign("a grammar is given as guided_grammar"),
    "value": Foreign("a schema is given as json_schema.schema"),
    "structures": Foreign("structural tags of this form"),
}
_MESSAGE: Mapping[str, Foreign] = {
    "prefix": Foreign("the last message is continued with continue_final_message"),
    "partial": Foreign("the last message is continued with continue_final_message"),
    "images": Foreign("images"),
    "audio": Foreign("audio"),
}


def refuse_foreign(body: object) -> None:
    """Checks a parsed JSON body of a chat or completion, which is valid otherwise.

    Raises:
        InvalidRequest: A field would change the answer on another server and does nothing here.
    """
    for where, given, fields in _places(body):
        for name in given.keys() & fields.keys():
            what, off = fields[name]
            value = given[name]
            if value is not None and value != [] and value != {} and value not in off:
                raise unsupported(f"{where}{name}", what)


def _places(body: object) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Foreign]]]:
    """Objects of a body, each with its path and the fields to look for."""
    if not isinstance(body, dict):
        return
    yield "", body, _GENERATION
    if isinstance(form := body.get("response_format"), dict):
        yield "response_format.", form, _RESPONSE_FORMAT
    if isinstance(messages := body.get("messages"), list):
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                yield f"messages[{index}].", message, _MESSAGE
