"""What profiles cost a loaded engine on a GPU, before, during and after them.

    python bench/gpu_profile.py [--model llama-3.1-8b] [--batch 64] [--steps 20 100] [--keep DIR]

A batch decodes all the time; requests end one after another and are replaced, so that all windows
have contexts of the same lengths. In turns the engine runs `--window` steps, is profiled, and runs
that many again. `outside` is the rate after a profile over the one before it; its median is to be
at least 0.98. `begin_ms` is the longest turn from the command to the first recorded step,
`pause_ms` the time for which the engine stands still at the end (at most 2,000), `writing_ms` the
longest turn while the file is written. Then the parts are merged, which a worker does in another
process. `--keep` leaves the merged traces there, to be opened at https://ui.perfetto.dev. With
`--device cpu --model smollm2-135m --batch 4 --window 32` it runs anywhere.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_runs import GREEDY, random_prompts
from gpu_engine import GPU_SETTINGS
from harness import Harness, Run, spread, timed
from model_shapes import MODELS, write_config
from weft.contract.messages import Inbox
from weft.contract.profiles import MAX_LIMIT_S, ProfileEnd
from weft.contract.request import StopCriteria
from weft.contract.submits import Submit
from weft.contract.token_ids import token_ids
from weft.engine.loop.llm import LLM
from weft.testing.engine.profiled import EngineProfiles, step_names

PROMPT_TOKENS, NEW_TOKENS = 64, 256
WRITING_LIMIT_S = 60.0
LEAST_OUTSIDE, MAX_PAUSE_S = 0.98, 2.0
KINDS: dict[str, dict[str, Any]] = {"all": {}, "gpu": {"host": False}}

harness = Harness(__file__, __doc__, repeats=3)
harness.flag("--model", choices=MODELS, default="llama-3.1-8b")
harness.flag("--batch", type=int, default=64)
harness.flag("--steps", nargs="+", type=int, default=[20, 100], help="of a profile")
harness.flag("--window", type=int, default=512, help="steps before and after a profile")
harness.flag("--device", default="cuda")
harness.flag("--keep", type=Path, metavar="DIR", help="where to leave merged traces")


@dataclass(slots=True)
class Ran:
    """Turns of the engine."""

    seconds: float
    tokens: int
    longest_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Load:
    """Keeps a batch of requests decoding."""

    llm: LLM
    batch: int
    open: int = 0
    ids: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, ends: Callable[[int], bool]) -> Ran:
        """Turns until `ends` says so of the number of turns."""
        engine, tokens, longest_s = self.llm.engine, 0, 0.0
        began_s = last_s = time.perf_counter()
        turns = 0
        while not ends(turns):
            new, self.open = self._more(), self.batch
            outbox = engine.turn(Inbox(submits=new) if new else None)
            for gateway in outbox.gateways:
                assert not gateway.failed, gateway.failed
                tokens += sum(len(one.ids) for one in gateway.all_tokens())
                self.open -= len(gateway.finished)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            turns += 1
        return Ran(last_s - began_s, tokens, longest_s)

    def _more(self) -> list[Submit]:
        missing = self.batch - self.open
        prompts = random_prompts(self.llm.engine.info.vocab_size, missing, PROMPT_TOKENS)
        # The first ones have different lengths, so that later ones never end together.
        shares = [
            (index + 1) / missing if missing == self.batch else 1.0 for index in range(missing)
        ]
        return [
            Submit(
                gateway=1,
                request_id=str(next(self.ids)),
                attempt=1,
                prompt=token_ids(prompt),
                sampling=GREEDY,
                stop=StopCriteria(max_tokens=math.ceil(share * NEW_TOKENS), ignore_eos=True),
            )
            for prompt, share in zip(prompts, shares, strict=True)
        ]


@harness.part
def profiles(run: Run) -> None:
    """rates and pauses of an engine that is profiled."""
    options = run.options
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "model"
        model_dir.mkdir()
        write_config(model_dir, options.model)
        settings: dict[str, Any] = GPU_SETTINGS | {
            "device": options.device,
            "max_running_requests": options.batch,
        }
        with LLM(model_dir, **settings) as llm:
            load = Load(llm, options.batch)
            load.run(lambda turns: turns >= 2 * NEW_TOKENS)
            recorder = EngineProfiles(llm.engine, Path(folder))
            for repeat, (kind, given), steps in itertools.product(
                range(options.repeats), KINDS.items(), options.steps
            ):
                name = f"{kind}-{steps}-{repeat}"
                outside = one_profile(run, load, recorder, name, {**given, "steps": steps})
                ratios[kind, steps].append(outside)
    for (kind, steps), found in ratios.items():
        if statistics.median(found) < LEAST_OUTSIDE:
            run.fail(f"{kind}, {steps} steps: slower outside, {spread(found)}")


def one_profile(
    run: Run, load: Load, recorder: EngineProfiles, name: str, given: dict[str, Any]
) -> float:
    """Rate after the profile over the one before it."""
    window = run.options.window
    profiler = load.llm.engine.parts.local.profiler
    before = load.run(lambda turns: turns >= window)
    num_ends = len(recorder.ends)
    recorder.begin(name, limit_s=MAX_LIMIT_S, **given)
    beginning = load.run(lambda turns: turns > 0 and profiler.is_recording)
    during = load.run(lambda turns: len(recorder.ends) > num_ends)
    end = recorder.ends[-1]
    path = recorder.folder / name / "rank-0.json"
    error = path.with_suffix(".error")
    deadline_s = time.monotonic() + WRITING_LIMIT_S
    writing = load.run(
        lambda turns: path.exists() or error.exists() or time.monotonic() > deadline_s
    )
    after = load.run(lambda turns: turns >= window)
    outside = after.rate / before.rate
    if not path.exists():
        run.fail(f"{name}: {error.read_text() if error.exists() else 'nothing was written'}")
        return outside
    trace = json.loads(path.read_text())
    kinds = Counter(event.get("cat", "") for event in trace["traceEvents"])
    out = (run.options.keep or recorder.folder) / f"{name}.json.gz"
    out.parent.mkdir(parents=True, exist_ok=True)
    merge_s = math.nan
    try:
        merge_s = timed(lambda: merge_part(path, out, end))
    except ImportError as error:
        # Where there is only what engines need, the rank's own part is looked at.
        run.note(f"not merged: {error}")
        out.write_bytes(gzip.compress(path.read_bytes()))
    kernels_of_a_step = kinds["kernel"] / end.steps
    if run.options.device == "cuda" and not kernels_of_a_step:
        run.fail(f"{name}: no kernel was recorded")
    if given.get("host", True) and len(step_names(trace)) != end.steps:
        run.fail(f"{name}: {len(step_names(trace))} steps of {end.steps} are named")
    if end.pause_s > MAX_PAUSE_S:
        run.fail(f"{name}: a pause of {end.pause_s:.2f} s")
    run.row(
        record=name.partition("-")[0],
        steps=end.steps,
        before=before.rate,
        during=during.rate if during.seconds else math.nan,
        after=after.rate,
        outside=outside,
        begin_ms=beginning.longest_s * 1e3,
        begin_s=beginning.seconds,
        pause_ms=end.pause_s * 1e3,
        writing_ms=writing.longest_s * 1e3,
        longest_before_ms=before.longest_s * 1e3,
        events=sum(kinds.values()),
        kernels_of_a_step=kernels_of_a_step,
        raw_mb=path.stat().st_size / 1e6,
        merged_mb=out.stat().st_size / 1e6,
        merge_s=merge_s,
    )
    return outside


def merge_part(path: Path, out: Path, end: ProfileEnd) -> None:
    from weft.common.telemetry.merge_profile import MergeOrder, Part, merge

    parts = [Part(path=str(path), label="engine rank 0")]
    merge(MergeOrder(out=str(out), parts=parts, began_s=end.began_s, ended_s=end.ended_s))


if __name__ == "__main__":
    sys.exit(harness.main())
