"""Parts of transformers' modules that Weft's kernels compute in fewer launches.

A part is replaced only if it gives the same numbers as the module's own code, which is tried with
random rows when the model is loaded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from weft.engine.model.archs.by_transformers.products import Product, ProductPart
from weft.kernels.ops.activation import silu_and_mul
from weft.kernels.ops.linear import gate_up_silu
from weft.kernels.ops.linear.pack import with_gating
from weft.kernels.ops.norm import rms_norm

_ROTATION = "apply_rotary_pos_emb"
"""Function of transformers' modules that rotates Q and K."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Largest difference, of numbers about 1, from rounding at other places."""
_TRIED_ROWS = 5
_HEADS_DIM = 4
"""Axes of Q and K once their heads are apart."""
_MAX_WIDTH = 32_768


class FusedRmsNorm(torch.nn.Module):
    """An RMS norm in one launch."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.scale, self._eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        rotation = _rotation.get()
        if rotation is not None and rotation.leaves_norms and x.dim() == _HEADS_DIM:
            rotation.leave_norm(x, HeadNorm(self.scale, self._eps))
            return x
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return rms_norm(rows, self.scale, self._eps).view(x.shape)


@torch.inference_mode()
def fuse_norms(model: torch.nn.Module) -> int:
    """Replaces the RMS norms of a model whose numbers `FusedRmsNorm` gives too; returns how many
    there are.
    """
    count = 0
    for path, module in list(model.named_modules()):
        fused = _fused_norm(module) if type(module).__name__.endswith("RMSNorm") else None
        if fused is not None:
            above, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(above), leaf, fused)
            count += 1
    return count


def _fused_norm(module: torch.nn.Module) -> FusedRmsNorm | None:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if len(parameters) != 1 or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if weight.shape[0] > _MAX_WIDTH or weight.dtype not in _TOLERANCE:
        return None
    x = _rows_like((_TRIED_ROWS, weight.shape[0]), weight.dtype, weight.device)
    try:
        expected = module(x)
    except (TypeError, RuntimeError):
        return None  # It takes more than rows.
    own = weight.detach()
    for scale in (own, 1.0 + own.float()):
        fused = FusedRmsNorm(scale, eps)
        if _is_close(fused(x), expected):
            return fused
    return None


class FusedMlp(torch.nn.Module):
    """down(silu(gate(x)) * up(x)), whose gate and up are one product."""

    def __init__(self, gate: ProductPart, up: ProductPart, down: Product) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._gated = with_gating(gate.joined.packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        joined = self.gate_proj.joined
        if self._gated is None:
            gated = silu_and_mul(joined.computed(x).flatten(0, -2))
        else:
            gated = gate_up_silu(joined.rows_of(x), self._gated, joined.addition())
        made: torch.Tensor = self.down_proj(gated)
        return made.view(*x.shape[:-1], made.shape[-1])


@torch.inference_mode()
def fuse_mlps(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Replaces the MLPs of a model whose numbers `FusedMlp` gives too; returns how many there
    are.
    """
    count = 0
    for path, module in list(model.named_modules()):
        parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        gate, up, down = parts
        if not (
            isinstance(gate, ProductPart)
            and isinstance(up, ProductPart)
            and isinstance(down, Product)
            and gate.joined is up.joined
            and down.in_features == up.out_features
            and not list(module.parameters())
        ):
            continue
        fused = FusedMlp(gate, up, down)
        x = _rows_like((1, _TRIED_ROWS, gate.in_features), dtype, device)
        try:
            expected = module(x)
        except (TypeError, RuntimeError):
            continue
        if isinstance(expected, torch.Tensor) and _is_close(fused(x), expected):
            above, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(above), leaf, fused)
            count += 1
    return count


def _rows_like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same random rows on all ranks, which try a part together."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return drawn.to(device, dtype)


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCE[found.dtype] * max(1.0, float(expected.float().abs().max()))
    return torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


class HeadNorm(NamedTuple):
    """An RMS norm of each head."""

    weight: torch.Tensor
    eps: float


class Left(NamedTuple):
    """What one call of attention has to do with Q and K first."""

    cos: torch.Tensor
    """[1, T, D]."""
    sin: torch.Tensor
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None


