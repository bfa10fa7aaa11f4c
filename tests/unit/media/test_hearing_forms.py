"""Clips of models that hear against transformers' processors: spectrograms, placeholders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor
from weft.chaos.tiny import write_tokenizer
from weft.contract.errors import ModelError
from weft.contract.spans import Media
from weft.gateway.media.clip_forms import BadAudio, ClipForm
from weft.gateway.media.hearing import ClipPrompts, load_clip_prompts
from weft.gateway.media.prompts import put_in
from weft.testing.models.tiny_hearing import (
    MELS,
    POSITIONS,
    SECONDS,
    VOCAB_SIZE,
    add_hearing,
    audio_token_id,
    extractor_of,
    hearing_tokenizer,
)

RATE = 16_000
WINDOW = SECONDS * RATE
LENGTHS = (1, 400, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)


def prompts_of(folder: Path, kind: str) -> ClipPrompts:
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, VOCAB_SIZE, 512)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    add_hearing(folder, kind=kind)
    config = json.loads((folder / "config.json").read_text())
    found = load_clip_prompts(folder, config, hearing_tokenizer(kind))
    assert found is not None
    return found


def in_another_process(form: ClipForm) -> ClipForm:
    return ClipForm.of(json.loads(json.dumps(form.options())))


def noise(length: int) -> np.ndarray:
    """Louder in some places than in others, so that windows have different ranges."""
    source = np.random.default_rng(random.randrange(1 << 30))
    loudness = np.repeat(10.0 ** source.uniform(-6, 0, length // 4000 + 1), 4000)[:length]
    return (source.normal(0, 0.3, length) * loudness).astype(np.float32)


def mel_of(media: Media) -> np.ndarray:
    return np.frombuffer(media.data, "<f4").reshape(media.shape[:2])


def test_voxtrals_windows_are_those_of_transformers(tmp_path: Path) -> None:
    """A clip is filled up to whole windows, and its spectrogram is cut after it was made."""
    prompts = prompts_of(tmp_path / "model", "voxtral")
    form, extractor = in_another_process(prompts.form), extractor_of()
    itself: Any = SimpleNamespace(feature_extractor=extractor)
    for length in (*LENGTHS, random.randint(1, 3 * WINDOW)):
        samples = noise(length)
        media = form.process(samples)
        wanted = VoxtralProcessor._retrieve_input_features(
            itself,
            [samples],
            2 * POSITIONS,
            sampling_rate=RATE,
            padding=True,
            truncation=False,
            pad_to_multiple_of=WINDOW,
            return_tensors="pt",
        )
        assert len(media) == len(wanted) == -(-length // WINDOW)
        for one, window in zip(media, wanted, strict=True):
            np.testing.assert_allclose(mel_of(one), window.numpy(), rtol=0, atol=3e-5)
        expansion = prompts.expansion(length)
        assert [run.length for run in expansion.runs] == [POSITIONS // 4] * len(media)
        assert set(expansion.ids) == {audio_token_id("voxtral")}


def test_qwen2_audios_clips_are_those_of_transformers(tmp_path: Path) -> None:
    """Tokens of prompts with two clips, and the frames that their positions see."""
    prompts = prompts_of(tmp_path / "model", "qwen2_audio")
    form, extractor = in_another_process(prompts.form), extractor_of()
    tokenizer = hearing_tokenizer("qwen2_audio")
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")
    oracle = Qwen2AudioProcessor(extractor, whole, chat_template="")
    text = "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nAudio 2: <|AUDIO|> what"
    for length in (400, 639, 640, WINDOW - 1, WINDOW, random.randint(400, WINDOW)):
        clips = [noise(length), noise(random.randint(400, WINDOW))]
        wanted = oracle(text=text, audio=clips, sampling_rate=RATE, return_tensors="pt")
        made = [form.process(one) for one in clips]
        expanded = [
            (prompts.expansion(len(one)), own) for one, own in zip(clips, made, strict=True)
        ]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found, spans = put_in(ids, {prompts.place_id: expanded})
        assert found == wanted["input_ids"][0].tolist()
        assert [span.digest for span in spans] == [own[0].digest for own in made]
        for (own,), mel, mask in zip(
            made, wanted["input_features"], wanted["feature_attention_mask"], strict=True
        ):
            seen = own.shape[1]
            assert int(mask.sum()) <= seen or seen == 2 * POSITIONS
            np.testing.assert_allclose(mel_of(own), mel[:, :seen].numpy(), rtol=0, atol=3e-5)


def test_clips_that_a_model_cannot_take_are_refused(tmp_path: Path) -> None:
    form = prompts_of(tmp_path / "model", "qwen2_audio").form
    with pytest.raises(BadAudio, match="longer than 2 s"):
        form.process(noise(WINDOW + 1))
    with pytest.raises(BadAudio, match="too short"):
        form.process(noise(160))


def test_each_window_has_an_identity_of_its_own(tmp_path: Path) -> None:
    """Equal windows of clips with other loudest frames are not the same."""
    form = prompts_of(tmp_path / "model", "voxtral").form
    quiet, loud = 1e-4 * noise(WINDOW), noise(WINDOW)
    alone, before = form.process(quiet), form.process(np.concatenate([quiet, loud]))
    assert alone[0].digest != before[0].digest
    assert form.process(quiet)[0].digest == alone[0].digest
    assert alone[0].shape == (MELS, 2 * POSITIONS, 4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"audio_token_id": None}, "audio_token_id is None, which is no token"),
        ({"audio_token_id": VOCAB_SIZE}, "which is no token"),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act: only gelu"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "odd"}, "is not supported"),
    ],
)
def test_other_ways_to_hear_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    prompts_of(tmp_path / "model", "voxtral")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    flat = {**config["text_config"], **config, **change}
    with pytest.raises(ModelError, match=problem):
        load_clip_prompts(tmp_path / "model", flat, hearing_tokenizer())


def test_another_spectrogram_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    prompts_of(folder, "voxtral")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hop_length": 80}))
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ModelError, match="hop_length: only 160"):
        load_clip_prompts(folder, config, hearing_tokenizer())
