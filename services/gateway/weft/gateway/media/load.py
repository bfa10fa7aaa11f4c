"""Reads how a model takes images from its folder, and writes them into its prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import Tokenizer
from weft.checkpoint.tokenizer_files import read_json
from weft.contract.errors import ModelError
from weft.contract.spans import Media, MediaSpan
from weft.gateway.media.forms import ImageForm, ImagePlan, TiledForm

PROCESSOR_FILES = _PROCESSOR_FILE, _WHOLE_FILE = "preprocessor_config.json", "processor_config.json"
"""Files of which models that take images have at least one."""
_LANCZOS = 1
_FILTERS = frozenset(range(6))
_MAX_EDGE = 4096
"""Longest edge to which transformers resizes images of this form."""
_MAX_GRID = 16
"""Most rows, and most columns, of tiles."""
_TILED_TYPES = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
_ALWAYS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
"""Steps that the form has in any case; the last ones are the encoder's."""
_OF_ENCODER = ("image_mean", "image_std", "rescale_factor")
_OF_TILES = ("size", "max_image_size", "resample", "do_image_splitting")
_LABELS = (
    *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
    *("do_pad", "pad_size", "return_row_col_info", "video_sampling"),
    *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping"),
)
"""Fields that change no tile: names, forms of arrays, and padding, which equal tiles need not."""


FormReader = Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], ImageForm]
"""Makes a form of the settings of its image processor, of processor_config.json and of config.json.
Raises ModelError.
"""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The tokens of one image."""

    ids: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    """First index in `ids` and length of each medium's tokens."""


class ImagePrompts:
    """How one model takes images. Safe to use from several threads.

    Raises:
        ModelError: The tokenizer lacks tokens of the form.
    """

    def __init__(self, form: ImageForm, tokenizer: Tokenizer) -> None:
        self.form = form
        token, known = form.image_token, tokenizer.token_to_id(form.image_token)
        if known is None:
            raise ModelError(f"the tokenizer has no token {token}")
        self.image_id: int = known
        """The token that the chat template writes for an image."""
        self._tokenizer = tokenizer
        # An instance keeps its own few results.
        self._expand = lru_cache(maxsize=1024)(self._encode)
        self.most_tokens = len(self._expand(form.largest).ids)
        """Tokens of the largest image."""

    def expansion(self, height: int, width: int, *, is_coarse: bool) -> Expansion:
        """The tokens of an image, by its size alone."""
        return self._expand(self.form.plan(height, width, is_coarse=is_coarse))

    def _encode(self, plan: ImagePlan) -> Expansion:
        (encoding,) = self._tokenizer.encode_batch_fast([plan.text], add_special_tokens=False)
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        lengths = iter(plan.lengths)
        for id_ in encoding.ids:
            if id_ != self.image_id:
                ids.append(id_)
                continue
            length = next(lengths, 0)
            runs.append((len(ids), length))
            ids += [id_] * length
        if len(runs) != len(plan.lengths) or not all(length for _, length in runs):
            raise ModelError(
                f"the tokenizer finds {len(runs)} tokens {self.form.image_token} in the text of an "
                f"image, not {len(plan.lengths)}"
            )
        return Expansion(tuple(ids), tuple(runs))


