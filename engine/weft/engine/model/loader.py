"""Loads a model directory into a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.overrides import TorchFunctionMode
from weft.checkpoint.architectures import load_class
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.digest import (
    FileDigests,
    combine_digests,
    known_file_digests,
    mtp_digest,
    sketch,
    tower_digest,
)
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.encoder_config import EncoderConfig, is_unused_of_encoder
from weft.checkpoint.files import GGUF_FILE, Progress, weight_files
from weft.checkpoint.mistral_params import mistral_name
from weft.checkpoint.pooling import PoolingConfig, load_pooling, with_head_for
from weft.checkpoint.quantization import Quantization, resolve_quantization
from weft.checkpoint.transformers_config import TransformersConfig, check_trust
from weft.contract.errors import ModelError, WeftError
from weft.contract.start_work import DIGESTS, LAYING_OUT, START_WORK
from weft.engine.base.device_memory import take_at_once
from weft.engine.model.archs.bidirectional import BidirectionalDecoder
from weft.engine.model.audio.tower import AudioTower
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.mtp import MtpHead, read_mtp
from weft.engine.model.interface import MediaEncoder, Model, ModelClass, WithClasses
from weft.engine.model.layers.moe import experts_of
from weft.engine.model.pooled_heads import PooledHeads, read_embedding_head, read_token_heads
from weft.engine.model.refit import Refit, RefitSteps
from weft.engine.model.stage import Stage
from weft.engine.model.vision.tower import VisionTower
from weft.engine.model.weights.checkpoint import Checkpoint, is_rotary_buffer
from weft.engine.model.weights.computed_format import ComputedFormat
from weft.engine.model.weights.gguf_file import GgufFile
from weft.engine.model.weights.packed import Origin, PackedSource, PackedTensors
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.reader import CheckpointReader, Renamed, Transposed
from weft.engine.model.weights.refill import Parameters
from weft.engine.model.weights.schemes.registry import scheme_of
from weft.engine.model.weights.sent import KnownTensor, SentTensors
from weft.engine.model.weights.specs import Shard
from weft.engine.model.weights.weights import Scheme, Weights
from weft.engine.parallel.dispatch import ExpertDispatch
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.shared.memory import WeightArena

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
    peers: Peers | None = None,
    ep: int = 1,
    spare_experts: int = 0,
    stage: Stage | None = None,
    exchange: ExpertDispatch | None = None,
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
        peers: Ranks among which the products are divided; None: this process has the whole model.
        ep: Number of ranks among which whole experts are divided; 1: experts are divided like other
            products.
        spare_experts: Places of each rank beyond its share of whole experts.
        stage: Layers that this process reads and runs; None: all.
        exchange: Processes with other requests among which whole experts are divided; None: this
            one's `peers` are the only ones.
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
    # Ranks add up their sums in another order than one rank adds, so bits differ.
    of_ranks = f"-tp{peers.size}" if is_fixed and peers is not None else ""
    of_ranks += "-ep" if of_ranks and ep > 1 else ""
    # Native operations of a CPU always take one order. Encoders also use other operations.
    is_fixed = is_fixed and (config.is_encoder or torch.device(device).type == "cuda")
    if images and config.tower is None:
        raise ModelError(
            f"{model_dir}: images are not supported for {config.architecture}; serve it without "
            "them",
            param="architectures",
        )
    build = class_of(config)
    chosen = resolve_quantization(quantization, config.quantization, device)
    dtype = resolve_dtype(dtype, device, chosen)
    scheme = scheme_of(chosen)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    target = torch.device(device)
    fingerprint = scheme.fingerprint(torch_dtype, target)
    arena, computed = WeightArena(is_fixed=is_fixed), f"{dtype}-{_FIXED}" if is_fixed else dtype
    computed += of_ranks
    shard = Shard.among(peers)
    of_experts = shard if ep > 1 else Shard()
    if exchange is not None:
        of_experts = Shard(exchange.rank, exchange.size)
    formats, parameters = ComputedFormat(), Parameters()
    # What another stage has is on the meta device.
    elsewhere = nullcontext if stage is None else _SkipMetaChecks
    wanted, read = _Wanted(mtp_head=mtp_head, tower=images), _Read()

    def weights_of(reader: CheckpointReader, *, of_tower: bool = False) -> Weights:
        return Weights(
            reader,
            _tower_scheme(chosen) if of_tower else scheme,
            torch_dtype,
            target,
            shard=shard,
            expert_shard=of_experts,
            spare_experts=spare_experts,
            arena=arena,
            peers=peers,
            computed=None if of_tower else formats,
            parameters=parameters,
            stage=None if of_tower else stage,
            exchange=exchange,
        )

    def on_meta(reader: CheckpointReader, *, of_tower: bool = False) -> Weights:
        own = _tower_scheme(chosen) if of_tower else scheme
        return Weights(reader, own, torch_dtype, torch.device("meta"))

    def digest_of(digests: Sequence[bytes]) -> bytes:
        return combine_digests(config, computed, digests, fingerprint)

    def check(folder: Path) -> None:
        with _SkipMetaChecks():
            _read_model(folder, config, None, build, on_meta, wanted)

    def read_folder(
        folder: Path,
        progress: Progress | None,
        noted: _Read | None = None,
        *,
        is_outline: bool = False,
    ) -> _Parts:
        with elsewhere():
            return _read_model(
                folder, config, progress, build, weights_of, wanted, noted, is_outline=is_outline
            )

    def read_sent(sent: SentTensors) -> object:
        with elsewhere():
            return _read_sent(sent, config, build, weights_of, wanted, read)

    def pack(parts: _Parts) -> PackedTensors:
        numberless = combine_digests(config, computed, (), fingerprint)
        share = f"{shard}, experts {of_experts}"
        share += f" and {spare_experts}" if spare_experts else ""
        share += "" if stage is None else f", {stage.layers}"
        share += ", with a head" if stage is not None and stage.has_head else ""
        others = (peers, None if stage is None else stage.neighbours, exchange)
        return PackedTensors(parts, numberless, share, target, others)

    def copied(source: PackedSource) -> tuple[_Parts, PackedTensors] | None:
        nonlocal arena, formats, parameters, read
        try:
            files = weight_files(model_dir)
            digests = known_file_digests(files)
            if digests is None and sketch(files) != source.files:
                raise ModelError("the worker has begun with other files")
            if digests is not None and digest_of(digests) != source.start_digest:
                raise ModelError("the worker has begun with other files, or another number format")
            with source.reached(target):
                with START_WORK.time(LAYING_OUT):
                    if chosen is None:  # What a conversion frees again would leave a hole.
                        take_at_once(source.num_bytes, target)
                    parts = read_folder(model_dir, None, read, is_outline=True)
                    packed = pack(parts)
                    source.check(packed)
                source.fill(packed)
        except (WeftError, RuntimeError, OSError) as error:
            logger.warning("weights are read from %s, not from a worker: %s", model_dir, error)
            arena, formats = WeightArena(is_fixed=is_fixed), ComputedFormat()
            parameters, read = Parameters(), _Read()
            return None
        return parts, packed

    found = None if dummy or peer is None else copied(peer)
    if peer is not None and found is not None:
        (model, mtp, tower), packed = found
        digest, origin = peer.model_digest, Origin(peer.start_digest, peer.files)
    elif dummy:
        reader = RandomWeights(target)
        weights = weights_of(reader)
        with elsewhere():
            model = build(config, weights)
            mtp = read_mtp(model, weights.of_head(), (), str(model_dir)) if mtp_head else None
        tower = _read_tower(reader, config, weights_of) if images else None
        digest = combine_digests(config, f"dummy-{computed}", (), fingerprint)
        origin = Origin(digest, b"")
    else:
        with FileDigests(weight_files(model_dir)) as digests:
            model, mtp, tower = read_folder(model_dir, progress, read)
            try:
                with START_WORK.time(DIGESTS):
                    digest = digest_of(digests.wait())
            except OSError as error:
                raise ModelError(f"cannot read the weights in {model_dir}: {error}") from error
        origin = Origin(digest, sketch(weight_files(model_dir)))
    parts = _Parts(model, mtp, tower)
    if exchange is not None:
        assert isinstance(model, DecoderOnlyLM), "other models have no experts to be divided"
        exchange.layers = experts_of(model.model.layers)
    packed = pack(parts) if found is None else packed
    packed.origin = origin
    _name(parts, digest)
    steps = RefitSteps(
        lambda folder: read_folder(folder, None),
        read_sent,
        lambda folder: ModelConfig.load(folder, max_context_tokens),
        check,
        digest_of,
        lambda digest: _name(parts, digest),
    )
    return LoadedModel(
        model=model,
        # What transformers computes shows its linear modules only when it is there.
        config=model.config if isinstance(config, TransformersConfig) else config,
        digest=digest,
        dtype=dtype,
        weight_format=" + ".join(formats.names) or dtype,
        bytes_per_weight=formats.bytes_per_weight,
        quantization=chosen,
        pooling=pooling,
        heads=_heads(model, pooling, target, dummy=dummy),
        mtp=mtp,
        encoder=tower,
        refit=Refit(config, parts, parameters, steps, read.tensors, packed),
        packed=packed,
        is_from_peer=found is not None,
        tower_digest=b"" if config.tower is None else tower_digest(digest, config.tower),
    )


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
    dtype: torch.dtype = getattr(torch, resolve_dtype("auto", quantization=chosen))

    def weights_of(reader: CheckpointReader, *, of_tower: bool = False) -> Weights:
        scheme = _tower_scheme(chosen) if of_tower else scheme_of(chosen)
        return Weights(reader, scheme, dtype, torch.device("meta"))

    wanted = _Wanted(mtp_head=False, tower=config.tower is not None)
    with _SkipMetaChecks():
        model = _read_model(model_dir, config, None, class_of(config), weights_of, wanted).model
    _heads(model, pooling, torch.device("cpu"))


class _Wanted(NamedTuple):
    """Parts to read beside the language model."""

    mtp_head: bool
    tower: bool


class _Parts(NamedTuple):
    model: Model
    mtp: MtpHead | None
    tower: VisionTower | AudioTower | None


def _name(parts: _Parts, digest: bytes) -> None:
    if parts.mtp is not None:
        parts.mtp.digest = mtp_digest(digest)
    if parts.tower is not None:
        parts.tower.digest = tower_digest(digest, parts.tower.config)


class _WeightsOf(Protocol):
    def __call__(self, reader: CheckpointReader, *, of_tower: bool = False) -> Weights:
        """The parameters of the language model, or of the image tower."""


def _tower_scheme(chosen: Quantization | None) -> Scheme:
    return scheme_of(None if chosen is not None and chosen.source == "load" else chosen)


def _read_tower(
    reader: CheckpointReader, config: ModelConfig, weights_of: _WeightsOf
) -> VisionTower | AudioTower:
    weights = weights_of(reader, of_tower=True)
    if config.audio is not None:
        return AudioTower.read(weights, config.audio)
    assert config.vision is not None
    return VisionTower.read(weights, config.vision)


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


class _Read:
    """What a model's files had when it was loaded."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, KnownTensor] = {}
        """Empty: the weights were not read from safetensors."""
        self.own_copies: Sequence[str] = ()


