"""Image towers on a GPU, against transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from weft.engine.model.loader import load_model
from weft.engine.model.vision.tower import VisionTower
from weft.testing.models.tiny_vision import make_vision

pytestmark = pytest.mark.needs("cuda")

HEADS = {64: 3, 72: 2, 80: 4}
"""Heads by their sizes; those of SigLIP's towers are 64 and 72."""


def make_tower(path: Path, dim: int, dtype: str, *, is_fixed: bool = False) -> VisionTower:
    heads = HEADS[dim]
    vision = {
        "hidden_size": heads * dim,
        "num_attention_heads": heads,
        "intermediate_size": 4 * heads * dim,
        "patch_size": random.choice((14, 16)),
    }
    vision["image_size"] = 12 * vision["patch_size"] + random.randrange(14)
    print(vision)
    if not path.exists():
        text = {"hidden_size": 256}
        make_vision("smolvlm", path, random.randrange(10**6), vision=vision, text=text)
    tower = load_model(path, dtype, "cuda", images=True, is_fixed=is_fixed).encoder
    assert isinstance(tower, VisionTower)
    return tower


def tiles(tower: VisionTower, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, *tower.max_shape(0)), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dim", HEADS)
@torch.inference_mode()
def test_rows_are_those_of_transformers(dim: int, tmp_path: Path) -> None:
    exact = make_tower(tmp_path / "model", dim, "float32")
    rounded = make_tower(tmp_path / "model", dim, "bfloat16")
    pixels = tiles(exact, 5)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    numbers = (pixels.cpu() / 255 - 0.5) / 0.5
    wanted = torch.cat(
        list(model.model.get_image_features(numbers.permute(0, 3, 1, 2)[None]).pooler_output)
    )
    size = wanted.square().mean().sqrt()
    for count in range(1, 6):
        own = wanted[: count * exact.config.tokens_per_tile]
        for tower, bound in ((exact, 1e-4), (rounded, 3e-2)):
            found = tower.encode(list(pixels[:count])).float().cpu()
            assert found.shape == own.shape
            assert (found - own).square().mean().sqrt() < bound * size


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@torch.inference_mode()
def test_deterministic_rows_do_not_depend_on_other_tiles(dtype: str, tmp_path: Path) -> None:
    tower = make_tower(tmp_path / "model", 64, dtype, is_fixed=True)
    pixels = tiles(tower, 5)
    together = tower.encode(list(pixels)).unflatten(0, (5, -1))
    for number in range(5):
        assert torch.equal(tower.encode([pixels[number]]), together[number])


@torch.inference_mode()
def test_encoding_can_be_captured(tmp_path: Path) -> None:
    """Nothing in it waits for the device or copies from the host."""
    tower = make_tower(tmp_path / "model", 64, "bfloat16")
    pixels = tiles(tower, 2)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tower.encode(list(pixels))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        rows = tower.encode(list(pixels))
    pixels.copy_(tiles(tower, 2))
    graph.replay()
    assert torch.equal(rows, tower.encode(list(pixels)))
