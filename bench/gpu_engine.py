"""Decode and prefill speed of the engine on a GPU, against the roof of the same run.

    python bench/gpu_engine.py [--models llama-3.1-8b ...] [--batches 1 16 64 256] [--out DIR]

Weights are made up, in the models' real shapes. The roof of a decode step is the time to read the
weights and the KV of its requests once, at the copy rate measured here. After each model's timing
the tokens of a timed batch are compared with transformers in float32 on the same weights (a token
may differ where the two logits are within 4 bfloat16 steps, or twice what transformers itself is
off by in bfloat16), and a changed tile of one weight must change the tokens.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from model_shapes import MODELS, write_config
from weft.engine.layers.moe import SparseMLP
from weft.engine.layers.weights import Weights
from weft.engine.llm import LLM
from weft.engine.messages import Inbox, Submit
from weft.engine.models.checkpoint import RandomWeights
from weft.engine.models.config import ModelConfig
from weft.engine.models.registry import model_class
from weft.engine.request import SamplingParams, StopCriteria
from weft.engine.runner.graphs import Bucket
from weft.kernels.greedy import greedy_rows

PROMPT_TOKENS, NEW_TOKENS = 512, 256
BF16_ULPS = 4
DEVICE = "cuda"


@dataclass(slots=True)
class Decode:
    """Steady decode at one batch size."""

    batch: int
    graphs: bool
    tokens_per_s: float
    step_ms: float
    """Wall time of a step of the engine."""
    device_ms: float
    """Of its forward, LM head and greedy choice alone, enqueued without waiting; 0 if eager."""
    roof_tokens_per_s: float
    share: float
    """Of the roof."""


@dataclass(slots=True)
class Result:
    """All of one model."""

    model: str
    deterministic: bool = False
    decode: list[Decode] = field(default_factory=list)
    ttft_ms: dict[int, float] = field(default_factory=dict)
    """Median time to the first token by prompt length."""
    prefill_tokens_per_s: float = 0.0
    """8 prompts of 4,096 tokens."""
    mixed_tokens_per_s: float = 0.0
    """Output of 256 requests sent at once, 100 to 1,024 tokens in and out, temperature 0.6."""
    capture_s: float = 0.0
    graph_mib: float = 0.0
    checked_tokens: int = 0
    near_ties: int = 0
    """Checked tokens that are not the float32 reference's choice."""
    largest_gap_ulps: float = 0.0
    """Of the reference's logits of its choice and of the token."""
    peer_near_ties: int = 0
    """The same of transformers in bfloat16, asked at the same places."""
    peer_largest_gap_ulps: float = 0.0