def _read_model(
    model_dir: Path,
    config: ModelConfig,
    progress: Progress | None,
    build: ModelClass,
    weights_of: _WeightsOf,
    wanted: _Wanted,
    read: _Read | None = None,
    *,
    is_outline: bool = False,
) -> _Parts:
    def unused(name: str) -> bool:
        return _is_unused(name, config, wanted)

    with open_checkpoint(model_dir, progress, unused, is_outline=is_outline) as checkpoint:
        if isinstance(checkpoint, Checkpoint):
            _check_tied(checkpoint, config)
        own_copies = _own_copies(checkpoint, config) if wanted.mtp_head else []
        parts = _construct(checkpoint, config, build, weights_of, wanted, own_copies, model_dir)
        checkpoint.finish()
        left_out = [
            prefix
            for prefix in config.names.left_out
            if isinstance(checkpoint, Checkpoint) and checkpoint.has_below(prefix)
            if not (wanted.mtp_head and config.mtp is not None and config.mtp.has_below(prefix))
            if not (wanted.tower and _belongs_to_tower(f"{prefix.removesuffix('.')}.", config))
        ]
        if read is not None and isinstance(checkpoint, Checkpoint):
            read.tensors, read.own_copies = checkpoint.known, own_copies
    if left_out:
        served = "images and text" if wanted.tower else "text"
        logger.info("%s serves %s alone: %s left out", model_dir, served, ", ".join(left_out))
    return parts


