"""A load that turns from long prompts to long answers, on workers whose roles follow it or do not.

    python bench/turning_load.py                                  on the CPU, to try the script
    python bench/turning_load.py --device cuda:0,cuda:1 --dtype bfloat16 --model llama-3.1-8b \\
        --prompts 6000+16@6 --answers 256+400@36 --first-token-s 1 --inter-token-s 0.02

| system | `weft up` |
| --- | --- |
| `fixed` | `--prefill 1 --decode 1`; the cost rule decides which prompts are shipped |
| `whole` | `--prefill 0 --decode 2` |
| `planned` | `--both 2`, and a planner that sets roles |

All systems get the same requests at the same times: for `--seconds` prompts, for as long answers,
and between them for `--turn` seconds a mixture that goes from one to the other. A request is good
if its first token and its mean time between tokens meet the targets; `steady` are those good ones
of which no more than a hundredth of the gaps are longer than the target. Windows count requests
by the time at which they were due. Weights are random, prompts are random tokens.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpu_apart import make_model
from harness import Harness, Run, percentile
from model_shapes import MODELS
from open_loop.clients import Outcome, Target
from open_loop.clients import run as send
from open_loop.workload import Turn, Visit, single_requests
from weft.testing.meshes.local_mesh import WEFT, LocalMesh

SYSTEMS = {
    "fixed": ("--prefill", "1", "--decode", "1"),
    "whole": ("--prefill", "0", "--decode", "2"),
    "planned": ("--both", "2"),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind."""

    prompt: int
    tokens: int
    rate: float
    """Requests a second."""

    @classmethod
    def parse(cls, text: str) -> Kind:
        """From `PROMPT+TOKENS@RATE`."""
        lengths, _, rate = text.partition("@")
        prompt, tokens = map(int, lengths.split("+"))
        return cls(prompt, tokens, float(rate))


def visits_of(run: Run) -> list[Visit]:
    """The requests of all systems."""
    options, rng = run.options, random.Random(run.options.seed)
    turn_s, end_s = options.seconds, 2 * options.seconds + options.turn
    found: list[Visit] = []
    for kind, is_first in ((options.prompts, True), (options.answers, False)):
        at_s = rng.expovariate(kind.rate)
        while at_s < end_s:
            turned = min(1.0, max(0.0, (at_s - turn_s) / options.turn))
            if rng.random() < (1 - turned if is_first else turned):
                turn = Turn(rng.getrandbits(48), kind.prompt, kind.tokens)
                found.append(Visit(at_s, (turn,)))
            at_s += rng.expovariate(kind.rate)
    return sorted(found, key=lambda visit: visit.at_s)


@contextmanager
def mesh_of(run: Run, system: str, model: Path, folder: Path) -> Iterator[LocalMesh]:
    options = run.options
    worker = f"--dummy-weights --no-prefix-cache {options.args}"
    began_s = time.perf_counter()
    mesh = LocalMesh(
        folder,
        *("--model", str(model), "--dtype", options.dtype, "--device", options.device),
        *(*SYSTEMS[system], "--decode-args", worker, "--prefill-args", worker),
    )
    try:
        mesh.wait_ready()
        mesh.wait_healthy()
        print(f"{system}: ready after {time.perf_counter() - began_s:.0f} s", flush=True)
        names = [name for role in ("prefill", "decode", "worker") for name in mesh.names(role)]
        pages = (f"{name} {mesh.load(name).total_pages:,}" for name in names)
        run.note(f"{system}: KV pages: {', '.join(pages)}")
        yield mesh
    finally:
        mesh.stop()


