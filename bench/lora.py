"""What adapters cost: throughput of a batch that mixes them, and time to the first token of one.

The engine alone, in this process, with random adapters.

    python bench/lora.py                        the demo model, rank 16, a batch of 64
    python bench/lora.py --model DIR --ranks 8 --repeats 5
    python bench/lora.py --model llama-3.1-8b --device cuda --ranks 8 16 64 --tokens 256
    python bench/lora.py --model qwen3-30b-a3b --device cuda --change shared-experts
    python bench/lora.py --model llama-3.1-8b --device cuda --dtype bfloat16 --deterministic
    python bench/lora.py --change vocabulary --counts 0 1 4 --gaps 0

Models of such names have their real shapes and made-up weights. Throughput: requests of a batch
take adapters in turn; the rows of a round follow each other in random order, and a row's share is
that of its round's base row. Time to first token: an adapter on the device, in host memory, or on
disk only. Beside it: the time between tokens of a running batch while requests come that name no
adapter, one on the device, one that must come from disk, and one that must and that all steps wait
for, as in an engine whose loading blocks.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from model_shapes import MODELS, write_config
from random_adapters import PROJECTIONS, write_adapter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serving.setup import ROOT, MachineUse, describe_lines, describe_setup
from weft.checkpoint.resolve import resolve_model
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.loop.llm import LLM
from weft.engine.scheduler.plan import Plan

GREEDY = SamplingParams(temperature=0.0)
FIRST_TOKEN_PROMPT = 16
FEW = 2
"""Number of adapters on the device, where measurements need others elsewhere."""
KNOWN = 4 * FEW
"""Number of adapters in all."""
COMPARED = 8
"""Requests of a batch that are run alone as well."""
WAITED_S, MAX_WAITED_S = 0.0002, 30.0
"""Seconds between two checks whether an adapter is loaded, and the longest wait."""


BETWEEN = ("none", "on the device", "from disk", "waited for")
"""Adapters of requests that come while others run: all of the last two must be loaded first."""


class Checked(NamedTuple):
    """Counts of compared first tokens: of a batch, and of the same requests run alone."""

    equal: int = 0
    compared: int = 0

    def plus(self, *, is_equal: bool) -> Checked:
        """Returns the counts with one more comparison."""
        return Checked(self.equal + is_equal, self.compared + 1)

    @property
    def differing(self) -> float:
        """Share of tokens that differ; 0 if none were compared."""
        return 1 - self.equal / self.compared if self.compared else 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one batch."""

    tokens_per_s: float
    """Tokens per second from the first prompt to the last token."""
    step_s: float
    """Mean time of a step in which all requests decode; NaN without any."""
    prompts_s: float
    """Time until all requests have their first token."""


def prompts_of(
    draw: random.Random, count: int, vocab_size: int, length: int = FIRST_TOKEN_PROMPT
) -> list[list[int]]:
    """Random ids: no prompt is a prefix hit."""
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def submit(name: str, prompt: list[int], tokens: int, adapter: bytes = b"") -> Submit:
    """A greedy request for `tokens` tokens."""
    return Submit(
        gateway=7,
        request_id=name,
        attempt=1,
        prompt=prompt,
        sampling=GREEDY,
        stop=StopCriteria(max_tokens=tokens, ignore_eos=True),
        adapter=adapter,
    )


def run_batch(
    llm: LLM, prompts: Sequence[list[int]], adapters: Sequence[bytes], tokens: int
) -> tuple[Speed, list[list[int]]]:
    """Runs requests that come together; returns their tokens as well."""
    found: list[list[int]] = [[] for _ in prompts]
    inbox: Inbox | None = Inbox(
        submits=[
            submit(str(i), prompt, tokens, adapter)
            for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
        ]
    )
    num_done, num_steps, all_began = 0, 0, 0.0
    began = last = time.perf_counter()
    while num_done < len(prompts):
        outbox = llm.engine.turn(inbox)
        inbox = None
        for batch in outbox.gateways:
            assert not batch.failed, batch.failed
            num_done += len(batch.finished)
            for some in batch.all_tokens():
                found[int(some.request_id)].extend(some.ids)
        if not all_began:
            if all(found):
                all_began = time.perf_counter()
        elif not num_done:
            last, num_steps = time.perf_counter(), num_steps + 1
    seconds = time.perf_counter() - began
    count = sum(len(ids) for ids in found)
    step_s = (last - all_began) / num_steps if num_steps else float("nan")
    return Speed(count / seconds, step_s, all_began - began), found


