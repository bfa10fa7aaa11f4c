"""MiniMax-Text-01 and M1: lightning attention in most layers, experts in all of them."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import mixtral_experts
from weft.checkpoint.families.family import FULL, LINEAR, Family
from weft.checkpoint.families.mixtral import LETTERS
from weft.checkpoint.parts import AttentionConfig, NamesConfig
from weft.checkpoint.recurrent_config import LightningConfig

_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def read_minimax(family: Family) -> ModelConfig:
    """MiniMax-Text-01 (arXiv 2501.08313) and M1 (arXiv 2506.13585): blocks' results are added to
    the blocks' input.
    """
    fields, norm, dim = family.fields, family.rms(eps=1e-5), family.head_dim()
    family.only("postnorm", True)
    family.only("shared_intermediate_size", 0)
    family.only("sliding_window", None)
    attention = AttentionConfig(
        rope=family.rope(theta=1e6, partial=fields.count("rotary_dim", dim) / dim),
        scale=dim**-0.5,
    )
    lightning = LightningConfig(
        heads=family.num_heads, dim=dim, num_layers=family.num_layers, eps=1e-6
    )
    kinds = _kinds(family)
    if set(kinds) != {FULL, LINEAR}:
        raise fields.error("layer_types", "expected layers with and without attention")
    factors = {kind: _factors(family, kind) for kind in (FULL, LINEAR)}
    decoder = replace(
        family.decoder(tuple(attention if kind == FULL else lightning for kind in kinds), norm),
        kept=tuple(factors[kind] for kind in kinds),
    )
    names = NamesConfig(
        recurrent="self_attn",
        feeds=("block_sparse_moe", "mlp"),
        moe=LETTERS,
        constants=tuple(f".self_attn.{name}" for name in _BUFFERS),
    )
    moe = mixtral_experts(fields)
    return family.config(decoder, head_dim=dim, names=names, moe=moe, kv_heads=8)


def _kinds(family: Family) -> tuple[str, ...]:
    """1 means attention in the list of older files."""
    switches = family.switches("attn_type_list")
    if switches is not None:
        return tuple(FULL if has_attention else LINEAR for has_attention in switches)
    return family.listed(
        ["layer_types"], {LINEAR: LINEAR, FULL: FULL}, lambda n: LINEAR if n % 2 else FULL
    )


def _factors(family: Family, kind: str) -> tuple[float, float]:
    """Factors on the input of the mixer and of the feed-forward block; factors on results must be
    1.
    """
    fields, found = family.fields, []
    block = "full_attn" if kind == FULL else "linear_attn"
    for name, old in ((block, kind), ("mlp", "mlp")):
        for beta in (f"{name}_beta_factor", f"layernorm_{old}_beta"):
            family.only(beta, 1)
        found.append(
            fields.number(f"{name}_alpha_factor", fields.number(f"layernorm_{old}_alpha", 1.0))
        )
    return found[0], found[1]
