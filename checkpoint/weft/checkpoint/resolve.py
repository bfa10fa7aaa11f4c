"""Resolves a user's name of a model to a folder."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint import hub, object_store
from weft.checkpoint.demo import (
    DEMO_GGUF,
    DEMO_MODEL,
    DEMO_NAME,
    convert_demo,
    find_source,
)
from weft.checkpoint.files import Progress
from weft.checkpoint.gguf_folder import gguf_folder
from weft.checkpoint.joined_folder import joined_folder, needs_joining
from weft.checkpoint.mistral_folder import mistral_folder, needs_conversion
from weft.checkpoint.whisper_demo import WHISPER_DEMO, convert_whisper
from weft.contract.errors import ModelError


def resolve_model(model: str, progress: Progress | None = None) -> Path:
    """The directory of a model, which is made or downloaded first if necessary.

    `model` is `demo`, `demo-gguf` (its GGUF file), `whisper-tiny-en`, a directory in Hugging Face's
    or Mistral's layout or with an image tower for the demo model, a GGUF file, a name on a hub
    (`organisation/name`, with `@revision` or without; a directory of that name comes first), or the
    URL of a folder in an object store. `progress` is called with (bytes written, bytes in all)
    while the demo model is converted. Raises ModelError if the model does not exist or cannot be
    converted or downloaded, or a file is damaged or not supported.
    """
    if model == DEMO_NAME:
        return convert_demo(progress)
    if model == WHISPER_DEMO:
        return convert_whisper()
    if object_store.is_url(model):
        return object_store.fetch(model)
    path = find_source() if model == DEMO_GGUF else Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return gguf_folder(path)
    if needs_joining(path):
        return joined_folder(path, progress)
    if needs_conversion(path):
        return mistral_folder(path)
    if _is_model_folder(path):
        return path.resolve()
    name = hub.HubName.parse(model)
    if name is None or path.exists():
        raise ModelError(
            f"model: {model!r} is neither {DEMO_NAME!r} nor a directory with a config.json nor a "
            "GGUF file nor a name on the hub (organisation/name[@revision]) nor a URL",
            param="model",
        )
    folder = hub.pull(name)
    return mistral_folder(folder) if needs_conversion(folder) else folder


def default_name(model: str, folder: Path) -> str:
    """The name of a model in requests if its user gives it none. `model` and `folder` are the
    argument and the result of `resolve_model`.
    """
    if model == DEMO_NAME:
        return DEMO_MODEL
    name = hub.HubName.parse(model)
    if name is None or _is_model_folder(Path(model).expanduser()):
        return folder.name
    return name.repository


def _is_model_folder(path: Path) -> bool:
    return (path / "config.json").is_file() or needs_conversion(path) or needs_joining(path)
