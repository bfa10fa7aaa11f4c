"""Products of transformers' modules, computed as Weft's layers compute theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from weft.checkpoint.adapters.names import DENSE_KINDS, parse_module
from weft.checkpoint.adapters.plan import projection_shape
from weft.checkpoint.adapters.projections import default_projections, projections_of
from weft.checkpoint.config import ModelConfig
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import weight_rows
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import Group, LoraAddition, LoraStep
from weft.kernels.ops.peers.spec import Peers

_SUMMED_KINDS = frozenset(("o", "down"))
"""Projections of which each rank has a part of the input."""
_lora: ContextVar[LoraStep | None] = ContextVar("weft_lora", default=None)


@contextmanager
def adapters_of(lora: LoraStep | None) -> Iterator[None]:
    """Within the context, each `Product` adds what the adapters of a step's requests change. Its
    input has the rows of that step. None: no adapters.
    """
    token = _lora.set(lora)
    try:
        yield
    finally:
        _lora.reset(token)


Split = Literal["none", "out", "in"]
"""As `LinearSpec.split`."""


def summed(part: torch.Tensor, peers: Peers) -> torch.Tensor:
    """The sum of a tensor over all ranks, the same bits on each of them."""
    width = peers.width or part.shape[-1]
    flat = part.reshape(-1)
    rows = F.pad(flat, (0, -len(flat) % width)).view(-1, width).contiguous()
    total = peers.add_sum(rows, torch.zeros_like(rows)).view(-1)
    return total[: len(flat)].view(part.shape)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module stands among the projections that adapters change."""

    group: Group
    layer: int
    columns: frozenset[int]
    """First columns, in the group's product, of the projections that the module computes."""

    def addition(self, lora: LoraStep) -> LoraAddition | None:
        found = lora.of(self.group, self.layer)
        if found is None:
            return None
        own = [part for part in found.parts if part.column in self.columns]
        first = min(self.columns)
        parts = tuple(replace(part, column=part.column - first) for part in own)
        return replace(found, parts=parts) if parts else None


class JoinedProduct:
    """The product of several linear modules of the same input, computed when the first of them is
    called.
    """

    def __init__(self, packed: LinearWeight, rows: Sequence[int], split: Split = "none") -> None:
        """`rows`: the outputs of each module, in the product's order."""
        self.packed, self.split = packed, split
        self.ends = tuple(accumulate(rows))
        self.place: Place | None = None
        self._x: torch.Tensor | None = None
        self._made: torch.Tensor | None = None
        self._left = 0

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., outputs of one module], a view."""
        if self._made is None or x is not self._x:
            self._x, self._made, self._left = x, self.computed(x), len(self.ends)
        made = self._made
        self._left -= 1
        if not self._left:
            self._x = self._made = None
        return made[..., self.ends[number - 1] if number else 0 : self.ends[number]]

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., outputs of all modules]."""
        made = linear(self.rows_of(x), self.packed, lora=self.addition())
        return made.view(*x.shape[:-1], made.shape[-1])

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [T, in], as products take it."""
        return x.reshape(-1, x.shape[-1]).contiguous().to(self.packed.dtype)

    def addition(self) -> LoraAddition | None:
        """What adapters add in this step."""
        lora = _lora.get()
        return None if lora is None or self.place is None else self.place.addition(lora)


class ProductPart(torch.nn.Module):
    """A linear module that is a part of a `JoinedProduct`."""

    def __init__(self, joined: JoinedProduct, number: int, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.joined, self._number = joined, number
        begin = joined.ends[number - 1] if number else 0
        self.in_features, self.out_features = joined.packed.in_features, joined.ends[number] - begin
        self._rows = (begin, joined.ends[number])
        self._floats: torch.Tensor | None = None
        self.place: Place | None = None

    @property
    def split(self) -> Split:
        return self.joined.split

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] floats, for code that reads the weight beside the product; a copy."""
        if self._floats is None:
            whole = self.joined.packed
            self._floats = weight_rows(whole, torch.arange(*self._rows, device=self._device))
        return self._floats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return self.joined.part(self._number, x)


