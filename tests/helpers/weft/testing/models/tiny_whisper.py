"""Small random models in the form of Whisper, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 301
END, START, LANGUAGE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES = range(192, 200)
"""Special tokens, in Whisper's order. Those before are text, those after are times."""
FIRST_TIME = NO_TIMES + 1
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_mel_bins": 80,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_layers": 2,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 80,
    "max_source_positions": 100,
    "max_target_positions": 40,
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}


def make_whisper(path: Path, seed: int, **overrides: Any) -> Path:
    """Writes a model directory without a tokenizer."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**SHAPE, **overrides})).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if name.endswith(("embed_tokens.weight", "conv1.weight")) else 0.15
            parameter.normal_(0, scale)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    model.generation_config.suppress_tokens = None
    model.generation_config.begin_suppress_tokens = None
    model.save_pretrained(path)
    return path


def in_float64(extractor: Any) -> Any:
    """transformers' extractor of spectrograms by its form of numpy. That of torch sums frequencies
    in float32; where noise is nearly silent at one, no digit of its logarithm is left.
    """
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    return extractor
