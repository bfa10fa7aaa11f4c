"""Refuses combinations of settings and a model that no engine runs, as far as the settings and the
model's configuration files show them. Imports no torch: `weft up` asks before it starts a worker,
the engine before it loads weights.
"""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.audio_config import fits_pages
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.eagle3_config import load_head_config
from weft.checkpoint.eagle_config import head_kind
from weft.checkpoint.kv_formats import check_kv_dtype
from weft.checkpoint.mtp_config import missing_head
from weft.checkpoint.pooling import PoolingConfig, load_pooling, with_head_for
from weft.checkpoint.quantization import resolve_quantization
from weft.checkpoint.recurrent_config import MambaConfig
from weft.checkpoint.transformers_config import TransformersConfig, check_trust
from weft.checkpoint.vocabularies import check_same_vocabulary
from weft.contract.errors import ConfigError, ModelError
from weft.contract.tasks import Task
from weft.engine.base.config import (
    HEAD_DRAFTERS,
    MAX_TREE_NODES,
    NEVER_SHIP_TOKENS,
    EngineConfig,
)
from weft.engine.executor.adapter_projections import adapted_projections
from weft.engine.parallel.shards import SHARED_EXPERTS, check_divided_pages, check_ranks
from weft.engine.parallel.stages import check_stages

MAX_FIXED_GROUP = 64
"""Most query heads of a KV head for deterministic attention on a GPU: a tile's rows."""
_TREE_ROWS = 1 + MAX_TREE_NODES
_VECTOR = 16
"""Most numbers that one CPU instruction of the activations' computation takes."""


def check_combination(config: EngineConfig) -> ModelConfig:
    """Refuses settings under which this model cannot be served. Returns the model's configuration.
    Raises ConfigError if settings do not go with the model; the message names one. Raises
    ModelError if the files are malformed or of an unsupported kind.
    """
    folder = config.model_dir
    model = ModelConfig.load(folder, config.max_context_tokens)
    quantization = resolve_quantization(config.quantization, model.quantization, config.device)
    dtype = resolve_dtype(config.dtype, config.device, quantization)
    pooling = load_pooling(folder, config.task)
    model = with_head_for(pooling.task, model, folder)
    check_trust(model, trusts=config.trust_remote_code)
    if isinstance(model, TransformersConfig):
        _check_transformers(config, model)
    check_ranks(folder, model, config.task, config.tp, config.ep, on_gpu=config.is_on_gpu)
    has_images, has_own_pages = config.has_tower(model), config.has_pages_by_stage
    stages = config.task, config.pp
    check_stages(folder, model, *stages, has_images=has_images, has_own_pages=has_own_pages)
    if config.cp > 1:
        _check_context(config, model)
    check_divided_pages(model, config.tp, config.dcp)
    if config.attention_dp > 1:
        _check_attention_dp(config, model, pooling.task)
    if model.decoder is not None and model.decoder.recurrent_layers:
        check_recurrent(config, model)
    _check_pages_of_ranks(config, model)
    if model.attends_to_clips:
        _check_clips(config, model)
    check_kv_dtype(config.kv_dtype, model)
    _check_drafts(config, model, pooling.task)
    if config.enable_return_routed_experts:
        _check_routes(config, model, pooling.task)
    if config.redundant_experts:
        _check_spares(config, model)
    if config.enable_lora:
        adapted_projections(config, model)
    if config.deterministic:
        _check_determinism(config, model, pooling, dtype)
    return model


def _check_attention_dp(config: EngineConfig, model: ModelConfig, task: Task) -> None:
    moe, size = model.moe, config.attention_dp
    reasons = (
        (moe is None, "it has no experts to share; take more workers instead"),
        (model.architecture not in SHARED_EXPERTS, "its experts are not shared by workers yet"),
        (
            moe is not None and moe.num_experts % size > 0,
            f"its {0 if moe is None else moe.num_experts} experts cannot be divided evenly",
        ),
        (task != "generate", f"it serves the task {task}"),
        (config.has_tower(model), "its prompts bring media; take language_model_only"),
    )
    for is_so, reason in reasons:
        if is_so:
            raise ConfigError(
                f"attention_dp = {size}: must be 1 for {model.architecture}: {reason}",
                param="attention_dp",
            )
    if config.enable_lora and any(part.is_expert for part in adapted_projections(config, model)):
        raise ConfigError(
            "lora_projections: with attention_dp adapters do not change experts, which compute "
            "rows of other workers; name projections without those of experts",
            param="lora_projections",
        )


