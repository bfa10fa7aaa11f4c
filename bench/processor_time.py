"""The processor time that each process of a mesh takes for a token, and while nothing is asked.

On a machine whose cores the services share with the engines, what is not the decode engine's own
time is taken from it. Processor time depends less than wall time on what else the machine does.

    python bench/processor_time.py                     16 streams of the demo model, under a minute
    python bench/processor_time.py --streams 1 --repeats 4
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from harness import Harness, Run
from serving.load import LoadSystem, new_runner
from serving.mesh import MeshProcess
from serving.plan import UP_FLAGS
from serving.rest_client import RestClient
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
            for _ in range(arguments.repeats):
                load.run(prompts.short(arguments.streams), arguments.tokens)
            at_last = taken_s(mesh.pid)
            time.sleep(arguments.rest)
            at_rest = taken_s(mesh.pid)
            client_s = load.cpu_s - client_s
    finally:
        mesh.stop()
    num_tokens = arguments.repeats * arguments.streams * arguments.tokens
    busy, idle = at_last - at_first, at_rest - at_last
    found = {
        name: (1e3 * busy[name] / num_tokens, 1e3 * idle[name] / arguments.rest) for name in at_last
    }
    return found | {"client": (1e3 * client_s / num_tokens, 0.0)}


harness = Harness(__file__, __doc__, repeats=4)
harness.flag("--model", default="demo", help="demo or a Hugging Face directory")
harness.flag("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
harness.flag("--streams", type=int, default=16)
harness.flag("--tokens", type=int, default=96, help="new tokens a request")
harness.flag("--warm-ups", type=int, default=2, help="turns that are not counted")
harness.flag("--rest", type=float, default=5.0, help="seconds without requests")
harness.flag("--up-flags", default=UP_FLAGS, help="flags of `weft up`")
harness.flag("--seed", type=int, default=1)


@harness.part
def processor_time(run: Run) -> None:
    """All processes of a mesh."""
    options = run.options
    found = measure(options, resolve_model(options.model), resolve_dtype(options.dtype))
    for name, (busy, idle) in sorted(found.items(), key=lambda item: -item[1][0]):
        run.row(process=name, ms_a_token=busy, ms_a_s_at_rest=idle)


if __name__ == "__main__":
    sys.exit(harness.main())
