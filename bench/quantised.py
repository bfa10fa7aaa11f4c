"""What number formats of weights cost and bring on a CPU: speed, memory, and distance to float32.

Engines of the demo model in this process, one for each format, measured in turns: a token of one
stream, a step of 16 streams, and a prompt of 512 tokens. Before that each format's probabilities
are compared with those of the float32 weights computed in float32, over chats that the model
itself continued: the mean Kullback-Leibler divergence in nats a token, and how often the most
likely token is the same.

With --llama llama.cpp takes part in the turns, with the same threads: a process of the Python that
is named, which has llama-cpp-python, reads the demo model's own file (Q4_1).

On a machine that others use too, --processor-time measures the time that one thread computes.

    python bench/quantised.py
    python bench/quantised.py --turns 9 --output bench/results --llama /venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from serving.setup import describe_lines, describe_setup
from tokenizers import Tokenizer
from weft.checkpoint.demo import DEMO_GGUF, DEMO_NAME, find_source
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.loader import load_model
from weft.engine.model.step import Step
from weft.kernels.attention import AttentionMetadata
from weft.kernels.linear import LinearWeight

FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16, int4": {"dtype": "bfloat16", "quantization": "int4"},
    "bfloat16, GGUF Q4_1": {"model": DEMO_GGUF, "dtype": "bfloat16"},
}
"""Settings of an engine; `model`: another one than the demo model."""
LLAMA = "llama.cpp, GGUF Q4_1"
Clock = Callable[[], float]
BASE = "bfloat16"
CHATS = Path(__file__).parent.parent / "scripts" / "draft_training" / "held_out.json"
PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Quality:
    """A format's probabilities against those of float32."""

    kl_nats: float
    same_top: float
    """Share of positions whose most likely token is the same."""
    product_bytes: int
    """Memory of all products' weights, the LM head among them."""


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--processor-time", action="store_true", help="of one thread")
    parser.add_argument("--llama", type=Path, help="a Python that has llama-cpp-python")
    parser.add_argument("--output", type=Path, default=None, help="folder for a JSON file")
    arguments = parser.parse_args()
    if arguments.processor_time:
        torch.set_num_threads(1)
    clock = time.process_time if arguments.processor_time else time.perf_counter
    setup = describe_setup(" / ".join(FORMATS), torch.get_num_threads())
    model_dir, console = resolve_model("demo"), Console(width=140)
    texts = continued_chats(model_dir, arguments.chats)
    qualities = judge(texts)
    times = measure(arguments.turns, arguments.llama, clock)
    report(console, setup, qualities, times)
    if arguments.output is not None:
        path = arguments.output / f"quantised-{datetime.now(UTC):%Y%m%d}.json"
        rows = {
            name: (asdict(qualities[name]) if name in qualities else {})
            | {"ms": {label: of[name] for label, of in times.items()}}
            for name in next(iter(times.values()))
        }
        content = {"setup": setup, "tokens": sum(map(len, texts)), "formats": rows}
        path.write_text(json.dumps(content, indent=1) + "\n")
        console.print(str(path))


def continued_chats(model_dir: Path, count: int) -> list[list[int]]:
    """Tokens of chats, each with the answer that the model gives in float32."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    chats = [one["messages"] for one in json.loads(CHATS.read_text()) if one["kind"] == "chat"]
    prompts = []
    for messages in chats[:count]:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        prompts.append(tokenizer.encode(turns + "<|im_start|>assistant\n").ids)
    with LLM(model_dir, dtype="float32") as llm:
        samples = llm.generate(prompts, GREEDY, StopCriteria(max_tokens=160))
    return [prompt + s.token_ids for prompt, s in zip(prompts, samples, strict=True)]


def loaded(settings: dict[str, str]) -> tuple[Path, dict[str, str]]:
    """The directory and the other settings of a format's model."""
    others = {name: value for name, value in settings.items() if name != "model"}
    return resolve_model(settings.get("model", DEMO_NAME)), others


def judge(texts: Sequence[Sequence[int]]) -> dict[str, Quality]:
    """Every format's distance to float32, one model in memory at a time."""
    expected, qualities = [], {}
    for name, settings in FORMATS.items():
        model_dir, others = loaded(settings)
        model = load_model(model_dir, **others).model
        assert isinstance(model, DecoderOnlyLM)
        found = [log_probabilities(model, text) for text in texts]
        expected = expected or found
        kl = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(expected, found, strict=True)])
        same = torch.cat(
            [a.argmax(-1) == b.argmax(-1) for a, b in zip(expected, found, strict=True)]
        )
        qualities[name] = Quality(
            kl.mean().item(), same.double().mean().item(), product_bytes(model)
        )
    return qualities


