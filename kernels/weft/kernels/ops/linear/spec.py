"""Types of linear."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TypeAlias

import torch
from weft.kernels.ops.activation.spec import SILU, Gating
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.int_groups import IntGroups
from weft.kernels.shared.formats.packed_groups import PackedGroups
from weft.kernels.shared.formats.quantised import QuantisedMatrix
from weft.kernels.shared.formats.rotated import RotatedChannels


@dataclass(frozen=True, slots=True)
class PlainForm:
    """The original weight, for a GPU and for torch."""

    data: torch.Tensor
    """[N, K] of the layer's dtype."""


@dataclass(frozen=True, slots=True)
class OneDnnForm:
    """The original weight packed for oneDNN, for bfloat16 on a CPU without a C compiler."""

    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class NativeForm:
    """Panels of rows that native operations multiply with any number of rows (csrc/linear.h)."""

    data: torch.Tensor
    struct: cpu.WeightStruct
    """Describes `data`, `scales` and the bias to native operations."""
    scales: torch.Tensor | None = None
    """float32. Of a quantised weight in panel order; of weights in groups, of their own dtype,
    [panels, groups, scales or scales and offsets, 32]. None: the panels hold the layer's dtype.
    """
    order: torch.Tensor | None = None
    """[K] int32: order in which products take the columns of their input; None: as they are."""
    factors: torch.Tensor | None = None
    """Those of `IntGroups`, in panel order."""

    @property
    def address(self) -> int:
        """Address of `struct`."""
        return ctypes.addressof(self.struct)


PackableMatrix: TypeAlias = torch.Tensor | QuantisedMatrix | RotatedChannels | IntGroups
"""What can be packed: floats, or a quantised matrix of any kind."""

Form: TypeAlias = PlainForm | OneDnnForm | NativeForm | QuantisedMatrix | IntGroups | PackedGroups
"""How a weight lies in memory. A `QuantisedMatrix` itself serves devices that have no operation for
its kind: each product converts it to floats.
"""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """Weights of one linear layer in the form that this machine multiplies fastest."""

    out_features: int
    """Rows of the original weight; for gate and up together, twice the MLP's inner size."""
    in_features: int
    dtype: torch.dtype
    """Dtype that the layer computes in."""
    gated: bool
    """Whether it came from `pack_gate_up`."""
    form: Form
    """The only copy of the weight in memory."""
    bias: torch.Tensor | None
    """[out_features] of `dtype`, or float32 in panel order in the native form, or None."""
    is_fixed: bool = False
    """Whether a row's result is independent of the other rows on a GPU too."""
    gating: Gating = SILU
    """How gate and up are combined."""

    @property
    def data(self) -> torch.Tensor:
        return self.form.data

    @property
    def is_rotated(self) -> bool:
        """Whether the weight is rotated int8; a product then rotates and rounds its rows first."""
        return self.native is not None and bool(self.native.struct.is_rotated)

    @property
    def native(self) -> NativeForm | None:
        return self.form if isinstance(self.form, NativeForm) else None

    @property
    def address(self) -> int:
        """Address of the native form's `struct`; 0 for other forms."""
        return self.form.address if isinstance(self.form, NativeForm) else 0
