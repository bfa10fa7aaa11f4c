"""Decode and prefill speed of the engine on a GPU, against the roof of the same run.

    python bench/gpu_engine.py [--models llama-3.1-8b ...] [--batches 1 16 64 256]

Weights are made up, in the models' real shapes. The roof of a step is the longer of the times to
read its weights and KV once, at the copy rate measured here, and to multiply, at the rate of a
large product measured here. Tokens of the timed batches themselves are kept, and after each model's
timing some requests of each batch are compared with transformers in float32 on the same weights (a
token may differ where the two logits are within 4 bfloat16 steps, or twice what transformers itself
is off by in bfloat16). A changed tile of one weight must change the logits of a fixed step, which
are the same when nothing is changed.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clocks import release
from engine_runs import GREEDY, Batch, random_prompts, run_batch, run_requests
from gpu_reference import Answer, check_tokens
from gpu_roof import Rates, decode_work, kept_rates, mixed_seconds, prompt_work
from gpu_trace import Idle, Trace
from harness import Harness, Run, spread
from model_shapes import MODELS, write_config
from weft.checkpoint.config import ModelConfig
from weft.contract.request import SamplingParams
from weft.engine.executor.graphs import GraphBucket
from weft.engine.loop.llm import LLM
from weft.engine.model.layers.moe import SparseMLP
from weft.kernels.ops.greedy import greedy_rows

PROMPT_TOKENS, NEW_TOKENS = 512, 256
MAX_CONTEXT_TOKENS = 5120
NUM_MIXED = 256
MIXED_TOKENS = (142_827, 133_966)
"""Prompt and generated tokens, as in the other engines' runs."""
IDLE_BATCH, IDLE_STEPS = 64, 30
NUM_CHECKED = 2
"""Requests of each timed batch."""
NUM_FIXED = 4
"""Prompts of the step whose logits are compared."""
GPU_SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "dummy_weights": True,
    "max_context_tokens": MAX_CONTEXT_TOKENS,
    "max_step_tokens": 8192,
    "prefill_chunk_tokens": 4096,
    "prefix_cache": False,
    # As in other engines, prompts are bounded by tokens and not by the time that they add to steps.
    "inter_token_target_s": 1.0,
}
"""Settings of the engines that are measured on a GPU."""

harness = Harness(__file__, __doc__)
harness.flag("--models", nargs="+", choices=MODELS, default=list(MODELS))
harness.flag("--batches", nargs="*", type=int, default=[1, 16, 64, 256])
harness.flag("--eager", action="store_true", help="also without graphs")
harness.flag("--deterministic", action="store_true", help="and so once more")


@dataclass(slots=True)
class Decode:
    """Steady decode at one batch size."""

    batch: int
    graphs: bool
    tokens_per_s: float
    step_ms: float
    """Wall time of a step of the engine."""
    device_ms: float
    """Device time of a step's forward, LM head and greedy choice alone, enqueued without waiting in
    the middle of the run, where contexts have their mean length; 0 if eager.
    """
    host_ms: float
    """Host time of a step without waiting for the device, its duration if the device took no time:
    the median of the run's steps.
    """
    host_p90_ms: float
    roof_tokens_per_s: float
    share: float
    """Share of the roofline."""


@dataclass(slots=True)
class FixedStep:
    """Largest change of the logits of one step with the same prompts."""

    repeated: float
    """Time when it is repeated."""
    altered: float
    """Time with one tile of one weight changed."""
    tokens_repeated: bool
    """The tokens that follow were the same then."""
    tokens_altered: bool
    """Whether the tokens differed."""

    @property
    def is_sensitive(self) -> bool:
        """Whether repeating the step changes nothing and changing the weight does."""
        return self.tokens_repeated and self.tokens_altered and self.altered > 8 * self.repeated


