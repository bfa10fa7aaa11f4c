"""Time to the first token of a long history kept below the pool and new tokens, loaded in two ways.

An engine in this process computes a history once; its pages are then in host memory, on disk (which
its page cache may spare) or in a KV store, a process that is asked over gRPC and whose pages come
over NIXL. For each sample the pool is emptied and the history is asked for with fresh new tokens:
loaded whole before the step, and layer by layer while the step computes, in turns; from disk and
stores a GPU loads whole pages only. `device` is the same with the history in the pool, which no
load can beat.

On a GPU a kernel copies the layers, whose programs take multiprocessors from the step: `--copiers`
compares numbers of them. The table `parts` says what the GPU did in one more request of each way:
how long each kind of work took, and when it began and ended, from the first of all on.

    python bench/layer_loads.py                  2,000 tokens and 400 new ones, the demo model
    python bench/layer_loads.py --tier disk      or store
    python bench/layer_loads.py --device cuda --shape llama-3.1-8b --known 32768 --new 2048
    ... --copiers 2 4 8 16 32
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from clocks import timeline_of
from harness import Harness, Run, ratio_of, spread
from model_shapes import MODELS, write_config
from tiers import Links, greedy_submit
from weft.checkpoint.resolve import resolve_model
from weft.contract.messages import Inbox, Outbox
from weft.engine.base.config import EngineConfig
from weft.engine.loop.build import load_parts
from weft.engine.loop.engine import Engine
from weft.engine.sources.tiers.layer_loads import LayerPolicy
from weft.kernels.ops.pages import triton_pages
from weft.testing.services.store_server import store_process


class Whole(LayerPolicy):
    """Lets no load go by layer."""

    def pays(self, load_s: float, compute_s: float) -> bool:
        return False


class Way(NamedTuple):
    name: str
    policy: LayerPolicy = Whole(is_forced=False)
    copiers: int = triton_pages.MAX_COPIERS


WHOLE, DEVICE = Way("whole"), Way("device")
BY_LAYER = Way("by layer", LayerPolicy(is_forced=True))
KINDS = {
    "copies of layers": ("copy_part",),
    "other copies": ("memcpy", "copy_rows"),
    "digests": ("digest",),
    "attention": ("attention", "extend", "flash", "fmha"),
    "products": ("nvjet", "gemm", "cutlass", "linear", "splitk"),
}
"""Kinds of work on a GPU, by parts of kernels' names."""
NUM_NEW = 4
_PRIMED_TOKENS = 2048
"""Tokens after which all pages so far are let into host memory: an engine queues a bounded number
of saves at a time.
"""
TIMEOUT_S = 120.0
_IDLE_S = 0.05
"""Longest wait in seconds between two turns."""


