"""Configurations of mixtures of experts. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from weft.checkpoint.fields import Fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How logits become experts and shares, as in `weft.kernels.ops.moe.spec.RouterForm`."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_correction: bool = False
    """Whether the checkpoint has numbers that correct scores when experts are chosen."""
    has_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    summed: int = 1
    """Number of a group's best experts whose scores add up to the group's score."""
    least_sum: float = 1e-20
    scale: float = 1.0
    scales_input: bool = False
    """Whether an expert's share scales its input instead of its result."""
    softcap: float | None = None
    """Bound of the logits; None: there is none."""
    has_factors: bool = False
    """Whether the checkpoint has one more factor on each expert's shares."""
    jitter: float | None = None
    """Jitter of SparseMixer; None: another form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatingConfig:
    """gate * sigmoid(alpha * gate) * (up + offset), with both limited first."""

    alpha: float
    limit: float
    offset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoENamesConfig:
    """Names of a mixture's parameters in a checkpoint, below a layer's feed-forward block."""

    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    factors: str = "router.per_expert_scale"
    correction_axes: int = 0
    """Number of axes of size 1 that the correction's tensor has before the axis of experts."""
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    """Names of an expert's own gate and up projection."""
    down: str = "down_proj"
    stacked: tuple[str, ...] = ("gate_up_proj", "down_proj")
    """Names of tensors of all experts, in files that have such; gate and up may be two of them."""
    is_transposed: bool = False
    """Whether stacked tensors are [experts, columns, rows]."""
    is_interleaved: bool = False
    """Whether rows of gate and up alternate in stacked tensors."""
    experts: str = "experts"
    """Module of the experts; empty: stacked tensors are in the module that has the router."""
    shared: str = "shared_experts"
    is_shared_outside: bool = False
    """Whether the shared experts are in a module of the layer, and not of the module that has the
    router.
    """
    shared_gate: str = "shared_expert_gate"
    shared_gate_up: str | None = None
    """Module with all rows of the shared experts' gate and up; None: gate and up are separate."""
    shared_down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A mixture of experts that replaces the MLP in some layers."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Inner width of one expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are normalised to a sum of 1."""
    decoder_sparse_step: int = 1
    """Every layer whose number, counted from 1, is a multiple of this has experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Indices of layers that have one MLP nevertheless."""
    router: RouterConfig = field(default_factory=RouterConfig)
    shared_size: int = 0
    """Inner width of the experts that every token also takes; 0: none."""
    shared_factor: float = 1.0
    """Factor on the shared experts' result."""
    has_shared_gate: bool = False
    """Whether the sigmoid of a projection scales the shared experts' result."""
    gating: GatingConfig | None = None
    """How an expert combines gate and up; None: silu(gate) * up."""
    has_expert_bias: bool = False
    is_gated: bool = True
    """Whether experts have a gate; without one they are MLPs with squared ReLU."""
    latent_size: int | None = None
    """Width to which the stream is projected for the experts; None: it is not projected."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of an expert's gate where `gating` is None."""
    limits: tuple[float, ...] = ()
    """For each layer, the largest activated gate of its experts and the largest magnitude of the
    gated value; 0 or no entry: no limit.
    """
    shared_limits: tuple[float, ...] = ()
    """`limits` of the shared experts."""
    is_beside_mlp: bool = False
    """Whether layers with experts also have their MLP, each with norms of its own (Gemma 4)."""

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts; layers count from 0."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def values(self) -> Mapping[str, Any]:
        """The fields for a fingerprint. Fields that only some families use are in it only where
        they are set.
        """
        values = without_defaults(self, 6)
        if "router" in values:
            values["router"] = without_defaults(self.router, 8)
        return values


def without_defaults(record: DataclassInstance, first: int) -> dict[str, Any]:
    """A record's fields for a fingerprint: the `first` ones always, and of the others, which were
    added later, those that differ from their defaults.
    """
    values = asdict(record)
    for known in fields(record)[first:]:
        made = known.default_factory
        default = known.default if made is MISSING else made()
        if getattr(record, known.name) == default:
            del values[known.name]
    return values


def qwen_experts(config: Fields) -> MoEConfig:
    """Qwen3-MoE's."""
    return MoEConfig(
        **named_counts(config),
        intermediate_size=config.positive("moe_intermediate_size"),
        norm_topk_prob=config.flag("norm_topk_prob", False),
        decoder_sparse_step=config.positive("decoder_sparse_step", 1),
        mlp_only_layers=config.indices("mlp_only_layers"),
    )


def named_counts(config: Fields) -> dict[str, Any]:
    """`counts` of files that call the number of experts by one of two names."""
    return counts(config, "num_experts" if "num_experts" in config else "num_local_experts")


def counts(config: Fields, name: str, chosen: str = "num_experts_per_tok") -> dict[str, Any]:
    """Number of experts, and of experts for each token, by the names of their fields."""
    count, per_token = config.positive(name), config.positive(chosen)
    if per_token > count:
        raise config.error(chosen, f"{per_token} of {count} experts")
    return {"num_experts": count, "num_experts_per_tok": per_token}
