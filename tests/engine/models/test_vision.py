"""Image towers against transformers, their files, and what configurations say of them."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import InvalidRequest, ModelError
from weft.engine.model.interface import MediaEncoder
from weft.engine.model.loader import check_weights, load_model
from weft.engine.model.vision.tower import VisionTower
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_vision import make_vision

pytestmark = pytest.mark.usefixtures("single_thread")

KINDS = ("smolvlm", "idefics3")


def tower_of(model_dir: Path, dtype: str = "float32", **options: Any) -> VisionTower:
    tower = load_model(model_dir, dtype, images=True, **options).encoder
    assert isinstance(tower, VisionTower)
    return tower


def tiles(tower: VisionTower, count: int) -> torch.Tensor:
    size = tower.config.tile_size
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8)


@torch.no_grad()
def reference(model_dir: Path, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N, tokens, hidden]: what transformers makes of tiles."""
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=dtype)
    settings = json.loads((model_dir / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(settings[name]) for name in ("image_mean", "image_std"))
    numbers = (pixels * settings["rescale_factor"] - mean) / std
    found = model.model.get_image_features(numbers.permute(0, 3, 1, 2)[None]).pooler_output
    return torch.cat(list(found)).view(len(pixels), -1, found[0].shape[-1])


def rows_of(tower: MediaEncoder, pixels: torch.Tensor) -> torch.Tensor:
    """[N, tokens, hidden]."""
    return tower.encode(list(pixels)).unflatten(0, (len(pixels), -1))


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_transformers(kind: str, tmp_path: Path, seed: int) -> None:
    """Any sizes; also images with pixels at their ends that fill no patch."""
    patch, factor = random.choice((5, 8, 14)), random.choice((1, 2, 3))
    grid = factor * random.randint(1, 4)
    vision = {
        "patch_size": patch,
        "image_size": grid * patch + random.randrange(patch),
        "num_attention_heads": random.choice((1, 2, 3, 4)),
        "hidden_act": random.choice(("gelu_pytorch_tanh", "gelu")),
    }
    processor = {
        "image_mean": [random.uniform(0.3, 0.6) for _ in range(3)],
        "image_std": [random.uniform(0.2, 0.6) for _ in range(3)],
    }
    print(vision, processor)
    sizes: dict[str, Any] = {"vision": vision, "processor": processor, "scale_factor": factor}
    model_dir = make_vision(kind, tmp_path / "model", seed, **sizes)
    tower = tower_of(model_dir)
    pixels = tiles(tower, 5)
    wanted = reference(model_dir, pixels, torch.float32)
    assert wanted.shape[1] == tower.config.tokens_per_tile
    for count in range(1, 6):
        assert difference(rows_of(tower, pixels[:count]), wanted[:count]) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_tiles_change_no_bit(dtype: str, tmp_path: Path, seed: int) -> None:
    tower = tower_of(make_vision("smolvlm", tmp_path / "model", seed), dtype)
    pixels = tiles(tower, 4)
    together = rows_of(tower, pixels)
    for number in range(4):
        assert torch.equal(rows_of(tower, pixels[number : number + 1])[0], together[number])
    assert torch.equal(rows_of(tower, pixels.flip(0)).flip(0), together)


def test_bfloat16_is_as_near_as_that_of_transformers(tmp_path: Path, seed: int) -> None:
    model_dir = make_vision("smolvlm", tmp_path / "model", seed)
    tower = tower_of(model_dir, "bfloat16")
    pixels = tiles(tower, 3)
    exact = reference(model_dir, pixels, torch.float32)
    rounded = reference(model_dir, pixels, torch.bfloat16)
    found = rows_of(tower, pixels)
    assert found.dtype == torch.bfloat16
    error = (found - exact).square().mean().sqrt()
    assert error < 1.5 * (rounded - exact).square().mean().sqrt()


def test_rows_and_patches_of_a_shape(tmp_path: Path) -> None:
    tower = tower_of(make_vision("smolvlm", tmp_path / "model", 1))
    assert tower.rows_of([64, 64, 3]) == tower.config.tokens_per_tile == 16
    assert tower.cost_of([64, 64, 3]) == 64
    assert tower.max_shape(100) == (64, 64, 3)
    for shape in ([64, 56, 3], [64, 64], [64, 64, 4]):
        for call in (tower.rows_of, tower.cost_of):
            with pytest.raises(InvalidRequest, match=r"this model takes \[64, 64, 3\]"):
                call(shape)
    with pytest.raises(InvalidRequest, match="shape"):
        rows_of(tower, torch.zeros(1, 64, 56, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("fields", "name", "reason"),
    [
        ({"vision": {"hidden_size": 50, "num_attention_heads": 4}}, "num_attention_heads", "50"),
        ({"vision": {"num_channels": 4}}, "num_channels", "only 3"),
        ({"vision": {"hidden_act": "tanh"}}, "hidden_act", "'tanh' is not supported"),
        ({"vision": {"patch_size": 65}}, "patch_size", "more than an image's 64"),
        ({"vision": {"layer_norm_eps": 0}}, "layer_norm_eps", "greater than zero"),
        ({"scale_factor": 3}, "scale_factor", "3 does not divide a row of 8 patches"),
        ({"image_token_id": 517}, "image_token_id", "none of 517"),
        ({"text": {"use_resampler": True}}, "use_resampler", "pixel shuffle"),
        ({"processor": {"image_std": [0.5, 0]}}, "image_std", "expected 3 numbers"),
        ({"processor": {"image_std": [0.5, 0.5, 0]}}, "image_std", "expected 3 numbers"),
        ({"processor": {"max_image_size": {"longest_edge": 72}}}, "max_image_size", "72"),
    ],
)
def test_what_is_not_supported_is_named(
    fields: dict[str, Any], name: str, reason: str, tmp_path: Path
) -> None:
    make_vision("smolvlm", tmp_path, 1)
    sections = {"vision": "vision_config", "text": "text_config"}
    for key, value in fields.items():
        file = "preprocessor_config.json" if key == "processor" else "config.json"
        raw = json.loads((tmp_path / file).read_text())
        if key in sections:
            raw[sections[key]] |= value
        else:
            raw |= value if key == "processor" else {key: value}
        (tmp_path / file).write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=reason) as error:
        ModelConfig.load(tmp_path)
    assert error.value.param == name
    assert name in error.value.message


@pytest.mark.parametrize(
    ("vision", "factor", "tokens"),
    [
        (
            {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16},
            4,
            64,
        ),
        (
            {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "patch_size": 14},
            3,
            81,
        ),
        (
            {"hidden_size": 1152, "image_size": 364, "intermediate_size": 4304, "patch_size": 14},
            2,
            169,
        ),
    ],
)
def test_tokens_of_published_models(
    vision: dict[str, int], factor: int, tokens: int, tmp_path: Path
) -> None:
    """SmolVLM 256M and 2.2B, and Idefics3 8B."""
    raw = json.loads((make_vision("smolvlm", tmp_path, 1) / "config.json").read_text())
    config = ModelConfig.from_dict({**raw, "vision_config": vision, "scale_factor": factor})
    assert config.vision is not None
    assert config.vision.tokens_per_tile == tokens


def test_settings_of_pixels_inside_the_processors_file_count_first(tmp_path: Path) -> None:
    make_vision("idefics3", tmp_path, 1)
    usual = ModelConfig.load(tmp_path).vision
    file = tmp_path / "processor_config.json"
    raw = json.loads(file.read_text())
    file.write_text(
        json.dumps(raw | {"image_processor": {"image_mean": 0.25, "do_rescale": False}})
    )
    changed = ModelConfig.load(tmp_path).vision
    assert usual is not None
    assert changed is not None
    assert usual.pixels.mean == (0.5, 0.5, 0.5)
    assert (changed.pixels.mean, changed.pixels.scale) == ((0.25,) * 3, 1.0)
    assert changed.fingerprint() != usual.fingerprint()


def test_pages_of_text_are_shared_with_workers_without_a_tower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_vision("smolvlm", tmp_path, 1)
    with caplog.at_level(logging.INFO):
        seeing = load_model(tmp_path, "float32", images=True)
    assert not caplog.messages
    with caplog.at_level(logging.INFO):
        blind = load_model(tmp_path, "float32")
    assert "model.vision_model" in caplog.text
    assert "model.connector" in caplog.text
    assert blind.encoder is None
    assert seeing.encoder is not None
    assert blind.digest == seeing.digest
    assert blind.weight_format == seeing.weight_format
    assert len(seeing.encoder.digest) == 32
    assert seeing.encoder.digest != seeing.digest
    assert seeing.encoder.digest == tower_of(tmp_path).digest
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.4, 0.5, 0.5]}))
    other = load_model(tmp_path, "float32", images=True)
    assert other.digest == seeing.digest
    assert other.encoder is not None
    assert other.encoder.digest != seeing.encoder.digest


