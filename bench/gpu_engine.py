"""Decode and prefill speed of the engine on a GPU, against the roof of the same run.

    python bench/gpu_engine.py [--models llama-3.1-8b ...] [--batches 1 16 64 256] [--out DIR]

Weights are made up, in the models' real shapes. The roof of a step is the longer of the times to
read its weights and KV once, at the copy rate measured here, and to multiply, at the rate of a
large product measured here. Tokens of the timed batches themselves are kept, and after each model's
timing some requests of each batch are compared with transformers in float32 on the same weights (a
token may differ where the two logits are within 4 bfloat16 steps, or twice what transformers itself
is off by in bfloat16). A changed tile of one weight must change the logits of a fixed step, which
are the same when nothing is changed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_reference import Agreement, Answer, check_tokens
from gpu_roof import Rates, decode_work, measure_rates, mixed_seconds, prompt_work
from gpu_setup import describe_gpu
from gpu_trace import Idle, Trace, counted_waits
from model_shapes import MODELS, write_config
from weft.checkpoint.config import ModelConfig
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import GatewayBatch, Submit
from weft.engine.executor.graphs import GraphBucket
from weft.engine.loop.llm import LLM
from weft.engine.model.layers.moe import SparseMLP
from weft.kernels.greedy import greedy_rows

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
GREEDY = SamplingParams(temperature=0.0)


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
class Against:
    """A measurement beside its roof."""

    value: float
    roof: float
    share: float
    """Share of the roofline: value / roof for rates, roof / value for times."""


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


@dataclass(slots=True)
class Result:
    """All results of one model."""

    model: str
    deterministic: bool = False
    decode: list[Decode] = field(default_factory=list)
    idle: Idle | None = None
    """Idle time of the device at batch 64; None: not measured."""
    ttft_ms: dict[int, Against] = field(default_factory=dict)
    """Median time to the first token by prompt length."""
    prefill_tokens_per_s: Against | None = None
    """Prefill of 8 prompts of 4,096 tokens."""
    mixed_tokens_per_s: Against | None = None
    """Output of 256 requests sent at once, 100 to 1,024 tokens in and out, temperature 0.6."""
    mixed_tokens: tuple[int, int] = (0, 0)
    """Prompt and generated tokens."""
    capture_s: float = 0.0
    graph_mib: float = 0.0
    fixed_step: FixedStep | None = None
    agreement: Agreement = field(default_factory=Agreement)
    """Agreement of the timed batches' tokens with float32."""


