"""Whisper on a GPU, against transformers: rows of clips, and tokens of many clips at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from weft.checkpoint.whisper_demo import CONFIG
from weft.contract.request import BeamParams, SamplingParams, StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_whisper import END, SHAPE, START, make_whisper

pytestmark = pytest.mark.needs("cuda")

FRAMES, ROWS, MELS = 2 * SHAPE["max_source_positions"], 128, SHAPE["num_mel_bins"]
TINY_EN = {name: CONFIG[name] for name in SHAPE}
"""The shape of Whisper tiny.en."""
SIZES = {"d_model": 192, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
"""Heads of 64, as Whisper's own."""
NEAR_TIE = 1e-3


@pytest.mark.parametrize(
    ("shape", "rows", "count"),
    [(SIZES, ROWS, 1), (SIZES, ROWS, 64), (TINY_EN, 1536, 3), (TINY_EN, 1536, 64)],
    ids=["small-1", "small-64", "tiny.en-3", "tiny.en-64"],
)
def test_tokens_of_clips_at_once_are_those_of_transformers(
    shape: dict[str, Any], rows: int, count: int, tmp_path: Path
) -> None:
    folder = make_whisper(tmp_path / "model", random.randrange(1 << 30), **shape)
    made = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    reference: Any = made.eval().cuda()
    config = reference.config
    end, start = config.eos_token_id, config.decoder_start_token_id
    rng, frames = np.random.default_rng(random.randrange(1 << 30)), 2 * config.max_source_positions
    mels = [rng.normal(0, 0.7, (MELS, frames)).astype("<f4") for _ in range(count)]
    clips = [Media.of("audio", "test", (MELS, frames, 4), mel.tobytes()) for mel in mels]
    num_pages = count * (rows // 16 + 2) + 100
    with LLM(folder, device="cuda", dtype="float32", num_pages=num_pages) as llm:
        llm.put(clips)
        found = llm.generate(
            [[end] * rows + [start]] * count,
            SamplingParams(temperature=0.0),
            StopCriteria(max_tokens=10, ignore_eos=True),
            spans=[[MediaSpan(position=0, length=rows, digest=one.digest)] for one in clips],
        )
    for mel, sample in zip(mels, found, strict=True):
        ids = torch.tensor([[start, *sample.token_ids[:-1]]]).cuda()
        with torch.inference_mode():
            mel_on_gpu = torch.from_numpy(mel)[None].cuda()
            logits = reference(input_features=mel_on_gpu, decoder_input_ids=ids).logits[0]
        check_choices(logits.cpu(), sample.token_ids, NEAR_TIE)


def test_beams_find_texts_as_probable_as_on_a_cpu(tmp_path: Path) -> None:
    """Several searches beside clips that are drawn greedily."""
    folder = make_whisper(tmp_path / "model", random.randrange(1 << 30), **SIZES)
    rng, count = np.random.default_rng(random.randrange(1 << 30)), 8
    mels = [rng.normal(0, 0.7, (MELS, FRAMES)).astype("<f4") for _ in range(count)]
    clips = [Media.of("audio", "test", (MELS, FRAMES, 4), mel.tobytes()) for mel in mels]
    search = SamplingParams(temperature=0.0, beams=BeamParams(width=5))
    kinds = [search if number % 2 else SamplingParams(temperature=0.0) for number in range(count)]
    means = []
    for device in ("cuda", "cpu"):
        with LLM(folder, device=device, dtype="float32", num_pages=400) as llm:
            llm.put(clips)
            found = llm.generate(
                [[END] * ROWS + [START]] * count,
                kinds,
                StopCriteria(max_tokens=30),
                0,
                spans=[[MediaSpan(position=0, length=ROWS, digest=one.digest)] for one in clips],
            )
            means.append([np.mean([entry.logprob for entry in one.logprobs]) for one in found])
            assert llm.engine.memory.counts().used == 0
    np.testing.assert_allclose(means[0][1::2], means[1][1::2], atol=NEAR_TIE)


def test_words_are_spoken_when_transformers_says_so(tmp_path: Path) -> None:
    folder = make_whisper(tmp_path / "model", random.randrange(1 << 30), **SIZES)
    reference: Any = WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    heads = [(1, head) for head in range(3)]
    rng = np.random.default_rng(random.randrange(1 << 30))
    equal = total = 0
    with LLM(folder, device="cuda", dtype="float32", num_pages=400) as llm:
        for _ in range(8):
            mel = rng.normal(0, 0.7, (MELS, FRAMES)).astype("<f4")
            clip = Media.of("audio", "test", (MELS, FRAMES, 4), mel.tobytes())
            llm.put([clip])
            text = rng.integers(0, END, 20).tolist()
            pool = PoolingParams(output="alignment", aligned_from=ROWS + 1, num_frames=FRAMES // 2)
            span = MediaSpan(position=0, length=ROWS, digest=clip.digest)
            (found,) = llm.pool([[END] * ROWS + [START, *text]], pool, spans=[[span]])
            ids = torch.tensor([[START, *text]])
            with torch.inference_mode():
                made = reference(
                    input_features=torch.from_numpy(mel)[None],
                    decoder_input_ids=ids,
                    output_attentions=True,
                )
            outputs: Any = type("Outputs", (dict,), {})()
            outputs.cross_attentions, outputs.sequences = [made.cross_attentions], ids
            times = reference._extract_token_timestamps(
                outputs, heads, time_precision=1.0, num_frames=FRAMES, num_input_ids=1
            )[0, 1:-1]
            equal += sum(a == b for a, b in zip(found[0].tolist(), times.tolist(), strict=True))
            total += len(text)
    assert equal >= 0.8 * total
