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
