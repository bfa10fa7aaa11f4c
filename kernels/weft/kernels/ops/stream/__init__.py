"""The residual stream: the one contract between layers.

A layer reads the stream through a norm and returns what it adds, as `Pending`. The stream applies
it later, so that a GPU can compute an addition, the norm that follows it and the product that reads
that norm in fewer launches (`weft.kernels.ops.stream.gpu`). No layer writes to the stream itself,
so `Stream` is the place for code that concerns every addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from weft.kernels.ops.draft_head import DraftEntries
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraAddition, LoraStep, addition_to, experts_addition
from weft.kernels.ops.moe import by_pair, moe, route
from weft.kernels.ops.moe.spec import SparseMlpWeight
from weft.kernels.ops.norm import AnyNorm, add_layer_norm
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.stream import gpu as _gpu
else:
    _gpu = deferred(__name__, "weft.kernels.ops.stream.gpu")


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
            placement=w.experts.placement,
        )
        to_experts = experts_addition(self.lora, self.layer)
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


class Stream:
    """The stream of one forward pass, computed operation by operation on any device.

    Args:
        value: [T, H].
        peers: Ranks that hold parts of what is added; every addition sums the parts, so that all
            ranks have equal streams. None: this process computes all of it.
    """

    def __init__(
        self, value: torch.Tensor, taps: Taps | None = None, peers: Peers | None = None
    ) -> None:
        self._value = value
        self.taps = taps
        self.peers = peers

    @property
    def rows(self) -> int:
        """T."""
        return self._value.shape[0]

    def begin_run(self, folds: bool) -> None:
        """Begins a run of layers of equal shape. `folds`: whether `can_fold` holds for all their
        blocks.
        """

    def enter(self, layer: int) -> None:
        """Notes that the present stream enters this layer of the pool."""
        if self.taps is not None:
            self.taps.take(layer, self._value)

    def normed(self, norm: AnyNorm | None) -> Normed:
        """The normalised stream for the products of one block; without a norm, the stream itself,
        valid until the next addition.
        """
        return Normed(self._value if norm is None else norm(self._value))

    def add(self, pending: Pending) -> None:
        """Adds to the stream."""
        if self.peers is None or (isinstance(pending, Computed) and not pending.is_partial):
            self._value = pending.added_to(self._value)
        else:
            self._value = self.peers.add_sum(pending.partial(), self._value)

    def computed(self, pending: Pending) -> torch.Tensor:
        """What an addition adds, [T, H], summed over ranks: for a caller that changes it before it
        is added.
        """
        if self.peers is not None:
            return self.peers.add_sum(pending.partial(), torch.zeros_like(self._value))
        if isinstance(pending, GatedSum):
            pending = pending.inner()
        if isinstance(pending, Sum):
            return pending.value()
        return pending.added_to(torch.zeros_like(self._value))

    def settle(self) -> torch.Tensor:
        """The stream with all additions, [T, H]."""
        return self._value

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies the stream, with all additions, by `factor`, [1]."""
        self._value = self.settle() * factor

    def replace(self, value: torch.Tensor) -> None:
        """Continues with `value`, [T, H], in place of the stream; `value` may be overwritten. Call
        it directly after `normed`.
        """
        self._value = value

    def of_rows(self, rows: torch.Tensor) -> Stream:
        """A stream of the rows with numbers `rows`, [L] int64."""
        return Stream(self.settle().index_select(0, rows), peers=self.peers)


def stream_of(hidden: torch.Tensor, taps: Taps | None, peers: Peers | None = None) -> Stream:
    """The stream through consecutive layers, in the form that is fast on its device.

    Args:
        hidden: [T, H], contiguous; on a GPU it is overwritten.
    """
    if not hidden.is_cuda or (peers is not None and peers.device_type != "cuda"):
        return Stream(hidden, taps, peers)
    return _gpu.GpuStream(hidden, taps) if peers is None else _gpu.RankedStream(hidden, taps, peers)


def norm_of_sum(
    added: Sum, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """[T, H]: the layer norm of `residual` plus an addition, with arguments as in
    `weft.kernels.ops.norm.add_layer_norm`. A GPU adds within the norm, a CPU within the product.
    """
    if residual.is_cuda:
        return add_layer_norm(added.value(), residual, weight, bias, eps)
    return F.layer_norm(added.added_to(residual), weight.shape, weight, bias, eps)


def can_fold(
    rows: int,
    first: LinearWeight,
    to_first: LoraAddition | None,
    last: LinearWeight,
    to_last: LoraAddition | None,
) -> bool:
    """Whether, on a GPU and for `rows` rows, a block's first product can include the norm before it
    and its last product can add to the stream, which saves two launches.
    """
    if not first.data.is_cuda:
        return False
    return _gpu.can_fold(rows, first, to_first, last, to_last)


class Taps:
    """Collects the residual stream, side by side, as it enters some layers.

    Args:
        layers: Indices in the pool; a layer may be listed twice.
        out: [T, len(layers) * H], contiguous, for a step of T rows; written.
        follower: Work that begins once all states are tapped, or None. If these layers cannot begin
            it, the caller must.

    Raises:
        ValueError: There are too many layers, or `out` cannot be divided among them.
    """

    def __init__(
        self, layers: Sequence[int], out: torch.Tensor, follower: DraftEntries | None = None
    ) -> None:
        count, width = len(layers), out.shape[1]
        if not 0 < count <= cpu.MAX_TAPS or width % count or not out.is_contiguous():
            raise ValueError(f"{count} inputs of layers do not fit {tuple(out.shape)}")
        self._layers = tuple(layers)
        self._out = out
        self._follower = follower

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Copies `hidden`, [T, H], if the stream that enters `layer` is wanted."""
        for place in self.places_of(layer):
            place.copy_(hidden)

    def have_taken(self, layer: int) -> None:
        """Begins the follower if `layer`, whose stream has been taken, is the last that is
        wanted.
        """
        if self._follower is not None and layer == max(self._layers):
            self._follower.begin()

    def places_of(self, layer: int) -> list[torch.Tensor]:
        """Where the stream that enters `layer` goes, [T, H] each: columns of a wider matrix."""
        places = self._out.chunk(len(self._layers), dim=1)
        return [
            place for place, wanted in zip(places, self._layers, strict=True) if wanted == layer
        ]

    def follower_of(self, first: int, count: int) -> DraftEntries | None:
        """The work that can run directly after these layers, if any."""
        ends = (min(self._layers), max(self._layers))
        return self._follower if first <= ends[0] and ends[1] < first + count else None

    def native(self, hidden: torch.Tensor) -> cpu.TapsStruct:
        """The taps as the native operation on `hidden` reads them; valid as long as this object
        lives.
        """
        rows, width = hidden.shape
        count = len(self._layers)
        if self._out.shape != (rows, count * width) or self._out.dtype != hidden.dtype:
            raise ValueError(
                f"{count} inputs of layers {tuple(hidden.shape)} {hidden.dtype} do not fit "
                f"{tuple(self._out.shape)} {self._out.dtype}"
            )
        described = cpu.TapsStruct(self._out.data_ptr(), count * width, count)
        for index, layer in enumerate(self._layers):
            described.layers[index], described.columns[index] = layer, index * width
        return described