@dataclass(slots=True)
class Rotation:
    """Norms of heads and rotations that a pass leaves to attention, which computes them while it
    stores K.
    """

    leaves_norms: bool
    _angles: tuple[torch.Tensor, torch.Tensor] | None = None
    _heads: tuple[torch.Tensor, torch.Tensor] | None = None
    """Q and K as they are before the rotation."""
    _norms: dict[int, HeadNorm] = field(default_factory=dict)
    """By the address of the heads."""
    _last: tuple[torch.Tensor, torch.Tensor, Left] | None = None
    """Heads that attention had last: some layers attend with them again."""

    def leave_norm(self, x: torch.Tensor, norm: HeadNorm) -> None:
        """Raises NotLeftError if the heads have been rotated already, or have a norm."""
        if self._heads is not None or x.data_ptr() in self._norms:
            raise NotLeftError
        self._norms[x.data_ptr()] = norm

    def leave(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if self._heads is not None:
            raise NotLeftError
        self._angles, self._heads = (cos, sin), (q, k)

    def take(self, q: torch.Tensor, k: torch.Tensor) -> Left | None:
        """What was left of these heads; None: nothing. Raises NotLeftError if they were changed
        since.
        """
        angles, heads, norms = self._angles, self._heads, self._norms
        self._angles, self._heads, self._norms = None, None, {}
        if angles is None or heads is None:
            if norms:
                raise NotLeftError
            last = self._last
            return last[2] if last is not None and last[0] is q and last[1] is k else None
        q_norm, k_norm = (norms.pop(x.data_ptr(), None) for x in heads)
        is_same = q is heads[0] and k is heads[1] and angles[0].shape[-1] == q.shape[-1]
        if norms or not is_same or (q_norm is None) != (k_norm is None):
            raise NotLeftError
        if q_norm is not None and k_norm is not None:
            alike = q_norm.eps == k_norm.eps and q_norm.weight.dtype == k_norm.weight.dtype
            if not alike or q_norm.weight.shape != k_norm.weight.shape:
                raise NotLeftError
        left = Left(*angles, q_norm, k_norm)
        self._last = (q, k, left)
        return left


class NotLeftError(Exception):
    """A model does something else with Q or K before attention."""


_rotation: ContextVar[Rotation | None] = ContextVar("weft_rotation", default=None)


@contextmanager
def leaving(rotation: Rotation | None) -> Iterator[None]:
    """Inside, the rotation of Q and K is left to attention; None: it is not."""
    token = _rotation.set(rotation)
    try:
        yield
    finally:
        _rotation.reset(token)


def leave_rotations(model: torch.nn.Module) -> bool:
    """Prepares a model's code for `leaving`; returns whether it rotates the halves of whole heads,
    as Weft's kernel does.
    """
    homes = {sys.modules.get(type(module).__module__) for module in model.modules()}
    rotating = [home for home in homes if hasattr(home, _ROTATION)]
    return bool(rotating) and all(_leave_in(home) for home in rotating)


def _leave_in(home: Any) -> bool:
    rotate = getattr(home, _ROTATION)
    if getattr(rotate, "weft_original", None) is not None:
        return True
    if not _rotates_halves(rotate):
        return False

    def rotate_later(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *more: Any,
        **by: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotation = _rotation.get()
        if rotation is None:
            rotated: tuple[torch.Tensor, torch.Tensor] = rotate(q, k, cos, sin, *more, **by)
            return rotated
        if more or by:
            raise NotLeftError
        rotation.leave(q, k, cos, sin)
        return q, k

    rotate_later.weft_original = rotate  # type: ignore[attr-defined]
    setattr(home, _ROTATION, rotate_later)
    return True


def _rotates_halves(rotate: Callable[..., Any]) -> bool:
    names = tuple(inspect.signature(rotate).parameters)[:4]
    if names != ("q", "k", "cos", "sin"):
        return False
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    angles = torch.randn(1, 3, 4)
    cos, sin = (torch.cat((x, x), dim=-1) for x in (angles.cos(), angles.sin()))
    try:
        found = rotate(q, k, cos, sin)
    except (TypeError, RuntimeError, ValueError):
        return False
    expected = [_halves(x, angles.cos()[:, None], angles.sin()[:, None]) for x in (q, k)]
    return all(torch.allclose(x, y, atol=1e-5) for x, y in zip(found, expected, strict=True))


def _halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotation_table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, D] float32, a row for each token: cosines and sines of the halves of [1, T, D]."""
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float().contiguous()
