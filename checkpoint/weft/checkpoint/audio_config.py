"""The parts of audio towers, as configurations describe them. Pure Python.

A tower makes rows of a clip's log-mel spectrogram. In Whisper all layers of the decoder attend to
them; in models with a projector they take the places of embeddings of placeholder tokens.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.fields import fields_of_file

SAMPLE_RATE = 16_000
"""Samples a second that towers take."""
FRAME_SAMPLES = 160
"""Samples from one frame of a spectrogram to the next."""
FLOAT_BYTES = 4
"""Bytes of a number of a spectrogram, which travels as little-endian float32."""
_ROUNDED_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioNamesConfig:
    """Names of a tower's parts in a checkpoint. An empty name: there is no such part."""

    tower: str = "model.encoder"
    projector: str = ""
    projections: tuple[str, ...] = ()
    """The projector's products, in order."""

    def has(self, name: str) -> bool:
        """Whether a tensor is one of the tower's."""
        parts = (self.tower, self.projector) if self.projector else (self.tower,)
        return name.startswith(tuple(f"{part}." for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioProjectorConfig:
    """What makes rows of the language model's width of an encoder's: of `joined` consecutive rows,
    side by side and by an MLP without biases, or of their mean and by a product with a bias.
    """

    joined: int
    out_features: int
    """Width of the language model."""
    is_mean: bool = False
    """Whether the mean is taken, ahead of the encoder's last norm."""
    takes_lengths: bool = False
    """Whether a clip that is shorter than the encoder's window has fewer rows; otherwise it is
    filled up with silence.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentConfig:
    """How a decoder's attention to a clip tells when tokens are spoken."""

    heads: tuple[tuple[int, int], ...]
    """The layers and heads that follow the speech, in order."""
    median_width: int
    """Frames of the median that smooths their attention; odd."""
    num_frames: int
    """Frames that the encoder makes of a clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig:
    """How much of a clip an encoder takes at once, and how many rows it makes of that."""

    num_mels: int
    num_positions: int
    """Rows that the encoder makes of a window: one for two frames."""
    projector: AudioProjectorConfig | None = None
    """None: the layers of the language model attend to the encoder's rows."""

    @property
    def num_frames(self) -> int:
        return 2 * self.num_positions

    @property
    def num_samples(self) -> int:
        """Samples of a window."""
        return self.num_frames * FRAME_SAMPLES

    @property
    def num_rows(self) -> int:
        """Placeholder tokens of a window in a prompt. Where layers attend to rows, these are whole
        pages of any size that divides 64; rows beyond `num_positions` are then zeros, to which
        nothing attends.
        """
        if self.projector is not None:
            return self.num_positions // self.projector.joined
        return -(-self.num_positions // _ROUNDED_ROWS) * _ROUNDED_ROWS

    @property
    def takes_lengths(self) -> bool:
        """Whether a clip that is shorter than a window has fewer rows; otherwise it is filled up
        with silence.
        """
        return self.projector is not None and self.projector.takes_lengths

    def frames_of(self, num_samples: int) -> int:
        """Frames of a spectrogram that the encoder takes of a clip, at most a window's. A clip that
        is not filled up has those that its positions see.
        """
        if not self.takes_lengths:
            return self.num_frames
        whole = -(-num_samples // FRAME_SAMPLES)
        return min(self.num_frames, 2 * ((whole + 1) // 2) + 1)

    def positions_of(self, num_frames: int) -> int:
        """Rows that the encoder makes of so many frames, as `frames_of` counts them."""
        return num_frames // 2

    def rows_of(self, num_frames: int) -> int:
        """Placeholder tokens of so many frames."""
        if self.projector is None:
            return self.num_rows
        return self.positions_of(num_frames) // self.projector.joined

    @property
    def fewest_frames(self) -> int:
        """Those of a clip that has a row."""
        if self.projector is None or not self.takes_lengths:
            return self.num_frames
        return 2 * self.projector.joined


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig(WindowConfig):
    """Whisper's encoder (arXiv 2212.04356): two convolutions, the second of which halves the
    frames, and a transformer in both directions over windows of one length.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    names: AudioNamesConfig = AudioNamesConfig()

    @property
    def window(self) -> WindowConfig:
        return WindowConfig(
            num_mels=self.num_mels, num_positions=self.num_positions, projector=self.projector
        )

    @property
    def row_width(self) -> int:
        """Elements of a row."""
        return self.hidden_size if self.projector is None else self.projector.out_features

    def fingerprint(self) -> bytes:
        """Canonical bytes of every field that changes rows."""
        values: dict[str, Any] = asdict(self)
        del values["names"]
        if self.projector is None:
            del values["projector"]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def fits_pages(page_size: int) -> bool:
    """Whether a clip's rows are whole pages of this size."""
    return _ROUNDED_ROWS % page_size == 0


def check_spectrograms(folder: Path, window: WindowConfig) -> None:
    """Raises ModelError if a folder's processor makes other spectrograms than Whisper's for such
    windows.
    """
    fields = fields_of_file(folder / "preprocessor_config.json", may_lack=True)
    wanted = (
        ("feature_size", window.num_mels),
        ("sampling_rate", SAMPLE_RATE),
        ("hop_length", FRAME_SAMPLES),
        ("n_fft", 400),
        ("dither", 0.0),
        ("do_normalize", False),
    )
    for name, value in wanted:
        if fields.get(name) not in (None, value):
            raise fields.error(name, f"only {value} is supported, not {fields.get(name)!r:.20}")
