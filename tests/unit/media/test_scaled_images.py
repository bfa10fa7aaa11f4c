"""Pictures and tokens of Qwen2-VL's form are those of transformers' processors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from weft.contract.errors import ModelError
from weft.contract.spans import media_digest
from weft.gateway.media.forms import COARSE_PIXELS, ScaledForm
from weft.gateway.media.load import ImagePrompts, load_image_prompts
from weft.gateway.media.prompts import BadFile, put_in
from weft.testing.models.tiny_images import random_image
from weft.testing.models.tiny_qwen_vl import IDS, MARKS, SQUARE, VOCAB_SIZE
from weft.testing.models.tiny_vision import write_marked_tokenizer

SIZES = [(1, 1), (1, 200), (600, 3), (64, 64), (65, 64), (28, 28), (27, 29), (500, 20), (7, 1000)]


def sizes(seed: int, count: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(1, 700), draw.randint(5, 700)) for _ in range(count)]


def picture_of(processor: Any, image: Any) -> np.ndarray:
    """[height, width, 3] uint8: transformers' patches put together again."""
    found = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")
    ((_, rows, columns),) = found["image_grid_thw"].tolist()
    side, merge = processor.patch_size, processor.merge_size
    parts = found["pixel_values"].reshape(
        rows // merge, columns // merge, merge, merge, 3, 2, side, side
    )
    np.testing.assert_array_equal(parts[:, :, :, :, :, 0], parts[:, :, :, :, :, 1])
    frame = parts[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
    return frame.reshape(rows * side, columns * side, 3).astype(np.uint8)


@pytest.mark.parametrize(
    ("patch", "least", "most"),
    [(14, 56 * 56, 28 * 28 * 1280), (16, 65_536, 16_777_216), (8, 16 * 16 * 4, 16 * 16 * 100)],
)
def test_pictures_are_those_of_transformers(patch: int, least: int, most: int) -> None:
    form = ScaledForm(square=2 * patch, min_pixels=least, max_pixels=most, resample=3)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": least, "longest_edge": most}
    )
    for number, (width, height) in enumerate([*SIZES, *sizes(patch, 10)]):
        image = random_image(number, width, height)
        (one,) = form.process(image)
        expected = picture_of(processor, image)
        np.testing.assert_array_equal(
            np.frombuffer(one.data, np.uint8).reshape(one.shape), expected
        )
        assert one.digest == media_digest("image", "scaled", one.shape, one.data)
        (tokens,) = form.plan(height, width).lengths
        assert tokens == one.shape[0] * one.shape[1] // (2 * patch) ** 2
        assert tokens <= form.largest.lengths[0]


