"""Models that hear: Whisper's encoder, whose rows take the places of placeholder tokens of a text
model that `text_config` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.checkpoint.audio_config import AudioConfig, AudioNamesConfig, AudioProjectorConfig
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import Family
from weft.checkpoint.families.with_images import read_text_model
from weft.checkpoint.fields import Fields

_TOWER, _PROJECTOR = "audio_tower", "multi_modal_projector"
_VOXTRAL_TEXT: Mapping[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
    "head_dim": 128,
}
"""transformers' defaults of Voxtral's text model."""
_QWEN_POOLED = 2


def read_voxtral(family: Family) -> ModelConfig:
    """Rows side by side, as many as fill the width inside of the encoder's MLP: four."""
    audio = family.whole.section("audio_config")
    config, _ = read_text_model(family, _VOXTRAL_TEXT)
    hidden, inner = audio.positive("hidden_size", 1280), audio.positive("intermediate_size", 5120)
    if inner % hidden:
        raise audio.error("intermediate_size", f"{inner} is no multiple of hidden_size, {hidden}")
    _check_gelu(family.whole, "projector_hidden_act")
    projector = AudioProjectorConfig(joined=inner // hidden, out_features=config.hidden_size)
    tower = AudioConfig(
        num_mels=audio.positive("num_mel_bins", 128),
        num_positions=audio.positive("max_source_positions", 1500),
        hidden_size=hidden,
        num_layers=audio.positive("num_hidden_layers", 32),
        num_heads=audio.positive("num_attention_heads", 20),
        intermediate_size=inner,
        projector=projector,
        names=_names("linear_1", "linear_2"),
    )
    return _with_tower(config, tower, audio)


def read_qwen2_audio(family: Family) -> ModelConfig:
    """The mean of two rows. What lies behind a clip's end is neither attended to nor a row."""
    audio = family.whole.section("audio_config")
    config, _ = read_text_model(family)
    tower = AudioConfig(
        num_mels=audio.positive("num_mel_bins", 128),
        num_positions=audio.positive("max_source_positions", 1500),
        hidden_size=audio.positive("d_model", 1280),
        num_layers=audio.positive("encoder_layers", 32),
        num_heads=audio.positive("encoder_attention_heads", 20),
        intermediate_size=audio.positive("encoder_ffn_dim", 5120),
        projector=AudioProjectorConfig(
            joined=_QWEN_POOLED,
            out_features=config.hidden_size,
            is_mean=True,
            takes_lengths=True,
        ),
        names=_names("linear"),
    )
    return _with_tower(config, tower, audio)


def _names(*projections: str) -> AudioNamesConfig:
    return AudioNamesConfig(tower=_TOWER, projector=_PROJECTOR, projections=projections)


def _with_tower(config: ModelConfig, tower: AudioConfig, audio: Fields) -> ModelConfig:
    _check_gelu(audio, "activation_function")
    if tower.hidden_size % tower.num_heads:
        told = f"{tower.num_heads} heads do not divide {tower.hidden_size}"
        raise audio.error("num_attention_heads", told)
    assert tower.projector is not None, "both kinds have one"
    if tower.num_positions % tower.projector.joined:
        told = f"{tower.num_positions} is no multiple of {tower.projector.joined}"
        raise audio.error("max_source_positions", told)
    names = replace(config.names, left_out=(f"{_TOWER}.", f"{_PROJECTOR}."))
    return replace(config, names=names, audio=tower)


def _check_gelu(fields: Fields, name: str) -> None:
    function = fields.text(name, "gelu")
    if function != "gelu":
        raise fields.error(name, f"only gelu is supported, not {function!r:.40}")
