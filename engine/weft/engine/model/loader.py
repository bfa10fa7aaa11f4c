"""Loads a model directory into a model that is ready to run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from weft.checkpoint.architectures import load_class
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.digest import FileDigests, known_file_digests, sketch, tower_digest
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.encoder_config import EncoderConfig
from weft.checkpoint.files import Progress, weight_files
from weft.checkpoint.pooling import PoolingConfig, load_pooling, with_head_for
from weft.checkpoint.quantization import Quantization, resolve_quantization
from weft.checkpoint.transformers_config import TransformersConfig, check_trust
from weft.contract.errors import ModelError, WeftError
from weft.contract.start_work import DIGESTS, LAYING_OUT, START_WORK
from weft.engine.base.device_memory import take_at_once
from weft.engine.model.archs.bidirectional import BidirectionalDecoder
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.mtp import MtpHead
from weft.engine.model.interface import MediaEncoder, Model, ModelClass, WithClasses
from weft.engine.model.layers.moe import experts_of
from weft.engine.model.model_reader import FileTensors, ModelParts, ModelReader
from weft.engine.model.model_spec import ModelSpec
from weft.engine.model.pooled_heads import PooledHeads, read_embedding_head, read_token_heads
from weft.engine.model.refit import Refit
from weft.engine.model.stage import WHOLE, ModelShare
from weft.engine.model.weights.packed import Origin, PackedSource, PackedTensors
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.schemes.registry import scheme_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights and their digest."""

    model: Model
    config: ModelConfig
    digest: bytes
    """32 bytes over weights, configuration, dtype and quantisation: the model's part of every
    namespace.
    """
    dtype: str
    """Dtype of computation and of the KV cache; never auto."""
    weight_format: str
    """Number formats that the layers' products are computed with, joined by ` + `, that of most
    weights first.
    """
    bytes_per_weight: float
    """Mean over the layers' products, scales included."""
    quantization: Quantization | None
    """Scheme of the checkpoint, or of the load; None: floats."""
    pooling: PoolingConfig
    heads: PooledHeads
    """Heads that turn pooled hidden states into vectors."""
    mtp: MtpHead | None = None
    """The checkpoint's MTP head; None: `load_model` was called without `mtp_head`."""
    encoder: MediaEncoder | None = None
    """Makes rows of media; None: `load_model` was called without `images`."""
    refit: Refit
    packed: PackedTensors
    is_from_peer: bool = False
    """Whether the weights were copied from another worker; otherwise they were read from files."""
    tower_digest: bytes = b""
    """Names the checkpoint's image tower, whether or not it was read; empty: none is supported."""

    @property
    def described_format(self) -> str:
        """One line for the log: format of the products, its size, and the file's format."""
        file = "floats" if self.quantization is None else self.quantization.file_format
        return f"{self.weight_format}, {self.bytes_per_weight:.2f} bytes a weight; file: {file}"

    @property
    def embedding_size(self) -> int:
        return self.heads.embedding.out_features or self.config.hidden_size


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
    frees_windows: bool = False,
    task: str = "auto",
    share: ModelShare = WHOLE,
    mtp_head: bool = False,
    images: bool = False,
    max_context_tokens: int | None = None,
    trust_remote_code: bool = False,
    peer: PackedSource | None = None,
) -> LoadedModel:
    """Loads a Hugging Face directory of config.json and safetensors files, or a directory that
    `resolve_model` made for a GGUF file.

    Several threads read, fuse and pack tensors, one projection at a time. Beyond the packed model
    this needs memory for one fused projection and the threads' buffers. The files' digests are
    computed meanwhile.

    Args:
        dtype: float32, bfloat16, float16 or auto.
        progress: Called with (bytes read, total bytes) as tensors are read.
        quantization: auto (the checkpoint's own), or a format to be made at load.
        is_fixed: Whether a token's results must not depend on the step's other tokens. If that
            takes other operations, the digest differs.
        dummy: Reads only config.json and makes up the weights; for benchmarks.
        num_added_tokens: Rows of the vocabulary for tokens that adapters add.
        frees_windows: Whether layers with a sliding window have separate page groups.
        task: Task of the model, or auto.
        share: What this process reads and runs of the model.
        mtp_head: Whether to read the checkpoint's MTP head too.
        images: Whether to read the checkpoint's image tower too, whole on every rank. A number
            format that is made at load leaves it in floats.
        max_context_tokens: Longest context that is served, which decides between LongRoPE's
            factors; None: the model's.
        trust_remote_code: Whether to run modelling code of the model's directory.
        peer: A worker whose weights are copied instead of the files'. If it cannot be used, they
            are read from the files, and the log says why.

    Raises:
        ModelError: The directory is incomplete, malformed or of an unsupported kind, or has no
            supported tower although `images` is set.
        ConfigError: The dtype or the quantisation is unknown, or not supported on this device.
    """
    config = ModelConfig.load(model_dir, max_context_tokens)
    check_trust(config, trusts=trust_remote_code)
    config = replace(config, num_added_tokens=num_added_tokens, frees_windows=frees_windows)
    pooling = load_pooling(model_dir, task)
    config = with_head_for(pooling.task, config, model_dir)
    if images and config.tower is None:
        raise ModelError(
            f"{model_dir}: images are not supported for {config.architecture}; serve it without "
            "them",
            param="architectures",
        )
    build = class_of(config)
    chosen = resolve_quantization(quantization, config.quantization, device)
    dtype = resolve_dtype(dtype, device, chosen)
    spec = ModelSpec(
        config=config,
        build=build,
        quantization=chosen,
        scheme=scheme_of(chosen),
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        share=share,
        mtp_head=mtp_head,
        tower=images,
        deterministic=is_fixed,
        max_context_tokens=max_context_tokens,
    )
    loaded = None
    if dummy:
        loaded = _make_up(spec, model_dir)
    elif peer is not None:
        loaded = _copy(spec, model_dir, peer)
    if loaded is None:
        loaded = _read_files(spec, model_dir, progress)
    reader, parts, digest, packed = loaded.reader, loaded.parts, loaded.digest, loaded.packed
    model = parts.model
    if share.exchange is not None:
        assert isinstance(model, DecoderOnlyLM), "other models have no experts to be divided"
        share.exchange.layers = experts_of(model.model.layers)
    parts.name(digest)
    return LoadedModel(
        model=model,
        # What transformers computes shows its linear modules only when it is there.
        config=model.config if isinstance(config, TransformersConfig) else config,
        digest=digest,
        dtype=dtype,
        weight_format=" + ".join(reader.formats.names) or dtype,
        bytes_per_weight=reader.formats.bytes_per_weight,
        quantization=chosen,
        pooling=pooling,
        heads=_heads(model, pooling, spec.device, dummy=dummy),
        mtp=parts.mtp,
        encoder=parts.tower,
        refit=Refit(reader, parts, loaded.tensors, packed),
        packed=packed,
        is_from_peer=loaded.is_from_peer,
        tower_digest=b"" if config.tower is None else tower_digest(digest, config.tower),
    )


