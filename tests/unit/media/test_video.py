"""Videos and audio in containers: frames, sizes, times and tokens against transformers, on fresh
files that PyAV writes; bounds and damaged files.
"""

from __future__ import annotations

import io
import random
import sys
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import av
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.qwen3_vl import processing_qwen3_vl
from transformers.video_utils import VideoMetadata, read_video_pyav
from weft.gateway.media import audio, containers
from weft.gateway.media.process import _answer
from weft.gateway.media.prompts import BadFile
from weft.gateway.media.video_forms import VideoForm, VideoPrompts
from weft.testing.models.tiny_qwen_vl import MARKS
from weft.testing.models.tiny_video import video
from weft.testing.models.tiny_vision import write_marked_tokenizer

# Their resizing needs torchvision, and what is used of them here does not.
_TORCHVISION = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
with patch.dict(sys.modules, {f"torchvision{name}": MagicMock() for name in _TORCHVISION}):
    of_qwen2 = import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    of_qwen3 = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
RATES = (Fraction(5), Fraction(24), Fraction(30_000, 1001), Fraction(60))
QWEN3 = VideoForm(
    square=8,
    frames=2,
    fps=2.0,
    min_frames=4,
    max_frames=12,
    min_pixels=16 * 64,
    max_pixels=400 * 64,
    is_volume=True,
)
QWEN2 = VideoForm(
    square=8,
    frames=2,
    fps=2.0,
    min_frames=4,
    max_frames=12,
    min_pixels=4 * 64,
    max_pixels=60 * 64,
    is_volume=False,
    tokens_per_second=4.0,
)


def answer(form: VideoForm, data: bytes, **changes: Any) -> tuple[dict[str, Any], bytes]:
    head = {
        "form": form.name,
        "options": form.options(),
        "is_base64": False,
        "max_pixels": 1 << 20,
        "max_seconds": 60.0,
        "measures": False,
        **changes,
    }
    return _answer(head, bytearray(data))


def reference(form: VideoForm, path: Path) -> tuple[np.ndarray, VideoMetadata, tuple[int, int]]:
    """transformers' frames, what it knows of them, and the size in pixels that it gives them."""
    of, processor = of_qwen2, of_qwen2.Qwen2VLVideoProcessor
    if form.is_volume:
        of, processor = of_qwen3, of_qwen3.Qwen3VLVideoProcessor
    own = SimpleNamespace(
        fps=None,
        num_frames=None,
        min_frames=form.min_frames,
        max_frames=form.max_frames,
        temporal_patch_size=form.frames,
    )

    def sample(metadata: VideoMetadata) -> Any:
        return np.asarray(processor.sample_frames(own, metadata, fps=form.fps))

    frames, metadata = read_video_pyav(str(path), sample)
    bounds = {"factor": form.square, "min_pixels": form.min_pixels, "max_pixels": form.max_pixels}
    if form.is_volume:
        bounds |= {"num_frames": len(frames), "temporal_factor": form.frames}
    size = of.smart_resize(height=frames.shape[1], width=frames.shape[2], **bounds)
    return frames, metadata, size


@pytest.mark.parametrize("form", [QWEN3, QWEN2])
def test_frames_and_times_are_those_of_transformers(form: VideoForm, tmp_path: Path) -> None:
    for _ in range(6):
        rate = random.choice(RATES)
        size = 2 * random.randint(8, 60), 2 * random.randint(8, 60)
        path = tmp_path / "a.mp4"
        path.write_bytes(video(random.randint(4, 90), rate, size))
        told, data = answer(form, path.read_bytes())
        assert "bad" not in told, told
        frames, metadata, (height, width) = reference(form, path)
        indices = [int(one) for one in metadata.frames_indices]
        rows, columns, *times = told["size"]
        assert (rows * 8, columns * 8) == (height, width)
        if form.tokens_per_second:
            import torch

            seconds = form.frames / metadata.sampled_fps
            grid = torch.arange(len(times)) * (form.tokens_per_second * seconds)
            assert times == grid.long().tolist()
        else:
            middles = processing_qwen3_vl.Qwen3VLProcessor._calculate_timestamps(
                SimpleNamespace(), list(indices), metadata.fps, form.frames
            )
            assert [f"{one // 10}.{one % 10}" for one in times] == [f"{one:.1f}" for one in middles]
        small = [np.asarray(Image.fromarray(one).resize((width, height), 3)) for one in frames]
        small += small[-1:] * (-len(small) % form.frames)
        pairs = [np.concatenate(pair, 2) for pair in zip(small[::2], small[1::2], strict=True)]
        assert data == b"".join([pair.tobytes() for pair in pairs])
        assert len({one["digest"] for one in told["media"]}) == len(pairs)
        measured, nothing = answer(form, path.read_bytes(), measures=True)
        assert (measured["size"], nothing) == (told["size"], b"")


