"""Time to the first token of a prompt whose beginning is known, by where its KV lies.

An engine in this process, with host memory, a disk and a KV store (a process of its own) below its
pool. Each sample is a prompt of fresh tokens. First another prompt with the same beginning runs,
then the tiers above the measured one are emptied, and the sample loads its pages from there,
whether that pays or not.
Every timed token is compared with those of the same prompt under another cache salt, which finds
nothing anywhere; that run is the cold one. With `--by-rule` the same follows by the engine's own
rule, which computes again where loading would be slower.

    python bench/tiers.py                    2,000 tokens, 80 % of them known, the demo model
    python bench/tiers.py --prompt 400 --repeats 1
    python bench/tiers.py --device cuda --shape llama-3.1-8b --memory-bytes 8589934592 --by-rule

Made-up weights (`--shape`) have near ties, which the rounding of a prompt that is computed in other
steps decides otherwise. There the tokens are compared with those of the same prompt whose known
part is in the pool: computed in the same steps, from KV that was never anywhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from harness import Harness, Run, ratio_of, spread
from model_shapes import MODELS, write_config
from weft.checkpoint.resolve import resolve_model
from weft.common.telemetry.spans import Tracer
from weft.common.worker.fill_client import FillClient
from weft.common.worker.frames import merge
from weft.common.worker.store_client import StoreClient
from weft.common.worker.store_replica import StoreReplica
from weft.contract.messages import Inbox, Outbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.contract.timeline import FillRecord
from weft.engine.base.config import EngineConfig
from weft.engine.loop.build import load_parts
from weft.engine.loop.engine import Engine

Row = Literal["cold", "device", "host", "disk", "store"]
ROWS: tuple[Row, ...] = ("device", "host", "disk", "store")
GOALS: dict[Row, float] = {"device": 3.5, "host": 3.0, "disk": 2.0, "store": 2.0}
NUM_NEW = 8
TIMEOUT_S = 300.0
MAX_TRIES = 3
SOURCES = {"host": "host", "disk": "disk", "store": "kvstore"}


@dataclass(frozen=True)
class Sample:
    """Measurement of one prompt."""

    row: Row
    first_token_s: float
    busy_s: float
    """Time spent in steps until then."""
    loaded_bytes: int
    load_s: float
    cold_s: float
    """Time of the same prompt without any cached prefix."""
    loaded_tokens: int
    """Number of cached tokens that were loaded; the rule may have had others computed again."""


class Links:
    """Does the work of a worker's server process for an engine, in a thread.

    Args:
        engine: The engine.
        store: host:port of the KV store.
        woken: Set when there is something for the engine.
    """

    def __init__(self, engine: Engine, store: str, woken: threading.Event) -> None:
        self._inboxes: SimpleQueue[Inbox] = SimpleQueue()
        self._woken = woken
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._open(engine, store))

    def send(self, inbox: Inbox) -> None:
        """Called by the clients with answers."""
        self._inboxes.put(inbox)
        self._woken.set()

    def add_answers(self, inbox: Inbox) -> None:
        """Adds what was answered since the last call."""
        while not self._inboxes.empty():
            merge(inbox, self._inboxes.get())

    def take(self, outbox: Outbox) -> None:
        """Carries out an engine's commands."""
        self._loop.call_soon_threadsafe(self._carry_out, outbox)

    def close(self) -> None:
        """Ends calls and the thread."""
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _open(self, engine: Engine, store: str) -> None:
        tracer = Tracer("bench", "bench", is_on=False, sample_ratio=0.0, max_spans=1)
        link: Any = self
        self._fills = FillClient(link)
        info, worker_id = engine.info, engine.config.worker_id
        replica = StoreReplica(self._fills, store, worker_id, info.epoch, info.page_bytes, tracer)
        self._store = StoreClient(link, [replica])

    async def _shut(self) -> None:
        await self._store.close()
        await self._fills.close()

    def _carry_out(self, outbox: Outbox) -> None:
        for command in outbox.fill_commands:
            self._fills.run(command)
        self._store.on_outbox(outbox)

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)


