"""Reads how a model takes images from its folder, and makes their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from tokenizers import Tokenizer
from weft.checkpoint.fields import Fields
from weft.checkpoint.tokenizer_files import read_json
from weft.checkpoint.vision_config import pixel_bounds
from weft.contract.errors import ModelError
from weft.gateway.media.forms import (
    CanvasForm,
    FixedForm,
    GridForm,
    ImageForm,
    ImagePlan,
    RowsForm,
    ScaledForm,
    TiledForm,
)
from weft.gateway.media.prompts import Expansion, Run

PROCESSOR_FILES = _SETTINGS_FILE, _PROCESSOR_FILE = (
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files of which models that take images have at least one."""
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
_FILTERS = frozenset(range(6))
_MAX_EDGE = 4096
"""Longest edge to which transformers resizes images of this form."""
_MAX_GRID = 16
"""Most rows, and most columns, of tiles."""
_MAX_GRID_TILES = 64
_ALWAYS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
"""Steps that the form has in any case; the last ones are the encoder's."""
_OF_ENCODER = ("image_mean", "image_std", "rescale_factor")
_OF_FIXED = (
    *("size", "resample", "image_seq_length", "default_to_square"),
    *("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    "pan_and_scan_min_ratio_to_activate",
)
_OF_GRID = (
    "size",
    "resample",
    "crop_to_patches",
    "min_patches",
    "max_patches",
    "default_to_square",
)
_OF_CANVAS = ("size", "resample", "max_patches", "resize_to_max_canvas", "default_to_square")
_OF_ROWS = ("size", "resample", "patch_size", "default_to_square")
_OF_PATCHES = ("patch_size", "merge_size", "temporal_patch_size")
_OF_TILES = ("size", "max_image_size", "resample", "do_image_splitting")
_OF_SCALED = ("min_pixels", "max_pixels", "size", "resample", "default_to_square", *_OF_PATCHES)
_LABELS = (
    *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
    *("do_pad", "pad_size", "return_row_col_info", "video_sampling"),
    *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping"),
)
"""Fields that change no tile: names, forms of arrays, and padding, which equal tiles need not."""


class ModelFiles(NamedTuple):
    """What readers of forms read."""

    settings: Mapping[str, Any]
    """Settings of the image processor."""
    processor: Mapping[str, Any]
    """Content of processor_config.json."""
    config: Mapping[str, Any]
    """Content of config.json."""
    tokenizer: Tokenizer

    @property
    def settings_fields(self) -> Fields:
        return Fields(self.settings, _SETTINGS_FILE)

    @property
    def config_fields(self) -> Fields:
        return Fields(self.config, "config.json")

    def image_token(self, default: int) -> str:
        """The token of `image_token_id`. Raises ModelError if there is none."""
        number = self.config_fields.count("image_token_id", default)
        token: str | None = self.tokenizer.id_to_token(number)
        if token is None:
            raise ModelError(f"config.json: image_token_id is {number}, which is no token")
        return token

    def check_tokens(self, *tokens: str) -> None:
        """Raises ModelError if the tokenizer lacks one."""
        for token in tokens:
            id_of(token, self.tokenizer)


FormReader = Callable[[ModelFiles], ImageForm]
"""Makes a form of a model's files. Raises ModelError."""


class ImagePrompts:
    """How one model takes images. Safe to use from several threads.

    Raises:
        ModelError: The tokenizer lacks tokens of the form.
    """

    def __init__(self, form: ImageForm, tokenizer: Tokenizer) -> None:
        self.form = form
        self.place_id = id_of(form.image_token, tokenizer)
        """The token that the chat template writes for an image."""
        self.row_id = id_of(form.row_token, tokenizer)
        """The token that stands for a row of a medium."""
        self.tokens = (form.image_token, form.row_token)
        self._tokenizer = tokenizer
        # An instance keeps its own few results.
        self._expand = lru_cache(maxsize=1024)(self._encode)
        self.most_tokens = len(self._expand(form.largest).ids)
        """Tokens of the largest image."""

    def expansion(self, *size: int, is_coarse: bool = False) -> Expansion:
        height, width = size
        return self._expand(self.form.plan(height, width, is_coarse=is_coarse))

    def with_texts_around(self, rendered: str) -> str:
        token, (before, after) = self.form.image_token, self.form.around
        if not before and not after:
            return rendered
        return rendered.replace(token, f"{before}{token}{after}")

    def _encode(self, plan: ImagePlan) -> Expansion:
        (encoding,) = self._tokenizer.encode_batch_fast([plan.text], add_special_tokens=False)
        found = encoding.ids.count(self.row_id)
        if found != len(plan.lengths) or not all(plan.lengths):
            raise ModelError(
                f"the tokenizer finds {found} tokens {self.form.row_token} in the text of an "
                f"image, not {len(plan.lengths)}"
            )
        media = plan.media or range(len(plan.lengths))
        waiting = zip(plan.lengths, media, strict=True)
        ids: list[int] = []
        runs: list[Run] = []
        num_rows = dict.fromkeys(media, 0)
        for id_ in encoding.ids:
            if id_ != self.row_id:
                ids.append(id_)
                continue
            length, medium = next(waiting)
            runs.append(Run(len(ids), length, medium, num_rows[medium]))
            num_rows[medium] += length
            ids += [id_] * length
        return Expansion(tuple(ids), tuple(runs))


def id_of(token: str, tokenizer: Tokenizer) -> int:
    """Raises ModelError if the tokenizer has no such token."""
    known: int | None = tokenizer.token_to_id(token)
    if known is None:
        raise ModelError(f"the tokenizer has no token {token}")
    return known


def load_image_prompts(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer
) -> ImagePrompts | None:
    """How a model takes images; None: it is made for text alone. `config` is its config.json.

    Raises:
        ModelError: It takes images, but in a way that is not served; the message names it.
    """
    processor = read_json(folder / _PROCESSOR_FILE)
    settings = read_json(folder / _SETTINGS_FILE)
    inner = processor.get("image_processor")
    if not settings and isinstance(inner, dict):
        settings = inner
    if not settings:
        if "vision_config" not in config:
            return None
        raise ModelError(f"there is no {_SETTINGS_FILE}")
    kind = settings.get("image_processor_type", "")
    if not kind:
        processor_class = processor.get("processor_class", settings.get("processor_class"))
        if isinstance(processor_class, str):
            kind = _TYPES_OF_PROCESSORS.get(processor_class, kind)
    read_form = _READERS.get(str(kind).removesuffix("Pil").removesuffix("Fast"))
    if read_form is None:
        shown = json.dumps(kind)[:80]
        raise ModelError(f"image_processor_type is {shown}; known are {', '.join(_READERS)}")
    form = read_form(ModelFiles(settings, processor, config, tokenizer))
    prompts = ImagePrompts(form, tokenizer)
    row_id = config.get("image_token_id", config.get("image_token_index", prompts.row_id))
    if row_id != prompts.row_id:
        raise ModelError(
            f"config.json: image_token_id is {row_id!r:.20}, but {form.row_token} is token "
            f"{prompts.row_id}"
        )
    return prompts


def _fixed(files: ModelFiles) -> FixedForm:
    settings, _, config, tokenizer = files
    _check_known(settings, _OF_FIXED)
    size = settings.get("size", {"height": 224, "width": 224})
    height, width = _height_and_width(size)
    count = files.processor.get("image_seq_length", settings.get("image_seq_length", 256))
    rows = config.get("mm_tokens_per_image", 256)
    if not _is_integer(count) or count < 1 or count != rows:
        raise ModelError(
            f"image_seq_length is {count!r:.20}, but the encoder makes {rows!r:.20} rows of an "
            "image (mm_tokens_per_image)"
        )
    edge = _section(config, "vision_config").get("image_size")
    if _is_integer(edge) and (height, width) != (edge, edge):
        raise ModelError(
            f"size is {height} x {width} for an encoder of {edge} (vision_config.image_size)"
        )

    def token(name: str, default: int) -> str:
        number = config.get(f"{name}_index", config.get(f"{name}_id", default))
        found: str | None = None
        if _is_integer(number) and number >= 0:
            found = tokenizer.id_to_token(number)
        if found is None:
            raise ModelError(f"config.json: {name}_index is {number!r:.20}, which is no token")
        return found

    return FixedForm(
        image_token=token("boi_token", 255_999),
        row_token=token("image_token", 262_144),
        end_token=token("eoi_token", 256_000),
        height=height,
        width=width,
        num_tokens=count,
        resample=_filter(settings, _BILINEAR),
    )


def _height_and_width(size: object) -> tuple[int, int]:
    if isinstance(size, dict):
        height, width = size.get("height"), size.get("width")
        if _is_edge(height) and _is_edge(width):
            return height, width
    shown = json.dumps(size)[:80]
    raise ModelError(f"size is {shown}; it must have a height and width of 1 to {_MAX_EDGE}")


def _is_edge(value: object) -> TypeGuard[int]:
    return _is_integer(value) and 1 <= value <= _MAX_EDGE


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _tiled(files: ModelFiles) -> TiledForm:
    settings = files.settings
    _check_known(settings, _OF_TILES)
    form = TiledForm(
        longest_edge=_edge(settings, "size", 4 * 364),
        tile_edge=_edge(settings, "max_image_size", 364),
        tile_tokens=_tile_tokens(files.processor),
        resample=_filter(settings, _LANCZOS),
        is_split=settings.get("do_image_splitting") is not False,
    )
    if math.ceil(form.longest_edge / form.tile_edge) > _MAX_GRID:
        raise ModelError(
            f"size {form.longest_edge} has more than {_MAX_GRID} tiles of {form.tile_edge}"
        )
    _check_encoder(form, files.config)
    return form


def _scaled(files: ModelFiles) -> ScaledForm:
    return _checked_scaled(files, *pixel_bounds(files.settings_fields))


def _paddle(files: ModelFiles) -> ScaledForm:
    bounds = pixel_bounds(files.settings_fields, 384 * 384, 1536 * 1536)
    token = files.image_token(100_295)
    form = _checked_scaled(files, *bounds)
    return replace(form, image_token=token, enlarges=True)


def _checked_scaled(files: ModelFiles, min_pixels: int, max_pixels: int) -> ScaledForm:
    _check_known(files.settings, _OF_SCALED)
    fields = files.settings_fields
    patch, merge = fields.positive("patch_size", 14), fields.positive("merge_size", 2)
    form = ScaledForm(
        square=patch * merge,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        resample=_filter(files.settings, _BICUBIC),
    )
    vision = files.config_fields.section("vision_config")
    sides = (("patch_size", patch, "patch_size"), ("merge_size", merge, "spatial_merge_size"))
    for name, value, of_encoder in sides:
        if (encoders := vision.positive(of_encoder, value)) != value:
            raise ModelError(f"{name} is {value}, but vision_config.{of_encoder} {encoders}")
    if max(min_pixels, form.most_enlarged * form.square**2) > max_pixels:
        raise ModelError(f"max_pixels is {max_pixels}; it is too near to min_pixels, {min_pixels}")
    return form


def _grid(files: ModelFiles) -> GridForm:
    settings, processor, *_ = files
    processor_class = processor.get("processor_class", settings.get("processor_class"))
    if processor_class != "InternVLProcessor":
        # Others of GOT-OCR 2's form write images in other ways.
        raise ModelError(
            f"processor_class is {processor_class!r:.40}; it must be InternVLProcessor"
        )
    _check_known(settings, _OF_GRID)
    fields, config = files.settings_fields, files.config_fields
    height, width = _height_and_width(settings.get("size", {"height": 384, "width": 384}))
    if height != width:
        raise ModelError(f"size is {height} x {width}; tiles are squares")
    min_tiles, max_tiles = fields.positive("min_patches", 1), fields.positive("max_patches", 12)
    if min_tiles > max_tiles or max_tiles > _MAX_GRID_TILES:
        raise ModelError(f"min_patches is {min_tiles} and max_patches {max_tiles}")
    count = Fields(processor, _PROCESSOR_FILE).positive(
        "image_seq_length", config.positive("image_seq_length", 256)
    )
    vision, ratio = config.section("vision_config"), config.number("downsample_ratio", 0.5)
    edge, patch = (_side(vision, name) for name in ("image_size", "patch_size"))
    if edge and patch and (edge != height or int(edge // patch * ratio) ** 2 != count):
        raise ModelError(
            f"tiles of {height} pixels with {count} tokens for an encoder of {edge} in patches of "
            f"{patch}"
        )
    form = GridForm(
        image_token=files.image_token(151_667),
        edge=height,
        tile_tokens=count,
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        resample=_filter(settings, _BICUBIC),
    )
    files.check_tokens(form.begin_token, form.end_token)
    return form


def _canvas(files: ModelFiles) -> CanvasForm:
    settings, fields = files.settings, files.settings_fields
    _check_known(settings, _OF_CANVAS)
    height, width = _height_and_width(settings.get("size", {"height": 336, "width": 336}))
    max_tiles = fields.positive("max_patches", 16)
    if height != width or max_tiles > _MAX_GRID_TILES:
        raise ModelError(
            f"size is {height} x {width} and max_patches {max_tiles}; tiles are squares, at "
            f"most {_MAX_GRID_TILES}"
        )
    vision = files.config_fields.section("vision_config")
    edge, patch = vision.positive("image_size", 448), vision.positive("patch_size", 14)
    if edge != height:
        raise ModelError(f"tiles of {height} pixels for an encoder of {edge}")
    rows = edge // patch * vision.number("pixel_shuffle_ratio", 0.5)
    form = CanvasForm(
        edge=edge,
        tile_tokens=round(rows) ** 2,
        max_tiles=max_tiles,
        fills=fields.flag("resize_to_max_canvas", False),
        resample=_filter(settings, _BILINEAR),
    )
    between = (form.column_token, form.line_token) if max_tiles > 1 else ()
    files.check_tokens(form.begin_token, form.end_token, *between)
    return form


def _side(vision: Fields, name: str) -> int:
    """A number or the first of a list; 0: the file has none."""
    value = vision.get(name)
    value = value[0] if isinstance(value, list) and value else value
    return value if _is_integer(value) else 0


def _rows(files: ModelFiles) -> RowsForm:
    _check_known(files.settings, _OF_ROWS)
    config, fields = files.config_fields, Fields(files.processor, _PROCESSOR_FILE)
    square = fields.positive("patch_size", 16) * fields.positive("spatial_merge_size", 1)
    vision = config.section("vision_config")
    usual = 2 if "Mistral3ForConditionalGeneration" in files.config.get("architectures", ()) else 1
    merged = config.positive("spatial_merge_size", usual)
    if "patch_size" in vision and vision.positive("patch_size") * merged != square:
        raise ModelError(
            f"patch_size times spatial_merge_size is {square} pixels, but the encoder's are "
            f"{vision.positive('patch_size')} times {merged}"
        )
    form = RowsForm(
        longest_edge=_edge(files.settings, "size", 1024),
        square=square,
        resample=_filter(files.settings, _BICUBIC),
        image_token=fields.text("image_token", "[IMG]"),
        break_token=fields.text("image_break_token", "[IMG_BREAK]"),
        end_token=fields.text("image_end_token", "[IMG_END]"),
    )
    files.check_tokens(form.break_token, form.end_token)
    return form


def _check_known(settings: Mapping[str, Any], of_form: Sequence[str]) -> None:
    """Raises ModelError for settings that a form does not have, beside those that change nothing
    and those of the encoder.
    """
    known = {*_ALWAYS, *_OF_ENCODER, *_LABELS, *of_form}
    for name, value in settings.items():
        if name not in known and value not in (None, False):
            raise ModelError(f"{name} is not known")
    for name in _ALWAYS:
        if settings.get(name) not in (None, True):
            raise ModelError(f"{name} is {settings[name]!r:.20}; it must be true")


def _filter(settings: Mapping[str, Any], default: int) -> int:
    """Pillow's number of the filter that resizes."""
    resample = settings.get("resample", default)
    if not _is_integer(resample) or resample not in _FILTERS:
        raise ModelError(f"resample is {resample!r:.20}; it must be a number of Pillow's, 0 to 5")
    return int(resample)


def _edge(settings: Mapping[str, Any], name: str, default: int) -> int:
    size = settings.get(name, {"longest_edge": default})
    edge = size.get("longest_edge") if isinstance(size, dict) and len(size) == 1 else None
    if not _is_integer(edge) or not 1 <= edge <= _MAX_EDGE:
        shown = json.dumps(size)[:80]
        raise ModelError(f"{name} is {shown}; it must have a longest_edge of 1 to {_MAX_EDGE}")
    return int(edge)


def _tile_tokens(processor: Mapping[str, Any]) -> int:
    count = processor.get("image_seq_len", 169)
    if not _is_integer(count) or not 1 <= count <= _MAX_EDGE:
        raise ModelError(f"{_PROCESSOR_FILE}: image_seq_len is {count!r:.20}")
    return int(count)


def _check_encoder(form: TiledForm, config: Mapping[str, Any]) -> None:
    """A model that would make another number of rows of a tile is not served."""
    vision, scale = config.get("vision_config"), config.get("scale_factor")
    if not isinstance(vision, dict) or not _is_integer(scale):
        return
    edge, patch = vision.get("image_size"), vision.get("patch_size")
    if not _is_integer(edge) or not _is_integer(patch) or min(scale, patch) < 1:
        return
    if edge != form.tile_edge:
        raise ModelError(
            f"tiles of {form.tile_edge} pixels for an encoder of {edge} (vision_config.image_size)"
        )
    rows = (edge // patch) ** 2 // scale**2
    if rows != form.tile_tokens:
        raise ModelError(
            f"image_seq_len is {form.tile_tokens}, but the encoder makes {rows} rows of a tile"
        )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_READERS: Mapping[str, FormReader] = {
    "Gemma3ImageProcessor": _fixed,
    "GotOcr2ImageProcessor": _grid,
    "Idefics3ImageProcessor": _tiled,
    "Llama4ImageProcessor": _canvas,
    "PaddleOCRVLImageProcessor": _paddle,
    "PixtralImageProcessor": _rows,
    "Qwen2VLImageProcessor": _scaled,
    "Qwen2_5_VLImageProcessor": _scaled,
    "SmolVLMImageProcessor": _tiled,
}
"""Readers of forms by `image_processor_type`, without the ends that name an implementation."""
_TYPES_OF_PROCESSORS = {
    "Gemma3Processor": "Gemma3ImageProcessor",
    "InternVLProcessor": "GotOcr2ImageProcessor",
    "Llama4Processor": "Llama4ImageProcessor",
    "PaddleOCRVLProcessor": "PaddleOCRVLImageProcessor",
    "PixtralProcessor": "PixtralImageProcessor",
    "Idefics3Processor": "Idefics3ImageProcessor",
    "Qwen2VLProcessor": "Qwen2VLImageProcessor",
    "Qwen2_5_VLProcessor": "Qwen2VLImageProcessor",
    "Qwen3VLProcessor": "Qwen2VLImageProcessor",
    "SmolVLMProcessor": "SmolVLMImageProcessor",
}
"""Classes of image processors by that of the processor, where a folder names only this."""
