"""Makes a Hugging Face folder of a folder in Mistral's own layout: links, and the files that it
lacks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.fields import read_json_file
from weft.checkpoint.made_folder import make_once
from weft.checkpoint.mistral_params import PARAMS_FILE, config_of_params
from weft.checkpoint.tekken import TEKKEN_FILE, tekken_files
from weft.contract.cache_folder import cache_folder
from weft.contract.errors import ModelError

_VERSION = "2"
"""Version of the folder's content; raise it when the conversion of a file changes."""
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATES = {
    # mistral-common writes the chats of these models, which have no template.
    "voxtral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]{{ message['content'] }}"
        "[/SYSTEM_PROMPT]{% elif message['role'] == 'assistant' %}"
        "{{ message['content'] }}{{ eos_token }}{% else %}[INST]"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
        "[BEGIN_AUDIO][AUDIO]{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "[/INST]{% endif %}{% endfor %}"
    ),
}
"""By `model_type`."""
_WEIGHTS = {
    "consolidated.safetensors": "model.safetensors",
    "consolidated.safetensors.index.json": "model.safetensors.index.json",
}


def needs_conversion(folder: Path) -> bool:
    """Whether a folder holds a model whose configuration or tokenizer exists only in Mistral's
    layout.
    """
    lacks_tokenizer = not (folder / "tokenizer.json").is_file()
    has_tekken = (folder / TEKKEN_FILE).is_file() and lacks_tokenizer
    is_config = (folder / "config.json").is_file()
    return (is_config and has_tekken) or (not is_config and (folder / PARAMS_FILE).is_file())


def mistral_folder(path: Path) -> Path:
    """The folder in Hugging Face's layout, made in the cache if it does not exist; weights are
    links. `needs_conversion` holds for `path`.
    """
    path = path.resolve()
    try:
        target = cache_folder() / "models" / "mistral" / _identity(path) / path.name
        make_once(
            target,
            lambda: (target / "config.json").is_file(),
            lambda folder: _write(path, folder),
        )
    except OSError as error:
        raise ModelError(f"cannot read {path}, or write what is made of it: {error}") from error
    return target


def _identity(path: Path) -> str:
    digest = hashlib.blake2b(f"{_VERSION} {path}".encode(), digest_size=8)
    for name in ("config.json", PARAMS_FILE, TEKKEN_FILE):
        if (path / name).is_file():
            digest.update(name.encode() + (path / name).read_bytes())
    for file in sorted(path.iterdir()):
        digest.update(file.name.encode())
    return digest.hexdigest()


def _write(path: Path, folder: Path) -> None:
    documents: dict[str, Mapping[str, Any]] = {}
    is_own = not (path / "config.json").is_file()
    if is_own:
        documents["config.json"] = config_of_params(path / PARAMS_FILE)
    if not (path / "tokenizer.json").is_file() and (path / TEKKEN_FILE).is_file():
        documents |= tekken_files(path / TEKKEN_FILE)
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    kind = _model_type(documents, path)
    if kind in _TEMPLATES and not (path / _TEMPLATE_FILE).is_file():
        (folder / _TEMPLATE_FILE).write_text(_TEMPLATES[kind], encoding="utf-8")
    for file in path.iterdir():
        name = _WEIGHTS.get(file.name, file.name) if is_own else file.name
        if file.is_file() and not (folder / name).exists():
            (folder / name).symlink_to(file)
    folder.chmod(0o755)


def _model_type(documents: Mapping[str, Mapping[str, Any]], path: Path) -> str:
    file = path / "config.json"
    config = read_json_file(file) if file.is_file() else documents["config.json"]
    return str(config.get("model_type", ""))