@contextmanager
def planner_of(run: Run, mesh: LocalMesh, folder: Path) -> Iterator[None]:
    options, log = run.options, folder / "planner.log"
    command = [
        *(*WEFT, "serve", "planner", "--act", "roles", "--interval-s", "1"),
        *("--gateway", mesh.service("gateway")["admin_address"]),
        *("--admin-token-file", str(mesh.state / "admin-token")),
        *("--first-token-s", str(options.first_token_s)),
        *("--inter-token-s", str(options.inter_token_s), *options.planner_args.split()),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
        told = (line for line in log.read_text().splitlines() if "done: " in line)
        for line in list(told)[:20]:
            print(line[:300], flush=True)


def windows_of(run: Run, system: str, outcomes: Sequence[Outcome]) -> list[float]:
    """Good requests a second, by window."""
    options = run.options
    end_s = 2 * options.seconds + options.turn
    found: list[float] = []
    for at in range(math.ceil(end_s / options.window)):
        begin_s = at * options.window
        span_s = min(options.window, end_s - begin_s)
        ours = [one for one in outcomes if begin_s <= one.due_s < begin_s + span_s]
        answered = [one for one in ours if not one.error]
        good = [
            one
            for one in answered
            if one.ttft_s <= options.first_token_s and one.mean_itl_s <= options.inter_token_s
        ]
        steady = sum(percentile(one.gaps_s, 0.99, 0.0) <= options.inter_token_s for one in good)
        found.append(len(good) / span_s)
        run.row(
            table="by window",
            system=system,
            from_s=begin_s,
            asked_per_s=len(ours) / span_s,
            good_per_s=found[-1],
            steady_per_s=steady / span_s,
            first_token_p50=percentile([one.ttft_s for one in answered], 0.5),
            first_token_p99=percentile([one.ttft_s for one in answered], 0.99),
            itl_p50=percentile([one.mean_itl_s for one in answered if one.output_tokens > 1], 0.5),
            failed=len(ours) - len(answered),
        )
    return found


def measure(run: Run, system: str, model: Path, visits: Sequence[Visit]) -> list[float]:
    options = run.options
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        with mesh_of(run, system, model, folder) as mesh:
            target = Target(mesh.url, options.vocab, options.timeout)
            warm = random.Random(-options.seed)
            for kind in (options.prompts, options.answers):
                lengths = (kind.prompt, kind.prompt), (8, 8)
                send(single_requests([0.0] * 4, *lengths, warm), target, 1)
            if system != "planned":
                outcomes = send(visits, target, options.processes)
            else:
                with planner_of(run, mesh, folder):
                    outcomes = send(visits, target, options.processes)
    errors = sorted({one.error for one in outcomes if one.error})
    if errors:
        run.note(f"{system}: {errors[:3]}")
    return windows_of(run, system, outcomes)


harness = Harness(__file__, __doc__)
harness.flag("--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS))
harness.flag("--model", choices=[*MODELS, "tiny"], default="tiny")
harness.flag("--layers", type=int, help="of the model; default its own number")
harness.flag("--device", default="cpu")
harness.flag("--dtype", default="float32")
harness.flag("--vocab", type=int, default=49_152)
harness.flag("--tokenizer", type=Path, help="folder of its files; default the demo model's")
harness.flag("--args", default="", help="of workers")
harness.flag("--planner-args", default="", help="of the planner")
harness.flag("--prompts", type=Kind.parse, default=Kind(1500, 8, 4.0), help="PROMPT+TOKENS@RATE")
harness.flag("--answers", type=Kind.parse, default=Kind(64, 100, 10.0), help="PROMPT+TOKENS@RATE")
harness.flag("--seconds", type=float, default=15.0, help="of each kind alone")
harness.flag("--turn", type=float, default=15.0, help="seconds from one kind to the other")
harness.flag("--window", type=float, default=15.0, help="seconds of each row")
harness.flag("--first-token-s", type=float, default=1.0)
harness.flag("--inter-token-s", type=float, default=0.05)
harness.flag("--processes", type=int, default=2)
harness.flag("--timeout", type=float, default=60.0, help="seconds of each request")
harness.flag("--seed", type=int, default=1)


@harness.part
def turning_load(run: Run) -> None:
    """Every system with the same requests."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        model, visits = make_model(Path(folder), run.options), visits_of(run)
        found = {system: measure(run, system, model, visits) for system in run.options.systems}
    if "planned" not in found:
        return
    for system in found.keys() - {"planned"}:
        pairs = list(zip(found["planned"], found[system], strict=True))
        whole = sum(found["planned"]) / max(sum(found[system]), 1e-9)
        least = min(planned / max(other, 1e-9) for planned, other in pairs)
        run.note(f"planned beside {system}: goodput {whole:.2f}, in the worst window {least:.2f}")


if __name__ == "__main__":
    sys.exit(harness.main())