def throughput(
    llm: LLM,
    adapters: Sequence[bytes],
    rank: int,
    arguments: argparse.Namespace,
    draw: random.Random,
    checked: dict[str, Checked],
) -> dict[int, list[Speed]]:
    """Speeds by number of adapters, one a round; first tokens of the last round are compared.

    In bfloat16 near ties may fall another way alone, without adapters as with them.
    """
    values: dict[int, list[Speed]] = {count: [] for count in arguments.counts}
    vocab_size = llm.engine.info.vocab_size
    with Progress(transient=True) as progress:
        for number in progress.track(range(arguments.repeats + 1), description=f"rank {rank}"):
            for count in draw.sample(arguments.counts, len(arguments.counts)):
                prompts = prompts_of(draw, arguments.batch, vocab_size, arguments.prompt)
                named = [adapters[i % count] if count else b"" for i in range(arguments.batch)]
                # The first round warms up.
                tokens = arguments.tokens if number else min(8, arguments.tokens)
                speed, found = run_batch(llm, prompts, named, tokens)
                if number:
                    values[count].append(speed)
                if number == arguments.repeats:
                    for i in range(min(COMPARED, arguments.batch)):
                        _, alone = run_batch(llm, [prompts[i]], [named[i]], 1)
                        kind = "with" if named[i] else "without"
                        checked[kind] = checked[kind].plus(is_equal=alone[0] == found[i][:1])
    return values


def first_token_s(llm: LLM, adapter: bytes, draw: random.Random) -> float:
    """Time to the first token of one request."""
    prompt = prompts_of(draw, 1, llm.engine.info.vocab_size)
    began = time.perf_counter()
    llm.generate(prompt, GREEDY, StopCriteria(max_tokens=1, ignore_eos=True), adapters=[adapter])
    return time.perf_counter() - began


def places(llm: LLM) -> dict[bytes, str]:
    """State of each adapter."""
    return {state.digest: state.state for state in llm.engine.adapters.states()}


def is_used(name: str, place: str) -> bool:
    """Whether requests of one of `BETWEEN` name an adapter at this place."""
    return name in ("from disk", "waited for") or (name, place) == ("on the device", "device")


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


def wait_for(llm: LLM, adapter: bytes) -> None:
    """Waits, without running steps, until an adapter is on the device."""
    # Rows are reused once the step under way, which may name them, has ended.
    llm.engine.pipeline.turn(Plan())
    deadline = time.perf_counter() + MAX_WAITED_S
    while places(llm)[adapter] != "device":
        assert time.perf_counter() < deadline, f"an adapter did not come: {places(llm)}"
        llm.engine.adapters.turn()
        time.sleep(WAITED_S)