def _read_sent(
    sent: SentTensors,
    config: ModelConfig,
    build: ModelClass,
    weights_of: _WeightsOf,
    wanted: _Wanted,
    read: _Read,
) -> _Parts:
    where = Path("what the trainer sends")
    parts = _construct(sent, config, build, weights_of, wanted, read.own_copies, where)
    sent.await_end()
    sent.finish()
    _check_tied(sent, config)
    return parts


def _check_tied(checkpoint: Checkpoint | SentTensors, config: ModelConfig) -> None:
    if not config.tie_word_embeddings:
        return
    bodies = [f"{body}." for body in config.names.bodies]
    for body, head in product((*bodies, ""), config.names.heads):
        checkpoint.check_alike(f"{body}{config.names.embedding}.weight", f"{head}.weight")


def _construct(
    checkpoint: Checkpoint | GgufFile | SentTensors,
    config: ModelConfig,
    build: ModelClass,
    weights_of: _WeightsOf,
    wanted: _Wanted,
    own_copies: Sequence[str],
    where: Path,
) -> _Parts:
    weights = weights_of(_renamed(checkpoint, config))
    model, mtp = build(config, weights), None
    if wanted.mtp_head:
        mtp = read_mtp(model, weights.of_head(), own_copies, str(where))
    tower = _read_tower(checkpoint, config, weights_of) if wanted.tower else None
    return _Parts(model, mtp, tower)