@dataclass(slots=True)
class Run:
    """Tokens of a batch, and the time of its part in which all requests decoded."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    first_token_s: float = 0.0
    num_steps: int = 0
    seconds: float = 0.0
    all_seconds: float = 0.0
    """Until the last token of all."""


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randint(0, 99, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.add(source, 1, out=target)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


def run_batch(
    llm: LLM,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    on_decode: Callable[[], None] = lambda: None,
) -> Run:
    """Submits random prompts and turns the engine until all are done.

    `on_decode` is called after a step in which all requests decoded.
    """
    greedy = SamplingParams(temperature=0.0)
    return run_requests(llm, [(prompt_tokens, new_tokens)] * batch, greedy, on_decode)


def run_requests(
    llm: LLM,
    sizes: Sequence[tuple[int, int]],
    sampling: SamplingParams,
    on_decode: Callable[[], None] = lambda: None,
) -> Run:
    """`run_batch` of requests of so many tokens in and out."""
    engine = llm.engine
    vocab_size = engine.info.vocab_size
    run = Run([[random.randrange(vocab_size) for _ in range(size)] for size, _ in sizes], [])
    run.tokens = [[] for _ in sizes]
    submits = [
        Submit(
            session=1,
            request_id=str(index),
            attempt=1,
            prompt=prompt,
            sampling=sampling,
            stop=StopCriteria(max_tokens=new_tokens, ignore_eos=True),
        )
        for index, (prompt, (_, new_tokens)) in enumerate(zip(run.prompts, sizes, strict=True))
    ]
    inbox: Inbox | None = Inbox(submits=submits)
    began = time.perf_counter()
    all_began: float | None = None
    num_done = 0
    while num_done < len(sizes):
        outbox = engine.turn(inbox)
        inbox = None
        for session in outbox.sessions:
            assert not session.failed, session.failed
            for tokens in session.tokens:
                run.tokens[int(tokens.request_id)].extend(tokens.ids)
            num_done += len(session.finished)
        now = time.perf_counter()
        if all_began is None:
            if all(run.tokens):
                all_began = now
                run.first_token_s = now - began
        elif num_done == 0:
            run.num_steps += 1
            run.seconds = now - all_began
            on_decode()
    run.all_seconds = time.perf_counter() - began
    return run


def device_ms(llm: LLM, batch: int) -> float:
    """Time on the device of one decode step of a batch, done again and again in mid-run."""
    runner = llm.engine._runner
    assert runner.graphs is not None
    graph, hidden = runner.graphs._graphs[Bucket(batch, batch, "decode")]
    times: list[float] = []

    @torch.inference_mode()
    def repeat_step() -> None:
        if len(times) >= 6:
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            # Writes the same K and V to the same places as the step did.
            graph.replay()
            greedy_rows(runner._model.logits(hidden))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 10)

    run_batch(llm, batch, PROMPT_TOKENS, NEW_TOKENS, repeat_step)
    return statistics.median(times[1:])


def bytes_per_step(config: ModelConfig, batch: int, context: float) -> float:
    """Weights and KV that a decode step must read, in bfloat16; experts as uniform routing asks
    for them."""
    hidden, dim = config.hidden_size, config.head_dim
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    mlp = 3.0 * hidden * config.intermediate_size
    if config.moe is not None:
        count, chosen = config.moe.num_experts, config.moe.num_experts_per_tok
        read = count * (1 - (1 - chosen / count) ** batch)
        mlp = hidden * (3 * read * config.moe.intermediate_size + count)
    weights = config.num_layers * (heads * dim * hidden + mlp) + config.vocab_size * hidden
    kv = 2 * config.num_layers * config.num_kv_heads * dim * context * batch
    return 2.0 * (weights + kv)


def bench_decode(llm: LLM, config: ModelConfig, batch: int, rate: float, new_tokens: int) -> Decode:
    """Warms up, then takes the best of two runs."""
    run_batch(llm, batch, PROMPT_TOKENS, 8)
    best = min(
        (run_batch(llm, batch, PROMPT_TOKENS, new_tokens) for _ in range(2)),
        key=lambda run: run.seconds / run.num_steps,
    )
    step_s = best.seconds / best.num_steps
    graphs = llm.engine._runner.graphs is not None
    context = PROMPT_TOKENS + new_tokens - best.num_steps / 2
    roof = batch * rate / bytes_per_step(config, batch, context)
    tokens_per_s = batch / step_s
    on_device = device_ms(llm, batch) if graphs else 0.0
    return Decode(batch, graphs, tokens_per_s, step_s * 1e3, on_device, roof, tokens_per_s / roof)


class KeptWeights(RandomWeights):
    """The made-up weights once more, by transformers' names."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, torch.device(DEVICE))
        self.tensors: dict[str, torch.Tensor] = {}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """As `RandomWeights`; keeps the tensor."""
        super().read_into(name, out)
        self.tensors[name] = out

    def take(self) -> dict[str, torch.Tensor]:
        """All of them, once; those of experts stacked, as transformers has them."""
        taken, self.tensors = self.tensors, {}
        stems = {name.split(".experts.")[0] for name in taken if ".experts." in name}
        for stem in stems:
            parts: dict[str, list[torch.Tensor]] = {"gate_up_proj": [], "down_proj": []}
            number = 0
            while (name := f"{stem}.experts.{number}.down_proj.weight") in taken:
                parts["down_proj"].append(taken.pop(name))
                pair = (name.replace("down", kind) for kind in ("gate", "up"))
                parts["gate_up_proj"].append(torch.cat([taken.pop(part) for part in pair]))
                number += 1
            for part, tensors in parts.items():
                taken[f"{stem}.experts.{part}"] = torch.stack(tensors)
        return taken


