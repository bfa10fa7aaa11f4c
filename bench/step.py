"""Host time of an engine step: everything but the model's arithmetic.

The model is a fake whose forward returns at once, so what remains is the engine's own work: taking
the inbox, scheduling, building the batch, drawing tokens, bookkeeping, the outbox and its encoding
for the server process. Beside it, what the server process pays to read that and to write it to the
gateway's Session.

    python bench/step.py                        1, 16, 64 and 256 running requests
    python bench/step.py --profile 64           where the time goes, by function
    python bench/step.py --vocab 49152          with a real vocabulary to draw from
    python bench/step.py --prompt-tokens 100    a prompt that begins in each step
    python bench/step.py --temperature 0.8 --frequency-penalty 0.5 --top-logprobs 2
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import Harness, Run, numbers, spread
from weft.common.worker.frames import HEADER, EngineMessages, frame, parse_from_engine
from weft.contract.layout import CacheLayout, PagedPlane
from weft.contract.messages import Inbox, Outbox
from weft.contract.reports import EngineInfo
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.decode.events import batch_to_proto
from weft.engine.base.config import EngineConfig
from weft.engine.executor.local import LocalExecutor
from weft.engine.features.constraints.constraints import Constraints
from weft.engine.loop.engine import Engine
from weft.engine.loop.flight import FlightRecorder
from weft.engine.loop.intake import Intake
from weft.engine.loop.parts import EngineComponents
from weft.engine.model.step import Step
from weft.engine.transfer.exchange import DirectExchange
from weft.engine.transfer.transport import Transport
from weft.kernels.ops.lora.spec import LoraStep
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree

PAGE_SIZE = 16
MAX_CONTEXT_TOKENS = 8192
DECODE_PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 1000
NUM_WARMUP_STEPS = 40
LAYOUT = CacheLayout.of_plane(PagedPlane(layers=1, heads=1, dim=8, dtype="float32"), PAGE_SIZE)


class FakeModel:
    """A model that returns the same logits at once, and notes when it was called."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn(max_rows, vocab_size, generator=generator)
        self._hidden = torch.zeros(max_rows, 1)
        parts = {"vision": None, "audio": None, "aligned_by": None}
        self.config: Any = SimpleNamespace(hidden_size=1, head="tokens", **parts)
        self.called_at_s = 0.0
        self.returned_at_s = 0.0

    def kv_layout(self, page_size: int) -> CacheLayout:
        """The shape of a page; nothing is ever written there."""
        return LAYOUT

    def forward(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """Returns zeros, [L, 1]."""
        self.called_at_s = time.perf_counter()
        hidden = self._hidden[: step.logits_rows.shape[0]]
        self.returned_at_s = time.perf_counter()
        return hidden

    def logits(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        """Returns logits, [L, vocab]."""
        logits = self._logits[: hidden.shape[0]]
        self.returned_at_s = time.perf_counter()
        return logits


@dataclass(slots=True)
class StepTimes:
    """Seconds of each timed step at one number of running requests."""

    num_running: int
    before: list[float] = field(default_factory=list)
    """Times of inbox, plan and batch."""
    after: list[float] = field(default_factory=list)
    """Drawing, bookkeeping, outbox."""
    encode: list[float] = field(default_factory=list)
    """The outbox as bytes for the server process."""

    server: list[float] = field(default_factory=list)
    """The server process: parsed, converted, serialised; not part of the step."""

    def totals(self) -> list[float]:
        """Times of whole steps."""
        return [sum(parts) for parts in zip(self.before, self.after, self.encode, strict=True)]


class Bench:
    """An engine around a fake model.

    Args:
        max_running: requests that run at once.
        vocab_size: length of a row of logits.
        sampling: how each request draws.
        num_threads: compute threads.
        is_overlapped: a step begins before the one before it is committed.
        top_logprobs: wanted of each token; None: no log-probabilities.
        prompt_tokens: of a prompt that begins, and ends, in each timed step; 0: none does.
    """

    def __init__(
        self,
        max_running: int,
        vocab_size: int,
        sampling: SamplingParams,
        num_threads: int,
        *,
        is_overlapped: bool = False,
        top_logprobs: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        torch.set_num_threads(num_threads)
        self._vocab_size = vocab_size
        self._sampling = sampling
        self._top_logprobs = top_logprobs
        self._prompt_tokens = prompt_tokens
        self._rng = random.Random(1)
        self._ids = itertools.count()
        # A request is committed as the next one begins, so there are two more.
        max_running += 2 * (prompt_tokens > 0)
        self.model = FakeModel(vocab_size, max_running)
        config = EngineConfig(
            model_dir=Path("fake"),
            transport="data",
            page_size=PAGE_SIZE,
            max_running_requests=max_running,
            max_step_tokens=max(512, max_running),
            overlap="on" if is_overlapped else "off",
        )
        num_pages = 2 + max_running * (MAX_CONTEXT_TOKENS // 8 // PAGE_SIZE)
        self.engine = Engine(config, self._parts(config, num_pages))
        # Every worker's engine has one.
        self._folder = tempfile.TemporaryDirectory()
        self.engine.flight = FlightRecorder(Path(self._folder.name) / "plan")

    def close(self) -> None:
        """Stops the engine's threads."""
        self.engine.close()
        self._folder.cleanup()

    def submit(self, num_prompt_tokens: int, max_tokens: int) -> Submit:
        """A request with a prompt of its own."""
        prompt = [self._rng.randrange(self._vocab_size) for _ in range(num_prompt_tokens)]
        return Submit(
            gateway=1,
            request_id=f"request-{next(self._ids):08d}",
            attempt=1,
            prompt=prompt,
            sampling=self._sampling,
            top_logprobs=self._top_logprobs,
            stop=StopCriteria(max_tokens=max_tokens, ignore_eos=True),
        )

    def turn(self, inbox: Inbox | None, times: StepTimes | None) -> Outbox:
        """Runs one turn of the engine and encodes its messages."""
        started_s = time.perf_counter()
        outbox = self.engine.turn(inbox)
        turned_s = time.perf_counter()
        encoded = frame(EngineMessages(outbox=outbox))
        if times is not None:
            times.encode.append(time.perf_counter() - turned_s)
            times.server.append(serve(encoded))
            times.before.append(self.model.called_at_s - started_s)
            times.after.append(turned_s - self.model.returned_at_s)
        return outbox

    def decode(self, num_running: int, num_steps: int) -> StepTimes:
        """Steps in which `num_running` requests get a token each."""
        times = StepTimes(num_running)
        # Lengths are spread so that in each step a sixteenth of the requests takes a new page.
        prompts = [DECODE_PROMPT_TOKENS + i % PAGE_SIZE for i in range(num_running)]
        max_tokens = NUM_WARMUP_STEPS + num_steps + num_running  # Admission takes several steps.
        self.turn(Inbox(submits=[self.submit(length, max_tokens) for length in prompts]), None)
        while len(self.engine.scheduler.running) < num_running:
            self.turn(None, None)
        for step in range(NUM_WARMUP_STEPS + num_steps):
            inbox: Inbox | None = None
            if self._prompt_tokens:
                inbox = Inbox(submits=[self.submit(self._prompt_tokens, 1)])
            self.turn(inbox, times if step >= NUM_WARMUP_STEPS else None)
        self._end_all()
        return times

    def prompt(self) -> float:
        """Seconds for a prompt of LONG_PROMPT_TOKENS, from submit to its first token."""
        inbox: Inbox | None = Inbox(submits=[self.submit(LONG_PROMPT_TOKENS, 1)])
        started_s = time.perf_counter()
        while not any(batch.finished for batch in self.turn(inbox, None).gateways):
            inbox = None
        took_s = time.perf_counter() - started_s
        self.engine.memory.flush_cache()
        return took_s

    def _end_all(self) -> None:
        self.turn_until_idle(Inbox(closed_gateways=[1]))
        self.engine.memory.flush_cache()

    def turn_until_idle(self, inbox: Inbox | None) -> None:
        """Turns until nothing is left."""
        while not (self.engine.is_idle and inbox is None):
            self.engine.turn(inbox)
            inbox = None

    def _parts(self, config: EngineConfig, num_pages: int) -> EngineComponents:
        executor = LocalExecutor(
            self.model,
            LAYOUT,
            num_pages,
            config.max_running_requests,
            MAX_CONTEXT_TOKENS,
            torch.device("cpu"),
            max_step_tokens=config.max_step_tokens,
        )
        digest = bytes(32)
        prefixes = PrefixTree(PAGE_SIZE)
        transport = Transport(config, DirectExchange(executor.pool_bytes), lambda: None)
        info = EngineInfo(
            epoch=1,
            model_digest=digest,
            dtype=LAYOUT.plane.dtype,
            weight_format=LAYOUT.plane.dtype,
            vocab_size=self._vocab_size,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            num_pages=num_pages - 1,
            page_size=PAGE_SIZE,
            page_bytes=LAYOUT.page_bytes,
            layers=LAYOUT.plane.layers,
            kv_heads=LAYOUT.plane.heads,
            head_dim=LAYOUT.plane.dim,
            transports=transport.transports,
            transport_detail=transport.describe(),
            versions={},
            notices=[],
            engine_pid=0,
        )
        return EngineComponents(
            executor=executor,
            local=executor,
            layout=LAYOUT,
            memory=PageMemory(num_pages, prefixes),
            prefixes=prefixes,
            intake=Intake(config, LAYOUT, digest, self._vocab_size, (), MAX_CONTEXT_TOKENS),
            constraints=Constraints(config, self._vocab_size, frozenset(), lambda: None),
            transport=transport,
            info=info,
        )


def serve(encoded: bytes) -> float:
    """Seconds that a decode server needs from an outbox on the socket to bytes for its gateway."""
    started_s = time.perf_counter()
    outbox = parse_from_engine(encoded[HEADER.size :]).outbox
    assert outbox is not None
    for batch in outbox.gateways:
        for event in batch_to_proto(batch, "decode-0", 0.0):
            event.SerializeToString()
    return time.perf_counter() - started_s


def profile(bench: Bench, num_running: int, num_steps: int, num_lines: int) -> None:
    """Prints the functions that take most of the time."""
    profiler = cProfile.Profile()
    profiler.enable()
    bench.decode(num_running, num_steps)
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(num_lines)


harness = Harness(__file__, __doc__)
harness.flag("--running", type=numbers, default=[1, 16, 64, 256], help="requests, by commas")
harness.flag("--steps", type=int, default=300, help="timed steps of each")
harness.flag("--vocab", type=int, default=1024, help="length of a row of logits")
harness.flag("--temperature", type=float, default=0.0, help="0 = greedy")
harness.flag("--frequency-penalty", type=float, default=0.0)
harness.flag("--top-logprobs", type=int, help="with log-probabilities, and so many more")
harness.flag("--prompt-tokens", type=int, default=0, help="of a prompt that begins in each step")
harness.flag("--threads", type=int, default=1, help="compute threads")
harness.flag("--overlap", action="store_true", help="as engines on a GPU run")
harness.flag("--profile", type=int, metavar="RUNNING", help="profile instead")
harness.flag("--lines", type=int, default=30, help="lines of the profile")


@harness.part
def steps(run: Run) -> None:
    """All numbers of running requests, and the first token of a long prompt."""
    options = run.options
    sampling = SamplingParams(
        temperature=options.temperature, frequency_penalty=options.frequency_penalty
    )
    bench = Bench(
        max([*options.running, options.profile or 1]),
        options.vocab,
        sampling,
        options.threads,
        is_overlapped=options.overlap,
        top_logprobs=options.top_logprobs,
        prompt_tokens=options.prompt_tokens,
    )
    run.stack.callback(bench.close)
    if options.profile:
        profile(bench, options.profile, options.steps, options.lines)
        return
    for count in options.running:
        times = bench.decode(count, options.steps)
        us = {
            name: spread(part, 1e6)
            for name, part in (
                ("plan_batch_us", times.before),
                ("draw_commit_us", times.after),
                ("encode_us", times.encode),
                ("step_us", times.totals()),
                ("server_us", times.server),
            )
        }
        us_a_request = us["step_us"].median / count
        run.row(us, table="host time of a step", running=count, us_a_request=us_a_request)
    first = spread([bench.prompt() for _ in range(10)], 1e6)
    run.row(table="first token", prompt_tokens=LONG_PROMPT_TOKENS, us=first)


if __name__ == "__main__":
    sys.exit(harness.main())
