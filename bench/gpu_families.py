"""What kinds of layers beside the usual ones cost on a GPU, against roofs of the same run.

    python bench/gpu_families.py [--only latents engines load windows] [--models ...]

- latents: attention to latents at DeepSeek-V3's sizes. Decode steps as a share of the time to read
  the latents once at the copy rate; prompts as a share of the rate of a large product, counting the
  products of heads of 192 and 128 elements, whatever form computes them. Beside them FlashMLA,
  cuDNN and FlashAttention-3 where they are there.
- engines: decode steps of whole engines with made up weights as shares of their roofs in bytes
  (`gpu_roof`).
- load: gpt-oss-20b with experts in MXFP4 under many equal requests at once, from the first prompt
  to the last token, and which kernels its decode steps and prompts are made of.
- windows: how many requests of 32k tokens run at once in equal memory, with pages behind windows
  freed and with all kept; layers keep what those of the model do, and are narrow otherwise.

`--only warm` compiles the kernels of engines and load with models of few layers and with narrow
ones, and measures nothing.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from clocks import graph_us
from engine_runs import random_prompts, run_batch
from gpu_engine import GPU_SETTINGS
from gpu_hybrid import tell_kernels, told_kernels
from gpu_roof import Rates, decode_work, kept_rates, prompt_work
from harness import Harness, Run
from model_shapes import MODELS, write_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.latent_config import LatentConfig
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.executor import graphs
from weft.engine.loop.llm import LLM
from weft.engine.model.layers.latent import LatentAttention
from weft.engine.model.layers.rotary import Rotary
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention import latent_attention, own_attention, planned, read_latents
from weft.kernels.ops.latent_attention.reference import latent_attention_reference
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.norm import Norm

HEADS, RANK, ROPE, NOPE, VALUE, PAGE = 128, 512, 64, 128, 128, 64
DIM = RANK + ROPE
LAUNCHES = 8
ENGINES = ("deepseek-v3-3-layers", "gemma-3-12b", "gemma-3-27b", "glm-4.5-air-12-layers")
WINDOWS = {
    "gpt-oss-20b": (2, 2 << 30, 64),
    "gemma-3-12b": (6, 10 << 30, 24),
    "mistral-7b": (32, 32 << 30, 24),
}
"""Layers, in the model's own proportion; bytes of the pools; most running requests."""
LOAD, LENGTH = 256, 1024
LOADED, MXFP4 = "gpt-oss-20b", {"quant_method": "mxfp4"}
BATCHES = (1, 64)
NEW_TOKENS, PROMPT = 48, 2048
CONTEXT = 32_768
PROMPTS = ((2048, 0), (4096, 0), (1024, 8192), (2048, 8192), (4096, 4096))
"""Rows of a prompt and positions before them."""
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 1024,
    "num_local_experts": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "q_lora_rank": 64,
}
"""Fields of a configuration that change nothing of what attention does and keeps."""

Row = dict[str, Any]

harness = Harness(__file__, __doc__)
harness.flag("--models", nargs="+", choices=ENGINES, default=list(ENGINES))


def captured_s(run: Callable[[int], object], launches: int = LAUNCHES) -> float:
    """Median seconds of one of several launches, numbered, in a captured graph."""
    return graph_us([partial(run, number) for number in range(launches)]) / 1e6


