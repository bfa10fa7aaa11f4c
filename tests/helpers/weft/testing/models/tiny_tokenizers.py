"""Small tokenizers and model directories for tests, built in memory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "Il était une fois dans l'Ouest: déjà vu, naïve café, Übergröße.",
    "你好世界 こんにちは 안녕하세요 Привет мир שלום مرحبا 🎉👩‍👩‍👧 🇫🇷",
    "def f(x):\n    return x + 1\n\n1234567890 {}[]()<>/\\|",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_bpe(vocab_size: int = 400) -> Tokenizer:
    """A GPT-2-like tokenizer with ChatML's special tokens and a few odd added ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("→é→")])
    return tokenizer


def byte_fallback_bpe() -> Tokenizer:
    """A Llama-2-like tokenizer: metaspace, unknown characters as bytes."""
    alphabet = sorted({c for c in "".join(CORPUS) if c.isascii() and not c.isspace()} | {"▁", "é"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    pairs = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "f"), ("o", "x"), ("▁f", "ox"), ("l", "l")]
    tokens += [left + right for left, right in pairs]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=pairs,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_model_dir(
    folder: Path, tokenizer: Tokenizer | None = None, max_context_tokens: int = 512
) -> Path:
    """Writes what the gateway needs of a Hugging Face model directory."""
    tokenizer = tokenizer or byte_level_bpe()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = "<|im_end|>" if tokenizer.token_to_id("<|im_end|>") is not None else "</s>"
    end = tokenizer.token_to_id(eos)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": max_context_tokens,
        "model_type": "llama",
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": eos, "bos_token": "<|im_start|>", "chat_template": CHATML})
    )
    return folder
