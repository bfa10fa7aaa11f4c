"""The form of videos in chats: which frames a model looks at, at which size, and how their times
get into the prompt. The arithmetic is that of transformers' Qwen2VLVideoProcessor and
Qwen3VLVideoProcessor, rounding included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tokenizers import Tokenizer
from weft.checkpoint.fields import Fields
from weft.checkpoint.tokenizer_files import read_json
from weft.contract.errors import ModelError
from weft.contract.spans import Media
from weft.gateway.media.load import id_of
from weft.gateway.media.prompts import BadFile, Expansion, Run

if TYPE_CHECKING:
    from PIL.Image import Image
    from weft.gateway.media.containers import VideoFacts

_MOST_BYTES = 512 << 20
"""Bytes of all frames that one video may become."""
_MAX_RATIO = 200
_BICUBIC = 3
_FACTOR_OF_LEAST = 1.05
"""Of the least pixels of a frame, to which caps of transformers do not go down."""
_SHARE_OF_CONTEXT = 0.9
_FILES = ("video_preprocessor_config.json", "preprocessor_config.json", "processor_config.json")
_SECTION = "video_processor"


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoForm:
    """Frames at even distances, resized to multiples of what becomes one token, in groups that an
    encoder joins: a medium each.
    """

    name: ClassVar[str] = "video"
    square: int
    """Side in pixels of what becomes one token."""
    frames: int
    """Of a medium."""
    fps: float
    """Frames a second that are looked at."""
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    """Of a frame, or of all frames if the form `is_volume`."""
    is_volume: bool
    cap_tokens: int = 0
    """Tokens of a frame if the form `is_volume`, else of all, that bound a frame's pixels too; 0:
    they do not.
    """
    tokens_per_second: float = 0.0
    """Positions along time; 0: the times of frames are texts in the prompt."""
    resample: int = _BICUBIC
    """Pillow's number of the filter."""

    def options(self) -> dict[str, Any]:
        return asdict(self)

    def chosen(self, facts: VideoFacts) -> list[int]:
        """Numbers of the frames that are looked at."""
        import numpy as np

        total, wanted = facts.num_frames, facts.num_frames / facts.rate * self.fps
        if self.is_volume:
            count = min(max(int(wanted), self.min_frames), self.max_frames, total)
            numbers = np.linspace(0, total - 1, count).round().astype(int)
        else:
            most = math.floor(min(self.max_frames, total) / self.frames) * self.frames
            count = math.floor(min(max(wanted, self.min_frames), most, total) / self.frames)
            step = total / max(1, count * self.frames)
            numbers = np.arange(0, total, step).astype(np.float32).astype(int)
        chosen: list[int] = numbers.tolist()
        return chosen

    def padded(self, chosen: list[int]) -> list[int]:
        """Repeats the last frame until their number is a multiple of `frames`."""
        return chosen + [chosen[-1]] * (-len(chosen) % self.frames)

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of frames in tokens, if so many of this size are looked at. Raises
        BadFile for a size that the model does not take.
        """
        square, least, most = self.square, self.min_pixels, self.max_pixels
        num_pixels = num_frames if self.is_volume else 1
        if self.cap_tokens and self.is_volume:
            of_frame = min(self.cap_tokens * square**2, most // num_frames)
            most = max(of_frame, int(least * _FACTOR_OF_LEAST)) * num_frames
        elif self.cap_tokens:
            share = int(self.cap_tokens * square**2 * _SHARE_OF_CONTEXT) * self.frames
            most = max(min(most, share // num_frames), int(least * _FACTOR_OF_LEAST))
        if self.is_volume and min(height, width) < square:
            scale = max(square / height, square / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise BadFile(
                f"has frames of {width} x {height} pixels; one side may be {_MAX_RATIO} times the "
                "other"
            )
        rows, columns = round(height / square), round(width / square)
        num_rounded = round(num_frames / self.frames) * self.frames if self.is_volume else 1
        if num_rounded * rows * columns * square**2 > most:
            factor = math.sqrt(num_pixels * height * width / most)
            rows, columns = (max(1, math.floor(side / factor / square)) for side in (height, width))
        elif num_rounded * rows * columns * square**2 < least:
            factor = math.sqrt(least / (num_pixels * height * width))
            rows, columns = (math.ceil(side * factor / square) for side in (height, width))
        rows, columns = max(1, rows), max(1, columns)
        if num_frames * rows * columns * square**2 * 3 > _MOST_BYTES:
            raise BadFile(
                f"becomes {num_frames} frames of {columns * square} x {rows * square} pixels, more "
                f"than {_MOST_BYTES >> 20} MiB; send a shorter or smaller one"
            )
        return rows, columns

    def times(self, chosen: Sequence[int], facts: VideoFacts) -> list[int]:
        """Of each medium: positions along time from the first one, or tenths of a second."""
        import numpy as np

        count = len(chosen) // self.frames
        if self.tokens_per_second:
            rate = len(chosen) / facts.num_frames * facts.rate
            interval = np.float32(self.tokens_per_second * (self.frames / rate))
            steps: list[int] = (np.arange(count).astype(np.float32) * interval).astype(int).tolist()
            return steps
        seconds = [number / facts.rate for number in chosen]
        middles = [
            (seconds[at] + seconds[at + self.frames - 1]) / 2
            for at in range(0, len(seconds), self.frames)
        ]
        # As text, since that is how it is rounded.
        return [int(f"{middle:.1f}".replace(".", "")) for middle in middles]

    def process(
        self,
        images: Iterable[Image],
        chosen: Sequence[int],
        grid: tuple[int, int],
        times: Sequence[int],
    ) -> list[Media]:
        """The media of a video.

        Args:
            images: Its frames, one for each of the different numbers in `chosen`.
            grid: Rows and columns of tokens.
            times: As `times` returns them.
        """
        import numpy as np

        height, width = (side * self.square for side in grid)
        # One after another: as they are in the file, they take far more memory.
        resized = (np.asarray(one.resize((width, height), self.resample)) for one in images)
        by_number = dict(zip(dict.fromkeys(chosen), resized, strict=True))
        media = []
        for number, time in enumerate(times):
            own = chosen[number * self.frames :][: self.frames]
            pixels = np.concatenate([by_number[one] for one in own], axis=2)
            # The time is in the digest where it changes what pages hold.
            processor = f"{self.name}-{time}" if self.tokens_per_second else self.name
            media.append(Media.of("image", processor, pixels.shape, pixels.tobytes()))
        return media


class VideoPrompts:
    """How one model takes videos. Safe to use from several threads.

    A file's size is its rows and columns of tokens and the `VideoForm.times` of its media.
    """

    most_tokens = 0

    def __init__(self, form: VideoForm, tokenizer: Tokenizer) -> None:
        self.form = form
        self._place, self._begin, self._end = "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
        self.place_id = id_of(self._place, tokenizer)
        self._begin_id, self._end_id = id_of(self._begin, tokenizer), id_of(self._end, tokenizer)
        self.tokens = (self._place, self._begin, self._end)
        self._tokenizer = tokenizer

    def expansion(self, *size: int, is_coarse: bool = False) -> Expansion:
        rows, columns, *times = size
        length = rows * columns
        ids, runs = list[int](), list[Run]()
        for number, time in enumerate(times):
            if not self.form.tokens_per_second:
                text = f"<{time // 10}.{time % 10} seconds>"
                ids += [*self._encode(text), self._begin_id]
                runs.append(Run(len(ids), length, number, 0))
                ids += [*[self.place_id] * length, self._end_id]
                continue
            runs.append(Run(len(ids), length, number, 0, time + 1 if number else 0))
            ids += [self.place_id] * length
        return Expansion(tuple(ids), tuple(runs))

    def _encode(self, text: str) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def with_texts_around(self, rendered: str) -> str:
        if self.form.tokens_per_second:
            return rendered
        # Each group of frames has these tokens of its own.
        return rendered.replace(f"{self._begin}{self._place}{self._end}", self._place)


def load_video_prompts(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer
) -> VideoPrompts | None:
    """How a model takes videos; None: it does not. `config` is its config.json. Raises ModelError
    if its files cannot be used.
    """
    reader = _READERS.get(str(config.get("model_type")))
    if reader is None:
        return None
    given = _settings(folder)
    fields, vision = (
        Fields(given, _FILES[0]),
        Fields(config, "config.json").section("vision_config"),
    )
    patch = vision.positive("patch_size", reader.patch)
    merge = vision.positive("spatial_merge_size", 2)
    size = fields.section("size")
    least = fields.positive("min_pixels", size.positive("shortest_edge", 128 * reader.factor**2))
    most = fields.positive("max_pixels", size.positive("longest_edge", 768 * reader.factor**2))
    if least > most:
        raise ModelError(f"{_FILES[0]}: size: {least} is above {most}")
    fps = given.get("fps") or 2.0
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1000:
        raise fields.error("fps", f"{fps!r:.40} is no rate")
    frames = vision.positive("temporal_patch_size", 2)
    form = VideoForm(
        square=patch * merge,
        frames=frames,
        fps=float(fps),
        min_frames=fields.positive("min_frames", 4),
        max_frames=fields.positive("max_frames", 768),
        min_pixels=least,
        max_pixels=most,
        is_volume=reader.is_volume,
        cap_tokens=(
            fields.positive("max_video_tokens", reader.cap_tokens)
            if given.get("cap_pixels_per_frame") is True
            else 0
        ),
        tokens_per_second=(0.0 if reader.is_volume else vision.number("tokens_per_second", 4.0)),
    )
    return VideoPrompts(form, tokenizer)


def _settings(folder: Path) -> Mapping[str, Any]:
    for name in _FILES:
        given = read_json(folder / name)
        if name != _FILES[0]:
            given = given.get(_SECTION) or {}
        if isinstance(given, dict) and given:
            return given
    return {}


@dataclass(frozen=True, slots=True)
class _Reader:
    patch: int
    factor: int
    is_volume: bool
    cap_tokens: int


_QWEN3 = _Reader(16, 32, True, 768)
_READERS = {
    "qwen2_5_vl": _Reader(14, 28, False, 128_000),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}
"""Defaults of video processors, by `model_type`."""
