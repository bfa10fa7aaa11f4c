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
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from serving import sections
from serving.checking import Checker
from serving.goals import set_goals
from serving.load import LoadSystem, new_runner
from serving.plan import Systems, build_sections, open_systems
from serving.report import describe_goals, print_lines, print_tables, write_json
from serving.series import Ledger
from serving.setup import ROOT, MachineUse, describe_lines, describe_setup, has_goals
from serving.workload import Prompts
from tokenizers import Tokenizer
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.resolve import resolve_model
from weft.common.worker.engine_client import SPIN_COUNT

ROWS = ("throughput", "prompts", "mixed", "first-token", "shipping")
SYSTEMS = ("rest", "grpc", "engine", "transformers")
MAX_OTHERS = 0.2
"""Cores that other programs may keep busy."""
QUICK = {"turns": 1, "tokens": 24, "streams": [1, 16], "prompt_tokens": [512], "single": 1}


def measure(ledger: Ledger, parts: Sequence[sections.Section], num_turns: int) -> float:
    """Runs all turns of all sections; returns the cores that other programs kept busy meanwhile."""
    with Progress(transient=True) as progress:
        timing = progress.add_task("timing", total=(num_turns + 1) * len(parts))
        before = MachineUse.now()
        for turn in range(num_turns + 1):
            for part in parts:
                progress.update(timing, description=part.name if turn else f"{part.name}: warm-up")
                part.take(turn)
                progress.advance(timing)
        others = MachineUse.now().others_since(before)
    for part in parts:
        part.finish()
    return others


def judge(ledger: Ledger, model_dir: Path, dtype: str, tokenizer: Tokenizer) -> None:
    """Checks every timed token."""
    if not ledger.num_unjudged:
        return
    with Progress(transient=True) as progress:
        checking = progress.add_task("checking the tokens", total=ledger.num_unjudged)
        checker = Checker(model_dir, dtype, tokenizer)
        ledger.judge(checker, lambda: progress.advance(checking))


def describe_run(arguments: argparse.Namespace, systems: Systems, others: float) -> list[str]:
    """Describes the rows, for the lines below the table."""
    lines = [
        f"Greedy, {arguments.tokens} new tokens a request, {arguments.turns} turns in rotation; "
        f"1 stream: {arguments.single} requests one after the other a turn. first, between: "
        "p50/p99 of the time to the first token and between tokens. tokens: exact + near ties, "
        "judged by a float32 run of transformers over every timed token.",
    ]
    loads = [system for system in (systems.rest, systems.grpc) if system and system.wall_s]
    if loads:
        shares = ", ".join(f"{s.name} {share_of(s):.0%}" for s in loads)
        lines.append(
            f"Load generator, of one core: {shares}. Mesh: weft up {systems.mesh_flags}; its "
            f"engines set GOMP_SPINCOUNT={SPIN_COUNT} where it is not set."
        )
    if arguments.llama_bench:
        lines.append(
            f"llama.cpp ({arguments.llama_bench.name}): its own tokens/s of generation, prompts of "
            "64 tokens not counted, nothing sampled; goal: the mesh over REST, or the bare engine "
            "on prompts, over it."
        )
    lines += systems.notes
    warning = "; that is too much to trust the figures" if others > MAX_OTHERS else ""
    lines.append(f"Other programs kept {others:.2f} cores busy while timing{warning}.")
    return lines


def share_of(system: LoadSystem) -> float:
    """Share of one core that the client used while it waited for answers."""
    return system.cpu_s / system.wall_s


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default=",".join(ROWS), help="which parts, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, separated by commas")
    parser.add_argument("--quick", action="store_true", help="a small run; other flags still hold")
    parser.add_argument("--model", default="demo", help="demo or a Hugging Face directory")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--streams", help="requests at once; default 1,4,16,32")
    parser.add_argument("--tokens", type=int, help="new tokens a request; default 96")
    parser.add_argument("--turns", type=int, help="timed turns; default 3")
    parser.add_argument("--single", type=int, help="requests a turn at one stream; default 2")
    parser.add_argument("--prompt-tokens", help="prompt lengths; default 512,1000,1500")
    parser.add_argument("--long-tokens", type=int, default=1000, help="arriving, first-token rows")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--up-flags", help="flags of `weft up`; default: as printed")
    parser.add_argument("--url", help="REST of a running mesh, instead of starting one")
    parser.add_argument("--address", help="its gateway's gRPC address, HOST:PORT")
    parser.add_argument("--llama-bench", type=Path, help="llama-batched-bench or llama-bench")
    parser.add_argument("--gguf", type=Path, help="its model; default: the demo model's file")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other prompts")
    parser.add_argument("--json", type=Path, help="where to write; default: bench/results")
    arguments = parser.parse_args(argv)
    _resolve(parser, arguments)
    return arguments


def _resolve(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Lists as lists, defaults by `--quick`, and what cannot be is refused."""
    for name, known in (("rows", ROWS), ("systems", SYSTEMS)):
        chosen = [text for text in getattr(arguments, name).split(",") if text]
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: none of {', '.join(known)}")
        setattr(arguments, name, chosen)
    for name in ("streams", "prompt_tokens"):
        text = getattr(arguments, name)
        if text is not None:
            try:
                setattr(arguments, name, [int(part) for part in text.split(",") if part])
            except ValueError:
                parser.error(f"--{name.replace('_', '-')}: {text!r}: numbers and commas")
    defaults: dict[str, Any] = {
        "turns": 3,
        "tokens": 96,
        "streams": [1, 4, 16, 32],
        "prompt_tokens": [512, 1000, 1500],
        "single": 2,
    }
    for name, value in (defaults | (QUICK if arguments.quick else {})).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    numbers = [*arguments.streams, *arguments.prompt_tokens, arguments.tokens, arguments.turns]
    if min([*numbers, arguments.single, arguments.long_tokens]) < 1:
        parser.error("all numbers are at least 1")
    for name in ("llama_bench", "gguf"):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name.replace('_', '-')}: {path} is not a file")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if anything failed or any timed token is wrong."""
    arguments = parse(argv)
    model_dir, dtype = resolve_model(arguments.model), resolve_dtype(arguments.dtype)
    setup = describe_setup(dtype, arguments.threads)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ledger = Ledger()
    with ExitStack() as stack:
        executor: asyncio.Runner = stack.enter_context(new_runner())
        systems = open_systems(stack, arguments, model_dir, dtype, executor)
        prompts = Prompts(tokenizer, arguments.seed)
        others = measure(
            ledger, build_sections(ledger, systems, prompts, arguments), arguments.turns
        )
    judge(ledger, model_dir, dtype, tokenizer)
    if has_goals(setup):
        set_goals(ledger)
    lines = describe_run(arguments, systems, others)
    print_tables(ledger)
    print_lines([*lines, *describe_lines(setup), describe_goals(ledger, has_goals(setup))])
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = arguments.json or ROOT / "bench" / "results" / f"serving-{stamp}.json"
    work = {name: value for name, value in vars(arguments).items() if name != "json"}
    work["up_flags"] = systems.mesh_flags
    document = {
        "setup": setup | {"others_cores": others},
        "work": {name: v.name if isinstance(v, Path) else v for name, v in work.items()},
        "notes": lines,
    }
    write_json(path, document, ledger)
    is_good = not systems.failures and all(
        row.failure is None and row.verdict.is_right for row in ledger.rows
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    # An end from outside must end the mesh too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
