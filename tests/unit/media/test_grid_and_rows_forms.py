"""Pictures and tokens of InternVL's and Pixtral's forms are those of transformers' processors."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from weft.contract.spans import Media
from weft.gateway.media.forms import COARSE_EDGE, FORMS, GridForm, ImageForm, RowsForm
from weft.gateway.media.load import ImagePrompts
from weft.gateway.media.prompts import put_in
from weft.gateway.text.model_card import ModelCard, load_model_card
from weft.testing.models.tiny_images import random_image
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir

IMAGE, BEGIN, END = "<IMG_CONTEXT>", "<img>", "</img>"
ROW, BREAK, LAST = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
SIZES = [(1, 1), (1, 500), (700, 3), (64, 64), (65, 64), (256, 256), (257, 255), (400, 20)]


def sizes(count: int) -> list[tuple[int, int]]:
    return [(random.randint(1, 500), random.randint(1, 500)) for _ in range(count)]


def arrays_of(media: list[Media]) -> list[np.ndarray]:
    return [np.frombuffer(one.data, np.uint8).reshape(one.shape) for one in media]


@pytest.fixture
def pixtral_processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Transformers' class, whose module asks for torchvision's form of the image processor."""
    name = "transformers.models.pixtral"
    monkeypatch.setitem(
        sys.modules,
        f"{name}.image_processing_pixtral",
        sys.modules[PixtralImageProcessorPil.__module__],
    )
    return importlib.import_module(f"{name}.processing_pixtral").PixtralProcessor


def in_another_process(form: ImageForm) -> ImageForm:
    return FORMS[form.name](**json.loads(json.dumps(form.options())))


def tokenizer_with(*tokens: str) -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in tokens])
    return tokenizer


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 1), (3, 7)])
def test_tiles_are_those_of_transformers(least: int, most: int) -> None:
    resample, edge = random.choice((2, 3)), random.choice((32, 48))
    tiles = {"min_tiles": least, "max_tiles": most, "edge": edge, "tile_tokens": 4}
    form = in_another_process(GridForm(image_token=IMAGE, resample=resample, **tiles))
    oracle = GotOcr2ImageProcessorPil(
        size={"height": edge, "width": edge},
        resample=resample,
        crop_to_patches=True,
        min_patches=least,
        max_patches=most,
    )
    for number, (width, height) in enumerate([*SIZES, *sizes(12)]):
        image = random_image(number, width, height)
        wanted = oracle(image, do_rescale=False, do_normalize=False, return_tensors="np")
        media = form.process(image)
        expected = np.moveaxis(wanted["pixel_values"], 1, -1)
        np.testing.assert_array_equal(np.stack(arrays_of(media)), expected)
        plan = form.plan(height, width)
        assert plan.lengths == (4,) * len(media)
        assert oracle.get_number_of_image_patches(height, width) == len(media)
        assert len(plan.lengths) <= len(form.largest.lengths)
    (one,) = form.process(random_image(1, 300, 40), is_coarse=True)
    assert one.shape == (edge, edge, 3)
    assert form.plan(40, 300, is_coarse=True).lengths == (4,)


