"""Decodes audio files and computes spectrograms. Runs in media processes only: decoders read bytes
of strangers.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt
from weft.checkpoint.audio_config import FRAME_SAMPLES, SAMPLE_RATE
from weft.contract.arrays import Float32Array
from weft.gateway.media.containers import EXTRA, demuxer_of, is_installed, sound_of
from weft.gateway.media.prompts import BadFile

PROCESSOR = "whisper-log-mel-1"
Float64Array = npt.NDArray[np.float64]

_WINDOW = 400
_LEAST_RATE, _MOST_RATE = 1_000, 768_000
_BLOCK_NUMBERS = 1 << 18
_BLOCK_FRAMES = 3000
_LINEAR_HZ, _LINEAR_MELS, _LOG_STEP = 1000.0, 15.0, np.log(6.4) / 27.0
"""Slaney's scale of mels: linear up to 1000 Hz, then logarithmic."""


def decode(data: bytes | bytearray, max_seconds: float) -> Float32Array:
    """The samples of a file, 16,000 a second, channels mixed before they are resampled. Decodes no
    more than `max_seconds`, whatever the file's header says. Raises BadFile.
    """
    most, parts, count = int(max_seconds * SAMPLE_RATE), list[Float32Array](), 0
    try:
        for part in _resampled(_blocks(data)):
            count += len(part)
            if count > most:
                raise BadFile(f"is longer than {max_seconds:g} s")
            parts.append(part)
    except BadFile:
        raise
    except Exception:  # Readers raise errors of several kinds for damaged files.
        known = "WAV, FLAC, OGG, MP3, M4A or WEBM" if is_installed() else "WAV, FLAC, OGG or MP3"
        raise BadFile(f"is no audio that can be read; give {known}") from None
    if not count:
        raise BadFile("has no samples")
    samples = np.concatenate(parts)
    return np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1e4, 1e4)


def _blocks(data: bytes | bytearray) -> Iterator[tuple[int, Float32Array]]:
    """Samples a second, and the samples of a file, block after block."""
    if demuxer := demuxer_of(data):
        if not is_installed():
            raise BadFile(
                "is of a kind that this gateway does not read; give WAV, FLAC, OGG or MP3, or "
                f"install the wheel with its extra `{EXTRA}`"
            )
        yield from sound_of(data, demuxer)
        return
    import soundfile

    with soundfile.SoundFile(io.BytesIO(data)) as file:
        size, is_last = max(1, _BLOCK_NUMBERS // file.channels), False
        while not is_last:
            block = file.read(size, dtype="float32", always_2d=True)
            is_last = len(block) < size
            yield file.samplerate, block.mean(axis=1, dtype=np.float32)


def _resampled(blocks: Iterable[tuple[int, Float32Array]]) -> Iterator[Float32Array]:
    import soxr

    first, resampler = 0, None
    for rate, mono in blocks:
        if not _LEAST_RATE <= rate <= _MOST_RATE or rate != (first := first or rate):
            raise BadFile(f"has {rate} samples a second" + (f" after {first}" if first else ""))
        if rate != SAMPLE_RATE:
            resampler = resampler or soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
            mono = resampler.resample_chunk(mono)
        yield mono
    if resampler is not None:
        yield resampler.resample_chunk(np.zeros(0, np.float32), last=True)


def log_mel(samples: Float32Array, num_mels: int, num_samples: int) -> Float32Array:
    """[mels, frames]: Whisper's spectrogram of a clip, which is filled up with silence to
    `num_samples`. The loudest frame of all of the clip bounds its range.
    """
    clip = np.zeros(num_samples, np.float64)
    clip[: len(samples)] = samples
    padded = np.pad(clip, _WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::FRAME_SAMPLES][:-1]
    window = np.hanning(_WINDOW + 1)[:-1]
    parts = []
    for begin in range(0, len(frames), _BLOCK_FRAMES):
        power = np.abs(np.fft.rfft(frames[begin : begin + _BLOCK_FRAMES] * window)) ** 2
        parts.append(np.log10(np.maximum(_filters(num_mels) @ power.T, 1e-10)))
    mel = np.concatenate(parts, axis=1)
    mel = np.maximum(mel, mel.max() - 8.0)
    found: Float32Array = ((mel + 4.0) / 4.0).astype(np.float32)
    return found


@cache
def _filters(num_mels: int) -> Float64Array:
    """[mels, frequencies]: triangles of area 1, at equal distances in mels."""
    top = _LINEAR_MELS + np.log(SAMPLE_RATE / 2 / _LINEAR_HZ) / _LOG_STEP
    mels = np.linspace(0.0, top, num_mels + 2)
    linear = mels * _LINEAR_HZ / _LINEAR_MELS
    above = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    hertz = np.where(mels < _LINEAR_MELS, linear, above)
    bins = np.linspace(0.0, SAMPLE_RATE / 2, _WINDOW // 2 + 1)
    slopes = hertz[:, None] - bins
    widths = np.diff(hertz)[:, None]
    triangles = np.minimum(-slopes[:-2] / widths[:-1], slopes[2:] / widths[1:])
    filters: Float64Array = np.maximum(triangles, 0.0) * (2.0 / (hertz[2:] - hertz[:-2]))[:, None]
    return filters
