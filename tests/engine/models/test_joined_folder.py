"""Models made of the demo model and an image tower."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from weft.checkpoint import joined_folder
from weft.checkpoint.resolve import default_name, resolve_model
from weft.contract.errors import ModelError
from weft.engine.model.loader import check_weights, load_model
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_vision import make_vision

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture
def language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the demo model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_tiny("llama", tmp_path / "language", random.randrange(10**6), tokenizer=True)
    monkeypatch.setattr(joined_folder, "convert_demo", lambda _: path)
    return path


@pytest.fixture
def tower(tmp_path: Path, language: Path) -> Path:
    """A folder with an image tower; also floats.safetensors, outside of it."""
    seeing = make_vision("smolvlm", tmp_path / "seeing", 1)
    floats, written = {}, {}
    for name, value in load_file(seeing / "model.safetensors").items():
        if not name.startswith(("model.vision_model", "model.connector")):
            continue
        floats[name] = written[name] = value
        if value.ndim > 1:
            scales = value.flatten(1).abs().amax(1) / 127
            shape = (-1, *[1] * (value.ndim - 1))
            written[name] = (value / scales.view(shape)).round().to(torch.int8)
            written[f"{name}_scale"] = scales
            floats[name] = written[name].float() * scales.view(shape)
    path = tmp_path / "tower"
    path.mkdir()
    save_file(written, path / "tower.safetensors")
    save_file(floats, tmp_path / "floats.safetensors")
    config = json.loads((seeing / "config.json").read_text())
    kept = ("architectures", "model_type", "vision_config", "scale_factor")
    settings = {name: config[name] for name in kept} | {"image_token_id": 0}
    described = {"language_model": "demo", "tokens": {"<|endoftext|>": "<image>"}}
    (path / "tower.json").write_text(json.dumps({**described, "config": settings}))
    (path / "chat_template.jinja").write_text("a template")
    return path


def change(path: Path, **fields: Any) -> None:
    file = path / "tower.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_both_parts_are_as_they_are_alone(tmp_path: Path, language: Path, tower: Path) -> None:
    folder = resolve_model(str(tower))
    assert default_name(str(tower), folder) == "tower"
    check_weights(folder)
    joined, alone = load_model(folder, "float32", images=True), load_model(language, "float32")
    tokens = [random.randrange(3, 500) for _ in range(20)]
    logits = [PagedDriver(one.model, 8).step([(PagedRequest(), tokens)]) for one in (joined, alone)]
    assert torch.equal(*logits)
    pixels = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    assert joined.encoder is not None
    rows = joined.encoder.encode(pixels)
    (folder / "tower.safetensors").unlink()
    (folder / "tower.safetensors").symlink_to(tmp_path / "floats.safetensors")
    again = load_model(folder, "float32", images=True).encoder
    assert again is not None
    assert (again.encode(pixels) - rows).abs().max() < 1e-5
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id("<image>") == 0
    assert tokenizer.encode("<image>").ids == [0]
    assert tokenizer.token_to_id("<|endoftext|>") is None
    assert (folder / "chat_template.jinja").read_text() == "a template"
    assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())


def test_it_is_made_again_where_a_file_changes(tower: Path) -> None:
    first = resolve_model(str(tower))
    assert resolve_model(str(tower)) == first
    (tower / "chat_template.jinja").write_text("another template")
    second = resolve_model(str(tower))
    assert second != first
    assert (second / "chat_template.jinja").read_text() == "another template"


def test_what_does_not_fit_is_named(tower: Path) -> None:
    change(tower, language_model="other")
    with pytest.raises(ModelError, match=r"language_model: only 'demo' is supported, not 'other'"):
        resolve_model(str(tower))
    change(tower, language_model="demo", tokens={"<odd>": "<image>"})
    with pytest.raises(ModelError, match=r"cannot join .*<odd>"):
        resolve_model(str(tower))
    change(tower, tokens=3)
    with pytest.raises(ModelError, match="tokens: expected an object"):
        resolve_model(str(tower))
    (tower / "tower.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        resolve_model(str(tower))