@pytest.mark.parametrize(("square", "longest"), [(28, 140), (16, 100), (12, 500)])
def test_pictures_are_those_of_transformers(
    square: int, longest: int, pixtral_processor: Any
) -> None:
    resample = random.choice((2, 3))
    form = in_another_process(RowsForm(longest_edge=longest, square=square, resample=resample))
    oracle = PixtralImageProcessorPil(
        size={"longest_edge": longest},
        patch_size={"height": square, "width": square},
        resample=resample,
    )
    processor = SimpleNamespace(
        patch_size=square,
        spatial_merge_size=1,
        image_token=ROW,
        image_break_token=BREAK,
        image_end_token=LAST,
    )
    # Transformers fails where a side becomes 0.
    many = [size for size in [*SIZES, *sizes(12)] if max(size) <= longest * min(size)]
    for number, (width, height) in enumerate(many):
        image = random_image(number, width, height)
        wanted = oracle(image, do_rescale=False, do_normalize=False, return_tensors="np")
        (found,) = arrays_of(form.process(image))
        np.testing.assert_array_equal(found, np.moveaxis(wanted["pixel_values"][0], 0, -1))
        text = pixtral_processor.replace_image_token(processor, wanted, 0)
        plan = form.plan(height, width)
        (columns,) = set(plan.lengths)
        assert plan.text.replace(ROW, ROW * columns) == text
        assert len(plan.text) <= len(form.largest.text)
    assert form.plan(1, 10_000).lengths == (-(-longest // square),)
    coarse = form.plan(4000, 4000, is_coarse=True)
    assert len(coarse.lengths) == -(-min(longest, COARSE_EDGE) // square)


def test_a_picture_of_several_runs_has_a_span_for_each() -> None:
    form = RowsForm(longest_edge=60, square=12, resample=3)
    prompts = ImagePrompts(form, tokenizer_with(ROW, BREAK, LAST))
    images = [random_image(n, *size) for n, size in enumerate([(60, 30), (20, 60)])]
    expanded = [
        (prompts.expansion(one.height, one.width, is_coarse=False), form.process(one))
        for one in images
    ]
    ids, spans = put_in([5, prompts.place_id, prompts.place_id, 6], {prompts.place_id: expanded})
    assert [(span.length, span.offset) for span in spans] == [
        *((5, 5 * row) for row in range(3)),
        *((2, 2 * row) for row in range(5)),
    ]
    assert [span.digest for span in spans] == [expanded[0][1][0].digest] * 3 + [
        expanded[1][1][0].digest
    ] * 5
    covered = [at for span in spans for at in range(span.position, span.end)]
    assert covered == [at for at, id_ in enumerate(ids) if id_ == prompts.row_id]
    assert prompts.most_tokens == 5 * 6


def write(folder: Path, kind: str, config: dict[str, Any], **files: Any) -> ModelCard:
    tokenizer = tokenizer_with(IMAGE, BEGIN, END, ROW, BREAK, LAST)
    write_model_dir(folder, tokenizer, 4096)
    file = folder / "config.json"
    token = IMAGE if kind == "internvl" else ROW
    ids = {"image_token_id": tokenizer.token_to_id(token)}
    file.write_text(json.dumps(json.loads(file.read_text()) | ids | config))
    for name in ("preprocessor_config", "processor_config"):
        (folder / f"{name}.json").write_text(json.dumps(files.get(name, {})))
    return load_model_card(folder)


INTERNVL = {
    "preprocessor_config": {
        "crop_size": None,
        "crop_to_patches": False,
        "default_to_square": True,
        "do_convert_rgb": True,
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "max_patches": 6,
        "min_patches": 1,
        "processor_class": "InternVLProcessor",
        "resample": 3,
        "size": {"height": 56, "width": 56},
    },
    "processor_config": {"image_seq_length": 4, "processor_class": "InternVLProcessor"},
}
VISION = {"image_size": [56, 56], "patch_size": [14, 14]}
PIXTRAL = {
    "preprocessor_config": {
        "default_to_square": True,
        "do_center_crop": None,
        "image_processor_type": "PixtralImageProcessorFast",
        "patch_size": {"height": 14, "width": 14},
        "processor_class": "PixtralProcessor",
        "size": {"longest_edge": 140},
    },
    "processor_config": {"patch_size": 14, "spatial_merge_size": 2},
}
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "spatial_merge_size": 2,
    "vision_config": {"patch_size": 14, "image_size": 140},
}


def test_tokens_of_internvl_are_those_of_transformers(tmp_path: Path) -> None:
    """Its processor cuts images, whatever the settings of its image processor say."""
    card = write(tmp_path, "internvl", {"vision_config": VISION}, **INTERNVL)
    assert card.images is not None, card.images_problem
    assert InternVLProcessor.images_kwargs["crop_to_patches"]
    processor = SimpleNamespace(
        start_image_token=BEGIN, image_token=IMAGE, end_image_token=END, image_seq_length=4
    )
    oracle = GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, max_patches=6, crop_to_patches=True
    )
    for _ in range(6):
        images = [random_image(n, *size) for n, size in enumerate(sizes(2))]
        wanted = oracle(images)
        texts = [InternVLProcessor.replace_image_token(processor, wanted, n) for n in range(2)]
        found, _ = put_in(
            card.tokenizer.encode(f"a {IMAGE}\nb\n\n{IMAGE} c").ids,
            {
                card.images.place_id: [
                    (card.images.expansion(one.height, one.width), ()) for one in images
                ]
            },
        )
        assert found == card.tokenizer.encode(f"a {texts[0]}\nb\n\n{texts[1]} c").ids


def test_files_of_mistral3_are_read(tmp_path: Path) -> None:
    card = write(tmp_path, "pixtral", MISTRAL3, **PIXTRAL)
    assert card.images is not None, card.images_problem
    assert card.images.form == RowsForm(longest_edge=140, square=28, resample=3)


@pytest.mark.parametrize(
    ("kind", "files", "config", "problem"),
    [
        ("internvl", {"processor_class": "GotOcr2Processor"}, {}, "GotOcr2Processor"),
        ("internvl", {"min_patches": 7}, {}, "min_patches is 7"),
        ("internvl", {"do_center_crop": True}, {}, "do_center_crop is not known"),
        ("internvl", {}, {"downsample_ratio": 0.25}, "56 pixels with 4 tokens"),
        ("pixtral", {"size": {"height": 140, "width": 140}}, {}, "longest_edge"),
        ("pixtral", {}, {"spatial_merge_size": 1}, "28 pixels, but the encoder's are 14 times 1"),
    ],
)
def test_what_is_not_served_is_named(
    kind: str, files: dict[str, Any], config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    usual = INTERNVL if kind == "internvl" else PIXTRAL
    given = {**usual, "preprocessor_config": usual["preprocessor_config"] | files}
    if "processor_class" in files:
        given["processor_config"] = files
    of_model = {"vision_config": VISION} if kind == "internvl" else MISTRAL3
    card = write(tmp_path, kind, of_model | config, **given)
    assert card.images is None
    assert problem in card.images_problem
