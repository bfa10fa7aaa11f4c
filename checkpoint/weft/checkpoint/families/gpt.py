"""GPT-2 and its kin: layer norms, biases, MLPs without gate, names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig, SlidingWindow
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.parts import AttentionConfig, MlpConfig, NamesConfig, NormConfig

_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
"""Names of fields in newer families, with GPT-2's names."""


def read_gpt2(family: Family) -> ModelConfig:
    """GPT-2: learned positions; matrices are stored by columns."""
    family = _family(family)
    fields, scale = family.fields, _scale(family)
    family.only("add_cross_attention", False)
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    layers = tuple(
        AttentionConfig(
            rope=None, scale=scale / (layer + 1 if by_layer else 1), qkv_bias=True, o_bias=True
        )
        for layer in range(family.num_layers)
    )
    return _gpt2(family, layers, NamesConfig(**_GPT2, has_transposed=True))


def read_bigcode(family: Family) -> ModelConfig:
    """StarCoder (arXiv 2305.06161) and SantaCoder: GPT-2 with one head of K and V."""
    family = _family(family)
    family.only("add_cross_attention", False)
    is_multi_query = family.fields.flag("multi_query", True)
    layer = AttentionConfig(rope=None, scale=_scale(family), qkv_bias=True, o_bias=True)
    names = NamesConfig(**_GPT2, is_qkv_by_head=not is_multi_query)
    heads = 1 if is_multi_query else family.num_heads
    return _gpt2(family, (layer,) * family.num_layers, names, kv_heads=heads)


def read_gptj(family: Family) -> ModelConfig:
    """GPT-J: adjacent pairs in a part of each head rotate, both blocks read one norm, and the LM
    head has a bias.
    """
    family = _family(family)
    dim = family.head_dim()
    turned = family.fields.positive("rotary_dim", dim)
    rope = family.rope(partial=turned / dim, is_interleaved=True)
    if rope.rotary_dim(dim) != turned:
        raise family.fields.error("rotary_dim", f"{turned} of {dim} elements is not supported")
    layer = AttentionConfig(rope=rope, scale=dim**-0.5)
    decoder = replace(
        family.decoder(layer, _norm(family), mlp=_mlp(family)), order="parallel", has_head_bias=True
    )
    names = {**_TRANSFORMER, "o": "out_proj", "up": "fc_in", "down": "fc_out"}
    return family.config(decoder, names=NamesConfig(**names), intermediate_size=_inner(family))


def read_codegen(family: Family) -> ModelConfig:
    """CodeGen (arXiv 2203.13474): GPT-J with fused rows in four parts, each with its queries,
    values and keys.
    """
    config = read_gptj(family.replaced({"rotary_dim": 64, **family.raw}))
    if config.num_heads % 4:
        raise family.whole.error("n_head", f"{config.num_heads} is no multiple of 4")
    names = replace(config.names, qkv="qkv_proj", qkv_parts=4, has_value_before_key=True)
    return replace(config, names=names)


def read_gpt_neox(family: Family) -> ModelConfig:
    """GPT-NeoX (arXiv 2204.06745), Pythia and Dolly: both blocks read the stream, through two
    norms.
    """
    family = _family(family)
    fields, dim = family.fields, family.head_dim()
    bias = fields.flag("attention_bias", True)
    rope = family.rope(
        partial=fields.number("rotary_pct", 0.25), theta=fields.number("rotary_emb_base", 1e4)
    )
    layer = AttentionConfig(rope=rope, scale=dim**-0.5, qkv_bias=bias, o_bias=bias)
    is_parallel = fields.flag("use_parallel_residual", True)
    decoder = replace(
        family.decoder(
            layer,
            NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True),
            mlp=MlpConfig(activation=family.activation("gelu"), is_gated=False, bias=True),
        ),
        order="parallel by two norms" if is_parallel else "before",
    )
    names = NamesConfig(
        bodies=("gpt_neox", ""),
        heads=("embed_out",),
        embedding="embed_in",
        last_norm="final_layer_norm",
        attention="attention",
        qkv="query_key_value",
        is_qkv_by_head=True,
        o="dense",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        constants=(".attention.bias", ".attention.masked_bias"),
    )
    return family.config(decoder, names=names)


