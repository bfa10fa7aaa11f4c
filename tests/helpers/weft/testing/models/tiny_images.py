"""Model directories for tests whose models take images in SmolVLM's form, without weights."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir

MAX_GRID = 4
TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)),
)
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Reads contents as parts alone, as SmolVLM's own does."""


def image_tokenizer(tokenizer: Tokenizer | None = None) -> Tokenizer:
    """A tokenizer with SmolVLM's tokens."""
    tokenizer = tokenizer or byte_level_bpe()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in TOKENS]
    )
    return tokenizer


def write_image_model(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    tile_edge: int = 64,
    tile_tokens: int = 4,
    max_context_tokens: int = 2048,
    template: str = TEMPLATE,
    **processor: Any,
) -> Path:
    """Writes what the gateway needs of a model that takes images. `processor` has further fields
    of preprocessor_config.json.
    """
    write_model_dir(folder, image_tokenizer(tokenizer), max_context_tokens)
    add_images(folder, tile_edge=tile_edge, tile_tokens=tile_tokens, template=template, **processor)
    return folder


def add_images(
    folder: Path,
    *,
    tile_edge: int = 64,
    tile_tokens: int = 4,
    template: str = TEMPLATE,
    **processor: Any,
) -> None:
    """Makes a model directory, whose tokenizer has the tokens, one of a model that takes images."""
    given = {
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Idefics3ImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": tile_edge},
        "processor_class": "Idefics3Processor",
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": MAX_GRID * tile_edge},
    } | processor
    (folder / "preprocessor_config.json").write_text(json.dumps(given))
    whole = {"image_seq_len": tile_tokens, "processor_class": "Idefics3Processor"}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def random_image(seed: int, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Noise in large and small features."""
    random = np.random.default_rng(seed)
    channels = len(Image.new(mode, (1, 1)).getbands())
    coarse = random.integers(0, 256, (8, 8, channels), dtype=np.uint8)
    fine = random.integers(0, 64, (height, width, channels), dtype=np.uint8)
    bands = [
        np.asarray(Image.fromarray(coarse[..., band]).resize((width, height))) // 2
        + fine[..., band]
        for band in range(channels)
    ]
    return Image.merge(mode, [Image.fromarray(band) for band in bands])


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    """A file as a URL."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
