"""Which models can keep K and V in 8 bits, by their configuration. Pure Python."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError

_UNIT = 16
"""A head's elements must be a multiple of it."""


def why_not_8_bits(model: ModelConfig) -> str:
    """Why a model's K and V cannot be kept in 8 bits; empty if they can."""
    if model.is_encoder:
        return "encoders keep no KV"
    if model.latent is not None:
        # The latent and the shared key after it lie in one vector.
        dims = [model.latent.kv_rank + model.latent.rope_dim]
    else:
        dims = [dim for _, planes in model.page_planes for _, dim, _ in planes]
    if any(dim % _UNIT for dim in dims):
        return f"there is no kernel for heads of no multiple of {_UNIT} elements"
    return ""


def check_kv_dtype(kv_dtype: str, model: ModelConfig) -> None:
    """Raises ConfigError for a number format in which a model's K and V cannot be kept."""
    if kv_dtype != "auto" and (reason := why_not_8_bits(model)):
        raise ConfigError(
            f"kv_dtype = {kv_dtype}: {reason} ({model.architecture}); leave it at auto",
            param="kv_dtype",
        )
