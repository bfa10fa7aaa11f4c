"""Finds an engine's device, and describes what is slower or different on it."""

from __future__ import annotations

import logging

import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout
from weft.engine.base.config import EngineConfig
from weft.engine.base.gpus import check_device
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.encoder import Encoder
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.loader import LoadedModel
from weft.engine.sampling.device_check import device_sampler_fault
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.kernels.shared.cpu import native_cpu, native_cpu_missing

logger = logging.getLogger(__name__)


def find_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError if the configured device does not exist."""
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(
            f"device: {config.device!r} is no torch device", param="device"
        ) from error
    if device.type == "cpu":
        return device
    check_device(config.device, torch.cuda.device_count())
    if device.index is not None:
        torch.cuda.set_device(device)  # Kernels are launched on the current device of the thread.
    return torch.device("cuda", torch.cuda.current_device())


def promise_determinism(
    config: EngineConfig, loaded: LoadedModel, layout: CacheLayout, device: torch.device
) -> list[str]:
    """Describes what deterministic mode does on this machine. Raises ConfigError if here the result
    of some operation would depend on the step's other rows.
    """
    if device.type == "cuda":
        return _promise_on_gpu(config, loaded, device)
    native, group = native_cpu(), loaded.config.most_grouped
    dims = {plane.dim for pages in layout.groups for plane in pages.planes}
    if native is None:
        reason = f"it needs the native operations ({native_cpu_missing()})"
    elif loaded.config.is_encoder:
        return ["deterministic: a prompt is computed whole, each of its rows in one order"]
    elif any(dim % 8 or dim > native.max_dim for dim in dims) or group > native.max_group:
        widths = " and ".join(map(str, sorted(dims)))
        reason = f"the native attention does not take heads of {widths} in groups of {group}"
    else:
        return [
            "deterministic: the native operations compute each row in one order, whatever else a "
            "step holds; there is no slower path to take"
        ]
    raise ConfigError(f"deterministic: {reason}", param="deterministic")


def _promise_on_gpu(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> list[str]:
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        reason = f"tested from compute capability 9.0 on, {device} has {capability}"
    elif not isinstance(loaded.model, DecoderOnlyLM | DraftedModel | Encoder):
        reason = f"nothing is known of the operations of {type(loaded.model).__name__}"
    else:
        return [
            "deterministic: products and attention take one order for every step, which takes "
            "longer: bench/gpu_engine.py --deterministic measures it (docs/decisions/0024)"
        ]
    raise ConfigError(f"deterministic: {reason}", param="deterministic")


def missing_native(device: torch.device) -> list[str]:
    """Describes what is slower here because a C compiler or a permission is missing."""
    native = native_cpu()
    if device.type != "cpu" or (native is not None and not native.is_amx_refused):
        return []
    if native is not None:
        return ["the system refuses AMX: prompts and batches in bfloat16 take several times longer"]
    reason = native_cpu_missing()
    return [f"no native CPU operations ({reason}): oneDNN and PyTorch serve, several times slower"]


def slower_latents(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> list[str]:
    """Describes what would make attention to latents faster on a GPU."""
    sizes = loaded.config.latent
    if sizes is None or device.type != "cuda" or config.kv_dtype != "auto":
        return []
    from weft.kernels.ops.latent_attention.library_flash_mla import lacking

    spec = LatentSpec(loaded.config.num_heads // config.tp, sizes.kv_rank, scale=1.0)
    dim, dtype = sizes.kv_rank + sizes.rope_dim, getattr(torch, loaded.dtype)
    advice = lacking(dtype, dim, spec, config.page_size)
    return [] if advice is None else [f"attention to latents can be 3 times as fast: {advice}"]


def wider_experts(loaded: LoadedModel, device: torch.device) -> list[str]:
    """Describes experts without gates, which a GPU keeps in floats while other weights are
    quantised.
    """
    moe, made = loaded.config.moe, loaded.quantization
    if device.type != "cuda" or moe is None or moe.is_gated or made is None:
        return []
    kept = made.format
    return [f"experts without gates are kept in {loaded.dtype} on GPUs, other weights in {kept}"]


def sampling_device(
    model: ModelConfig, device: torch.device
) -> tuple[torch.device | None, list[str]]:
    """The GPU that draws tokens; None, and the reason if there is a GPU, if the host draws them."""
    if device.type != "cuda":
        return None, []
    if model.attends_to_clips:
        return None, ["tokens are drawn on the host, which alone knows the rules of time tokens"]
    fault = device_sampler_fault(model.num_embeddings, device)
    if fault is None:
        return device, []
    problem = f"tokens are drawn on the host, which takes longer: {fault}"
    logger.warning(problem)
    return None, [problem]
