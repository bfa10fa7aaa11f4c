"""How fast Weft answers: the mesh and the bare engine beside transformers and others.

All systems run the same prompts on the same weights in the same dtype, taking turns, so that what
else goes on in the machine meets all of them. Every timed token is checked afterwards.

    python bench/bench.py                      everything; starts a mesh of its own
    python bench/bench.py --quick              a small run
    python bench/bench.py --rows throughput --systems rest,transformers --streams 16
    python bench/bench.py --llama-bench BUILD/bin/llama-batched-bench
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from harness import Harness, Run
from machine import has_goals
from serving import sections
from serving.checking import Checker
from serving.goals import set_goals
from serving.load import LoadSystem, new_runner
from serving.plan import Systems, build_sections, open_systems
from serving.series import Ledger
from serving.workload import Prompts
from tokenizers import Tokenizer
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.resolve import resolve_model
from weft.common.worker.engine_client import SPIN_COUNT

ROWS = ("throughput", "prompts", "mixed", "first-token", "shipping")
SYSTEMS = ("rest", "grpc", "engine", "transformers")
QUICK = {"repeats": 1, "tokens": 24, "streams": [1, 16], "prompt_tokens": [512], "single": 1}


def share_of(system: LoadSystem) -> float:
    """Share of one core that the client used while it waited for answers."""
    return system.cpu_s / system.wall_s


harness = Harness(__file__, __doc__)
harness.flag("--rows", default=",".join(ROWS), help="which parts, separated by commas")
harness.flag("--systems", default=",".join(SYSTEMS), help="which, separated by commas")
harness.flag("--quick", action="store_true", help="a small run; other flags still hold")
harness.flag("--model", default="demo", help="demo or a Hugging Face directory")
harness.flag("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
harness.flag("--streams", help="requests at once; default 1,4,16,32")
harness.flag("--tokens", type=int, help="new tokens a request; default 96")
harness.flag("--repeats", type=int, help="timed turns; default 3")
harness.flag("--single", type=int, help="requests a turn at one stream; default 2")
harness.flag("--prompt-tokens", help="prompt lengths; default 512,1000,1500")
harness.flag("--long-tokens", type=int, default=1000, help="arriving, first-token rows")
harness.flag("--threads", type=int, default=torch.get_num_threads())
harness.flag("--up-flags", help="flags of `weft up`; default: as printed")
harness.flag("--url", help="REST of a running mesh, instead of starting one")
harness.flag("--address", help="its gateway's gRPC address, HOST:PORT")
harness.flag("--llama-bench", type=Path, help="llama-batched-bench or llama-bench")
harness.flag("--gguf", type=Path, help="its model; default: the demo model's file")
harness.flag("--seed", type=int, default=1, help="other seeds, other prompts")


@harness.check
def complete(arguments: argparse.Namespace) -> None:
    """Lists as lists, defaults by `--quick`, and what cannot be is refused."""
    for name, known in (("rows", ROWS), ("systems", SYSTEMS)):
        chosen = [text for text in getattr(arguments, name).split(",") if text]
        if unknown := set(chosen) - set(known):
            harness.error(f"--{name}: {', '.join(sorted(unknown))}: none of {', '.join(known)}")
        setattr(arguments, name, chosen)
    for name in ("streams", "prompt_tokens"):
        text = getattr(arguments, name)
        if text is not None:
            try:
                setattr(arguments, name, [int(part) for part in text.split(",") if part])
            except ValueError:
                harness.error(f"--{name.replace('_', '-')}: {text!r}: numbers and commas")
    defaults: dict[str, Any] = {
        "repeats": 3,
        "tokens": 96,
        "streams": [1, 4, 16, 32],
        "prompt_tokens": [512, 1000, 1500],
        "single": 2,
    }
    for name, value in (defaults | (QUICK if arguments.quick else {})).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    numbers = [*arguments.streams, *arguments.prompt_tokens, arguments.tokens, arguments.repeats]
    if min([*numbers, arguments.single, arguments.long_tokens]) < 1:
        harness.error("all numbers are at least 1")
    for name in ("llama_bench", "gguf"):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            harness.error(f"--{name.replace('_', '-')}: {path} is not a file")


@harness.part
def serving(run: Run) -> None:
    """All sections in rotation; then every timed token is checked."""
    options = run.options
    model_dir, dtype = resolve_model(options.model), resolve_dtype(options.dtype)
    run.setup |= {"dtype": dtype, "threads": options.threads}
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ledger, prompts = Ledger(), Prompts(tokenizer, options.seed)
    executor = run.stack.enter_context(new_runner())
    systems = open_systems(run.stack, options, model_dir, dtype, executor)
    parts = build_sections(ledger, systems, prompts, options)
    for turn in range(options.repeats + 1):
        for part in parts:
            print(f"{part.name}: {f'turn {turn}' if turn else 'warm-up'}", flush=True)
            part.take(turn)
    for part in parts:
        part.finish()
    if ledger.num_unjudged:
        ledger.judge(Checker(model_dir, dtype, tokenizer))
    if has_goals(run.setup):
        set_goals(ledger)
    for row in ledger.rows:
        run.row(row.summary(), table=sections.TITLES[row.section])
        if row.failure is not None or not row.verdict.is_right:
            run.fail(f"{row.section}, {row.system} ({row.case}): {row.failure or row.verdict}")
    for failure in systems.failures:
        run.fail(failure)
    describe_run(run, systems)


def describe_run(run: Run, systems: Systems) -> None:
    """What rows mean, below the tables."""
    options = run.options
    run.note(
        f"greedy, {options.tokens} new tokens a request, {options.repeats} turns in rotation; "
        f"1 stream: {options.single} requests one after the other a turn; first, between: p50/p99; "
        "tokens: exact + near ties, judged by a float32 run of transformers over every timed token"
    )
    loads = [system for system in (systems.rest, systems.grpc) if system and system.wall_s]
    if loads:
        shares = ", ".join(f"{s.name} {share_of(s):.0%}" for s in loads)
        run.note(
            f"load generator, of one core: {shares}; mesh: weft up {systems.mesh_flags}; its "
            f"engines set GOMP_SPINCOUNT={SPIN_COUNT} where it is not set"
        )
    if options.llama_bench:
        run.note(
            f"llama.cpp ({options.llama_bench.name}): its own tokens/s of generation, prompts of "
            "64 tokens not counted, nothing sampled; goal: the mesh over REST, or the bare engine "
            "on prompts, over it"
        )
    for note in systems.notes:
        run.note(note)


if __name__ == "__main__":
    # An end from outside must end the mesh too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(harness.main())