def greedy_submit(number: int, prompt: Sequence[int], max_tokens: int, salt: str = "") -> Submit:
    return Submit(
        gateway=1,
        request_id=str(number),
        attempt=1,
        prompt=list(prompt),
        sampling=SamplingParams(temperature=0.0),
        stop=StopCriteria(max_tokens=max_tokens, ignore_eos=True),
        candidates=[],
        cache_salt=salt,
    )


class Bench:
    """An engine with everything below its pool.

    Args:
        config: Of the engine.
        store: host:port of the KV store.
    """

    def __init__(self, config: EngineConfig, store: str) -> None:
        self._woken = threading.Event()
        self.engine = Engine(config, load_parts(config, wake=self._woken.set))
        self.links = Links(self.engine, store, self._woken)
        self._num_asked = 0

    def ask(self, prompt: Sequence[int], salt: str = "") -> tuple[list[int], float, float, Any]:
        """Tokens, time to the first one, time in steps until then, and the timeline."""
        self._num_asked += 1
        submit = greedy_submit(self._num_asked, prompt, NUM_NEW, salt)
        tokens: list[int] = []
        finished: list[Any] = []
        before, busy_s = self._busy_s(), 0.0
        inbox = Inbox(submits=[submit])
        deadline = time.monotonic() + TIMEOUT_S
        while not finished:
            outbox = self._turn(inbox)
            inbox = Inbox()
            for batch in outbox.gateways:
                if batch.failed:
                    raise RuntimeError(batch.failed[0].failure.message)
                for found in batch.all_tokens():
                    busy_s = busy_s or self._busy_s() - before
                    tokens += found.ids
                finished += batch.finished
            if time.monotonic() > deadline:
                raise TimeoutError("a prompt did not end")
        timeline = finished[0].timeline
        return tokens, timeline.first_token_s, busy_s, timeline

    @property
    def num_loaded_from_disk(self) -> int:
        """Number of pages loaded since the start."""
        assert self.engine.tiers is not None
        assert self.engine.tiers.disk is not None
        return self.engine.tiers.disk.counters.loaded_pages

    def settle(self) -> None:
        """Waits until all saves, puts and loads have ended."""
        self._until(lambda: self.engine.is_idle)

    def forget_above(self, row: Row) -> None:
        """Empties every place that is nearer than the one of this row."""
        tiers, places = self.engine.tiers, ROWS.index(row)
        assert tiers is not None
        assert tiers.disk is not None
        if places >= ROWS.index("host"):
            self.engine.memory.flush_cache()
        if places >= ROWS.index("disk"):
            tiers.host.flush()
        if places >= ROWS.index("store"):
            tiers.flush()
        self.settle()

    def close(self) -> None:
        """Stops the threads."""
        self.links.close()
        self.engine.close()

    def _turn(self, inbox: Inbox) -> Outbox:
        self._woken.clear()
        self.links.add_answers(inbox)
        outbox = self.engine.turn(inbox)
        self.links.take(outbox)
        if not self.engine.ran_step:
            self._woken.wait(0.001)
        return outbox

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self._turn(Inbox())
            if condition():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(str(self.engine.sizes()))

    def _busy_s(self) -> float:
        return self.engine.counters()["busy_us"] / 1e6

    def load_by_rule(self, is_on: bool) -> None:
        """Loads where that is faster; else always."""
        self.engine.tier_policy.load_back_threshold = None if is_on else 0

    @property
    def has_made_up_weights(self) -> bool:
        """Whether the weights are random, so that near-ties are to be expected."""
        return self.engine.config.dummy_weights


class WrongSource(RuntimeError):
    """The KV of a prompt did not come from the expected source."""


def sample_of(
    bench: Bench, row: Row, num_known: int, num_prompt: int, rng: random.Random
) -> Sample:
    """`measure`, again if a busy machine's store did not answer a lookup in its 80 ms."""
    for _ in range(MAX_TRIES - 1):
        try:
            return measure(bench, row, num_known, num_prompt, rng)
        except WrongSource as error:
            sys.stderr.write(f"{error}; once more\n")
    return measure(bench, row, num_known, num_prompt, rng)