def log_probabilities(model: DecoderOnlyLM, tokens: Sequence[int]) -> torch.Tensor:
    """[T, vocab] float32: of the token behind each position."""
    count = len(tokens)
    num_pages = -(-count // PAGE_SIZE)
    pool = torch.zeros(model.kv_layout(PAGE_SIZE).pool_shape(num_pages), dtype=model.dtype)
    positions = torch.arange(count)
    group = AttentionMetadata(
        page_table=torch.arange(num_pages, dtype=torch.int32)[None],
        places=positions,
        cu_q_lens=torch.tensor([0, count], dtype=torch.int32),
        kv_lens=torch.tensor([count], dtype=torch.int32),
        max_q_len=count,
        max_kv_len=count,
    )
    step = Step(
        token_ids=torch.tensor(tokens),
        positions=positions,
        groups=(group,),
        logits_rows=positions,
    )
    with torch.inference_mode():
        return model.logits(model.forward_all(step, pool)).log_softmax(-1)


def product_bytes(model: DecoderOnlyLM) -> int:
    """Memory of the products' numbers and scales."""
    total = weight_bytes(model.lm_head.weight)
    for layer in model.model.layers:
        mixer, feed = layer.mixer, layer.feed
        assert isinstance(mixer, Attention)
        assert isinstance(feed, GatedMLP)
        parts = (mixer.qkv_proj, mixer.o_proj, feed.gate_up_proj, feed.down_proj)
        total += sum(weight_bytes(part) for part in parts)
    return total


def weight_bytes(weight: LinearWeight) -> int:
    """Of one product."""
    scales = weight.native.scales if weight.native is not None else None
    return weight.data.nbytes + (0 if scales is None else scales.nbytes)


class LlamaProcess:
    """llama.cpp in a process of its own; it has done its work when it answers."""

    def __init__(self, python: Path, clock: Clock) -> None:
        command = [str(python), str(Path(__file__).parent / "llama_process.py"), str(find_source())]
        threads = str(torch.get_num_threads())
        self._process = subprocess.Popen(
            [*command, threads, clock.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def took(self, prompts: list[list[int]], new: int) -> float:
        """Seconds for the prompts and `new` greedy tokens of each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def measure(turns: int, llama: Path | None, clock: Clock) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by workload and format, one entry a turn."""
    # Streams, tokens of each prompt and new ones; the prompts are part of the time.
    workloads = {"one stream, ms a token": (1, 16, 48), "16 streams, ms a step": (16, 16, 16)}
    workloads["prompt of 512 tokens, ms"] = (1, 512, 1)
    draw = random.Random(1)
    times: dict[str, dict[str, list[float]]] = {}
    other = None if llama is None else LlamaProcess(llama, clock)
    for label, (streams, prompt, new) in workloads.items():
        times[label] = {name: [] for name in (*FORMATS, *([] if other is None else [LLAMA]))}
        engines = {}
        for name, settings in FORMATS.items():
            model_dir, others = loaded(settings)
            engines[name] = LLM(model_dir, prefix_cache=False, kv_memory_bytes=256 << 20, **others)
        for turn in range(turns + 1):
            prompts = [[draw.randrange(100, 40_000) for _ in range(prompt)]] * streams
            took = {name: generation(llm, prompts, new, clock) for name, llm in engines.items()}
            if other is not None:
                took[LLAMA] = other.took(prompts, new) / new
            for name, seconds in took.items():
                if turn > 0:  # The first one warms up.
                    times[label][name].append(seconds * 1e3)
        for llm in engines.values():
            llm.close()
    if other is not None:
        other.close()
    return times


def generation(llm: LLM, prompts: list[list[int]], new: int, clock: Clock) -> float:
    """Seconds a step of prompts and new tokens."""
    begin = clock()
    samples = llm.generate(prompts, GREEDY, StopCriteria(max_tokens=new, ignore_eos=True))
    took = clock() - begin
    return took / max(len(sample.token_ids) for sample in samples)


def report(
    console: Console,
    setup: dict[str, Any],
    qualities: dict[str, Quality],
    times: dict[str, dict[str, list[float]]],
) -> None:
    """Prints one table; factors are medians of the turns' own ratios."""
    table = Table(title="formats of the demo model's weights")
    for column in ("format", "products, MB", "KL, nats", "same top", *times):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name in next(iter(times.values())):
        cells = []
        for of in times.values():
            ratios = [base / own for base, own in zip(of[BASE], of[name], strict=True)]
            cells.append(
                f"{statistics.median(of[name]):.1f} ({min(of[name]):.1f}), "
                f"{statistics.median(ratios):.2f}x"
            )
        quality = qualities.get(name)
        own = ("", "", "")
        if quality is not None:
            size, same = f"{quality.product_bytes / 1e6:.0f}", f"{100 * quality.same_top:.1f} %"
            own = (size, f"{quality.kl_nats:.1e}", same)
        table.add_row(name, *own, *cells)
    for line in describe_lines(setup):
        console.print(line)
    console.print(table)
    console.print(f"times: median (best) of the turns; x: against {BASE} in the same turn")


if __name__ == "__main__":
    main()
