"""Small files of video, and what a gateway needs of a model that takes them."""

from __future__ import annotations

import io
import json
import random
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from weft.testing.models.tiny_qwen_vl import CHAT_TEMPLATE, SQUARE, make_qwen_vl, qwen_config

_ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_SIZE = {"shortest_edge": 4 * SQUARE**2, "longest_edge": 64 * SQUARE**2}
_IMAGE = "{% if part['type'] == 'image' %}"
VIDEO_TEMPLATE = CHAT_TEMPLATE.replace(
    _IMAGE,
    "{% if part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    f"{_IMAGE.replace('if', 'elif')}",
)


def add_video(folder: Path, kind: str) -> None:
    """Makes a model directory, whose tokenizer has the tokens, one of a Qwen model."""
    file = folder / "config.json"
    most = json.loads(file.read_text())["max_position_embeddings"]
    config = qwen_config(kind, {}, {"max_position_embeddings": most}).to_dict()
    config |= {"architectures": [_ARCHITECTURES[kind]], "max_position_embeddings": most}
    file.write_text(json.dumps(config))
    images = {"patch_size": SQUARE // 2, "merge_size": 2, "size": _SIZE}
    images["image_processor_type"] = "Qwen2VLImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    _add_processor(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": VIDEO_TEMPLATE}))


def make_watching(kind: str, folder: Path, seed: int) -> Path:
    """Writes a model with random weights that takes videos."""
    make_qwen_vl(kind, folder, seed, template=VIDEO_TEMPLATE)
    _add_processor(folder)
    return folder


def _add_processor(folder: Path) -> None:
    videos = {"size": _SIZE, "max_frames": 8}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


def video(
    num_frames: int,
    rate: Fraction,
    size: tuple[int, int],
    name: str = "a.mp4",
    codec: str = "mpeg4",
) -> bytes:
    """Frames of changing colours with a moving square."""
    width, height = size
    out, rng = io.BytesIO(), np.random.default_rng(random.randrange(1 << 30))
    out.name = name
    with av.open(out, "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(num_frames):
            pixels = np.full((height, width, 3), rng.integers(0, 255, 3), np.uint8)
            at = number * 3 % (width // 2)
            pixels[: height // 2, at : at + width // 4] = rng.integers(0, 255, 3)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()
