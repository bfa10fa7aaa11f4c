"""A model directory to a model that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from weft.engine.base.errors import ConfigError, ModelError
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.digest import model_digest
from weft.engine.checkpoint.dtypes import resolve_dtype
from weft.engine.checkpoint.files import Progress, weight_files
from weft.engine.checkpoint.quantization import resolve_quantization
from weft.engine.model.archs.registry import model_class
from weft.engine.model.interface import Model
from weft.engine.model.weights.checkpoint import Checkpoint, is_rotary_buffer
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.reader import CheckpointReader
from weft.engine.model.weights.schemes.registry import scheme_of
from weft.engine.model.weights.specs import Shard
from weft.engine.model.weights.weights import Weights
from weft.kernels.memory import WeightArena
from weft.kernels.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights, and what identifies them."""

    model: Model
    config: ModelConfig
    digest: bytes
    """32 bytes over weights, configuration, dtype and quantisation: the model's part of every
    namespace.
    """
    dtype: str
    """Dtype of computation and of the KV cache; never auto."""
    weight_format: str
    """Of the products' weights: the dtype, or that of the quantisation."""


def load_model(
    model_dir: Path,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    *,
    quantization: str = "auto",
    dummy: bool = False,
    is_fixed: bool = False,
    num_added_tokens: int = 0,
    peers: Peers | None = None,
) -> LoadedModel:
    """Loads a Hugging Face directory of config.json and safetensors files.

    Tensors are read by mmap, fused and packed one projection at a time: beyond the packed model
    the memory needed is that of one fused projection and of one file's pages.

    Args:
        model_dir: The directory.
        dtype: float32, bfloat16, float16 or auto (see `resolve_dtype`).
        device: A torch device.
        progress: Called with (bytes read, bytes in all) as tensors are read.
        quantization: auto (what the checkpoint has), or a format to be made at load (see
            `resolve_quantization`).
        is_fixed: A token's results do not depend on what else a step holds on a GPU either; the
            digest says so.
        dummy: Takes only config.json and makes up the weights; for benchmarks.
        num_added_tokens: See `ModelConfig.num_added_tokens`.
        peers: Ranks among which the products are divided; None: this process has them all.

    Raises:
        ModelError: The directory is incomplete, malformed or of an unsupported kind.
        ConfigError: The dtype or the quantisation does not exist, or not on this device.
    """
    config = replace(ModelConfig.load(model_dir), num_added_tokens=num_added_tokens)
    build = model_class(config.architecture)
    chosen = resolve_quantization(quantization, config.quantization, device)
    dtype = resolve_dtype(dtype, device, chosen)
    if is_fixed and chosen is not None:
        raise ConfigError(
            f"deterministic: not supported with {chosen.format} weights on a GPU",
            param="deterministic",
        )
    scheme, weight_format = scheme_of(chosen), dtype if chosen is None else chosen.format
    torch_dtype: torch.dtype = getattr(torch, dtype)
    target = torch.device(device)
    arena, computed = WeightArena(is_fixed=is_fixed), f"{dtype}-{_FIXED}" if is_fixed else dtype
    shard = Shard() if peers is None else Shard(peers.rank, peers.size)

    def weights_of(reader: CheckpointReader) -> Weights:
        return Weights(reader, scheme, torch_dtype, target, shard=shard, arena=arena, peers=peers)

    if dummy:
        model = build(config, weights_of(RandomWeights(target)))
        digest = model_digest(config, f"dummy-{computed}", (), scheme.fingerprint())
        return LoadedModel(
            model=model, config=config, digest=digest, dtype=dtype, weight_format=weight_format
        )
    with Checkpoint(
        model_dir, progress, unused=lambda name: _is_unused(name, config)
    ) as checkpoint:
        if config.tie_word_embeddings:
            checkpoint.check_alike("model.embed_tokens.weight", "lm_head.weight")
        model = build(config, weights_of(checkpoint))
        checkpoint.finish()
    try:
        digest = model_digest(config, computed, weight_files(model_dir), scheme.fingerprint())
    except OSError as error:
        raise ModelError(f"cannot read the weights in {model_dir}: {error}") from error
    return LoadedModel(
        model=model, config=config, digest=digest, dtype=dtype, weight_format=weight_format
    )


_FIXED = "fixed-3"
"""Raised with every change of the bits that operations of deterministic mode make on a GPU."""


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint's tensor has no part in inference."""
    tied_copy = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_copy or is_rotary_buffer(name)
