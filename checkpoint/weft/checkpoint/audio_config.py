"""The parts of audio towers, as configurations describe them. Pure Python.

A tower makes rows of a clip's log-mel spectrogram. In Whisper all layers of the decoder attend to
them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

SAMPLE_RATE = 16_000
"""Samples a second that towers take."""
FRAME_SAMPLES = 160
"""Samples from one frame of a spectrogram to the next."""
FLOAT_BYTES = 4
"""Bytes of a number of a spectrogram, which travels as little-endian float32."""
_ROUNDED_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioNamesConfig:
    """Names of a tower's parts in a checkpoint."""

    tower: str = "model.encoder"

    def has(self, name: str) -> bool:
        """Whether a tensor is one of the tower's."""
        return name.startswith(f"{self.tower}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    """Whisper's encoder (arXiv 2212.04356): two convolutions, the second of which halves the
    frames, and a transformer in both directions over clips of one length.
    """

    num_mels: int
    num_positions: int
    """Rows that the tower makes of a clip: one for two frames."""
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    names: AudioNamesConfig = AudioNamesConfig()

    @property
    def num_frames(self) -> int:
        return 2 * self.num_positions

    @property
    def num_samples(self) -> int:
        """Samples of a clip."""
        return self.num_frames * FRAME_SAMPLES

    @property
    def num_rows(self) -> int:
        """Placeholder tokens of a clip in a prompt: whole pages of any size that divides 64. Rows
        beyond `num_positions` are zeros, to which nothing attends.
        """
        return -(-self.num_positions // _ROUNDED_ROWS) * _ROUNDED_ROWS

    @property
    def row_width(self) -> int:
        """Elements of a row."""
        return self.hidden_size

    def fingerprint(self) -> bytes:
        """Canonical bytes of every field that changes rows."""
        values: dict[str, Any] = asdict(self)
        del values["names"]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def fits_pages(page_size: int) -> bool:
    """Whether a clip's rows are whole pages of this size."""
    return _ROUNDED_ROWS % page_size == 0