def put_in(
    ids: Sequence[int], image_id: int, images: Sequence[tuple[Expansion, Sequence[Media]]]
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Replaces each image token by the tokens of its image, in order. Returns the ids, and spans
    for the images whose media are given. Both have the same number of images.
    """
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    waiting = iter(images)
    for id_ in ids:
        if id_ != image_id:
            expanded.append(id_)
            continue
        expansion, media = next(waiting)
        start = len(expanded)
        for (offset, length), medium in zip(expansion.runs, media, strict=bool(media)):
            spans.append(MediaSpan(position=start + offset, length=length, digest=medium.digest))
        expanded += expansion.ids
    return expanded, tuple(spans)


def load_image_prompts(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer
) -> ImagePrompts | None:
    """How a model takes images; None: it is made for text alone. `config` is its config.json.

    Raises:
        ModelError: It takes images, but in a way that is not served; the message names it.
    """
    whole = read_json(folder / _WHOLE_FILE)
    given = read_json(folder / _PROCESSOR_FILE)
    inner = whole.get("image_processor")
    if not given and isinstance(inner, dict):
        given = inner
    if not given:
        if "vision_config" not in config:
            return None
        raise ModelError(f"there is no {_PROCESSOR_FILE}")
    kind = given.get("image_processor_type", "")
    if not kind and whole.get("processor_class", given.get("processor_class")) in (
        "Idefics3Processor",
        "SmolVLMProcessor",
    ):
        kind = _TILED_TYPES[0]
    read_form = _READERS.get(str(kind).removesuffix("Pil").removesuffix("Fast"))
    if read_form is None:
        shown = json.dumps(kind)[:80]
        raise ModelError(f"image_processor_type is {shown}; known are {', '.join(_READERS)}")
    form = read_form(given, whole, config)
    prompts = ImagePrompts(form, tokenizer)
    told = config.get("image_token_id", prompts.image_id)
    if told != prompts.image_id:
        raise ModelError(
            f"config.json: image_token_id is {told!r:.20}, but {form.image_token} is token "
            f"{prompts.image_id}"
        )
    return prompts


def _tiled(
    given: Mapping[str, Any], whole: Mapping[str, Any], config: Mapping[str, Any]
) -> TiledForm:
    _check_known(given, _OF_TILES)
    form = TiledForm(
        longest_edge=_edge(given, "size", 4 * 364),
        tile_edge=_edge(given, "max_image_size", 364),
        tile_tokens=_tile_tokens(whole),
        resample=_filter(given, _LANCZOS),
        is_split=given.get("do_image_splitting") is not False,
    )
    if math.ceil(form.longest_edge / form.tile_edge) > _MAX_GRID:
        raise ModelError(
            f"size {form.longest_edge} has more than {_MAX_GRID} tiles of {form.tile_edge}"
        )
    _check_encoder(form, config)
    return form


def _check_known(given: Mapping[str, Any], of_form: Sequence[str]) -> None:
    """Raises ModelError for settings that a form does not have, beside those that change nothing
    and those of the encoder.
    """
    known = {*_ALWAYS, *_OF_ENCODER, *_LABELS, *of_form}
    for name, value in given.items():
        if name not in known and value not in (None, False):
            raise ModelError(f"{name} is not known")
    for name in _ALWAYS:
        if given.get(name) not in (None, True):
            raise ModelError(f"{name} is {given[name]!r:.20}; it must be true")


def _filter(given: Mapping[str, Any], default: int) -> int:
    """Pillow's number of the filter that resizes."""
    resample = given.get("resample", default)
    if not _is_integer(resample) or resample not in _FILTERS:
        raise ModelError(f"resample is {resample!r:.20}; it must be a number of Pillow's, 0 to 5")
    return int(resample)


def _edge(given: Mapping[str, Any], name: str, default: int) -> int:
    size = given.get(name, {"longest_edge": default})
    edge = size.get("longest_edge") if isinstance(size, dict) and len(size) == 1 else None
    if not _is_integer(edge) or not 1 <= edge <= _MAX_EDGE:
        shown = json.dumps(size)[:80]
        raise ModelError(f"{name} is {shown}; it must have a longest_edge of 1 to {_MAX_EDGE}")
    return int(edge)


def _tile_tokens(whole: Mapping[str, Any]) -> int:
    count = whole.get("image_seq_len", 169)
    if not _is_integer(count) or not 1 <= count <= _MAX_EDGE:
        raise ModelError(f"{_WHOLE_FILE}: image_seq_len is {count!r:.20}")
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


_READERS: Mapping[str, FormReader] = dict.fromkeys(_TILED_TYPES, _tiled)
"""Readers of forms by `image_processor_type`, without the ends that name an implementation."""


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
