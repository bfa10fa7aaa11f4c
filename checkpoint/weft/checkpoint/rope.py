"""Rotary position embeddings as config.json describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from weft.checkpoint.fields import Fields

_DEFAULT_THETA = 10_000.0
_ORIGINAL = "original_max_position_embeddings"
_LONG_ROPES = ("longrope", "su")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of a head."""

    theta: float
    """Base of the rotary wavelengths."""
    scaling: str = "none"
    """Kind of scaling: none, linear, llama3, yarn, longrope or proportional."""
    factor: float = 1.0
    """Extension of the context; 1: none."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_positions / this are stretched by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_positions / this stay as they are."""
    original_max_positions: int = 0
    """llama3, yarn: context length before the extension; 0 where it is not used."""
    partial: float = 1.0
    """Share of a head, its first elements, that is rotated. proportional: share of its pairs, whose
    wavelengths are those of the whole head.
    """
    is_interleaved: bool = False
    """Whether pairs are adjacent elements, instead of elements half of the rotated size apart."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this over the original context stay as they are."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are stretched by `factor`."""
    truncate: bool = True
    """yarn: whether the ramp between the two begins and ends at whole pairs."""
    attention_factor: float = 1.0
    """yarn, longrope: factor on cosines and sines."""
    wavelength_factors: tuple[float, ...] = ()
    """longrope: the stretch of each pair."""

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head that are rotated."""
        return head_dim if self.scaling == "proportional" else int(head_dim * self.partial)

    def num_adjacent(self, head_dim: int) -> int:
        """Number of adjacent pairs, as in `weft.kernels.ops.rope.rope_and_cache`."""
        if self.is_interleaved:
            return head_dim // 2
        return (head_dim - self.rotary_dim(head_dim)) // 2


_OF_FINGERPRINTS = tuple(field.name for field in fields(RopeConfig))[:6]


def rope_values(rope: RopeConfig) -> dict[str, Any]:
    """The fields for fingerprints: the original ones always, and later ones only if they differ
    from their defaults.
    """
    usual = RopeConfig(theta=rope.theta)
    values = asdict(rope)
    return {
        name: value
        for name, value in values.items()
        if name in _OF_FINGERPRINTS or value != getattr(usual, name)
    }


def rope_config(
    fields: Fields,
    *,
    kind: str | None = None,
    theta: float = _DEFAULT_THETA,
    partial: float | None = None,
    is_interleaved: bool = False,
) -> RopeConfig:
    """Reads the rotary parameters of a config.json: transformers 5 writes `rope_parameters`, older
    versions `rope_theta` and `rope_scaling`.

    Args:
        kind: Kind of layers in `layer_types`, if each kind may have parameters of its own.
        theta: Default if the file has none.
        partial: Default share of a head that is rotated; None: heads are rotated whole, and another
            share is refused.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
    first, *others = [
        _rotation(fields, name, kind, theta, partial) for name in names or ["rope_scaling"]
    ]
    # In transformers the second wins: whoever adds it to a newer file means it.
    if any(replace(other, theta=first.theta) != first for other in others):
        raise fields.error("rope_scaling", "is not what rope_parameters say; keep one of them")
    return replace(first, is_interleaved=is_interleaved)


def _rotation(
    fields: Fields, name: str, layers: str | None, default_theta: float, partial: float | None
) -> RopeConfig:
    rope = fields.section(name)
    if any(isinstance(rope.get(key), dict) for key in rope):
        if layers is None:
            raise fields.error(name, "different rotations per kind of layer are not supported")
        rope = rope.section(layers)
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    kind = rope.text("rope_type", rope.text("type", "default"))
    share = "partial_rotary_factor"
    turned = rope.number(share, fields.number(share, 1.0 if partial is None else partial))
    if turned > 1.0 or (partial is None and turned != 1.0):
        raise fields.error(f"{name}.{share}", "only 1.0 is supported")
    plain = RopeConfig(theta=theta, partial=turned)
    if kind in ("default", "dynamic"):
        # Dynamic scaling begins after max_position_embeddings, which no request exceeds.
        if rope.get("alpha") is not None:
            raise rope.error("alpha", "is not supported for this architecture")
        return plain
    if kind == "linear":
        return replace(plain, scaling="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return replace(
            plain,
            scaling="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_positions=_original_positions(fields, rope),
        )
    if kind == "yarn":
        return _yarn(plain, fields, rope)
    if kind in _LONG_ROPES:
        return _long_rope(plain, fields, rope)
    if kind == "proportional":
        return replace(plain, scaling="proportional", factor=rope.number("factor", 1.0))
    raise fields.error(
        f"{name}.rope_type",
        f"{kind!r} is not supported (default, linear, dynamic, llama3, yarn, longrope and "
        "proportional are)",
    )


def _original_positions(fields: Fields, rope: Fields) -> int:
    default = rope.positive(_ORIGINAL, fields.positive("max_position_embeddings"))
    return fields.positive(_ORIGINAL, default)


def _yarn(plain: RopeConfig, fields: Fields, rope: Fields) -> RopeConfig:
    """YaRN (Peng et al., arXiv 2309.00071): the stretch of a pair depends on how often it turns
    over the original context, and scores get steeper.
    """
    original = _original_positions(fields, rope)
    factor = rope.number("factor", fields.positive("max_position_embeddings") / original)
    scale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    attention = _steepness(factor, 1.0)
    if scale and of_all:
        scales = (rope.number("mscale"), rope.number("mscale_all_dim"))
        attention = _steepness(factor, scales[0]) / _steepness(factor, scales[1])
    return replace(
        plain,
        scaling="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", attention),
    )


def _steepness(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def for_context(
    raw: Mapping[str, Any], max_tokens: int | None, original: int | None = None
) -> Mapping[str, Any]:
    """The config.json, or the section of one, for contexts of at most `max_tokens`; None: the
    model's longest. If no context exceeds LongRoPE's original length, its short factors replace the
    long ones. `original` is that length, if the enclosing object names it.
    """
    if max_tokens is None:
        return raw
    named = raw.get(_ORIGINAL) if original is None else original
    is_short = isinstance(named, int) and max_tokens <= named
    is_long_rope = raw.get("rope_type", raw.get("type")) in _LONG_ROPES
    return {
        name: raw.get(name.replace("long", "short", 1), value)
        if is_short and is_long_rope and name in ("long_factor", "long_mscale")
        else for_context(value, max_tokens, named)
        if isinstance(value, dict)
        else value
        for name, value in raw.items()
    }


def _long_rope(plain: RopeConfig, fields: Fields, rope: Fields) -> RopeConfig:
    """LongRoPE (Ding et al., arXiv 2402.13753): each pair has a stretch of its own.

    Files have two lists, for contexts within and beyond the original length. Pages are shared
    between requests of any length, so that only one list can be used: the long one, unless
    `max_position_embeddings` is no longer than the original (`for_context` may make it so).
    """
    longest, original = (
        fields.positive("max_position_embeddings"),
        _original_positions(fields, rope),
    )
    factor = rope.number("factor", longest / original)
    attention = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    name = "long_factor" if longest > original else "short_factor"
    factors = rope.get(name)
    if not isinstance(factors, list) or not all(
        isinstance(f, int | float) and not isinstance(f, bool) and f > 0 for f in factors
    ):
        raise rope.error(name, "expected a list of numbers greater than zero")
    return replace(
        plain,
        scaling="longrope",
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", attention),
        wavelength_factors=tuple(float(factor) for factor in factors),
    )
