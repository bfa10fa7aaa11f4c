"""Models in object stores and on other file systems that fsspec knows: s3://, gs://, az://, ..."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.hub import is_wanted
from weft.kernels.build import cache_folder

_MANIFEST = "fetched.json"
"""Names the files of the store that are here, each with what `ukey` said of it."""


def is_url(model: str) -> bool:
    """Whether a model is given by a URL."""
    return "://" in model


def fetch(url: str) -> Path:
    """A copy of a model's folder in the cache, with what is missing or has changed downloaded.

    Shows a bar of progress for each file on a terminal's standard error. A file that is there whole
    is not fetched again.

    Args:
        url: Of the folder. Credentials come from the environment, as the store's library reads
            them; in the URL itself they would be seen in the list of processes.

    Raises:
        ModelError: The library for this kind of URL is not installed, the folder cannot be read, or
            has no config.json.
    """
    import fsspec

    try:
        store, root = fsspec.core.url_to_fs(url)
        found = {
            str(PurePosixPath(path).relative_to(store._strip_protocol(root))): path
            for path in store.find(root)
        }
        files = {name: path for name, path in found.items() if is_wanted(name)}
        if "config.json" not in files:
            raise ModelError(f"model {url}: there is no config.json", param="model")
        return _copy(store, url, files)
    except ImportError as error:
        raise ModelError(f"model {url}: {error}", param="model") from error
    except ModelError:
        raise
    except Exception as error:  # Each store's library has errors of its own.
        raise ModelError(f"model {url}: {type(error).__name__}: {error}", param="model") from error


def _copy(store: Any, url: str, files: dict[str, str]) -> Path:
    from fsspec.callbacks import TqdmCallback

    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    folder = cache_folder() / "models" / "fetched" / name / PurePosixPath(url.rstrip("/")).name
    folder.mkdir(parents=True, exist_ok=True)
    here = _read_manifest(folder)
    for gone in here.keys() - files.keys():
        (folder / gone).unlink(missing_ok=True)
        del here[gone]
    # Weights come last: an interrupted copy has no index without its files.
    for file in sorted(files, key=lambda name: (name.endswith(".safetensors"), name)):
        state, target = str(store.ukey(files[file])), folder / file
        if here.get(file) == state and target.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        bar = TqdmCallback(tqdm_kwargs={"desc": file, "unit": "B", "unit_scale": True})
        store.get_file(files[file], str(part), callback=bar)
        os.replace(part, target)
        here[file] = state
        manifest = folder / f"{_MANIFEST}.part"
        manifest.write_text(json.dumps(here))
        os.replace(manifest, folder / _MANIFEST)
    return folder


def _read_manifest(folder: Path) -> dict[str, str]:
    try:
        content = json.loads((folder / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(name): str(state) for name, state in content.items()}
