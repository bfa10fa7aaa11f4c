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
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_runs import GREEDY, Batch, run_requests
from harness import Harness, Run, percentiles, ratio_of, spread
from model_shapes import MODELS, write_config
from random_adapters import PROJECTIONS, write_adapter
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.resolve import resolve_model
from weft.contract.messages import Inbox
from weft.contract.request import StopCriteria
from weft.contract.submits import Submit
from weft.engine.loop.llm import LLM
from weft.engine.scheduler.plan import Plan

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


def run_batch(llm: LLM, prompts: list[list[int]], adapters: Sequence[bytes], tokens: int) -> Batch:
    """Runs requests that come together."""
    return run_requests(llm, prompts, [tokens] * len(prompts), GREEDY, adapters=adapters)


def figures_of(batches: Sequence[Batch], base: Sequence[Batch]) -> dict[str, Any]:
    """Speeds, and their ratios to those of the base in the same round."""
    found: dict[str, Any] = {}
    for name, measure in (
        ("tokens_per_s", lambda one: sum(map(len, one.tokens)) / one.all_seconds),
        ("step_ms", lambda one: 1e3 * one.seconds / one.num_steps if one.num_steps else math.nan),
        ("prompts_ms", lambda one: 1e3 * one.first_token_s),
    ):
        own, others = ([measure(one) for one in each] for each in (batches, base))
        found[name], found[f"{name}_of_base"] = spread(own), ratio_of(own, others)
    return found


def throughput(
    llm: LLM,
    adapters: Sequence[bytes],
    arguments: argparse.Namespace,
    draw: random.Random,
    checked: dict[str, Checked],
) -> dict[int, list[Batch]]:
    """Speeds by number of adapters, one a round; first tokens of the last round are compared.

    In bfloat16 near ties may fall another way alone, without adapters as with them.
    """
    values: dict[int, list[Batch]] = {count: [] for count in arguments.counts}
    vocab_size = llm.engine.info.vocab_size
    for number in range(arguments.repeats + 1):
        for count in draw.sample(arguments.counts, len(arguments.counts)):
            prompts = prompts_of(draw, arguments.batch, vocab_size, arguments.prompt)
            named = [adapters[i % count] if count else b"" for i in range(arguments.batch)]
            # The first round warms up.
            tokens = arguments.tokens if number else min(8, arguments.tokens)
            batch = run_batch(llm, prompts, named, tokens)
            if number:
                values[count].append(batch)
            if number == arguments.repeats:
                for i in range(min(COMPARED, arguments.batch)):
                    alone = run_batch(llm, [prompts[i]], [named[i]], 1).tokens
                    kind = "with" if named[i] else "without"
                    checked[kind] = checked[kind].plus(is_equal=alone[0] == batch.tokens[i][:1])
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


harness = Harness(__file__, __doc__, repeats=7)
harness.flag("--model", default="demo", help=f"demo, a directory, or one of {', '.join(MODELS)}")
harness.flag("--dtype", default="auto")
harness.flag("--device", default="cpu")
harness.flag("--change", choices=PROJECTIONS, default="dense", help="of the model")
harness.flag("--ranks", type=int, nargs="+", default=[16])
harness.flag("--counts", type=int, nargs="+", default=[0, 1, 8, 32], help="of adapters")
harness.flag("--batch", type=int, default=64)
harness.flag("--prompt", type=int, default=16, help="tokens of each request's prompt")
harness.flag("--tokens", type=int, default=32, help="of each request")
harness.flag(
    "--gaps", type=int, default=200, help="between tokens, that are measured; 0: none, nor TTFT"
)
harness.flag("--step-tokens", type=int, help="of prompts, in a step; default: the engine's")
harness.flag("--num-pages", type=int, help="of the KV pool; default: what fits")
harness.flag("--deterministic", action="store_true", help="that mode: no first token may differ")
harness.flag("--seed", type=int, default=0)


@harness.check
def complete(options: argparse.Namespace) -> None:
    """The base, to which other counts are compared."""
    if 0 not in options.counts:
        harness.error("--counts lacks 0, to which the others are compared")


def checkpoint_of(run: Run) -> tuple[Path, Path]:
    """The model's folder, and one for adapters."""
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-lora-")))
    if run.options.model in MODELS:
        return write_config(folder, run.options.model), folder / "adapters"
    return resolve_model(run.options.model), folder / "adapters"