@dataclass(slots=True)
class Run:
    """Tokens of a batch, and the time of its part in which all requests decoded."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    first_token_s: float = 0.0
    num_steps: int = 0
    seconds: float = 0.0
    host_s: list[float] = field(default_factory=list)
    """Of each of these steps the time not spent waiting for the device."""
    all_seconds: float = 0.0
    """Time until the last token of all requests."""

    def take(self, told: list[GatewayBatch]) -> None:
        """Takes the tokens out of `told`, and empties it."""
        for session in told:
            for tokens in session.all_tokens():
                self.tokens[int(tokens.request_id)].extend(tokens.ids)
        told.clear()


def random_prompts(vocab_size: int, batch: int, length: int) -> list[list[int]]:
    """The same for the same numbers, whatever was drawn before."""
    rng = random.Random(f"{batch} prompts of {length}")
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]


def run_batch(
    llm: LLM,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    on_decode: Callable[[int], None] = lambda step: None,
) -> Run:
    """Submits random prompts and turns the engine until all are done.

    `on_decode` is called after a step in which all requests decoded, with its number.
    """
    prompts = random_prompts(llm.engine.info.vocab_size, batch, prompt_tokens)
    return run_requests(llm, prompts, [new_tokens] * batch, GREEDY, on_decode)


def run_requests(
    llm: LLM,
    prompts: list[list[int]],
    new_tokens: Sequence[int],
    sampling: SamplingParams,
    on_decode: Callable[[int], None] = lambda step: None,
) -> Run:
    """`run_batch` of these prompts."""
    engine = llm.engine
    run = Run(prompts, [[] for _ in prompts])
    submits = [
        Submit(
            gateway=1,
            request_id=str(index),
            attempt=1,
            prompt=prompt,
            sampling=sampling,
            stop=StopCriteria(max_tokens=count, ignore_eos=True),
        )
        for index, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
    ]
    inbox: Inbox | None = Inbox(submits=submits)
    began = time.perf_counter()
    all_began: float | None = None
    num_done, busy_until = 0, 0.0
    told: list[GatewayBatch] = []
    with counted_waits() as waits:
        while num_done < len(prompts):
            outbox = engine.turn(inbox)
            inbox = None
            for session in outbox.gateways:
                assert not session.failed, session.failed
                num_done += len(session.finished)
            told += outbox.gateways
            if all_began is None:
                # From here on tokens are taken only at the end, since taking them would count as
                # host time.
                run.take(told)
            now = time.perf_counter()
            busy = now - waits.seconds
            if all_began is None:
                if all(run.tokens):
                    all_began = now
                    run.first_token_s = now - began
            elif num_done == 0:
                run.num_steps += 1
                run.seconds = now - all_began
                run.host_s.append(busy - busy_until)
                on_decode(run.num_steps)
            busy_until = busy
    run.all_seconds = time.perf_counter() - began
    run.take(told)
    return run


def device_ms(llm: LLM, batch: int) -> float:
    """Time on the device of one decode step of a batch, done again and again in mid-run."""
    executor = llm.engine._executor
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
) -> tuple[Decode, Run]:
    """Warms up, then takes the best of two runs; also that run."""
    run_batch(llm, batch, PROMPT_TOKENS, 8)
    best = min(
        (run_batch(llm, batch, PROMPT_TOKENS, new_tokens) for _ in range(2)),
        key=lambda run: run.seconds / run.num_steps,
    )
    step_s = best.seconds / best.num_steps
    host_median, host_p90 = (1e3 * np.quantile(best.host_s, share) for share in (0.5, 0.9))
    graphs = llm.engine._executor.graphs is not None
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


def answers_of(run: Run) -> list[Answer]:
    """Answers of a few requests of a run."""
    batch = len(run.prompts)
    chosen = random.Random(batch).sample(range(batch), min(NUM_CHECKED, batch))
    return [Answer(run.prompts[index], run.tokens[index]) for index in chosen]


def bench_prompts(
    llm: LLM, config: ModelConfig, rates: Rates, result: Result, lengths: Sequence[int]
) -> None:
    """Time to the first token, and prompts beside each other."""
    for length in lengths:
        times = [run_batch(llm, 1, length, 2).first_token_s for _ in range(7)]
        ms = 1e3 * statistics.median(times[2:])
        roof = 1e3 * prompt_work(config, [length]).seconds(rates)
        result.ttft_ms[length] = Against(ms, roof, roof / ms)
    times = [run_batch(llm, 8, 4096, 2).first_token_s for _ in range(3)]
    rate = 8 * 4096 / min(times)
    roof = 8 * 4096 / prompt_work(config, [4096] * 8).seconds(rates)
    result.prefill_tokens_per_s = Against(rate, roof, rate / roof)


def mixed_requests() -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of new tokens, drawn as the peers' were."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(NUM_MIXED)
    ]
    return prompts, [rng.randint(100, 1024) for _ in range(NUM_MIXED)]


def bench_mixed(llm: LLM, config: ModelConfig, rates: Rates, result: Result) -> None:
    """Measures 256 requests submitted at once."""
    prompts, new_tokens = mixed_requests()
    run = run_requests(llm, prompts, new_tokens, SamplingParams(temperature=0.6, seed=1))
    result.mixed_tokens = (sum(map(len, prompts)), sum(map(len, run.tokens)))
    assert result.mixed_tokens == MIXED_TOKENS, result.mixed_tokens
    rate = result.mixed_tokens[1] / run.all_seconds
    sizes = list(zip(map(len, prompts), new_tokens, strict=True))
    roof = result.mixed_tokens[1] / mixed_seconds(config, sizes, rates)
    result.mixed_tokens_per_s = Against(rate, roof, rate / roof)


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
    executor, seen = llm.engine._executor, []
    launch = executor.launch

    def noted(step: Any) -> Any:
        launched = launch(step)
        if launched.drawable is not None:
            seen.append(launched.drawable.logits().float().clone())
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
    feed = llm.engine._executor._model.model.layers[1].feed  # type: ignore[attr-defined]
    if isinstance(feed, SparseMLP):
        feed.weight.experts.stacked[1][:, :256, :256].add_(0.5)
    else:
        feed.down_proj.data[:256, :256].add_(0.5)


def bench_model(
    name: str, batches: Sequence[int], rates: Rates, has_eager: bool, deterministic: bool
) -> Result:
    """Runs all measurements of one model."""
    result = Result(name, deterministic)
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_config(Path(folder), name)
        config = ModelConfig.load(model_dir)
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "dummy_weights": True,
            "num_pages": 20_000,
            "max_context_tokens": MAX_CONTEXT_TOKENS,
            "max_running_requests": max([256, *batches]),
            "max_step_tokens": 8192,
            "prefill_chunk_tokens": 4096,
            "prefix_cache": False,
            "deterministic": deterministic,
            # Like the peers, prompts are bounded by tokens and not by the time that they add to
            # steps.
            "inter_token_target_s": 1.0,
        }
        if has_eager:
            with LLM(model_dir, **settings, cuda_graphs=False) as llm:
                for batch in (batch for batch in batches if batch <= 64):
                    result.decode.append(bench_decode(llm, config, batch, rates, 48)[0])
            del llm
            release()
        with LLM(model_dir, **settings) as llm:
            graphs = llm.engine._executor.graphs
            assert graphs is not None
            gc.collect()
            gc.freeze()  # As workers do.
            result.capture_s, result.graph_mib = graphs.capture_s, graphs.num_bytes / 2**20
            for batch in batches:
                row, run = bench_decode(llm, config, batch, rates, NEW_TOKENS)
                result.decode.append(row)
                answers += answers_of(run)
            if IDLE_BATCH in batches:
                result.idle = bench_idle(llm, IDLE_BATCH)
            bench_prompts(llm, config, rates, result, (512, 2048))
            bench_mixed(llm, config, rates, result)
            result.fixed_step = fixed_step(llm)
        del llm, graphs
        release()
        result.agreement = check_tokens(model_dir, config, answers)
    release()
    return result


def release() -> None:
    """Releases the memory of objects that went out of scope."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def report(result: Result) -> None:
    """Prints one model's table."""
    print(f"\n{result.model}{', deterministic' * result.deterministic}")
    print("batch  graphs     tok/s    step ms  device ms  host ms (p90)  roof tok/s  share")
    for row in result.decode:
        print(
            f"{row.batch:5}  {'yes' if row.graphs else 'no':6} {row.tokens_per_s:9.1f} "
            f"{row.step_ms:10.3f} {row.device_ms:10.3f} {row.host_ms:7.3f} {row.host_p90_ms:6.3f} "
            f"{row.roof_tokens_per_s:11.1f} {row.share:6.1%}"
        )
    for length, first in result.ttft_ms.items():
        print(f"first token of {length}: {first.value:.1f} ms ({first.share:.1%} of its roof)")
    for what, rate in (
        ("prefill 8 x 4096", result.prefill_tokens_per_s),
        ("256 mixed requests", result.mixed_tokens_per_s),
    ):
        if rate is not None:
            print(f"{what}: {rate.value:,.0f} tok/s ({rate.share:.1%} of {rate.roof:,.0f})")
    if (idle := result.idle) is not None:
        print(
            f"batch {IDLE_BATCH}, {idle.steps} steps: {idle.kernels_per_step:.0f} kernels a step, "
            f"idle {idle.share:.1%}, {idle.host_share:.1%} in gaps that the host leaves"
        )
    print(f"graphs: captured in {result.capture_s:.1f} s, {result.graph_mib:.0f} MiB")
    print(f"logits of one step: {result.fixed_step}")
    found = result.agreement
    print(
        f"{found.checked_tokens} tokens of {found.checked_requests} timed requests against "
        f"float32: {found.others} others, largest gap {found.largest_gap_ulps:.2f} bfloat16 "
        f"ulps (transformers in bfloat16: {found.peer_others}, "
        f"{found.peer_largest_gap_ulps:.2f})",
        flush=True,
    )


