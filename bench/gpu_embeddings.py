"""Embeddings a second on a GPU beside sentence-transformers, and the latency of short ones.

Both get the same texts and the same random weights in bfloat16, and their vectors are compared.
Latency is measured at the engine: documents of 32 tokens come at random times (a Poisson process),
half as many a second as the engine embeds when it gets all at once.

    python bench/gpu_embeddings.py [--shapes bge-m3 qwen3-0.6b]

Needs the package sentence-transformers.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from clocks import release
from embedder_shapes import SHAPES, random_texts, write_model
from gpu_engine import GPU_SETTINGS
from gpu_roof import matmul_rate
from harness import Harness, Run, timed
from tokenizers import Tokenizer
from transformers import AutoConfig
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM, NO_TIMEOUT_S

LONG, SHORT = 512, 32
"""Tokens of a document."""
NUM_PEER = 512
"""Documents that sentence-transformers gets."""
EMBEDDING = PoolingParams(output="embedding")

harness = Harness(__file__, __doc__)
harness.flag("--shapes", nargs="+", choices=SHAPES, default=["bge-m3", "qwen3-0.6b"])
harness.flag("--documents", type=int, default=1024, help="of 512 tokens")
harness.flag("--step-tokens", type=int, default=8192)
harness.flag("--rounds", type=int, default=2)
harness.flag("--layers", type=int, help="fewer than the shape's, to try it")
harness.flag("--no-peer", action="store_true", help="without sentence-transformers")
harness.flag("--no-graphs", action="store_true")


@dataclass(slots=True, kw_only=True)
class Result:
    """Results of one shape."""

    shape: str
    documents_per_s: float
    """Of 512 tokens."""
    share: float
    """Share of the matrix product's rate that this is."""
    peer_per_s: float
    """The same of sentence-transformers; 0: not measured."""
    least_cosine: float
    """Least cosine between vectors of both; 0: not measured."""
    short_per_s: float
    """Documents of 32 tokens a second, all sent at once."""
    p50_ms: float
    """Median latency of these at half this rate."""
    p99_ms: float
    load_s: float
    """Seconds to load and capture."""


def flop_of_token(folder: Path, tokens: int) -> float:
    """Floating-point operations of one token's products and attention."""
    config = AutoConfig.from_pretrained(folder)
    hidden, heads = config.hidden_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    is_decoder = config.model_type == "qwen3"
    products = hidden * dim * (2 * heads + 2 * kv_heads)
    products += hidden * config.intermediate_size * (3 if is_decoder else 2)
    attention = 2 * heads * dim * tokens * (0.5 if is_decoder else 1.0)
    return float(2 * config.num_hidden_layers * (products + attention))


