"""The digest that identifies an adapter: the relevant parts of its configuration, its tensors, and
its own tokenizer if it has one. No torch.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.adapters.files import AdapterFiles, open_adapter
from weft.checkpoint.adapters.peft_config import variants_of
from weft.contract.cores import num_cores
from weft.contract.errors import AdapterError

_VERSION = b"weft-adapter-3"
_PIECE_BYTES = 1 << 22
_CORES_OF_A_THREAD, _MAX_THREADS = 4, 4
"""Cores for each hashing thread, and most threads. They hash in parallel, since BLAKE2b (0.4 to 1.2
GB/s per core) takes most of a load's time.
"""
# Fields that change hidden states or logits, or whether the adapter is accepted. Fields about its
# training, such as dropout and paths, do not count.
_FIELDS = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "ensure_weight_tying",
    "use_dora",
    "lora_bias",
    "layer_replication",
)
_UNORDERED = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")


def adapter_digest(directory: Path, *, is_lenient: bool = False) -> bytes:
    """BLAKE2b-256, 32 bytes, over an adapter's content, independent of its name and location. It
    includes the weights as digests of their pieces, which threads compute in parallel.

    With `is_lenient` reading leaves out tensors that cannot be applied. That may change the
    generated text, so that the digest differs. Raises AdapterError if the directory's files are
    missing or damaged; only `read_adapter` checks whether the tensors fit a model.
    """
    with open_adapter(directory) as files:
        return digest_of(files, is_lenient=is_lenient)


def digest_of(files: AdapterFiles, *, is_lenient: bool = False) -> bytes:
    """`adapter_digest` of an open directory."""
    weights = hashlib.blake2b(b"".join(_piece_digests(files)), digest_size=32)
    files.check_unchanged()
    digest = hashlib.blake2b(digest_size=32)
    texts = [part for name, data in files.text_files().items() for part in (name.encode(), data)]
    for part in (_VERSION, _canonical(files), weights.digest(), bytes([is_lenient]), *texts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _piece_digests(files: AdapterFiles) -> list[bytes]:
    pieces = files.pieces(_PIECE_BYTES)
    digests, errors = [b""] * len(pieces), list[Exception]()
    num_threads = min(_MAX_THREADS, max(1, num_cores() // _CORES_OF_A_THREAD))

    def run(first: int) -> None:
        try:
            for index in range(first, len(pieces), num_threads):
                digests[index] = files.piece_digest(pieces[index])
        except Exception as error:
            errors.append(error)

    # Daemons: a disk that never answers must not keep the process from ending.
    names = (f"weft-lora-hash-{index}" for index in range(num_threads))
    threads = [
        threading.Thread(target=run, args=(index,), name=name, daemon=True)
        for index, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return digests


class Hashing:
    """Computes `digest_of` in a thread while others read the same file. It is a context manager;
    `files` must stay open until its exit.
    """

    def __init__(self, files: AdapterFiles, *, is_lenient: bool) -> None:
        self._files, self._is_lenient = files, is_lenient
        self._digest = b""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weft-lora-hash", daemon=True)

    def __enter__(self) -> Hashing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def result(self) -> bytes:
        """Waits for the digest and returns it; raises the errors of `adapter_digest`."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest

    def _run(self) -> None:
        try:
            self._digest = digest_of(self._files, is_lenient=self._is_lenient)
        except Exception as error:
            self._error = error


def _canonical(files: AdapterFiles) -> bytes:
    values = {name: _value(files.config, name) for name in _FIELDS}
    # A refused variant must not pass for a plain adapter with the same tensors.
    values |= dict.fromkeys(sorted(variants_of(files.config)), True)
    try:
        return json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, UnicodeEncodeError) as error:
        raise AdapterError(f"adapter {files.directory}: adapter_config.json: {error}") from error


def _value(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if name in _UNORDERED and isinstance(value, list):
        return sorted(map(str, value))
    # The first matching pattern applies, so the order of patterns is kept.
    if isinstance(value, dict):
        value = list(value.items())
    # Empty values count as absent, except empty target_modules, which differ from absent ones.
    # 0 is a number and no empty value.
    is_empty = value is False or (value == [] and name != "target_modules")
    return None if is_empty else value
