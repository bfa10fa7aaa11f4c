"""Turns audio files into spectrograms in the media processes, and parts of these into media."""

from __future__ import annotations

import asyncio

import numpy as np
from weft.checkpoint.audio_config import FLOAT_BYTES, AudioConfig
from weft.contract.spans import Media
from weft.gateway.media.pool import MediaPool
from weft.gateway.media.reader import HeldMedia
from weft.gateway.settings import GatewaySettings
from weft.gateway.validate import invalid


class Spectrogram:
    """A file's log-mel spectrogram, whose range the file's loudest frame bounds.

    Args:
        data: [num_mels, frames], little-endian float32.
        num_samples: Samples of the file, 16,000 a second.
    """

    def __init__(
        self, data: bytes | bytearray, processor: str, num_mels: int, num_samples: int
    ) -> None:
        self._mel = np.frombuffer(data, "<f4").reshape(num_mels, -1)
        self._processor = processor
        self.num_samples = num_samples

    @property
    def num_frames(self) -> int:
        return self._mel.shape[1]

    def clip(self, first: int, num_frames: int) -> Media:
        """The frames from `first` on. Zeros follow the file's last one, as in OpenAI's program."""
        clip = np.zeros((len(self._mel), num_frames), "<f4")
        part = self._mel[:, first : first + num_frames]
        clip[:, : part.shape[1]] = part
        return Media.of("audio", self._processor, (*clip.shape, FLOAT_BYTES), clip.tobytes())


class ClipReader:
    """Belongs to the event loop.

    Args:
        pool: The processes that do the work.
        held: Counts what running requests hold.
    """

    def __init__(self, settings: GatewaySettings, pool: MediaPool, held: HeldMedia) -> None:
        self.max_bytes = settings.max_audio_bytes
        """Largest file."""
        self._max_seconds = settings.max_audio_seconds
        self._pool = pool
        self.held = held
        self.num_files = 0
        """Files decoded so far."""
        self.num_samples = 0
        """Their samples."""
        self.num_clips = 0
        """Clips made of them so far."""

    async def decode(
        self,
        data: bytes,
        where: str,
        config: AudioConfig,
        *,
        holder: str,
        deadline: float,
        tenant: str = "",
    ) -> Spectrogram:
        """The spectrogram of a file. `holder` is the request that holds it until `held.give_back`;
        `deadline`, in the event loop's time, bounds the wait for a process.

        Raises:
            InvalidRequest: The file is no audio, is damaged, or is too long or too large; `where`
                is its name.
            Overloaded: Too many files wait, or requests hold too much.
            DeadlineExceeded: It took too long, or no process became free in time.
            PeerUnavailable: A process died.
        """
        if len(data) > self.max_bytes:
            told = f"has {len(data)} bytes; at most {self.max_bytes} are accepted"
            raise invalid(where, told)
        self.held.take(holder, len(data))
        head = {"audio": "file", "max_seconds": self._max_seconds, "mels": config.num_mels}
        reply, mel = await self._pool.run(head, memoryview(data), deadline=deadline, tenant=tenant)
        if "bad" in reply:
            raise invalid(where, reply["bad"])
        self.held.take(holder, len(mel))
        self.num_files += 1
        self.num_samples += reply["samples"]
        return Spectrogram(mel, reply["processor"], config.num_mels, reply["samples"])

    async def clip(self, file: Spectrogram, first: int, config: AudioConfig) -> Media:
        """The clip that begins with a frame."""
        self.num_clips += 1
        # Its digest takes a millisecond.
        return await asyncio.to_thread(file.clip, first, config.num_frames)