def embed(llm: LLM, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """[prompts, width]: their vectors."""
    return np.stack([one[0] for one in llm.pool(prompts, EMBEDDING)])


def best_rate(llm: LLM, prompts: Sequence[Sequence[int]], rounds: int) -> tuple[np.ndarray, float]:
    """Vectors, and the largest number of documents a second of some rounds."""
    vectors = embed(llm, prompts)
    times = [timed(lambda: embed(llm, prompts)) for _ in range(rounds)]
    return vectors, len(prompts) / min(times)


def latencies_ms(llm: LLM, prompts: Sequence[Sequence[int]], rate: float) -> list[float]:
    """Milliseconds of each document, which come at random times, `rate` a second."""
    gaps = np.random.default_rng().exponential(1 / rate, len(prompts))
    due = np.cumsum(gaps)
    ended: dict[str, float] = {}
    sent, began = 0, time.perf_counter()
    while len(ended) < len(prompts):
        now, new = time.perf_counter() - began, []
        while sent < len(prompts) and due[sent] <= now:
            new.append(submit(sent, prompts[sent]))
            sent += 1
        outbox = llm.engine.turn(Inbox(submits=new) if new else None)
        for batch in outbox.gateways:
            assert not batch.failed
            now = time.perf_counter() - began
            ended |= {finished.request_id: now for finished in batch.finished}
    return [1e3 * (ended[f"late-{i}"] - due[i]) for i in range(len(prompts))]


def submit(number: int, prompt: Sequence[int]) -> Submit:
    """A document as a gateway sends it."""
    return Submit(
        gateway=0,
        request_id=f"late-{number}",
        attempt=1,
        prompt=list(prompt),
        sampling=SamplingParams(temperature=0.0),
        stop=StopCriteria(),
        pool=EMBEDDING,
        first_token_timeout_s=NO_TIMEOUT_S,
        total_timeout_s=NO_TIMEOUT_S,
    )


def measure_peer(folder: Path, texts: Sequence[str]) -> tuple[np.ndarray, float]:
    """Vectors by sentence-transformers, and its documents a second, with the best batch size."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cuda", model_kwargs={"dtype": torch.bfloat16})
    model.encode(list(texts[:64]), batch_size=64)
    rates, vectors = [], np.zeros(0)
    for size in (32, 128):
        began = time.perf_counter()
        vectors = model.encode(list(texts), batch_size=size, convert_to_numpy=False)
        torch.cuda.synchronize()
        rates.append(len(texts) / (time.perf_counter() - began))
    vectors = torch.stack(list(vectors)).float().cpu().numpy()
    del model
    release()
    return vectors, max(rates)


def measure(shape: str, folder: Path, options: argparse.Namespace, roof: float) -> Result:
    """All figures of one shape."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = random_texts(options.documents, LONG, LONG)
    prompts = [one.ids for one in tokenizer.encode_batch(texts)]
    short = [one.ids for one in tokenizer.encode_batch(random_texts(4000, SHORT, SHORT))]
    peer, peer_rate = (
        (np.zeros(0), 0.0) if options.no_peer else measure_peer(folder, texts[:NUM_PEER])
    )
    began = time.perf_counter()
    settings = {
        **GPU_SETTINGS,
        "dummy_weights": False,
        "max_running_requests": 512,
        "max_step_tokens": options.step_tokens,
        "prefill_chunk_tokens": options.step_tokens,
        "max_context_tokens": 1024,
        "num_pages": 256 * LONG // 16 + 1024,
        "max_waiting_requests": 8192,
        "cuda_graphs": not options.no_graphs,
    }
    with LLM(folder, **settings) as llm:
        load_s = time.perf_counter() - began
        # As a worker's process does, which is not to stop for what lives as long as it does.
        gc.collect()
        gc.freeze()
        embed(llm, prompts[: len(prompts) // 2])
        vectors, rate = best_rate(llm, prompts, options.rounds)
        embed(llm, short[:300])
        _, short_rate = best_rate(llm, short, options.rounds)
        latencies_ms(llm, short[:500], short_rate / 2)
        gc.collect()
        late = latencies_ms(llm, short, short_rate / 2)
    release()
    cosine = 0.0
    if len(peer):
        vectors = vectors[: len(peer)]
        cosine = float(((vectors * peer).sum(1) / np.linalg.norm(peer, axis=1)).min())
    return Result(
        shape=shape,
        documents_per_s=rate,
        share=rate * LONG * flop_of_token(folder, LONG) / roof,
        peer_per_s=peer_rate,
        least_cosine=cosine,
        short_per_s=short_rate,
        p50_ms=float(np.percentile(late, 50)),
        p99_ms=float(np.percentile(late, 99)),
        load_s=load_s,
    )


@harness.part
def embeddings(run: Run) -> None:
    """All shapes."""
    options, roof = run.options, matmul_rate()
    run.keep(matmul_flop_per_s=roof)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write_model(shape, folder, layers=options.layers, dtype=torch.bfloat16, device="cuda")
            run.row(measure(shape, folder, options, roof))


if __name__ == "__main__":
    sys.exit(harness.main())
