"""The tensors of a checkpoint against its configuration, without reading them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import ModelError
from weft.engine.model.loader import check_weights
from weft.engine.model.weights.tensor_reads import TensorReads
from weft.testing.models.every_family import EVERY_FAMILY, write_model
from weft.testing.models.fp8_models import LAYOUTS as FP8_LAYOUTS
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.int_models import LAYOUTS, SIZES, packed_models
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.mxfp4_models import as_mxfp4
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import make_tiny


def change(folder: Path, **fields: Any) -> None:
    """Changes fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"intermediate_size": 96}, r"shape \(.*config.json asks for \(96, "),
        ({"num_hidden_layers": 5}, r"lacks tensors: model\.layers\.\d"),
        ({"num_hidden_layers": 1}, r"has tensors that the model does not use: model\.layers\.1"),
    ],
)
def test_what_does_not_fit_is_named(
    fields: dict[str, int], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path / "model", random.randrange(10**6))

    def read(*_: object) -> None:
        raise AssertionError("numbers are read")

    monkeypatch.setattr(TensorReads, "read", read)
    check_weights(folder)
    change(folder, **fields)
    with pytest.raises(ModelError, match=reason):
        check_weights(folder)


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_model_to_be_quantised_at_load(quantization: str, tmp_path: Path) -> None:
    check_weights(make_tiny("llama", tmp_path / "model", 1, **SIZES), quantization)


IN_EVERY_RUN = ("gptq act order", "compressed-tensors with zeros")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.full)
        for name in LAYOUTS
    ],
)
def test_packed_integers(layout: str, tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source", random.randrange(10**6), **SIZES)
    folder, _ = packed_models(source, tmp_path / "model", LAYOUTS[layout])
    check_weights(folder)
    change(folder, num_hidden_layers=9)
    with pytest.raises(ModelError, match="lacks tensors"):
        check_weights(folder)


@pytest.mark.full
@pytest.mark.parametrize("layout", FP8_LAYOUTS)
def test_fp8(layout: str, tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source", random.randrange(10**6), **SIZES)
    check_weights(fp8_copy(source, tmp_path / "model", layout)[0])


@pytest.mark.full
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path / "model", random.randrange(10**6))
    check_weights(tmp_path / "model")


@pytest.mark.full
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    _, fields = MOE_FAMILIES["gpt-oss"]
    sizes = {"intermediate_size": 64, "hidden_size": 96}
    make_reference("gpt_oss", tmp_path, random.randrange(10**6), **{**fields, **sizes})
    as_mxfp4(tmp_path)
    check_weights(tmp_path)
