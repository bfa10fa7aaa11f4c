"""The sparse feed-forward part of a decoder layer: a router and its experts."""

from __future__ import annotations

from weft.engine.checkpoint.config import MoEConfig
from weft.engine.model.layers.layer import shape_of
from weft.engine.model.layers.mlp import down_spec, gate_up_spec
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.lora import LoraStep
from weft.kernels.moe import SparseMlpWeight
from weft.kernels.stream import Combine, Normed


class SparseMLP:
    """A mixture of experts, routed gated MLPs weighted by the router: a `FeedForward`."""

    def __init__(self, layer: int, weight: SparseMlpWeight) -> None:
        """Takes all parameters of the block of a layer (its index)."""
        self.layer = layer
        self.weight = weight

    @classmethod
    def read(cls, config: MoEConfig, layer: int, hidden: int, weights: Weights) -> SparseMLP:
        """Reads the router and all experts.

        Args:
            config: Counts and sizes.
            layer: The layer's index.
            hidden: Width of the stream.
            weights: Parameters of the block: `gate` and `experts`.
        """
        router = LinearSpec(names=("gate",), in_features=hidden, rows=(config.num_experts,))
        experts = ExpertSpec(
            num_experts=config.num_experts,
            gate_up=gate_up_spec(hidden, config.intermediate_size),
            down=down_spec(hidden, config.intermediate_size),
        )
        weight = SparseMlpWeight(
            weights.linear(router),
            weights.at("experts").experts(experts),
            config.num_experts_per_tok,
            config.norm_topk_prob,
        )
        return cls(layer, weight)

    def __call__(self, x: Normed, step: Step) -> Combine:
        """See `FeedForward`."""
        return Combine(x, self.weight, step.lora, self.layer)

    def folds(self, rows: int, lora: LoraStep | None) -> bool:
        """See `Mixer.folds`: the router needs the norm's result."""
        return False

    def shape_key(self) -> object:
        """See `Mixer.shape_key`."""
        w, experts = self.weight, self.weight.experts
        return SparseMLP, shape_of(w.router), experts.inner_size, experts.dtype, w.top_k
