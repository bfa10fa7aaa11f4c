"""Locates the weight files of a Hugging Face directory. Pure Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from weft.contract.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_MAX_NAME_BYTES = 255
GGUF_FILE = "model.gguf"
"""The weights in a directory that was made for a GGUF file (`gguf_folder`)."""


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The files that hold the weights, in a fixed order.

    Raises:
        ModelError: There are none, or of both kinds, or the index is malformed or names a missing
            file.
    """
    index = model_dir / _INDEX_FILE
    if (model_dir / GGUF_FILE).exists():
        if index.exists() or (model_dir / _SINGLE_FILE).exists():
            raise ModelError(
                f"{model_dir} holds {GGUF_FILE} beside safetensors: move it to a folder of its own"
            )
        return (model_dir / GGUF_FILE,)
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        if (model_dir / _SINGLE_FILE).exists() and _SINGLE_FILE not in names:
            raise ModelError(
                f"{model_dir} holds {_SINGLE_FILE} beside {_INDEX_FILE}, which does not name it: "
                "remove the one that is not meant"
            )
    elif (model_dir / _SINGLE_FILE).exists():
        names = [_SINGLE_FILE]
    else:
        raise ModelError(
            f"{model_dir} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}: "
            "only safetensors checkpoints and GGUF files are read"
        )
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise ModelError(f"{index} names files that are not there: {', '.join(missing)}")
    return tuple(model_dir / name for name in names)


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from error
    for file in files.values():
        # A name with a folder in it could lead out of the model's directory.
        if Path(file).name != file or len(file.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
            raise ModelError(f"{index}: {file[:_MAX_NAME_BYTES]!r} is not a plain file name")
    return files
