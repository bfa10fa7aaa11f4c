"""Whisper on a GPU, against transformers: rows of clips, and tokens of many clips at once."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_whisper import END, SHAPE, START, make_whisper

pytestmark = pytest.mark.needs("cuda")

FRAMES, ROWS, MELS = 2 * SHAPE["max_source_positions"], 128, SHAPE["num_mel_bins"]
SIZES = {"d_model": 192, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
"""Heads of 64, as Whisper's own."""
NEAR_TIE = 1e-3


@pytest.mark.parametrize("count", [1, 64])
def test_tokens_of_clips_at_once_are_those_of_transformers(count: int, tmp_path: Path) -> None:
    folder = make_whisper(tmp_path / "model", random.randrange(1 << 30), **SIZES)
    reference = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(random.randrange(1 << 30))
    mels = [rng.normal(0, 0.7, (MELS, FRAMES)).astype("<f4") for _ in range(count)]
    clips = [Media.of("audio", "test", (MELS, FRAMES, 4), mel.tobytes()) for mel in mels]
    with LLM(folder, device="cuda", dtype="float32", num_pages=count * 12 + 100) as llm:
        llm.put(clips)
        found = llm.generate(
            [[END] * ROWS + [START]] * count,
            SamplingParams(temperature=0.0),
            StopCriteria(max_tokens=10, ignore_eos=True),
            spans=[[MediaSpan(position=0, length=ROWS, digest=one.digest)] for one in clips],
        )
    for mel, sample in zip(mels, found, strict=True):
        ids = torch.tensor([[START, *sample.token_ids[:-1]]])
        with torch.inference_mode():
            logits = reference(input_features=torch.from_numpy(mel)[None], decoder_input_ids=ids)
        check_choices(logits.logits[0], sample.token_ids, NEAR_TIE)
