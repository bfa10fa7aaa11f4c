"""Gemma 3n, text: copies of the stream, per-layer embeddings, MLPs with few active gates, K and V
shared between layers.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.families.gemma import gemma3_rope, soft_cap
from weft.checkpoint.families.gemma4 import kv_sources, text_names
from weft.checkpoint.parts import (
    AltUpConfig,
    HeadNormConfig,
    MlpConfig,
    PerLayerConfig,
)

_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""Number of first layers with sparse gates, and their sparsity, for deep models without
`activation_sparsity_pattern`.
"""


def read_gemma3n(family: Family) -> ModelConfig:
    """Gemma 3n, E2B and E4B."""
    family = family.of_text()
    fields = family.fields
    kinds = family.kinds(lambda layer: SLIDING if (layer + 1) % 5 else FULL)
    sources = kv_sources(fields, kinds, 15)
    layers = tuple(
        replace(
            family.attention(gemma3_rope(family, kind), 1.0),
            head_norm=HeadNormConfig(norm=family.rms()),
            value_norm=family.rms(),
            kv_from=source,
        )
        for kind, source in zip(kinds, sources, strict=True)
    )
    sizes = _sizes(family)
    decoder = replace(
        family.decoder(
            layers,
            mlp=MlpConfig(
                activation=family.activation("gelu_pytorch_tanh", "hidden_activation"),
                sizes=sizes,
                sparsities=_sparsities(family),
            ),
        ),
        order="around",
        embedding_multiplier=family.hidden_size**0.5,
        logit_softcap=soft_cap(family, "final_logit_softcapping", 30.0),
        per_layer=PerLayerConfig(
            vocab_size=fields.positive("vocab_size_per_layer_input", 262_144),
            dim=fields.positive("hidden_size_per_layer_input", 256),
        ),
        altup=_altup(family),
    )
    names = text_names(sources)
    return family.config(
        decoder,
        head_dim=family.head_dim(256),
        window=family.window(kinds, 512),
        names=names,
        is_tied=True,
        kv_heads=2,
        intermediate_size=max(sizes),
    )


def _altup(family: Family) -> AltUpConfig:
    fields = family.fields
    family.only("altup_active_idx", 0)
    family.only("altup_correct_scale", True)
    copies = fields.positive("altup_num_inputs", 4)
    if copies < 2:
        raise fields.error("altup_num_inputs", "expected at least 2 copies of the stream")
    return AltUpConfig(copies=copies, laurel_rank=fields.positive("laurel_rank", 64))


def _sizes(family: Family) -> tuple[int, ...]:
    fields, count = family.fields, family.num_layers
    if not isinstance(fields.get("intermediate_size"), list):
        return (fields.positive("intermediate_size", 16_384),) * count
    sizes = fields.indices("intermediate_size")
    if len(sizes) != count or not all(sizes):
        raise fields.error("intermediate_size", f"expected {count} numbers from 1")
    return sizes


def _sparsities(family: Family) -> tuple[float, ...]:
    fields, count, name = family.fields, family.num_layers, "activation_sparsity_pattern"
    if fields.get(name) is None:
        sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * sparse + (0.0,) * (count - sparse)
    found = family.numbers(name)
    if len(fields.get(name)) != count:
        raise fields.error(name, f"expected {count} numbers")
    if max(found) >= 1.0:
        raise fields.error(name, f"{max(found)} is no share of gates; expected less than 1")
    return found
