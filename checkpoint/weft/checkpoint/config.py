"""The checked and normalised Hugging Face `config.json` of a decoder-only model.

Pure Python: services may read a model's limits without importing torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.checkpoint.architectures import (
    CLASSIFIER,
    check_architecture,
    configuration_reader,
    is_bidirectional,
    is_headless,
    language_model_name,
)
from weft.checkpoint.audio_config import AlignmentConfig, AudioConfig
from weft.checkpoint.end_tokens import end_token_ids, tokenizer_end_token
from weft.checkpoint.fields import Fields, read_json_file
from weft.checkpoint.latent_config import LatentConfig
from weft.checkpoint.moe_config import MoEConfig, qwen_experts, without_defaults
from weft.checkpoint.mtp_config import MtpConfig
from weft.checkpoint.parts import DecoderConfig, NamesConfig
from weft.checkpoint.quantization import Quantization, read_quantization
from weft.checkpoint.quantization_files import with_quantization
from weft.checkpoint.rope import RopeConfig, for_context, rope_config, rope_values
from weft.checkpoint.vision_config import VisionConfig, with_pixels
from weft.contract.errors import ModelError

MAX_POSITIONS = 1 << 24
"""Most positions of a model; the table of rotations has a row for each."""
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28
_NOT_HIDDEN_STATES = (
    *("eos_token_ids", "bos_token_id", "num_added_tokens", "quantization", "names"),
    *("frees_windows", "head", "num_labels", "is_encoder", "mtp", "vision", "audio"),
    "alignment",
)
"""Fields that are not in the fingerprint; quantisation and towers have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Properties of an architecture that config.json does not contain."""

    qkv_bias: bool | None = None
    """Whether q, k and v have biases; None: `attention_bias` decides, also for the output."""
    qk_norm: bool = False
    head_dim: int | None = None
    """Head size where the file has none; None: hidden_size / num_attention_heads."""
    windows: Literal["none", "all", "listed"] = "none"
    """Layers with a sliding window; listed: by `layer_types` or `max_window_layers`."""
    has_window_switch: bool = False
    """Whether a sliding window applies only if `use_sliding_window` is set."""
    has_experts: bool = False


_FAMILIES = {
    "MistralForCausalLM": _Family(windows="all"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, windows="listed", has_window_switch=True),
    "Qwen3ForCausalLM": _Family(
        qk_norm=True, head_dim=128, windows="listed", has_window_switch=True
    ),
    "Qwen3MoeForCausalLM": _Family(
        qk_norm=True, has_experts=True, windows="all", has_window_switch=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Layers whose rows attend to the last positions only."""

    length: int
    """Positions that a row attends to, its own included."""
    layers: tuple[int, ...]
    """Indices of the layers with a window, from 0; at least one."""
    is_chunked: bool = False
    """Whether the window is a chunk that begins at multiples of its length, and does not slide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a model, whatever the format of its weights."""

    architecture: str
    """`architectures[0]`, the registry's key."""
    model_type: str
    vocab_size: int
    """Rows of the embedding and of the LM head in the checkpoint."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Heads of K and V; divides num_heads."""
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    """Longest context, tokens."""
    tie_word_embeddings: bool
    """Whether the LM head shares the embedding's weight."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each head of q and k is RMS-normalised before the rotation."""
    moe: MoEConfig | None
    """Experts; None: every layer has one MLP."""
    sliding_window: SlidingWindow | None
    """None: every layer attends to the whole context, or no context is longer than the window."""
    eos_token_ids: tuple[int, ...]
    """As `end_token_ids` returns them; empty if no file names one."""
    bos_token_id: int | None
    quantization: Quantization | None = None
    """Format of the checkpoint's products; None: floats."""
    decoder: DecoderConfig | None = None
    """Parts of the layers (`weft.checkpoint.parts`), if the fields above cannot describe them."""
    latent: LatentConfig | None = None
    """Latent attention; None: heads have keys and values of their own."""
    names: NamesConfig = NamesConfig()  # noqa: RUF009 - frozen
    """Names of the checkpoint's parts."""
    mtp: MtpConfig | None = None
    """The MTP head that checkpoints of this kind may have; None: they have none."""
    vision: VisionConfig | None = None
    """The image tower; None: the checkpoint has none, or one that is not supported."""
    audio: AudioConfig | None = None
    """The audio tower; None: the model takes no clips."""
    num_added_tokens: int = 0
    """Rows after the checkpoint's, for tokens that adapters add; they are zeros without an
    adapter.
    """
    frees_windows: bool = False
    """Whether layers with a sliding window have pages of their own, which are freed once the window
    has passed them.
    """
    head: Literal["tokens", "classes", "none"] = "tokens"
    """tokens: LM head. classes: classification head."""
    is_encoder: bool = False
    """Whether tokens also attend to later tokens. Prompts are then computed whole and have
    no KV.
    """
    num_labels: int = 0
    """Classes of the classification head; 0: there is no such head."""

    @property
    def tower(self) -> VisionConfig | AudioConfig | None:
        """What makes rows of media; None: prompts have none."""
        return self.audio if self.vision is None else self.vision

    @property
    def attends_to_clips(self) -> bool:
        """Whether each layer attends to the rows of a clip with which each prompt begins."""
        return self.audio is not None and self.audio.projector is None

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that the table of rotations covers."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding and of the LM head, which is the number of a token's logits."""
        return self.vocab_size + self.num_added_tokens

    @property
    def aligned_by(self) -> AlignmentConfig | None:
        """How tokens are aligned to a clip; None: the model cannot tell."""
        return None

    @classmethod
    def load(cls, model_dir: Path, max_context_tokens: int | None = None) -> ModelConfig:
        """Reads `config.json` and, if present, `generation_config.json` of a directory, and of a
        model with an image tower also what its processor says of pixels.
        `max_context_tokens` is the longest context that is served, which decides between LongRoPE's
        factors; None: the model's.
        """
        raw = for_context(read_json_file(model_dir / "config.json"), max_context_tokens)
        raw, source = with_quantization(raw, model_dir)
        generation = read_json_file(model_dir / "generation_config.json", may_lack=True)
        try:
            config = cls.from_dict(raw, generation, where=str(model_dir))
        except ModelError as error:
            if source is None or error.param != "quantization_config":
                raise
            problem = f"{error.message} (read from {source.name})"
            raise ModelError(problem, param=error.param) from error
        if config.vision is not None:
            config = replace(config, vision=with_pixels(config.vision, model_dir))
        if config.eos_token_ids:
            return config
        return replace(config, eos_token_ids=tokenizer_end_token(model_dir))

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        *,
        where: str = "config.json",
    ) -> ModelConfig:
        """Normalises parsed JSON, of transformers 4 or 5 layout. For an architecture of another
        distribution, its class does so (`ConfigReader`). Messages call the source `where`.
        """
        fields = Fields(raw, where)
        architecture = _architecture(fields)
        try:
            # Checked first: errors about fields of an unsupported architecture would mislead.
            check_architecture(architecture, raw)
            read_config = configuration_reader(architecture, raw)
        except ModelError as error:
            raise ModelError(f"{where}: {error.message}", param="architectures") from error
        if read_config is not None:
            return _checked(read_config(raw, generation or {}, where), architecture, where)
        family = _FAMILIES.get(language_model_name(architecture), _Family())
        is_classifier = architecture.endswith(CLASSIFIER)
        attention_bias = fields.flag("attention_bias", False)
        _refuse_unsupported(fields)
        hidden_size = fields.positive("hidden_size")
        num_heads = fields.positive("num_attention_heads")
        config = cls(
            architecture=architecture,
            model_type=fields.text("model_type", ""),
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            num_layers=fields.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_heads),
            head_dim=fields.positive("head_dim", _default_head_dim(fields, family)),
            intermediate_size=fields.positive("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope_config(fields),
            max_position_embeddings=max_positions(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias and family.qkv_bias is None,
            mlp_bias=fields.flag("mlp_bias", False),
            qk_norm=family.qk_norm,
            moe=qwen_experts(fields) if family.has_experts else None,
            sliding_window=_sliding_window(fields, family),
            eos_token_ids=end_token_ids(raw, generation or {}, where),
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            quantization=read_quantization(fields),
            head="classes" if is_classifier else head_of(architecture),
            is_encoder=is_bidirectional(raw),
            num_labels=num_labels(fields) if is_classifier else 0,
        )
        if config.is_encoder and config.sliding_window is not None:
            raise fields.error("sliding_window", "not supported with attention in both directions")
        check_shape(config, fields)
        return config

    def window_of(self, layer: int) -> int | None:
        """Most positions that a row of a layer attends to; None: all. Layers count from 0."""
        window = self.sliding_window
        return window.length if window is not None and layer in window.layers else None

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the layers that have K and V."""
        if self.decoder is None:
            return list(range(self.num_layers))
        return list(self.decoder.attention_layers)

    @property
    def page_planes(self) -> list[tuple[int | None, list[tuple[int, int, list[int]]]]]:
        """`page_groups` with the layers of each group by their K and V: heads, elements of a head,
        and indices of the layers.
        """
        planes = []
        for reach, numbers in self.page_groups:
            shapes: dict[tuple[int, int], list[int]] = {}
            for layer in numbers:
                shapes.setdefault(self.kv_shape(layer), []).append(layer)
            planes.append((reach, [(*shape, layers) for shape, layers in shapes.items()]))
        return planes

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """K and V heads of a layer, and elements of a head as they are cached."""
        own = None if self.decoder is None else self.decoder.attention_of(layer)
        if own is None:
            return self.num_kv_heads, self.head_dim
        return own.kv_heads or self.num_kv_heads, own.head_dim or self.head_dim

    @property
    def most_grouped(self) -> int:
        """Most query heads that share a K and V head."""
        if self.decoder is None:
            return self.num_heads // self.num_kv_heads
        return max(
            (layer.heads or self.num_heads) // (layer.kv_heads or self.num_kv_heads)
            for layer in self.decoder.attentions
        )

    def kv_source(self, layer: int) -> int:
        """The layer whose K and V a layer attends to: itself in most models."""
        found = None if self.decoder is None else self.decoder.attention_of(layer).kv_from
        return layer if found is None else found

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers have products of the same shapes."""
        if self.decoder is None:
            return True
        attentions, own = self.decoder.attentions, self.decoder.attention
        shapes = {(one.heads, one.kv_heads, one.head_dim, one.value_dim) for one in attentions}
        has_others = own.is_value_key or own.value_dim is not None or bool(self.names.blocks)
        has_others |= self.latent is not None and bool(self.decoder.recurrent_layers)
        has_others |= len(shapes) > 1 or len(set(self.decoder.mlp.sizes)) > 1
        return not has_others and all(layer.kv_from is None for layer in attentions)

    @property
    def adapted_kinds(self) -> tuple[str, ...] | None:
        """The kinds of projections that adapters may change; None: all that the sizes speak of."""
        return None

    @property
    def has_windows(self) -> bool:
        """Whether some pages can be freed once a sliding window has passed them. The first page
        group keeps all its pages, so that this takes a layer with a window in another group.
        """
        windows = [self.window_of(n) for n in self.attention_layers if self.kv_source(n) == n]
        return not self.is_encoder and any(windows) and len(windows) > 1

    @property
    def page_groups(self) -> list[tuple[int | None, list[int]]]:
        """For each page group, its window and the indices of its layers. The first group has window
        None and keeps all positions. It has the layers without a window or, if all layers have one,
        the first layer.
        """
        numbers = [n for n in self.attention_layers if self.kv_source(n) == n]
        if not (self.frees_windows and self.has_windows):
            return [(None, numbers)]
        kept = [layer for layer in numbers if self.window_of(layer) is None] or numbers[:1]
        windowed = [layer for layer in numbers if layer not in kept]
        return [(None, kept), (max(self.window_of(layer) or 0 for layer in windowed), windowed)]

    @property
    def common_window(self) -> int | None:
        """The window that all layers have; None if a layer attends to the whole context."""
        window = self.sliding_window
        has_all = window is not None and len(window.layers) == self.num_layers
        return window.length if window is not None and has_all else None

    def fingerprint(self) -> bytes:
        """Canonical bytes of every field that changes hidden states, part of the model's digest."""
        values = {**asdict(self), "rope": rope_values(self.rope)}
        for name in _NOT_HIDDEN_STATES:
            values.pop(name, None)
        if self.moe is not None:
            values["moe"] = self.moe.values()
        if self.sliding_window is not None:
            values["sliding_window"] = without_defaults(self.sliding_window, 2)
        if self.decoder is not None:
            values["decoder"] = self.decoder.values()
        for name in ("moe", "latent", "sliding_window", "decoder"):
            if values[name] is None:
                del values[name]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _checked(config: object, architecture: str, where: str) -> ModelConfig:
    if not isinstance(config, ModelConfig) or config.architecture != architecture:
        raise ModelError(
            f"{where}: read_config of {architecture} returned {config!r:.80}; it must be a "
            "ModelConfig of this architecture",
            param="architectures",
        )
    return config


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", "expected a list with the name of the model's class")
    return names[0]


def head_of(architecture: str) -> Literal["tokens", "none"]:
    """Head of a decoder without classes."""
    return "none" if is_headless(architecture) else "tokens"


def num_labels(fields: Fields) -> int:
    """Classes of a classification head: those that the file names, else two, as in transformers."""
    names = list(fields.section("id2label"))
    return len(names) if names else fields.positive("num_labels", 2)


def _default_head_dim(fields: Fields, family: _Family) -> int | None:
    if family.head_dim is not None:
        return family.head_dim
    hidden_size = fields.positive("hidden_size")
    num_heads = fields.positive("num_attention_heads")
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def max_positions(fields: Fields, name: str = "max_position_embeddings") -> int:
    """The longest context of a model, from the field `name`."""
    count = fields.positive(name)
    if count > MAX_POSITIONS:
        raise fields.error(name, f"at most {MAX_POSITIONS:,} are supported")
    return count


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"only silu is supported, not {activation!r}")
    chunks = fields.section("dual_chunk_attention_config")
    original = chunks.positive("original_max_position_embeddings", MAX_POSITIONS)
    if list(chunks) and fields.positive("max_position_embeddings") > original:
        raise fields.error(
            "dual_chunk_attention_config",
            "is not supported; without it set max_position_embeddings to what it calls original",
        )