class Product(torch.nn.Module):
    """A linear module whose weight is packed."""

    def __init__(
        self,
        packed: LinearWeight,
        out_dtype: torch.dtype | None = None,
        added: torch.Tensor | None = None,
        device: torch.device | None = None,
        split: Split = "none",
        peers: Peers | None = None,
    ) -> None:
        """`added` is a bias beside that of `packed`, or None; `peers` are the ranks whose parts a
        product adds up whose input is split.
        """
        super().__init__()
        self.split, self._peers = split, peers if split == "in" else None
        self.packed, self._out_dtype, self._added = packed, out_dtype, added
        self._device = device
        self._floats: torch.Tensor | None = None
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.place: Place | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] floats, for code that reads the weight beside the product; a copy."""
        if self._floats is None:
            rows = torch.arange(self.packed.out_features, device=self._device)
            self._floats = weight_rows(self.packed, rows)
        return self._floats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous().to(self.packed.dtype)
        lora = _lora.get()
        added = None if lora is None or self.place is None else self.place.addition(lora)
        made = linear(rows, self.packed, out_dtype=self._out_dtype, lora=added)
        if self._added is not None:
            made = made + self._added
        if self._peers is not None:
            made = summed(made, self._peers)
        return made.view(*x.shape[:-1], made.shape[-1])


def place_products(
    config: ModelConfig, model: torch.nn.Module, num_ranks: int = 1
) -> tuple[str, ...]:
    """Tells products of layers what adapters change of them. Returns the kinds of projections that
    every layer has as a linear module of the usual name and shape, divided among ranks as adapters
    are.
    """
    found: dict[tuple[str, ...], dict[int, Product | ProductPart]] = {}
    for path, module in model.named_modules():
        name = parse_module(path)
        if not isinstance(module, Product | ProductPart) or name.is_expert or not name.layer >= 0:
            continue
        if not name.kinds or not set(name.kinds) <= set(DENSE_KINDS):
            continue
        shapes = [projection_shape(config, name, kind) for kind in name.kinds]
        splits = {"in" if kind in _SUMMED_KINDS else "out" for kind in name.kinds}
        if num_ranks > 1 and splits != {module.split}:
            continue
        wide, high = (num_ranks if module.split == side else 1 for side in ("in", "out"))
        sizes = module.in_features * wide, module.out_features * high
        if sizes == (shapes[0][0], sum(n for _, n in shapes)):
            layers = found.setdefault(name.kinds, {})
            # Several modules of a layer with one name are none that an adapter could mean.
            layers[name.layer if name.layer not in layers else -1] = module
    whole = {
        kinds: layers
        for kinds, layers in found.items()
        if layers.keys() == set(range(config.num_layers))
    }
    kinds = [kind for kinds in whole for kind in kinds]
    if len(kinds) != len(set(kinds)) or not kinds:
        return ()
    kinds_of = default_projections(config)
    named = {part.kind: part for part in projections_of(config, kinds_of, num_ranks)}
    for own, layers in whole.items():
        parts = [named[kind] for kind in own]
        for layer, product in layers.items():
            columns = frozenset(part.column for part in parts)
            product.place = Place(parts[0].group, layer, columns)  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, ProductPart):
            module.joined.place = _joined_place(module.joined, model)
    return tuple(kind for kind in DENSE_KINDS if kind in kinds)


def _joined_place(joined: JoinedProduct, model: torch.nn.Module) -> Place | None:
    """The place of all parts of a product together. None: one of them has none."""
    parts = [m for m in model.modules() if isinstance(m, ProductPart) and m.joined is joined]
    places = [part.place for part in parts if part.place is not None]
    if len(places) < len(joined.ends):
        return None
    return replace(places[0], columns=frozenset().union(*(place.columns for place in places)))
