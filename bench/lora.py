"""What adapters cost: throughput of a batch that mixes them, and time to the first token of one.

The engine alone, in this process, with random adapters that change every projection.

    python bench/lora.py                        the demo model, rank 16, a batch of 64
    python bench/lora.py --model DIR --rank 8 --repeats 5

Throughput: requests of a batch take adapters in turn; the rows of a round follow each other in
random order, and a row's share is that of its round's base row. Time to first token: an adapter on
the device, in host memory, or on disk only. Beside it: the time between tokens of a running batch
while others bring an adapter from disk each, and while they bring none.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file
from serving.setup import ROOT, MachineUse, describe_lines, describe_setup
from weft.engine.llm import LLM
from weft.engine.messages import Inbox, Submit
from weft.engine.models.demo import resolve_model
from weft.engine.request import SamplingParams, StopCriteria

NUM_ADAPTERS = (0, 1, 8, 32)
GREEDY = SamplingParams(temperature=0.0)
PROMPT_TOKENS = 16
FEW = 2
"""Adapters on the device, where others are to be elsewhere."""
MODULES = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.o_proj": ("q", "hidden"),
    "mlp.gate_proj": ("hidden", "inner"),
    "mlp.up_proj": ("hidden", "inner"),
    "mlp.down_proj": ("inner", "hidden"),
}


def write_adapter(folder: Path, model_dir: Path, rank: int, seed: int) -> Path:
    """A random adapter in PEFT's format, small enough that the text stays text."""
    config = json.loads((model_dir / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    sizes = {
        "hidden": hidden,
        "q": heads * dim,
        "kv": config["num_key_value_heads"] * dim,
        "inner": config["intermediate_size"],
    }
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (width, out) in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            shapes = {"A": (rank, sizes[width]), "B": (sizes[out], rank)}
            for half, shape in shapes.items():
                numbers = 0.02 * torch.randn(shape, generator=draw)
                tensors[f"{name}.lora_{half}.weight"] = numbers.to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [module.rpartition(".")[2] for module in MODULES],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def prompts_of(draw: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    """Random ids: no prompt is a prefix hit."""
    return [[draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def throughput(
    llm: LLM, adapters: Sequence[bytes], arguments: argparse.Namespace, draw: random.Random
) -> tuple[dict[int, list[float]], tuple[int, int]]:
    """Tokens a second by number of adapters, one value a round.

    Returns:
        The values, and how many of the last round's first tokens equal those of the same request
        alone, of how many. (In bfloat16 near-ties may fall another way.)
    """
    values: dict[int, list[float]] = {count: [] for count in NUM_ADAPTERS}
    stop = StopCriteria(max_tokens=arguments.tokens, ignore_eos=True)
    vocab_size = llm.engine.info.vocab_size
    equal = compared = 0
    with Progress(transient=True) as progress:
        for number in progress.track(range(arguments.repeats + 1), description="throughput"):
            for count in draw.sample(NUM_ADAPTERS, len(NUM_ADAPTERS)):
                prompts = prompts_of(draw, arguments.batch, vocab_size)
                named = [adapters[i % count] if count else b"" for i in range(arguments.batch)]
                began = time.perf_counter()
                samples = llm.generate(prompts, GREEDY, stop, adapters=named)
                seconds = time.perf_counter() - began
                if number:  # The first round warms up.
                    values[count].append(sum(len(s.token_ids) for s in samples) / seconds)
                if number == arguments.repeats:
                    first = StopCriteria(max_tokens=1, ignore_eos=True)
                    for i in range(8):
                        (alone,) = llm.generate([prompts[i]], GREEDY, first, adapters=[named[i]])
                        equal += alone.token_ids == samples[i].token_ids[:1]
                        compared += 1
    return values, (equal, compared)


def first_token_s(llm: LLM, adapter: bytes, draw: random.Random) -> float:
    """Time to the first token of one request."""
    prompt = prompts_of(draw, 1, llm.engine.info.vocab_size)
    began = time.perf_counter()
    llm.generate(prompt, GREEDY, StopCriteria(max_tokens=1, ignore_eos=True), adapters=[adapter])
    return time.perf_counter() - began


def places(llm: LLM) -> dict[bytes, str]:
    """Where each adapter is."""
    return {state.digest: state.state for state in llm.engine.adapters.states()}


def first_tokens(
    llm: LLM, adapters: Sequence[bytes], wanted: str, repeats: int, draw: random.Random
) -> list[float]:
    """Times to first token with an adapter that is at `wanted` when the request comes."""
    values: list[float] = []
    for _ in range(50 * repeats):
        if len(values) == repeats:
            break
        found = [digest for digest in adapters if places(llm)[digest] == wanted]
        if found:
            values.append(first_token_s(llm, draw.choice(found), draw))
        else:
            first_token_s(llm, draw.choice(list(adapters)), draw)  # Pushes another one out.
    return values


def gaps(
    llm: LLM, adapters: Sequence[bytes], arguments: argparse.Namespace, draw: random.Random
) -> list[float]:
    """Seconds between tokens of a running batch while a request comes every 16 steps.

    Args:
        llm: The engine.
        adapters: Of those requests, by turns; none: the base model.
        arguments: Of the command line.
        draw: Of prompts.
    """
    vocab_size, values, others = llm.engine.info.vocab_size, [], 0
    submits = [
        Submit(
            session=7,
            request_id=f"running-{i}",
            attempt=1,
            prompt=prompt,
            sampling=GREEDY,
            stop=StopCriteria(max_tokens=arguments.gaps + 40, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts_of(draw, arguments.batch // 4, vocab_size))
    ]
    inbox: Inbox | None = Inbox(submits=submits)
    last = time.perf_counter()
    while llm.engine.has_work or inbox is not None:
        outbox = llm.engine.turn(inbox)
        inbox = None
        ids = [tokens.request_id for batch in outbox.sessions for tokens in batch.tokens]
        if any(name == "running-0" for name in ids):
            now = time.perf_counter()
            values.append(now - last)
            last = now
            if len(values) % 16 == 0:
                (prompt,) = prompts_of(draw, 1, vocab_size)
                inbox = Inbox(
                    submits=[
                        Submit(
                            session=7,
                            request_id=f"other-{others}",
                            attempt=1,
                            prompt=prompt,
                            sampling=GREEDY,
                            stop=StopCriteria(max_tokens=1, ignore_eos=True),
                            adapter=adapters[others % len(adapters)] if adapters else b"",
                        )
                    ]
                )
                others += 1
    return values[20:]


def describe(values: Sequence[float], unit: float = 1e3) -> str:
    """Median and spread."""
    low, middle, high = np.percentile(values, [10, 50, 90]) * unit
    return f"{middle:.1f} [{low:.1f} to {high:.1f}]"


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo or a directory of a dense model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--gaps", type=int, default=200, help="between tokens, that are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="default: bench/results/")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    model_dir = resolve_model(arguments.model)
    common: dict[str, Any] = {
        "dtype": arguments.dtype,
        "device": arguments.device,
        "enable_lora": True,
        "max_lora_rank": max(64, arguments.rank),
    }
    setup = describe_setup(arguments.dtype, torch.get_num_threads())
    before = MachineUse.now()
    with tempfile.TemporaryDirectory(prefix="weft-lora-") as folder:
        paths = [
            write_adapter(Path(folder) / f"a{i}", model_dir, arguments.rank, i)
            for i in range(max(NUM_ADAPTERS))
        ]
        with LLM(model_dir, max_loras=max(NUM_ADAPTERS), **common) as llm:
            adapters = [llm.load_adapter(path) for path in paths]
            num_bytes = llm.engine.adapters.states()[0].num_bytes
            speeds, checked = throughput(llm, adapters, arguments, draw)
        few = common | {"max_loras": FEW}
        firsts, between = {}, {}
        with LLM(model_dir, **few) as llm:
            some = [llm.load_adapter(path) for path in paths[: 4 * FEW]]
            firsts["none"] = [first_token_s(llm, b"", draw) for _ in range(20)][5:]
            for name in ("device", "host"):
                firsts[name] = first_tokens(llm, some, name, 15, draw)
        with LLM(model_dir, lora_host_bytes=int(1.5 * num_bytes), **few) as llm:
            some = [llm.load_adapter(path) for path in paths[: 4 * FEW]]
            firsts["disk"] = first_tokens(llm, some, "disk", 15, draw)
            for name, used in 2 * (("none", []), ("from disk", some)):
                between.setdefault(name, []).extend(gaps(llm, used, arguments, draw))
    setup["other_cores"] = MachineUse.now().others_since(before)
    return report(arguments, setup, speeds, checked, firsts, between)


def report(
    arguments: argparse.Namespace,
    setup: dict[str, Any],
    speeds: dict[int, list[float]],
    checked: tuple[int, int],
    firsts: dict[str, list[float]],
    between: dict[str, list[float]],
) -> int:
    """Prints the tables and writes the JSON; 1 if what was timed was wrong."""
    console = Console()
    table = Table(title=f"A batch of {arguments.batch}, rank {arguments.rank}, every projection")
    for column in ("adapters", "tokens/s", "of the base model's"):
        table.add_column(column, justify="right")
    rows: dict[str, Any] = {"throughput": {}, "first_token_ms": {}, "between_tokens_ms": {}}
    for count, values in speeds.items():
        shares = [value / base for value, base in zip(values, speeds[0], strict=True)]
        table.add_row(str(count), describe(values, 1), describe(shares, 100) + " %")
        rows["throughput"][count] = {
            "tokens_per_s": statistics.median(values),
            "share": statistics.median(shares),
            "shares": shares,
        }
    console.print(table)
    table = Table(title=f"First token of {PROMPT_TOKENS} prompt tokens, alone")
    for column in ("adapter", "ms"):
        table.add_column(column, justify="right")
    for name, values in firsts.items():
        table.add_row(name, describe(values))
        rows["first_token_ms"][name] = [1e3 * value for value in values]
    console.print(table)
    table = Table(title=f"Between tokens of {arguments.batch // 4} running requests")
    for column in ("adapters of those that come", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for name, values in between.items():
        p50, p99 = (1e3 * float(np.percentile(values, q)) for q in (50, 99))
        table.add_row(name, f"{p50:.1f}", f"{p99:.1f}")
        rows["between_tokens_ms"][name] = {"p50": p50, "p99": p99, "count": len(values)}
    console.print(table)
    for line in [
        *describe_lines(setup),
        f"first tokens equal to those of the same request alone: {checked[0]} of {checked[1]}",
        f"other programs kept {setup['other_cores']:.2f} cores busy",
    ]:
        console.print(line, soft_wrap=True, highlight=False)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = arguments.json or ROOT / "bench" / "results" / f"lora-{stamp}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": " ".join(sys.argv), "setup": setup, "checked": checked, **rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written to {path}", soft_wrap=True, highlight=False)
    return 0 if checked[0] >= 0.9 * checked[1] else 1


if __name__ == "__main__":
    raise SystemExit(main())
