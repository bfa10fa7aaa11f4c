"""Audio files as samples and spectrograms, against libraries and transformers."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import soundfile
import soxr
from transformers import WhisperFeatureExtractor
from weft.gateway.media import audio
from weft.gateway.media.audio import decode, log_mel
from weft.gateway.media.prompts import BadFile
from weft.testing.models.tiny_whisper import in_float64

RATE = 16_000


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    at = np.arange(int(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * hertz * at)).astype(np.float32)


def file_of(samples: np.ndarray, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind, subtype=subtype)
    return out.getvalue()


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 3.3, 30.0])
def test_spectrograms_are_those_of_transformers(mels: int, seconds: float) -> None:
    samples = np.random.default_rng(random.randrange(1 << 30)).normal(0, 0.1, int(seconds * RATE))
    samples = samples.astype(np.float32)
    extract = in_float64(WhisperFeatureExtractor(feature_size=mels))
    wanted = extract(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(log_mel(samples, mels, 30 * RATE), wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 48_000])
def test_files_of_any_form_have_the_same_sound(kind: str, rate: int) -> None:
    found = decode(file_of(tone(1.0, rate), rate, kind), 10)
    assert abs(len(found) - RATE) < 0.1 * RATE
    wanted, middle = tone(1.0, RATE), slice(RATE // 4, RATE // 2)
    # Codecs delay the sound by some samples.
    shares = [np.abs(np.fft.rfft(one[middle])) for one in (wanted, found)]
    assert shares[0].argmax() == shares[1].argmax()
    np.testing.assert_allclose(np.abs(found[middle]).max(), 0.4, atol=0.03)


def test_channels_are_mixed_before_they_are_resampled() -> None:
    left, right = tone(1.0, 44_100, 300.0), tone(1.0, 44_100, 1100.0)
    found = decode(file_of(np.stack([left, right], 1), 44_100, "WAV", "FLOAT"), 10)
    wanted = soxr.resample((left + right) / 2, 44_100, RATE)
    np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize(
    "begin",
    [b"\0\0\0\x20ftypM4A ", b"\x1a\x45\xdf\xa3\x01", b"\xff\xf1\x50\x80", b"\0\0\x01\xba"],
    ids=["m4a", "webm", "aac", "mpeg"],
)
def test_what_an_extra_reads_is_refused_with_its_name(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio, "is_installed", lambda: False)
    with pytest.raises(BadFile, match=f"extra `{audio.EXTRA}`"):
        decode(begin + random.randbytes(200), 10)


def test_no_more_is_decoded_than_allowed_whatever_a_header_says() -> None:
    """Silence compresses to nothing, and a forged rate hides how long a file is."""
    long = file_of(np.zeros(60 * RATE, np.float32), RATE, "FLAC")
    assert len(long) < 10_000
    with pytest.raises(BadFile, match="longer than 59 s"):
        decode(long, 59)
    assert len(decode(long, 60)) == 60 * RATE
    forged = bytearray(file_of(np.zeros(RATE, np.float32), RATE))
    forged[24:28] = (2_000).to_bytes(4, "little")
    with pytest.raises(BadFile, match="longer than 7 s"):
        decode(forged, 7)
    forged[24:28] = (1).to_bytes(4, "little")
    with pytest.raises(BadFile, match="1 samples a second"):
        decode(forged, 7)


def test_numbers_that_are_no_sound_do_no_harm() -> None:
    samples = np.array([np.nan, np.inf, -np.inf, 1e30] * 1000, np.float32)
    found = decode(file_of(samples, RATE, "WAV", "FLOAT"), 10)
    assert np.isfinite(found).all()
    assert np.isfinite(log_mel(found, 80, RATE)).all()


def damage(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data[: rng.randint(0, len(data))] if rng.random() < 0.4 else data)
    for _ in range(rng.randint(1, 12)):
        if changed:
            # Headers, mostly.
            at = rng.randrange(min(len(changed), 100 if rng.random() < 0.6 else len(changed)))
            changed[at] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_damaged_files_are_refused_or_have_a_sound(count: int) -> None:
    rng = random.Random()
    files = [
        file_of(tone(0.3, rate), rate, kind)
        for kind, rate in (("WAV", 8_000), ("FLAC", 16_000), ("OGG", 22_050), ("MP3", 44_100))
    ]
    for _ in range(count):
        data = damage(rng.choice(files), rng)
        try:
            samples = decode(data, 5)
        except BadFile:
            continue
        assert 0 < len(samples) <= 5 * RATE
        assert np.isfinite(samples).all()