def write_adapters(run: Run, folder: Path, model_dir: Path, rank: int, count: int) -> list[Path]:
    """So many adapters of one rank, in the place of earlier ones."""
    shutil.rmtree(folder, ignore_errors=True)
    more = (run.options.change, run.options.device)
    places = (folder / str(i) for i in range(count))
    return [write_adapter(path, model_dir, rank, i, *more) for i, path in enumerate(places)]


def bytes_on_device(adapter: Path, options: argparse.Namespace) -> int:
    """Bytes of an adapter, whose file is in bfloat16, in the engine's dtype."""
    size = (adapter / "adapter_model.safetensors").stat().st_size
    return size * (2 if resolve_dtype(options.dtype, options.device) == "float32" else 1)


@harness.part
def batches(run: Run) -> None:
    """Throughput of batches that mix adapters, those of one rank at a time on disk."""
    options, draw = run.options, random.Random(run.options.seed)
    model_dir, folder = checkpoint_of(run)
    # The largest first: the others fit where it does.
    ranks = sorted(options.ranks, reverse=True)
    most = max(1, *options.counts)
    paths = write_adapters(run, folder, model_dir, ranks[0], most)
    size = bytes_on_device(paths[0], options)
    checked = {"without": Checked(), "with": Checked()}
    with LLM(model_dir, **settings_of(options, size, most)) as llm:
        for rank in ranks:
            if rank != ranks[0]:
                paths = write_adapters(run, folder, model_dir, rank, most)
            adapters = [llm.load_adapter(path) for path in paths]
            of_adapter = llm.engine.adapters.states()[0].num_bytes
            speeds = throughput(llm, adapters, options, draw, checked)
            title = f"a batch of {options.batch}, rank {rank}, {options.change}"
            for count, found in sorted(speeds.items()):
                figures = figures_of(found, speeds[0])
                run.row(table=title, adapters=count, adapter_bytes=of_adapter, **figures)
            for adapter in adapters:
                llm.unload_adapter(adapter)
    del llm
    gc.collect()
    if options.device != "cpu":
        torch.cuda.empty_cache()
    without, mixed = checked["without"], checked["with"]
    run.note(
        "first tokens equal to those of the same request alone: "
        f"{mixed.equal} of {mixed.compared} with adapters, "
        f"{without.equal} of {without.compared} without"
    )
    most_differing = 0.0 if options.deterministic else 0.1 + 2 * without.differing
    if max(mixed.differing, without.differing * options.deterministic) > most_differing:
        run.fail("first tokens differ")


@harness.part
def latencies(run: Run) -> None:
    """First tokens by where an adapter lies, and times between tokens while others come."""
    options, draw = run.options, random.Random(run.options.seed)
    if not options.gaps:
        return
    model_dir, folder = checkpoint_of(run)
    rank = 16 if 16 in options.ranks else max(options.ranks)
    paths = write_adapters(run, folder, model_dir, rank, KNOWN)
    size = bytes_on_device(paths[0], options)
    settings = settings_of(options, size, FEW)
    # Half of the adapters are in host memory, half of these on the device.
    settings["lora_host_bytes"] = int((2 * FEW + 0.5) * size)
    with LLM(model_dir, **settings) as llm:
        some = [llm.load_adapter(path) for path in paths]
        title = f"first token of {FIRST_TOKEN_PROMPT} prompt tokens, alone"
        firsts = [first_token_s(llm, b"", draw) for _ in range(20)][5:]
        run.row(table=title, adapter="none", ms=spread(firsts, 1e3))
        for name in ("device", "host", "disk"):
            firsts = first_tokens(llm, some, name, 15, draw)
            if firsts:
                run.row(table=title, adapter=name, ms=spread(firsts, 1e3))
        between: dict[str, list[float]] = {}
        for name in 2 * BETWEEN:
            used = [digest for digest in some if is_used(name, places(llm)[digest])]
            found = gaps(llm, used, options, draw, blocks=name == "waited for")
            between.setdefault(name, []).extend(found)
        title = f"ms between tokens of {options.batch // 4} running requests"
        for name, values in between.items():
            run.row(percentiles(values, 1e3), table=title, adapters_of_others=name)


if __name__ == "__main__":
    sys.exit(harness.main())
