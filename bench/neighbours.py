"""Tokens a second of an engine with one and with several threads, alone and on a crowded machine.

Engines of the demo model, each in a process of its own as a worker has it, take turns. On the
crowded machine as many foreign processes compute without end as it has cores, each kept on a core
of its own. With so many of them, a team of threads must not fall behind one thread.

    python bench/neighbours.py
    python bench/neighbours.py --streams 1 --neighbours 0,2 --repeats 9
    python bench/neighbours.py --baseline ../other --pairs 6
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO

import psutil  # type: ignore[import-untyped]
from harness import Harness, Run, in_turns, numbers, ratio_of, spread, tree_environment
from machine import ROOT
from weft.checkpoint.resolve import resolve_model
from weft.common.worker.engine_client import SPIN_COUNT
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM

PROMPT_TOKENS = 16
STEPS = {1: 48, 16: 24}
"""New tokens of each stream, by number of streams."""
SETTLE_S = 0.3
MIN_RATIO = 0.8
"""Least that a team may make of one thread's rate, however many neighbours there are."""


class Engine:
    """An engine in a process of its own."""

    def __init__(self, threads: int, dtype: str) -> None:
        environment = os.environ | tree_environment(ROOT)
        environment |= {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": SPIN_COUNT}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", "--dtype", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.rate(1)

    def rate(self, streams: int) -> float:
        """Tokens a second of so many greedy streams; short prompts are included."""
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        print(streams, file=orders, flush=True)
        return float(json.loads(answers.readline()))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def serve(dtype: str, answers: IO[str]) -> None:
    """Answers each number of streams on stdin by their tokens a second."""
    greedy = SamplingParams(temperature=0.0)
    model_dir = resolve_model("demo")
    with LLM(model_dir, dtype=dtype, prefix_cache=False, kv_memory_bytes=128 << 20) as llm:
        for line in sys.stdin:
            streams = int(line)
            new = STEPS.get(streams, 24)
            prompts = [[100 + 50 * i + j for j in range(PROMPT_TOKENS)] for i in range(streams)]
            began = time.perf_counter()
            llm.generate(prompts, greedy, StopCriteria(max_tokens=new, ignore_eos=True))
            print(streams * new / (time.perf_counter() - began), file=answers, flush=True)


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that compute without end, spread over this process's cores."""
    cores = psutil.Process().cpu_affinity()
    others = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        for index, other in enumerate(others):
            psutil.Process(other.pid).cpu_affinity([cores[index % len(cores)]])
        time.sleep(SETTLE_S)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


harness = Harness(__file__, __doc__, repeats=5)
harness.flag("--engine", action="store_true", help="be one of the engines")
harness.flag("--dtype", default="bfloat16")
harness.flag("--threads", type=int, default=os.cpu_count(), help="of the team")
harness.flag("--streams", type=numbers, default=[1, 16])
harness.flag("--neighbours", type=numbers, default=[0, os.cpu_count()])


@harness.part
def crowd(run: Run) -> None:
    """A team beside one thread."""
    options = run.options
    engines = {threads: Engine(threads, options.dtype) for threads in (1, options.threads)}
    for engine in engines.values():
        run.stack.callback(engine.close)
    for streams in options.streams:
        for count in options.neighbours:
            with neighbours(count):
                ways: dict[str, Callable[[], float]] = {
                    str(threads): partial(engine.rate, streams)
                    for threads, engine in engines.items()
                }
                rates = in_turns(ways, options.repeats)
            one, team = rates["1"], rates[str(options.threads)]
            setting, ratio = f"{streams} streams, {count} neighbours", ratio_of(team, one)
            run.row(setting=setting, one_thread=spread(one), team=spread(team), team_over_one=ratio)
            if ratio.high < MIN_RATIO:
                run.fail(f"{setting}: a team makes {ratio} of one thread's rate, not {MIN_RATIO}")


if __name__ == "__main__":
    if "--engine" in sys.argv:
        answers, sys.stdout = sys.stdout, sys.stderr
        serve(harness.parse().dtype, answers)
        sys.exit(0)
    sys.exit(harness.main())
