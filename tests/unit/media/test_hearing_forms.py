"""Clips of models that hear against transformers' processors: spectrograms, placeholders."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor
from weft.chaos.tiny import write_tokenizer
from weft.checkpoint.audio_config import AudioProjectorConfig, WindowConfig
from weft.checkpoint.resolve import resolve_model
from weft.common.settings import load_settings
from weft.contract.errors import InvalidRequest, ModelError
from weft.contract.spans import Media, MediaKind
from weft.gateway.media.clip_forms import ClipForm
from weft.gateway.media.hearing import ClipPrompts, load_clip_prompts
from weft.gateway.media.prompts import BadFile, MediaForm, put_in
from weft.gateway.media.reader import FetchedFiles, MediaReader, ProcessedFile
from weft.gateway.request import MediaFile
from weft.gateway.settings import GatewaySettings
from weft.gateway.text.control_tokens import Rendered
from weft.gateway.text.model_card import load_model_card
from weft.gateway.text.parts import text_part
from weft.testing.models.tiny_hearing import (
    MELS,
    POSITIONS,
    SECONDS,
    VOCAB_SIZE,
    add_hearing,
    audio_token_id,
    config_of,
    extractor_of,
    hearing_tokenizer,
)
from weft.testing.models.tiny_whisper import in_float64

RATE = 16_000
WINDOW = SECONDS * RATE
WINDOW_CONFIG = WindowConfig(
    num_mels=MELS,
    num_positions=POSITIONS,
    projector=AudioProjectorConfig(joined=4, out_features=8),
)
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
    form, extractor = in_another_process(prompts.form), in_float64(extractor_of())
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
    form, extractor = in_another_process(prompts.form), in_float64(extractor_of())
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
    with pytest.raises(BadFile, match="longer than 2 s"):
        form.process(noise(WINDOW + 1))
    with pytest.raises(BadFile, match="too short"):
        form.process(noise(160))


def test_each_window_has_an_identity_of_its_own(tmp_path: Path) -> None:
    """Equal windows of clips with other loudest frames are not the same."""
    form = prompts_of(tmp_path / "model", "voxtral").form
    loud = np.random.default_rng().normal(0, 0.3, WINDOW).astype(np.float32)
    quiet = 1e-6 * loud[::-1]
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


async def clips_of(count: int, seed: int) -> dict[str, int]:
    """Reads damaged files as chats do; each is a clip or a refusal that names its part."""
    draw, results = random.Random(seed), {"clip": 0, "refusal": 0}
    flags = ["--model-dir=.", "--decode=127.0.0.1:1", "--media-memo-bytes=0"]
    flags += ["--max-audio-seconds=8", "--media-timeout-s=120"]
    reader = MediaReader(load_settings(GatewaySettings, flags, {}))
    forms: dict[MediaKind, MediaForm] = {"audio": ClipForm(WINDOW_CONFIG)}
    loop, places = asyncio.get_running_loop(), asyncio.Semaphore(8)
    files = []
    for kind, subtype in (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", None)):
        out = io.BytesIO()
        soundfile.write(out, noise(9000), 22_050, format=kind, subtype=subtype)
        files.append(out.getvalue())

    async def one(data: bytes) -> None:
        source = base64.b64encode(data).decode()
        file = MediaFile(
            source=source, where="here", kind="input_audio", type_param="here", modality="audio"
        )
        until = loop.time() + 600
        fetched = FetchedFiles(lambda num_bytes: None)

        async def read() -> ProcessedFile:
            sources = await reader.sources([file], fetched, deadline=until)
            (made,) = await reader.process(
                forms, [file], sources, lambda done: None, deadline=until
            )
            return made

        async with places:
            (found,) = await asyncio.gather(read(), return_exceptions=True)
        if isinstance(found, BaseException):
            assert isinstance(found, InvalidRequest), found
            assert found.param == "here"
            assert len(found.message) < 200
            results["refusal"] += 1
            return
        assert 0 < found.size[0] <= 8 * RATE
        assert len(found.media) == -(-found.size[0] // WINDOW)
        assert all(np.isfinite(mel_of(media)).all() for media in found.media)
        results["clip"] += 1

    try:
        await asyncio.gather(*map(one, files))
        assert results == {"clip": len(files), "refusal": 0}
        pids = sorted(reader.pool.pids)
        for _ in range(count // 20):
            await asyncio.gather(*[one(damage(draw.choice(files), draw)) for _ in range(20)])
        assert sorted(reader.pool.pids) == pids
        assert not any(reader.pool.num_failures.values())
    finally:
        reader.close()
    return results


def damage(data: bytes, draw: random.Random) -> bytes:
    """Bytes that are changed, mostly in the header, cut off, or put in."""
    changed = bytearray(data)
    kind = draw.randrange(4)
    if kind == 0:
        return data[: draw.randrange(len(data))]
    if kind == 1:
        at = draw.randrange(len(data))
        return data[:at] + draw.randbytes(draw.randrange(1, 300)) + data[at:]
    reach = len(data) if kind == 2 else 64
    for _ in range(draw.choice([1, 3, 9])):
        changed[draw.randrange(reach)] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
    return bytes(changed)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.full)])
async def test_damaged_clips_are_heard_or_refused(count: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    results = await clips_of(count, seed)
    assert sum(results.values()) == 4 + count
    assert min(results.values()) > 0


def test_voxtrals_chats_are_mistral_commons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folders have a tekken.json and no chat template. The expected ids are those that
    mistral-common 1.13.1 makes of this conversation (version v11).
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    config = {**config_of("voxtral").to_dict(), "audio_token_id": 24}
    config["architectures"] = ["VoxtralForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
    named = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 24: "[AUDIO]"}
    named |= {17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]", 25: "[BEGIN_AUDIO]"}
    specials = [{"rank": n, "token_str": named.get(n, f"<SPECIAL_{n}>")} for n in range(40)]
    letters = [
        {"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)
    ]
    sizes = {"default_num_special_tokens": 40, "default_vocab_size": 296, "pattern": r"\w+|\W"}
    vocabulary = {"config": sizes, "vocab": letters, "special_tokens": specials}
    (folder / "tekken.json").write_text(json.dumps(vocabulary))
    card = load_model_card(resolve_model(str(folder)))
    assert card.audio is not None, card.audio_problem
    assert card.template is not None
    clip = {"type": "audio"}
    text = card.template.render(
        [
            {"role": "user", "content": [text_part("one"), clip, text_part("two?")]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [clip]},
        ],
        add_generation_prompt=True,
        continue_final_message=False,
        variables={},
    )
    ids = card.controls.encode(Rendered(text))
    first, second = (card.audio.expansion(seconds * RATE) for seconds in (SECONDS + 1, SECONDS))
    found, _ = put_in(ids, {24: [(first, ()), (second, ())]})

    def letters_of(word: str) -> list[int]:
        return [40 + one for one in word.encode()]

    rows = [24] * (POSITIONS // 4)
    start = [1, 3, *letters_of("one"), 25, *rows, *rows, *letters_of("two?"), 4]
    assert found == [*start, *letters_of("yes"), 2, 3, 25, *rows, 4]