class _Loaded(NamedTuple):
    reader: ModelReader
    parts: ModelParts
    tensors: FileTensors
    packed: PackedTensors
    digest: bytes
    is_from_peer: bool = False


def _read_files(spec: ModelSpec, model_dir: Path, progress: Progress | None) -> _Loaded:
    reader = ModelReader(spec)
    with FileDigests(weight_files(model_dir)) as digests:
        parts, tensors = reader.read(model_dir, progress)
        try:
            with START_WORK.time(DIGESTS):
                digest = spec.digest(digests.wait())
        except OSError as error:
            raise ModelError(f"cannot read the weights in {model_dir}: {error}") from error
    origin = Origin(digest, sketch(weight_files(model_dir)))
    return _Loaded(reader, parts, tensors, reader.pack(parts, origin), digest)


def _copy(spec: ModelSpec, model_dir: Path, peer: PackedSource) -> _Loaded | None:
    """None: the worker cannot be used, and the log says why."""
    reader = ModelReader(spec)
    try:
        files = weight_files(model_dir)
        digests = known_file_digests(files)
        if digests is None and sketch(files) != peer.files:
            raise ModelError("the worker has begun with other files")
        if digests is not None and spec.digest(digests) != peer.start_digest:
            raise ModelError("the worker has begun with other files, or another number format")
        with peer.reached(spec.device):
            with START_WORK.time(LAYING_OUT):
                if spec.quantization is None:  # What a conversion frees again would leave a hole.
                    take_at_once(peer.num_bytes, spec.device)
                parts, tensors = reader.read(model_dir, is_outline=True)
                packed = reader.pack(parts, Origin(peer.start_digest, peer.files))
                peer.check(packed)
            peer.fill(packed)
    except (WeftError, RuntimeError, OSError) as error:
        logger.warning("weights are read from %s, not from a worker: %s", model_dir, error)
        return None
    return _Loaded(reader, parts, tensors, packed, peer.model_digest, is_from_peer=True)


def _make_up(spec: ModelSpec, model_dir: Path) -> _Loaded:
    reader, digest = ModelReader(spec), spec.digest(dummy=True)
    parts = reader.construct(RandomWeights(spec.device), (), str(model_dir))
    packed = reader.pack(parts, Origin(digest, b""))
    return _Loaded(reader, parts, FileTensors(), packed, digest)


def check_weights(
    model_dir: Path,
    quantization: str = "auto",
    task: str = "auto",
    *,
    trust_remote_code: bool = False,
) -> None:
    """Compares names and shapes of a directory's tensors with its configuration as `load_model`
    does, with a model and, where it is supported, an image tower on the meta device. It reads
    little beyond the files' headers. Raises what `load_model` raises.
    """
    config, pooling = ModelConfig.load(model_dir), load_pooling(model_dir, task)
    check_trust(config, trusts=trust_remote_code)
    config = with_head_for(pooling.task, config, model_dir)
    chosen = resolve_quantization(quantization, config.quantization)
    spec = ModelSpec(
        config=config,
        build=class_of(config),
        quantization=chosen,
        scheme=scheme_of(chosen),
        dtype=getattr(torch, resolve_dtype("auto", quantization=chosen)),
        device=torch.device("meta"),
        tower=config.tower is not None,
    )
    parts, _ = ModelReader(spec).read(model_dir)
    _heads(parts.model, pooling, torch.device("cpu"))


def class_of(config: ModelConfig) -> ModelClass:
    """The class that implements a configuration. Raises ModelError if there is no such
    architecture, or its module cannot be imported.
    """
    if config.is_encoder and not isinstance(config, EncoderConfig):
        return BidirectionalDecoder
    if isinstance(config, TransformersConfig):
        # Imported on this path alone: transformers takes seconds.
        from weft.engine.model.archs.by_transformers.model import TransformersModel

        return TransformersModel
    return cast(ModelClass, load_class(config.architecture))


def _heads(
    model: Model, pooling: PoolingConfig, device: torch.device, *, dummy: bool = False
) -> PooledHeads:
    classes = model.classes if isinstance(model, WithClasses) else None
    return PooledHeads(
        read_embedding_head(pooling, device, dummy=dummy),
        classes,
        read_token_heads(pooling, model.config.hidden_size, device, dummy=dummy),
    )
