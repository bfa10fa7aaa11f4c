"""Parsing of adapter tensor names, in PEFT's form and related ones. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

DENSE_KINDS = ("q", "k", "v", "o", "gate", "up", "down")
"""Projections of a decoder layer, in the order of its computation."""

RECURRENT_KINDS = (
    "in_proj",
    "in_proj_qkvz",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_ba",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
)
"""Projections of a recurrent layer, as checkpoints call them."""

ROUTER = "router"
"""The product that chooses a token's experts."""

_PREFIX = re.compile(
    r"(?:base_model\.model\.)?(?P<path>(?:(?:model|transformer|gpt_neox|backbone)\.)?"
    r"(?:(?:language|text)_model\.)?(?:model\.)?(?:decoder\.(?=layers\.|embed_))?(?P<rest>.*))"
)
_PART = re.compile(
    r"(?P<module>.+?)\."
    r"(?P<part>lora_embedding_A|lora_embedding_B|lora_A|lora_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)(?P<adapter>[^.]+))?(?:\.(?P<field>weight|bias))?"
)
_SAVED = re.compile(
    r"(?P<module>.+?)(?:\.token_adapter(?=\.base_layer))?"
    r"(?P<wrapper>\.base_layer|\.original_module|\.modules_to_save(?:\.[^.]+?)?)?\.weight"
)
_TOKENS = re.compile(r"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.[^.]+)?")
_SAVED_PARTS = {
    "": "weight",
    "modules_to_save": "copy",
    "base_layer": "frozen",
    "original_module": "original",
}
_LAYER = re.compile(
    r"(?:(?:bert|roberta|new|gte|nomic_bert)\.)?(?:encoder\.)?(?:layers?|h)\."
    r"(?P<layer>\d{1,6})\.(?P<module>.+)"
)
_EXPERT = re.compile(
    r"(?:mlp|block_sparse_moe)\.experts(?:\.(?P<expert>\d{1,6}))?(?:\.(?P<leaf>(?!\d)[^.]+))?"
)

_ATTENTION: Mapping[str, tuple[str, ...]] = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "qkv_proj": ("q", "k", "v"),
    "o_proj": ("o",),
    "out_proj": ("o",),
    # GPT-2's kin.
    "query_key_value": ("q", "k", "v"),
    "c_attn": ("q", "k", "v"),
    "dense": ("o",),
    "c_proj": ("o",),
}
_MLP: Mapping[str, tuple[str, ...]] = {
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "gate_up_proj": ("gate", "up"),
    "down_proj": ("down",),
    # Of MLPs without gate.
    "c_fc": ("up",),
    "c_proj": ("down",),
    "fc1": ("up",),
    "fc2": ("down",),
    "fc_in": ("up",),
    "fc_out": ("down",),
    "dense_h_to_4h": ("up",),
    "dense_4h_to_h": ("down",),
}
_ROUTER: Mapping[str, tuple[str, ...]] = {"gate": (ROUTER,)}
_RECURRENT: Mapping[str, tuple[str, ...]] = {kind: (kind,) for kind in RECURRENT_KINDS}
# Of encoders, by block and leaf; of a gated block "gate" is what is activated.
_ENCODERS: Mapping[str, tuple[str, ...]] = {
    "attention.self.query": ("q",),
    "attention.self.key": ("k",),
    "attention.self.value": ("v",),
    "attention.output.dense": ("o",),
    "attention.qkv_proj": ("q", "k", "v"),
    "attention.o_proj": ("o",),
    "attn.Wqkv": ("q", "k", "v"),
    "attn.Wo": ("o",),
    "attn.out_proj": ("o",),
    "intermediate.dense": ("up",),
    "output.dense": ("down",),
    "mlp.Wi": ("gate", "up"),
    "mlp.Wo": ("down",),
    "mlp.fc11": ("up",),
    "mlp.fc12": ("gate",),
    "mlp.gated_layers": ("gate", "up"),
    "mlp.up_gate_proj": ("up", "gate"),
    "mlp.wo": ("down",),
}
# Mixtral's letters: w1 and w3 are gate and up, w2 is down.
_EXPERT_LEAVES: Mapping[str, tuple[str, ...]] = {
    **_MLP,
    "w1": ("gate",),
    "w2": ("down",),
    "w3": ("up",),
}
VOCABULARY = ("embed_tokens", "lm_head")
_VOCABULARY = {"wte": VOCABULARY[0], "embed_in": VOCABULARY[0], "embed_out": VOCABULARY[1]}
"""Names of the embedding and the LM head in GPT-2 and its kin."""