def write_json(
    folder: Path, setup: dict[str, Any], rates: Rates, results: Sequence[Result]
) -> None:
    """Writes gpu_engine.json."""
    content = {
        **setup,
        "copy_tb_s": rates.bytes_per_s / 1e12,
        "matmul_tflop_s": rates.flop_per_s / 1e12,
        "prompt_tokens": PROMPT_TOKENS,
        "max_context_tokens": MAX_CONTEXT_TOKENS,
        "results": [asdict(result) for result in results],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_engine.json").write_text(json.dumps(content, indent=1))


def main() -> None:
    """Runs the models and writes one table and one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--eager", action="store_true", help="also without graphs")
    parser.add_argument("--deterministic", action="store_true", help="and so once more")
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    setup = describe_gpu(arguments.commit)
    rates = measure_rates()
    release()
    print(
        f"{setup['device']}, torch {setup['torch']}: copy {rates.bytes_per_s / 1e12:.2f} TB/s, "
        f"products {rates.flop_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    results = []
    modes = (False, True) if arguments.deterministic else (False,)
    for model, mode in itertools.product(arguments.models, modes):
        results.append(bench_model(model, arguments.batches, rates, arguments.eager, mode))
        report(results[-1])
        if arguments.out:
            # Written after each model, so that a time limit does not lose earlier ones.
            write_json(arguments.out, setup, rates, results)
    for result in results:
        assert result.agreement.is_close, f"{result.model}: wrong tokens"
        assert result.fixed_step is not None
        assert result.fixed_step.is_sensitive, f"{result.model}: {result.fixed_step}"


if __name__ == "__main__":
    main()
