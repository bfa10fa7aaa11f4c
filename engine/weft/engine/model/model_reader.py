"""Reads the parts of a model: once for a load, and again for each update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from weft.checkpoint.digest import mtp_digest, tower_digest
from weft.checkpoint.files import GGUF_FILE, Progress, weight_files
from weft.contract.errors import ModelError
from weft.engine.model.audio.tower import AudioTower
from weft.engine.model.heads.mtp import MtpHead, read_mtp
from weft.engine.model.interface import Model
from weft.engine.model.model_spec import ModelSpec
from weft.engine.model.stage import WHOLE
from weft.engine.model.vision.tower import VisionTower
from weft.engine.model.weights.checkpoint import Checkpoint
from weft.engine.model.weights.computed_format import ComputedFormat
from weft.engine.model.weights.gguf_file import GgufFile
from weft.engine.model.weights.packed import Origin, PackedTensors
from weft.engine.model.weights.reader import CheckpointReader
from weft.engine.model.weights.refill import Parameters
from weft.engine.model.weights.sent import KnownTensor, SentTensors
from weft.engine.model.weights.weights import Weights
from weft.kernels.shared.memory import WeightArena

logger = logging.getLogger(__name__)

_META = torch.device("meta")


class ModelParts(NamedTuple):
    """The language model, and what is read beside it."""

    model: Model
    mtp: MtpHead | None
    tower: VisionTower | AudioTower | None

    def name(self, digest: bytes) -> None:
        """Gives the other parts the digests that follow from the model's."""
        if self.mtp is not None:
            self.mtp.digest = mtp_digest(digest)
        if self.tower is not None:
            self.tower.digest = tower_digest(digest, self.tower.config)


class FileTensors(NamedTuple):
    """What a model's files had when it was loaded."""

    known: Mapping[str, KnownTensor] = {}
    """Empty: the weights were not read from safetensors."""
    own_copies: Sequence[str] = ()
    """As in `read_mtp`."""


class ModelReader:
    """Runs the constructors of a model's parts. The first run decides where the parameters lie;
    each further one fills the same memory (`Parameters`).
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.formats = ComputedFormat()
        self.parameters = Parameters()
        self._arena = WeightArena(is_fixed=spec.is_fixed)

    def read(
        self, folder: Path, progress: Progress | None = None, *, is_outline: bool = False
    ) -> tuple[ModelParts, FileTensors]:
        """Reads a folder's weights, as `open_checkpoint` opens them. Raises ModelError if they are
        not those of the model.
        """
        spec = self.spec
        opened = open_checkpoint(folder, progress, spec.is_unused, is_outline=is_outline)
        with opened as checkpoint:
            if isinstance(checkpoint, Checkpoint):
                spec.check_tied(checkpoint)
            own_copies = spec.own_copies(checkpoint)
            parts = self.construct(checkpoint, own_copies, str(folder))
            checkpoint.finish()
            if not isinstance(checkpoint, Checkpoint):
                return parts, FileTensors()
            left_out = spec.left_out(checkpoint)
            tensors = FileTensors(checkpoint.known, own_copies)
        if left_out:
            served = "images and text" if spec.tower else "text"
            logger.info("%s serves %s alone: %s left out", folder, served, ", ".join(left_out))
        return parts, tensors

    def read_sent(self, sent: SentTensors, own_copies: Sequence[str]) -> ModelParts:
        """As `read`, over what a trainer sends; waits for it."""
        parts = self.construct(sent, own_copies, "what the trainer sends")
        sent.await_end()
        sent.finish()
        self.spec.check_tied(sent)
        return parts

    def check(self, folder: Path) -> None:
        """Raises ModelError unless the folder's tensors have the model's names and shapes."""
        whole = replace(self.spec, device=_META, share=WHOLE, deterministic=False)
        ModelReader(whole).read(folder)

    def construct(
        self, checkpoint: CheckpointReader, own_copies: Sequence[str], where: str
    ) -> ModelParts:
        """Reads all parts from an open checkpoint, which is called `where` in messages."""
        spec, mtp, tower = self.spec, None, None
        # What another stage has is on the meta device.
        has_meta = spec.device == _META or spec.share.stage is not None
        with _SkipMetaChecks() if has_meta else nullcontext():
            weights = self._weights(spec.renamed(checkpoint))
            model = spec.build(spec.config, weights)
            if spec.mtp_head:
                mtp = read_mtp(model, weights.of_head(), own_copies, where)
            if spec.tower:
                tower = self._read_tower(checkpoint)
        return ModelParts(model, mtp, tower)

    def pack(self, parts: ModelParts, origin: Origin) -> PackedTensors:
        """The tensors of parts that were just read, from `origin`."""
        spec, share = self.spec, self.spec.share
        return PackedTensors(parts, spec.digest(), str(share), spec.device, origin, share.links)

    def _weights(self, reader: CheckpointReader, *, of_tower: bool = False) -> Weights:
        spec = self.spec
        return Weights(
            reader,
            spec.tower_scheme if of_tower else spec.scheme,
            spec.dtype,
            spec.device,
            share=replace(spec.share, stage=None) if of_tower else spec.share,
            arena=self._arena,
            computed=None if of_tower else self.formats,
            parameters=self.parameters,
        )

    def _read_tower(self, checkpoint: CheckpointReader) -> VisionTower | AudioTower:
        config, weights = self.spec.config, self._weights(checkpoint, of_tower=True)
        if config.audio is not None:
            return AudioTower.read(weights, config.audio)
        assert config.vision is not None
        return VisionTower.read(weights, config.vision)


def open_checkpoint(
    model_dir: Path,
    progress: Progress | None = None,
    unused: Callable[[str], bool] = lambda name: False,
    *,
    is_outline: bool = False,
) -> Checkpoint | GgufFile:
    """The weights of a model's directory, whatever files they are in. `unused` and `is_outline` are
    as in `Checkpoint`. Raises ModelError if the files are missing or malformed, or have no outline.
    """
    if weight_files(model_dir)[0].name != GGUF_FILE:
        return Checkpoint(model_dir, progress, unused, is_outline=is_outline)
    if is_outline:
        raise ModelError("a GGUF file cannot be laid out without reading it")
    return GgufFile(model_dir, progress)


class _SkipMetaChecks(TorchFunctionMode):
    """A context in which checks of numbers pass on the meta device, whose tensors have none: all
    entries fulfil a condition, no entry breaks one, two tensors are equal, and a single number
    is 1.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and args[0].is_meta:
            return answer()
        return func(*args, **(kwargs or {}))


_ANSWERS: dict[Callable[..., Any], Callable[[], Any]] = {
    torch.Tensor.all: lambda: torch.tensor(True),
    torch.Tensor.any: lambda: torch.tensor(False),
    torch.equal: lambda: True,
    torch.Tensor.item: lambda: 1.0,
    torch.Tensor.__float__: lambda: 1.0,
}
