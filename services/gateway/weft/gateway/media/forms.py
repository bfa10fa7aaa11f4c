"""Forms of image input: how a model wants its images cut and written into prompts."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from weft.contract.spans import Media
from weft.gateway.media.prompts import BadFile, MediaForm

if TYPE_CHECKING:
    from PIL.Image import Image  # which only media processes load


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What one image becomes in a prompt."""

    text: str
    """Takes the placeholder's place; has one row token for each run."""
    lengths: tuple[int, ...]
    """Tokens of each run, which repeat its row token."""
    media: tuple[int, ...] = ()
    """Number of the medium whose next rows each run has; empty: each is a medium of its own."""


class ImageForm(MediaForm, Protocol):
    """One form of images with its options."""

    @property
    def image_token(self) -> str:
        """What a chat template writes in an image's place."""
        ...

    @property
    def row_token(self) -> str:
        """The token in whose places media have their rows."""
        ...

    @property
    def around(self) -> tuple[str, str]:
        """Texts before and after the image token, which are tokenised with what is next to them."""
        ...

    @property
    def largest(self) -> ImagePlan:
        """The plan with most tokens."""
        ...

    def plan(self, height: int, width: int, *, is_coarse: bool = False) -> ImagePlan:
        """What an image of this size becomes. `is_coarse`: with few tokens, at less detail. Raises
        BadFile for a size that the model does not take; media processes then refuse the image.
        """
        ...

    def process(self, image: Image, *, is_coarse: bool = False) -> list[Media]:
        """The media of an RGB image, in the plan's order."""
        ...


