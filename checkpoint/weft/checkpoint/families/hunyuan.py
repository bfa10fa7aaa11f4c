"""Hunyuan, whose heads are normalised after the rotation, and Hy3."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import hunyuan_experts, hy3_experts
from weft.checkpoint.families.family import Family, behind
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.checkpoint.parts import HeadNormConfig, MlpConfig, NamesConfig
from weft.checkpoint.rope import RopeConfig


def read_hunyuan(family: Family) -> ModelConfig:
    """Hunyuan (0.5B to 7B)."""
    return _config(family)


def read_hunyuan_moe(family: Family) -> ModelConfig:
    """Hunyuan A13B: routed experts and a shared one in every layer."""
    names = MoENamesConfig(router="gate.wg", shared="shared_mlp")
    return _config(family, hunyuan_experts(family.fields), NamesConfig(moe=names))


def read_hy3(family: Family) -> ModelConfig:
    """Hy3: norms before the rotation, sigmoids that choose experts."""
    fields, dim, norm = family.fields, family.head_dim(128), family.rms(eps=1e-5)
    layer = replace(
        family.attention(family.rope(theta=11_158_840.0), dim**-0.5),
        head_norm=HeadNormConfig(norm=norm),
    )
    decoder = family.decoder(
        layer,
        norm,
        mlp=MlpConfig(activation=family.activation(), bias=fields.flag("mlp_bias", False)),
    )
    names = NamesConfig(
        left_out=behind(family.num_layers),
        moe=MoENamesConfig(router="router.gate", correction="expert_bias", shared="shared_mlp"),
    )
    return family.config(decoder, head_dim=dim, names=names, moe=hy3_experts(fields), kv_heads=8)


def _config(
    family: Family, moe: MoEConfig | None = None, names: NamesConfig | None = None
) -> ModelConfig:
    dim, norm = family.head_dim(), family.rms(eps=1e-5)
    family.only("use_qk_norm", True)
    family.only("use_cla", False)
    layer = replace(
        family.attention(_rope(family, dim), dim**-0.5),
        head_norm=HeadNormConfig(
            norm=norm, is_after_rotation=True, q_name="query_layernorm", k_name="key_layernorm"
        ),
    )
    decoder = family.decoder(layer, norm)
    return family.config(decoder, head_dim=dim, moe=moe, names=names)


def _rope(family: Family, dim: int) -> RopeConfig:
    """Type `dynamic` with an alpha means a larger base at every length."""
    name = next((n for n in ("rope_parameters", "rope_scaling") if family.fields.get(n)), "")
    values = family.fields.section(name)
    kind = values.text("rope_type", values.text("type", "default"))
    if kind != "dynamic" or not values.get("alpha"):
        return family.rope()
    theta = values.number("rope_theta", family.fields.number("rope_theta", 1e4))
    return replace(RopeConfig(theta=1.0), theta=theta * values.number("alpha") ** (dim / (dim - 2)))
