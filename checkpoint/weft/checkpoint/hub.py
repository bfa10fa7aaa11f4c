"""Models by name from a Hugging Face hub, kept in huggingface_hub's own cache.

The library's own environment variables apply: `HF_TOKEN` and its token file, `HF_HOME` and
`HF_HUB_CACHE` (where models are kept), `HF_ENDPOINT` (a mirror), `HF_HUB_OFFLINE`. No code of a
repository is fetched or run, and of weights only safetensors are fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from weft.checkpoint.architectures import check_architecture
from weft.checkpoint.files import weight_files
from weft.contract.errors import ModelError

_ALLOWED = [
    "*.safetensors",
    "*.json",
    "*.jinja",  # Chat templates.
    "*.model",  # SentencePiece.
    "*.txt",  # vocab.txt and merges.txt.
    "*.tiktoken",
]
_IGNORED = [
    # Copies of the weights in formats that are not read.
    "consolidated*",
    *(f"{folder}/*" for folder in ("original", "metal", "onnx", "openvino", "coreml", "gguf")),
    # Runs of the training.
    "checkpoint-*/*",
    "runs/*",
]
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9._/-]+))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of a hub, and its revision."""

    repository: str
    """`organisation/name`."""
    revision: str | None = None
    """Branch, tag or commit; None: the repository's main branch."""

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """Reads `organisation/name` or `organisation/name@revision`; None for all other texts."""
        found = _NAME.fullmatch(name)
        if found is None or ".." in name or "--" in found["repository"]:
            return None
        return cls(found["repository"], found["revision"])

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: HubName
    """Its revision is the commit."""
    refs: tuple[str, ...]
    """Branches and tags that were asked for by name and meant this commit."""
    folder: Path
    num_bytes: int
    problem: str
    """Why it cannot be served; empty: it can."""


def is_wanted(path: str) -> bool:
    """Whether a file is needed to serve the model, by its path in the model's folder."""
    return not any(fnmatch(path, ignored) for ignored in _IGNORED) and any(
        fnmatch(path, allowed) for allowed in _ALLOWED
    )


def pull(name: HubName) -> Path:
    """Downloads the missing files of a model and returns its folder.

    Shows progress bars on a terminal's standard error. An interrupted download continues where it
    ended. The architecture is checked before any weights are fetched. If the hub cannot be reached,
    the cached state is used if it is complete.

    Raises:
        ModelError: The repository or revision does not exist or may not be read, its architecture
            is not supported, it has no safetensors, or the download failed.
    """
    from huggingface_hub import snapshot_download

    with _explained(name), _bars() as bar_class:
        for patterns in (["config.json"], _ALLOWED):
            folder = Path(
                snapshot_download(
                    name.repository,
                    revision=name.revision,
                    allow_patterns=patterns,
                    ignore_patterns=_IGNORED,
                    tqdm_class=bar_class,
                )
            )
            if problem := _architecture_problem(folder):
                raise ModelError(f"model {name}: {problem}", param="model")
    try:
        weight_files(folder)
    except ModelError as error:
        raise ModelError(f"model {name}: {error.message}", param="model") from error
    return folder


@contextmanager
def _bars() -> Iterator[type[Any]]:
    """The class of a download's progress bars. They are closed at the end: the library leaves some
    open, which would go on writing over what is shown after them.
    """
    from huggingface_hub.utils.tqdm import tqdm

    bars: list[tqdm] = []

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
            bars.append(self)

    try:
        yield Bar
    finally:
        for bar in reversed(bars):
            bar.close()


def cached_models() -> list[CachedModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = [
        CachedModel(
            name=HubName(repository.repo_id, revision.commit_hash),
            refs=tuple(sorted(revision.refs)),
            folder=revision.snapshot_path,
            num_bytes=revision.size_on_disk,
            problem=_problem(revision.snapshot_path),
        )
        for repository in repositories
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]
    return sorted(found, key=lambda model: (model.name.repository, model.refs, str(model.folder)))


def find_cached(name: HubName) -> list[CachedModel]:
    """The cached states that a name means; without a revision, all states of the repository. Raises
    ModelError if there are none.
    """
    wanted = name.revision
    found = [
        model
        for model in cached_models()
        if model.name.repository == name.repository
        and (wanted is None or wanted == model.name.revision or wanted in model.refs)
    ]
    if not found:
        raise ModelError(f"model {name} is not in the cache; see: weft model list", param="model")
    return found


def remove(name: HubName) -> int:
    """Removes the cached states that a name means; returns the number of bytes that this frees.
    Raises ModelError if there are none, or they cannot be removed.
    """
    from huggingface_hub import scan_cache_dir

    commits = [model.name.revision or "" for model in find_cached(name)]
    with _explained(name):
        plan = scan_cache_dir().delete_revisions(*commits)
        plan.execute()
        left = [
            commit for commit in commits if any(m.name.revision == commit for m in cached_models())
        ]
    if left:
        raise ModelError(f"model {name}: {', '.join(left)} could not be removed from the cache")
    return plan.expected_freed_size


def check_files(model: CachedModel) -> list[str]:
    """Compares a cached model's files with the hub's checksums; returns the paths that differ.
    Raises ModelError if the hub cannot be asked.
    """
    from huggingface_hub import HfApi

    with _explained(model.name):
        checked = HfApi().verify_repo_checksums(model.name.repository, revision=model.name.revision)
    return sorted(mismatch["path"] for mismatch in checked.mismatches)


def _problem(folder: Path) -> str:
    if problem := _architecture_problem(folder):
        return problem
    try:
        weight_files(folder)
    except ModelError:
        return "weights are missing"
    return ""


def _architecture_problem(folder: Path) -> str:
    try:
        names = json.loads((folder / "config.json").read_bytes()).get("architectures")
        check_architecture(str(names[0]))
    except FileNotFoundError:
        return "there is no config.json"
    except ModelError as error:
        return error.message
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        return f"config.json cannot be read: {error!r}"
    return ""


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise _failed(
            name,
            "access is restricted: accept the conditions on the model's page, and set HF_TOKEN to "
            "a token of that account",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _failed(
            name,
            "the hub has no such repository, or it is private; for a private one set HF_TOKEN, "
            "for a folder give its path",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise _failed(name, f"there is no revision {name.revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise _failed(
            name,
            "it is not (completely) in the cache, and the hub cannot be reached or HF_HUB_OFFLINE "
            "is set; `weft model pull` fetches it where there is a connection",
        ) from error
    except Exception as error:  # Which HTTP library raises depends on huggingface_hub's version.
        raise _failed(name, f"{type(error).__name__}: {error}") from error


def _failed(name: HubName, reason: str) -> ModelError:
    return ModelError(f"model {name}: {reason}", param="model")
