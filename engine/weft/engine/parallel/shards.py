"""The share of a model and of its pages that each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.pooling import load_pooling
from weft.checkpoint.recurrent_config import (
    GatedDeltaConfig,
    Mamba2Config,
    ShortConvConfig,
)
from weft.checkpoint.transformers_config import TransformersConfig
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout, PageGroup

DIVIDED = frozenset(
    {
        "AfmoeForCausalLM",
        "ArceeForCausalLM",
        "Cohere2ForCausalLM",
        "CodeGenForCausalLM",
        "Cohere2MoeForCausalLM",
        "FlintForCausalLM",
        "SarvamMoEForCausalLM",
        "XGLMForCausalLM",
        "CohereForCausalLM",
        "CwmForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Dots1ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoeForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HYV3ForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "InternLM3ForCausalLM",
        "InternVLForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        "LagunaForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "MellumForCausalLM",
        "MiMoForCausalLM",
        "MiniCPMForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "PaddleOCRVLForConditionalGeneration",
        "Phi3ForCausalLM",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SolarOpenForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "SmolVLMForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "Step3p7ForConditionalGeneration",
        "VaultGemmaForCausalLM",
        "VoxtralForConditionalGeneration",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "ApertusForCausalLM",
        "FalconForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoForCausalLM",
        "GPTNeoXForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "Jais2ForCausalLM",
        "OPTForCausalLM",
        "OlmoForCausalLM",
        "PhiForCausalLM",
        "PhimoeForCausalLM",
        "PhiMoEForCausalLM",
        "BambaForCausalLM",
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Lfm3ForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Architectures that can be divided among ranks; tests compare them with one rank."""

_ON_CPUS = "Gemma4"
"""Beginning of the architectures that no one has yet seen divided on GPUs, where several planes of
a page are not divided either.
"""

