"""Reads files of MP4 and Matroska's kinds with PyAV, FFmpeg's library, which is an optional extra.
Runs in media processes only: decoders read bytes of strangers.

The first bytes choose the one demuxer that a file gets. FFmpeg's own guess could take it for a
playlist, whose demuxer opens other files and URLs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from weft.contract.arrays import Float32Array
from weft.gateway.media.prompts import BadFile

if TYPE_CHECKING:
    from PIL.Image import Image

EXTRA = "video"
"""Extra of the wheel that has PyAV."""
_MATROSKA = b"\x1a\x45\xdf\xa3"
_PROGRAM_STREAM = b"\x00\x00\x01\xba"
_BRAND_AT = 4
_MAX_FRAMES = 1 << 20
"""Frames of a video that are counted before it is refused."""
_MAX_RATE = 1000
_MAX_PLANES = 7
"""Most channels of a frame that has each in a plane of its own. PyAV 18 reads past the planes of
frames with more, which ends the process.
"""
_FULL_SCALE = {"u1": 128.0, "i2": 2.0**15, "i4": 2.0**31}


class VideoFacts(NamedTuple):
    """What a file says of its first video, and what was counted of it."""

    num_frames: int
    rate: float
    """Frames a second."""
    height: int
    width: int
    """Of an upright frame."""
    turn: int
    """Degrees to the left that make a frame upright."""


def is_installed() -> bool:
    """Whether PyAV is there."""
    return find_spec("av") is not None


def demuxer_of(data: bytes | bytearray) -> str:
    """FFmpeg's name of the demuxer for a file; empty: it is of none of these kinds."""
    head = bytes(data[:16])
    if head[_BRAND_AT : _BRAND_AT + 4] == b"ftyp":
        return "mov"
    if head.startswith(_MATROSKA):
        return "matroska"
    if head.startswith(_PROGRAM_STREAM):
        return "mpeg"
    # ADTS has layer 0, which no MPEG audio has.
    is_adts = len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0
    return "aac" if is_adts else ""


@contextmanager
def _opened(data: bytes | bytearray, demuxer: str) -> Iterator[Any]:
    import av

    with av.open(
        io.BytesIO(data), format=demuxer, metadata_errors="ignore", options={"enable_drefs": "0"}
    ) as container:
        yield container


def sound_of(data: bytes | bytearray, demuxer: str) -> Iterator[tuple[int, Float32Array]]:
    """Decodes the first audio of a file: samples a second and samples, channels mixed, of a block
    after another. Raises BadFile and what PyAV raises for damaged files.
    """
    with _opened(data, demuxer) as container:
        if not container.streams.audio:
            raise BadFile("has no audio")
        stream = container.streams.audio[0]
        stream.thread_type = "NONE"
        for frame in container.decode(stream):
            yield frame.sample_rate, _mono(frame)


def _mono(frame: Any) -> Float32Array:
    if frame.format.is_planar and (count := frame.layout.nb_channels) > _MAX_PLANES:
        raise BadFile(f"has {count} channels; at most {_MAX_PLANES}")
    values = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, len(frame.layout.channels)).T
    numbers = values.astype(np.float32)
    if (scale := _FULL_SCALE.get(values.dtype.str[1:])) is not None:
        numbers = (numbers - (scale if values.dtype == np.uint8 else 0.0)) / np.float32(scale)
    mixed: Float32Array = numbers.mean(axis=0, dtype=np.float32)
    return mixed


def facts_of(data: bytes | bytearray, max_seconds: float, max_pixels: int) -> VideoFacts:
    """What is known of the first video of a file. Its packets are counted, since headers may say
    anything. Raises BadFile unless it is within bounds, and what PyAV raises for damaged files.
    """
    demuxer = demuxer_of(data)
    if demuxer not in ("mov", "matroska"):
        raise BadFile("is no video that can be read; give MP4, MOV, WEBM or MKV")
    with _opened(data, demuxer) as container:
        if not container.streams.video:
            raise BadFile("has no video")
        stream = container.streams.video[0]
        width, height, count = stream.width, stream.height, 0
        if not 0 < width * height <= max_pixels:
            raise BadFile(f"has frames of {width} x {height} pixels; at most {max_pixels}")
        rate = stream.average_rate or stream.guessed_rate or Fraction(24)
        for packet in container.demux(stream):
            count += packet.size > 0
            if count > _MAX_FRAMES:
                raise BadFile(f"has more than {_MAX_FRAMES} frames")
    if not count or not 0 < rate <= _MAX_RATE:
        raise BadFile(f"has {count} frames, {float(rate):g} a second")
    if count / rate > max_seconds:
        raise BadFile(f"is longer than {max_seconds:g} s")
    with _opened(data, demuxer) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        first = next(container.decode(stream), None)
        turn = 0 if first is None or first.rotation % 90 else int(first.rotation) % 360
    sides = (width, height) if turn % 180 else (height, width)
    return VideoFacts(count, float(rate), *sides, turn)


def images_of(
    data: bytes | bytearray, facts: VideoFacts, numbers: Sequence[int]
) -> Iterator[Image]:
    """The frames of these numbers, which rise, upright and in RGB. Raises as `facts_of` does."""
    missing, num_found = iter(numbers), 0
    following = next(missing, None)
    with _opened(data, demuxer_of(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        size = stream.width, stream.height
        for number, frame in enumerate(container.decode(stream)):
            if (frame.width, frame.height) != size:
                raise BadFile("has frames of several sizes")
            if number != following:
                continue
            image = frame.to_image()
            yield image.rotate(facts.turn, expand=True) if facts.turn else image
            num_found, following = num_found + 1, next(missing, None)
            if following is None:
                return
    raise BadFile(f"ends after {num_found} of the {len(numbers)} frames that are looked at")
