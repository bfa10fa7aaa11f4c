"""Models as bitsandbytes writes them, against the same weights in floats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weft.contract.errors import ModelError
from weft.engine.model.loader import check_weights, load_model
from weft.testing.models.bitsandbytes_models import CONFIGS, Kind, bitsandbytes_models
from weft.testing.models.every_family import check_logits
from weft.testing.models.int_models import SIZES
from weft.testing.models.quantised_models import copy_of_model
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(
    ("model", "kind"),
    [*(("llama", kind) for kind in CONFIGS), ("qwen3_moe", "nf4 nested"), ("qwen3_moe", "int8")],
)
def test_logits_are_those_of_the_weights_that_the_files_mean(
    model: str, kind: Kind, tmp_path: Path
) -> None:
    """Also of a product of which one projection is in floats."""
    source = make_tiny(model, tmp_path / "model", random.randrange(10**6), **SIZES)
    packed, floats = bitsandbytes_models(source, kind, ("model.layers.1.self_attn.k_proj",))
    check_weights(packed)
    loaded = load_model(packed, "float32")
    assert loaded.weight_format.startswith("int8" if kind == "int8" else "float32")
    assert loaded.described_format.endswith("file: bitsandbytes")
    check_logits(loaded.model, floats)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model", random.randrange(10**6), **SIZES)
    packed, _ = bitsandbytes_models(source, "nf4 nested")
    tensors = load_file(packed / "model.safetensors")
    own = {"quantization_config": {"quant_method": "bitsandbytes", **CONFIGS["nf4 nested"]}}
    name = "model.layers.1.mlp.down_proj.weight"
    state = f"{name}.quant_state.bitsandbytes__nf4"
    changes: dict[str, torch.Tensor] = {
        state: torch.tensor(list(b'{"blocksize": 0}'), dtype=torch.uint8),
        f"{name}.nested_absmax": torch.tensor([torch.inf]),
        f"{name}.quant_map": torch.zeros(15),
    }
    for number, (changed, value) in enumerate(changes.items()):
        bad = copy_of_model(source, tmp_path / f"bad-{number}", tensors | {changed: value}, own)
        with pytest.raises(ModelError, match="down_proj"):
            load_model(bad, "float32")
    del tensors[f"{name}.absmax"]
    lacking = copy_of_model(source, tmp_path / "lacking", tensors, own)
    with pytest.raises(ModelError, match="down_proj"):
        load_model(lacking, "float32")