def latent_step(rows: int, requests: int, context: int) -> AttentionMetadata:
    """Requests of equal lengths in pages of their own."""
    pages = -(-context // PAGE)
    table = torch.arange(1, 1 + requests * pages, dtype=torch.int32, device="cuda")
    of_each = rows // requests
    return AttentionMetadata(
        page_table=table.view(requests, pages),
        places=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        cu_q_lens=torch.arange(0, rows + 1, of_each, dtype=torch.int32, device="cuda"),
        kv_lens=torch.full((requests,), context, dtype=torch.int32, device="cuda"),
        max_q_len=of_each,
        max_kv_len=context,
    )


def largest_error(
    q: torch.Tensor, pool: torch.Tensor, spec: LatentSpec, step: AttentionMetadata
) -> float:
    """Of the first two requests, against eager torch in float32, relative to the largest value."""
    rows = int(step.cu_q_lens[2] if len(step.kv_lens) > 1 else step.cu_q_lens[1])
    some = step._replace(
        page_table=step.page_table[:2], cu_q_lens=step.cu_q_lens[:3], kv_lens=step.kv_lens[:2]
    )
    exact = latent_attention_reference(q[:rows].float(), pool.float(), 0, spec, some)
    found = latent_attention(q, pool, 0, spec, step)[:rows].float()
    return float((found - exact).abs().max() / exact.abs().max())


def decode_row(batch: int, context: int, rates: Rates) -> Row:
    """One decode step's attention to latents."""
    step, spec = latent_step(batch, batch, context), LatentSpec(HEADS, RANK, 0.07)
    pages = int(step.page_table.max()) + 1
    # As many layers as do not fit the L2 cache together.
    layers = max(1, min(LAUNCHES, (1 << 30) // (pages * PAGE * DIM * 2)))
    pool = torch.randn(pages, 1, layers, 1, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    roof = batch * context * DIM * 2 / rates.bytes_per_s
    flop = 2 * batch * context * HEADS * (DIM + RANK)
    row: Row = {"what": "latent decode", "batch": batch, "context": context, "roof_us": 1e6 * roof}
    own = captured_s(lambda n: latent_attention(q, pool, n % layers, spec, step))
    row |= {"us": 1e6 * own, "share": roof / own, "tflop_s": flop / own / 1e12}
    if batch * context <= 1 << 19:
        row["error"] = largest_error(q, pool[:, :, :1], spec, step)
    with noting(row, "flash_mla"):
        made = planned(step, q.dtype, spec, batch, pool)
        if made.latents is None:
            raise ImportError("FlashMLA is not installed")

        def flash(number: int) -> torch.Tensor:
            return latent_attention(q, pool, number % layers, spec, made)

        same = latent_attention(q, pool, 0, spec, step).float() - flash(0).float()
        theirs = captured_s(flash)
        row |= {"flash_mla_us": 1e6 * theirs, "flash_mla_share": roof / theirs}
        row["flash_mla_differs"] = float(same.abs().max())
    return row


@contextmanager
def noting(row: Row, what: str) -> Iterator[None]:
    """Notes in a row why a package cannot be measured beside."""
    try:
        yield
    except Exception as error:
        row[what] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:160]}"


def latent_layer() -> LatentAttention:
    """A layer of attention with random projections of heads; others are not used."""
    sizes = LatentConfig(q_rank=1536, kv_rank=RANK, nope_dim=NOPE, rope_dim=ROPE, value_dim=VALUE)
    to_keys, to_values = (
        torch.randn(HEADS, *shape, device="cuda").bfloat16() / 16
        for shape in ((NOPE, RANK), (RANK, VALUE))
    )
    other = LinearWeight(1, 1, torch.bfloat16, False, PlainForm(to_keys[0, :1, :1]), None)
    norm = Norm(to_keys[0, 0], 1e-6)
    rotary = Rotary(torch.zeros(1, ROPE, device="cuda"), ROPE // 2)
    return LatentAttention(
        sizes, 0, rotary, 0.07, down_proj=other, q_norm=norm, q_proj=other, kv_norm=norm,
        absorbed=(to_keys, to_values), o_proj=other,
    )  # fmt: skip


def prompt_row(length: int, before: int, rates: Rates) -> Row:
    """One prompt's rows, some positions behind its beginning: with the projections between latents
    and heads, whose products are counted where the row says so.
    """
    layer, total = latent_layer(), before + length
    step = latent_step(length, 1, total)._replace(is_cold=before == 0, num_earlier=before)
    positions = torch.arange(before, total, device="cuda")
    step = step._replace(
        places=step.page_table[0].long()[positions // PAGE] * PAGE + positions % PAGE
    )
    pool = torch.randn(-(-total // PAGE) + 1, 1, 1, 1, PAGE, DIM, device="cuda").bfloat16()
    q = torch.randn(length, HEADS, NOPE + ROPE, device="cuda", dtype=torch.bfloat16)
    attended = length * before + length * (length + 1) / 2
    flop = 2 * attended * HEADS * (NOPE + ROPE + VALUE)
    row: Row = {"what": "latent prompt", "rows": length, "before": before}

    def absorbed(step: AttentionMetadata) -> torch.Tensor:
        mixed = latent_attention(layer._absorb(q), pool, 0, layer.spec, step)
        return layer._values(mixed)

    made = planned(step, q.dtype, layer.spec, length, pool)
    found: dict[str, Callable[[], torch.Tensor]] = {"absorbed": lambda: absorbed(step)}
    if made.latents is not None:
        found["flash_mla"] = lambda: absorbed(made)
    if layer._takes_heads(q.dtype, length, made):
        latents = layer._own_heads(read_latents(pool, 0, layer.spec, step.places, pool.dtype))
        found["heads"] = lambda: layer._by_heads(q, made, pool)
        if before:
            own = planned(step._replace(num_earlier=None), q.dtype, layer.spec, length, pool)
            found["own_heads"] = lambda: layer._by_heads(q, own, pool)
        found["attention"] = lambda: own_attention(q, *latents, step.cu_q_lens, 0.07)[0]
        found["projections"] = lambda: layer._own_heads(
            read_latents(pool, 0, layer.spec, step.places, pool.dtype)
        )[0]
    exact = found["absorbed"]().float()
    for name, call in found.items():
        seconds = captured_s(lambda _, call=call: call(), 1)
        row |= {f"{name}_us": 1e6 * seconds, f"{name}_share": flop / seconds / rates.flop_per_s}
        if name == "heads":
            both = flop + 2 * total * HEADS * RANK * (NOPE + VALUE)
            row["heads_and_projections_share"] = both / seconds / rates.flop_per_s
        if name in ("flash_mla", "heads", "own_heads"):
            difference = (call().float() - exact).abs().max()
            row[f"{name}_differs"] = float(difference / exact.abs().max())
    if before:
        return row
    shape = (1, HEADS, length)
    heads = [
        torch.randn(*shape, dim, device="cuda", dtype=torch.bfloat16)
        for dim in (NOPE + ROPE, NOPE + ROPE, VALUE, NOPE + ROPE)
    ]
    for name, value in (("cudnn", heads[2]), ("cudnn_192", heads[3])):
        with noting(row, name), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            seconds = captured_s(
                lambda _, v=value: F.scaled_dot_product_attention(*heads[:2], v, is_causal=True), 1
            )
            row |= {f"{name}_us": 1e6 * seconds, f"{name}_tflop_s": flop / seconds / 1e12}
    with noting(row, "fa3"):
        q3, k3, v3, w3 = (part[0].transpose(0, 1).contiguous() for part in heads)
        import fa3_fwd._C  # noqa: F401

        bounds = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        for name, value in (("fa3", v3), ("fa3_192", w3)):
            out = torch.empty_like(value)

            def flash(_: int, v: torch.Tensor = value, out: torch.Tensor = out) -> None:
                torch.ops.fa3_fwd.fwd(
                    q3, k3, v, out=out, cu_seqlens_q=bounds, cu_seqlens_k=bounds,
                    max_seqlen_q=length, max_seqlen_k=length, softmax_scale=0.07, is_causal=True,
                    num_splits=1,
                )  # fmt: skip

            with noting(row, name):
                seconds = captured_s(flash, 1)
                row |= {f"{name}_us": 1e6 * seconds, f"{name}_tflop_s": flop / seconds / 1e12}
    return row


def engine_settings(model: str) -> dict[str, Any]:
    """Settings of an engine: a graph for each batch, and one for prompts."""
    return {
        **GPU_SETTINGS,
        "num_pages": 64 * 40,
        "max_context_tokens": 4096,
        "max_running_requests": max(BATCHES),
        "max_step_tokens": 2048,
        "prefill_chunk_tokens": 2048,
        # FlashMLA's.
        **({"page_size": PAGE} if "kv_lora_rank" in MODELS[model] else {}),
    }


@contextmanager
def few_buckets() -> Iterator[None]:
    """Captures the steps that are measured, and no others."""

    def decode_buckets(max_requests: int) -> list[graphs.GraphBucket]:
        return [graphs.GraphBucket(size, size, "decode") for size in BATCHES]

    def ragged_buckets(
        max_requests: int, max_tokens: int, max_drafts: int = 0
    ) -> list[graphs.GraphBucket]:
        return [graphs.GraphBucket(max_tokens, max_requests, "ragged")]

    with (
        mock.patch.object(graphs, "decode_buckets", decode_buckets),
        mock.patch.object(graphs, "ragged_buckets", ragged_buckets),
    ):
        yield


def engine_rows(model: str, rates: Rates) -> Iterator[Row]:
    """Decode steps of one model."""
    with tempfile.TemporaryDirectory() as folder, few_buckets():
        config = ModelConfig.load(write_config(Path(folder), model))
        began = time.perf_counter()
        with LLM(Path(folder), **engine_settings(model)) as llm:
            start_s = time.perf_counter() - began
            gc.collect()
            gc.freeze()
            for batch in BATCHES:
                run_batch(llm, batch, 512, 8)
                runs = [run_batch(llm, batch, 512, NEW_TOKENS) for _ in range(2)]
                run = min(runs, key=lambda run: run.seconds / run.num_steps)
                step_s = run.seconds / run.num_steps
                work = decode_work(config, batch, 512 + NEW_TOKENS - run.num_steps / 2)
                roof = work.seconds(rates)
                yield {
                    "what": "engine",
                    "model": model,
                    "layers": config.num_layers,
                    "batch": batch,
                    "step_ms": 1e3 * step_s,
                    "host_ms": 1e3 * statistics.median(run.host_s),
                    "tokens_per_s": batch / step_s,
                    "roof_ms": 1e3 * roof,
                    "share": roof / step_s,
                    "start_s": start_s,
                }
            first_s = min(run_batch(llm, 1, PROMPT, 2).first_token_s for _ in range(4))
            roof = prompt_work(config, [PROMPT]).seconds(rates)
            yield {
                "what": "engine prompt",
                "model": model,
                "rows": PROMPT,
                "ms": 1e3 * first_s,
                "share": roof / first_s,
            }
        gc.unfreeze()


def load_settings(model: str) -> dict[str, Any]:
    """Settings of an engine for LOAD requests at once."""
    return engine_settings(model) | {
        "num_pages": LOAD * (2 * LENGTH // 16 + 2),
        "max_running_requests": LOAD,
        "max_step_tokens": 8192,
        "prefill_chunk_tokens": 4096,
    }


def load_row(model: str) -> Row:
    """LOAD requests at once, each with LENGTH tokens in and as many out."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), model, quantization_config=MXFP4)
        began = time.perf_counter()
        with LLM(path, **load_settings(model)) as llm:
            start_s = time.perf_counter() - began
            gc.collect()
            gc.freeze()
            run_batch(llm, LOAD, 64, 8)
            run = run_batch(llm, LOAD, LENGTH, LENGTH)
            tell_decodes(llm, LOAD, 3 * LENGTH // 2)
            told_kernels(partial(run_batch, llm, 16, LENGTH, 1), f"{16 * LENGTH} of prompts", 1)
        gc.unfreeze()
    return {
        "what": "load",
        "model": model,
        "requests": LOAD,
        "tokens_in": LENGTH,
        "tokens_out": LENGTH,
        "seconds": run.all_seconds,
        "tokens_per_s": LOAD * LENGTH / run.all_seconds,
        "first_token_s": run.first_token_s,
        "decode_steps": run.num_steps,
        "decode_ms": 1e3 * run.seconds / run.num_steps,
        "host_ms": 1e3 * statistics.median(run.host_s),
        "start_s": start_s,
    }


def tell_decodes(llm: LLM, batch: int, context: int) -> None:
    """Prints the kernels of decode steps of so many requests with such contexts."""
    taken, (first, last) = profile(activities=[ProfilerActivity.CUDA]), (4, 20)

    def on_decode(step: int) -> None:
        if step == first:
            torch.cuda.synchronize()
            taken.start()
        if step == last:
            torch.cuda.synchronize()
            taken.stop()

    # Of prompts that come first some tokens are taken while others are computed.
    run_batch(llm, batch, context, 160, on_decode)
    tell_kernels(taken, f"{batch} x {context}", last - first)


def most_at_once(model: str, mode: str) -> Row:
    """Requests of CONTEXT tokens that have their whole prompts in pages at the same time."""
    given = MODELS[model]
    layers, pool_bytes, max_requests = WINDOWS[model]
    narrow: dict[str, Any] = {name: value for name, value in NARROW.items() if name in given}
    narrow["num_attention_heads"] = given["num_key_value_heads"]
    narrow["num_hidden_layers"] = layers
    if "layer_types" in given:
        narrow["layer_types"] = given["layer_types"][:layers]
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), model, **narrow)
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "dummy_weights": True,
            "kv_memory_bytes": pool_bytes,
            "max_context_tokens": CONTEXT,
            "max_running_requests": max_requests,
            "max_step_tokens": 8192,
            "prefill_chunk_tokens": 8192,
            "cuda_graphs": False,
            "window_pages": mode,
            "inter_token_target_s": 60.0,
        }
        with LLM(path, **settings) as llm:
            engine = llm.engine
            prompts = random_prompts(1024, max_requests, CONTEXT - 600)
            stop = StopCriteria(max_tokens=500, ignore_eos=True)
            submits = [
                Submit(
                    gateway=1, request_id=str(n), attempt=1, prompt=prompt,
                    sampling=SamplingParams(temperature=0.0), stop=stop,
                )
                for n, prompt in enumerate(prompts)
            ]  # fmt: skip
            inbox: Inbox | None = Inbox(submits=submits)
            most, done = 0, 0
            deadline = time.perf_counter() + 25
            while not done and time.perf_counter() < deadline:
                outbox = engine.turn(inbox)
                inbox = None
                done += sum(len(each.finished) for each in outbox.gateways)
                most = max(most, len(engine.scheduler.running))
            counts = [memory.counts() for memory in engine.memories]
            groups = [group.page_bytes(16) for group in engine.parts.layout.groups]
    return {
        "what": "windows",
        "model": model,
        "layers": layers,
        "pages": mode,
        "requests": most,
        "finished": done,
        "room": (counts[0].total - 1) // -(-CONTEXT // 16),
        "total_pages": [each.total for each in counts],
        "page_bytes": groups,
    }


def warm_load(model: str) -> None:
    """Compiles what an engine under load launches."""
    few = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), model, quantization_config=MXFP4, **few)
        with LLM(path, **load_settings(model)) as llm:
            run_batch(llm, LOAD, 64, 8)


def warm_engine(model: str) -> None:
    """Compiles what an engine of the model launches."""
    given = MODELS[model]
    few: dict[str, Any] = {"num_hidden_layers": 2}
    if "layer_types" in given:
        few["layer_types"] = ["sliding_attention", "full_attention"]
    narrow = {name: value for name, value in NARROW.items() if name in given}
    for changed in (few, narrow):
        with tempfile.TemporaryDirectory() as folder, few_buckets():
            path = write_config(Path(folder), model, **changed)
            with LLM(path, **(engine_settings(model) | {"num_pages": 300})) as llm:
                run_batch(llm, 1, 512, 4)
        gc.collect()
        torch.cuda.empty_cache()


@harness.part
def latents(run: Run) -> None:
    """Attention to latents."""
    rates = kept_rates(run)
    for batch in (1, 64, 256):
        for context in (2048, 8192):
            run.row(decode_row(batch, context, rates), table="latents, decode")
    for length, before in PROMPTS:
        run.row(prompt_row(length, before, rates), table="latents, prompts")


@harness.part
def engines(run: Run) -> None:
    """Whole engines."""
    rates = kept_rates(run)
    for model in run.options.models:
        for row in engine_rows(model, rates):
            run.row(row, table=row["what"])
        torch.cuda.empty_cache()


@harness.part
def load(run: Run) -> None:
    """gpt-oss-20b under many requests at once."""
    run.row(load_row(LOADED), table="load")


@harness.part
def windows(run: Run) -> None:
    """Requests that fit, with pages behind windows freed and kept."""
    for model in WINDOWS:
        for mode in ("auto", "keep"):
            run.row(most_at_once(model, mode), table="windows")
            torch.cuda.empty_cache()


@harness.part_if_named
def warm(run: Run) -> None:
    """Compiles what the other parts launch."""
    for model in run.options.models:
        warm_engine(model)
    warm_load(LOADED)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(harness.main())
