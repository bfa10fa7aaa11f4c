"""A media process: decodes and processes one file at a time until the gateway closes the socket.

Run as `python -m weft.gateway.media.process FD`. A job that takes too long, or that kills its
process, costs no other request anything: the gateway starts another process.
"""

from __future__ import annotations

import math
import os
import resource
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from weft.checkpoint.audio_config import FRAME_SAMPLES
from weft.contract.spans import Media
from weft.gateway.media.clip_forms import ClipForm
from weft.gateway.media.decode import from_base64, open_image, to_rgb, upright_size
from weft.gateway.media.forms import FORMS
from weft.gateway.media.frames import PeerGone, receive, send
from weft.gateway.media.prompts import BadFile

_NICENESS = 5
"""Streams of tokens go ahead of images."""
_MAX_BYTES = 8 << 30
"""Address space, whatever a file makes of its decoder: a billion pixels in 4 bytes, twice."""


def serve(peer: socket.socket) -> None:
    """Answers jobs until the other end closes."""
    while True:
        head, data = receive(peer, math.inf)
        reply, body = _answer(head, data)
        # The pixels of a job must not stay until the next one.
        del data
        send(peer, reply, body, math.inf)
        del body


def _answer(head: Mapping[str, Any], data: bytearray) -> tuple[dict[str, Any], bytes]:
    if "audio" in head:
        return _answer_audio(head, data)
    try:
        file = from_base64(data) if head["is_base64"] else data
        size, media = _READERS.get(head["form"], _image)(file, head)
    except BadFile as error:
        return {"bad": str(error)}, b""
    told = [
        {"processor": one.processor, "shape": one.shape, "digest": one.digest.hex()}
        for one in media
    ]
    return {"size": size, "media": told}, b"".join([one.data for one in media])


def _image(
    file: bytes | bytearray, head: Mapping[str, Any]
) -> tuple[Sequence[int], Sequence[Media]]:
    image = open_image(file, head["max_pixels"])
    size = upright_size(image)
    form = FORMS[head["form"]](**head["options"])
    form.plan(*size, is_coarse=head["is_coarse"])
    if head["measures"]:
        return size, ()
    return size, form.process(to_rgb(image), is_coarse=head["is_coarse"])


def _clip(
    file: bytes | bytearray, head: Mapping[str, Any]
) -> tuple[Sequence[int], Sequence[Media]]:
    from weft.gateway.media import audio  # as below

    samples = audio.decode(file, head["max_seconds"])
    form = ClipForm.of(head["options"])
    form.frames(len(samples))
    return (len(samples),), () if head["measures"] else form.process(samples)


def _video(
    file: bytes | bytearray, head: Mapping[str, Any]
) -> tuple[Sequence[int], Sequence[Media]]:
    # Only in the process of videos: PyAV is large.
    from weft.gateway.media.containers import facts_of, images_of
    from weft.gateway.media.video_forms import VideoForm

    form = VideoForm(**head["options"])
    try:
        facts = facts_of(file, head["max_seconds"], head["max_pixels"])
        chosen = form.chosen(facts)
        grid = form.resized(len(chosen), facts.height, facts.width)
        chosen = form.padded(chosen)
        times = form.times(chosen, facts)
        media: Sequence[Media] = ()
        if not head["measures"]:
            images = images_of(file, facts, list(dict.fromkeys(chosen)))
            media = form.process(images, chosen, grid, times)
    except BadFile:
        raise
    except Exception:  # FFmpeg's errors are of many kinds.
        raise BadFile("is damaged or cut off: its frames cannot be decoded") from None
    return (*grid, *times), media


_READERS = {ClipForm.name: _clip, "video": _video}
"""What reads a file, by the name of its form; others are of images."""


def _answer_audio(head: Mapping[str, Any], data: bytearray) -> tuple[dict[str, Any], bytes]:
    # Only here: processes that decode images start faster without.
    from weft.gateway.media import audio

    try:
        samples = audio.decode(data, head["max_seconds"])
    except BadFile as error:
        return {"bad": str(error)}, b""
    mel = audio.log_mel(samples, head["mels"], max(len(samples), FRAME_SAMPLES))
    told = {"samples": len(samples), "processor": audio.PROCESSOR}
    return told, mel.astype("<f4", copy=False).tobytes()


def main() -> int:
    """Serves the socket whose number is the first argument."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # Strangers' files would fill the log.
    with socket.socket(fileno=int(sys.argv[1])) as peer:
        os.set_inheritable(peer.fileno(), False)
        try:
            serve(peer)
        except PeerGone:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
