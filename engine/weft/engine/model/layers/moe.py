"""The sparse feed-forward part of a decoder layer: a router, its experts and shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.engine.model.layers.layer import Layer, StackLayer, shape_of
from weft.engine.model.layers.mlp import GatedMLP, PlainMLP, down_spec, gate_up_spec
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.activation.spec import GELU_TANH, SILU, Gating, limited_silu
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.moe.spec import ExpertWeights, RouterForm, SparseMlpWeight
from weft.kernels.ops.stream.additions import Combine, Normed, SharedCombine


@dataclass(frozen=True, slots=True, eq=False)
class SparseMLP:
    """A mixture of experts: routed gated MLPs, weighted by the router. A `FeedForward`."""

    layer: int
    weight: SparseMlpWeight
    shared: GatedMLP | PlainMLP | None = None
    """The shared experts, which take every row, as one MLP; None: there are none."""
    shared_gate: LinearWeight | None = None
    """[1, H]: projection whose sigmoid multiplies the result of `shared`; None: no factor."""
    shared_factor: float = 1.0

    @classmethod
    def read(
        cls,
        config: MoEConfig,
        layer: int,
        hidden: int,
        weights: Weights,
        names: MoENamesConfig = MoENamesConfig(),  # noqa: B008 - frozen
        beside: Weights | None = None,
    ) -> SparseMLP:
        """Reads the router and all experts.

        Args:
            beside: Parameters of the layer, where the shared experts may be; None: they are in the
                block.
        """
        router = LinearSpec(
            names=(names.router,),
            in_features=hidden,
            rows=(config.num_experts,),
            bias=config.router.has_bias,
            is_gate=True,
        )
        gate_up = gate_up_spec(hidden, config.intermediate_size, names=names.gate_up)
        experts = ExpertSpec(
            num_experts=config.num_experts,
            gate_up=gate_up,
            down=down_spec(hidden, config.intermediate_size, name=names.down),
            stacked=names.stacked,
            is_transposed=names.is_transposed,
            is_interleaved=names.is_interleaved,
            bias=config.has_expert_bias,
            gating=_gating(config, layer),
        )
        weight = SparseMlpWeight(
            weights.linear(router),
            (weights.at(names.experts) if names.experts else weights).experts(experts),
            config.num_experts_per_tok,
            config.norm_topk_prob,
            router_form(config, weights, names),
            weights.exchange,
        )
        if not config.shared_size:
            return cls(layer, weight)
        around = beside if names.is_shared_outside and beside is not None else weights
        shared = _shared(config, layer, hidden, around.at(names.shared), names)
        if not config.has_shared_gate:
            return cls(layer, weight, shared, None, config.shared_factor)
        gate = LinearSpec(names=(names.shared_gate,), in_features=hidden, rows=(1,), is_gate=True)
        return cls(layer, weight, shared, weights.linear(gate))

    def __call__(self, x: Normed, step: Step) -> Combine | SharedCombine:
        record = step.record_of(self.layer)
        # Nobody counts, as a rule; a call for each layer would then cost microseconds a step.
        chosen = None if step.chosen is None else step.chosen_of(self.layer)
        routed = Combine(x, self.weight, step.lora, self.layer, record=record, chosen=chosen)
        if self.shared is None:
            return routed
        shared = self.shared.unchanged(x)
        return SharedCombine(shared, self.shared_gate, routed, self.shared_factor)

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        w, experts = self.weight, self.weight.experts
        shared = None if self.shared is None else self.shared.shape_key()
        return SparseMLP, shape_of(w.router), experts.inner_size, experts.dtype, w.top_k, shared


def experts_of(layers: Sequence[StackLayer]) -> list[ExpertWeights]:
    """The experts of the layers whose feed-forward part is such a mixture, in their order."""
    feeds = (layer.feed for layer in layers if isinstance(layer, Layer))
    return [feed.weight.experts for feed in feeds if isinstance(feed, SparseMLP)]


def _gating(config: MoEConfig, layer: int) -> Gating:
    given, limit = config.gating, config.limits[layer] if config.limits else 0.0
    if given is not None:
        return Gating(given.alpha, given.limit, given.offset)
    if limit:
        return limited_silu(limit)
    return SILU if config.activation == "silu" else GELU_TANH


def _shared(
    config: MoEConfig, layer: int, hidden: int, weights: Weights, names: MoENamesConfig
) -> GatedMLP | PlainMLP:
    limit = config.shared_limits[layer] if config.shared_limits else 0.0
    fused, size = names.shared_gate_up, config.shared_size
    if not limit:
        down_name = names.shared_down
        return GatedMLP.of_size(layer, hidden, size, weights, fused=fused, down=down_name)
    gate_up = weights.linear(gate_up_spec(hidden, size, fused=fused, is_gated=False))
    down = weights.linear(down_spec(hidden, size, name=names.shared_down))
    return PlainMLP(layer, gate_up, down, limited_silu(limit), is_gated=True)


def router_form(config: MoEConfig, weights: Weights, names: MoENamesConfig) -> RouterForm:
    router, correction = config.router, None
    if router.has_correction:
        axes = (1,) * names.correction_axes
        part = TensorSlice(names.correction, (*axes, config.num_experts))
        correction = weights.tensor(part, torch.float32).view(config.num_experts)
    factors = None
    if router.has_factors:
        part = TensorSlice(names.factors, (config.num_experts,))
        factors = weights.tensor(part, torch.float32)
    return RouterForm(
        is_sigmoid=router.scores == "sigmoid",
        correction=correction,
        groups=router.groups,
        kept_groups=router.kept_groups,
        summed=router.summed,
        least_sum=router.least_sum,
        scale=router.scale,
        scales_input=router.scales_input,
        softcap=router.softcap,
        factors=factors,
        jitter=router.jitter,
    )
