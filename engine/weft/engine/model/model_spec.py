"""Which model is read and in which form, and what that means for the tensors of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.digest import combine_digests
from weft.checkpoint.encoder_config import EncoderConfig, is_unused_of_encoder
from weft.checkpoint.mistral_params import mistral_name
from weft.checkpoint.quantization import Quantization
from weft.checkpoint.transformers_config import TransformersConfig
from weft.engine.model.interface import ModelClass
from weft.engine.model.stage import WHOLE, ModelShare
from weft.engine.model.weights.checkpoint import Checkpoint, is_rotary_buffer
from weft.engine.model.weights.computed_format import dtype_name
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.reader import CheckpointReader, Renamed, Transposed
from weft.engine.model.weights.schemes.registry import scheme_of
from weft.engine.model.weights.sent import SentTensors
from weft.engine.model.weights.weights import Scheme

_BASE = "model."
_EMBEDDING = f"{_BASE}embed_tokens.weight"
_FIXED = "fixed-3"
"""Version of deterministic mode on a GPU. Raise it when its operations give other bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model, the parts and the share of it that are read, and the form of their numbers."""

    config: ModelConfig
    build: ModelClass
    quantization: Quantization | None
    """Scheme of the checkpoint, or of the load; None: floats."""
    scheme: Scheme
    dtype: torch.dtype
    """Of computation."""
    device: torch.device
    """Meta: names and shapes are checked, and no numbers are read."""
    share: ModelShare = WHOLE
    mtp_head: bool = False
    """Whether the checkpoint's MTP head is read too."""
    tower: bool = False
    """Whether the checkpoint's tower for images or audio is read too, whole on every rank."""
    deterministic: bool = False
    """Whether a token's results must not depend on the step's other tokens."""
    max_context_tokens: int | None = None
    """As in `ModelConfig.load`."""

    @property
    def tower_scheme(self) -> Scheme:
        is_made = self.quantization is not None and self.quantization.source == "load"
        return scheme_of(None if is_made else self.quantization)

    @property
    def is_fixed(self) -> bool:
        """Whether deterministic mode takes other operations than usual."""
        # Native operations of a CPU always take one order. Encoders also use other operations.
        return self.deterministic and (self.config.is_encoder or self.device.type == "cuda")

    def digest(self, file_digests: Sequence[bytes] = (), *, dummy: bool = False) -> bytes:
        """Names the model with weights of files with these digests, with made-up ones or none."""
        computed = ("dummy-" if dummy else "") + dtype_name(self.dtype)
        computed += f"-{_FIXED}" if self.is_fixed else ""
        computed += self.share.order_of_sums if self.deterministic else ""
        scheme = self.scheme.fingerprint(self.dtype, self.device)
        return combine_digests(self.config, computed, file_digests, scheme)

    def renamed(self, checkpoint: CheckpointReader) -> CheckpointReader:
        """The tensors under the names and in the orientation that the model reads."""
        if isinstance(self.config, TransformersConfig) or isinstance(checkpoint, RandomWeights):
            return checkpoint
        reader, names = checkpoint, self.config.names
        if checkpoint.has(mistral_name(_EMBEDDING)):
            reader = Renamed(checkpoint, mistral_name)
        elif not checkpoint.has(_EMBEDDING) and checkpoint.has(_EMBEDDING.removeprefix(_BASE)):
            reader = Renamed(checkpoint, lambda name: name.removeprefix(_BASE))
        if names.has_transposed:
            layers = f".{names.layers}."
            reader = Transposed(reader, lambda name: layers in f".{name}")
        return reader

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of the files has no part in what is read."""
        config = self.config
        if isinstance(config, EncoderConfig):
            return is_unused_of_encoder(name, config)
        needs_head = config.head == "tokens" and not config.tie_word_embeddings
        unused_head = not needs_head and name in [f"{head}.weight" for head in config.names.heads]
        if unused_head or is_rotary_buffer(name):
            return True
        is_read = self._is_of_mtp_head(name) or self._is_of_tower(name)
        return config.names.is_left_out(name) and not is_read

    def left_out(self, checkpoint: Checkpoint) -> list[str]:
        """Prefixes of the parts of the files that are not read."""
        mtp = self.config.mtp if self.mtp_head else None
        return [
            prefix
            for prefix in self.config.names.left_out
            if checkpoint.has_below(prefix)
            if not (mtp is not None and mtp.has_below(prefix))
            if not self._is_of_tower(f"{prefix.removesuffix('.')}.")
        ]

    def _is_of_tower(self, name: str) -> bool:
        return self.tower and self.config.tower is not None and self.config.tower.names.has(name)

    def _is_of_mtp_head(self, name: str) -> bool:
        """Whether a tensor is read with the MTP head. Copies of the model's tensors are not."""
        mtp = self.config.mtp if self.mtp_head else None
        if mtp is None or name.startswith(tuple(f"{copy}." for copy in mtp.copies)):
            return False
        return name.startswith(mtp.prefixes)

    def own_copies(self, checkpoint: CheckpointReader) -> list[str]:
        """The MTP head's embedding and LM head, unless they are copies of the model's, as usual."""
        mtp, names = self.config.mtp, self.config.names
        if not self.mtp_head or mtp is None or not isinstance(checkpoint, Checkpoint):
            return []
        shared = (f"{names.bodies[-1]}.embed_tokens", names.heads[0])
        pairs = zip(shared, (mtp.embedding, mtp.lm_head), strict=True)
        return [
            copy
            for name, copy in pairs
            if copy is not None and not checkpoint.are_alike(f"{name}.weight", f"{copy}.weight")
        ]

    def check_tied(self, checkpoint: Checkpoint | SentTensors) -> None:
        """Raises ModelError if an LM head is not the embedding, but the configuration says so."""
        if not self.config.tie_word_embeddings:
            return
        names = self.config.names
        bodies = [f"{body}." for body in names.bodies]
        for body, head in product((*bodies, ""), names.heads):
            checkpoint.check_alike(f"{body}{names.embedding}.weight", f"{head}.weight")
