"""Small random models in the form of Whisper, written by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


def path_cost(costs: np.ndarray, firsts: Sequence[int]) -> float:
    """The least cost of a path through `[tokens, frames]`, from the first to the last of both, on
    which each token begins with its frame.
    """
    assert firsts[0] == 0
    num_frames, total = costs.shape[1], 0.0
    for row, begin, end in zip(costs, firsts, [*firsts[1:], num_frames], strict=True):
        assert begin <= end
        total += float(row[begin : max(end, begin + 1)].sum())
        if begin < end < num_frames:  # It may also go on to the frame that the next begins with.
            total += min(0.0, float(row[end]))
    return total


@torch.inference_mode()
def check_times(
    found: Sequence[float],
    reference: Any,
    mel: bytes,
    ids: Sequence[int],
    num_begin: int,
    heads: Sequence[Sequence[int]],
    num_frames: int,
) -> None:
    """Fails unless tokens begin where a path has them that costs no more than that of transformers,
    which takes a dearer one where two ways to a cell cost the same.

    Args:
        found: The first frame of each token.
        reference: Of transformers.
        mel: The clip's spectrogram.
        ids: What precedes the text, and the text.
        num_begin: Number of tokens before the text.
        heads: Layers and heads whose attention counts.
        num_frames: Of the clip.
    """
    from transformers.models.whisper import generation_whisper

    features = torch.frombuffer(bytearray(mel), dtype=torch.float32)
    sequences = torch.tensor([list(ids)])
    made = reference(
        input_features=features.view(1, SHAPE["num_mel_bins"], -1),
        decoder_input_ids=sequences,
        output_attentions=True,
    )
    outputs: Any = type("Outputs", (dict,), {})()
    outputs.cross_attentions, outputs.sequences = [made.cross_attentions], sequences
    noted: list[np.ndarray] = []
    warp = generation_whisper._dynamic_time_warping

    def warp_noted(costs: np.ndarray) -> Any:
        noted.append(costs)
        return warp(costs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation_whisper, "_dynamic_time_warping", warp_noted)
        times = reference._extract_token_timestamps(
            outputs,
            heads,
            time_precision=1.0,
            num_frames=2 * num_frames,
            num_input_ids=num_begin,
        )[0, num_begin:-1]
    (costs,) = noted
    # Roundings of attention, of which a path has as many.
    slack = 1e-5 * sum(costs.shape)
    wanted = times.long().tolist()
    assert len(found) == len(wanted)
    least = path_cost(costs, wanted)
    assert path_cost(costs, [int(one) for one in found]) <= least + slack, (found, wanted)
