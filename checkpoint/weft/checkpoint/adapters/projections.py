"""The projections that adapters may change, and the device rows that they take. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.checkpoint.adapters.names import ROUTER
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.encoder_config import EncoderConfig
from weft.checkpoint.recurrent_config import (
    DeltaAttentionConfig,
    GatedDeltaConfig,
    Mamba2Config,
    MambaConfig,
    ShortConvConfig,
)
from weft.contract.errors import ConfigError

ROW_RANK = 8
"""Ranks per row (`weft.kernels.ops.lora.layout.ROW_RANK`)."""
B_COLUMNS = 16
"""Columns in a block of packed B (`weft.kernels.ops.lora.layout.B_COLUMNS`)."""
EXPERTS = "experts"
SHARED_EXPERTS = "shared_experts"
"""Experts that share one A for gate and up, and one B for down."""
EMBED_TOKENS, LM_HEAD = "embed_tokens", "lm_head"
B_SUFFIX = ".b"
WHOLE_SUFFIX = ".whole"
"""Suffix of kinds whose rows are whole matrices that replace the model's."""


class LayerShape(NamedTuple):
    """A product of one layer that adapters may change; see `Projection`."""

    kind: str
    group: str
    in_features: int
    out_features: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    name: str
    """Name of the projection's rows: its kind; `expert_gate` for `gate` of experts; with a number
    for further shapes of the same kind; `k-as-v` where K's product is V's as well.
    """
    kind: str
    """Kind in adapters: router, embed_tokens, lm_head, or one of
    `weft.checkpoint.adapters.names.DENSE_KINDS` or `RECURRENT_KINDS`.
    """
    group: str
    """The field of `weft.kernels.ops.lora.spec.LoraStep` that the projection belongs to."""
    in_features: int
    """Width of the input on one rank."""
    out_features: int
    """Width of the output on one rank."""
    column: int = 0
    """First column of the projection's results in the fused product."""
    num_layers: int
    """Layers of the model."""
    layers: tuple[int, ...] | None = None
    """Layers whose product has these sizes; None: all that have the product."""
    num_experts: int = 1
    """Experts of each layer on one rank; 1: no experts."""
    is_share: bool = False
    """Whether other ranks have further experts."""
    is_a_shared: bool = False
    """Whether all experts of a layer share one A."""
    is_b_shared: bool = False
    """Whether all experts of a layer share one B."""
    is_draft: bool = False
    """Whether the projection belongs to the draft head rather than to the model."""

    @property
    def is_expert(self) -> bool:
        """Whether A and B have separate rows, since adapters may share one of them among
        experts.
        """
        return self.num_experts > 1 or self.is_share

    @property
    def num_places(self) -> int:
        """Entries of an adapter in each layer's table: one for each expert and, if the rank has a
        share of the experts, an empty one that stands for all experts of other ranks.
        """
        return self.num_experts + self.is_share

    def rows(self, item_bytes: int) -> Mapping[str, tuple[int, int]]:
        """For each kind of row, the number of rows that a change of rank `ROW_RANK` in all layers
        takes, and the bytes of a row. `item_bytes`: bytes of an element.
        """
        # On a CPU columns are padded to whole blocks.
        columns = -(-self.out_features // B_COLUMNS) * B_COLUMNS
        a, b = (ROW_RANK * size * item_bytes for size in (self.in_features, columns))
        if not self.is_expert:
            count = self.num_layers if self.layers is None else len(self.layers)
            return {self.name: (count, a + b)}
        all_experts = self.num_layers * self.num_experts
        return {
            self.name: (self.num_layers if self.is_a_shared else all_experts, a),
            self.name + B_SUFFIX: (self.num_layers if self.is_b_shared else all_experts, b),
        }


def projections_of(
    model: ModelConfig, names: Sequence[str], num_ranks: int = 1, ep: int = 1
) -> tuple[Projection, ...]:
    """The projections of a model that adapters may change, as each rank has them.

    Args:
        names: `EngineConfig.lora_projections`.
        num_ranks: Ranks among which the model is divided.
        ep: Ranks among which whole experts are divided; 1: each expert is divided.

    Raises:
        ConfigError: The model has no projection of such a name, or cannot be divided among the
            ranks.
    """
    known = _dense(model, num_ranks)
    if not isinstance(model, EncoderConfig) and model.adapted_kinds is None:
        known |= {**_router(model), **_vocabulary(model), **_experts(model, num_ranks, ep)}
    chosen = tuple(names) or default_projections(model)
    recurrent = recurrent_shapes(model)
    if num_ranks > 1 and not recurrent.keys().isdisjoint(chosen):
        others = [name for name in _dense(model) if name not in recurrent]
        raise ConfigError(
            f"lora_projections = {', '.join(chosen)}: adapters of recurrent layers are not divided "
            f"among ranks; name some of {', '.join(others)}, or take tp = 1",
            param="lora_projections",
        )
    unknown = [name for name in chosen if name not in known]
    if unknown or {EXPERTS, SHARED_EXPERTS} <= set(chosen):
        raise ConfigError(
            f"lora_projections = {', '.join(chosen)}: this model has {', '.join(known)}, and "
            f"{EXPERTS} or {SHARED_EXPERTS} but not both",
            param="lora_projections",
        )
    if not chosen:
        raise ConfigError(
            f"enable_lora: no product of {model.architecture} is a linear module of the usual "
            "name in all layers",
            param="enable_lora",
        )
    return tuple(part for name in chosen for part in known[name])


def default_projections(model: ModelConfig) -> tuple[str, ...]:
    """The projections that adapters may change if settings name none."""
    return tuple(_dense(model))


def recurrent_shapes(model: ModelConfig) -> dict[str, tuple[str, int, int, int]]:
    """For each projection of a model's recurrent layers that adapters may change: group, sizes (in,
    out) and first column.
    """
    layer = None if model.decoder is None else model.decoder.recurrent
    hidden = model.hidden_size
    if isinstance(layer, GatedDeltaConfig):
        keys, values = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim
        heads = layer.value_heads
        into: dict[str, tuple[str, int, int, int]] = {
            "in_proj_qkvz": ("state_in", hidden, 2 * (keys + values), 0),
            "in_proj_ba": ("state_gates", hidden, 2 * heads, 0),
        }
        if not layer.is_fused:
            into = {
                "in_proj_qkv": ("state_in", hidden, 2 * keys + values, 0),
                "in_proj_z": ("state_z", hidden, values, 0),
                "in_proj_b": ("state_gates", hidden, heads, 0),
                "in_proj_a": ("state_gates", hidden, heads, heads),
            }
        return {**into, "out_proj": ("state_out", values, hidden, 0)}
    if isinstance(layer, Mamba2Config):
        inner = layer.heads * layer.head_dim
        rows = 2 * (inner + layer.groups * layer.state_size) + layer.heads
    elif isinstance(layer, MambaConfig | ShortConvConfig):
        inner, rows = layer.width, (2 if isinstance(layer, MambaConfig) else 3) * layer.width
    else:
        return {}
    return {
        "in_proj": ("state_in", hidden, rows, 0),
        "out_proj": ("state_out", inner, hidden, 0),
    }


def layer_shapes(model: ModelConfig, layer: int, num_ranks: int = 1) -> dict[str, LayerShape]:
    """The dense products of a layer that adapters may change, without those in `recurrent_shapes`.
    Keys are the kinds of their columns. The numbers are those of one rank.
    """
    shapes = _mixer_shapes(model, layer, num_ranks)
    moe, decoder, hidden = model.moe, model.decoder, model.hidden_size
    if moe is None or moe.is_beside_mlp or not moe.is_sparse(layer):
        sizes = () if decoder is None else decoder.mlp.sizes
        inner = (sizes[layer] if sizes else model.intermediate_size) // num_ranks
        is_gated = decoder is None or decoder.mlp.is_gated
        if isinstance(model, EncoderConfig):
            is_gated = model.is_gated
        if is_gated:
            shapes["gate"] = LayerShape("gate", "gate_up", hidden, inner, 0)
        shapes["up"] = LayerShape("up", "gate_up", hidden, inner, inner if is_gated else 0)
        shapes["down"] = LayerShape("down", "down", inner, hidden, 0)
    return shapes


def _mixer_shapes(model: ModelConfig, layer: int, num_ranks: int) -> dict[str, LayerShape]:
    hidden, decoder = model.hidden_size, model.decoder
    mixer = None if decoder is None else decoder.layers[layer]
    if isinstance(mixer, DeltaAttentionConfig):
        width = mixer.heads * mixer.dim // num_ranks
        shapes = {
            kind: LayerShape(kind, "state_in", hidden, width, column * width)
            for column, kind in enumerate("qkv")
        }
        return {**shapes, "o": LayerShape("o", "state_out", width, hidden, 0)}
    if layer not in model.attention_layers:
        return {}
    own = None if decoder is None else decoder.attention_of(layer)
    heads = model.num_heads if own is None else own.heads or model.num_heads
    if model.latent is not None:
        width = heads * model.latent.value_dim // num_ranks
        return {"o": LayerShape("o", "o", width, hidden, 0)}
    kv_heads, dim = model.kv_shape(layer)
    value_dim = dim if own is None else own.value_dim or dim
    has_gate = own is not None and own.gate is not None and own.gate.name is None
    # Several ranks have the same KV head if there are fewer of them.
    of_q, of_kv = (2 if has_gate else 1) * heads * dim // num_ranks, max(1, kv_heads // num_ranks)
    values = "k" if own is not None and own.is_value_key else "v"
    return {
        "q": LayerShape("q", "qkv", hidden, of_q, 0),
        "k": LayerShape("k", "qkv", hidden, of_kv * dim, of_q),
        "v": LayerShape(values, "qkv", hidden, of_kv * value_dim, of_q + of_kv * dim),
        "o": LayerShape("o", "o", heads * value_dim // num_ranks, hidden, 0),
    }


def _dense(model: ModelConfig, num_ranks: int = 1) -> dict[str, tuple[Projection, ...]]:
    layers_of: dict[str, dict[LayerShape, list[int]]] = {}
    for layer in range(model.num_layers):
        for kind, shape in layer_shapes(model, layer, num_ranks).items():
            layers_of.setdefault(kind, {}).setdefault(shape, []).append(layer)
    found: dict[str, list[Projection]] = {}
    for columns, shapes in layers_of.items():
        for number, (shape, layers) in enumerate(shapes.items()):
            name = columns if shape.kind == columns else f"{shape.kind}-as-{columns}"
            found.setdefault(shape.kind, []).append(
                Projection(
                    name=f"{name}-{number}" if number else name,
                    num_layers=model.num_layers,
                    layers=tuple(layers) if len(shapes) > 1 else None,
                    **shape._asdict(),
                )
            )
    for kind, (group, in_features, out_features, column) in recurrent_shapes(model).items():
        shape = LayerShape(kind, group, in_features, out_features, column)
        found[kind] = [Projection(name=kind, num_layers=model.num_layers, **shape._asdict())]
    kinds = model.adapted_kinds
    return {kind: tuple(of) for kind, of in found.items() if kinds is None or kind in kinds}


def _router(model: ModelConfig) -> dict[str, tuple[Projection, ...]]:
    if model.moe is None:
        return {}
    part = Projection(
        name=ROUTER,
        kind=ROUTER,
        group=ROUTER,
        in_features=model.hidden_size,
        out_features=model.moe.num_experts,
        num_layers=model.num_layers,
    )
    return {ROUTER: (part,)}


def _vocabulary(model: ModelConfig) -> dict[str, tuple[Projection, ...]]:
    hidden, vocab = model.hidden_size, model.num_embeddings
    shapes = {EMBED_TOKENS: ("embed", vocab, hidden), LM_HEAD: ("lm_head", hidden, vocab)}
    return {
        name: (
            Projection(
                name=name,
                kind=name,
                group=group,
                in_features=in_features,
                out_features=out_features,
                num_layers=1,
            ),
        )
        for name, (group, in_features, out_features) in shapes.items()
    }


def _experts(model: ModelConfig, num_ranks: int, ep: int) -> dict[str, tuple[Projection, ...]]:
    moe = model.moe
    if moe is None or moe.gating is not None or moe.has_expert_bias or moe.router.scales_input:
        return {}
    hidden, inner = model.hidden_size, moe.intermediate_size
    if ep == 1:
        inner //= num_ranks
    shapes = {
        "gate": ("w13", hidden, inner, 0),
        "up": ("w13", hidden, inner, inner),
        "down": ("w2", inner, hidden, 0),
    }
    return {
        name: tuple(
            Projection(
                name=f"expert_{kind}",
                kind=kind,
                group=group,
                in_features=in_features,
                out_features=out_features,
                column=column,
                num_layers=model.num_layers,
                num_experts=moe.num_experts // ep,
                is_share=ep > 1,
                is_a_shared=name == SHARED_EXPERTS and kind != "down",
                is_b_shared=name == SHARED_EXPERTS and kind == "down",
            )
            for kind, (group, in_features, out_features, column) in shapes.items()
        )
        for name in (EXPERTS, SHARED_EXPERTS)
    }