def _renamed(
    checkpoint: Checkpoint | GgufFile | SentTensors, config: ModelConfig
) -> CheckpointReader:
    """The tensors under the names and in the orientation that the model reads, whatever the files
    have.
    """
    reader: CheckpointReader = checkpoint
    if isinstance(config, TransformersConfig):
        return reader
    if checkpoint.has(mistral_name(_EMBEDDING)):
        reader = Renamed(checkpoint, mistral_name)
    elif not checkpoint.has(_EMBEDDING) and checkpoint.has(_EMBEDDING.removeprefix(_BASE)):
        reader = Renamed(checkpoint, lambda name: name.removeprefix(_BASE))
    if config.names.has_transposed:
        layers = f".{config.names.layers}."
        reader = Transposed(reader, lambda name: layers in f".{name}")
    return reader


def _heads(
    model: Model, pooling: PoolingConfig, device: torch.device, *, dummy: bool = False
) -> PooledHeads:
    classes = model.classes if isinstance(model, WithClasses) else None
    return PooledHeads(
        read_embedding_head(pooling, device, dummy=dummy),
        classes,
        read_token_heads(pooling, model.config.hidden_size, device, dummy=dummy),
    )


_BASE = "model."
_EMBEDDING = f"{_BASE}embed_tokens.weight"


def open_checkpoint(
    model_dir: Path,
    progress: Progress | None = None,
    unused: Callable[[str], bool] = lambda name: False,
    *,
    is_outline: bool = False,
) -> Checkpoint | GgufFile:
    """The weights of a model's directory, whatever files they are in.

    Args:
        progress: Called with (bytes read, total bytes) as tensors are read.
        unused: Says which tensors of safetensors have no part in inference.
        is_outline: As in `Checkpoint`.

    Raises:
        ModelError: The files are missing or malformed, or have no outline.
    """
    if weight_files(model_dir)[0].name != GGUF_FILE:
        return Checkpoint(model_dir, progress, unused, is_outline=is_outline)
    if is_outline:
        raise ModelError("a GGUF file cannot be laid out without reading it")
    return GgufFile(model_dir, progress)


_FIXED = "fixed-3"
"""Version of deterministic mode on a GPU. Raise it when its operations give other bits."""


def _is_unused(name: str, config: ModelConfig, wanted: _Wanted) -> bool:
    if isinstance(config, EncoderConfig):
        return is_unused_of_encoder(name, config)
    needs_head = config.head == "tokens" and not config.tie_word_embeddings
    unused_head = not needs_head and name in [f"{head}.weight" for head in config.names.heads]
    if unused_head or is_rotary_buffer(name):
        return True
    is_read = wanted.mtp_head and _belongs_to_head(name, config)
    is_read |= wanted.tower and _belongs_to_tower(name, config)
    return config.names.is_left_out(name) and not is_read


def _belongs_to_tower(name: str, config: ModelConfig) -> bool:
    return config.tower is not None and config.tower.names.has(name)


def _belongs_to_head(name: str, config: ModelConfig) -> bool:
    """Whether a tensor, or tensors with a prefix, are read with the MTP head. Copies of the model's
    tensors are not.
    """
    if config.mtp is None or name.startswith(tuple(f"{copy}." for copy in config.mtp.copies)):
        return False
    return name.startswith(config.mtp.prefixes)


def _own_copies(checkpoint: Checkpoint | GgufFile, config: ModelConfig) -> list[str]:
    """The MTP head's embedding and LM head, unless they are copies of the model's, as usual."""
    if not isinstance(checkpoint, Checkpoint) or config.mtp is None:
        return []
    shared = (f"{config.names.bodies[-1]}.embed_tokens", config.names.heads[0])
    pairs = zip(shared, (config.mtp.embedding, config.mtp.lm_head), strict=True)
    return [
        copy
        for name, copy in pairs
        if copy is not None and not checkpoint.are_alike(f"{name}.weight", f"{copy}.weight")
    ]
