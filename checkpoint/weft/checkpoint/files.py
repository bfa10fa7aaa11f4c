"""Locates the weight files of a Hugging Face directory. Pure Python."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.contract.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_MAX_NAME_BYTES = 255
_MAX_HEADER_BYTES = 100 << 20
_FLOATS = {"F64", "F32", "F16", "BF16"}
GGUF_FILE = "model.gguf"
"""The weights in a directory that `gguf_folder` makes for a GGUF file."""


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The files that hold the weights, in a fixed order.

    Raises:
        ModelError: There are no files or files of both kinds, or the index names a missing file.
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


def num_parameters(model_dir: Path) -> int:
    """Number of parameters in a directory's safetensors files, from their headers; 0 if there are
    no such files, or if weights are packed (quantised) so that their shapes do not tell it.
    """
    try:
        headers = [_header(path) for path in weight_files(model_dir)]
        tensors = [one for header in headers for name, one in header.items() if name[:2] != "__"]
        if any(one["dtype"] not in _FLOATS for one in tensors):
            return 0
        return sum(math.prod(one["shape"]) for one in tensors)
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, path.stat().st_size):
            raise ModelError(f"{path} is not a safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return header


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
