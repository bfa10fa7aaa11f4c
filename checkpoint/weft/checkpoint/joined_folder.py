"""Makes a model that takes images of a folder with an image tower and the demo model, which the
folder names as its language model. The weights of the demo model are linked, not copied.

`tower.json` of such a folder has the fields of config.json that the language model's lacks, the
language model's name, and the tokens of its vocabulary that have other texts here. The tower's
matrices are int8 with a scale a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from weft.checkpoint.demo import DEMO_NAME, convert_demo
from weft.checkpoint.fields import Fields, fields_of_file, read_json_file
from weft.checkpoint.files import Progress
from weft.checkpoint.made_folder import make_once
from weft.contract.arrays import Float32Array
from weft.contract.cache_folder import cache_folder
from weft.contract.errors import ModelError

TOWER_FILE = "tower.json"
TOWER_WEIGHTS = "tower.safetensors"
_INDEX, _LANGUAGE = "model.safetensors.index.json", "language.safetensors"
_SCALES = "_scale"
_VERSION = 1
"""Version of the folder's content; raise it when the same files give other ones."""


def needs_joining(folder: Path) -> bool:
    """Whether a folder has an image tower and names its language model."""
    return (folder / TOWER_FILE).is_file() and not (folder / "config.json").exists()


def joined_folder(path: Path, progress: Progress | None = None) -> Path:
    """The folder of the whole model, made in the cache if it does not exist. Raises ModelError if a
    file is missing or malformed, or the demo model cannot be converted.
    """
    path = path.resolve()
    fields = fields_of_file(path / TOWER_FILE)
    named = fields.text("language_model", DEMO_NAME)
    if named != DEMO_NAME:
        raise fields.error("language_model", f"only {DEMO_NAME!r} is supported, not {named!r}")
    language = convert_demo(progress)
    try:
        target = cache_folder() / "models" / "joined" / _identity(path, language) / path.name
        make_once(
            target,
            lambda: (target / "config.json").is_file(),
            lambda folder: _write(path, language, fields, folder),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot join {path} and {language}: {error!r}") from error
    return target


def _identity(path: Path, language: Path) -> str:
    digest = hashlib.blake2b(f"{_VERSION} {language}".encode(), digest_size=8)
    for file in sorted(path.iterdir()):
        if file.is_file():
            content = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
            digest.update(f"{file.name} {content} ".encode())
    return digest.hexdigest()


def _write(path: Path, language: Path, fields: Fields, folder: Path) -> None:
    texts = {str(old): str(new) for old, new in _object(fields, "tokens").items()}
    config = {**_object(fields, "config"), "text_config": _json(language / "config.json")}
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"]
    tokenizer = _with_texts(_json(language / "tokenizer.json"), texts)
    settings = {**_json(language / "tokenizer_config.json")}
    settings.pop("chat_template", None)
    documents: dict[str, Mapping[str, Any]] = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "generation_config.json": _json(language / "generation_config.json"),
    }
    (folder / _LANGUAGE).symlink_to(language / "model.safetensors")
    tower = _write_tower(path / TOWER_WEIGHTS, folder / TOWER_WEIGHTS)
    names = dict.fromkeys(tower, TOWER_WEIGHTS) | dict.fromkeys(_names(language), _LANGUAGE)
    documents[_INDEX] = {"metadata": {}, "weight_map": names}
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    for file in path.iterdir():
        if file.is_file() and file.name not in (TOWER_FILE, TOWER_WEIGHTS):
            (folder / file.name).write_bytes(file.read_bytes())
    folder.chmod(0o755)


def _object(fields: Fields, name: str) -> dict[str, Any]:
    section = fields.section(name)
    return {key: section.get(key) for key in section}


def _json(path: Path) -> dict[str, Any]:
    return dict(read_json_file(path))


def _names(language: Path) -> list[str]:
    with (language / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [name for name in header if not name.startswith("__")]


def _with_texts(tokenizer: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer in which special tokens have other texts. Raises KeyError if it lacks one."""
    vocabulary = tokenizer["model"]["vocab"]
    for old, new in texts.items():
        vocabulary[new] = vocabulary.pop(old)
    for token in tokenizer["added_tokens"]:
        token["content"] = texts.get(token["content"], token["content"])
    return tokenizer


def _write_tower(source: Path, target: Path) -> list[str]:
    """Returns the names of the tensors. Raises ValueError if the file is damaged."""
    # Only here, since services resolve models too.
    from safetensors import SafetensorError
    from safetensors.numpy import load_file, save_file

    try:
        floats = _in_floats(load_file(source))
    except SafetensorError as error:
        raise ValueError(f"{source.name} is damaged: {error}") from error
    save_file(floats, target, metadata={"format": "pt"})
    return list(floats)


def _in_floats(tensors: Mapping[str, Any]) -> dict[str, Float32Array]:
    """float32: int8 times the scale of its row."""
    floats = {}
    for name, one in tensors.items():
        if name.endswith(_SCALES):
            continue
        values = one.astype(np.float32)
        if one.dtype == np.int8:
            scales = tensors[name + _SCALES]
            values *= scales.reshape(-1, *[1] * (one.ndim - 1)).astype(np.float32)
        floats[name] = values
    return floats
