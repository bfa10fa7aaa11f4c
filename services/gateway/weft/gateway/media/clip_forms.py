"""The form of clips of audio in chats: how a model wants them cut, and how many rows they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from weft.checkpoint.audio_config import (
    FRAME_SAMPLES,
    SAMPLE_RATE,
    AudioProjectorConfig,
    WindowConfig,
)
from weft.contract.spans import Media
from weft.gateway.media.prompts import BadFile

if TYPE_CHECKING:
    from weft.contract.arrays import Float32Array


@dataclass(frozen=True, slots=True)
class ClipForm:
    """A clip is one spectrogram, which is cut into windows: a medium each. An encoder that fills
    clips up with silence takes any number of them, one that takes lengths one.
    """

    name: ClassVar[str] = "clip"
    window: WindowConfig

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ClipForm:
        """Makes one of another's `options`."""
        projector = AudioProjectorConfig(**options["projector"])
        return cls(WindowConfig(**{**options, "projector": projector}))

    def options(self) -> dict[str, Any]:
        return asdict(self.window)

    def frames(self, num_samples: int) -> list[int]:
        """Frames of each window of a clip. Raises BadFile if the model does not take it."""
        window = self.window
        count = -(-num_samples // window.num_samples)
        if not window.takes_lengths:
            return [window.num_frames] * count
        if count > 1:
            longest = window.num_samples / SAMPLE_RATE
            raise BadFile(f"is longer than {longest:g} s, the longest clip that this model hears")
        frames = window.frames_of(num_samples)
        if frames < window.fewest_frames:
            shortest = (window.fewest_frames - 1) * FRAME_SAMPLES / SAMPLE_RATE
            raise BadFile(f"is too short; this model hears clips from {shortest:g} s on")
        return [frames]

    def process(self, samples: Float32Array) -> list[Media]:
        """The media of a clip, in their order. Only media processes call it."""
        from weft.gateway.media.audio import PROCESSOR, log_mel  # numpy

        window, frames = self.window, self.frames(len(samples))
        mel = log_mel(samples, window.num_mels, len(frames) * window.num_samples)
        media = []
        for number, count in enumerate(frames):
            begin = number * window.num_frames
            part = mel[:, begin : begin + count].astype("<f4")
            shape = (*part.shape, part.itemsize)
            media.append(Media.of("audio", PROCESSOR, shape, part.tobytes()))
        return media
