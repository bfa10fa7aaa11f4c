"""Pictures and prompts of Gemma 3's form are those of transformers' processor."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from weft.gateway.media.forms import FORMS, FixedForm
from weft.gateway.media.prompts import put_in
from weft.gateway.request import ChatPrompt, MediaFile
from weft.gateway.text.model_card import load_model_card
from weft.gateway.text.prepare import _render, _tokenize_chat
from weft.testing.models.tiny_images import random_image
from weft.testing.models.tiny_tokenizers import write_model_dir

BEGIN, ROW, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
TEMPLATE = (
    "<start_of_turn>user\n{% for part in messages[0]['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end_of_turn>"
)


def newline_bpe() -> Tokenizer:
    """Has tokens for several newlines together, as Gemma's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["\n\n", "\n\n\n", "\n\n\n\n", "user\n\n\n"] * 3, trainer)
    tokens = (BEGIN, ROW, END, "<start_of_turn>", "<end_of_turn>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in tokens])
    return tokenizer


def write(folder: Path, **given: Any) -> Path:
    tokenizer = newline_bpe()
    write_model_dir(folder, tokenizer, 4096)
    file = folder / "config.json"
    ids = {
        "boi_token_index": tokenizer.token_to_id(BEGIN),
        "eoi_token_index": tokenizer.token_to_id(END),
        "image_token_index": tokenizer.token_to_id(ROW),
    }
    sizes = {"mm_tokens_per_image": 9, "vision_config": {"image_size": 84, "patch_size": 7}}
    file.write_text(json.dumps(json.loads(file.read_text()) | ids | sizes))
    processor = {
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": 9,
        "pan_and_scan_max_num_crops": None,
        "processor_class": "Gemma3Processor",
        "resample": 2,
        "size": {"height": 84, "width": 84},
    } | given
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    whole = {"image_seq_length": 9, "processor_class": "Gemma3Processor"}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def test_pictures_are_those_of_transformers() -> None:
    draw = random.Random()
    tokens = {"image_token": BEGIN, "row_token": ROW, "end_token": END}
    for number in range(12):
        height, width = (draw.choice((32, 84, 100)) for _ in range(2))
        resample = draw.choice((2, 3))
        sizes = {"height": height, "width": width, "num_tokens": 4, "resample": resample}
        form = FixedForm(**tokens, **sizes)
        oracle = Gemma3ImageProcessorPil(size={"height": height, "width": width}, resample=resample)
        image = random_image(number, draw.randint(1, 300), draw.randint(1, 300))
        wanted = oracle(image, do_rescale=False, do_normalize=False, return_tensors="np")
        (medium,) = FORMS[form.name](**json.loads(json.dumps(form.options()))).process(image)
        found = np.frombuffer(medium.data, np.uint8).reshape(medium.shape)
        np.testing.assert_array_equal(found, np.moveaxis(wanted["pixel_values"][0], 0, -1))


@pytest.mark.parametrize(
    "parts",
    [
        ["image", "What is this?"],
        ["\n", "image", "\n\n", "image", "image"],
        [f"{BEGIN} and {ROW}", "image", END],
    ],
)
def test_tokens_are_those_of_transformers(parts: list[str], tmp_path: Path) -> None:
    """The texts around an image are tokenised with what is next to them."""
    card = load_model_card(write(tmp_path))
    assert card.images is not None
    contents = [
        {"type": "image"} if part == "image" else {"type": "text", "text": part} for part in parts
    ]
    images = [random_image(n, 30 + n, 40) for n in range(parts.count("image"))]
    files = (MediaFile(source="x", where="", kind="", type_param=""),) * len(images)
    prompt = ChatPrompt(messages=({"role": "user", "content": contents},), files=files)
    ids = list(_tokenize_chat(card, prompt, _render(card, prompt)).ids)
    expansions = [
        (
            card.images.expansion(one.height, one.width, is_coarse=False),
            card.images.form.process(one),
        )
        for one in images
    ]
    found, spans = put_in(ids, {card.images.place_id: expansions})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        extra_special_tokens={"boi_token": BEGIN, "image_token": ROW, "eoi_token": END},
    )
    oracle = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 84, "width": 84}), tokenizer, image_seq_length=9
    )
    if any(BEGIN in part for part in parts):
        # What a user spells is text, which transformers takes for images.
        row = card.images.row_id
        assert sum(span.length for span in spans) == found.count(row) == 9
        assert card.tokenizer.decode(found, skip_special_tokens=True).startswith(f"user\n{BEGIN} a")
        return
    text = "".join(BEGIN if part == "image" else part for part in parts)
    text = f"<start_of_turn>user\n{text}<end_of_turn>"
    assert found == list(oracle(images=[images], text=[text])["input_ids"][0])
    covered = [at for span in spans for at in range(span.position, span.end)]
    assert covered == [at for at, id_ in enumerate(found) if id_ == card.images.row_id]


def test_a_size_alone_says_how_many_tokens(tmp_path: Path) -> None:
    card = load_model_card(write(tmp_path))
    assert card.images is not None
    counts = {
        len(card.images.expansion(height, width, is_coarse=coarse).ids)
        for height, width, coarse in ((1, 1, False), (500, 20, True), (84, 84, False))
    }
    assert counts == {card.images.most_tokens} == {11}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"size": {"height": 84, "width": 70}}, "encoder of 84"),
        ({"size": {"shortest_edge": 84}}, "height and width"),
        ({"do_pad": True, "do_center_crop": True}, "do_center_crop is not known"),
    ],
)
def test_what_is_not_served_is_named(fields: dict[str, Any], problem: str, tmp_path: Path) -> None:
    card = load_model_card(write(tmp_path, **fields))
    assert card.images is None
    assert problem in card.images_problem


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"mm_tokens_per_image": 16}, "16 rows"),
        ({"boi_token_index": 90_000}, "boi_token_index is 90000, which is no token"),
    ],
)
def test_a_model_of_other_rows_or_tokens_is_refused(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    card = load_model_card(tmp_path)
    assert card.images is None
    assert problem in card.images_problem
