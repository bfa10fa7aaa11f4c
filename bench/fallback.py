"""What transformers' code costs beside Weft's own: the same architecture by both, in turns.

A model of Qwen3-0.6B's shape with made up weights is served by Weft's own reader, and as an
architecture that only transformers has. Tokens a second of requests of 512 tokens that decode
together, and of their prompts.

    python bench/fallback.py
    python bench/fallback.py --device cuda --batches 1 16 64 256
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_runs import run_batch
from gpu_engine import GPU_SETTINGS
from harness import Harness, Run, ratio_of, spread
from model_shapes import write_config
from torch.profiler import ProfilerActivity, profile
from weft.engine.loop.llm import LLM
from weft.testing.models.forced_models import forced_copy

CPU_SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "dummy_weights": True,
    "prefix_cache": False,
    "num_pages": 600,
}
PROMPT = 512

harness = Harness(__file__, __doc__, repeats=3)
harness.flag("--device", choices=["cpu", "cuda"], default="cpu")
harness.flag("--model", default="qwen3-0.6b")
harness.flag("--transformers-class", default="Qwen3ForCausalLM")
harness.flag("--batches", nargs="+", type=int, default=[1, 4])
harness.flag("--new", type=int, default=48)
harness.flag("--prompt", type=int, default=PROMPT)


@contextmanager
def both_engines(options: argparse.Namespace) -> Iterator[dict[str, LLM]]:
    settings = GPU_SETTINGS if options.device == "cuda" else CPU_SETTINGS
    if options.device == "cuda":
        # Two engines share the card.
        settings = settings | {"num_pages": 4096}
    with tempfile.TemporaryDirectory() as path:
        own = Path(path, "own")
        own.mkdir()
        write_config(own, options.model)
        forced = forced_copy(own, Path(path, "forced"), options.transformers_class)
        with (
            LLM(own, **settings) as first,
            LLM(forced, trust_remote_code=True, **settings) as second,
        ):
            yield {"own": first, "by_transformers": second}


@harness.part
def speeds(run: Run) -> None:
    """Both engines stay in memory, and measure in turns."""
    options = run.options
    with both_engines(options) as engines:
        for batch in options.batches:
            decode: dict[str, list[float]] = {name: [] for name in engines}
            prefill: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(options.repeats + 1):
                for name, llm in engines.items():
                    done = run_batch(llm, batch, options.prompt, options.new)
                    if turn:  # The first one warms up.
                        decode[name].append(batch * done.num_steps / done.seconds)
                        prefill[name].append(batch * options.prompt / done.first_token_s)
            figures = {f"{name}_decode": spread(rates) for name, rates in decode.items()}
            figures |= {f"{name}_prefill": spread(rates) for name, rates in prefill.items()}
            run.row(
                {"batch": batch} | figures,
                decode_ratio=ratio_of(decode["by_transformers"], decode["own"]),
                prefill_ratio=ratio_of(prefill["by_transformers"], prefill["own"]),
            )


SHOWN = 14


@harness.part_if_named
def launches(run: Run) -> None:
    """Kernels of requests on a GPU, those that take longest first, divided by the decode steps."""
    options = run.options
    with both_engines(options) as engines:
        for name, llm in engines.items():
            run_batch(llm, options.batches[0], options.prompt, options.new)
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                done = run_batch(llm, options.batches[0], options.prompt, options.new)
                torch.cuda.synchronize()
            kernels = sorted(trace.key_averages(), key=lambda one: -one.device_time_total)
            whole = {"kernel": "all", "launches": sum(one.count for one in kernels)}
            whole["us"] = sum(one.device_time_total for one in kernels)
            shown = [
                {"kernel": one.key[:50], "launches": one.count, "us": one.device_time_total}
                for one in kernels[:SHOWN]
            ]
            for row in (whole, *shown):
                counts = {
                    of: round(float(row[of]) / done.num_steps, 2) for of in ("launches", "us")
                }
                run.row({"engine": name, "kernel": row["kernel"], **counts})


if __name__ == "__main__":
    sys.exit(harness.main())