@torch.inference_mode()
def check_tokens(model_dir: Path, config: ModelConfig, run: Run, result: Result) -> None:
    """Compares each token with transformers' float32 logits at its place."""
    kept = KeptWeights()
    model_class(config.architecture)(config, Weights(kept))
    model = reference_model(model_dir, kept.take())
    for prompt, tokens in list(zip(run.prompts, run.tokens, strict=True))[:2]:
        ids = torch.tensor([prompt + tokens[:-1]], device=DEVICE)
        peer_logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        with in_float32(model):
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        gaps = gaps_in_ulps(logits, torch.tensor(tokens, device=DEVICE))
        peer_gaps = gaps_in_ulps(logits, peer_logits.argmax(-1))
        result.checked_tokens += len(tokens)
        result.near_ties += int((gaps > 0).sum())
        result.peer_near_ties += int((peer_gaps > 0).sum())
        result.largest_gap_ulps = max(result.largest_gap_ulps, float(gaps.max()))
        result.peer_largest_gap_ulps = max(result.peer_largest_gap_ulps, float(peer_gaps.max()))


def reference_model(model_dir: Path, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Transformers' model with these weights, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    # On no device: the weights are there already, what is computed at construction is not.
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="eager"
        )
    missing = shell.load_state_dict(tensors, strict=False, assign=True).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    shell.tie_weights()
    rotary = type(shell.model.rotary_emb)
    shell.model.rotary_emb = rotary(config).to(DEVICE)
    model: torch.nn.Module = shell.eval()
    return model


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Its layers compute in float32, one at a time: there may be no room for all in float32."""
    whole = [model.model.embed_tokens, model.model.norm, model.lm_head]
    tensors = {id(p): p.data for part in whole for p in part.parameters()}
    for part in whole:
        part.float()
    hooks = []
    for layer in model.model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda layer, _: layer.float() and None))
        hooks.append(layer.register_forward_hook(lambda layer, *_: layer.bfloat16() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for part in whole:
            for p in part.parameters():
                p.data = tensors[id(p)]


def gaps_in_ulps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """How far each token's logit is below the largest, in bfloat16 steps of that."""
    best = logits.amax(-1)
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return (best - chosen) / 2.0 ** (best.abs().log2().floor() - 7)


def check_weights_matter(llm: LLM, run: Run) -> None:
    """A changed tile of one weight changes the tokens of the same prompts."""
    layer = llm.engine._runner._model.model.layers[1]  # type: ignore[attr-defined]
    if isinstance(layer.mlp, SparseMLP):
        layer.mlp.weight.experts.stacked[1][:, :256, :256].add_(0.5)
    else:
        layer.mlp.down_proj.weight.data[:256, :256].add_(0.5)
    prompts = run.prompts[:4]
    stop = StopCriteria(max_tokens=NEW_TOKENS, ignore_eos=True)
    changed = [sample.token_ids for sample in llm.generate(prompts, stop=stop)]
    assert changed != run.tokens[:4]


