"""Turns audio files into samples, and parts of these into media, in the media processes."""

from __future__ import annotations

from weft.checkpoint.audio_config import FLOAT_BYTES, AudioConfig
from weft.contract.spans import Media
from weft.gateway.media.pool import MediaPool
from weft.gateway.media.reader import HeldMedia
from weft.gateway.settings import GatewaySettings
from weft.gateway.validate import invalid


class Samples:
    """A file's samples, 16,000 a second."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return len(self._data) // FLOAT_BYTES

    def part(self, start: int, end: int) -> bytes:
        """Some of them, as little-endian float32."""
        return bytes(self._data[start * FLOAT_BYTES : end * FLOAT_BYTES])


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
        self, data: bytes, where: str, *, holder: str, deadline: float, tenant: str = ""
    ) -> Samples:
        """The samples of a file. `holder` is the request that holds them until
        `held.give_back`; `deadline`, in the event loop's time, bounds the wait for a process.

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
        head = {"audio": "file", "max_seconds": self._max_seconds}
        reply, samples = await self._pool.run(
            head, memoryview(data), deadline=deadline, tenant=tenant
        )
        if "bad" in reply:
            raise invalid(where, reply["bad"])
        self.held.take(holder, len(samples))
        found = Samples(samples)
        self.num_files += 1
        self.num_samples += len(found)
        return found

    async def clip(
        self, config: AudioConfig, samples: bytes, *, deadline: float, tenant: str = ""
    ) -> Media:
        """The spectrogram of at most one clip's samples. Raises as `decode` does."""
        head = {"audio": "clip", "mels": config.num_mels, "samples": config.num_samples}
        reply, data = await self._pool.run(
            head, memoryview(samples), deadline=deadline, tenant=tenant
        )
        self.num_clips += 1
        return Media(
            kind="audio",
            processor=reply["processor"],
            shape=tuple(reply["shape"]),
            data=bytes(data),
            digest=bytes.fromhex(reply["digest"]),
        )
