"""Tiles and tokens of images are those of transformers' processors."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string
from weft.contract.errors import ModelError
from weft.contract.spans import media_digest
from weft.gateway.media.forms import TiledForm
from weft.gateway.media.load import ImagePrompts, load_image_prompts
from weft.gateway.media.prompts import put_in
from weft.gateway.text.model_card import load_model_card
from weft.testing.models.tiny_images import image_tokenizer, random_image, write_image_model
from weft.testing.models.tiny_tokenizers import write_model_dir

SIZES = [(1, 1), (1, 500), (2000, 3), (64, 64), (65, 64), (256, 256), (257, 255), (500, 20)]


def sizes(seed: int, count: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(1, 700), draw.randint(1, 700)) for _ in range(count)]


def tiles_of(processor: Any, image: Any) -> tuple[np.ndarray, int, int]:
    """Tiles [n, height, width, 3] of transformers, and their rows and columns."""
    found = processor(
        image, do_rescale=False, do_normalize=False, return_row_col_info=True, return_tensors="np"
    )
    tiles = np.moveaxis(found["pixel_values"][0], 1, -1)
    return tiles.astype(np.uint8), found["rows"][0][0], found["cols"][0][0]


@pytest.mark.parametrize("oracle", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize(("edge", "longest"), [(64, 256), (48, 200), (32, 32), (100, 64)])
def test_tiles_are_those_of_transformers(oracle: Any, edge: int, longest: int) -> None:
    form = TiledForm(longest_edge=longest, tile_edge=edge, tile_tokens=4, resample=1)
    processor = oracle(size={"longest_edge": longest}, max_image_size={"longest_edge": edge})
    for number, (width, height) in enumerate([*SIZES, *sizes(edge, 12)]):
        image = random_image(number, width, height)
        expected, rows, columns = tiles_of(processor, image)
        media = form.process(image)
        found = [np.frombuffer(one.data, np.uint8).reshape(one.shape) for one in media]
        np.testing.assert_array_equal(np.stack(found), expected)
        plan = form.plan(height, width)
        assert len(plan.lengths) == len(media) == rows * columns + 1
        for one in media:
            assert one.digest == media_digest("image", "tiled", one.shape, one.data)


def test_coarse_images_are_one_tile_of_transformers() -> None:
    form = TiledForm(longest_edge=256, tile_edge=64, tile_tokens=4, resample=1)
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 256}, max_image_size={"longest_edge": 64}, do_image_splitting=False
    )
    for number, (width, height) in enumerate([*SIZES, *sizes(3, 6)]):
        image = random_image(number, width, height)
        expected, rows, _ = tiles_of(processor, image)
        (one,) = form.process(image, is_coarse=True)
        np.testing.assert_array_equal(
            np.frombuffer(one.data, np.uint8).reshape(one.shape), expected[0]
        )
        assert rows == 0
        assert len(form.plan(height, width, is_coarse=True).lengths) == 1


def test_smolvlms_own_sizes() -> None:
    form = TiledForm(longest_edge=2048, tile_edge=512, tile_tokens=64, resample=1)
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}
    )
    image = random_image(0, 1080, 720)
    expected, rows, columns = tiles_of(processor, image)
    media = form.process(image)
    assert (rows, columns) == (3, 4)
    for one, tile in zip(media, expected, strict=True):
        assert one.shape == (512, 512, 3)
        assert one.data == tile.tobytes()


@pytest.mark.parametrize("filter_", [0, 2, 3])
def test_other_filters_are_those_of_the_folder(filter_: int) -> None:
    form = TiledForm(longest_edge=128, tile_edge=64, tile_tokens=4, resample=filter_)
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 64}, resample=filter_
    )
    image = random_image(filter_, 300, 170)
    expected, _, _ = tiles_of(processor, image)
    assert [one.data for one in form.process(image)] == [tile.tobytes() for tile in expected]


def prompts_of(folder: Path) -> ImagePrompts:
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = load_image_prompts(folder, config, tokenizer)
    assert found is not None
    return found


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path, tile_edge=64, tile_tokens=5)
    prompts = prompts_of(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    oracle = Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 256}, max_image_size={"longest_edge": 64}),
        tokenizer,
        image_seq_len=5,
    )
    draw = random.Random(1)
    for number in range(12):
        many = [random_image(number + n, *size) for n, size in enumerate(sizes(number, 3))]
        texts = [draw.choice(["What is this? ", "\n", "", "a\n\nb"]) for _ in range(4)]
        text = texts[0] + "".join(f"<image>{one}" for one in texts[1:])
        expected = list(oracle(images=[many], text=[text])["input_ids"][0])
        ids = tokenizer(text)["input_ids"]
        expanded = [
            (
                prompts.expansion(one.height, one.width, is_coarse=False),
                prompts.form.process(one),
            )
            for one in many
        ]
        found, spans = put_in(ids, {prompts.place_id: expanded})
        assert found == expected
        digests = [medium.digest for _, media in expanded for medium in media]
        assert [span.digest for span in spans] == digests
        covered = [at for span in spans for at in range(span.position, span.end)]
        assert covered == [at for at, id_ in enumerate(expected) if id_ == prompts.place_id]
        assert {span.length for span in spans} == {5}


def test_texts_of_images_are_smolvlms() -> None:
    form = TiledForm(longest_edge=256, tile_edge=64, tile_tokens=3, resample=1)
    for width, height in [*SIZES, *sizes(5, 30)]:
        plan = form.plan(height, width)
        _, rows, columns = tiles_of(
            SmolVLMImageProcessorPil(
                size={"longest_edge": 256}, max_image_size={"longest_edge": 64}
            ),
            random_image(0, width, height),
        )
        names = ("<fake_token_around_image>", "<image>", "<global-img>")
        assert plan.text.replace("<image>", "<image>" * 3) == get_image_prompt_string(
            rows, columns, 3, *names
        )


def test_no_image_has_more_tokens_than_the_largest(tmp_path: Path) -> None:
    prompts = prompts_of(write_image_model(tmp_path))
    counts = [
        len(prompts.expansion(height, width, is_coarse=False).ids)
        for width, height in [*SIZES, *sizes(6, 300)]
    ]
    assert max(counts) == prompts.most_tokens


@pytest.mark.parametrize("cls", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
def test_files_that_transformers_writes_are_read(tmp_path: Path, cls: Any) -> None:
    folder = write_image_model(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    processor = cls(
        size={"longest_edge": 96},
        max_image_size={"longest_edge": 32},
        resample=3,
        do_image_splitting=False,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    Idefics3Processor(processor, tokenizer, image_seq_len=7).save_pretrained(tmp_path / "saved")
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (tmp_path / "saved" / name).is_file():
            (folder / name).write_text((tmp_path / "saved" / name).read_text())
    form = prompts_of(folder).form
    assert form == TiledForm(
        longest_edge=96, tile_edge=32, tile_tokens=7, resample=3, is_split=False
    )


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"image_processor_type": "FancyImageProcessor"}, "FancyImageProcessor"),
    ({"do_center_crop": True}, "do_center_crop is not known"),
    ({"do_resize": False}, "do_resize is False"),
    ({"resample": "lanczos"}, "resample"),
    ({"size": {"shortest_edge": 20}}, "size"),
    ({"size": {"longest_edge": 8000}}, "size"),
    ({"max_image_size": {"longest_edge": 1}}, "more than 16 tiles"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    folder = write_image_model(tmp_path, **fields)
    card = load_model_card(folder)
    assert card.images is None
    assert problem in card.images_problem


def test_fields_without_effect_are_taken(tmp_path: Path) -> None:
    card = load_model_card(
        write_image_model(tmp_path, do_center_crop=None, crop_size=None, auto_map={"a": "b"})
    )
    assert card.images is not None


def test_models_for_text_take_no_images_and_say_nothing(tmp_path: Path) -> None:
    card = load_model_card(write_model_dir(tmp_path))
    assert (card.images, card.images_problem) == (None, "")


def test_a_model_that_makes_other_rows_is_refused(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path, tile_edge=64, tile_tokens=4)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = image_tokenizer()
    vision = {"image_size": 64, "patch_size": 8}
    good = {**config, "vision_config": vision, "scale_factor": 4}
    assert load_image_prompts(folder, good, tokenizer) is not None
    with pytest.raises(ModelError, match="16 rows"):
        load_image_prompts(folder, {**good, "scale_factor": 2}, tokenizer)
    with pytest.raises(ModelError, match="encoder of 32"):
        load_image_prompts(
            folder, {**good, "vision_config": {**vision, "image_size": 32}}, tokenizer
        )
    with pytest.raises(ModelError, match="image_token_id"):
        load_image_prompts(folder, {**good, "image_token_id": 7}, tokenizer)
