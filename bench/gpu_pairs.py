"""Two source trees on one GPU, measured in turns: meshes over REST, or engines alone.

    python bench/gpu_pairs.py rest --old TREE [--model qwen3-0.6b] [--bursts 1 16 64 256]
    python bench/gpu_pairs.py engine --old TREE [--batches 1 64 256] [--pairs 8]

`TREE` is another commit's working tree, as `git worktree add` or `git archive` makes it, with its
contracts generated, and for `rest` with its own `services/rest/bin/weft-rest`. Both systems stay
up and share the card; only one has work at a time. Each pair measures both, and every other pair
measures the new one first. Weights are random, in the model's real shape, without prefix caches.

`rest` sends bursts of requests to a mesh of one decode worker, with the clients of this tree.
`engine` runs batches in a process of each tree (`pair_worker.py`), by that tree's own
`bench/gpu_engine.py`. The table shows medians, and the ratio new / old of the pairs with its 10th
and 90th percentile. The first line says how many greedy answers are the same: those to three
prompts one by one with `rest`, those to a batch of each size with `engine`.

On a CPU: `--device cpu --model smollm2-135m --num-pages 2000`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from gpu_apart import CHECKED, answers_of, make_model, prompts_of, run_load
from gpu_setup import describe_gpu
from model_shapes import MODELS
from serving.mesh import MeshProcess

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "engine", "kernels", "services/common", "services/gateway", "services/prefill",
    "services/decode", "services/kvstore", "cli", "protos/gen", "bench",
)  # fmt: skip
TOKENS_OF_BURST = {1: 2000, 16: 1000, 64: 512}
"""New tokens of each request by the number of requests in a burst; 256 for other numbers."""
Measured = dict[str, float]


@dataclass(slots=True)
class System:
    """A running mesh or engine of one source tree."""

    measure: Callable[[int], Measured]
    """Sends a burst or batch of so many requests; returns its figures by name."""
    answers: list[list[int]]
    """Tokens of greedy answers, in the same order for both systems."""


@dataclass(slots=True)
class PairRow:
    """One figure, such as tokens a second, over all pairs with one number of requests."""

    load: int
    """Requests at once."""
    what: str
    pairs: int
    old: float
    new: float
    ratio: float
    """Median of new / old over the pairs; `low` and `high` are its 10th and 90th percentile."""
    low: float
    high: float


def environment(tree: Path) -> dict[str, str]:
    """Environment of a process that imports a tree's packages before all others."""
    own = [str(tree / package) for package in PACKAGES]
    kept = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in kept if path and not Path(path).is_relative_to(ROOT)]
    return {"PYTHONPATH": os.pathsep.join([*own, *others])}


@contextmanager
def mesh_of(tree: Path, model: Path, options: argparse.Namespace) -> Iterator[System]:
    """A mesh of a tree, which measures bursts."""
    worker = f"--dummy-weights --no-prefix-cache --num-pages {options.num_pages}"
    worker += f" --max-running-requests {max(256, *options.bursts)} {options.worker_args}"
    flags = f"--prefill 0 --decode 1 --device {options.device} --decode-args {shlex.quote(worker)}"
    mesh = MeshProcess(str(model), options.dtype, flags, environment(tree))
    try:
        mesh.wait_until_ready()
        answers = answers_of(mesh, prompts_of(CHECKED, options.vocab, 3))

        def measure(count: int) -> Measured:
            tokens = options.tokens or TOKENS_OF_BURST.get(count, 256)
            load = ["--burst", str(count), "--prompt", "512", "--tokens", str(tokens)]
            more = ["--processes", str(min(count, options.processes))]
            more += ["--url", mesh.url, "--vocab", str(options.vocab)]
            (row,) = run_load([*load, *more], prints=False)
            if row.failed:
                raise SystemExit(f"{tree}: {row.failed} of {count} requests failed: {row.errors}")
            return {
                "tokens/s": row.tokens_per_s,
                "first token p50, ms": row.ttft_p50,
                "first token p99, ms": row.ttft_p99,
                "between tokens p50, ms": row.itl_p50,
            }

        yield System(measure, answers)
    finally:
        mesh.stop()