COARSE_EDGE = 512
COARSE_PIXELS = COARSE_EDGE**2
"""Most pixels of an image of any size in its coarse form, or its longest side."""
_MAX_RATIO = 200
"""Longest side of an image in its shorter ones, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowsInPlace:
    """A form whose media have their rows in the places of image tokens, with nothing around."""

    image_token: str

    @property
    def row_token(self) -> str:
        return self.image_token

    @property
    def around(self) -> tuple[str, str]:
        return "", ""

    def options(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledForm(_RowsInPlace):
    """Idefics3's and SmolVLM's form: an image is resized, cut into square tiles, and followed by a
    tile that shows all of it. The arithmetic is that of transformers' Idefics3ImageProcessorPil,
    rounding included.
    """

    name: ClassVar[str] = "tiled"
    image_token: str = "<image>"
    border_token: str = "<fake_token_around_image>"
    global_text: str = "<global-img>"
    longest_edge: int
    """Length to which an image's longer edge is resized before it is cut."""
    tile_edge: int
    tile_tokens: int
    resample: int
    """Pillow's number of the filter."""
    is_split: bool = True
    """Whether images are cut at all, rather than squeezed into one tile."""

    @property
    def largest(self) -> ImagePlan:
        return self.plan(self.longest_edge, self.longest_edge)

    def plan(self, height: int, width: int, *, is_coarse: bool = False) -> ImagePlan:
        rows, columns = self._grid(height, width, is_coarse)
        border, image = self.border_token, self.image_token
        whole = f"{border}{self.global_text}{image}{border}"
        if not rows:
            return ImagePlan(whole, (self.tile_tokens,))
        lines = [
            "".join(f"{border}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        text = "".join(f"{line}\n" for line in lines) + f"\n{whole}"
        return ImagePlan(text, (self.tile_tokens,) * (rows * columns + 1))

    def process(self, image: Image, *, is_coarse: bool = False) -> list[Media]:
        edge = self.tile_edge
        height, width = self._resized(image.height, image.width)
        image = image.resize((width, height), self.resample)
        rows, columns = 0, 0
        if self.is_split and not is_coarse:
            height, width = self._in_tiles(height, width)
            image = image.resize((width, height), self.resample)
            rows, columns = self._cut(height, width)
        tiles = _tiles_of(image, rows, columns, edge)
        tiles.append(image.resize((edge, edge), self.resample))
        shape = (edge, edge, 3)
        return [Media.of("image", self.name, shape, tile.tobytes()) for tile in tiles]

    def _grid(self, height: int, width: int, is_coarse: bool) -> tuple[int, int]:
        """Rows and columns of tiles; 0: the image is one tile alone."""
        if is_coarse or not self.is_split:
            return 0, 0
        return self._cut(*self._in_tiles(*self._resized(height, width)))

    def _cut(self, height: int, width: int) -> tuple[int, int]:
        edge = self.tile_edge
        return (height // edge, width // edge) if max(height, width) > edge else (0, 0)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        ratio, longest = width / height, self.longest_edge
        if width >= height:
            width, height = longest, _even(int(longest / ratio))
        else:
            height, width = longest, _even(int(longest * ratio))
        return max(height, 1), max(width, 1)

    def _in_tiles(self, height: int, width: int) -> tuple[int, int]:
        """The size in whole tiles."""
        ratio = width / height
        if width >= height:
            width = self._whole(width)
            return self._whole(int(width / ratio)), width
        height = self._whole(height)
        return height, self._whole(int(height * ratio))

    def _whole(self, length: int) -> int:
        return math.ceil(length / self.tile_edge) * self.tile_edge


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledForm(_RowsInPlace):
    """The form of Qwen2-VL's image processor: an image is one picture of about its own size and
    proportions, whose sides are multiples of what becomes one token. The arithmetic is that of
    transformers' Qwen2VLImageProcessorPil, rounding included.
    """

    name: ClassVar[str] = "scaled"
    image_token: str = "<|image_pad|>"
    square: int
    """Side in pixels of what becomes one token."""
    min_pixels: int
    max_pixels: int
    """Of an image of little detail `COARSE_PIXELS` at most."""
    resample: int
    """Pillow's number of the filter."""
    enlarges: bool = False
    """Whether an image with a side shorter than a token is enlarged first, as PaddleOCR-VL's is."""

    @property
    def largest(self) -> ImagePlan:
        return ImagePlan(self.image_token, (self.max_pixels // self.square**2,))

    @property
    def most_enlarged(self) -> int:
        """Bound of the tokens of an image that is enlarged to `min_pixels`."""
        longer = math.sqrt(self.min_pixels * _MAX_RATIO)
        shorter = math.sqrt(self.min_pixels / _MAX_RATIO)
        return math.ceil((longer / self.square + 1) * (shorter / self.square + 1))

    def plan(self, height: int, width: int, *, is_coarse: bool = False) -> ImagePlan:
        rows, columns = self._grid(height, width, is_coarse)
        return ImagePlan(self.image_token, (rows * columns,))

    def process(self, image: Image, *, is_coarse: bool = False) -> list[Media]:
        rows, columns = self._grid(image.height, image.width, is_coarse)
        height, width = rows * self.square, columns * self.square
        image = image.resize((width, height), self.resample)
        return [Media.of("image", self.name, (height, width, 3), image.tobytes())]

    def _grid(self, height: int, width: int, is_coarse: bool) -> tuple[int, int]:
        """Rows and columns of tokens."""
        if self.enlarges:
            height, width = self._enlarged(height, width)
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise BadFile(
                f"has {width} x {height} pixels; one side may be {_MAX_RATIO} times the other"
            )
        square, most = self.square, self.max_pixels
        if is_coarse:
            most = max(self.min_pixels, min(most, COARSE_PIXELS))
        rows, columns = round(height / square), round(width / square)
        if rows * columns * square**2 > most:
            factor = math.sqrt(height * width / most)
            rows, columns = (
                max(1, math.floor(length / factor / square)) for length in (height, width)
            )
        elif rows * columns * square**2 < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(length * factor / square) for length in (height, width))
        return rows, columns

    def _enlarged(self, height: int, width: int) -> tuple[int, int]:
        square = self.square
        if height < square:
            height, width = square, round(width * square / height)
        if width < square:
            height, width = round(height * square / width), square
        return height, width


def _even(number: int) -> int:
    return number + number % 2


def _tiles_of(image: Image, rows: int, columns: int, edge: int) -> list[Image]:
    """Square tiles, row by row."""
    return [
        image.crop((column * edge, row * edge, (column + 1) * edge, (row + 1) * edge))
        for row in range(rows)
        for column in range(columns)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedForm:
    """Gemma 3's form: an image is resized to one size, whatever its own, as transformers'
    Gemma3ImageProcessorPil does it without pan and scan.
    """

    name: ClassVar[str] = "fixed"
    image_token: str
    row_token: str
    end_token: str
    around: tuple[str, str] = ("\n\n", "\n\n")
    height: int
    width: int
    num_tokens: int
    resample: int
    """Pillow's number of the filter."""

    @property
    def largest(self) -> ImagePlan:
        return ImagePlan(f"{self.image_token}{self.row_token}{self.end_token}", (self.num_tokens,))

    def plan(self, height: int, width: int, *, is_coarse: bool = False) -> ImagePlan:
        return self.largest

    def process(self, image: Image, *, is_coarse: bool = False) -> list[Media]:
        pixels = image.resize((self.width, self.height), self.resample).tobytes()
        return [Media.of("image", self.name, (self.height, self.width, 3), pixels)]

    def options(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridForm(_RowsInPlace):
    """InternVL's form: an image is resized to a grid of square tiles of about its proportions, and
    followed by a tile that shows all of it. The arithmetic is that of transformers'
    GotOcr2ImageProcessorPil.
    """

    name: ClassVar[str] = "grid"
    image_token: str
    begin_token: str = "<img>"
    end_token: str = "</img>"
    edge: int
    """Side of a tile."""
    tile_tokens: int
    min_tiles: int
    max_tiles: int
    resample: int
    """Pillow's number of the filter."""

    @property
    def largest(self) -> ImagePlan:
        most = max(columns * rows for columns, rows in _grids(self.min_tiles, self.max_tiles))
        return self._of_tiles(most)

    def plan(self, height: int, width: int, *, is_coarse: bool = False) -> ImagePlan:
        columns, rows = self._grid(height, width, is_coarse)
        return self._of_tiles(columns * rows)

    def process(self, image: Image, *, is_coarse: bool = False) -> list[Media]:
        edge = self.edge
        columns, rows = self._grid(image.height, image.width, is_coarse)
        whole = image.resize((columns * edge, rows * edge), self.resample)
        tiles = _tiles_of(whole, rows, columns, edge)
        if len(tiles) > 1:
            tiles.append(image.resize((edge, edge), self.resample))
        shape = (edge, edge, 3)
        return [Media.of("image", self.name, shape, tile.tobytes()) for tile in tiles]

    def _of_tiles(self, count: int) -> ImagePlan:
        count += count > 1
        text = f"{self.begin_token}{self.image_token * count}{self.end_token}"
        return ImagePlan(text, (self.tile_tokens,) * count)

    def _grid(self, height: int, width: int, is_coarse: bool) -> tuple[int, int]:
        """Columns and rows of the grid whose proportions are nearest; of several the largest of
        which the image would fill more than half.
        """
        if is_coarse:
            return 1, 1
        ratio, best, least = width / height, (1, 1), math.inf
        for columns, rows in _grids(self.min_tiles, self.max_tiles):
            difference = abs(ratio - columns / rows)
            if difference < least:
                best, least = (columns, rows), difference
            elif difference == least and width * height > 0.5 * self.edge**2 * columns * rows:
                best = (columns, rows)
        return best


@cache
def _grids(least: int, most: int) -> Sequence[tuple[int, int]]:
    """Columns and rows of grids with so many tiles, those with fewer tiles first."""
    sides = range(1, most + 1)
    found = [(x, y) for x in sides for y in sides if least <= x * y <= most]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasForm:
    """Llama 4's form: an image lies at the upper left of a black canvas of square tiles, which is
    followed by a tile that shows all of it. The arithmetic is that of transformers'
    Llama4ImageProcessor; it resizes by torchvision, here Pillow does.
    """

    name: ClassVar[str] = "canvas"
    image_token: str = "<|image|>"
    row_token: str = "<|patch|>"
    begin_token: str = "<|image_start|>"
    end_token: str = "<|image_end|>"
    column_token: str = "<|tile_x_separator|>"
    line_token: str = "<|tile_y_separator|>"
    edge: int
    """Side of a tile."""
    tile_tokens: int
    max_tiles: int
    fills: bool
    """Whether images are enlarged to their canvas, not only to a tile."""
    resample: int
    """Pillow's number of the filter."""

    @property
    def around(self) -> tuple[str, str]:
        return "", ""

    @property
    def largest(self) -> ImagePlan:
        return self._of_grid(1, self.max_tiles)

    def plan(self, height: int, width: int, *, is_coarse: bool = False) -> ImagePlan:
        return self._of_grid(*self._grid(height, width, is_coarse))

    def process(self, image: Image, *, is_coarse: bool = False) -> list[Media]:
        from PIL import Image  # which only media processes load

        edge, shape = self.edge, (self.edge, self.edge, 3)
        rows, columns = self._grid(image.height, image.width, is_coarse)
        height, width = self._resized(image.height, image.width, rows, columns)
        canvas = Image.new("RGB", (columns * edge, rows * edge))
        canvas.paste(image.resize((width, height), self.resample))
        tiles = _tiles_of(canvas, rows, columns, edge)
        if len(tiles) > 1:
            tiles.append(image.resize((edge, edge), self.resample))
        return [Media.of("image", self.name, shape, tile.tobytes()) for tile in tiles]

    def options(self) -> dict[str, Any]:
        return asdict(self)

    def _of_grid(self, rows: int, columns: int) -> ImagePlan:
        line = self.column_token.join([self.row_token] * columns) + self.line_token
        tiles = rows * columns if rows * columns > 1 else 0
        lines = line * rows if tiles else ""
        text = f"{self.begin_token}{lines}{self.image_token}{self.row_token}{self.end_token}"
        return ImagePlan(text, (self.tile_tokens,) * (tiles + 1))

    def _grid(self, height: int, width: int, is_coarse: bool) -> tuple[int, int]:
        """Rows and columns of the canvas on which the image, without distortion, is enlarged least;
        if it must be reduced on all, reduced least. Of several the one with fewest tiles.
        """
        if is_coarse:
            return 1, 1
        grids = [(rows, columns) for columns, rows in _grids(1, self.max_tiles)]
        scales = [_scale((height, width), (self.edge * r, self.edge * c)) for r, c in grids]
        larger = [scale for scale in scales if scale >= 1]
        chosen = (max(larger) if self.fills else min(larger)) if larger else max(scales)
        return grids[scales.index(chosen)]

    def _resized(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Height and width on a canvas."""
        high, wide = rows * self.edge, columns * self.edge
        if not self.fills:
            high, wide = min(max(height, self.edge), high), min(max(width, self.edge), wide)
        across, down = wide / width, high / height
        if across < down:
            return max(1, min(math.floor(height * across), high)), wide
        return high, max(1, min(math.floor(width * down), wide))


def _scale(size: tuple[int, int], canvas: tuple[int, int]) -> float:
    """By what an image may be enlarged, in float32 as transformers compares it."""
    scale = min(into / side for side, into in zip(size, canvas, strict=True))
    (rounded,) = struct.unpack("f", struct.pack("f", scale))
    return float(rounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsForm(_RowsInPlace):
    """Pixtral's and Mistral 3's form: an image of about its own size and proportions, whose rows of
    tokens end with a token of their own. The arithmetic is that of transformers'
    PixtralImageProcessorPil, except that a side never becomes 0.
    """

    name: ClassVar[str] = "rows"
    image_token: str = "[IMG]"
    break_token: str = "[IMG_BREAK]"
    end_token: str = "[IMG_END]"
    longest_edge: int
    """Of an image of little detail `COARSE_EDGE` at most."""
    square: int
    """Side in pixels of what becomes one token."""
    resample: int
    """Pillow's number of the filter."""

    @property
    def largest(self) -> ImagePlan:
        return self.plan(self.longest_edge, self.longest_edge)

    def plan(self, height: int, width: int, *, is_coarse: bool = False) -> ImagePlan:
        rows, columns = self._grid(height, width, is_coarse)
        text = f"{self.image_token}{self.break_token}" * (rows - 1)
        return ImagePlan(
            f"{text}{self.image_token}{self.end_token}", (columns,) * rows, media=(0,) * rows
        )

    def process(self, image: Image, *, is_coarse: bool = False) -> list[Media]:
        rows, columns = self._grid(image.height, image.width, is_coarse)
        height, width = rows * self.square, columns * self.square
        pixels = image.resize((width, height), self.resample).tobytes()
        return [Media.of("image", self.name, (height, width, 3), pixels)]

    def _grid(self, height: int, width: int, is_coarse: bool) -> tuple[int, int]:
        """Rows and columns of tokens."""
        longest = min(self.longest_edge, COARSE_EDGE) if is_coarse else self.longest_edge
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = (max(1, math.floor(side / ratio)) for side in (height, width))
        return -(-height // self.square), -(-width // self.square)


FORMS: Mapping[str, Callable[..., ImageForm]] = {
    CanvasForm.name: CanvasForm,
    GridForm.name: GridForm,
    RowsForm.name: RowsForm,
    TiledForm.name: TiledForm,
    FixedForm.name: FixedForm,
    ScaledForm.name: ScaledForm,
}
"""What makes each form of its options, by its name."""