class Bench:
    def __init__(self, config: EngineConfig) -> None:
        self._woken = threading.Event()
        self.engine = Engine(config, load_parts(config, wake=self._woken.set))
        self._links: Links | None = None
        self._num_asked = 0

    def use_store(self, address: str) -> None:
        self._links = Links(self.engine, address, self._woken)

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        self.engine.close()

    def turn(self, inbox: Inbox) -> Outbox:
        """One turn, and the wait for the next one, as a worker does: turns without a pause would
        keep the loads' threads from running.
        """
        self._woken.clear()
        if self._links is not None:
            self._links.add_answers(inbox)
        outbox = self.engine.turn(inbox)
        if self._links is not None:
            self._links.take(outbox)
        if not self.engine.has_work:
            self._woken.wait(_IDLE_S)
        return outbox

    def ask(self, prompt: Sequence[int], num_new: int = NUM_NEW) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens were loaded."""
        self._num_asked += 1
        submit = greedy_submit(self._num_asked, prompt, num_new)
        inbox, deadline = Inbox(submits=[submit]), time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            outbox, inbox = self.turn(inbox), Inbox()
            for batch in outbox.gateways:
                for finished in batch.finished:
                    timeline = finished.timeline
                    fills = [fill for fill in timeline.fills if not fill.failure]
                    return timeline.first_token_s, sum(fill.accepted_tokens for fill in fills)
        raise TimeoutError("a prompt did not end")

    def settle(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self.engine.is_idle:
            self.turn(Inbox())
            if time.monotonic() > deadline:
                raise TimeoutError(str(self.engine.sizes()))


def with_copiers(count: int) -> Way:
    return Way(f"by layer, {count} copiers", BY_LAYER.policy, count)


def parts_of(spans: Sequence[tuple[str, float, float]]) -> dict[str, dict[str, float]]:
    """By kind of work: its launches, their time in all, the longest, and when the first began and
    the last ended, in milliseconds.

    Args:
        spans: Of each launch its name, begin and end in microseconds.
    """
    first = min(begin for _, begin, _ in spans)
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, begin, end in spans:
        fits = (kind for kind, parts in KINDS.items() if any(one in name.lower() for one in parts))
        found[next(fits, "others")].append((begin - first, end - first))
    return {
        kind: {
            "launches": len(own),
            "busy_ms": sum(end - begin for begin, end in own) / 1e3,
            "longest_ms": max(end - begin for begin, end in own) / 1e3,
            "begin_ms": min(begin for begin, _ in own) / 1e3,
            "end_ms": max(end for _, end in own) / 1e3,
        }
        for kind, own in found.items()
    }


harness = Harness(__file__, __doc__, repeats=7)
harness.flag("--model", default="demo", help="demo, or a model directory")
harness.flag("--shape", choices=MODELS, help="made-up weights of a known model's shape")
harness.flag("--device", default="cpu", help="torch device")
harness.flag("--dtype", default="auto", help="of weights and KV")
harness.flag("--tier", choices=("host", "disk", "store"), default="host", help="where it is kept")
harness.flag("--known", type=int, default=2000, help="tokens kept there")
harness.flag("--new", type=int, default=400, help="tokens after them")
harness.flag("--memory-bytes", type=int, default=8 << 30, help="of the pool and of host memory")
harness.flag("--copiers", type=int, nargs="+", default=[], help="programs that copy layers")


@harness.part
def layer_loads(run: Run) -> None:
    """All ways, in turns."""
    options, rng = run.options, random.Random()
    settings: dict[str, Any] = {"transport": "data", "device": options.device}
    if options.tier == "store":
        settings |= {"transport": "nixl", "has_store": True}
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-layers-")))
    if options.shape:
        settings |= {"model_dir": write_config(folder, options.shape), "dummy_weights": True}
    else:
        settings |= {"model_dir": resolve_model(options.model)}
    num_tokens = options.known + options.new + NUM_NEW
    if options.device != "cpu":
        settings |= {"max_step_tokens": 8192, "prefill_chunk_tokens": 8192}
        settings |= {"max_running_requests": 4, "max_context_tokens": num_tokens + 64}
    config = EngineConfig(
        **settings,
        dtype=options.dtype,
        kv_memory_bytes=options.memory_bytes,
        host_cache_bytes=options.memory_bytes if options.tier == "host" else 0,
        disk_cache_dir=folder / "pages" if options.tier == "disk" else None,
        load_back_threshold=0,
        load_by_layer="always",
    )
    bench = Bench(config)
    run.stack.callback(bench.close)
    layers, info = bench.engine.layers, bench.engine.info
    if options.tier == "store":
        process = store_process(folder, "--memory-bytes", str(options.memory_bytes))
        _, ready = run.stack.enter_context(process)
        bench.use_store(str(ready["address"]))
    run.keep(dtype=info.dtype, page_bytes=info.page_bytes, notices=info.notices)

    def fresh(count: int) -> list[int]:
        return [rng.randrange(info.vocab_size) for _ in range(count)]

    known = fresh(options.known)
    for end in range(_PRIMED_TOKENS, options.known + _PRIMED_TOKENS, _PRIMED_TOKENS):
        bench.ask(known[:end] + fresh(1))
        bench.settle()
    has_layers = layers is not None and (options.tier == "host" or options.device == "cpu")
    ways = [WHOLE, DEVICE]
    if has_layers:
        more = (with_copiers(count) for count in options.copiers)
        ways += [BY_LAYER, *more]

    def prompt_for(way: Way) -> list[int]:
        """A prompt, whose history is where the way has it."""
        if layers is not None:
            layers.policy = way.policy
        triton_pages.MAX_COPIERS = way.copiers
        if way is DEVICE:
            bench.ask(known + fresh(options.new))
        else:
            bench.engine.memory.flush_cache()
        bench.settle()
        return known + fresh(options.new)

    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(options.repeats + 1):
        rng.shuffle(ways)
        for way in ways:
            first_s, num_loaded = bench.ask(prompt_for(way))
            bench.settle()
            expected = 0 if way is DEVICE else options.known // info.page_size * info.page_size
            if num_loaded != expected:
                raise RuntimeError(f"{way.name}: {num_loaded} of {expected} tokens were loaded")
            if turn:  # The first turn warms up.
                times[way.name].append(first_s)
    rate = bench.engine.tier_policy.bytes_per_s(options.tier)
    for way, found in times.items():
        run.row(
            table=f"{options.known} tokens kept ({options.tier}), {options.new} new",
            way=way,
            first_token_s=spread(found),
            to_whole=ratio_of(found, times[WHOLE.name]),
            load_bytes_per_s=round(rate),
        )
    for way in ways if options.device != "cpu" else ():
        spans = timeline_of(partial(bench.ask, prompt_for(way), 1))
        bench.settle()
        for kind, figures in parts_of(spans).items():
            run.row(table="parts", way=way.name, kind=kind, **figures)


if __name__ == "__main__":
    sys.exit(harness.main())