def _sliding_window(fields: Fields, family: _Family) -> SlidingWindow | None:
    """As transformers reads it; None also where no context is longer than the window."""
    length = _window_length(fields, family)
    layers = _windowed_layers(fields, family, has_window=length is not None)
    if length is None or not layers or length >= fields.positive("max_position_embeddings"):
        return None
    if family.windows == "none":
        raise fields.error("sliding_window", "not supported for this architecture")
    return SlidingWindow(length=length, layers=layers)


def _window_length(fields: Fields, family: _Family) -> int | None:
    # Mistral's class ignores `use_sliding_window`.
    is_always_on = family.windows == "all" and not family.has_window_switch
    if not (is_always_on or fields.flag("use_sliding_window", not family.has_window_switch)):
        return None
    if "sliding_window" not in fields:
        # Unlike a field that is absent, null means none.
        is_null = "sliding_window" in list(fields)
        return None if is_null or family.windows == "none" else _DEFAULT_WINDOW
    return fields.positive("sliding_window")


def _windowed_layers(fields: Fields, family: _Family, *, has_window: bool) -> tuple[int, ...]:
    num_layers, kinds = fields.positive("num_hidden_layers"), fields.get("layer_types")
    if kinds is None:
        is_listed = family.windows == "listed"
        first = fields.count("max_window_layers", _DEFAULT_FULL_LAYERS) if is_listed else 0
        return tuple(range(first, num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"expected a list of {num_layers} kinds of attention")
    known = ("full_attention", *(["sliding_attention"] if has_window else []))
    other = next((kind for kind in kinds if kind not in known), None)
    if other is not None:
        lacks = " without a sliding_window" if other == "sliding_attention" else ""
        raise fields.error("layer_types", f"{other!r} is not supported{lacks}")
    if family.windows == "all" and has_window and "full_attention" in kinds:
        raise fields.error("layer_types", "all layers of this architecture have the window")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def check_shape(config: ModelConfig, fields: Fields) -> None:
    """Raises ModelError unless the sizes fit together."""
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"{config.num_kv_heads} does not divide {config.num_heads} attention heads",
        )
    if config.head_dim % 2:
        raise fields.error("head_dim", f"must be even for the rotation, got {config.head_dim}")
    for own in () if config.decoder is None else config.decoder.attentions:
        heads, kv_heads = own.heads or config.num_heads, own.kv_heads or config.num_kv_heads
        if heads % kv_heads or (own.head_dim or 0) % 2:
            dim = own.head_dim or config.head_dim
            raise fields.error(
                "num_key_value_heads",
                f"a layer has {heads} heads, {kv_heads} of K and V, and {dim} elements a head; the "
                "second must divide the first, and the third be even",
            )
    if config.rope.scaling == "llama3" and not (
        config.rope.high_freq_factor > config.rope.low_freq_factor
    ):
        raise fields.error("rope high_freq_factor", "must be greater than low_freq_factor")