def measure(
    bench: Bench,
    row: Row,
    num_known: int,
    num_prompt: int,
    rng: random.Random,
    *,
    is_by_rule: bool = False,
) -> Sample:
    """Measures one sample of a row.

    Raises:
        RuntimeError: A token is wrong.
        WrongSource: The KV did not come from the expected source, without `--by-rule`.
    """
    vocab = bench.engine.info.vocab_size

    def fresh(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    known = fresh(num_known)
    if row != "cold":
        bench.ask(known + fresh(num_prompt - num_known))
        bench.settle()
        bench.forget_above(row)
    prompt = known + fresh(num_prompt - num_known)
    bench.load_by_rule(is_by_rule)
    disk = bench.num_loaded_from_disk
    tokens, first_token_s, busy_s, timeline = bench.ask(prompt)
    fills: list[FillRecord] = timeline.fills
    num_pages = bench.num_loaded_from_disk - disk
    if not is_by_rule:
        check_source(bench, row, num_known, timeline.matched_tokens, fills, num_pages)
    right, cold_s, _, _ = bench.ask(prompt, salt=f"cold {rng.random()}")
    if bench.has_made_up_weights:
        salt = f"pool {rng.random()}"
        bench.ask(known + fresh(num_prompt - num_known), salt)
        right, _, _, _ = bench.ask(prompt, salt)
    if tokens != right and not (bench.has_made_up_weights and is_by_rule):
        raise RuntimeError(f"{row}: tokens {tokens}, and cold {right}")
    bench.settle()
    num_bytes = sum(fill.bytes for fill in fills)
    load_s = max((fill.end_s for fill in fills), default=0.0)
    load_s -= min((fill.start_s for fill in fills), default=0.0)
    loaded_tokens = sum(fill.accepted_tokens for fill in fills)
    return Sample(row, first_token_s, busy_s, num_bytes, load_s, cold_s, loaded_tokens)


def check_source(
    bench: Bench,
    row: Row,
    num_known: int,
    matched: int,
    fills: Sequence[FillRecord],
    num_disk_pages: int,
) -> None:
    """Raises WrongSource unless the known tokens came from where the row says.

    Some of the disk's may come by host memory, while their request waits for the store's answer.
    """
    size = bench.engine.config.page_size
    expected = num_known // size * size
    sources = {fill.source for fill in fills}
    if row == "disk" and num_disk_pages >= num_known // size:
        sources = {"disk"}
    found = sum(fill.accepted_tokens for fill in fills)
    if row == "device":
        found, sources = matched // size * size, set()
    if found != expected or sources != ({SOURCES[row]} if row in SOURCES else set()):
        raise WrongSource(f"{row}: {found} of {expected} tokens came from {sources}")


def start_store(folder: Path, memory_bytes: int) -> tuple[subprocess.Popen[bytes], str]:
    """A KV store in a process of its own, and its address."""
    ready = folder / "store.json"
    flags = ["--memory-bytes", str(memory_bytes), "--ready-file", str(ready), "--host", "127.0.0.1"]
    with (folder / "store.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.cli", "serve", "kvstore", *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((folder / "store.log").read_text())
        time.sleep(0.05)
    return process, json.loads(ready.read_text())["address"]


def samples_of(
    bench: Bench, rows: Sequence[Row], num_prompt: int, arguments: argparse.Namespace
) -> tuple[list[Sample], list[Sample]]:
    """Samples of all rows, in turns: always loaded, and by the rule.

    A place that never has all of a prompt (the store's queue of puts is bounded) has no row.
    """
    rng = random.Random()
    num_known = int(num_prompt * arguments.known)
    loaded: list[Sample] = []
    ruled: list[Sample] = []
    rows = list(rows)
    for turn in range(arguments.repeats + 1):
        for row in rows.copy():
            try:
                sample = sample_of(bench, row, num_known, num_prompt, rng)
            except WrongSource as error:
                print(f"{num_prompt} tokens: no row for {error}")
                rows.remove(row)
                continue
            if turn:  # The first turn warms up.
                loaded.append(sample)
    for _ in range(arguments.repeats if arguments.by_rule else 0):
        for row in rows:
            if row in SOURCES:
                ruled.append(measure(bench, row, num_known, num_prompt, rng, is_by_rule=True))
    return loaded, ruled


def config_of(arguments: argparse.Namespace, folder: Path) -> EngineConfig:
    """The engine's settings."""
    settings: dict[str, Any] = {}
    if arguments.shape:
        model_dir = folder / "model"
        model_dir.mkdir()
        settings |= {"model_dir": write_config(model_dir, arguments.shape), "dummy_weights": True}
    else:
        settings |= {"model_dir": resolve_model(arguments.model)}
    if arguments.device != "cpu":
        settings |= {"max_step_tokens": 8192, "prefill_chunk_tokens": 4096}
        settings |= {"max_running_requests": 16, "max_context_tokens": 32_768}
    return EngineConfig(
        **settings,
        device=arguments.device,
        dtype=arguments.dtype,
        kv_memory_bytes=arguments.memory_bytes,
        host_cache_bytes=arguments.memory_bytes,
        disk_cache_dir=folder / "disk",
        disk_cache_bytes=arguments.memory_bytes,
        load_back_threshold=0,
        has_store=True,
    )


harness = Harness(__file__, __doc__, repeats=5)
harness.flag("--model", default="demo", help="demo, or a model directory")
harness.flag("--shape", choices=MODELS, help="made-up weights of a known model's shape")
harness.flag("--device", default="cpu", help="torch device")
harness.flag("--dtype", default="auto", help="of weights and KV")
harness.flag("--prompt", type=int, nargs="*", default=[2000], help="tokens of a prompt")
harness.flag("--known", type=float, default=0.8, help="share of them that is known")
harness.flag("--rows", default=",".join(ROWS), help="of " + ", ".join(ROWS))
harness.flag("--by-rule", action="store_true", help="then as many by the engine's rule")
harness.flag("--memory-bytes", type=int, default=1 << 30, help="of each place")


@harness.part
def tiers(run: Run) -> None:
    """All places, in turns."""
    options = run.options
    rows = [row for row in ROWS if row in options.rows.split(",")]
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-tiers-")))
    process, address = start_store(folder, options.memory_bytes)
    run.stack.callback(process.wait, 30)
    run.stack.callback(process.terminate)
    bench = Bench(config_of(options, folder), address)
    run.stack.callback(bench.close)
    info = bench.engine.info
    run.keep(dtype=info.dtype, page_bytes=info.page_bytes, notices=info.notices)
    for num_prompt in options.prompt:
        loaded, ruled = samples_of(bench, rows, num_prompt, options)
        title = f"{num_prompt} tokens, {int(num_prompt * options.known)} of them known"
        show(run, title, loaded)
        for row in ROWS:
            of_row = [sample for sample in ruled if sample.row == row]
            if of_row:
                times = spread([sample.first_token_s for sample in of_row])
                tokens = [sample.loaded_tokens for sample in of_row]
                run.row(table=f"{title}, by the rule", kv_in=row, s=times, loaded_tokens=tokens)


def show(run: Run, title: str, samples: Sequence[Sample]) -> None:
    """A row for each place; ratios are within a sample."""
    run.row(table=title, kv_from="cold", first_token_s=spread([one.cold_s for one in samples]))
    for row in ROWS:
        of_row = [sample for sample in samples if sample.row == row]
        if not of_row:
            continue
        cold, first = [one.cold_s for one in of_row], [one.first_token_s for one in of_row]
        speeds = [one.loaded_bytes / one.load_s / 1e9 for one in of_row if one.load_s]
        goal = GOALS[row]
        if row == "device":
            # On a small prompt, or a large known share, the bound itself may be lower or higher.
            bound = ratio_of(cold, [one.busy_s for one in of_row])
            goal = max(goal, 0.8 * bound.median)
            run.note(f"bound of device: {bound}, cold over what was not known")
        run.row(
            {"kv_from": row, "first_token_s": spread(first), "faster": ratio_of(cold, first)},
            table=title,
            goal=goal,
            mb=of_row[0].loaded_bytes / 1e6,
            gb_per_s=spread(speeds) if speeds else None,
        )


if __name__ == "__main__":
    sys.exit(harness.main())