@pytest.mark.parametrize(("patch", "least", "most"), [(14, 384**2, 1536**2), (8, 1024, 64_000)])
def test_pictures_of_paddleocr_are_those_of_transformers(patch: int, least: int, most: int) -> None:
    """Small ones are enlarged first."""
    sides = {"square": 2 * patch, "min_pixels": least, "max_pixels": most}
    form = ScaledForm(**sides, resample=3, enlarges=True)
    processor = PaddleOCRVLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": least, "longest_edge": most}
    )
    for number, (width, height) in enumerate([*SIZES, (2, 30), (40, 3), *sizes(patch, 10)]):
        image = random_image(number, width, height)
        try:
            found = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")
        except ValueError:
            with pytest.raises(BadFile, match="200 times"):
                form.plan(height, width)
            continue
        (one,) = form.process(image)
        ((_, rows, columns),) = found["image_grid_thw"].tolist()
        parts = found["pixel_values"].reshape(rows, columns, 3, patch, patch)
        expected = parts.transpose(0, 3, 1, 4, 2).reshape(rows * patch, columns * patch, 3)
        np.testing.assert_array_equal(
            np.frombuffer(one.data, np.uint8).reshape(one.shape), expected.astype(np.uint8)
        )
        assert form.plan(height, width).lengths == (rows * columns // 4,)
        assert rows * columns // 4 <= form.largest.lengths[0]


def test_files_of_paddleocr_are_read(tmp_path: Path) -> None:
    changes = {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1}
    config = write_processor(tmp_path, **changes)
    assert prompts_of(tmp_path, config).form == ScaledForm(
        square=SQUARE,
        min_pixels=4 * SQUARE**2,
        max_pixels=64 * SQUARE**2,
        resample=3,
        enlarges=True,
    )


def test_coarse_images_have_few_tokens() -> None:
    form = ScaledForm(square=32, min_pixels=65_536, max_pixels=16_777_216, resample=3)
    for width, height in ((4000, 3000), (2000, 100), (512, 512), (100, 100)):
        (tokens,) = form.plan(height, width, is_coarse=True).lengths
        assert tokens <= COARSE_PIXELS // 32**2
        assert tokens <= form.plan(height, width).lengths[0]
    (one,) = form.process(random_image(1, 1200, 900), is_coarse=True)
    assert one.shape[0] * one.shape[1] <= COARSE_PIXELS


def test_long_images_are_refused() -> None:
    form = ScaledForm(square=32, min_pixels=65_536, max_pixels=16_777_216, resample=3)
    for size in ((1, 201), (4001, 20)):
        with pytest.raises(BadFile, match="200 times"):
            form.plan(*size)


def write_processor(folder: Path, **changes: Any) -> dict[str, Any]:
    """A folder with a tokenizer and a processor; returns its config.json."""
    folder.mkdir(exist_ok=True)
    write_marked_tokenizer(folder, VOCAB_SIZE, MARKS, "", MARKS[-1])
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "do_resize": True,
        "patch_size": SQUARE // 2,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * SQUARE**2, "longest_edge": 64 * SQUARE**2},
        **changes,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    vision = {"patch_size": SQUARE // 2, "spatial_merge_size": 2}
    return {"vision_config": vision, "image_token_id": IDS["<|image_pad|>"]}


def prompts_of(folder: Path, config: dict[str, Any]) -> ImagePrompts:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = load_image_prompts(folder, config, tokenizer)
    assert found is not None
    return found


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    config = write_processor(tmp_path)
    prompts = prompts_of(tmp_path, config)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    processor = Qwen2VLImageProcessorPil(
        patch_size=SQUARE // 2,
        size={"shortest_edge": 4 * SQUARE**2, "longest_edge": 64 * SQUARE**2},
    )
    image, text = "<|vision_start|><|image_pad|><|vision_end|>", f"ab{MARKS[0]}cd"
    for number in range(6):
        many = [random_image(number + n, *size) for n, size in enumerate(sizes(number, 3))]
        prompt = f"first {image} then {text}{image}{image} end"
        # What their processor for prompts does, which needs torchvision.
        counts = [processor.get_number_of_image_patches(*one.size[::-1]) // 4 for one in many]
        whole = "".join(
            part + "<|image_pad|>" * count
            for part, count in zip(prompt.split("<|image_pad|>"), [*counts, 0], strict=True)
        )
        expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
        media = [prompts.form.process(one) for one in many]
        pairs = [
            (prompts.expansion(one.height, one.width, is_coarse=False), own)
            for one, own in zip(many, media, strict=True)
        ]
        ids = tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
        found, spans = put_in(ids, {prompts.place_id: pairs})
        assert found == list(expected)
        for span, (one,) in zip(spans, media, strict=True):
            assert span.digest == one.digest
            assert set(found[span.position : span.end]) == {prompts.place_id}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patch_size": 8}, "patch_size is 8, but vision_config.patch_size 4"),
        ({"merge_size": 4}, "merge_size is 4, but vision_config.spatial_merge_size 2"),
        ({"max_pixels": 10, "min_pixels": 20}, "min_pixels"),
        ({"max_pixels": 300}, "too near to min_pixels"),
        ({"do_resize": False}, "do_resize is False"),
        ({"frame_rate": 3}, "frame_rate is not known"),
        ({"size": {"longest_edge": 0}}, "longest_edge"),
    ],
)
def test_what_is_not_supported_is_named(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = write_processor(tmp_path, **changes)
    with pytest.raises(ModelError, match=reason):
        prompts_of(tmp_path, config)


def test_older_files_name_their_bounds_otherwise(tmp_path: Path) -> None:
    config = write_processor(tmp_path, size=None, min_pixels=256, max_pixels=3000)
    form = prompts_of(tmp_path, config).form
    assert isinstance(form, ScaledForm)
    assert (form.min_pixels, form.max_pixels) == (256, 3000)
