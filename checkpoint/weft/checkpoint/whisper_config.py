"""The configuration of Whisper, whose decoder attends to the rows of one clip. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.checkpoint.audio_config import AlignmentConfig, AudioConfig, AudioNamesConfig
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.end_tokens import end_token_ids
from weft.checkpoint.fields import Fields
from weft.checkpoint.parts import NamesConfig
from weft.checkpoint.quantization import read_quantization
from weft.checkpoint.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperConfig(ModelConfig):
    """Configuration of a Whisper model. A prompt begins with the placeholders of a clip; the
    decoder's own positions are counted after them.
    """

    max_target_positions: int
    """Most tokens after a clip."""
    scales_embedding: bool
    alignment: AlignmentConfig

    @property
    def aligned_by(self) -> AlignmentConfig:
        return self.alignment


def read_whisper_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """The `ConfigReader` of Whisper."""
    fields = Fields(raw, where)
    hidden, heads = fields.positive("d_model", 384), fields.positive("decoder_attention_heads", 6)
    of_tower = fields.positive("encoder_attention_heads", 6)
    for name, count in (("decoder_attention_heads", heads), ("encoder_attention_heads", of_tower)):
        if hidden % count:
            raise fields.error(name, f"{count} does not divide {hidden}")
    function = fields.text("activation_function", "gelu")
    if function != "gelu":
        raise fields.error("activation_function", f"only gelu is supported, not {function!r}")
    tower = AudioConfig(
        num_mels=fields.positive("num_mel_bins", 80),
        num_positions=fields.positive("max_source_positions", 1500),
        hidden_size=hidden,
        num_layers=fields.positive("encoder_layers", 4),
        num_heads=of_tower,
        intermediate_size=fields.positive("encoder_ffn_dim", 1536),
    )
    longest = fields.positive("max_target_positions", 448)
    if longest > tower.num_positions:
        raise fields.error(
            "max_target_positions", f"{longest} is more than the {tower.num_positions} of a clip"
        )
    layers = fields.positive("decoder_layers", 4)
    median_width = fields.positive("median_filter_width", 7)
    if not median_width % 2:
        raise fields.error("median_filter_width", f"{median_width} is not odd")
    if read_quantization(fields) is not None:
        raise fields.error("quantization_config", "is not supported for this architecture")
    return WhisperConfig(
        architecture=str(raw["architectures"][0]),
        model_type=fields.text("model_type", ""),
        vocab_size=fields.positive("vocab_size", 51865),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.positive("decoder_ffn_dim", 1536),
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1.0),
        max_position_embeddings=tower.num_rows + longest,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=False,
        moe=None,
        sliding_window=None,
        eos_token_ids=end_token_ids(raw, generation, where),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        names=NamesConfig(
            bodies=("model.decoder",),
            heads=("proj_out",),
            left_out=(f"{AudioNamesConfig().tower}.",),
        ),
        audio=tower,
        max_target_positions=longest,
        scales_embedding=fields.flag("scale_embedding", False),
        alignment=AlignmentConfig(
            heads=_alignment_heads(Fields(generation, "generation_config.json"), layers, heads),
            median_width=median_width,
            num_frames=tower.num_positions,
        ),
    )


def _alignment_heads(
    generation: Fields, num_layers: int, num_heads: int
) -> tuple[tuple[int, int], ...]:
    """All heads of the upper half of the layers, as in OpenAI's program, if the model's files name
    none.
    """
    given = generation.get("alignment_heads")
    if given is None:
        upper = range(num_layers // 2, num_layers)
        return tuple((layer, head) for layer in upper for head in range(num_heads))
    known = {(layer, head) for layer in range(num_layers) for head in range(num_heads)}
    try:
        named = {(layer, head) for layer, head in given}
        is_known = bool(named) and named <= known
    except (TypeError, ValueError):
        is_known = False
    if not is_known:
        raise generation.error("alignment_heads", "is no list of the decoder's layers and heads")
    return tuple(sorted(named))
