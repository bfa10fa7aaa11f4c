"""K and V in 8 bits on a GPU against bfloat16: attention, and Llama-3.1-8B's shape as a whole.

    python bench/gpu_scaled_kv.py [--parts attention engine long] [--out DIR]

Attention is timed in captured graphs over pages beyond the L2 cache. `engine` decodes 256 requests
with 512 tokens in, in bfloat16 and with weights and KV in FP8. `long` decodes 64 requests of 8,192
tokens with eight of the layers, whose KV in bfloat16 one card holds. A part that fails is reported,
and the others go on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_engine import run_batch
from gpu_fp8 import noted, release
from gpu_quantised import Results, time_kv
from gpu_roof import measure_rates
from gpu_setup import describe_gpu
from model_shapes import write_config
from weft.engine.loop.llm import LLM

PARTS = ("attention", "engine", "long")
FORMATS = {
    "bfloat16": ("auto", "auto"),
    "FP8": ("fp8", "fp8_e4m3"),
    "KV in FP8": ("auto", "fp8_e4m3"),
    "KV in int8": ("auto", "int8"),
}
"""Settings `quantization` and `kv_dtype`."""


class Load(NamedTuple):
    """Equal requests of a model's shape."""

    batch: int
    prompt: int
    new: int
    layers: int
    formats: tuple[str, ...]


LOADS = {
    "engine": Load(256, 512, 64, 32, ("bfloat16", "FP8")),
    "long": Load(64, 8192, 192, 8, ("bfloat16", "KV in FP8", "KV in int8")),
}


def bench_load(found: Results, load: Load, name: str) -> None:
    """Decode steps of one load in one format."""
    quantization, kv_dtype = FORMATS[name]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), "llama-3.1-8b", num_hidden_layers=load.layers)
        settings: dict[str, Any] = {
            "num_pages": load.batch * (-(-(load.prompt + load.new) // 16) + 1) + 600,
            "max_context_tokens": load.prompt + load.new + 512,
            "max_running_requests": load.batch,
            "max_step_tokens": 8192,
            "prefill_chunk_tokens": 4096,
            "prefix_cache": False,
            "inter_token_target_s": 1.0,
        }
        with LLM(
            path, device="cuda", dtype="bfloat16", quantization=quantization, kv_dtype=kv_dtype,
            dummy_weights=True, **settings,
        ) as llm:  # fmt: skip
            row: dict[str, Any] = {**load._asdict(), "formats": name}
            row["ready_s"] = time.perf_counter() - began
            run_batch(llm, load.batch, 64, 8)
            runs = [
                run_batch(llm, load.batch, load.prompt, load.new)
                for _ in range(2 if load.prompt < 4096 else 1)
            ]
            step_s = min(run.seconds / run.num_steps for run in runs)
            row["tokens_per_s"] = load.batch / step_s
            row["step_ms"] = 1e3 * step_s
            row["prompts_s"] = min(run.first_token_s for run in runs)
            row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    found.models.append(row)
    print(json.dumps(row), flush=True)


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--name", default="gpu_scaled_kv.json", help="of the JSON")
    arguments = parser.parse_args()
    setup, found, rates = describe_gpu(arguments.commit), Results(), measure_rates()
    release()
    for part in arguments.parts:
        if part == "attention":
            with noted(found, part):
                time_kv(found, rates)
        for name in LOADS[part].formats if part in LOADS else ():
            with noted(found, f"{part} {name}"):
                bench_load(found, LOADS[part], name)
            release()
        if arguments.out:
            content = {**setup, "rows": found.models, "failures": found.failures}
            (arguments.out / arguments.name).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
