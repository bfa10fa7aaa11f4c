"""Configurations of both layouts of transformers, and refusals that name their field."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from weft.checkpoint import architectures
from weft.checkpoint.config import ModelConfig, SlidingWindow
from weft.checkpoint.rope import RopeConfig
from weft.contract.errors import ModelError
from weft.testing.models.tiny_models import tiny_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(kind: str = "llama", **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(kind, **overrides))


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize("style", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("kind", ["none", "linear", "llama3"])
def test_both_layouts_of_rotation_parameters_are_read(style: str, kind: str) -> None:
    scaling: dict[str, Any] = {"linear": {"factor": 4.0}, "llama3": LLAMA3}.get(kind, {})
    name = "default" if kind == "none" else kind
    raw = without(tiny_config("llama"), "rope_parameters")
    if style == "transformers 5":
        raw["rope_parameters"] = {"rope_theta": 5e5, "rope_type": name, **scaling}
    else:
        raw |= {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}
        if kind == "linear":
            raw["rope_scaling"] = {"type": "linear", **scaling}
        elif kind == "llama3":
            raw["rope_scaling"] = {"rope_type": "llama3", **scaling}
    expected = {
        "none": RopeConfig(theta=5e5),
        "linear": RopeConfig(theta=5e5, scaling="linear", factor=4.0),
        "llama3": RopeConfig(
            theta=5e5,
            scaling="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192,
        ),
    }
    assert ModelConfig.from_dict(raw).rope == expected[kind]


def test_both_layouts_at_once_must_agree() -> None:
    new = {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}
    raw = {**tiny_config("llama"), "rope_parameters": new}
    alone = ModelConfig.from_dict(raw).rope
    old = {"rope_type": "llama3", **LLAMA3}
    assert ModelConfig.from_dict({**raw, "rope_scaling": old}).rope == alone
    with pytest.raises(ModelError, match="keep one of them"):
        ModelConfig.from_dict({**raw, "rope_scaling": {**old, "factor": 2.0}})


def test_the_original_length_stands_in_either_place() -> None:
    """The one of the whole file counts, as in transformers."""
    section = {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}
    raw = {**tiny_config("llama"), "rope_parameters": section}
    whole = {**raw, "original_max_position_embeddings": 64}
    assert ModelConfig.from_dict(whole).rope.original_max_positions == 64
    bare = without(section, "original_max_position_embeddings")
    whole["rope_parameters"] = bare
    assert ModelConfig.from_dict(whole).rope.original_max_positions == 64


def test_absent_fields_take_the_architectures_defaults() -> None:
    optional = (
        "head_dim", "num_key_value_heads", "attention_bias", "rms_norm_eps", "rope_parameters",
        "tie_word_embeddings", "hidden_act", "eos_token_id", "bos_token_id", "sliding_window",
        "use_sliding_window",
    )  # fmt: skip
    llama = ModelConfig.from_dict(without(tiny_config("llama"), *optional))
    assert (llama.head_dim, llama.num_kv_heads) == (12, 6)
    assert llama.rope == RopeConfig(theta=10_000.0)
    assert llama.eos_token_ids == ()
    assert llama.bos_token_id is None
    assert not llama.tie_word_embeddings
    assert ModelConfig.from_dict(without(tiny_config("qwen3"), "head_dim")).head_dim == 128


@pytest.mark.parametrize(
    ("kind", "attention_bias", "expected"),
    [
        ("llama", False, (False, False, False)),
        ("llama", True, (True, True, False)),
        ("qwen2", False, (True, False, False)),
        ("qwen2", True, (True, False, False)),
        ("qwen3", False, (False, False, True)),
        ("qwen3", True, (True, True, True)),
    ],
)
def test_biases_and_norms_follow_the_architecture(
    kind: str, attention_bias: bool, expected: tuple[bool, bool, bool]
) -> None:
    config = parse(kind, attention_bias=attention_bias)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == expected


def test_end_tokens_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", eos_token_id=7)))
    generation = tmp_path / "generation_config.json"
    assert ModelConfig.load(tmp_path).eos_token_ids == (7,)
    generation.write_text(json.dumps({"eos_token_id": [9, 7, 9, 8]}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (9, 7, 8)


@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("is_unigram", [True, False])
def test_where_no_file_names_an_end_the_tokenizers_is_taken(
    tmp_path: Path, is_added: bool, is_unigram: bool
) -> None:
    """As the gateway does."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", eos_token_id=None)))
    assert ModelConfig.load(tmp_path).eos_token_ids == ()
    vocab: Any = {"<unk>": 0, "a": 1, "</s>": 2}
    if is_unigram:
        vocab = [[token, 0.0] for token in vocab]
    added = [{"id": 2, "content": "</s>", "special": True}] if is_added else []
    tokenizer = {"added_tokens": added, "model": {"vocab": vocab}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert ModelConfig.load(tmp_path).eos_token_ids == ()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (2,)


def test_the_fingerprint_ignores_what_only_generation_uses() -> None:
    assert parse(eos_token_id=5, bos_token_id=6).fingerprint() == parse().fingerprint()
    assert parse(rms_norm_eps=1e-6).fingerprint() != parse().fingerprint()


@pytest.mark.parametrize(
    "overrides",
    [
        {"sliding_window": 16, "use_sliding_window": False},
        {"sliding_window": 2048, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 16, "use_sliding_window": True},
        {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
        {"layer_types": ["full_attention"] * 3, "sliding_window": 16, "use_sliding_window": True},
    ],
)
def test_a_window_without_effect_is_none(overrides: dict[str, Any]) -> None:
    config = parse("qwen2", **overrides)
    assert config.sliding_window is None
    assert config.fingerprint() == parse("qwen2").fingerprint()


ALL, MIXED = (0, 1, 2), ["full_attention", "sliding_attention", "full_attention"]
SWITCHED = {"sliding_window": 24, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("kind", "overrides", "layers"),
    [
        ("mistral", {"sliding_window": 24}, ALL),
        ("mistral", {"sliding_window": 24, "layer_types": ["sliding_attention"] * 3}, ALL),
        ("qwen2", {**SWITCHED, "max_window_layers": 0}, ALL),
        ("qwen2", {**SWITCHED, "max_window_layers": 1}, (1, 2)),
        ("qwen2", {**SWITCHED, "max_window_layers": 1, "layer_types": MIXED}, (1,)),
        ("qwen3", {**SWITCHED, "layer_types": MIXED}, (1,)),
        ("qwen3_moe", {**SWITCHED, "max_window_layers": 2}, ALL),
    ],
)
def test_layers_have_the_windows_that_transformers_gives_them(
    kind: str, overrides: dict[str, Any], layers: tuple[int, ...]
) -> None:
    from transformers import AutoConfig

    raw = tiny_config(kind, **overrides)
    config = ModelConfig.from_dict(raw)
    assert config.sliding_window == SlidingWindow(length=24, layers=layers)
    assert [config.window_of(i) for i in range(3)] == [24 if i in layers else None for i in ALL]
    assert config.common_window == (24 if layers == ALL else None)
    assert config.fingerprint() != ModelConfig.from_dict(tiny_config(kind)).fingerprint()
    theirs = AutoConfig.for_model(**raw)
    assert theirs.sliding_window == 24
    if kind in ("qwen2", "qwen3"):
        of_theirs = [i for i, x in enumerate(theirs.layer_types) if x == "sliding_attention"]
        assert tuple(of_theirs) == layers


def test_a_mistral_without_the_field_has_the_window_of_its_class() -> None:
    raw = without(tiny_config("mistral", max_position_embeddings=8192), "sliding_window")
    window = ModelConfig.from_dict(raw).sliding_window
    assert window == SlidingWindow(length=4096, layers=ALL)


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("architectures", {"architectures": None}),
        ("architectures", {"architectures": []}),
        ("architectures", {"architectures": [3]}),
        ("vocab_size", {"vocab_size": None}),
        ("hidden_size", {"hidden_size": 0}),
        ("hidden_size", {"hidden_size": "64"}),
        ("num_hidden_layers", {"num_hidden_layers": True}),
        ("num_attention_heads", {"num_attention_heads": -1}),
        ("num_key_value_heads", {"num_key_value_heads": 4}),
        ("head_dim", {"head_dim": 25}),
        ("head_dim", {"head_dim": None, "hidden_size": 71}),
        ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
        ("sliding_window", {"sliding_window": 128, "use_sliding_window": True}),
        ("sliding_window", {"architectures": ["MistralForCausalLM"], "sliding_window": -1}),
        ("max_window_layers",
         {"architectures": ["Qwen2ForCausalLM"], **SWITCHED, "max_window_layers": -1}),
        ("layer_types", {"architectures": ["Qwen2ForCausalLM"], "layer_types": MIXED}),
        ("layer_types",
         {"architectures": ["Qwen2ForCausalLM"], **SWITCHED, "layer_types": ["chunked"] * 3}),
        ("layer_types", {"architectures": ["MistralForCausalLM"], "layer_types": MIXED,
                         "sliding_window": 24}),
        ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("rope_parameters", {"rope_parameters": 3}),
        ("rope_parameters", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
        ("rope_parameters.rope_type", {"rope_parameters": {"rope_type": "other", "factor": 2.0}}),
        ("rope_parameters.partial_rotary_factor",
         {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("factor", {"rope_parameters": {"rope_type": "linear"}}),
        ("low_freq_factor", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}),
        ("rope_scaling.rope_type",
         {"rope_parameters": None, "rope_scaling": {"type": "mrope", "factor": 2.0}}),
        # transformers would take the second.
        ("rope_scaling", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("rope_scaling", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ("dual_chunk_attention_config",
         {"dual_chunk_attention_config": {"original_max_position_embeddings": 16}}),
        ("max_position_embeddings", {"max_position_embeddings": 10**12}),
        ("rms_norm_eps", {"rms_norm_eps": 10**400}),
        ("eos_token_id", {"eos_token_id": [1, -2]}),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(field: str, overrides: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        parse(**overrides)
    assert caught.value.param == field
    assert f"{field.split('.')[-1]}" in caught.value.message


# What transformers writes of these: the language part is a section of its own.
COMPOSITES = {
    "MllamaForConditionalGeneration": {
        "model_type": "mllama",
        "text_config": {"hidden_size": 2560, "model_type": "mllama_text_model"},
        "vision_config": {"hidden_size": 1152},
    },
    "PaliGemmaForConditionalGeneration": {
        "model_type": "mistral3",
        "text_config": {"hidden_size": 5120, "hidden_act": "silu"},
        "quantization_config": {"quant_method": "fp8"},
    },
    "BloomForCausalLM": {"n_embed": 768, "activation_function": "gelu_new"},
}


@pytest.mark.parametrize("architecture", COMPOSITES)
def test_an_unknown_architecture_is_named_before_anything_else(
    tmp_path: Path, architecture: str
) -> None:
    config = {"architectures": [architecture], **COMPOSITES[architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        ModelConfig.load(tmp_path)
    assert caught.value.param == "architectures"
    known = ", ".join(architectures.supported_architectures())
    told = caught.value.message
    assert told.startswith(f"{tmp_path}: architectures: {architecture!r} is not supported")
    assert told.endswith(f"; supported: {known}")
    assert ("missing: " in told) == (architecture != "PaliGemmaForConditionalGeneration")
    assert "LlamaForCausalLM" in known


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnConfig(ModelConfig):
    """A configuration of another distribution, with a field of its own."""

    num_memories: int


class OwnModel:
    """Its class, as far as configurations go."""

    @staticmethod
    def read_config(raw: Any, generation: Any, where: str) -> ModelConfig:
        """Reads a file in which everything is called otherwise."""
        if "wide" not in raw:
            raise ModelError(f"{where}: wide: is missing", param="wide")
        if raw.get("forgets"):
            return parse()
        known = {field.name: getattr(parse(), field.name) for field in fields(ModelConfig)}
        known |= {"architecture": "OwnModel", "hidden_size": raw["wide"]}
        return OwnConfig(**known, num_memories=raw["memories"])


class PlainModel:
    """A class without a configuration of its own."""


def test_models_of_other_distributions_bring_their_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"{__name__}"
    monkeypatch.setitem(sys.modules, module, sys.modules[__name__])
    points = [
        EntryPoint(name, f"{module}:{name}", "weft.models") for name in ("OwnModel", "PlainModel")
    ]
    monkeypatch.setattr(architectures, "entry_points", lambda group: points)

    def load(**config: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelConfig.load(tmp_path)

    own = load(architectures=["OwnModel"], wide=48, memories=7, hidden_act="relu")
    assert isinstance(own, OwnConfig)
    assert (own.hidden_size, own.num_memories) == (48, 7)
    other = load(architectures=["OwnModel"], wide=48, memories=8)
    assert own.fingerprint() != other.fingerprint()  # their pages are told apart
    with pytest.raises(ModelError, match="wide: is missing"):
        load(architectures=["OwnModel"])
    with pytest.raises(ModelError, match="read_config of OwnModel"):
        load(architectures=["OwnModel"], wide=48, forgets=True)
    # Others are read as Weft's own are.
    plain = load(**{**tiny_config("llama"), "architectures": ["PlainModel"]})
    assert plain.architecture == "PlainModel"
    with pytest.raises(ModelError, match=r"'Nothing'.*OwnModel.*PlainModel"):
        load(architectures=["Nothing"])


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "\x00\xff", "[" * 10**5])
def test_a_malformed_file_is_refused_by_its_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.load(tmp_path)