# PEFT nests its wrappers of the experts' parameters gate_up_proj and down_proj. Only shapes tell
# which of the two parameters a name means.
_WRAPPERS = (None, "base_layer")


@dataclass(frozen=True, slots=True)
class ModuleName:
    """A module of the model that an adapter has tensors for."""

    path: str
    """The module's name in the adapter, without PEFT's prefix; patterns match against it."""
    rest: str
    """The name from `layers.` on, or of a module outside the layers."""
    layer: int = -1
    """The layer's index; -1: outside the layers."""
    kinds: tuple[str, ...] = ()
    """Projections that the module computes, with their outputs stacked; empty: unknown."""
    is_expert: bool = False
    expert: int | None = None
    """Index of the expert; None: no expert, or all experts."""
    parameter: str | None = None
    """The experts' parameter that PEFT wraps; "": not known yet."""

    @property
    def names(self) -> tuple[str, ...]:
        """Full names by which configurations refer to the module."""
        canonical = self.rest if self.rest == "lm_head" else f"model.{self.rest}"
        names: tuple[str, ...] = (self.path, canonical)
        if self.parameter is not None:
            names = tuple(f"{n.removesuffix('.base_layer')}.{self.parameter}" for n in names)
        if self.kinds == (ROUTER,):
            # PEFT calls it by its parameter as well.
            names = (*names, *(f"{name}.weight" for name in names))
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class TensorName:
    module: ModuleName
    part: str
    """Role of the tensor. A, B: matrices of a LoRA pair. embedding_A, embedding_B: the pair of an
    embedding. weight: the whole parameter. copy: a second copy of it. frozen: the untrained
    parameter to which a LoRA is added. original: the base's parameter that another replaces.
    tokens: some rows of the parameter. magnitude: DoRA's vector. bias: bias of B. other: none of
    these.
    """


def parse_name(name: str) -> TensorName:
    """Parses the name of a tensor. It never fails: the part of an unknown name is "other"."""
    if found := _PART.fullmatch(name):
        part = found["part"].removeprefix("lora_").replace("magnitude_vector", "magnitude")
        part = "bias" if found["field"] == "bias" else part
        return TensorName(parse_module(found["module"]), part)
    if found := _TOKENS.fullmatch(name):
        return TensorName(parse_module(found["module"]), "tokens")
    if found := _SAVED.fullmatch(name):
        wrapper = (found["wrapper"] or "").split(".")[:2][-1]
        return TensorName(parse_module(found["module"]), _SAVED_PARTS[wrapper])
    return TensorName(parse_module(name), "other")


def parse_module(name: str) -> ModuleName:
    """Parses a module's name, with or without prefixes."""
    found = _PREFIX.fullmatch(name)
    assert found is not None, "every name has this form"
    path, rest = found["path"], _VOCABULARY.get(found["rest"], found["rest"])
    if rest in VOCABULARY:
        return ModuleName(path, rest, kinds=(rest,))
    inside = _LAYER.fullmatch(rest)
    if inside is None:
        return ModuleName(path, rest)
    layer, module = int(inside["layer"]), inside["module"]
    if (expert := _EXPERT.fullmatch(module)) is not None:
        return _expert_module(ModuleName(path, rest, layer, is_expert=True), expert)
    block, _, leaf = module.rpartition(".")
    mlp = {**_MLP, **_ROUTER}
    projections = {
        **dict.fromkeys(
            ("self_attn", "attn", "attention", "attn.attention", "self_attention"), _ATTENTION
        ),
        # OPT has no module for both parts of an MLP.
        **dict.fromkeys(("mlp", ""), mlp),
        "feed_forward": _EXPERT_LEAVES,
        **dict.fromkeys(("linear_attn", "mamba", "conv"), _RECURRENT),
        # Nemotron-H has one block of this name a layer, of any kind.
        "mixer": {**_ATTENTION, **_MLP, **_RECURRENT},
        "block_sparse_moe": _ROUTER,
    }.get(block, {})
    kinds = projections.get(leaf) or _ENCODERS.get(module, ())
    return ModuleName(path, rest, layer, kinds)


def _expert_module(module: ModuleName, found: re.Match[str]) -> ModuleName:
    number, leaf = found["expert"], found["leaf"]
    if number is None and leaf in _WRAPPERS:
        return replace(module, parameter="")
    expert = None if number is None else int(number)
    return replace(module, expert=expert, kinds=_EXPERT_LEAVES.get(leaf or "", ()))