def test_texts_of_frames_are_those_of_transformers(tmp_path: Path) -> None:
    write_marked_tokenizer(tmp_path, 480, MARKS, "", "<|im_end|>")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    times = sorted(random.sample(range(900), 3))
    owner: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
        _calculate_timestamps=lambda *_: [one / 10 for one in times],
    )
    given = {
        "video_grid_thw": np.array([[3, 4, 6]]),
        "video_metadata": [SimpleNamespace(fps=1.0, frames_indices=[])],
    }
    text = processing_qwen3_vl.Qwen3VLProcessor.replace_video_token(owner, given, 0)
    prompts = VideoPrompts(QWEN3, tokenizer)
    found = prompts.expansion(2, 3, *times)
    assert list(found.ids) == tokenizer.encode(text, add_special_tokens=False).ids
    assert [found.ids[run.start : run.start + run.length] for run in found.runs] == [
        (prompts.place_id,) * 6
    ] * 3
    whole = VideoPrompts(QWEN2, tokenizer).expansion(2, 3, 0, 5, 9)
    assert whole.ids == (prompts.place_id,) * 18
    assert [(run.start, run.time) for run in whole.runs] == [(0, 0), (6, 6), (12, 10)]


def test_other_containers_are_read() -> None:
    for name, codec in (("a.webm", "libvpx"), ("a.mkv", "mpeg4"), ("a.mov", "mpeg4")):
        told, _ = answer(QWEN3, video(30, Fraction(10), (32, 48), name, codec))
        assert len(told["size"]) - 2 == 3, (name, told)


def test_videos_out_of_bounds_are_refused() -> None:
    data = video(30, Fraction(10), (32, 48))
    for changes, problem in (
        ({"max_seconds": 2.5}, "longer than 2.5 s"),
        ({"max_pixels": 32 * 48 - 1}, "at most 1535"),
    ):
        told, _ = answer(QWEN3, data, **changes)
        assert problem in told["bad"]
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    for other in (playlist, b"ffconcat version 1.0\nfile /etc/passwd\n", random.randbytes(500)):
        told, _ = answer(QWEN3, other)
        assert told["bad"].startswith("is no video")
    narrow, _ = answer(QWEN3, video(5, Fraction(5), (2, 402)))
    assert "one side" in narrow.get("bad", "one side")


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)])
def test_damaged_videos_are_refused_or_read(count: int) -> None:
    whole = video(12, Fraction(6), (32, 48))
    for _ in range(count):
        data = bytearray(whole[: random.randint(1, len(whole))] if random.random() < 0.3 else whole)
        for _ in range(random.randint(1, 20)):
            data[random.randrange(len(data))] = random.randrange(256)
        told, media = answer(QWEN3, bytes(data))
        assert ("bad" in told) is not bool(media)


def sound(
    name: str, codec: str, rate: int, layout: str, seconds: float
) -> tuple[bytes, np.ndarray]:
    """A file with two tones, and their samples at 16 kHz."""
    out = io.BytesIO()
    out.name = name
    hertz = np.random.default_rng(random.randrange(1 << 30)).uniform(200, 2000, 2)

    def tones(at: int) -> np.ndarray:
        time = np.arange(int(seconds * at)) / at
        return (0.2 * np.sin(2 * np.pi * hertz[:, None] * time).sum(0)).astype(np.float32)

    samples = tones(rate)
    with av.open(out, "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        channels = 2 if layout == "stereo" else 1
        for begin in range(0, len(samples), 960):
            part = np.repeat(samples[None, begin : begin + 960], channels, axis=0)
            if codec == "mp2":
                whole = (part.T * 32_767).astype(np.int16).reshape(1, -1)
                frame = av.AudioFrame.from_ndarray(whole, format="s16", layout=layout)
            else:
                frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout)
            frame.sample_rate = rate
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue(), tones(16_000)


