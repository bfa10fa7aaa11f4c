"""Architecture names to classes, which are imported when first needed.

No module here imports torch before a class is asked for, since services read configurations too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from weft.checkpoint.refused import missing_part, unsupported
from weft.checkpoint.transformers_registry import known_to_transformers, own_class
from weft.contract.errors import ModelError

ENTRY_POINT_GROUP = "weft.models"
"""Entry-point group in which other distributions register architectures; name = architecture, value
= module:class.
"""

_PLAIN = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM",
)
"""Architectures whose configuration `ModelConfig` reads."""
_FAMILIES = {
    "AfmoeForCausalLM": ("afmoe", "read_afmoe"),
    "ApertusForCausalLM": ("llamas", "read_apertus"),
    "ArceeForCausalLM": ("llamas", "read_arcee"),
    "BailingMoeV2ForCausalLM": ("glm4_moe", "read_ling2"),
    "BailingHybridForCausalLM": ("kimi_linear", "read_ling3"),
    "BailingMoeV3ForCausalLM": ("kimi_linear", "read_ling3"),
    "BambaForCausalLM": ("mamba", "read_bamba"),
    "CodeGenForCausalLM": ("gpt", "read_codegen"),
    "Cohere2ForCausalLM": ("cohere", "read_cohere2"),
    "Cohere2MoeForCausalLM": ("cohere", "read_cohere2_moe"),
    "CohereForCausalLM": ("cohere", "read_cohere"),
    "CwmForCausalLM": ("llamas", "read_cwm"),
    "DeepseekV2ForCausalLM": ("deepseek", "read_deepseek_v2"),
    "DeepseekV3ForCausalLM": ("deepseek", "read_deepseek_v3"),
    "Dots1ForCausalLM": ("glm4_moe", "read_dots1"),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", "read_ernie_moe"),
    "Ernie4_5ForCausalLM": ("llamas", "read_ernie"),
    "ExaoneMoeForCausalLM": ("exaone4", "read_exaone_moe"),
    "Exaone4ForCausalLM": ("exaone4", "read_exaone4"),
    "FalconForCausalLM": ("gpt", "read_falcon"),
    "FalconH1ForCausalLM": ("mamba", "read_falcon_h1"),
    "FlexOlmoForCausalLM": ("olmo", "read_flex_olmo"),
    "FlintForCausalLM": ("flint", "read_flint"),
    "Gemma2ForCausalLM": ("gemma", "read_gemma2"),
    "Gemma3ForCausalLM": ("gemma", "read_gemma3"),
    "Gemma3ForConditionalGeneration": ("gemma", "read_gemma3"),
    "GemmaForCausalLM": ("gemma", "read_gemma"),
    "Gemma3nForCausalLM": ("gemma3n", "read_gemma3n"),
    "Gemma3nForConditionalGeneration": ("gemma3n", "read_gemma3n"),
    "Gemma4ForCausalLM": ("gemma4", "read_gemma4"),
    "Gemma4ForConditionalGeneration": ("gemma4", "read_gemma4"),
    "Gemma4UnifiedForCausalLM": ("gemma4", "read_gemma4"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4", "read_gemma4"),
    "Glm4ForCausalLM": ("glm4", "read_glm4"),
    "Glm4MoeForCausalLM": ("glm4_moe", "read_glm4_moe"),
    "Glm4MoeLiteForCausalLM": ("deepseek", "read_glm4_lite"),
    "GlmForCausalLM": ("glm4", "read_glm"),
    "GPT2LMHeadModel": ("gpt", "read_gpt2"),
    "GPTBigCodeForCausalLM": ("gpt", "read_bigcode"),
    "GPTJForCausalLM": ("gpt", "read_gptj"),
    "GPTNeoForCausalLM": ("gpt", "read_gpt_neo"),
    "GPTNeoXForCausalLM": ("gpt", "read_gpt_neox"),
    "GptOssForCausalLM": ("gpt_oss", "read_gpt_oss"),
    "GraniteForCausalLM": ("granite", "read_granite"),
    "GraniteMoeForCausalLM": ("granite", "read_granite_moe"),
    "GraniteMoeHybridForCausalLM": ("mamba", "read_granite_hybrid"),
    "GraniteMoeSWAForCausalLM": ("granite", "read_granite_moe_swa"),
    "GraniteMoeSharedForCausalLM": ("granite", "read_granite_shared"),
    "GraniteSWAForCausalLM": ("granite", "read_granite_swa"),
    "HeliumForCausalLM": ("llamas", "read_helium"),
    "HunYuanDenseV1ForCausalLM": ("hunyuan", "read_hunyuan"),
    "HunYuanMoEV1ForCausalLM": ("hunyuan", "read_hunyuan_moe"),
    "HYV3ForCausalLM": ("hunyuan", "read_hy3"),
    "HyperCLOVAXForCausalLM": ("granite", "read_hyperclovax"),
    "Idefics3ForConditionalGeneration": ("with_images", "read_with_images"),
    "InternLM3ForCausalLM": ("llamas", "read_internlm3"),
    "InternVLForConditionalGeneration": ("with_images", "read_with_images"),
    "Jais2ForCausalLM": ("layer_normed", "read_jais2"),
    "JambaForCausalLM": ("jamba", "read_jamba"),
    "KimiLinearForCausalLM": ("kimi_linear", "read_kimi_linear"),
    "Lfm2ForCausalLM": ("lfm2", "read_lfm2"),
    "Lfm2MoeForCausalLM": ("lfm2", "read_lfm2_moe"),
    "Lfm2VlForConditionalGeneration": ("with_images", "read_with_images"),
    "Lfm3ForCausalLM": ("lfm2", "read_lfm3"),
    "MiMoForCausalLM": ("llamas", "read_mimo"),
    "Kimi_K25ForConditionalGeneration": ("deepseek", "read_deepseek_v3"),
    "KimiK25ForConditionalGeneration": ("deepseek", "read_deepseek_v3"),
    "LagunaForCausalLM": ("laguna", "read_laguna"),
    "Llama4ForCausalLM": ("llama4", "read_llama4"),
    "Llama4ForConditionalGeneration": ("llama4", "read_llama4"),
    "LlavaForConditionalGeneration": ("with_images", "read_with_images"),
    "LlavaNextForConditionalGeneration": ("with_images", "read_with_images"),
    "LlavaOnevisionForConditionalGeneration": ("with_images", "read_with_images"),
    "MellumForCausalLM": ("mellum", "read_mellum"),
    "MiMoV2FlashForCausalLM": ("mimo", "read_mimo"),
    "MiniCPM3ForCausalLM": ("deepseek", "read_minicpm3"),
    "MiniCPMForCausalLM": ("granite", "read_minicpm"),
    "MiniMaxForCausalLM": ("minimax", "read_minimax"),
    "MiniMaxM1ForCausalLM": ("minimax", "read_minimax"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "read_minimax_m2"),
    "MiniMaxText01ForCausalLM": ("minimax", "read_minimax"),
    "Ministral3ForCausalLM": ("llamas", "read_mistral3"),
    "MinistralForCausalLM": ("llamas", "read_ministral"),
    "Mistral4ForCausalLM": ("deepseek", "read_mistral4"),
    "Mistral3ForConditionalGeneration": ("llamas", "read_mistral3"),
    "MixtralForCausalLM": ("mixtral", "read_mixtral"),
    "NemotronHForCausalLM": ("mamba", "read_nemotron_h"),
    "NemotronForCausalLM": ("layer_normed", "read_nemotron"),
    "Olmo2ForCausalLM": ("olmo", "read_olmo2"),
    "Olmo3ForCausalLM": ("olmo", "read_olmo3"),
    "OlmoForCausalLM": ("olmo", "read_olmo"),
    "OlmoeForCausalLM": ("olmo", "read_olmoe"),
    "OPTForCausalLM": ("gpt", "read_opt"),
    "PaddleOCRVLForConditionalGeneration": ("paddleocr_vl", "read_paddleocr_vl"),
    "PhiForCausalLM": ("phi3", "read_phi"),
    "PhimoeForCausalLM": ("phi3", "read_phi_moe"),
    "PhiMoEForCausalLM": ("phi3", "read_phi_moe"),
    "Phi3ForCausalLM": ("phi3", "read_phi3"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen_vl", "read_qwen2_vl"),
    "Qwen2AudioForConditionalGeneration": ("with_audio", "read_qwen2_audio"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "read_qwen2_moe"),
    "Qwen2VLForConditionalGeneration": ("qwen_vl", "read_qwen2_vl"),
    "Qwen3NextForCausalLM": ("qwen3_next", "read_qwen3_next"),
    "Qwen3VLForConditionalGeneration": ("qwen_vl", "read_qwen3_vl"),
    "Qwen3_5ForCausalLM": ("qwen3_next", "read_qwen3_5"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_next", "read_qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("qwen3_next", "read_qwen3_5_moe"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_next", "read_qwen3_5_moe"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen_vl", "read_qwen3_vl_moe"),
    "SarvamMLAForCausalLM": ("deepseek", "read_sarvam_mla"),
    "SarvamMoEForCausalLM": ("glm4_moe", "read_sarvam"),
    "SeedOssForCausalLM": ("llamas", "read_seed_oss"),
    "SmolLM3ForCausalLM": ("llamas", "read_smollm3"),
    "SmolVLMForConditionalGeneration": ("with_images", "read_with_images"),
    "SolarOpenForCausalLM": ("glm4_moe", "read_solar"),
    "StableLmForCausalLM": ("layer_normed", "read_stablelm"),
    "Starcoder2ForCausalLM": ("layer_normed", "read_starcoder2"),
    "Step3p5ForCausalLM": ("laguna", "read_step3"),
    "Step3p7ForConditionalGeneration": ("laguna", "read_step3"),
    "VaultGemmaForCausalLM": ("gemma", "read_vault_gemma"),
    "VoxtralForConditionalGeneration": ("with_audio", "read_voxtral"),
    "XGLMForCausalLM": ("gpt", "read_xglm"),
    "YoutuForCausalLM": ("deepseek", "read_youtu"),
}
"""For architectures made of `weft.checkpoint.parts`: the module of `weft.checkpoint.families` and
the function that reads their configuration.
"""
_OF_PARTS = ("weft.engine.model.archs.decoder", "Decoder")


HEADLESS, CLASSIFIER, LANGUAGE_MODEL = "Model", "ForSequenceClassification", "ForCausalLM"
"""Ends of the names of a decoder's architectures: without a head, with a classification head, and
with an LM head.
"""
_BERT = ("weft.engine.model.archs.bert", "BertModel")
_STEMS = {
    **dict.fromkeys(
        (
            "Bert",
            "Gte",
            "JinaBert",
            "JinaEmbeddingsV3",
            "New",
            "NomicBert",
            "Roberta",
            "XLMRoberta",
        ),
        _BERT,
    ),
    "ModernBert": ("weft.engine.model.archs.modern_bert", "ModernBertModel"),
}
"""Classes of encoders, by the first part of their architectures' names."""
_ENCODER_ENDS = (HEADLESS, CLASSIFIER, "ForMaskedLM")
_ENCODERS = {f"{stem}{end}": location for stem, location in _STEMS.items() for end in _ENCODER_ENDS}
_WHISPER = "WhisperForConditionalGeneration"
_LOCATIONS = {
    **dict.fromkeys(_PLAIN, _OF_PARTS),
    **_ENCODERS,
    _WHISPER: ("weft.engine.model.archs.whisper", _WHISPER),
}


