"""DeepSeek V2 and V3, and models of their shape: latent attention, routed and shared experts. Youtu
and MiniCPM 3 have the attention without the experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import (
    deepseek_v2_experts,
    deepseek_v3_experts,
    mistral4_experts,
)
from weft.checkpoint.families.family import Family, behind, mistral_names
from weft.checkpoint.families.granite import with_minicpm_factors
from weft.checkpoint.latent_config import LatentConfig
from weft.checkpoint.moe_config import MoEConfig
from weft.checkpoint.mtp_config import head_behind
from weft.checkpoint.parts import AttentionConfig, NamesConfig

_KIMI_TOWERS = tuple(
    f"{top}{part}."
    for top in ("", "model.")
    for part in ("vision_tower", "mm_projector", "multi_modal_projector")
)


def read_deepseek_v2(family: Family) -> ModelConfig:
    """DeepSeek V2 and V2-Lite (arXiv 2405.04434)."""
    return _config(family, deepseek_v2_experts(family.fields), eps=1e-6)


def read_deepseek_v3(family: Family) -> ModelConfig:
    """DeepSeek V3, R1 and V3.1 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534), and the text of
    Kimi K2.5.
    """
    if "text_config" in family.raw:
        family = family.of_text()
        names = replace(mistral_names(), left_out=_KIMI_TOWERS)
        moe = deepseek_v3_experts(family.fields, num_dense=3)
        return _config(family, moe, eps=1e-6, names=names)
    return _config(family, deepseek_v3_experts(family.fields, num_dense=3), eps=1e-6)


def read_sarvam_mla(family: Family) -> ModelConfig:
    """Sarvam 105B: DeepSeek V3 with names of its own for some fields."""
    usual = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    raw = family.raw
    raw = {**{name: raw[own] for name, own in usual.items() if own in raw}, **raw}
    rope = raw.get("rope_scaling")
    if isinstance(rope, Mapping) and "deepseek_yarn" in (rope.get("type"), rope.get("rope_type")):
        raw["rope_scaling"] = {**rope, "type": "yarn", "rope_type": "yarn"}
    family = family.replaced(raw)
    moe = deepseek_v3_experts(family.fields, num_dense=1, scale=2.5)
    return _config(family, moe, eps=1e-6)


def read_glm4_lite(family: Family) -> ModelConfig:
    """GLM-4.7-Flash."""
    return _config(family, deepseek_v3_experts(family.fields, num_dense=1), eps=1e-5)


def read_mistral4(family: Family) -> ModelConfig:
    """Mistral Small 4: q grows with the position, and softmaxes choose the experts."""
    family = family.of_text()
    return _config(family, mistral4_experts(family.fields), eps=1e-6, names=mistral_names())


def read_youtu(family: Family) -> ModelConfig:
    return _config(family, None, eps=1e-6, is_tied=True)


def read_minicpm3(family: Family) -> ModelConfig:
    """MiniCPM 3: halves of heads are rotated, with MiniCPM's factors."""
    config = _config(family, None, eps=1e-5, is_interleaved=False, is_tied=True)
    return with_minicpm_factors(family, config, embedding=12.0, depth=1.4, base=256)


def _config(
    family: Family,
    moe: MoEConfig | None,
    eps: float,
    names: NamesConfig | None = None,
    *,
    is_interleaved: bool = True,
    is_tied: bool = False,
) -> ModelConfig:
    fields, norm = family.fields, family.rms(eps=eps)
    family.only("attention_bias", False)
    latent = LatentConfig(
        q_rank=fields.positive("q_lora_rank") if "q_lora_rank" in fields else None,
        kv_rank=fields.positive("kv_lora_rank"),
        nope_dim=fields.positive("qk_nope_head_dim"),
        rope_dim=fields.positive("qk_rope_head_dim"),
        value_dim=fields.positive("v_head_dim", family.hidden_size // family.num_heads),
    )
    dim = latent.nope_dim + latent.rope_dim
    # Some files give the share of the whole head, although only this part is rotated at all.
    share = latent.rope_dim / dim
    turned = fields.flag("rope_interleave", is_interleaved)
    rope = family.rope(is_interleaved=turned, partial=1.0)
    if rope.partial not in (1.0, share):
        raise fields.error("partial_rotary_factor", f"only {share} is supported")
    layer = AttentionConfig(
        rope=replace(rope, partial=1.0),
        scale=dim**-0.5 * _score_factor(family),
        llama4_query_scale=family.llama4_query_scale(),
    )
    decoder = family.decoder(layer, norm)
    # Mistral's own files have no MTP head.
    head = head_behind(family.num_layers) if names is None and moe is not None else None
    names = names or NamesConfig(left_out=behind(family.num_layers))
    return family.config(
        decoder, head_dim=dim, names=names, moe=moe, latent=latent, mtp=head, is_tied=is_tied
    )


def _score_factor(family: Family) -> float:
    """YaRN's correction of scores, squared, as these models apply it."""
    name = "rope_parameters" if family.fields.get("rope_parameters") else "rope_scaling"
    rope = family.fields.section(name)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    factor = rope.number("factor")
    steepness = 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0
    return 1.0 if factor <= 1.0 else steepness**2