@contextmanager
def engine_of(tree: Path, model: Path, options: argparse.Namespace) -> Iterator[System]:
    """An engine of a tree, which measures batches."""
    worker = subprocess.Popen(
        [sys.executable, "-P", Path(__file__).with_name("pair_worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment(tree),
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    send, receive = worker.stdin, worker.stdout

    def ask(order: dict[str, Any]) -> Any:
        send.write(json.dumps(order) + "\n")
        send.flush()
        answer = receive.readline()
        if not answer:
            raise SystemExit(f"the worker of {tree} ended with status {worker.wait()}")
        return json.loads(answer)

    try:
        settings = {
            "device": options.device,
            "dtype": options.dtype,
            "dummy_weights": True,
            "num_pages": options.num_pages,
            "max_context_tokens": 5120,
            "max_running_requests": max(256, *options.batches),
            "max_step_tokens": 8192,
            "prefill_chunk_tokens": 4096,
            "prefix_cache": False,
            "inter_token_target_s": 1.0,
        }
        ask({"model": str(model), "settings": settings})

        def measure(count: int) -> Measured:
            return dict(ask({"batch": count}))

        yield System(
            measure, [tokens for count in options.batches for tokens in ask({"answers_to": count})]
        )
    finally:
        send.close()
        worker.wait()


def measure_in_turns(
    old: System, new: System, loads: list[int], pairs: int
) -> Iterator[list[PairRow]]:
    """Measures all pairs of each load; its rows."""
    for load in loads:
        for system in (old, new):
            system.measure(load)  # The first of each load warms up and does not count.
        found: list[tuple[Measured, Measured]] = []
        for pair in range(pairs):
            if pair % 2:
                after, before = new.measure(load), old.measure(load)
            else:
                before, after = old.measure(load), new.measure(load)
            found.append((before, after))
        yield [row_of(load, what, found) for what in found[0][0]]


def row_of(load: int, what: str, found: list[tuple[Measured, Measured]]) -> PairRow:
    """One figure of all pairs of a load."""
    pairs = np.array([(before[what], after[what]) for before, after in found])
    old, new = np.median(pairs, axis=0)
    low, ratio, high = np.quantile(pairs[:, 1] / pairs[:, 0], (0.1, 0.5, 0.9))
    numbers = map(float, (old, new, ratio, low, high))
    return PairRow(load, what, len(found), *(round(number, 4) for number in numbers))


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("rest", "engine"))
    parser.add_argument("--old", type=Path, required=True, help="working tree of another commit")
    parser.add_argument("--old-commit", default="", help="of that tree, for the JSON")
    parser.add_argument("--model", choices=[*MODELS, "tiny"], default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="of the model; default its own number")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of its files; default the demo model's"
    )
    parser.add_argument("--bursts", type=int, nargs="+", default=[1, 16, 64, 256], help="of rest")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256], help="of engine")
    parser.add_argument("--tokens", type=int, help="new ones of each request of rest")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--processes", type=int, default=8, help="of clients")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-pages", type=int, default=13_500, help="of each system's KV")
    parser.add_argument("--worker-args", default="", help="further flags of the decode workers")
    parser.add_argument("--commit", default="", help="of this tree, for the JSON")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args()


def main() -> int:
    """Entry point."""
    options = parse()
    start = mesh_of if options.kind == "rest" else engine_of
    rows: list[PairRow] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_model(Path(folder), options)
        old, new = (
            stack.enter_context(start(tree, model, options))
            for tree in (options.old.resolve(), ROOT)
        )
        pairs = list(zip(old.answers, new.answers, strict=True))
        num_equal = sum(before == after for before, after in pairs)
        print(f"{num_equal} of {len(pairs)} greedy answers are the same", flush=True)
        loads = options.bursts if options.kind == "rest" else options.batches
        for found in measure_in_turns(old, new, loads, options.pairs):
            rows += found
            show(found)
            keep(rows, num_equal, len(pairs), options)
    return 0


def show(rows: list[PairRow]) -> None:
    """Prints the rows of a load."""
    for row in rows:
        print(
            f"{row.load:4}  {row.what:24} {row.old:10.3f} {row.new:10.3f}  "
            f"{row.ratio:.3f} [{row.low:.3f} to {row.high:.3f}]",
            flush=True,
        )


def keep(
    rows: list[PairRow], num_equal: int, num_answers: int, options: argparse.Namespace
) -> None:
    """Writes what was measured so far, if a file was named."""
    if options.out is None:
        return
    content = {
        **describe_gpu(options.commit),
        "old_commit": options.old_commit,
        "command": shlex.join(sys.argv),
        "answers": {"equal": num_equal, "compared": num_answers},
        "rows": [asdict(row) for row in rows],
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