def gaps(
    llm: LLM,
    adapters: Sequence[bytes],
    arguments: argparse.Namespace,
    draw: random.Random,
    *,
    blocks: bool = False,
) -> list[float]:
    """Seconds between tokens of a running batch while a request comes every 16 steps.

    Args:
        llm: The engine.
        adapters: Of those requests, by turns; none: the base model.
        arguments: Of the command line.
        draw: Of prompts.
        blocks: Steps wait for each of the adapters.
    """
    vocab_size, values, others = llm.engine.info.vocab_size, [], 0
    running = prompts_of(draw, arguments.batch // 4, vocab_size)
    submits = [submit(f"running-{i}", p, arguments.gaps + 40) for i, p in enumerate(running)]
    inbox: Inbox | None = Inbox(submits=submits)
    last, num_open = time.perf_counter(), len(submits)
    # The last ones may wait for their adapters when nothing runs any more.
    while num_open:
        outbox = llm.engine.turn(inbox)
        assert not any(batch.failed for batch in outbox.gateways)
        num_open -= sum(len(batch.finished) for batch in outbox.gateways)
        if blocks and inbox is not None and inbox.submits[0].adapter:
            wait_for(llm, inbox.submits[0].adapter)
        if not llm.engine.ran_step:
            time.sleep(WAITED_S)  # Adapters are read by a thread, which needs Python's lock.
        inbox = None
        ids = [tokens.request_id for batch in outbox.gateways for tokens in batch.all_tokens()]
        if any(name == "running-0" for name in ids):
            now = time.perf_counter()
            values.append(now - last)
            last = now
            if len(values) % 16 == 0:
                (prompt,) = prompts_of(draw, 1, vocab_size)
                adapter = adapters[others % len(adapters)] if adapters else b""
                inbox = Inbox(submits=[submit(f"other-{others}", prompt, 1, adapter)])
                others, num_open = others + 1, num_open + 1
    return values[20:]


def describe(values: Sequence[float], unit: float = 1e3) -> str:
    """Formats median and spread."""
    if not values:
        return "none"
    low, middle, high = np.percentile(values, [10, 50, 90]) * unit
    return f"{middle:.1f} [{low:.1f} to {high:.1f}]"


def settings_of(arguments: argparse.Namespace, adapter_bytes: int, count: int) -> dict[str, Any]:
    """Settings of an engine with room for `count` adapters on the device."""
    # Rows are shared out among kinds of projections, rounded down.
    settings: dict[str, Any] = {
        "dtype": arguments.dtype,
        "device": arguments.device,
        "enable_lora": True,
        "max_lora_rank": max(64, *arguments.ranks),
        "max_loras": count,
        "max_running_requests": arguments.batch + 1,
        "lora_memory_bytes": int(1.02 * count * adapter_bytes) + (1 << 20),
        "lora_projections": PROJECTIONS[arguments.change],
        "lora_host_bytes": max(4 << 30, 2 * adapter_bytes),
        "deterministic": arguments.deterministic,
    }
    if arguments.change == "vocabulary":
        settings |= {"lora_memory_bytes": None, "lora_whole_matrices": count}
    if arguments.model in MODELS:
        settings["dummy_weights"] = True
    if arguments.num_pages:
        settings["num_pages"] = arguments.num_pages
    if arguments.step_tokens:
        settings["max_step_tokens"] = settings["prefill_chunk_tokens"] = arguments.step_tokens
    return settings


@dataclass(slots=True)
class Figures:
    """All measurements."""

    speeds: dict[int, dict[int, list[Speed]]] = field(default_factory=dict)
    """Speeds by rank and number of adapters."""
    checked: dict[str, Checked] = field(
        default_factory=lambda: {"without": Checked(), "with": Checked()}
    )
    """Checked tokens of requests without and with adapters."""
    adapter_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of an adapter by rank."""
    firsts: dict[str, list[float]] = field(default_factory=dict)
    between: dict[str, list[float]] = field(default_factory=dict)


def measure(arguments: argparse.Namespace, folder: Path, draw: random.Random) -> Iterator[Figures]:
    """Runs everything, adapters of one rank at a time on disk; yields what is known after each."""
    if arguments.model in MODELS:
        model_dir = write_config(folder, arguments.model)
    else:
        model_dir = resolve_model(arguments.model)

    def write(rank: int, count: int) -> list[Path]:
        shutil.rmtree(folder / "adapters", ignore_errors=True)
        where = (folder / "adapters" / str(i) for i in range(count))
        more = (arguments.change, arguments.device)
        return [write_adapter(path, model_dir, rank, i, *more) for i, path in enumerate(where)]

    figures = Figures()
    # The largest first: the others fit where it does.
    ranks = sorted(arguments.ranks, reverse=True)
    most = max(1, *arguments.counts)
    paths = write(ranks[0], most)
    size = (paths[0] / "adapter_model.safetensors").stat().st_size
    if arguments.dtype == "float32":
        size *= 2
    with LLM(model_dir, **settings_of(arguments, size, most)) as llm:
        for rank in ranks:
            if rank != ranks[0]:
                paths = write(rank, most)
            adapters = [llm.load_adapter(path) for path in paths]
            figures.adapter_bytes[rank] = llm.engine.adapters.states()[0].num_bytes
            speeds = throughput(llm, adapters, rank, arguments, draw, figures.checked)
            figures.speeds[rank] = speeds
            yield figures
            for adapter in adapters:
                llm.unload_adapter(adapter)
    del llm
    gc.collect()
    if arguments.device != "cpu":
        torch.cuda.empty_cache()
    if arguments.gaps:
        rank = 16 if 16 in ranks else ranks[0]
        size = figures.adapter_bytes[rank]
        settings = settings_of(arguments, size, FEW)
        # Half of the adapters are in host memory, half of these on the device.
        settings["lora_host_bytes"] = int((2 * FEW + 0.5) * size)
        paths = write(rank, KNOWN)
        with LLM(model_dir, **settings) as llm:
            some = [llm.load_adapter(path) for path in paths]
            figures.firsts["none"] = [first_token_s(llm, b"", draw) for _ in range(20)][5:]
            for name in ("device", "host", "disk"):
                figures.firsts[name] = first_tokens(llm, some, name, 15, draw)
            for name in 2 * BETWEEN:
                used = [digest for digest in some if is_used(name, places(llm)[digest])]
                found = gaps(llm, used, arguments, draw, blocks=name == "waited for")
                figures.between.setdefault(name, []).extend(found)
        yield figures


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(MODELS)
    parser.add_argument("--model", default="demo", help=f"demo, a directory, or one of {names}")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--change", choices=PROJECTIONS, default="dense", help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 1, 8, 32], help="of adapters")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each request's prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--gaps", type=int, default=200, help="between tokens, that are measured; 0: none, nor TTFT"
    )
    parser.add_argument(
        "--step-tokens", type=int, help="of prompts, in a step; default: the engine's"
    )
    parser.add_argument("--num-pages", type=int, help="of the KV pool; default: what fits")
    parser.add_argument(
        "--deterministic", action="store_true", help="that mode: no first token may differ"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="default: bench/results/")
    arguments = parser.parse_args()
    if 0 not in arguments.counts:
        parser.error("--counts lacks 0, to which the others are compared")
    setup = describe_setup(arguments.dtype, torch.get_num_threads())
    if arguments.commit:
        setup["commit"] = arguments.commit
    if arguments.device != "cpu":
        setup["device"] = torch.cuda.get_device_name(arguments.device)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = arguments.json or ROOT / "bench" / "results" / f"lora-{stamp}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = MachineUse.now()
    with tempfile.TemporaryDirectory(prefix="weft-lora-") as folder:
        for figures in measure(arguments, Path(folder), random.Random(arguments.seed)):
            setup["other_cores"] = MachineUse.now().others_since(before)
            status = report(arguments, setup, figures, path)
    return status


def throughput_rows(console: Console, speeds: dict[int, list[Speed]], title: str) -> dict[int, Any]:
    """Prints the table of a rank; returns what of it the JSON keeps."""
    table = Table(title=title)
    for column in ("adapters", "tokens/s", "ms between tokens", "ms to all first tokens"):
        table.add_column(column, justify="right")
        if column != "adapters":
            table.add_column("of the base's", justify="right")
    rows: dict[int, Any] = {}
    for count, values in sorted(speeds.items()):
        pairs = list(zip(values, speeds[0], strict=True))
        shares = [value.tokens_per_s / base.tokens_per_s for value, base in pairs]
        slower = [value.step_s / base.step_s for value, base in pairs]
        later = [value.prompts_s / base.prompts_s for value, base in pairs]
        table.add_row(
            str(count),
            describe([value.tokens_per_s for value in values], 1),
            describe(shares, 100) + " %",
            describe([value.step_s for value in values]),
            describe(slower, 100) + " %",
            describe([value.prompts_s for value in values]),
            describe(later, 100) + " %",
        )
        rows[count] = {
            "tokens_per_s": statistics.median(value.tokens_per_s for value in values),
            "share": statistics.median(shares),
            "shares": shares,
            "step_ms": 1e3 * statistics.median(value.step_s for value in values),
            "step_ratio": statistics.median(slower),
            "prompts_ms": 1e3 * statistics.median(value.prompts_s for value in values),
            "prompts_ratio": statistics.median(later),
        }
    console.print(table)
    return rows


def latency_rows(console: Console, figures: Figures, running: int) -> dict[str, Any]:
    """Prints first tokens and times between tokens; returns what of them the JSON keeps."""
    table = Table(title=f"First token of {FIRST_TOKEN_PROMPT} prompt tokens, alone")
    for column in ("adapter", "ms"):
        table.add_column(column, justify="right")
    for name, values in figures.firsts.items():
        table.add_row(name, describe(values))
    console.print(table)
    table = Table(title=f"Between tokens of {running} running requests")
    for column in ("adapters of those that come", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    between: dict[str, Any] = {}
    for name, values in figures.between.items():
        p50, p99 = (1e3 * float(np.percentile(values, q)) for q in (50, 99))
        table.add_row(name, f"{p50:.1f}", f"{p99:.1f}")
        rounded = [round(1e3 * value, 3) for value in values]
        between[name] = {"p50": p50, "p99": p99, "count": len(values), "ms": rounded}
    console.print(table)
    firsts = {name: [1e3 * value for value in values] for name, values in figures.firsts.items()}
    return {"first_token_ms": firsts, "between_tokens_ms": between}


def report(
    arguments: argparse.Namespace, setup: dict[str, Any], figures: Figures, path: Path
) -> int:
    """Prints the tables and writes the JSON; 1 if what was timed was wrong."""
    console = Console()
    rows: dict[int, dict[int, Any]] = {}
    for rank, speeds in sorted(figures.speeds.items()):
        title = f"A batch of {arguments.batch}, rank {rank}, {arguments.change}"
        rows[rank] = throughput_rows(console, speeds, title)
    latencies = latency_rows(console, figures, arguments.batch // 4) if figures.firsts else {}
    without, with_adapters = (figures.checked[kind] for kind in ("without", "with"))
    for line in [
        *describe_lines(setup),
        "first tokens equal to those of the same request alone: "
        f"{with_adapters.equal} of {with_adapters.compared} with adapters, "
        f"{without.equal} of {without.compared} without",
        f"other programs kept {setup['other_cores']:.2f} cores busy",
    ]:
        console.print(line, soft_wrap=True, highlight=False)
    content = {
        "command": " ".join(sys.argv),
        "setup": setup,
        "checked": figures.checked,
        "adapter_bytes": figures.adapter_bytes,
        "throughput": rows,
        **latencies,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written to {path}", soft_wrap=True, highlight=False)
    if arguments.deterministic:
        return int(any(kind.equal < kind.compared for kind in figures.checked.values()))
    return 0 if with_adapters.differing <= 0.1 + 2 * without.differing else 1


if __name__ == "__main__":
    raise SystemExit(main())