def bench_model(
    name: str, batches: Sequence[int], rate: float, has_eager: bool, deterministic: bool
) -> Result:
    """Everything about one model."""
    result = Result(name, deterministic)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_config(Path(folder), name)
        config = ModelConfig.load(model_dir)
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "dummy_weights": True,
            "num_pages": 20_000,
            "max_context_tokens": 8192,
            "max_running_requests": max([256, *batches]),
            "max_step_tokens": 8192,
            "prefill_chunk_tokens": 4096,
            "prefix_cache": False,
            "deterministic": deterministic,
            # As the peers: prompts are bound by tokens, not by what they add to others' steps.
            "inter_token_target_s": 1.0,
        }
        if has_eager:
            with LLM(model_dir, **settings, cuda_graphs=False) as llm:
                for batch in (batch for batch in batches if batch <= 64):
                    result.decode.append(bench_decode(llm, config, batch, rate, 48))
            del llm
            release()
        with LLM(model_dir, **settings) as llm:
            graphs = llm.engine._runner.graphs
            assert graphs is not None
            result.capture_s, result.graph_mib = graphs.capture_s, graphs.num_bytes / 2**20
            for batch in batches:
                result.decode.append(bench_decode(llm, config, batch, rate, NEW_TOKENS))
            for length in (512, 2048):
                times = [run_batch(llm, 1, length, 2).first_token_s for _ in range(7)]
                result.ttft_ms[length] = 1e3 * statistics.median(times[2:])
            times = [run_batch(llm, 8, 4096, 2).first_token_s for _ in range(3)]
            result.prefill_tokens_per_s = 8 * 4096 / min(times)
            sizes = [(random.randint(100, 1024), random.randint(100, 1024)) for _ in range(256)]
            mixed = run_requests(llm, sizes, SamplingParams(temperature=0.6, seed=1))
            result.mixed_tokens_per_s = sum(map(len, mixed.tokens)) / mixed.all_seconds
            checked = run_batch(llm, min(16, max(batches, default=16)), PROMPT_TOKENS, NEW_TOKENS)
            check_weights_matter(llm, checked)
        del llm, graphs
        release()
        check_tokens(model_dir, config, checked, result)
    release()
    return result


def release() -> None:
    """Gives the memory of what went out of scope back."""
    gc.collect()
    torch.cuda.empty_cache()


def report(result: Result) -> None:
    """Prints one model's table."""
    print(f"\n{result.model}{', deterministic' * result.deterministic}")
    print("batch  graphs     tok/s    step ms  device ms  roof tok/s  share")
    for row in result.decode:
        print(
            f"{row.batch:5}  {'yes' if row.graphs else 'no':6} {row.tokens_per_s:9.1f} "
            f"{row.step_ms:10.3f} {row.device_ms:10.3f} {row.roof_tokens_per_s:11.1f} "
            f"{row.share:6.1%}"
        )
    first = ", ".join(f"{n} tokens {ms:.1f} ms" for n, ms in result.ttft_ms.items())
    print(
        f"time to first token: {first}; prefill 8 x 4096: {result.prefill_tokens_per_s:,.0f} "
        f"tok/s; 256 mixed requests: {result.mixed_tokens_per_s:,.0f} tok/s"
    )
    print(f"graphs: captured in {result.capture_s:.1f} s, {result.graph_mib:.0f} MiB")
    print(
        f"{result.checked_tokens} tokens against float32: {result.near_ties} others, largest gap "
        f"{result.largest_gap_ulps:.2f} bfloat16 ulps (transformers in bfloat16: "
        f"{result.peer_near_ties}, {result.peer_largest_gap_ulps:.2f})",
        flush=True,
    )


def main() -> None:
    """Runs the models and writes one table and one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--eager", action="store_true", help="also without graphs")
    parser.add_argument("--deterministic", action="store_true", help="and so once more")
    parser.add_argument("--commit", nargs="?", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    random.seed(0)
    rate = copy_rate()
    release()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}: copy {rate / 1e12:.2f} TB/s", flush=True)
    results = []
    modes = (False, True) if arguments.deterministic else (False,)
    for model, mode in itertools.product(arguments.models, modes):
        results.append(bench_model(model, arguments.batches, rate, arguments.eager, mode))
        report(results[-1])
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        content = {
            "date": datetime.date.today().isoformat(),
            "commit": arguments.commit,
            "device": name,
            "torch": torch.__version__,
            "copy_tb_s": rate / 1e12,
            "prompt_tokens": PROMPT_TOKENS,
            "results": [asdict(result) for result in results],
        }
        (arguments.out / "gpu_engine.json").write_text(json.dumps(content, indent=1))
    for result in results:
        allowed = max(BF16_ULPS, 2 * result.peer_largest_gap_ulps)
        assert result.largest_gap_ulps <= allowed, f"{result.model}: wrong tokens"


if __name__ == "__main__":
    main()