_BIDIRECTIONAL = {
    "EuroBertForMaskedLM": "LlamaForCausalLM",
    "EuroBertModel": "LlamaForCausalLM",
    "LlamaBidirectionalForSequenceClassification": "LlamaForCausalLM",
    "LlamaBidirectionalModel": "LlamaForCausalLM",
}
"""Bidirectional decoders, and the causal decoder with the same layers."""
_TEXT_MODELS = {
    **dict.fromkeys(
        ("Gemma3TextModel", "Gemma3TextForSequenceClassification"), "Gemma3ForCausalLM"
    ),
    **dict.fromkeys(("GPT2Model", "GPT2ForSequenceClassification"), "GPT2LMHeadModel"),
}
"""Decoders without an LM head whose names have other ends."""


def is_bidirectional(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a bidirectional model: an encoder, or a decoder that was trained
    so.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    is_named = bool(encoder_stem(name)) or name in _BIDIRECTIONAL
    is_told = raw.get("is_causal") is False or raw.get("use_bidirectional_attention") is True
    return is_named or is_told


def encoder_stem(architecture: str) -> str:
    """The first part of an encoder's name, which tells its kind; empty: the architecture is no
    encoder.
    """
    ends = (end for end in _ENCODER_ENDS if architecture.endswith(end))
    stems = (architecture.removesuffix(end) for end in ends)
    return next((stem for stem in stems if stem in _STEMS), "")


def is_headless(architecture: str) -> bool:
    """Whether an architecture has no head, by its name. The name of GPT-2 with an LM head ends in
    the same word.
    """
    return architecture.endswith(HEADLESS) and not architecture.endswith("LMHeadModel")


def language_model_name(architecture: str) -> str:
    """The name of the same decoder with an LM head; one class implements them all."""
    if architecture in _BIDIRECTIONAL or architecture in _TEXT_MODELS:
        return {**_BIDIRECTIONAL, **_TEXT_MODELS}[architecture]
    for end in (HEADLESS, CLASSIFIER):
        if architecture.endswith(end):
            name = architecture.removesuffix(end) + LANGUAGE_MODEL
            return name if name in _PLAIN or name in _FAMILIES else architecture
    return architecture


def supported_architectures() -> tuple[str, ...]:
    points = (point.name for point in _entry_points())
    return tuple(sorted({*_LOCATIONS, *_FAMILIES, *points}))


def _has_class(architecture: str) -> bool:
    name = language_model_name(architecture)
    # Entry points are read from the files of all installed distributions: milliseconds.
    return name in _LOCATIONS or name in _FAMILIES or name in supported_architectures()


def check_architecture(architecture: str, raw: Mapping[str, Any] | None = None) -> None:
    """Raises ModelError for an architecture that no class implements; imports no class. `raw`: the
    config.json, which may name a class in a file of its directory.
    """
    if _has_class(architecture):
        return
    if not is_run_by_transformers(architecture, raw or {}):
        raise unsupported(architecture, supported_architectures())


def is_run_by_transformers(architecture: str, raw: Mapping[str, Any]) -> bool:
    """Whether transformers' modelling code, or code of the model's directory, computes an
    architecture, since no class here does.
    """
    if _has_class(architecture):
        return False
    is_known = architecture in known_to_transformers() and missing_part(architecture) is None
    return is_known or bool(own_class(raw))


def load_class(architecture: str) -> Any:
    """The class that implements `architectures[0]` of a Hugging Face configuration."""
    name = language_model_name(architecture)
    location = _OF_PARTS if name in _FAMILIES else _LOCATIONS.get(name)
    if location is not None:
        module, name = location
        return getattr(import_module(module), name)
    for point in _entry_points():
        if point.name == architecture:
            return _load(point)
    raise unsupported(architecture, supported_architectures())


ConfigReader = Callable[[Mapping[str, Any], Mapping[str, Any], str], Any]
"""Reads a model's configuration: (content of config.json, content of generation_config.json or an
empty mapping, name of the source in messages) -> a `ModelConfig`, or an instance of a frozen
subclass with further fields, which the model's constructor gets. Every value that changes hidden
states must be a field, since the fields identify cached pages. Raises ModelError where a value is
missing, malformed or not supported.
"""


def configuration_reader(
    architecture: str, raw: Mapping[str, Any] | None = None
) -> ConfigReader | None:
    """The function that reads config.json, `raw`, in place of `ModelConfig`, for a family, for
    encoders, for what transformers computes, or for a class from another distribution, whose
    `read_config` it is; None: `ModelConfig` reads it.
    """
    if language_model_name(architecture) in _PLAIN:
        return None
    family = _FAMILIES.get(language_model_name(architecture))
    if family is not None:
        return _family_reader(*family)
    if architecture in _ENCODERS:
        return _reader("encoder_config", "read_encoder_config")
    if architecture == _WHISPER:
        return _reader("whisper_config", "read_whisper_config")
    if is_run_by_transformers(architecture, raw or {}):
        return _reader("transformers_config", "read_by_transformers")
    reader: ConfigReader | None = getattr(load_class(architecture), "read_config", None)
    return reader


def _family_reader(module: str, name: str) -> ConfigReader:
    config_reader = _imported("families.family", "config_reader")
    reader: ConfigReader = config_reader(_imported(f"families.{module}", name))
    return reader


def _reader(module: str, name: str) -> ConfigReader:
    reader: ConfigReader = _imported(module, name)
    return reader


def _imported(module: str, name: str) -> Any:
    # By name, since modules of readers import `ModelConfig`, whose module imports this one.
    return getattr(import_module(f"weft.checkpoint.{module}"), name)


def _entry_points() -> list[EntryPoint]:
    return list(entry_points(group=ENTRY_POINT_GROUP))


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"architecture {point.name!r}: cannot load {point.value}: {error}"
        ) from error