def test_a_tower_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with pytest.raises(ModelError, match="images are not supported for LlamaForCausalLM"):
        load_model(tmp_path, images=True)


def test_older_names_and_tensors_that_do_not_fit(tmp_path: Path) -> None:
    make_vision("smolvlm", tmp_path, 1)
    tower = tower_of(tmp_path)
    pixels = tiles(tower, 2)
    wanted, file = rows_of(tower, pixels), tmp_path / "model.safetensors"
    tensors = load_file(file)
    older = {
        name.removeprefix("model.")
        if name.startswith(("model.vision", "model.conn"))
        else name: one
        for name, one in tensors.items()
    }
    save_file(older, file)
    assert torch.equal(rows_of(tower_of(tmp_path), pixels), wanted)
    check_weights(tmp_path)
    for change, reason in (
        ({"vision_model.odd.weight": torch.zeros(3)}, r"does not use: vision_model\.odd\.weight"),
        ({"vision_model.post_layernorm.bias": None}, r"lacks tensors: \S*post_layernorm\.bias"),
        ({"connector.modality_projection.proj.weight": torch.zeros(3, 192)}, r"asks for \(72, 192"),
    ):
        changed = {**older, **change}
        save_file({name: one for name, one in changed.items() if one is not None}, file)
        with pytest.raises(ModelError, match=reason):
            tower_of(tmp_path)
        with pytest.raises(ModelError, match=reason):
            check_weights(tmp_path)
        load_model(tmp_path)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_format_made_at_load_is_not_the_towers(quantization: str, tmp_path: Path) -> None:
    make_vision("smolvlm", tmp_path, 1, text={"hidden_size": 128, "intermediate_size": 128})
    tower = tower_of(tmp_path)
    pixels = tiles(tower, 2)
    loaded = load_model(tmp_path, "float32", images=True, quantization=quantization)
    assert loaded.weight_format == quantization
    assert loaded.encoder is not None
    assert torch.equal(rows_of(loaded.encoder, pixels), rows_of(tower, pixels))


def test_a_quantised_file_may_have_products_of_the_tower_too(tmp_path: Path) -> None:
    """Here those whose names end as those of the language model do."""
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    source = make_vision("smolvlm", tmp_path / "source", 1, text=sizes)
    model_dir, floats = fp8_copy(source, tmp_path / "fp8", "channel")
    tower, usual = tower_of(model_dir), tower_of(floats)
    pixels = tiles(tower, 2)
    assert difference(rows_of(tower, pixels), rows_of(usual, pixels)) < 1e-5


def test_made_up_weights_have_a_tower_too(tmp_path: Path) -> None:
    make_vision("smolvlm", tmp_path, 1)
    tower = tower_of(tmp_path, dummy=True)
    assert rows_of(tower, tiles(tower, 2)).shape == (2, 16, 72)
