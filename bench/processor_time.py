"""The processor time that each process of a mesh takes for a token, and while nothing is asked.

On a machine whose cores the services share with the engines, what is not the decode engine's own
time is taken from it. Processor time depends less than wall time on what else the machine does.

    python bench/processor_time.py                     16 streams of the demo model, under a minute
    python bench/processor_time.py --streams 1 --turns 4
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.table import Table
from serving.load import LoadSystem, new_runner
from serving.mesh import MeshProcess
from serving.plan import UP_FLAGS
from serving.rest_client import RestClient
from serving.setup import describe_lines, describe_setup
from serving.workload import Prompts
from tokenizers import Tokenizer
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.resolve import resolve_model

NAMES = {
    "decode-engine": "decode engine",
    "prefill-engine": "prefill engine",
    "gateway": "gateway",
    "decode": "decode server",
    "prefill": "prefill server",
    "kvstore": "KV store",
    "up": "weft up",
}
"""Words of command lines, and the processes that have them."""


def name_of(process: psutil.Process) -> str:
    """Names a process of a mesh by its command line."""
    words = process.cmdline()
    return next((name for word, name in NAMES.items() if word in words), Path(words[0]).name)


def taken_s(pid: int) -> Counter[str]:
    """Processor seconds of a process and its descendants so far, by name."""
    root = psutil.Process(pid)
    found: Counter[str] = Counter()
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        found[name_of(process)] += times.user + times.system
    return found


def measure(
    arguments: argparse.Namespace, model_dir: Path, dtype: str
) -> dict[str, tuple[float, float]]:
    """Milliseconds for a token and per second at rest, by process, that of the client included."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = Prompts(tokenizer, arguments.seed)
    mesh = MeshProcess(str(model_dir), dtype, arguments.up_flags)
    try:
        mesh.wait_until_ready()
        with new_runner() as runner:
            load = LoadSystem("REST", RestClient(mesh.url), runner)
            for _ in range(arguments.warm_ups):
                load.run(prompts.short(arguments.streams), arguments.tokens)
            at_first, client_s = taken_s(mesh.pid), load.cpu_s
            for _ in range(arguments.turns):
                load.run(prompts.short(arguments.streams), arguments.tokens)
            at_last = taken_s(mesh.pid)
            time.sleep(arguments.rest)
            at_rest = taken_s(mesh.pid)
            client_s = load.cpu_s - client_s
    finally:
        mesh.stop()
    num_tokens = arguments.turns * arguments.streams * arguments.tokens
    busy, idle = at_last - at_first, at_rest - at_last
    found = {
        name: (1e3 * busy[name] / num_tokens, 1e3 * idle[name] / arguments.rest) for name in at_last
    }
    return found | {"client": (1e3 * client_s / num_tokens, 0.0)}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="demo or a Hugging Face directory")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a request")
    parser.add_argument("--warm-ups", type=int, default=2, help="turns that are not counted")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds without requests")
    parser.add_argument("--up-flags", default=UP_FLAGS, help="flags of `weft up`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write")
    arguments = parser.parse_args()
    model_dir, dtype = resolve_model(arguments.model), resolve_dtype(arguments.dtype)
    setup = describe_setup(dtype, torch.get_num_threads())
    found = measure(arguments, model_dir, dtype)
    table = Table(title=f"Processor time at {arguments.streams} streams")
    for column in ("process", "ms a token", "ms a second at rest"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, (busy, idle) in sorted(found.items(), key=lambda item: -item[1][0]):
        table.add_row(name, f"{busy:.3f}", f"{idle:.1f}")
    console = Console(width=120)
    console.print(table)
    for line in describe_lines(setup):
        console.print(line, soft_wrap=True, highlight=False)
    if arguments.json:
        rows = [{"process": name, "ms_a_token": b, "ms_a_s": i} for name, (b, i) in found.items()]
        work = {name: value for name, value in vars(arguments).items() if name != "json"}
        document = {"setup": setup, "work": work, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
