"""A GGUF file as a model's directory: configuration, tokenizer, and a link to the file."""

from __future__ import annotations

import json
from pathlib import Path

from weft.checkpoint.digest import cached_file_digests
from weft.checkpoint.files import GGUF_FILE
from weft.checkpoint.gguf_metadata import GgufMetadata
from weft.checkpoint.gguf_tokenizer import tokenizer_files
from weft.checkpoint.made_folder import make_once
from weft.checkpoint.quantization import GGUF
from weft.contract.cache_folder import cache_folder
from weft.contract.errors import ModelError

_VERSION = "3"
"""Version of the folder's content; raise it when the conversion of a file changes."""


def gguf_folder(path: Path) -> Path:
    """The directory of a GGUF file, made in the cache if it does not exist. The weights stay in the
    file, whose name without the suffix names the directory.
    """
    path = path.resolve()
    try:
        digest = cached_file_digests([path])[0].hex()[:16]
        target = cache_folder() / "models" / "gguf" / f"{digest}-{_VERSION}" / path.stem
        link = target / GGUF_FILE
        make_once(
            target,
            lambda: link.exists() and link.resolve() == path,
            lambda folder: _write(path, folder),
        )
    except OSError as error:
        raise ModelError(f"cannot read {path}, or write what is made of it: {error}") from error
    return target


def _write(path: Path, folder: Path) -> None:
    metadata = GgufMetadata(path)
    config = metadata.config()
    special = {name: config[name] for name in config if name.endswith("_token_id")}
    documents = {
        "config.json": config | {"quantization_config": {"quant_method": GGUF}},
        "generation_config.json": special,
        **tokenizer_files(metadata),
    }
    for name, content in documents.items():
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
    folder.chmod(0o755)
    (folder / GGUF_FILE).symlink_to(path)
