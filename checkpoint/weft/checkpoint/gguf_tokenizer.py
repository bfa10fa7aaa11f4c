"""Makes tokenizer.json from a GGUF file's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.checkpoint.byte_pairs import byte_pair_tokenizer
from weft.checkpoint.gguf_metadata import GgufMetadata
from weft.contract.errors import ModelError

_CONTROL_TOKEN = 3
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS = (r"\p{N}", *_GPT2)
_QWEN = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",)
_GLM = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
_LING = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+",
)
_SEED = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4"), _GPT2),
    **dict.fromkeys(("trillion", "granite-docling", "gigachat", "mellum", "a.x-4.0"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2", "solar-open"), _QWEN),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _GLM),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), _LING),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    "seed-coder": _SEED,
}
"""Values of `tokenizer.ggml.pre` that transformers has not, and the patterns that llama.cpp
(llama-vocab.cpp) splits by for them, one after another.
"""


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
    known = (*_SPLITS, *gguf.GGUF_PRE_TOKENIZER_SPLITS)
    if kind == "gpt2" and split not in known:
        raise ModelError(f"{metadata.where}: tokenizer.ggml.pre {split!r} is not supported")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ModelError(f"{metadata.where}: tokenizer.ggml.model {kind!r} is not supported")
    architecture, content, _ = gguf.get_gguf_tokenizer(str(metadata.where))
    tokenizer, _ = gguf.convert_gguf_tokenizer(architecture, content)
    if kind == "gpt2" and split in _SPLITS:
        tokenizer.pre_tokenizer = _split_by(_SPLITS[split])
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        token = metadata["tokenizer.ggml.tokens"][begin]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, begin)]
        )
    parsed: Mapping[str, Any] = json.loads(tokenizer.to_str())
    return parsed


def _split_by(patterns: Sequence[str]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, as_bytes])


def _smollm(metadata: GgufMetadata) -> dict[str, Any]:
    """Byte-level BPE with SmolLM's pre-tokenizer.

    `tokenizer.ggml.pre = smollm` means: every digit alone first, then GPT-2's pattern. A plain
    ByteLevel (what transformers 5 makes of this file) differs where spaces precede a digit.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges: list[str] = metadata["tokenizer.ggml.merges"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return byte_pair_tokenizer(
        {token: index for index, token in enumerate(tokens)},
        [merge.split(" ") for merge in merges],
        [
            (index, token)
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        decoder={**byte_level, "add_prefix_space": True},
    )


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