def read_gpt_neo(family: Family) -> ModelConfig:
    """GPT-Neo: GPT-2 with windows in every other layer, and scores without a scale."""
    own = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    raw = family.raw
    usual = {name: raw[old] for old, name in own.items() if old in raw}
    family = _family(family.replaced({**raw, **usual}))
    layer = AttentionConfig(rope=None, scale=1.0, o_bias=True)
    names = {**_GPT2, "attention": "attn.attention", "qkv": None, "o": "out_proj"}
    names["constants"] = (".attn.attention.bias", ".attn.attention.masked_bias")
    length = family.fields.positive("window_size", 256)
    window = family.window(_neo_kinds(family), length=length)
    layers = (layer,) * family.num_layers
    return _gpt2(family, layers, NamesConfig(**names), window=window)


def read_falcon(family: Family) -> ModelConfig:
    """Falcon (arXiv 2311.16867), except models with ALiBi."""
    family = _family(family.replaced({"max_position_embeddings": 2048, **family.raw}))
    fields, dim, bias = family.fields, family.head_dim(), family.fields.flag("bias", False)
    if fields.flag("alibi", False):
        part = "scores that fall with the distance (ALiBi)"
        raise fields.error("alibi", f"is not supported (missing: {part})")
    is_new, is_parallel = (
        fields.flag("new_decoder_architecture", False),
        fields.flag("parallel_attn", True),
    )
    num_norms = fields.positive("num_ln_in_parallel_attn", 2 if is_new else 1)
    if num_norms > 2 or (is_new and not is_parallel) or (num_norms == 2 and not is_new):
        raise fields.error("num_ln_in_parallel_attn", f"{num_norms} norms are not supported here")
    is_by_head = is_new or not fields.flag("multi_query", True)
    heads = fields.positive("num_kv_heads", family.num_heads) if is_new else family.num_heads
    layer = AttentionConfig(rope=family.rope(), scale=dim**-0.5, qkv_bias=bias, o_bias=bias)
    order: Any = "parallel" if is_parallel else "before"
    decoder = replace(
        family.decoder(
            layer,
            _norm(family),
            mlp=MlpConfig(
                activation=family.activation("gelu", "activation"), is_gated=False, bias=bias
            ),
        ),
        order="parallel by two norms" if num_norms == 2 else order,
    )
    names = {
        **_TRANSFORMER,
        "embedding": "word_embeddings",
        "attention": "self_attention",
        "input_norm": "ln_attn" if num_norms == 2 else "input_layernorm",
        "feed_norm": "ln_mlp" if num_norms == 2 else "post_attention_layernorm",
        "qkv": "query_key_value",
        "is_qkv_by_head": is_by_head,
        "o": "dense",
        "up": "dense_h_to_4h",
        "down": "dense_4h_to_h",
    }
    return family.config(
        decoder,
        names=NamesConfig(**names),
        is_tied=True,
        kv_heads=heads if is_by_head else 1,
        intermediate_size=fields.positive("ffn_hidden_size", 4 * family.hidden_size),
    )


def read_opt(family: Family) -> ModelConfig:
    """OPT (arXiv 2205.01068): learned positions from the table's third row on."""
    family = _family(family)
    fields, bias = family.fields, family.fields.flag("enable_bias", True)
    family.only("do_layer_norm_before", True)
    family.only("_remove_final_layer_norm", False)
    family.only("word_embed_proj_dim", family.hidden_size)
    has_weight = fields.flag("layer_norm_elementwise_affine", True)
    kind: Any = "layer" if has_weight else "plain layer"
    scale = family.head_dim() ** -0.5
    layer = AttentionConfig(rope=None, scale=scale, qkv_bias=bias, o_bias=bias)
    activation = family.activation("relu", "activation_function")
    decoder = replace(
        family.decoder(
            layer,
            NormConfig(eps=1e-5, kind=kind, has_bias=has_weight),
            mlp=MlpConfig(activation=activation, is_gated=False, bias=bias),
        ),
        first_position_row=2,
    )
    names = {**_OPT, "bodies": ("model.decoder", "decoder")}
    inner = fields.positive("ffn_dim")
    return family.config(decoder, names=NamesConfig(**names), is_tied=True, intermediate_size=inner)


