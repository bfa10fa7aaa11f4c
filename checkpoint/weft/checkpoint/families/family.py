"""Common code of the readers of families. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

from weft.checkpoint.architectures import CLASSIFIER, ConfigReader, is_bidirectional
from weft.checkpoint.config import (
    ModelConfig,
    SlidingWindow,
    check_shape,
    head_of,
    max_positions,
    num_labels,
)
from weft.checkpoint.end_tokens import end_token_ids
from weft.checkpoint.fields import Fields
from weft.checkpoint.latent_config import LatentConfig
from weft.checkpoint.mistral_params import LEFT_OUT
from weft.checkpoint.moe_config import MoEConfig
from weft.checkpoint.mtp_config import MtpConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    MixerConfig,
    MlpActivation,
    MlpConfig,
    NamesConfig,
    NormConfig,
)
from weft.checkpoint.quantization import read_quantization
from weft.checkpoint.rope import RopeConfig, rope_config

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"
_TOWERS = ("vision_tower", "multi_modal_projector")
VISION = tuple(f"{top}{part}." for top in ("", "model.") for part in _TOWERS)
"""Prefixes of image tensors, which are left out."""
IMAGE_BODIES = ("model.language_model", "language_model.model", "model")
IMAGE_HEADS = ("lm_head", "language_model.lm_head")
"""Names of the language model in models that also take images."""

_MOST_BEHIND = 8
_OF_KINDS = ("layer_types", "full_attention_interval", "linear_attn_config")
"""Fields that say which layers have attention; the first one that exists counts."""

_ACTIVATIONS: Mapping[str, MlpActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class Family:
    """A config.json as the reader of one family sees it. Messages call the source `where`;
    `section` is the object of the text model, if the file describes other parts too.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        generation: Mapping[str, Any],
        where: str,
        section: str | None = None,
    ) -> None:
        self.raw, self._generation, self._where = raw, generation, where
        self.whole = Fields(raw, where)
        """Fields of the file."""
        self.fields = self.whole if section is None else self.whole.section(section)
        """Fields of the text model."""

    def of_text(self) -> Family:
        """The reader of the text model, which many files describe in `text_config`."""
        section = "text_config" if "text_config" in self.raw else None
        return Family(self.raw, self._generation, self._where, section)

    def replaced(self, raw: Mapping[str, Any]) -> Family:
        """The reader of other content of the file."""
        return Family(raw, self._generation, self._where)

    @property
    def num_layers(self) -> int:
        return self.fields.positive("num_hidden_layers")

    @property
    def num_heads(self) -> int:
        return self.fields.positive("num_attention_heads")

    @property
    def hidden_size(self) -> int:
        """Width of the stream."""
        return self.fields.positive("hidden_size")

    def head_dim(self, default: int | None = None) -> int:
        """Size of a head; by default the stream's width over the number of heads."""
        hidden, heads = self.hidden_size, self.num_heads
        if default is None and hidden % heads == 0:
            default = hidden // heads
        return self.fields.positive("head_dim", default)

    def rms(
        self, *, adds_one: bool = False, eps: float = 1e-6, name: str = "rms_norm_eps"
    ) -> NormConfig:
        """The stream's RMS norm; `name`: the field of its epsilon."""
        return NormConfig(eps=self.fields.number(name, eps), adds_one=adds_one)

    def activation(self, default: str = "silu", name: str = "hidden_act") -> MlpActivation:
        found = self.fields.text(name, default)
        if found not in _ACTIVATIONS:
            known = ", ".join(sorted(_ACTIVATIONS))
            raise self.fields.error(name, f"{found!r} is not supported ({known} are)")
        return _ACTIVATIONS[found]

    def attention(self, rope: RopeConfig | None, scale: float) -> AttentionConfig:
        """Attention whose products have biases if the field `attention_bias` says so."""
        bias = self.fields.flag("attention_bias", False)
        return AttentionConfig(rope=rope, scale=scale, qkv_bias=bias, o_bias=bias)

    def decoder(
        self,
        layers: MixerConfig | tuple[MixerConfig, ...],
        norm: NormConfig | None = None,
        mlp: MlpConfig | None = None,
    ) -> DecoderConfig:
        """Layers between an embedding and a norm.

        Args:
            layers: One stands for all layers.
            norm: Of the stream; None: `rms`.
            mlp: None: a gate, and the file's activation.
        """
        layers = layers if isinstance(layers, tuple) else (layers,) * self.num_layers
        norm, mlp = norm or self.rms(), mlp or MlpConfig(activation=self.activation())
        return DecoderConfig(norm=norm, layers=layers, mlp=mlp)

    def only(self, name: str, value: object) -> None:
        """As `Fields.only`."""
        self.fields.only(name, value)

    def rope(self, kind: str | None = None, **options: Any) -> RopeConfig:
        """The rotation, for one kind of layers if there are several, as from `rope_config`."""
        return rope_config(self.fields, kind=kind, **options)

    def llama4_query_scale(self) -> tuple[float, int] | None:
        values = self.fields.section("rope_parameters")
        if values.get("llama_4_scaling_beta") is None:
            return None
        original = values.positive("original_max_position_embeddings")
        return values.number("llama_4_scaling_beta"), original

    def kinds(self, default: Callable[[int], str], windowed: str = SLIDING) -> tuple[str, ...]:
        """Whether each layer's attention is full or has a window. `default` returns the kind of a
        layer, counted from 0, if the file has no list; `windowed` is the kind of window that this
        family has.
        """
        listed, count = self.fields.get("layer_types"), self.num_layers
        if listed is None:
            return tuple(default(layer) for layer in range(count))
        further = self.fields.count("num_nextn_predict_layers", 0)
        if not isinstance(listed, list) or len(listed) not in (count, count + further):
            raise self.fields.error("layer_types", f"expected a list of {count} kinds of attention")
        listed = listed[:count]
        other = next((kind for kind in listed if kind not in (FULL, windowed)), None)
        if other is not None:
            raise self.fields.error("layer_types", f"{other!r} is not supported")
        return tuple(listed)

    def listed(
        self, names: Sequence[str], kinds: Mapping[str, str], default: Callable[[int], str]
    ) -> tuple[str, ...]:
        """The kind of each layer's mixer in a model that has several kinds. `names` are the fields
        that may list them, `kinds` has the kinds by their names in files, and `default` is as in
        `kinds`.
        """
        name = next((name for name in names if name in self.fields), None)
        if name is None:
            return tuple(default(layer) for layer in range(self.num_layers))
        words = self.fields.get(name)
        if not isinstance(words, list) or not words or not all(word in kinds for word in words):
            known = ", ".join(kinds)
            raise self.fields.error(name, f"expected a list of kinds of layers ({known})")
        return tuple(kinds[word] for word in words)

    def switches(self, name: str) -> tuple[bool, ...] | None:
        """A list of 0 or 1 by layer, which may continue for further layers; None if absent."""
        if name not in self.fields:
            return None
        listed, count = self.fields.indices(name), self.num_layers
        if len(listed) < count or set(listed) - {0, 1}:
            raise self.fields.error(name, f"expected {count} times 0 or 1")
        return tuple(map(bool, listed[:count]))

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers by layer, at least 0; null counts as 0. Empty if absent."""
        listed = self.fields.get(name)
        if listed is None:
            return ()
        if not isinstance(listed, list) or len(listed) < self.num_layers:
            raise self.fields.error(name, f"expected {self.num_layers} numbers")
        return tuple(
            self.fields.replaced(**{name: value}).number(name) if value else 0.0
            for value in listed[: self.num_layers]
        )

    def of_layer(self, name: str, layer: int, default: float) -> float:
        """A layer's number from a list by layer, or the one number for all layers."""
        listed = self.fields.get(name)
        return (
            self.numbers(name)[layer]
            if isinstance(listed, list)
            else self.fields.number(name, default)
        )

    def rotated_layers(self) -> tuple[bool, ...]:
        """Which layers rotate: those that the file lists, or all but every fourth."""
        fields, count = self.fields, self.num_layers
        listed = fields.get("no_rope_layers")
        interval = fields.positive("no_rope_layer_interval", 4)
        if not listed:
            return tuple((layer + 1) % interval != 0 for layer in range(count))
        if not isinstance(listed, list) or len(listed) != count or set(listed) - {0, 1}:
            raise fields.error("no_rope_layers", f"expected {count} times 0 or 1")
        return tuple(map(bool, listed))

    def window(
        self, kinds: Sequence[str], default: int | None = None, *, length: int | None = None
    ) -> SlidingWindow | None:
        """The window of the layers that have one; None also where no context is longer. `length`
        overrides the file's.
        """
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind in (SLIDING, CHUNKED))
        if not layers:
            return None
        if length is None:
            length = self.fields.positive("sliding_window", default)
        if length >= self.fields.positive("max_position_embeddings"):
            return None
        return SlidingWindow(length=length, layers=layers, is_chunked=CHUNKED in kinds)

    def config(
        self,
        decoder: DecoderConfig,
        *,
        head_dim: int | None = None,
        window: SlidingWindow | None = None,
        names: NamesConfig | None = None,
        is_tied: bool = False,
        kv_heads: int | None = None,
        moe: MoEConfig | None = None,
        latent: LatentConfig | None = None,
        intermediate_size: int | None = None,
        longest: str = "max_position_embeddings",
        is_encoder: bool = False,
        mtp: MtpConfig | None = None,
    ) -> ModelConfig:
        """The model's configuration.

        Args:
            is_tied: Default of whether the embedding is also the LM head.
            kv_heads: Default number of K and V heads; None: as many as query heads.
            intermediate_size: Inner width of MLPs, if the file's field does not hold it.
            longest: Field of the longest context.
            is_encoder: Whether tokens also attend to later tokens, if the file asks for that.
        """
        fields, whole = self.fields, self.whole
        if moe is not None and moe.is_gated and decoder.mlp.activation != moe.activation:
            raise fields.error("hidden_act", "experts are supported with silu alone")
        if is_bidirectional(self.raw) and not is_encoder:
            raise fields.error("is_causal", "only causal attention is supported")
        if not decoder.attention_layers:
            name = next((name for name in _OF_KINDS if name in fields), _OF_KINDS[0])
            raise fields.error(name, f"none of {len(decoder.layers)} layers has attention")
        architecture = whole.get("architectures")[0]
        is_classifier = architecture.endswith(CLASSIFIER)
        attention = decoder.attention
        layers = [layer for layer in decoder.layers if isinstance(layer, AttentionConfig)]
        rotated = [layer.rope for layer in layers or [attention] if layer.rope is not None]
        # The field may be in the text model's section or at the top of the file.
        tied = fields.flag("tie_word_embeddings", whole.flag("tie_word_embeddings", is_tied))
        names, quantization = names or NamesConfig(), read_quantization(whole)
        if quantization is not None and names.has_transposed:
            raise whole.error(
                "quantization_config",
                "is not supported for this architecture: matrices are stored by columns; take a "
                "checkpoint in floats, which can be quantised at load",
            )
        if not names.blocks and len(decoder.layers) != self.num_layers:
            raise fields.error("num_hidden_layers", f"{len(decoder.layers)} layers are listed")
        config = ModelConfig(
            architecture=architecture,
            head="classes" if is_classifier else head_of(architecture),
            num_labels=num_labels(whole) if is_classifier else 0,
            is_encoder=is_encoder,
            model_type=whole.text("model_type", ""),
            vocab_size=fields.positive("vocab_size"),
            hidden_size=self.hidden_size,
            num_layers=len(decoder.layers),
            num_heads=self.num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", kv_heads or self.num_heads),
            head_dim=self.head_dim() if head_dim is None else head_dim,
            intermediate_size=intermediate_size or fields.positive("intermediate_size"),
            rms_norm_eps=decoder.norm.eps,
            rope=rotated[0] if rotated else RopeConfig(theta=1.0),
            max_position_embeddings=max_positions(fields, longest),
            tie_word_embeddings=tied,
            qkv_bias=attention.qkv_bias,
            o_bias=attention.o_bias,
            mlp_bias=decoder.mlp.bias,
            qk_norm=attention.head_norm is not None,
            moe=moe,
            latent=latent,
            sliding_window=window,
            eos_token_ids=end_token_ids(self.raw, self._generation, self._where),
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            quantization=quantization,
            decoder=decoder,
            names=names,
            mtp=mtp,
        )
        check_shape(config, fields)
        return config


FamilyReader = Callable[[Family], ModelConfig]
"""Reads the configuration of a family. Raises ModelError as a `ConfigReader` does."""


@cache
def config_reader(read: FamilyReader) -> ConfigReader:
    """The same one for each call, with the name and the module of `read`: what compares readers or
    groups architectures by them relies on it.
    """

    @wraps(read)
    def reader(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
        return read(Family(raw, generation, where))

    return reader


def mistral_names() -> NamesConfig:
    """Names in Mistral's models that also take images."""
    return NamesConfig(
        bodies=IMAGE_BODIES,
        heads=IMAGE_HEADS,
        left_out=(*VISION, *LEFT_OUT),
    )


def behind(num_layers: int) -> tuple[str, ...]:
    """Prefixes of further layers after the model's own, which predict further tokens."""
    return tuple(f"model.layers.{num_layers + number}." for number in range(_MOST_BEHIND))
