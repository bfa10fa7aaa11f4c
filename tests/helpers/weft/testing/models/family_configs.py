"""Configurations of the families that tests make, without weights."""

from __future__ import annotations

from typing import Any

from weft.testing.models.families import FAMILIES, OWN_CODE, SIZES
from weft.testing.models.ling import ling_config
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import SIZES as REFERENCE_SIZES


def family_configs() -> dict[str, dict[str, Any]]:
    """config.json by the name of the family."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = {
        **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "internlm3": "InternLM3ForCausalLM",
    }
    found = {}
    for families, sizes in ((FAMILIES, SIZES), (MOE_FAMILIES, REFERENCE_SIZES)):
        for name, (kind, own) in families.items():
            given = own if "text_config" in own else {**sizes, **own}
            values = {k: None if v == "none" else v for k, v in given.items() if v is not None}
            config = transformers.AutoConfig.for_model(kind, **values).to_dict()
            found[name] = {**config, "architectures": [names[kind]], **OWN_CODE.get(name, {})}
    found["ling2"] = ling_config(found["ling2"])
    return found