@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("name", "codec", "rate", "layout"),
    [
        ("a.m4a", "aac", 44_100, "stereo"),
        ("a.mp4", "aac", 16_000, "mono"),
        ("a.webm", "libopus", 48_000, "stereo"),
        ("a.aac", "aac", 22_050, "mono"),
        ("a.mpeg", "mp2", 44_100, "stereo"),
    ],
)
def test_audio_in_containers(name: str, codec: str, rate: int, layout: str, count: int) -> None:
    data, wanted = sound(name, codec, rate, layout, 1.5)
    found = audio.decode(data, 60)
    # Encoders put some silence ahead, and fill up their last block.
    assert len(wanted) <= len(found) <= len(wanted) + 3000
    at = np.argmax(np.correlate(found, wanted[4000:12_000], "valid"))
    part = found[at : at + 8000]
    assert np.corrcoef(part, wanted[4000:12_000])[0, 1] > 0.98
    with pytest.raises(BadFile, match="longer than 1 s"):
        audio.decode(data, 1.0)
    for _ in range(count):
        damaged = bytearray(data)
        for _ in range(random.randint(1, 30)):
            damaged[random.randrange(len(data))] = random.randrange(256)
        try:
            audio.decode(bytes(damaged), 60)
        except audio.BadFile:
            continue


@pytest.mark.parametrize(("layout", "is_read"), [("6.1", True), ("7.1", False)])
def test_sound_of_many_channels_is_read_or_refused(layout: str, *, is_read: bool) -> None:
    """PyAV reads past the planes of frames with eight channels or more."""
    out = io.BytesIO()
    out.name = "a.m4a"
    with av.open(out, "w") as container:
        stream = container.add_stream("aac", rate=16_000, layout=layout)
        count = stream.layout.nb_channels
        for _ in range(8):
            values = np.zeros((1, 1024 * count), np.float32)
            frame = av.AudioFrame.from_ndarray(values, format="flt", layout=layout)
            frame.sample_rate = 16_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if is_read:
        assert len(audio.decode(out.getvalue(), 60)) >= 8 * 1024
    else:
        with pytest.raises(audio.BadFile, match="has 8 channels; at most 7"):
            audio.decode(out.getvalue(), 60)


def test_a_video_without_sound_is_no_audio() -> None:
    with pytest.raises(audio.BadFile, match="has no audio"):
        audio.decode(video(5, Fraction(5), (32, 32)), 60)


def test_times_that_move_rotations_are_in_the_digest() -> None:
    """Pages of the same frames at another rate hold other keys, and so have other names."""
    pixels = np.random.default_rng(random.randrange(1 << 30)).integers(0, 255, (4, 16, 16, 3))
    images = [Image.fromarray(one.astype(np.uint8)) for one in pixels]

    def digests(form: VideoForm, *times: int) -> list[bytes]:
        return [one.digest for one in form.process(iter(images), range(4), (2, 2), times)]

    assert digests(QWEN3, 0, 9) == digests(QWEN3, 0, 12)
    (first, second), (same, other) = digests(QWEN2, 0, 4), digests(QWEN2, 0, 8)
    assert first == same
    assert len({first, second, other}) == 3


def test_silence_that_unpacks_to_much_is_not_unpacked() -> None:
    """An hour of it has some hundred kilobytes."""
    out = io.BytesIO()
    out.name = "a.webm"
    with av.open(out, "w") as container:
        stream = container.add_stream("libopus", rate=48_000, layout="mono")
        for _ in range(120):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 24_000), np.float32), "fltp", "mono")
            frame.sample_rate = 48_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data = out.getvalue()
    assert len(data) < 40_000
    taken = list[int]()
    with (
        pytest.raises(BadFile, match="longer than 2 s"),
        patch.object(
            audio, "sound_of", lambda *given: _counted(containers.sound_of(*given), taken)
        ),
    ):
        audio.decode(data, 2.0)
    assert sum(taken) < 3 * 48_000


def _counted(blocks: Any, taken: list[int]) -> Any:
    for rate, samples in blocks:
        taken.append(len(samples))
        yield rate, samples
