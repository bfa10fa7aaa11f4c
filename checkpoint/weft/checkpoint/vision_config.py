"""The parts of image towers, as configurations describe them. Pure Python.

A tower is a vision transformer over patches and a connector, which makes rows of the language
model's width. Its rows take the places of embeddings of placeholder tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.checkpoint.fields import Fields, fields_of_file
from weft.checkpoint.moe_config import without_defaults
from weft.checkpoint.parts import NormConfig
from weft.contract.errors import InvalidRequest

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"]
PatchPositions = Literal["bucketed", "learned", "interpolated", "centred", "none"]

NUM_CHANNELS = 3
_TILE_EDGES = (("max_image_size", "longest_edge"), ("size", "height"), ("size", "width"))
"""Fields of processors that have the side of pictures of one size."""
NUM_AXES = 3
"""Time, rows and columns."""
_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionNamesConfig:
    """Names of a tower's parts in a checkpoint. An empty name: there is no such part."""

    towers: tuple[str, ...] = ("model.vision_model", "vision_model")
    """Prefixes of the vision transformer; the first one that exists counts."""
    connectors: tuple[str, ...] = ("model.connector", "connector")
    """Prefixes of the connector; the first one that exists counts."""
    patches: str = "embeddings.patch_embedding"
    positions: str = "embeddings.position_embedding"
    class_token: str = ""
    first_norm: str = ""
    """Norm of the patches before the first layer."""
    layers: str = "encoder.layers"
    attention_norm: str = "layer_norm1"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three modules, or one that has the rows of all three."""
    o: str = "self_attn.out_proj"
    q_norm: str = ""
    k_norm: str = ""
    attention_scale: str = ""
    mlp_norm: str = "layer_norm2"
    gate: str = ""
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    mlp_scale: str = ""
    last_norm: str = "post_layernorm"
    projection: str = "modality_projection.proj"
    """The connector's only product, or its last one."""
    connector_norm: str = ""
    connector_join: str = ""
    """The product that joins a square's patches before the MLP."""
    connector_up: str = ""
    """The connector's first product of two."""
    connector_mlp: str = ""
    """Module below the vision transformer with the connector's products but the last one."""
    taps: str = ""
    """List of the connectors of taps, below the vision transformer."""

    unused: tuple[str, ...] = ()
    """Parts below the vision transformer that files have and nothing reads."""

    def has(self, name: str) -> bool:
        """Whether a tensor is one of the tower's."""
        unused = tuple(f"{tower}.{part}" for tower in self.towers for part in self.unused)
        return name.startswith(self.prefixes) and not name.startswith(unused)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of all tensors that belong to the tower."""
        return tuple(f"{prefix}." for prefix in (*self.towers, *self.connectors))


@dataclass(frozen=True, slots=True, kw_only=True)
class AxialRopeConfig:
    """Rotation of q and k by a patch's row in the first half of a head's pairs, and by its column
    in the second.
    """

    theta: float = 10_000.0
    takes_turns: bool = False
    """Whether rows and columns take frequencies of one series in turn, not each of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchWindowsConfig:
    """Attention within square windows, which begin at a picture's upper left corner."""

    side: int
    """Patches along a window, a multiple of the connector's factor."""
    full_layers: tuple[int, ...]
    """Layers in which patches see all of their picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig:
    """A vision transformer, whose layers have a norm before attention and one before the MLP."""

    image_size: int
    """Side in pixels of the square pictures that its positions are for; 0: there is no table."""
    patch_size: int
    """Side of a patch in pixels. Pixels that fill no patch, at the right and below, are left
    out.
    """
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: VisionActivation
    norm: NormConfig
    has_bias: bool = True
    """Whether products have biases, that of patches included."""
    positions: PatchPositions = "bucketed"
    """What is added to a patch. bucketed: the row of the table whose part of the image its upper
    left corner is in (Idefics2's form of SigLIP). learned: the row of its own place. interpolated:
    the table, whose corners are the picture's, bilinearly at its place. centred: as this, but the
    table's entries are for the middles of equal parts of the picture, as the patch's place is.
    """
    # Fields from here on are in the fingerprint where they differ from their defaults.
    has_patch_bias: bool = True
    """Whether the product of patches has a bias, if products have some."""
    frames: int = 1
    """Frames of a patch; a picture is as many equal ones, unless it is of a video."""
    is_gated: bool = False
    """Whether the MLP has a gate."""
    rope: AxialRopeConfig | None = None
    windows: PatchWindowsConfig | None = None
    has_qkv_bias: bool = True
    """Whether the product of q, k and v has a bias, if products have some."""
    has_class_token: bool = False
    """Whether attention also reads a learned row of each picture."""
    has_scales: bool = False
    """Whether what attention and the MLP add is scaled by element."""
    qk_norm: NormConfig | None = None
    """Norm of q and k of all heads together."""
    first_place: int = 0
    """Number of the first row and of the first column in rotations."""
    has_adjacent_pairs: bool = False
    """Whether files have the two elements of a rotated pair next to each other, and columns
    first.
    """
    is_unfolded: bool = False
    """Whether files have the product of patches as a matrix, and the class token's position, like
    that token a vector, after those of patches.
    """

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint."""
        return without_defaults(self, 10)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def grid(self) -> int:
        """Patches along a side of the table of positions."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Rows of the table of positions."""
        return self.grid**2


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelShuffleConfig:
    """A connector that makes one row of each square of patches by one product without bias."""

    factor: int
    """Side of a square in patches; divides the grid."""
    out_features: int
    """Width of the language model."""

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergerConfig:
    """A connector that makes one row of each square of patches by a norm and an MLP."""

    factor: int
    """Side of a square in patches; divides each picture's grid."""
    out_features: int
    """Width of the language model."""
    norm: NormConfig | None
    activation: VisionActivation = "gelu"
    is_norm_of_square: bool = False
    """Whether the norm is of a square's patches together, and not of each patch."""
    # Fields from here on are in the fingerprint where they differ from their defaults.
    inner_features: int = 0
    """Width of the MLP's inside; 0: that of all of a square's patches."""
    has_bias: bool = True
    """Whether the MLP's products have biases."""
    has_join: bool = False
    """Whether a product without bias makes one patch of a square before the MLP."""

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint."""
        return {"kind": "merger", **without_defaults(self, 5)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPoolConfig:
    """A connector that makes one row of each square of patches by their mean, a norm, and a product
    without bias.
    """

    factor: int
    """Side of a square in patches; divides the grid."""
    out_features: int
    """Width of the language model."""
    norm: NormConfig

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint."""
        return {"kind": "mean", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConnectorConfig:
    """A connector that makes one row of each square of patches by an MLP, whose result is activated
    again, and a product; nothing has a bias.
    """

    factor: int
    """Side of a square in patches; divides the grid."""
    out_features: int
    """Width of the language model."""
    inner_features: int
    """Width of both products of the MLP."""

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint."""
        return {"kind": "mlp", **asdict(self)}


ConnectorConfig = PixelShuffleConfig | MergerConfig | MeanPoolConfig | MlpConnectorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TapsConfig:
    """Further rows that some layers of the vision transformer make, for the language model's first
    layers (DeepStack, arXiv 2406.04334): the n-th tap's are added to the stream after layer n.
    """

    layers: tuple[int, ...]
    """The vision transformer's layers, in order, whose result is read."""
    connector: MergerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AxesConfig:
    """Rotations of the language model by time, row and column (M-RoPE, arXiv 2409.12191)."""

    sections: tuple[int, int, int]
    """Pairs of a head that each of them turns."""
    is_interleaved: bool = False
    """Whether the sections of rows and of columns have every third pair, as far as they reach,
    rather than consecutive ones.
    """

    def axis_of_pairs(self, num_pairs: int) -> tuple[int, ...]:
        """The axis, 0 to 2, of each pair that is rotated."""
        if not self.is_interleaved:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        ends = [0, *(NUM_AXES * count for count in self.sections[1:])]
        axes = (number % NUM_AXES for number in range(num_pairs))
        return tuple(axis if number < ends[axis] else 0 for number, axis in enumerate(axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelsConfig:
    """A pixel's number x, 0 to 255, becomes (x * scale - mean) / std, by channel."""

    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5,) * NUM_CHANNELS
    std: tuple[float, ...] = (0.5,) * NUM_CHANNELS


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """An image tower."""

    vit: VitConfig
    connector: ConnectorConfig
    image_token_id: int
    """The placeholder token."""
    pixels: PixelsConfig = PixelsConfig()
    names: VisionNamesConfig = VisionNamesConfig()
    taps: TapsConfig | None = None
    sees_both_ways: bool = False
    """Whether tokens of one picture attend to one another both ways in the language model, and so
    are computed together.
    """
    axes: AxesConfig | None = None
    """None: rows have the positions of their tokens."""
    max_pixels: int | None = None
    """Most pixels of a picture, whose sides may be any multiples of `square_size`; None: pictures
    are squares of `tile_size`, or have a `max_edge`.
    """
    max_edge: int | None = None
    """Longest side of a picture before it is rounded up to multiples of `square_size`."""

    @property
    def most_pixels(self) -> int | None:
        """Most pixels of a picture; None: pictures are squares of `tile_size`."""
        if self.max_edge is None:
            return self.max_pixels
        return (-(-self.max_edge // self.square_size) * self.square_size) ** 2

    @property
    def tile_size(self) -> int:
        """Side in pixels of the square pictures (tiles) that the tower takes, if they have one
        size.
        """
        return self.vit.image_size

    @property
    def square_size(self) -> int:
        """Side in pixels of what becomes one row."""
        return self.vit.patch_size * self.connector.factor

    @property
    def tokens_per_tile(self) -> int:
        """Rows that the tower makes of a tile."""
        return self.vit.num_patches // self.connector.factor**2

    @property
    def row_width(self) -> int:
        """Elements of a row: those of the language model's stream, and as many for each tap."""
        num_taps = 0 if self.taps is None else len(self.taps.layers)
        return self.connector.out_features * (1 + num_taps)

    def patches_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of patches of a picture of this shape, [height, width, 3], or of as many
        frames of a video as a patch has, [height, width, 3 * frames]. Raises InvalidRequest for a
        shape that the tower does not take.
        """
        vit, side, most = self.vit, self.square_size, self.most_pixels
        if most is None:
            whole = [self.tile_size, self.tile_size, NUM_CHANNELS]
            if list(shape) != whole:
                raise _wrong_shape(shape, f"{whole}")
            return vit.grid, vit.grid
        channels = (NUM_CHANNELS, NUM_CHANNELS * vit.frames)
        is_picture = len(shape) == 3 and shape[2] in channels and min(shape) > 0
        if not is_picture or shape[0] % side or shape[1] % side or shape[0] * shape[1] > most:
            told = f"[height, width, 3] in multiples of {side} with at most {most} pixels"
            raise _wrong_shape(shape, told)
        return shape[0] // vit.patch_size, shape[1] // vit.patch_size

    def grid_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """As `patches_of`, of the rows that the tower makes of a picture."""
        rows, columns = self.patches_of(shape)
        return rows // self.connector.factor, columns // self.connector.factor

    def fingerprint(self) -> bytes:
        """Canonical bytes of every field that changes rows."""
        values: dict[str, Any] = {
            "vit": self.vit.values(),
            "connector": self.connector.values(),
            "pixels": asdict(self.pixels),
        }
        if self.taps is not None:
            values["taps"] = asdict(self.taps)
        if self.axes is not None:
            values["axes"] = asdict(self.axes)
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _wrong_shape(shape: Sequence[int], wanted: str) -> InvalidRequest:
    return InvalidRequest(
        f"an image has the shape {list(shape)}; this model takes {wanted}",
        stage="validate",
        param="spans",
    )


def read_idefics3_vision(whole: Fields, text: Fields) -> VisionConfig:
    """The tower of Idefics3 and SmolVLM.

    Args:
        whole: Fields of config.json.
        text: Fields of its text model, defaults included.

    Raises:
        ModelError: A field is malformed, or its value is not supported.
    """
    vision = whole.section("vision_config")
    if text.flag("use_resampler", False):
        raise text.error("use_resampler", "only connectors with a pixel shuffle are supported")
    sizes = {"image_size": 224, "patch_size": 32, "hidden_size": 1152, "num_hidden_layers": 12}
    sizes |= {"num_attention_heads": 16, "intermediate_size": 3072}
    vit = siglip_vit(vision, sizes, "bucketed")
    factor = whole.positive("scale_factor", 2)
    if vit.grid % factor:
        raise whole.error("scale_factor", f"{factor} does not divide a row of {vit.grid} patches")
    return VisionConfig(
        vit=vit,
        connector=PixelShuffleConfig(factor=factor, out_features=text.positive("hidden_size")),
        image_token_id=image_token(whole, "image_token_id", 128_257, text.positive("vocab_size")),
    )


def image_token(whole: Fields, name: str, default: int, vocab_size: int) -> int:
    """The placeholder token that a field names, or `image_token_id`, as newer files call it. Raises
    ModelError if it is none of the vocabulary.
    """
    newer = "image_token_id"
    name = newer if newer in whole else name
    token = whole.count(name, default)
    if token >= vocab_size:
        raise whole.error(name, f"{token} is none of {vocab_size} tokens")
    return token


def siglip_vit(vision: Fields, defaults: Mapping[str, int], positions: PatchPositions) -> VitConfig:
    """A vision transformer in SigLIP's form; `defaults` are those of the fields that are sizes.
    Raises ModelError if a field is malformed or not supported.
    """
    channels = vision.positive("num_channels", NUM_CHANNELS)
    if channels != NUM_CHANNELS:
        raise vision.error("num_channels", f"only {NUM_CHANNELS} are supported, not {channels}")
    size = {name: vision.positive(name, default) for name, default in defaults.items()}
    vit = VitConfig(
        image_size=size["image_size"],
        patch_size=size["patch_size"],
        hidden_size=size["hidden_size"],
        num_layers=size["num_hidden_layers"],
        num_heads=size["num_attention_heads"],
        intermediate_size=size["intermediate_size"],
        activation=activation_of(vision, "gelu_pytorch_tanh"),
        norm=NormConfig(eps=vision.number("layer_norm_eps", 1e-6), kind="layer", has_bias=True),
        positions=positions,
    )
    if vit.hidden_size % vit.num_heads:
        raise vision.error(
            "num_attention_heads", f"{vit.num_heads} does not divide {vit.hidden_size}"
        )
    if not vit.grid:
        raise vision.error(
            "patch_size", f"{vit.patch_size} pixels are more than an image's {vit.image_size}"
        )
    return vit


def activation_of(vision: Fields, default: str, field: str = "hidden_act") -> VisionActivation:
    """A vision transformer's activation. Raises ModelError if it is not supported."""
    name = vision.text(field, default)
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise vision.error(field, f"{name!r} is not supported ({known} are)")
    return _ACTIVATIONS[name]


def with_pixels(config: VisionConfig, model_dir: Path) -> VisionConfig:
    """Adds what a directory's processor says of pixels, where there is one.

    Raises:
        ModelError: A file or a field is malformed, or tiles have another size than the tower's.
    """
    fields, usual = image_processor(model_dir), config.pixels
    if config.max_edge is not None:
        longest = fields.section("size").positive("longest_edge", config.max_edge)
        config = replace(config, max_edge=longest)
    elif config.max_pixels is not None:
        bounds = pixel_bounds(fields, most=config.max_pixels)
        config = replace(config, max_pixels=bounds[1])
    else:
        for name, edge in _TILE_EDGES:
            tile = fields.section(name).positive(edge, config.tile_size)
            if tile != config.tile_size:
                problem = f"tiles of {tile} pixels, but the tower's have {config.tile_size}"
                raise fields.error(name, problem)
    is_scaled, is_normal = fields.flag("do_rescale", True), fields.flag("do_normalize", True)
    return replace(
        config,
        pixels=PixelsConfig(
            scale=fields.number("rescale_factor", usual.scale) if is_scaled else 1.0,
            mean=_by_channel(fields, "image_mean", usual.mean) if is_normal else (0.0,) * 3,
            std=_by_channel(fields, "image_std", usual.std) if is_normal else (1.0,) * 3,
        ),
    )


def pixel_bounds(
    processor: Fields, least: int = 56 * 56, most: int = 28 * 28 * 1280
) -> tuple[int, int]:
    """Least and most pixels of a picture by Qwen2-VL's image processor and those like it; the
    defaults are Qwen2-VL's. Raises ModelError if a bound is malformed.
    """
    size = processor.section("size")
    least, most = (
        processor.positive(name, size.positive(name, size.positive(edge, usual)))
        for name, edge, usual in (
            ("min_pixels", "shortest_edge", least),
            ("max_pixels", "longest_edge", most),
        )
    )
    if least > most:
        raise processor.error("min_pixels", f"{least} are more than max_pixels, {most}")
    return least, most


def image_processor(model_dir: Path) -> Fields:
    """What a directory says of its image processor: `image_processor` in processor_config.json,
    else preprocessor_config.json; empty if there is neither. Raises ModelError if a file is not
    JSON.
    """
    nested, own = model_dir / "processor_config.json", model_dir / "preprocessor_config.json"
    if nested.exists():
        fields = fields_of_file(nested)
        if "image_processor" in fields:
            return fields.section("image_processor")
    return fields_of_file(own, may_lack=True)


def _by_channel(fields: Fields, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = fields.get(name)
    if values is None:
        return default
    numbers = values if isinstance(values, list) else [values] * NUM_CHANNELS
    if len(numbers) != NUM_CHANNELS or not all(_is_share(one, name) for one in numbers):
        raise fields.error(name, f"expected {NUM_CHANNELS} numbers, got {values!r:.80}")
    return tuple(map(float, numbers))


def _is_share(value: object, name: str) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= 1e4 and (value > 1e-4 or name == "image_mean")
