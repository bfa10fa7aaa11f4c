"""Files of every mode become the same upright, opaque RGB pixels."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from weft.gateway.media.decode import open_image, to_rgb, upright_size
from weft.gateway.media.prompts import BadFile
from weft.testing.models.tiny_images import encoded, random_image

MAX_PIXELS = 1_000_000
WIDTH, HEIGHT = 37, 23


def decoded(data: bytes) -> np.ndarray:
    image = open_image(data, MAX_PIXELS)
    size = upright_size(image)
    found = to_rgb(image)
    assert found.mode == "RGB"
    assert (found.height, found.width) == size
    return np.asarray(found)


def on_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return np.rint(colour * share + 255 * (1 - share))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_rgb_is_kept(kind: str) -> None:
    image = random_image(1, WIDTH, HEIGHT)
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(decoded(encoded(image, kind, **options)), np.asarray(image))


def test_grey_has_three_equal_channels() -> None:
    image = random_image(2, WIDTH, HEIGHT, "L")
    np.testing.assert_array_equal(
        decoded(encoded(image)), np.repeat(np.asarray(image)[..., None], 3, axis=-1)
    )


def test_two_colours_are_black_and_white() -> None:
    image = random_image(2, WIDTH, HEIGHT, "L").convert("1")
    np.testing.assert_array_equal(decoded(encoded(image)), np.asarray(image.convert("RGB")))


def test_alpha_is_on_white() -> None:
    image = random_image(3, WIDTH, HEIGHT, "RGBA")
    values = np.asarray(image).astype(float)
    found = decoded(encoded(image)).astype(float)
    assert np.abs(found - on_white(values[..., :3], values[..., 3])).max() <= 1


def test_grey_with_alpha_is_on_white() -> None:
    image = random_image(4, WIDTH, HEIGHT, "LA")
    values = np.asarray(image).astype(float)
    colour = np.repeat(values[..., :1], 3, axis=-1)
    found = decoded(encoded(image)).astype(float)
    assert np.abs(found - on_white(colour, values[..., 1])).max() <= 1


def test_a_transparent_entry_of_a_palette_is_white() -> None:
    image = random_image(5, WIDTH, HEIGHT).quantize(16)
    expected = np.asarray(image.convert("RGB")).copy()
    expected[np.asarray(image) == 3] = 255
    data = encoded(image, transparency=3)
    np.testing.assert_array_equal(decoded(data), expected)


def test_a_palette_with_partial_transparency_is_on_white() -> None:
    image = random_image(6, WIDTH, HEIGHT).quantize(8)
    alphas = bytes([0, 40, 80, 120, 160, 200, 240, 255])
    colour = np.asarray(image.convert("RGB")).astype(float)
    alpha = np.frombuffer(alphas, np.uint8)[np.asarray(image)].astype(float)
    found = decoded(encoded(image, transparency=alphas)).astype(float)
    assert np.abs(found - on_white(colour, alpha)).max() <= 1


def test_a_transparent_colour_is_white() -> None:
    values = np.asarray(random_image(7, WIDTH, HEIGHT)).copy()
    values[3:9, 4:20] = (10, 20, 30)
    expected = values.copy()
    expected[(values == (10, 20, 30)).all(-1)] = 255
    data = encoded(Image.fromarray(values), transparency=(10, 20, 30))
    np.testing.assert_array_equal(decoded(data), expected)


def test_grey_of_16_bits_is_scaled() -> None:
    values = np.random.default_rng(8).integers(0, 1 << 16, (HEIGHT, WIDTH)).astype(np.uint16)
    values[0, :3] = (0, 65535, 32768)
    found = decoded(encoded(Image.fromarray(values)))
    assert np.abs(found.astype(float) - (values / 257)[..., None]).max() <= 0.5
    assert found[0, :2].tolist() == [[0, 0, 0], [255, 255, 255]]


def test_a_transparent_grey_of_16_bits_is_white() -> None:
    values = np.full((2, 2), 1000, np.uint16)
    values[0, 0] = 2000
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    found = decoded(png(2, 2, 16, 0, lines, (b"tRNS", struct.pack(">H", 2000))))
    assert found[0, 0].tolist() == [255, 255, 255]
    assert found[1, 1].tolist() == [4, 4, 4]


def test_four_inks_are_converted() -> None:
    image = random_image(9, WIDTH, HEIGHT).convert("CMYK")
    data = encoded(image, "JPEG", quality=95)
    with Image.open(io.BytesIO(data)) as again:
        assert again.mode == "CMYK"
        expected = np.asarray(again.convert("RGB"))
    np.testing.assert_array_equal(decoded(data), expected)


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """What EXIF's numbers mean: where the first row and the first column belong."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_upright(kind: str, orientation: int) -> None:
    image = random_image(10, WIDTH, HEIGHT)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(image, kind, exif=exif, **options)
    with Image.open(io.BytesIO(data)) as stored:
        pixels = np.asarray(stored.convert("RGB"))
    expected = upright(pixels, orientation) if 1 <= orientation <= 8 else pixels
    np.testing.assert_array_equal(decoded(data), expected)


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"\xff" * 40])
def test_damaged_exif_is_no_orientation(exif: bytes) -> None:
    image = random_image(11, WIDTH, HEIGHT)
    assert decoded(encoded(image, "JPEG", exif=exif)).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_counts(kind: str) -> None:
    first = Image.new("RGB", (WIDTH, HEIGHT), (255, 0, 0))
    more = [Image.new("RGB", (WIDTH, HEIGHT), (0, 0, 255))] * 2
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(first, kind, save_all=True, append_images=more, **options)
    assert (decoded(data) == (255, 0, 0)).all()


def png(
    width: int, height: int, depth: int, colour: int, lines: bytes, *more: tuple[bytes, bytes]
) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


@pytest.mark.parametrize("size", [(100_000, 100_000), (1001, 1000), ((1 << 31) - 1, 1)])
def test_too_many_pixels_are_refused_by_the_header(size: tuple[int, int]) -> None:
    with pytest.raises(BadFile, match="pixels"):
        open_image(png(*size, 8, 2, b"\0" * 4000), MAX_PIXELS)


def test_headers_of_gif_and_webp_count_too() -> None:
    gif = b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\0\0\0,"
    with pytest.raises(BadFile):
        to_rgb(open_image(gif + b"\0" * 100, MAX_PIXELS))
    webp = encoded(Image.new("RGB", (2000, 2000)), "WEBP")
    with pytest.raises(BadFile, match="pixels"):
        open_image(webp, MAX_PIXELS)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_not_read(kind: str) -> None:
    data = encoded(Image.new("RGB", (16, 16)), kind)
    with pytest.raises(BadFile, match="JPEG, PNG, WEBP, GIF"):
        open_image(data, MAX_PIXELS)


def test_a_truncated_file_is_damaged() -> None:
    data = encoded(random_image(12, 200, 200), "JPEG")
    with pytest.raises(BadFile, match="damaged"):
        to_rgb(open_image(data[: len(data) // 2], MAX_PIXELS))
