"""Llama 4's form: canvases, sizes and texts are those of transformers' functions. Its image
processor needs torchvision, so the functions are taken out of its file, and pixels are Pillow's.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import random
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers.models.llama4.processing_llama4 import Llama4Processor
from weft.gateway.media.forms import FORMS, CanvasForm
from weft.gateway.text.model_card import load_model_card
from weft.testing.models.tiny_images import random_image
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir

PATCH = "<|patch|>"
TOKENS = (
    *("<|image|>", PATCH, "<|image_start|>", "<|image_end|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)


@pytest.fixture(scope="module")
def oracle() -> Any:
    """Functions of transformers' image processor."""
    spec = importlib.util.find_spec("transformers.models.llama4")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "image_processing_llama4.py"
    tree = ast.parse(file.read_text())
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    found: dict[str, Any] = {
        "math": math,
        "torch": torch,
        "defaultdict": defaultdict,
        "lru_cache": lru_cache,
        "SizeDict": object,
    }
    module = ast.Module(body=list(functions), type_ignores=[])
    exec(compile(module, str(file), "exec"), found)
    return SimpleNamespace(**found)


def form_of(edge: int, most: int, *, fills: bool) -> CanvasForm:
    options = {"edge": edge, "tile_tokens": 4, "max_tiles": most, "fills": fills, "resample": 2}
    form = FORMS["canvas"](**json.loads(json.dumps(options)))
    assert isinstance(form, CanvasForm)
    return form


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize(("edge", "most"), [(48, 16), (32, 5), (40, 1)])
def test_canvases_and_texts_are_those_of_transformers(
    edge: int, most: int, fills: bool, oracle: Any
) -> None:
    form = form_of(edge, most, fills=fills)
    side = SimpleNamespace(height=edge, width=edge)
    canvases = torch.tensor(oracle.find_supported_resolutions.__wrapped__(most, side))
    sizes = [(random.randint(1, 300), random.randint(1, 300)) for _ in range(10)]
    for height, width in [(1, 1), (1, 400), (300, 3), (edge, edge), (2 * edge, edge), *sizes]:
        target = oracle.get_best_fit((height, width), canvases, resize_to_max_canvas=fills)
        into = tuple(target.tolist())
        if not fills:
            pairs = zip((height, width), into, strict=True)
            into = tuple(min(max(own, edge), most_of) for own, most_of in pairs)
        new_height, new_width = oracle.get_max_res_without_distortion((height, width), into)
        image = random_image(height * width, width, height)
        tiles = [
            np.frombuffer(one.data, np.uint8).reshape(one.shape) for one in form.process(image)
        ]
        rows, columns = (length // edge for length in target.tolist())
        canvas = np.zeros((rows * edge, columns * edge, 3), np.uint8)
        new_height, new_width = max(new_height, 1), max(new_width, 1)
        canvas[:new_height, :new_width] = np.asarray(image.resize((new_width, new_height), 2))
        cut = canvas.reshape(rows, edge, columns, edge, 3).swapaxes(1, 2)
        wanted = list(cut.reshape(-1, edge, edge, 3))
        if len(wanted) > 1:
            wanted.append(np.asarray(image.resize((edge, edge), 2)))
        np.testing.assert_array_equal(np.stack(tiles), np.stack(wanted))
        plan = form.plan(height, width)
        assert plan.lengths == (4,) * len(tiles)
        text = Llama4Processor._prompt_split_image(None, (rows, columns), 4)
        assert plan.text.replace(PATCH, 4 * PATCH) == text
        assert len(plan.lengths) <= len(form.largest.lengths)
    assert len(form.process(random_image(1, 300, 40), is_coarse=True)) == 1


def folder_with(path: Path, image_size: int = 56, **settings: Any) -> Path:
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in TOKENS])
    write_model_dir(path, tokenizer, 4096)
    file = path / "config.json"
    vision = {"image_size": image_size, "patch_size": 14}
    more = {"image_token_index": tokenizer.token_to_id(PATCH), "vision_config": vision}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    processor = {
        "image_processor_type": "Llama4ImageProcessorFast",
        "processor_class": "Llama4Processor",
        "size": {"height": 56, "width": 56},
        "max_patches": 4,
        "resize_to_max_canvas": False,
        "resample": 2,
        **settings,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def test_files_that_transformers_writes_are_read(tmp_path: Path) -> None:
    card = load_model_card(folder_with(tmp_path))
    assert card.images is not None, card.images_problem
    expansion = card.images.expansion(100, 150)
    assert expansion.ids.count(card.images.row_id) == 4 * 5
    assert card.images.most_tokens == len(card.images.expansion(112, 112).ids)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"image_size": 70}, "tiles of 56 pixels for an encoder of 70"),
        ({"size": {"height": 56, "width": 70}}, "tiles are squares"),
        ({"max_patches": 65}, "at most 64"),
        ({"do_pan": True}, "do_pan is not known"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    card = load_model_card(folder_with(tmp_path, **fields))
    assert card.images is None
    assert problem in card.images_problem
