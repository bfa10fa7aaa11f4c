"""What layers add to the residual stream, as far as they have computed it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraAddition, LoraStep, addition_to, experts_addition
from weft.kernels.ops.moe import by_pair, moe, route
from weft.kernels.ops.moe.spec import SparseMlpWeight
from weft.kernels.ops.routes import RouteRecord


class Normed:
    """The normalised stream as a layer's products read it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        """[T, H]; later additions do not change it."""

    def linear(self, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
        """[T, N]: the product with `w`, plus what adapters add."""
        return linear(self.value, w, lora=lora)

    def gate_up_silu(self, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
        """[T, I]: silu(gate) * up, with what adapters add to both."""
        return gate_up_silu(self.value, w, lora)


class Sum(NamedTuple):
    """An addition x @ weight^T + bias, [T, H], plus what adapters add to it."""

    x: torch.Tensor
    """[T, K]."""
    w: LinearWeight
    lora: LoraAddition | None

    def inner(self) -> Sum:
        """Itself: only the product remains to be computed."""
        return self

    def value(self) -> torch.Tensor:
        """[T, H]: the product, plus what adapters add."""
        return linear(self.x, self.w, lora=self.lora)

    def added_to(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, [T, H], plus this; `value` is not changed."""
        return linear(self.x, self.w, value, lora=self.lora)

    def partial(self) -> torch.Tensor:
        """[T, H] float32: this rank's part of the sum, if each rank has a part of x."""
        return linear(self.x, self.w, out_dtype=torch.float32, lora=self.lora)


class GatedSum(NamedTuple):
    """An addition down(silu(gate(x)) * up(x)) that is not computed yet."""

    x: Normed
    gate_up: LinearWeight
    """[2 * I, H], from `pack_gate_up`."""
    down: LinearWeight
    """[H, I]."""
    to_gate_up: LoraAddition | None
    to_down: LoraAddition | None

    def inner(self) -> Sum:
        """The sum that remains once silu(gate(x)) * up(x) is computed."""
        return Sum(self.x.gate_up_silu(self.gate_up, self.to_gate_up), self.down, self.to_down)

    def added_to(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner().added_to(value)

    def partial(self) -> torch.Tensor:
        return self.inner().partial()


class Combine(NamedTuple):
    """An addition of routed experts that is not computed yet."""

    x: Normed
    w: SparseMlpWeight
    lora: LoraStep | None
    layer: int
    """Index of the layer, for `lora`."""
    router_x: Normed | None = None
    """Input of the router; None: `x`."""
    record: RouteRecord | None = None
    """Where the rows' experts are written too; None: nowhere."""
    chosen: torch.Tensor | None = None
    """As in `weft.kernels.ops.moe.route`."""

    def router_logits(self) -> torch.Tensor:
        """[T, E] float32."""
        added = addition_to(self.lora, "router", self.layer)
        x = self.x if self.router_x is None else self.router_x
        logits = linear(x.value, self.w.router, out_dtype=torch.float32, lora=added)
        cap = self.w.form.softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def added_to(self, value: torch.Tensor) -> torch.Tensor:
        return self._experts(value)

    def partial(self) -> torch.Tensor:
        return self._experts(None)

    def _experts(self, residual: torch.Tensor | None) -> torch.Tensor:
        w = self.w
        routing = route(
            self.router_logits(),
            w.top_k,
            renormalise=w.renormalise,
            form=w.form,
            placement=w.experts.placement if w.exchange is None else None,
            record=self.record,
            chosen=self.chosen,
        )
        to_experts = experts_addition(self.lora, self.layer)
        if w.exchange is not None:
            assert to_experts is None, "adapters of experts are refused where processes share them"
            return w.exchange(self.x.value, routing, w.experts, residual)
        if not w.form.scales_input:
            return moe(self.x.value, routing, w.experts, residual, to_experts)
        assert to_experts is None, "adapters of experts are refused where shares scale the input"
        of_pairs = moe(*by_pair(self.x.value, routing), w.experts)
        total = of_pairs.view(-1, w.top_k, of_pairs.shape[1]).sum(dim=1)
        return total if residual is None else total.add_(residual)


class SharedCombine(NamedTuple):
    """An addition of routed experts and a shared expert, which read the same rows."""

    shared: GatedSum | Sum
    gate: LinearWeight | None
    """[1, H]: the sigmoid of its product scales the shared expert's part; None: no gate."""
    routed: Combine
    factor: float = 1.0
    """Factor on the shared expert's part."""

    def shared_sum(self) -> Sum:
        """The shared expert's part."""
        found = self.shared.inner()
        if self.factor != 1.0:
            found = found._replace(x=found.x * self.factor)
        if self.gate is None:
            return found
        weight = linear(self.routed.x.value, self.gate, out_dtype=torch.float32).sigmoid_()
        # Multiplied in float32 and rounded, by one launch on a GPU.
        return found._replace(x=torch.mul(found.x, weight, out=torch.empty_like(found.x)))

    def added_to(self, value: torch.Tensor) -> torch.Tensor:
        return self.routed.added_to(self.shared_sum().added_to(value))

    def partial(self) -> torch.Tensor:
        return self.shared_sum().partial().add_(self.routed.partial())


class Computed(NamedTuple):
    """An addition that is computed already."""

    value: torch.Tensor
    """[T, H], contiguous."""
    is_partial: bool = False
    """Whether it is this rank's part of a sum over ranks; if not, all ranks have it whole."""

    def added_to(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.value

    def partial(self) -> torch.Tensor:
        return self.value


Pending = Sum | GatedSum | Combine | SharedCombine | Computed
"""An addition to the stream, as far as a layer has computed it."""
