"""Makes tokenizer.json from a GGUF file's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.checkpoint.gguf_metadata import GgufMetadata
from weft.contract.errors import ModelError

_CONTROL_TOKEN = 3
_PLAIN_SPLITS = ("default", "gpt-2")
"""Values of `tokenizer.ggml.pre` that stand for GPT-2's pattern."""


def tokenizer_files(metadata: GgufMetadata) -> dict[str, Mapping[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json."""
    is_smollm = metadata.get("tokenizer.ggml.pre") == "smollm"
    tokenizer = _smollm(metadata) if is_smollm else _by_transformers(metadata)
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(metadata)}


def _by_transformers(metadata: GgufMetadata) -> Mapping[str, Any]:
    try:
        from tokenizers.processors import TemplateProcessing
        from transformers.integrations.gguf import gguf_tokenizer_mapping as gguf
    except ImportError as error:
        raise ModelError(
            f"{metadata.where}: its tokenizer is converted by transformers 5.20 or later: {error}"
        ) from error
    kind, split = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    known = (*_PLAIN_SPLITS, *gguf.GGUF_PRE_TOKENIZER_SPLITS)
    if kind == "gpt2" and split not in known:
        raise ModelError(f"{metadata.where}: tokenizer.ggml.pre {split!r} is not supported")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{metadata.where}: tokenizer.ggml.model {kind!r} is not supported")
    architecture, content, _ = gguf.get_gguf_tokenizer(str(metadata.where))
    tokenizer, _ = gguf.convert_gguf_tokenizer(architecture, content)
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        token = metadata["tokenizer.ggml.tokens"][begin]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, begin)]
        )
    parsed: Mapping[str, Any] = json.loads(tokenizer.to_str())
    return parsed


def _smollm(metadata: GgufMetadata) -> dict[str, Any]:
    """Byte-level BPE with SmolLM's pre-tokenizer.

    `tokenizer.ggml.pre = smollm` means: every digit alone first, then GPT-2's pattern. A plain
    ByteLevel (what transformers 5 makes of this file) differs where spaces precede a digit.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges: list[str] = metadata["tokenizer.ggml.merges"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _special_token(index, token)
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _special_token(index: int, token: str) -> dict[str, Any]:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": metadata.get("tokenizer.ggml.add_space_prefix", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.own("context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    for kind, name in names.items():
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            config[f"{kind}_token"] = str(tokens[number])
    return dict(sorted(config.items()))