def read_xglm(family: Family) -> ModelConfig:
    """XGLM (arXiv 2112.10668): positions are sines and cosines, from the third row on."""
    own = {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
    }
    raw = family.raw
    usual = {name: raw[old] for name, old in own.items() if old in raw}
    family = family.replaced({**raw, **usual, "num_key_value_heads": None})
    family.only("add_cross_attention", False)
    rows = range(2, family.fields.positive("max_position_embeddings") + 2)
    for row in family.fields.token_ids("pad_token_id"):
        if row in rows:
            # transformers zeroes this row of the table.
            raise family.fields.error("pad_token_id", f"{row} is the row of a position")
    if family.hidden_size % 2 or family.hidden_size < 4:
        raise family.fields.error("d_model", "expected an even number from 4")
    fields, scale = family.fields, family.head_dim() ** -0.5
    layer = AttentionConfig(rope=None, scale=scale, qkv_bias=True, o_bias=True)
    activation = family.activation("gelu", "activation_function")
    has_factor = fields.flag("scale_embedding", True)
    decoder = replace(
        family.decoder(
            layer,
            NormConfig(eps=1e-5, kind="layer", has_bias=True),
            mlp=MlpConfig(activation=activation, is_gated=False, bias=True),
        ),
        embedding_multiplier=family.hidden_size**0.5 if has_factor else 1.0,
        first_position_row=2,
        has_sinusoids=True,
    )
    names = {**_OPT, "last_norm": "layer_norm", "constants": ("embed_positions.weights",)}
    inner = fields.positive("ffn_dim")
    return family.config(decoder, names=NamesConfig(**names), is_tied=True, intermediate_size=inner)


_OPT: Mapping[str, Any] = {
    "input_norm": "self_attn_layer_norm",
    "feed_norm": "final_layer_norm",
    "last_norm": "final_layer_norm",
    "o": "out_proj",
    "feeds": ("",),
    "up": "fc1",
    "down": "fc2",
}
_TRANSFORMER: Mapping[str, Any] = {
    "bodies": ("transformer", ""),
    "embedding": "wte",
    "layers": "h",
    "attention": "attn",
    "input_norm": "ln_1",
    "last_norm": "ln_f",
    "constants": (".attn.bias", ".attn.masked_bias"),
}
_GPT2: Mapping[str, Any] = {
    **_TRANSFORMER,
    "positions": "wpe",
    "feed_norm": "ln_2",
    "qkv": "c_attn",
    "o": "c_proj",
    "up": "c_fc",
    "down": "c_proj",
}


def _family(family: Family) -> Family:
    raw = family.raw
    usual = {name: raw[own] for name, own in _FIELDS.items() if own in raw}
    # Their own classes have no grouped heads, whatever a file says.
    return family.replaced({**raw, **usual, "num_key_value_heads": None})


def _gpt2(
    family: Family,
    layers: tuple[AttentionConfig, ...],
    names: NamesConfig,
    kv_heads: int | None = None,
    window: SlidingWindow | None = None,
) -> ModelConfig:
    decoder = replace(family.decoder(layers, _norm(family), mlp=_mlp(family)), first_position_row=0)
    inner = _inner(family)
    return family.config(
        decoder,
        names=names,
        is_tied=True,
        kv_heads=kv_heads,
        window=window,
        intermediate_size=inner,
    )


def _neo_kinds(family: Family) -> tuple[str, ...]:
    """The field lists pairs of some kinds and how often they repeat."""
    fields, words = family.fields, {"global": FULL, "local": SLIDING}
    listed = fields.get("attention_types") or [[["global", "local"], family.num_layers // 2]]
    try:
        kinds = [words[word] for some, count in listed for _ in range(count) for word in some]
    except (KeyError, TypeError, ValueError) as error:
        raise fields.error("attention_types", f"cannot be read: {listed!r}") from error
    if len(kinds) != family.num_layers:
        raise fields.error("attention_types", f"lists {len(kinds)} of {family.num_layers} layers")
    return tuple(kinds)


def _norm(family: Family) -> NormConfig:
    eps = family.fields.number("layer_norm_epsilon", 1e-5)
    return NormConfig(eps=eps, kind="layer", has_bias=True)


def _mlp(family: Family) -> MlpConfig:
    activation = family.activation("gelu_new", "activation_function")
    return MlpConfig(activation=activation, is_gated=False, bias=True)


def _inner(family: Family) -> int:
    return family.fields.positive("intermediate_size", 4 * family.hidden_size)


def _scale(family: Family) -> float:
    is_scaled = family.fields.flag("scale_attn_weights", True)
    return family.head_dim() ** -0.5 if is_scaled else 1.0
