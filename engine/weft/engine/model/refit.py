"""Changes the weights of a loaded model in its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.digest import FileDigests
from weft.checkpoint.files import weight_files
from weft.contract.errors import ConfigError, ModelError
from weft.engine.model.model_reader import FileTensors, ModelParts, ModelReader
from weft.engine.model.weights.packed import PackedSource, PackedTensors
from weft.engine.model.weights.refill import check_alike, is_same_memory, pairs_of
from weft.engine.model.weights.sent import SentTensors

_SENT = b"weft-sent-2"


class Refit:
    """Fills a loaded model's memory with other weights of the same configuration, through the same
    scheme. No step may run meanwhile. `reader` has read `parts`, whose tensors are `packed`, from
    files that have `tensors`.
    """

    def __init__(
        self, reader: ModelReader, parts: ModelParts, tensors: FileTensors, packed: PackedTensors
    ) -> None:
        self._reader = reader
        self._parts = parts
        self._tensors = tensors
        self._packed = packed
        self._parameters = reader.parameters
        self.on_change: list[Callable[[], None]] = []
        """Called after each update, by the thread that made it: for copies of the weights."""

    @property
    def has_written(self) -> bool:
        """Whether the last update has begun to write."""
        return self._parameters.has_written

    def check(self, folder: Path) -> None:
        """Raises ModelError unless the folder has this model's tensors, and this model's
        config.json or none.
        """
        try:
            is_folder, has_config = folder.is_dir(), (folder / "config.json").exists()
        except OSError as error:  # Such as a name that is too long.
            raise ModelError(f"cannot read the folder: {error}", param="model_path") from error
        if not is_folder:
            raise ModelError(f"{folder} is no folder on this worker's host", param="model_path")
        if has_config:
            own = self._reader.spec.config
            theirs = ModelConfig.load(folder, self._reader.spec.max_context_tokens)
            if theirs.fingerprint() != own.fingerprint():
                raise ModelError(
                    f"{folder}/config.json describes another model than this worker's "
                    f"{own.architecture}; start a worker with it",
                    param="model_path",
                )
        self._reader.check(folder)

    def from_folder(self, folder: Path) -> bytes:
        """Reads a folder of safetensors files and returns the model's new digest, that of a model
        that was loaded from there. After an error the weights are a mixture if `has_written`.
        Raises ModelError if files are missing, malformed or change meanwhile.
        """
        self._parameters.again()
        try:
            files = weight_files(folder)
            before = _stats(files)
            with FileDigests(files) as digests:
                self._fill(lambda: self._reader.read(folder)[0])
                digest = self._reader.spec.digest(digests.wait())
            if _stats(files) != before:
                raise ModelError(f"the files in {folder} changed while they were read")
        except OSError as error:
            raise ModelError(f"cannot read the weights in {folder}: {error}") from error
        self._parts.name(digest)
        return digest

    def expect(self) -> SentTensors:
        """The tensors of an update that a trainer sends. Raises ConfigError if the model's weights
        are no safetensors.
        """
        if not self._tensors.known:
            raise ConfigError(
                "the weights of this worker were not read from safetensors, whose names a trainer "
                "would use; start it with a folder of safetensors"
            )
        return SentTensors(self._tensors.known)

    def from_sent(self, sent: SentTensors) -> bytes:
        """Fills the model while `sent` comes; returns the new digest, which its names and contents
        decide. After an error the weights are a mixture if `has_written`.
        """
        self._fill(lambda: self._reader.read_sent(sent, self._tensors.own_copies))
        digest = self._reader.spec.digest([_SENT, sent.digest()])
        self._parts.name(digest)
        return digest

    def check_peer(self, source: PackedSource) -> None:
        """Raises WeftError unless another worker has this model, packed as it is here."""
        source.check(self._packed)

    def from_peer(self, source: PackedSource) -> bytes:
        """Copies the weights of another worker; returns their digest. After an error the weights
        are a mixture.
        """
        self._parameters.has_written = True
        source.fill(self._packed)
        self._follow()
        self._parts.name(source.model_digest)
        return source.model_digest

    def tensors(self) -> list[torch.Tensor]:
        """The parameters, which an update fills."""
        return self._parameters.tensors()

    def packed_digest(self) -> bytes:
        """32 bytes over the parameters in the form in which they lie in memory."""
        return self._parameters.digest()

    def _fill(self, read: Callable[[], ModelParts]) -> None:
        self._parameters.again()
        made = read()
        with torch.inference_mode(False):
            for path, old, new in pairs_of(self._parts, made):
                if not is_same_memory(old, new):
                    check_alike(old, new, path)
                    self._parameters.has_written = True
                    old.copy_(new)
        self._follow()

    def _follow(self) -> None:
        for follow in self.on_change:
            follow()


def _stats(files: Sequence[Path]) -> list[tuple[int, int, int]]:
    found = [os.stat(path) for path in files]
    return [(one.st_ino, one.st_size, one.st_ctime_ns) for one in found]