def _check_context(config: EngineConfig, model: ModelConfig) -> None:
    parts = model.decoder
    planes = [plane for _, planes in model.page_planes for plane in planes]
    reasons = (
        (
            isinstance(model, TransformersConfig),
            "transformers' code, which is not divided, runs it",
        ),
        (
            parts is not None and bool(parts.recurrent_layers),
            "recurrent layers pass a state from token to token; take pp, which divides the layers",
        ),
        (config.has_tower(model) or model.attends_to_clips, "its prompts bring media"),
        (config.is_on_gpu and len(planes) > 1, "its layers have heads of several shapes"),
    )
    for is_so, reason in reasons:
        if is_so:
            raise ConfigError(
                f"cp = {config.cp}: must be 1 for {model.architecture}: {reason}", param="cp"
            )


def _check_transformers(config: EngineConfig, model: TransformersConfig) -> None:
    by = f"{model.architecture} is computed by transformers' code"
    if config.deterministic:
        raise ConfigError(
            f"deterministic = True: {by}, whose sums depend on a step's other tokens",
            param="deterministic",
        )


def check_recurrent(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses settings that models with recurrent layers do not support. Raises ConfigError if one
    of them is set.
    """
    is_first_mamba = model.decoder is not None and isinstance(model.decoder.recurrent, MambaConfig)
    refused = (
        ("device", config.is_on_gpu and is_first_mamba, "cpu for layers of the first Mamba"),
        (
            "max_draft_tokens",
            config.is_on_gpu and config.most_drafts >= config.page_size,
            f"below page_size = {config.page_size} on a GPU for models with recurrent layers",
        ),
        (
            "drafter",
            config.num_ranks > 1
            and config.is_on_gpu
            and config.moves_pages
            and config.drafter == "mtp",
            "none or ngram with several GPUs for models with recurrent layers whose pages leave "
            "the worker",
        ),
        (
            "drafter",
            config.drafter not in ("none", "ngram", "mtp"),
            "none, ngram or mtp for models with recurrent layers",
        ),
        (
            "deterministic",
            config.deterministic,
            "off for models with recurrent layers, whose sums depend on how prompts are cut",
        ),
    )
    for name, is_wrong, wanted in refused:
        if is_wrong:
            raise ConfigError(f"{name} = {getattr(config, name)}: must be {wanted}", param=name)


def _check_clips(config: EngineConfig, model: ModelConfig) -> None:
    refused = (
        ("page_size", not fits_pages(config.page_size), "a divisor of 64"),
        ("tp", config.tp > 1, "1"),
        ("enable_lora", config.enable_lora, "off"),
        ("quantization", config.quantization != "auto", "auto"),
        ("drafter", config.drafter != "none", "none"),
        ("deterministic", config.deterministic and config.is_on_gpu, "off on a GPU"),
    )
    for name, is_wrong, wanted in refused:
        if is_wrong:
            told = f"must be {wanted} for models that attend to clips of audio"
            raise ConfigError(f"{name} = {getattr(config, name)}: {told}", param=name)


def _check_routes(config: EngineConfig, model: ModelConfig, task: Task) -> None:
    if model.moe is None:
        raise ConfigError(
            f"enable_return_routed_experts: {model.architecture} has no experts that Weft chooses; "
            "leave it off",
            param="enable_return_routed_experts",
        )
    refused = (
        ("tp", config.tp > 1 and config.is_on_gpu, "1 on GPUs: ranks divide pages"),
        ("dcp", config.dcp > 1, "1: ranks divide pages"),
        ("pp", config.pp > 1 and config.is_on_gpu, "1 on GPUs: stages divide pages"),
        ("hosts", config.hosts > 1, "1: each host has separate pages"),
        ("draft_width", config.draft_width > 1, "1: rows of trees move between pages"),
        ("task", task != "generate", "generate"),
    )
    for name, is_wrong, wanted in refused:
        if is_wrong:
            told = f"with enable_return_routed_experts it must be {wanted}"
            raise ConfigError(f"{name} = {getattr(config, name)}: {told}", param=name)


def _check_spares(config: EngineConfig, model: ModelConfig) -> None:
    assert model.moe is not None, "checked with ep"
    most = model.moe.num_experts - model.moe.num_experts // config.ep
    if config.redundant_experts > most:
        raise ConfigError(
            f"redundant_experts = {config.redundant_experts}: at most {most}, with which each of "
            f"{config.ep} ranks has all {model.moe.num_experts} experts",
            param="redundant_experts",
        )


def _check_pages_of_ranks(config: EngineConfig, model: ModelConfig) -> None:
    planes = [plane for _, planes in model.page_planes for plane in planes]
    if not (config.is_on_gpu and config.moves_pages and len(planes) > 1):
        return
    for name, count in (("tp", config.tp), ("pp", config.pp)):
        if count > 1:
            raise ConfigError(
                f"{name} = {count}: on GPUs pages with heads of several shapes stay on their "
                f"worker; take {name} = 1, or no tiers, no KV store, --transport data and "
                f"--local-prefill-max-tokens {NEVER_SHIP_TOKENS}",
                param=name,
            )


def _check_drafts(config: EngineConfig, model: ModelConfig, task: Task) -> None:
    if config.drafter != "none" and task != "generate":
        raise ConfigError(
            f"drafter = {config.drafter}: the model serves the task {task}, which draws no "
            "tokens; leave it at none",
            param="drafter",
        )
    if config.reads_mtp and model.mtp is None:
        why = f"{model.architecture} brings none that is supported"
        raise missing_head(str(config.model_dir), why)
    if config.head_dir is not None:
        _check_head(config, config.head_dir, model)
    if config.drafter == "model" and config.draft_dir is not None:
        _check_draft_model(config, config.draft_dir, model)


def _check_head(config: EngineConfig, draft_dir: Path, model: ModelConfig) -> None:
    has_others = not model.has_equal_layers or model.is_encoder
    has_others |= model.decoder is not None and model.decoder.altup is not None
    if has_others:
        raise ModelError(
            f"draft_dir = {draft_dir}: models of {model.architecture} do not support draft heads",
            param="draft_dir",
        )
    head = load_head_config(draft_dir)
    head.check_target(model, draft_dir)
    if model.latent is not None:
        _check_head_of_latents(config, head.head_dim)
    kind = head_kind(draft_dir)
    if config.drafter in HEAD_DRAFTERS and config.drafter != kind:
        raise ConfigError(
            f"drafter = {config.drafter}: the head in {draft_dir} is for the drafter {kind}",
            param="drafter",
        )
    window = model.sliding_window
    if config.draft_width > 1 and window is not None and window.length <= _TREE_ROWS:
        raise ConfigError(
            f"draft_width = {config.draft_width}: layers of this model attend to the last "
            f"{window.length} positions alone, too few for trees of {_TREE_ROWS} rows; set 1",
            param="draft_width",
        )


def _check_head_of_latents(config: EngineConfig, head_dim: int) -> None:
    refused = (
        ("tp", config.tp > 1, "1"),
        ("pp", config.pp > 1, "1"),
        ("draft_width", config.draft_width > 1, "1"),
        ("kv_dtype", config.kv_dtype != "auto" and head_dim % 16 > 0, "auto"),
    )
    for name, is_wrong, wanted in refused:
        if is_wrong:
            told = f"must be {wanted} with a draft head beside latent attention"
            raise ConfigError(f"{name} = {getattr(config, name)}: {told}", param=name)


def _check_draft_model(config: EngineConfig, draft_dir: Path, model: ModelConfig) -> None:
    try:
        draft = ModelConfig.load(draft_dir, config.max_context_tokens)
        draft = with_head_for("generate", draft, draft_dir)
        check_same_vocabulary(draft_dir, draft, config.model_dir, model)
    except ModelError as error:
        message = f"draft_dir = {draft_dir}, which drafter = model loads: {error.message}"
        raise ModelError(message, param="draft_dir") from error
    if isinstance(draft, TransformersConfig):
        message = f"draft_dir = {draft_dir}: models that transformers computes draft nothing"
        raise ConfigError(message, param="draft_dir")
    if draft.decoder is not None and draft.decoder.recurrent_layers:
        message = f"draft_dir = {draft_dir}: models with recurrent layers draft nothing"
        raise ConfigError(message, param="draft_dir")


def _check_determinism(
    config: EngineConfig, model: ModelConfig, pooling: PoolingConfig, dtype: str
) -> None:
    on_gpu = config.is_on_gpu
    reasons = (
        (model.latent is not None, "latent attention takes another order for other steps"),
        (
            pooling.pooling == "mean" and not model.is_encoder,
            "not with the mean of a decoder's hidden states, which is summed up as prompts are cut",
        ),
        (
            not on_gpu and model.is_encoder and model.intermediate_size % _VECTOR,
            f"an encoder's intermediate_size must be a multiple of {_VECTOR}",
        ),
        (
            on_gpu and dtype == "float32",
            "products in float32 are cuBLAS's, which cuts them by their rows; take bfloat16",
        ),
        (
            on_gpu and model.most_grouped > MAX_FIXED_GROUP,
            f"attention takes at most {MAX_FIXED_GROUP} query heads of one KV head",
        ),
    )
    for is_so, reason in reasons:
        if is_so:
            raise ConfigError(f"deterministic: {reason}", param="deterministic")
