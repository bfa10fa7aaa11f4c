"""Decodes image files to pixels. Runs in media processes only: decoders read bytes of strangers."""

from __future__ import annotations

import binascii
import io

from PIL import Image
from weft.gateway.media.prompts import BadFile

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_ORIENTATION = 0x0112
"""The tag of EXIF."""
_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns the pixels upright, by the orientation of EXIF."""
_SIDEWAYS = frozenset({5, 6, 7, 8})
_WHITE = (255, 255, 255, 255)


def from_base64(text: bytearray) -> bytes:
    """Raises BadFile if it is no base64."""
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        # Some encoders break lines.
        try:
            data = binascii.a2b_base64(b"".join(text.split()), strict_mode=True)
        except ValueError:
            raise BadFile("is not valid base64") from None
    if not data:
        raise BadFile("is empty")
    return data


def open_image(data: bytes | bytearray, max_pixels: int) -> Image.Image:
    """Reads a file's header. Raises BadFile unless it is an image of a known format with at most
    `max_pixels` pixels.
    """
    Image.MAX_IMAGE_PIXELS = max_pixels  # Beyond twice as many Pillow raises, before that it warns.
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
    except Image.DecompressionBombError:
        raise BadFile(f"has more than {max_pixels} pixels") from None
    except Exception:  # Pillow's readers raise errors of any kind for damaged files.
        raise BadFile(f"is no image that can be read; give one of {', '.join(FORMATS)}") from None
    if width * height > max_pixels:
        raise BadFile(f"has {width} x {height} pixels; at most {max_pixels} are accepted")
    if width < 1 or height < 1:
        raise BadFile("has no pixels")
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width of an opened image once it is turned upright."""
    width, height = image.size
    return (width, height) if _orientation(image) in _SIDEWAYS else (height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """The pixels of an opened image, of its first frame if it has several: upright, in RGB, on
    white where they are transparent. Raises BadFile if the file is damaged.
    """
    orientation = _orientation(image)
    try:
        image.load()
        image = _opaque(image)
    except Exception:  # as above
        raise BadFile(
            f"is damaged or cut off: it begins as {image.format}, but its pixels cannot be decoded"
        ) from None
    turn = _TRANSPOSED.get(orientation)
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    try:
        # A PNG's own function would decode the pixels, behind which the tag may stand.
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:  # An image with damaged EXIF is still an image.
        return 1


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    pixels = image.convert("RGBA")
    white = Image.new("RGBA", pixels.size, _WHITE)
    return Image.alpha_composite(white, pixels).convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which `convert` would clip to white."""
    import numpy as np  # Hardly any process needs it, and all start faster without it.

    values = np.clip(np.asarray(image).astype(np.int64), 0, 0xFFFF)
    grey = ((values + 128) // 257).astype(np.uint8)
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return Image.fromarray(grey)
    alpha = np.where(values == transparent, 0, 255).astype(np.uint8)
    return Image.fromarray(np.stack([grey, alpha], axis=-1))
