"""A layer that adds up a mixture of experts and an MLP."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.model.layers.mlp import PlainMLP
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.step import Step
from weft.kernels.ops.norm import AnyNorm
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.ops.stream.additions import Combine, Computed, Normed
from weft.kernels.ops.stream.reference import Stream


class DualNorm(NamedTuple):
    """Norms before and after both parts, and before the router."""

    mlp: AnyNorm
    mlp_post: AnyNorm
    experts: AnyNorm
    experts_post: AnyNorm
    router: AnyNorm


class ExpertsBesideMLP:
    """The sum of an MLP and of routed experts, each with separate norms: Gemma 4's `FeedForward`.
    It reads the stream without a norm.
    """

    def __init__(
        self, mlp: PlainMLP, experts: SparseMLP, norms: DualNorm, peers: Peers | None
    ) -> None:
        """`peers` are the ranks that have parts of both, which are summed up before their norms."""
        self._mlp, self._experts, self._norms, self._peers = mlp, experts, norms, peers

    def __call__(self, x: Normed, step: Step) -> Computed:
        norms, hidden, stream = self._norms, x.value, Stream(x.value, peers=self._peers)
        mlp = stream.computed(self._mlp(Normed(norms.mlp(hidden)), step))
        routed = self._experts(Normed(norms.experts(hidden)), step)
        assert isinstance(routed, Combine), "there are no shared experts"
        routed = routed._replace(router_x=Normed(norms.router(hidden)))
        return Computed(norms.mlp_post(mlp) + norms.experts_post(stream.computed(routed)))

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        return ExpertsBesideMLP, self._mlp.shape_key(), self._experts.shape_key()
