"""What a gateway needs of a small Whisper model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TOKENS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"),
    *("<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
NUM_POSITIONS, NUM_ROWS, MAX_TOKENS = 100, 128, 40
TIMES = tuple(f"<|{number / 50:.2f}|>" for number in range(NUM_POSITIONS + 1))
NUM_SAMPLES = 2 * NUM_POSITIONS * 160
"""Samples of a clip, which is 2 s long."""
CONTEXT_TOKENS = NUM_ROWS + MAX_TOKENS
CONTEXT = 100
"""Tokens of text of `make_talker`'s model."""
TEXT = (40, 60, 80)
"""Tokens of text that it says."""


def speech_tokenizer() -> Tokenizer:
    """A tokenizer with Whisper's tokens after all others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*TOKENS, *TIMES)]
    )
    return tokenizer


def add_speech(folder: Path, *, is_multilingual: bool = True) -> None:
    """Makes a model directory, whose tokenizer has the tokens, one of a Whisper model."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_source_positions": NUM_POSITIONS,
        "max_target_positions": MAX_TOKENS,
        "num_mel_bins": 80,
        "eos_token_id": end,
    }
    generation = {"eos_token_id": end, "is_multilingual": is_multilingual, "suppress_tokens": [7]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def make_talker(folder: Path, seed: int) -> Path:
    """Writes a model directory of a small random Whisper whose texts have few words and end by
    themselves.
    """
    import torch
    from transformers import WhisperForConditionalGeneration
    from weft.testing.models.tiny_whisper import make_whisper

    tokenizer = speech_tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in TOKENS}
    end, first_time = ids["<|endoftext|>"], ids["<|notimestamps|>"] + 1
    make_whisper(
        folder,
        seed,
        vocab_size=tokenizer.get_vocab_size(),
        max_target_positions=CONTEXT,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), end),
    )
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    row = model.model.decoder.embed_tokens.weight[end].detach()
    with torch.no_grad():
        # Samples of random models hardly ever end.
        model.model.decoder.layer_norm.bias.copy_(4.0 * row / row.square().sum())
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text()) | {
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in ("en", "de")},
        "task_to_id": {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": first_time - 1,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "suppress_tokens": sorted({*range(first_time - 1)} - {*TEXT, end}),
        "begin_suppress_tokens": [TEXT[0], end],
    }
    file.write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder
