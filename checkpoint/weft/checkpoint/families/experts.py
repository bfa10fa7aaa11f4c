"""Reads the mixtures of experts from the configurations of families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.checkpoint.fields import Fields
from weft.checkpoint.moe_config import (
    GatingConfig,
    MoEConfig,
    RouterConfig,
    counts,
    named_counts,
    qwen_experts,
)


def qwen2_experts(config: Fields) -> MoEConfig:
    """Qwen2-MoE: a shared expert with a gate."""
    if not config.flag("qkv_bias", True):
        raise config.error("qkv_bias", "only true is supported")
    return replace(
        qwen_experts(config),
        shared_size=config.positive("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )


def flint_experts(config: Fields) -> MoEConfig:
    """Flint: sigmoids, and a shared expert without a gate."""
    dense = (0, 1) if config.get("mlp_only_layers") is None else config.indices("mlp_only_layers")
    return MoEConfig(
        **counts(config, "num_experts"),
        intermediate_size=config.positive("moe_intermediate_size"),
        norm_topk_prob=config.flag("norm_topk_prob", True),
        decoder_sparse_step=config.positive("decoder_sparse_step", 1),
        mlp_only_layers=dense,
        router=RouterConfig(scores="sigmoid", least_sum=0.0),
        shared_size=config.positive("shared_expert_intermediate_size", 1024),
    )


def mixtral_experts(config: Fields, *, shared_size: int = 0) -> MoEConfig:
    """Mixtral: the softmax is over the chosen experts. `shared_size` as in `MoEConfig`."""
    return MoEConfig(
        **counts(config, "num_local_experts"),
        intermediate_size=config.positive("intermediate_size"),
        norm_topk_prob=True,
        shared_size=shared_size,
    )


def cohere_experts(config: Fields) -> MoEConfig:
    """Cohere 2: a softmax over the chosen experts, or sigmoids. Their sum and that of the shared
    experts are added or averaged.
    """
    scores, inner = config.text("expert_selection_fn", "softmax"), "intermediate_size"
    if scores not in ("softmax", "sigmoid"):
        raise config.error("expert_selection_fn", f"{scores!r} is not supported")
    how = config.text("shared_expert_combination_strategy", "average")
    if how not in ("sum", "average"):
        raise config.error("shared_expert_combination_strategy", f"{how!r} is not supported")
    shared = config.count("num_shared_experts", 0)
    factor = 0.5 if shared and how == "average" else 1.0
    return MoEConfig(
        **counts(config, "num_experts"),
        intermediate_size=config.positive(inner),
        norm_topk_prob=scores == "softmax" or config.flag("norm_topk_prob", True),
        mlp_only_layers=_dense_layers(config, 0),
        router=RouterConfig(
            scores="sigmoid" if scores == "sigmoid" else "softmax", scale=factor, least_sum=0.0
        ),
        shared_size=shared * config.positive(inner),
        shared_factor=factor,
    )


def phi_experts(config: Fields) -> MoEConfig:
    """Phi-3.5-MoE: SparseMixer, which is for two experts."""
    chosen = counts(config, "num_local_experts")
    if chosen["num_experts_per_tok"] != 2:
        raise config.error("num_experts_per_tok", "only 2 is supported")
    return MoEConfig(
        **chosen,
        intermediate_size=config.positive("intermediate_size"),
        norm_topk_prob=False,
        router=RouterConfig(jitter=config.number("router_jitter_noise", 0.01)),
    )


def olmoe_experts(config: Fields) -> MoEConfig:
    return MoEConfig(
        **counts(config, "num_experts"),
        intermediate_size=config.positive("intermediate_size"),
        norm_topk_prob=config.flag("norm_topk_prob", False),
    )


def mellum_experts(config: Fields) -> MoEConfig:
    """Mellum 2, like Qwen3-MoE."""
    return MoEConfig(
        **named_counts(config),
        intermediate_size=config.positive("moe_intermediate_size"),
        norm_topk_prob=config.flag("norm_topk_prob", True),
        mlp_only_layers=_dense_layers(config, 0),
    )


def minimax_experts(config: Fields) -> MoEConfig:
    """MiniMax M2: sigmoids with a correction."""
    if config.text("scoring_func", "sigmoid") != "sigmoid":
        raise config.error("scoring_func", "only sigmoid is supported")
    if not config.flag("use_routing_bias", True):
        raise config.error("use_routing_bias", "only true is supported")
    if config.count("shared_intermediate_size", 0):
        raise config.error("shared_intermediate_size", "shared experts are not supported")
    return MoEConfig(
        **counts(config, "num_local_experts"),
        intermediate_size=config.positive("intermediate_size"),
        norm_topk_prob=True,
        router=RouterConfig(scores="sigmoid", has_correction=True),
    )


def gpt_oss_experts(config: Fields) -> MoEConfig:
    """gpt-oss: biases everywhere, and a limited gate."""
    gating = GatingConfig(
        alpha=config.number("swiglu_alpha", 1.702),
        limit=config.number("swiglu_limit", 7.0),
        offset=1.0,
    )
    return MoEConfig(
        **counts(config, "num_local_experts"),
        intermediate_size=config.positive("intermediate_size"),
        norm_topk_prob=True,
        router=RouterConfig(has_bias=True),
        gating=gating,
        has_expert_bias=True,
    )


def hunyuan_experts(config: Fields) -> MoEConfig:
    """Hunyuan: a shared expert of an expert's width. Files list numbers by layer."""
    width, count = config.positive("intermediate_size"), config.positive("num_experts")
    for name, value in (
        ("moe_intermediate_size", width),
        ("num_shared_expert", 1),
        ("use_mixed_mlp_moe", True),
        ("moe_layer_num_skipped", 0),
    ):
        if name in config and _by_layer(config, name) != value:
            raise config.error(name, f"only {value} is supported")
    per_token = _by_layer(config, "moe_topk")
    if not isinstance(per_token, int) or not 1 <= per_token <= count:
        raise config.error("moe_topk", f"{per_token} of {count} experts")
    return MoEConfig(
        num_experts=count,
        num_experts_per_tok=per_token,
        intermediate_size=width,
        norm_topk_prob=True,
        shared_size=width,
    )


def _by_layer(config: Fields, name: str) -> Any:
    """A value that all layers share, even if the file lists it by layer."""
    value = config.get(name)
    if not isinstance(value, list):
        return value
    if not value or any(other != value[0] for other in value):
        raise config.error(name, "layers that differ are not supported")
    return value[0]


def ernie_experts(config: Fields) -> MoEConfig:
    """ERNIE 4.5: softmaxes with a correction, shared experts, dense layers at both ends."""
    layers = config.positive("num_hidden_layers")
    interval = config.positive("moe_layer_interval", 1)
    first, last = config.count("moe_layer_start_index", 1), config.get("moe_layer_end_index")
    if not isinstance(last, int) or last < 0:
        last = layers - 1
    inner = config.positive("moe_intermediate_size")
    return MoEConfig(
        **counts(config, "moe_num_experts", "moe_k"),
        intermediate_size=inner,
        norm_topk_prob=True,
        decoder_sparse_step=interval,
        mlp_only_layers=tuple(n for n in range(layers) if not first <= n <= last),
        router=RouterConfig(has_correction=True, least_sum=config.number("moe_norm_min", 1e-12)),
        shared_size=inner * config.count("moe_num_shared_experts", 2),
    )


def llama4_experts(config: Fields) -> MoEConfig:
    """Llama 4: the sigmoid of an expert's logit scales the expert's input."""
    layers, inner = config.positive("num_hidden_layers"), config.positive("intermediate_size")
    step = config.positive("interleave_moe_layer_step", 1)
    listed = config.get("moe_layers")
    sparse = range(step - 1, layers, step) if listed is None else config.indices("moe_layers")
    return MoEConfig(
        **counts(config, "num_local_experts"),
        intermediate_size=inner,
        norm_topk_prob=False,
        mlp_only_layers=tuple(layer for layer in range(layers) if layer not in sparse),
        router=RouterConfig(scores="sigmoid", scales_input=True),
        shared_size=inner,
    )


def gemma4_experts(config: Fields) -> MoEConfig:
    """Gemma 4, in addition to the MLP of every layer: shares with a factor for each expert."""
    return MoEConfig(
        **counts(config, "num_experts", "top_k_experts"),
        intermediate_size=config.positive("moe_intermediate_size"),
        norm_topk_prob=True,
        router=RouterConfig(has_factors=True),
        activation="gelu_tanh",
        is_beside_mlp=True,
    )


def laguna_experts(config: Fields) -> MoEConfig:
    """Laguna: sigmoids of bounded logits with a correction, and a shared expert."""
    cap = config.get("moe_router_logit_softcapping")
    return MoEConfig(
        **counts(config, "num_experts"),
        intermediate_size=config.positive("moe_intermediate_size"),
        norm_topk_prob=True,
        mlp_only_layers=_dense_layers(config, 1),
        router=RouterConfig(
            scores="sigmoid",
            has_correction=True,
            scale=config.number("moe_routed_scaling_factor", 1.0),
            softcap=config.number("moe_router_logit_softcapping") if cap else None,
        ),
        shared_size=config.positive("shared_expert_intermediate_size"),
    )


def step3_experts(
    config: Fields, limits: tuple[float, ...], shared_limits: tuple[float, ...]
) -> MoEConfig:
    """Step 3.5: sigmoids with a correction, a shared expert, MLPs limited by layer."""
    if config.text("moe_router_activation", "sigmoid") != "sigmoid":
        raise config.error("moe_router_activation", "only sigmoid is supported")
    names = ("n_routed_experts", "moe_num_experts", "num_local_experts")
    count = next((name for name in names if name in config), names[0])
    chosen = "moe_top_k" if "moe_top_k" in config else "num_experts_per_tok"
    inner = config.positive("moe_intermediate_size")
    shared = "share_expert_dims" if "share_expert_dims" in config else "share_expert_dim"
    return MoEConfig(
        **counts(config, count, chosen),
        intermediate_size=inner,
        norm_topk_prob=config.flag("norm_expert_weight", True),
        mlp_only_layers=_step3_dense(config),
        router=RouterConfig(
            scores="sigmoid",
            has_correction=config.flag("use_moe_router_bias", True),
            scale=config.number("moe_router_scaling_factor", 1.0),
        ),
        shared_size=config.positive(shared, inner),
        limits=limits,
        shared_limits=shared_limits,
    )


def _step3_dense(config: Fields) -> tuple[int, ...]:
    layers, listed = config.positive("num_hidden_layers"), config.get("moe_layers_enum")
    if "mlp_layer_types" in config or listed is None:
        return _dense_layers(config, 3)
    sparse = [int(n) for n in listed.split(",")] if isinstance(listed, str) else listed
    if not isinstance(sparse, list) or any(not isinstance(n, int) for n in sparse):
        raise config.error("moe_layers_enum", "expected numbers of layers")
    return tuple(layer for layer in range(layers) if layer not in sparse)


def hy3_experts(config: Fields) -> MoEConfig:
    """Hy3: sigmoids with a correction, and a shared expert."""
    inner = config.positive("moe_intermediate_size")
    return MoEConfig(
        **named_counts(config),
        intermediate_size=inner,
        norm_topk_prob=True,
        mlp_only_layers=_dense_layers(config, 1),
        router=RouterConfig(
            scores="sigmoid",
            has_correction=True,
            scale=config.number("router_scaling_factor", 1.0),
        ),
        shared_size=inner * config.count("num_shared_experts", 1),
    )


def deepseek_v2_experts(config: Fields) -> MoEConfig:
    """DeepSeek V2: a softmax; experts may be chosen only from the groups of the best experts."""
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", f"{method!r} is not supported for this architecture")
    if config.flag("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "only false is supported for this architecture")
    _check_scoring(config, "softmax")
    groups = _groups(config) if method == "group_limited_greedy" else {}
    return _deepseek(config, 0, False, scale=config.number("routed_scaling_factor", 1.0), **groups)


def mistral4_experts(config: Fields) -> MoEConfig:
    """Mistral Small 4: a softmax; groups as in DeepSeek V3."""
    return _deepseek(
        config,
        0,
        config.flag("norm_topk_prob", True),
        summed=2,
        scale=config.number("routed_scaling_factor", 1.0),
        **_groups(config),
    )


def deepseek_v3_experts(
    config: Fields,
    *,
    num_dense: int,
    renormalises: bool = True,
    sparse: Sequence[bool] | None = None,
    scale: float = 1.0,
) -> MoEConfig:
    """DeepSeek V3, GLM-4.5 and dots: sigmoids with a correction; a group's score is the sum of its
    two best experts' scores.

    Args:
        num_dense: Default number of first layers without experts.
        renormalises: Default of whether shares add up to 1.
        sparse: Which layers have experts, if the configuration has a list of its own for that.
        scale: Default of the shares' factor.
    """
    method = config.text("topk_method", "noaux_tc")
    if method != "noaux_tc":
        raise config.error("topk_method", f"{method!r} is not supported for this architecture")
    _check_scoring(config, "sigmoid", "noaux_tc")
    return _deepseek(
        config,
        num_dense,
        config.flag("norm_topk_prob", renormalises),
        sparse,
        scores="sigmoid",
        has_correction=True,
        summed=2,
        scale=config.number("routed_scaling_factor", scale),
        **_groups(config),
    )


def lfm2_experts(config: Fields) -> MoEConfig:
    """LFM2: sigmoids, with a correction if the file says so, and dense first layers."""
    has_correction = config.flag("use_expert_bias", True)
    return MoEConfig(
        **counts(config, "num_experts"),
        intermediate_size=config.positive("moe_intermediate_size"),
        norm_topk_prob=config.flag("norm_topk_prob", True),
        mlp_only_layers=tuple(range(config.count("num_dense_layers", 2))),
        router=RouterConfig(
            scores="sigmoid",
            has_correction=has_correction,
            least_sum=1e-6,
            scale=config.number("routed_scaling_factor", 1.0),
        ),
    )


def nemotron_experts(config: Fields, dense: tuple[int, ...]) -> MoEConfig:
    """Nemotron 3: DeepSeek V3's router, experts without gates, some of which read a narrower
    stream.

    `dense`: layers without experts.
    """
    if config.flag("mlp_bias", False):
        raise config.error("mlp_bias", "is not supported with experts")
    shared = config.positive("moe_shared_expert_intermediate_size", 7688)
    return MoEConfig(
        **counts(config, "n_routed_experts"),
        intermediate_size=config.positive("moe_intermediate_size", 7688),
        norm_topk_prob=config.flag("norm_topk_prob", True),
        mlp_only_layers=dense,
        router=RouterConfig(
            scores="sigmoid",
            has_correction=True,
            summed=2,
            scale=config.number("routed_scaling_factor", 1.0),
            **_groups(config),
        ),
        shared_size=shared if config.count("n_shared_experts", 1) else 0,
        is_gated=False,
        latent_size=config.positive("moe_latent_size") if "moe_latent_size" in config else None,
    )


def ling2_experts(config: Fields) -> MoEConfig:
    """Ling 2.0, like `kimi_experts`."""
    inner = config.positive("moe_intermediate_size")
    if config.positive("moe_shared_expert_intermediate_size", inner) != inner:
        raise config.error("moe_shared_expert_intermediate_size", f"only {inner} is supported")
    return kimi_experts(config, scale=2.5)


def kimi_experts(config: Fields, *, scale: float = 2.446) -> MoEConfig:
    """Kimi Linear: like DeepSeek V3, with other names of fields. `scale`: default of the shares'
    factor.
    """
    inner = config.positive("moe_intermediate_size", 1024)
    groups, kept = (
        config.positive(name, config.positive(other, 1))
        for name, other in (("num_expert_group", "n_group"), ("topk_group", "topk_group"))
    )
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    per_token = "num_experts_per_token"
    chosen = counts(config, name, per_token if per_token in config else "num_experts_per_tok")
    if chosen["num_experts"] % groups or kept > groups:
        raise config.error(
            "num_expert_group", f"{chosen['num_experts']} experts in {groups} groups"
        )
    return MoEConfig(
        **chosen,
        intermediate_size=inner,
        norm_topk_prob=config.flag("moe_renormalize", config.flag("norm_topk_prob", True)),
        mlp_only_layers=_dense_layers(config, 1),
        router=RouterConfig(
            scores="sigmoid",
            has_correction=True,
            groups=groups,
            kept_groups=kept,
            summed=2,
            scale=config.number("routed_scaling_factor", scale),
        ),
        shared_size=inner * config.count("num_shared_experts", config.count("n_shared_experts", 1)),
    )


def _deepseek(
    config: Fields,
    num_dense: int,
    renormalise: bool,
    sparse: Sequence[bool] | None = None,
    **router: Any,
) -> MoEConfig:
    if sparse is None and config.positive("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "only 1 is supported")
    inner = config.positive("moe_intermediate_size")
    name = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
    return MoEConfig(
        **counts(config, name),
        intermediate_size=inner,
        norm_topk_prob=renormalise,
        mlp_only_layers=_dense_layers(config, num_dense)
        if sparse is None
        else tuple(layer for layer, has_experts in enumerate(sparse) if not has_experts),
        router=RouterConfig(**router),
        shared_size=inner * config.count("n_shared_experts", 0),
    )


def _dense_layers(config: Fields, default: int) -> tuple[int, ...]:
    """The first layers or, as newer configurations list them, the layers that are dense."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return tuple(range(config.count("first_k_dense_replace", default)))
    layers = config.positive("num_hidden_layers")
    further = config.count("num_nextn_predict_layers", 0)
    has_length = isinstance(kinds, list) and len(kinds) in (layers, layers + further)
    if not has_length or set(kinds) - {"dense", "sparse"}:
        raise config.error("mlp_layer_types", f"expected {layers} times dense or sparse")
    return tuple(layer for layer, kind in enumerate(kinds[:layers]) if kind == "dense")


def _check_scoring(config: Fields, only: str, *same: str) -> None:
    if config.text("scoring_func", only) not in (only, *same):
        raise config.error("scoring_func", f"only {only} is supported for this architecture")


def _groups(config: Fields) -> dict[str, Any]:
    groups, kept = config.positive("n_group", 1), config.positive("topk_group", 1)
    name = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
    count, chosen = config.positive(name), config.positive("num_experts_per_tok")
    if count % groups or not kept <= groups:
        raise config.error("n_group", f"{count} experts in {groups} groups, of which {kept} count")
    if kept * (count // groups) < chosen:
        raise config.error("topk_group", f"{kept} groups have fewer than {chosen} experts")
    return {"groups": groups, "kept_groups": kept} if groups > 1 else {}
