"""Mixtures of experts without gates: the feed-forward blocks of Nemotron 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.engine.model.layers.layer import shape_of
from weft.engine.model.layers.mlp import down_spec, up_spec
from weft.engine.model.layers.moe import router_form
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.activation import activate
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.moe import route
from weft.kernels.ops.moe.spec import RouterForm
from weft.kernels.ops.plain_experts import are_stacked, plain_experts, stack_experts
from weft.kernels.ops.plain_experts.spec import PlainExperts
from weft.kernels.ops.stream.additions import Computed, Normed, Sum

_LATENT = ("fc1_latent_proj", "fc2_latent_proj")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlainSparseMLP:
    """Routed MLPs, which read the stream or a narrower projection of it, and a shared MLP: a
    `FeedForward`.
    """

    layer: int
    config: MoEConfig
    router: LinearWeight
    """[E, H]."""
    form: RouterForm
    """Form in which the router's logits become weights of experts."""
    experts: PlainExperts
    """MLPs of width H, or of the latent's width."""
    latent: tuple[LinearWeight, LinearWeight] | None
    """Projections to the experts' width and back, or None."""
    shared: tuple[LinearWeight, LinearWeight] | None
    """Up and down projection of the expert that takes all rows, or None."""

    @classmethod
    def read(
        cls, config: MoEConfig, layer: int, hidden: int, weights: Weights, names: MoENamesConfig
    ) -> PlainSparseMLP:
        width, inner = config.latent_size or hidden, config.intermediate_size

        def product(spec: LinearSpec, *below: str | int) -> LinearWeight:
            own = weights
            for name in below:
                own = own.at(name)
            return own.linear(spec)

        spec = ExpertSpec(
            num_experts=config.num_experts,
            gate_up=up_spec(width, inner),
            down=down_spec(width, inner),
        )
        if weights.expert_shard.size > 1:
            spec = spec.placed(weights.expert_shard, weights.spare_experts)
            weights.at(names.experts).skip_experts(spec)
        up, down = spec.gate_up, spec.down
        latent, shared = None, None
        if config.latent_size:
            first, second = ((hidden, width, _LATENT[0]), (width, hidden, _LATENT[1]))
            into, back = (
                LinearSpec(names=(name,), in_features=columns, rows=(rows,))
                for columns, rows, name in (first, second)
            )
            latent = product(into), product(back)
        if config.shared_size:
            shared = (
                product(up_spec(hidden, config.shared_size), names.shared),
                product(down_spec(hidden, config.shared_size), names.shared),
            )
        router = LinearSpec(names=(names.router,), in_features=hidden, rows=(config.num_experts,))
        numbers: Sequence[int] = spec.numbers
        stacked, place = None, weights.placement(spec)
        if are_stacked(weights.device):
            each = (weights.at(names.experts).at(number) for number in numbers)
            both = ((expert.matrix(up), expert.matrix(down)) for expert in each)
            stacked, numbers = stack_experts(both, spec.count), range(0)
        all_up, all_down = (
            tuple(product(part, names.experts, number) for number in numbers) for part in (up, down)
        )
        return cls(
            layer=layer,
            config=config,
            router=product(router),
            form=router_form(config, weights, names),
            experts=PlainExperts(all_up, all_down, "relu2", place, stacked),
            latent=latent,
            shared=shared,
        )

    def __call__(self, x: Normed, step: Step) -> Computed:
        config = self.config
        logits = linear(x.value, self.router, out_dtype=torch.float32)
        routing = route(
            logits,
            config.num_experts_per_tok,
            renormalise=config.norm_topk_prob,
            form=self.form,
            placement=self.experts.placement,
            record=step.record_of(self.layer),
            chosen=step.chosen_of(self.layer),
        )
        rows = x.value if self.latent is None else x.linear(self.latent[0], None)
        made = plain_experts(rows, routing, self.experts)
        if self.latent is not None:
            made = linear(made, self.latent[1])
        if self.shared is None:
            return Computed(made, is_partial=True)
        inner = activate(x.linear(self.shared[0], None), "relu2", is_gated=False)
        return Computed(Sum(inner, self.shared[1], None).added_to(made), is_partial=True)

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        experts = self.experts
        inner = shape_of(experts.up[0]) if experts.stacked is None else experts.stacked[0].shape
        return PlainSparseMLP, shape_of(self.router), inner
