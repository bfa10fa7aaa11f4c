"""Two source trees on one GPU, measured in turns: meshes over REST, or engines alone.

    python bench/gpu_pairs.py rest --old TREE [--model qwen3-0.6b] [--bursts 1 16 64 256]
    python bench/gpu_pairs.py engine --old TREE [--batches 1 64 256] [--pairs 8]
        [--config JSON] [--settings JSON] [--adapters 8] [--drafts 3]

`TREE` is another commit's working tree, as `git worktree add` or `git archive` makes it, with its
contracts generated, and for `rest` with its own `services/rest/bin/weft-rest`. Both systems stay
up and share the card; only one has work at a time. Each pair measures both, and every other pair
measures the new one first. Weights are random, in the model's real shape, without prefix caches.

`rest` sends bursts of requests to a mesh of one decode worker, with the clients of this tree.
`engine` runs batches in a process of each tree (`pair_worker.py`), by that tree's own
`bench/gpu_engine.py`. The table shows medians, and the ratio new / old of the pairs with its 10th
and 90th percentile. Notes say how many greedy answers are the same, of both systems and of each of
them when asked twice: those to three prompts one by one with `rest`, those to a batch of each size
with `engine`. Steps are made up by measured times, so a batch's answers in 16 bits may differ from
one time to the next where two logits nearly tie.

With `--adapters` the requests of `engine` take random adapters in turn; with `--drafts` a random
EAGLE-3 head drafts so many tokens in each step, which are not accepted.

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from draft_cost import write_head
from gpu_apart import CHECKED, answers_of, make_model, prompts_of, run_load
from harness import Harness, Run, in_turns, pair_row, tree_environment
from machine import ROOT, commit_of
from model_shapes import MODELS
from random_adapters import write_adapter
from serving.mesh import MeshProcess

TOKENS_OF_BURST = {1: 2000, 16: 1000, 64: 512}
"""New tokens of each request by the number of requests in a burst; 256 for other numbers."""
Measured = dict[str, float]


harness = Harness(__file__, __doc__)
harness.flag("kind", choices=("rest", "engine"))
harness.flag("--old", type=Path, required=True, help="working tree of another commit")
harness.flag("--old-commit", default="", help="of that tree, for the JSON")
harness.flag("--model", choices=[*MODELS, "tiny"], default="qwen3-0.6b")
harness.flag("--layers", type=int, help="of the model; default its own number")
harness.flag("--vocab", type=int, default=49_152)
harness.flag("--tokenizer", type=Path, help="folder of its files; default the demo model's")
harness.flag("--bursts", type=int, nargs="+", default=[1, 16, 64, 256], help="of rest")
harness.flag("--batches", type=int, nargs="+", default=[1, 64, 256], help="of engine")
harness.flag("--tokens", type=int, help="new ones of each request of rest")
harness.flag("--processes", type=int, default=8, help="of clients")
harness.flag("--device", default="cuda:0")
harness.flag("--dtype", default="bfloat16")
harness.flag("--num-pages", type=int, default=13_500, help="of each system's KV")
harness.flag("--worker-args", default="", help="further flags of the decode workers")
harness.flag("--config", type=json.loads, default={}, help="changed fields of the model's, JSON")
harness.flag("--settings", type=json.loads, default={}, help="further ones of engines, JSON")
harness.flag("--adapters", type=int, default=0, help="random ones of rank 16, of engines")
harness.flag("--drafts", type=int, default=0, help="of a random EAGLE-3 head, of engines")


@dataclass(slots=True)
class System:
    """A running mesh or engine of one source tree."""

    measure: Callable[[int], Measured]
    """Sends a burst or batch of so many requests; returns its figures by name."""
    answers: list[list[int]]
    """Tokens of greedy answers, in the same order for both systems."""
    repeated: list[list[int]]
    """Tokens of a second answer to each of the same prompts."""


@contextmanager
def mesh_of(tree: Path, model: Path, options: argparse.Namespace) -> Iterator[System]:
    """A mesh of a tree, which measures bursts."""
    worker = f"--dummy-weights --no-prefix-cache --num-pages {options.num_pages}"
    worker += f" --max-running-requests {max(256, *options.bursts)} {options.worker_args}"
    flags = f"--prefill 0 --decode 1 --device {options.device} --decode-args {shlex.quote(worker)}"
    mesh = MeshProcess(str(model), options.dtype, flags, tree_environment(tree))
    try:
        mesh.wait_until_ready()
        prompts = prompts_of(CHECKED, options.vocab, 3)
        answers, repeated = (answers_of(mesh, prompts) for _ in range(2))

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

        yield System(measure, answers, repeated)
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
        env=os.environ | tree_environment(tree),
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
        adapters = sorted(map(str, model.glob("adapter-*")))
        if adapters:
            settings |= {"enable_lora": True, "max_loras": len(adapters), "drafter": "none"}
        if options.drafts:
            settings |= {"drafter": "eagle3", "draft_dir": str(model / "draft")}
            settings |= {"max_draft_tokens": options.drafts}
        order = {"model": str(model), "settings": settings | options.settings}
        ask(order | {"adapters": adapters, "drafts": options.drafts})

        def measure(count: int) -> Measured:
            return dict(ask({"batch": count}))

        def answers() -> list[list[int]]:
            return [tokens for count in options.batches for tokens in ask({"answers_to": count})]

        yield System(measure, answers(), answers())
    finally:
        send.close()
        worker.wait()


@harness.part
def pairs(run: Run) -> None:
    """All pairs of each load."""
    options = run.options
    start = mesh_of if options.kind == "rest" else engine_of
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
    model = make_model(folder, options)
    described = model / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | options.config))
    for number in range(options.adapters):
        write_adapter(model / f"adapter-{number}", model, 16, number)
    if options.drafts:
        write_head(model / "draft", model)
    old_tree = options.old.resolve()
    run.keep(old_commit=options.old_commit or commit_of(old_tree))
    old, new = (run.stack.enter_context(start(tree, model, options)) for tree in (old_tree, ROOT))
    pairs_of = {
        "both systems": (old.answers, new.answers),
        "the old one twice": (old.answers, old.repeated),
        "the new one twice": (new.answers, new.repeated),
    }
    for who, (left, right) in pairs_of.items():
        num_equal = sum(one == other for one, other in zip(left, right, strict=True))
        run.note(f"{num_equal} of {len(left)} greedy answers of {who} are the same")
    for load in options.bursts if options.kind == "rest" else options.batches:
        ways = {"old": lambda n=load: old.measure(n), "new": lambda n=load: new.measure(n)}
        found = in_turns(ways, options.pairs)
        for what in found["new"][0]:
            figures = ([each[what] for each in found[system]] for system in ways)
            run.row(pair_row(what, *figures), table=f"{load} at once")


if __name__ == "__main__":
    sys.exit(harness.main())
