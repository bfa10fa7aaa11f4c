"""Types of moe."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from weft.kernels.ops.activation.spec import SILU, Gating
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.shared.formats.packed_groups import PackedExperts
from weft.kernels.shared.formats.quantised import Fp8Experts

CYCLES = 16
"""Rows after which the copies of an expert on several ranks take rows again in the same order."""


class Routing(NamedTuple):
    """The experts of each row, in ascending order, and their weights."""

    ids: torch.Tensor
    """[T, k] int32: expert ids. If this rank has a share of the experts
    (`ExpertWeights.placement`), they are places in the share, and the share's size means an expert
    of another rank.
    """
    weights: torch.Tensor
    """[T, k] float32."""


class RouterForm(NamedTuple):
    """How logits become the scores that experts are chosen by, and their shares.

    Scores are a softmax over all experts, or each expert's sigmoid. A correction takes part in the
    choice alone (auxiliary-loss-free balancing, Wang et al., arXiv 2408.15664). With groups,
    experts are chosen within the best ones (DeepSeek-V2, arXiv 2405.04434, section 2.2, and
    DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    is_sigmoid: bool = False
    correction: torch.Tensor | None = None
    """[E] float32, added to scores when experts are chosen; None: no correction."""
    groups: int = 1
    """Number of groups of consecutive experts, of equal size."""
    kept_groups: int = 1
    """Groups that a row may choose from."""
    summed: int = 1
    """Number of a group's best experts whose scores add up to the group's score: 1 or 2."""
    least_sum: float = 1e-20
    """Least divisor of shares that are normalised to a sum of 1."""
    scale: float = 1.0
    """Factor on shares."""
    scales_input: bool = False
    """Whether an expert's share scales its input instead of its result."""
    softcap: float | None = None
    """Logits become cap * tanh(logit / cap) first; None: no bound."""
    factors: torch.Tensor | None = None
    """[E] float32: one more factor on each expert's shares, or None."""
    jitter: float | None = None
    """Jitter of SparseMixer (Liu et al., arXiv 2409.12136), used without noise; None: another form.
    The best expert's share is its softmax among the experts whose logits are within twice the
    jitter of the largest, relative to it. The next expert's share is computed in the same way,
    without the experts chosen before.
    """

    @property
    def is_plain(self) -> bool:
        has_tensors = self.correction is not None or self.factors is not None
        return not has_tensors and self._replace(least_sum=1e-20) == SOFTMAX


SOFTMAX = RouterForm()
"""A softmax over all experts, of which the most likely are chosen. If shares are normalised to a
sum of 1, it equals the softmax over the chosen experts.
"""


StackedWeight: TypeAlias = torch.Tensor | Fp8Experts | PackedExperts
"""Matrices of all experts, [E, N, K]."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The MLPs of all experts of a layer, in the form that this machine multiplies fastest."""

    hidden_size: int
    inner_size: int
    dtype: torch.dtype
    w13: tuple[LinearWeight, ...]
    """Gate and up projection of each expert; none on a GPU."""
    w2: tuple[LinearWeight, ...]
    """Down projection of each expert; none on a GPU."""
    stacked: tuple[StackedWeight, StackedWeight] | None
    """Stacked weights on a GPU, [E, 2 * I, H] and [E, H, I]; None on a CPU."""
    native: tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]] | None
    """Addresses of `w13` and `w2` for native operations; None if the weights are not in native
    form.
    """
    is_fixed: bool = False
    """Whether a row's result is independent of the step's other rows on a GPU too."""
    gating: Gating = SILU
    """How gate and up become the input of the down projection."""
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    """Stacked biases on a GPU, [E, 2 * I] and [E, H], dtype of the layer; None: there are none, or
    `w13` and `w2` hold them.
    """
    placement: torch.Tensor | None = None
    """[experts of all ranks] int32: each expert's place on this rank, or E if another rank has it.
    If several ranks may have the same expert [CYCLES, experts of all ranks]: that of rows with each
    number modulo CYCLES. None: this rank has all experts, in their order.
    """

    @classmethod
    def of_stacks(
        cls,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        is_fixed: bool,
        gating: Gating,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        placement: torch.Tensor | None,
    ) -> ExpertWeights:
        """Experts in floats on a GPU: [E, 2 * I, H] and [E, H, I]."""
        _, hidden, inner = down.shape
        stacked, dtype = (gate_up, down), down.dtype
        return cls(
            *(hidden, inner, dtype, (), (), stacked, None, is_fixed, gating, biases, placement)
        )

    @property
    def num_experts(self) -> int:
        return len(self.w13) if self.stacked is None else self.stacked[0].shape[0]

    @property
    def num_places(self) -> int:
        """Number of places that a `Routing` may name: one for each expert and, if this rank has a
        share, one more for all experts of other ranks.
        """
        return self.num_experts + (self.placement is not None)


class ExpertExchange(Protocol):
    """Processes that each have some of the experts, and rows that the others do not have."""

    def __call__(
        self, x: torch.Tensor, routing: Routing, w: ExpertWeights, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """As `weft.kernels.ops.moe.moe`, with the experts of all processes. All of them make the
        same calls in the same order, each with its rows.

        Args:
            routing: Experts by their numbers among all processes.
            w: This process's experts.
        """
        ...


@dataclass(frozen=True, slots=True)
class SparseMlpWeight:
    """Parameters of a mixture of experts."""

    router: LinearWeight
    """[E, H]."""
    experts: ExpertWeights
    top_k: int
    renormalise: bool
    """Whether the shares of a row's experts are normalised to a sum of 1."""
    form: RouterForm = SOFTMAX
    exchange: ExpertExchange | None = None
    """Computes the experts together with other processes; None: those are here that are needed."""


class ExpertParts(NamedTuple):
    """All parts of experts other than their matrices."""

    gating: Gating = SILU
    """How gate and up become the input of the down projection."""
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    """[E, 2 * I], gate first, and [E, H]; None: there are none."""
    placement: torch.Tensor | None = None
    """As `ExpertWeights.placement`."""

    @property
    def gate_up_bias(self) -> torch.Tensor | None:
        """[E, 2 * I]."""
        return None if self.biases is None else self.biases[0]

    @property
    def down_bias(self) -> torch.Tensor | None:
        """[E, H]."""
        return None if self.biases is None else self.biases[1]

    @property
    def is_share(self) -> bool:
        """Whether other ranks have further experts."""
        return self.placement is not None

    def num_routed(self, experts: int) -> int:
        """Number of experts on all ranks, of which `experts` are here."""
        return experts if self.placement is None else self.placement.shape[-1]


class SharedExpert(NamedTuple):
    """An expert that takes every row. It has the routed experts' dtype and inner size, and no
    biases.

    Its share is the sigmoid of the product of the row and `gate`.
    """

    gate_up: torch.Tensor
    """[2 * I, H], rows of gate first."""
    down: torch.Tensor
    """[H, I]."""
    gate: torch.Tensor
    """[1, H]."""


PLAIN_EXPERTS = ExpertParts()
"""silu(gate) * up, without biases."""