def device_ms(llm: LLM, batch: int) -> float:
    """Time on the device of one decode step of a batch, done again and again in mid-run."""
    executor = llm.engine.parts.local
    known, inputs = executor.known.tokens, executor.inputs
    assert executor.graphs is not None
    assert inputs is not None
    graph, hidden = executor.graphs._graphs[GraphBucket(batch, batch, "decode")]
    times: list[float] = []

    @torch.inference_mode()
    def repeat_step(step: int) -> None:
        if abs(step - NEW_TOKENS // 2) > 3:
            return
        assert inputs.step is not None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The draw has replaced the step's input tokens. With these restored, the step writes the
        # same K and V to the same places again.
        drawn = known.clone()
        known[0, inputs.drawing_slots] = inputs.step.token_ids
        begin.record()
        for _ in range(10):
            graph.replay()
            greedy_rows(executor._model.logits(hidden))
        end.record()
        known.copy_(drawn)
        end.synchronize()
        times.append(begin.elapsed_time(end) / 10)

    run_batch(llm, batch, PROMPT_TOKENS, NEW_TOKENS, repeat_step)
    return statistics.median(times[1:])


def bench_idle(llm: LLM, batch: int) -> Idle | None:
    """Profiles the device in the middle of a batch's run."""
    traces: list[Trace] = []
    found: list[Idle | None] = []

    def watch(step: int) -> None:
        if step == 20:
            traces.append(Trace())
        elif step == 20 + IDLE_STEPS:
            found.append(traces.pop().end(IDLE_STEPS))

    run_batch(llm, batch, PROMPT_TOKENS, 40 + IDLE_STEPS, watch)
    return found[0]


def bench_decode(
    llm: LLM, config: ModelConfig, batch: int, rates: Rates, new_tokens: int
) -> tuple[Decode, Batch]:
    """Warms up, then takes the best of two runs; also that run."""
    run_batch(llm, batch, PROMPT_TOKENS, 8)
    best = min(
        (run_batch(llm, batch, PROMPT_TOKENS, new_tokens) for _ in range(2)),
        key=lambda run: run.seconds / run.num_steps,
    )
    step_s = best.seconds / best.num_steps
    host_median, host_p90 = (1e3 * np.quantile(best.host_s, share) for share in (0.5, 0.9))
    graphs = llm.engine.parts.local.graphs is not None
    context = PROMPT_TOKENS + new_tokens - best.num_steps / 2
    roof = batch / decode_work(config, batch, context).seconds(rates)
    tokens_per_s = batch / step_s
    on_device = device_ms(llm, batch) if graphs else 0.0
    row = Decode(
        batch=batch,
        graphs=graphs,
        tokens_per_s=tokens_per_s,
        step_ms=step_s * 1e3,
        device_ms=on_device,
        host_ms=float(host_median),
        host_p90_ms=float(host_p90),
        roof_tokens_per_s=roof,
        share=tokens_per_s / roof,
    )
    return row, best


def answers_of(run: Batch) -> list[Answer]:
    """Answers of a few requests of a run."""
    batch = len(run.prompts)
    chosen = random.Random(batch).sample(range(batch), min(NUM_CHECKED, batch))
    return [Answer(run.prompts[index], run.tokens[index]) for index in chosen]


def prompt_figures(
    llm: LLM, config: ModelConfig, rates: Rates, lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Time to the first token, and prompts beside each other."""
    for length in lengths:
        times = [run_batch(llm, 1, length, 2).first_token_s for _ in range(7)]
        roof_ms = 1e3 * prompt_work(config, [length]).seconds(rates)
        found = spread(times[2:], 1e3)
        yield {"what": f"first token of {length}", "ms": found, "share": roof_ms / found.median}
    times = [run_batch(llm, 8, 4096, 2).first_token_s for _ in range(3)]
    work = prompt_work(config, [4096] * 8)
    yield {"what": "prompts, 8 x 4096"} | rate_of(8 * 4096, min(times), work.seconds(rates))


def rate_of(tokens: int, seconds: float, roof_s: float) -> dict[str, float]:
    """Tokens a second beside the roof."""
    return {"tokens_per_s": tokens / seconds, "share": roof_s / seconds}


def mixed_requests() -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of new tokens, drawn as the peers' were."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(NUM_MIXED)
    ]
    return prompts, [rng.randint(100, 1024) for _ in range(NUM_MIXED)]


def mixed_figures(llm: LLM, config: ModelConfig, rates: Rates) -> dict[str, Any]:
    """Output of 256 requests of 100 to 1,024 tokens in and out, submitted at once."""
    prompts, new_tokens = mixed_requests()
    run = run_requests(llm, prompts, new_tokens, SamplingParams(temperature=0.6, seed=1))
    counts = (sum(map(len, prompts)), sum(map(len, run.tokens)))
    assert counts == MIXED_TOKENS, counts
    roof_s = mixed_seconds(config, list(zip(map(len, prompts), new_tokens, strict=True)), rates)
    return {"what": "256 mixed requests"} | rate_of(counts[1], run.all_seconds, roof_s)


def fixed_step(llm: LLM) -> FixedStep:
    """Does one step twice, and once more with a tile of one weight changed."""
    prompts = random_prompts(llm.engine.info.vocab_size, NUM_FIXED, PROMPT_TOKENS)
    logits, tokens = first_logits(llm, prompts)
    again, tokens_again = first_logits(llm, prompts)
    change_a_tile(llm)
    changed, tokens_changed = first_logits(llm, prompts)
    return FixedStep(
        repeated=float((again - logits).abs().max()),
        altered=float((changed - logits).abs().max()),
        tokens_repeated=tokens_again == tokens,
        tokens_altered=tokens_changed != tokens,
    )


def first_logits(llm: LLM, prompts: list[list[int]]) -> tuple[torch.Tensor, list[list[int]]]:
    """[prompts, vocab]: logits of prompts' last tokens; and what the engine generates."""
    executor, seen = llm.engine.parts.local, []
    launch = executor.launch

    def noted(step: Any) -> Any:
        launched = launch(step)
        if launched.logits is not None:
            seen.append(launched.logits.compute().float().clone())
        return launched

    executor.launch = noted  # type: ignore[method-assign]
    try:
        run = run_requests(llm, prompts, [32] * len(prompts), GREEDY)
    finally:
        executor.launch = launch  # type: ignore[method-assign]
    rows = torch.cat(seen)[: len(prompts)]
    assert len(rows) == len(prompts)
    return rows, run.tokens


def change_a_tile(llm: LLM) -> None:
    """Changes one tile of the second layer's last projection."""
    feed = llm.engine.parts.local._model.model.layers[1].feed  # type: ignore[attr-defined]
    if isinstance(feed, SparseMLP):
        feed.weight.experts.stacked[1][:, :256, :256].add_(0.5)
    else:
        feed.down_proj.data[:256, :256].add_(0.5)


def bench_model(run: Run, name: str, rates: Rates, deterministic: bool) -> None:
    """All measurements of one model."""
    options, batches = run.options, run.options.batches
    named = {"model": f"{name}{', deterministic' * deterministic}"}
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_config(Path(folder), name)
        config = ModelConfig.load(model_dir)
        settings = {
            **GPU_SETTINGS,
            "num_pages": 20_000,
            "max_running_requests": max([256, *batches]),
            "deterministic": deterministic,
        }
        if options.eager:
            with LLM(model_dir, **settings, cuda_graphs=False) as llm:
                for batch in (batch for batch in batches if batch <= 64):
                    run.row(
                        named,
                        table="decode",
                        **asdict(bench_decode(llm, config, batch, rates, 48)[0]),
                    )
            del llm
            release()
        with LLM(model_dir, **settings) as llm:
            graphs = llm.engine.parts.local.graphs
            assert graphs is not None
            gc.collect()
            gc.freeze()  # As workers do.
            captured = {"capture_s": graphs.capture_s, "graph_mib": graphs.num_bytes / 2**20}
            run.row(named, table="graphs", **captured)
            for batch in batches:
                row, done = bench_decode(llm, config, batch, rates, NEW_TOKENS)
                run.row(named, table="decode", **asdict(row))
                answers += answers_of(done)
            if IDLE_BATCH in batches and (idle := bench_idle(llm, IDLE_BATCH)) is not None:
                run.row(named, table="idle device", batch=IDLE_BATCH, **asdict(idle))
            for figures in prompt_figures(llm, config, rates, (512, 2048)):
                run.row(named, table="prompts", **figures)
            run.row(named, table="prompts", **mixed_figures(llm, config, rates))
            fixed = fixed_step(llm)
            run.row(named, table="logits of one step", **asdict(fixed))
        del llm, graphs
        release()
        agreement = check_tokens(model_dir, config, answers)
        run.row(named, table="tokens against float32", **asdict(agreement))
    release()
    if not agreement.is_close:
        run.fail(f"{name}: wrong tokens")
    if not fixed.is_sensitive:
        run.fail(f"{name}: {fixed}")


@harness.part
def engine(run: Run) -> None:
    """All models."""
    rates = kept_rates(run)
    modes = (False, True) if run.options.deterministic else (False,)
    for model, mode in itertools.product(run.options.models, modes):
        with run.noted(model):
            bench_model(run, model, rates, mode)


if __name__ == "__main__":
    sys.exit(harness.main())