SHARED_EXPERTS = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Architectures whose experts workers can share (`attention_dp`); tests compare them with one
worker.
"""


def check_ranks(
    model_dir: Path, config: ModelConfig, task: str, size: int, ep: int, *, on_gpu: bool
) -> None:
    """Checks that ranks can serve a model.

    Args:
        task: As in `load_pooling`.
        ep: As in `check_divides`.

    Raises:
        ModelError, ConfigError: They cannot; the message says which setting to use instead.
    """
    if size == 1:
        return
    check_divides(config, size, ep)
    if on_gpu and config.architecture.startswith(_ON_CPUS):
        raise ConfigError(
            f"tp = {size}: {config.architecture} is not divided among ranks on GPUs yet; take "
            "tp = 1 or device = cpu",
            param="tp",
        )
    task = load_pooling(model_dir, task).task
    if task != "generate" and on_gpu:
        raise ConfigError(
            f"tp = {size}: the model serves the task {task}, whose vectors ranks on GPUs do not "
            "make yet; take tp = 1, device = cpu or --task generate",
            param="tp",
        )


def check_divides(config: ModelConfig, size: int, ep: int = 1) -> None:
    """Raises ConfigError if a model cannot be divided among this number of ranks; the message names
    the numbers that work.

    Args:
        ep: Number of ranks among which whole experts are divided; 1: each expert is divided.
    """
    if size == 1:
        return
    if isinstance(config, TransformersConfig):
        _check_planned(config, size, ep)
        return
    if config.architecture not in DIVIDED:
        raise ConfigError(
            f"tp = {size}: {config.architecture} is not divided among ranks yet; take tp = 1",
            param="tp",
        )
    if config.latent is not None and config.latent.q_rank is None:
        raise ConfigError(
            f"tp = {size}: {config.architecture} without a latent of its queries is not divided "
            "among ranks yet; take tp = 1",
            param="tp",
        )
    if ep > 1 and config.moe is None:
        raise ConfigError(
            f"ep = {ep}: {config.architecture} has no experts; take ep = 1", param="ep"
        )
    for name, count in _counts(config, is_ep=ep > 1).items():
        if count % size:
            raise ConfigError(f"tp = {size}: {_fix(config, name, count, ep)}", param="tp")
    for heads in _kv_heads(config):
        if heads % size and size % heads:
            raise ConfigError(f"tp = {size}: {_fix(config, 'KV heads', heads, ep)}", param="tp")


def check_divided_pages(config: ModelConfig, tp: int, size: int) -> None:
    """Raises ConfigError unless groups of `size` of the ranks would hold the same KV heads, whose
    pages they can divide; the message names the sizes that work.
    """
    if size == 1:
        return
    planes = [plane for _, planes in config.page_planes for plane in planes]
    reasons = (
        (len(planes) > 1, "its layers have KV heads of several shapes"),
        (
            any(config.window_of(number) is not None for number in config.attention_layers),
            "layers with sliding windows do not see a prefix of the pages",
        ),
    )
    for is_so, reason in reasons:
        if is_so:
            raise ConfigError(
                f"dcp = {size}: must be 1 for {config.architecture}: {reason}", param="dcp"
            )
    heads = 1 if config.latent is not None else config.num_kv_heads
    copies = max(1, tp // heads)
    if copies % size:
        good = ", ".join(str(n) for n in range(1, copies + 1) if copies % n == 0)
        held = "a latent is" if config.latent is not None else f"{heads:,} KV heads are each"
        raise ConfigError(
            f"dcp = {size}: with tp = {tp}, {held} on {copies} rank{'s' * (copies > 1)}, so dcp "
            f"can be {good}",
            param="dcp",
        )


def _check_planned(config: TransformersConfig, size: int, ep: int) -> None:
    """As `check_divides`, where transformers' plan divides the products: the model itself shows it,
    when it is loaded.
    """
    if ep > 1:
        raise ConfigError(
            f"ep = {ep}: {config.architecture} is computed by transformers' code, of which each "
            "rank has a part of every expert; take ep = 1",
            param="ep",
        )
    for name, count in (("query heads", config.num_heads), ("KV heads", config.num_kv_heads)):
        if count % size:
            raise ConfigError(
                f"tp = {size}: {config.architecture} is computed by transformers' code, and its "
                f"{count} {name} cannot be divided evenly; take a divisor of {count}",
                param="tp",
            )


def _counts(config: ModelConfig, *, is_ep: bool) -> dict[str, int]:
    """Numbers, by name, that the ranks divide equally. KV heads are not among them."""
    counts = {"query heads": config.num_heads, "columns of the MLPs": config.intermediate_size}
    moe = config.moe
    if moe is not None and is_ep:
        counts["experts"] = moe.num_experts
    elif moe is not None:
        counts["columns of an expert"] = moe.intermediate_size
    if config.decoder is not None and config.decoder.per_layer is not None:
        counts["columns of the second embedding's parts"] = config.decoder.per_layer.dim
    return counts | _recurrent_counts(config)


def _fix(config: ModelConfig, name: str, count: int, ep: int) -> str:
    sizes = range(1, config.num_heads + 1)
    good = [size for size in sizes if _divides(config, size, is_ep=ep > 1)]
    also = [] if config.moe is None else [n for n in sizes if _divides(config, n, is_ep=ep == 1)]
    other = ", ".join(map(str, sorted(set(also) - set(good))))
    parts = "" if not other else f", or with {'ep = ' if ep == 1 else 'ep = 1 and '}tp = {other}"
    return (
        f"the model's {count:,} {name} cannot be divided evenly; it can be served with tp = "
        f"{', '.join(map(str, good))}{parts}"
    )


def _divides(config: ModelConfig, size: int, *, is_ep: bool) -> bool:
    counts = _counts(config, is_ep=is_ep).values()
    fits = all(heads % size == 0 or size % heads == 0 for heads in _kv_heads(config))
    return fits and not any(count % size for count in counts)


def _kv_heads(config: ModelConfig) -> list[int]:
    """Those of each kind of layer."""
    if config.latent is not None:
        return [config.num_kv_heads]
    others = {heads for _, planes in config.page_planes for heads, _, _ in planes}
    return sorted({config.num_kv_heads, *others})


def _recurrent_counts(config: ModelConfig) -> dict[str, int]:
    """Numbers of recurrent layers that the ranks divide equally; empty for other models."""
    layer = None if config.decoder is None else config.decoder.recurrent
    if layer is None:
        return {}
    counts = {"columns of the shared expert": config.moe.shared_size} if config.moe else {}
    if isinstance(layer, GatedDeltaConfig):
        return {**counts, "key heads of gated delta nets": layer.key_heads}
    if isinstance(layer, Mamba2Config):
        return {**counts, "groups of Mamba 2 layers": layer.groups}
    if isinstance(layer, ShortConvConfig):
        return {**counts, "channels of convolutions": layer.width}
    return counts


def kv_heads_of(heads: int, rank: int, size: int) -> slice:
    """The KV heads of a rank. Several ranks share a head if there are fewer heads than ranks."""
    if heads >= size:
        share = heads // size
        return slice(rank * share, (rank + 1) * share)
    first = rank * heads // size
    return slice(first, first + 1)


def layout_of_rank(layout: CacheLayout, size: int) -> CacheLayout:
    """The layout of the pages and blocks of one of `size` ranks, which holds its KV heads of every
    plane, and its heads or channels of states.
    """

    def of_rank(group: PageGroup) -> PageGroup:
        planes = (replace(plane, heads=max(1, plane.heads // size)) for plane in group.planes)
        return replace(group, planes=tuple(planes))

    states = None if layout.states is None else layout.states.of_rank(size)
    return replace(layout, groups=tuple(map(of_rank, layout.groups)), states=states)


def num_pages_here(num_pages: int, size: int) -> int:
    """Pages of a GPU's pool, its null page included, if `size` ranks divide `num_pages`."""
    return num_pages if size == 1 else 1 + -(-num_pages // size)


def num_pages_of_all(num_pages: int, size: int) -> int:
    """Pages that `size` ranks divide if each GPU has a pool of `num_pages`, its null page
    included.
    """
    return num_pages if size == 1 else (num_pages - 1) * size


def describe_shards(
    config: ModelConfig, pids: Sequence[int], ep: int, sums: str, dcp: int = 1
) -> str:
    """The ranks and their shares in one line, for logs and status.

    Args:
        ep: As in `check_divides`.
        sums: How partial sums are added up, in words.
        dcp: Number of ranks that divide the pages of a KV head.
    """
    size, heads = len(pids), 1 if dcp > 1 and config.latent else config.num_kv_heads
    shared = f", each on {size // heads} ranks" if size > heads else ""
    mlps = f"1/{size} of the MLPs"
    if ep > 1 and config.moe is not None:
        mlps += f", {config.moe.num_experts // ep} of {config.moe.num_experts} experts"
    if dcp > 1:
        shared += f", whose pages {dcp} ranks divide"
    return (
        f"tensor parallel: {size} ranks (processes {', '.join(map(str, pids))}), each with "
        f"{config.num_heads // size} of {config.num_heads} query heads, {max(1, heads // size)} of "
        f"{heads} KV heads{shared} and {mlps}; embedding and LM head are whole on "
        f"each; sums {sums}"
    )


def describe_shared_experts(config: ModelConfig, rank: int, size: int) -> str:
    """What a worker that shares experts has, in one line, for logs and status."""
    count = 0 if config.moe is None else config.moe.num_experts
    return (
        f"data-parallel attention: worker {rank} of {size}, with {count // size} of {count} "
        "experts and all other weights; they start, drain and end together"
    )
