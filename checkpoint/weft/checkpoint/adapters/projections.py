"""The projections that adapters may change, and the device rows that they take. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.checkpoint.adapters.names import ROUTER
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.encoder_config import EncoderConfig
from weft.checkpoint.recurrent_config import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    name: str
    """Name of the projection's rows; `expert_gate` for `gate` of experts."""
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
            return {self.name: (self.num_layers, a + b)}
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


def q_rows(model: ModelConfig) -> int:
    """Rows of the projection to q, which may include a gate of each head."""
    gate = None if model.decoder is None else model.decoder.attention.gate
    has_gate = gate is not None and gate.name is None
    return (2 if has_gate else 1) * model.num_heads * model.head_dim


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


def _dense(model: ModelConfig, num_ranks: int = 1) -> dict[str, tuple[Projection, ...]]:
    hidden, inner = model.hidden_size, model.intermediate_size // num_ranks
    # Several ranks have the same KV head if there are fewer of them.
    q_size = q_rows(model) // num_ranks
    kv_size = max(1, model.num_kv_heads // num_ranks) * model.head_dim
    shapes = {
        "q": ("qkv", hidden, q_size, 0),
        "k": ("qkv", hidden, kv_size, q_size),
        "v": ("qkv", hidden, kv_size, q_size + kv_size),
    }
    if model.latent is not None:
        shapes.clear()
    shapes["o"] = ("o", model.num_heads * model.value_dim // num_ranks, hidden, 0)
    moe = model.moe
    if moe is None or not all(moe.is_sparse(layer) for layer in range(model.num_layers)):
        is_gated = model.decoder is None or model.decoder.mlp.is_gated
        if isinstance(model, EncoderConfig):
            is_gated = model.is_gated
        if is_gated:
            shapes["gate"] = ("gate_up", hidden, inner, 0)
        shapes["up"] = ("gate_up", hidden, inner, inner if is_gated else 0)
        shapes["down"] = ("down", inner, hidden, 0)
    shapes |= recurrent_shapes(model)
    if model.adapted_kinds is not None:
        shapes = {kind: shape for kind, shape in shapes.items() if kind in model.adapted_kinds}
    return {
        kind: (
            Projection(
                name=kind,
                kind=kind,
                group=group,
                in_features=in_features,
                out_features=out_features,
                column=column,
                num_layers=model.num_layers,
            ),
        )
        for kind, (group, in_features, out_features, column) in shapes.items()
    }


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
