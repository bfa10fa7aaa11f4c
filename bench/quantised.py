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
    python bench/quantised.py --repeats 9 --llama /venv/bin/python
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness import Harness, Run, in_turns, ratio_of, spread
from scaled_kv import log_probabilities
from tokenizers import Tokenizer
from weft.checkpoint.demo import DEMO_GGUF, DEMO_NAME, find_source
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.loader import load_model
from weft.kernels.ops.linear.spec import LinearWeight

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
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Quality:
    """A format's probabilities against those of float32."""

    kl_nats: float
    same_top: float
    """Share of positions whose most likely token is the same."""
    product_bytes: int
    """Memory of all products' weights, the LM head among them."""


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
        found = [torch.cat([*log_probabilities(model, text, "")]) for text in texts]
        expected = expected or found
        kl = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(expected, found, strict=True)])
        same = torch.cat(
            [a.argmax(-1) == b.argmax(-1) for a, b in zip(expected, found, strict=True)]
        )
        qualities[name] = Quality(
            kl.mean().item(), same.double().mean().item(), product_bytes(model)
        )
    return qualities


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
    """Seconds by workload and format, one entry a turn."""
    # Streams, tokens of each prompt and new ones; the prompts are part of the time.
    workloads = {"one stream, ms a token": (1, 16, 48), "16 streams, ms a step": (16, 16, 16)}
    workloads["prompt of 512 tokens, ms"] = (1, 512, 1)
    draw = random.Random(1)
    times: dict[str, dict[str, list[float]]] = {}
    other = None if llama is None else LlamaProcess(llama, clock)
    for label, (streams, prompt, new) in workloads.items():
        engines = {}
        for name, settings in FORMATS.items():
            model_dir, others = loaded(settings)
            engines[name] = LLM(model_dir, prefix_cache=False, kv_memory_bytes=256 << 20, **others)
        prompts = [[draw.randrange(100, 40_000) for _ in range(prompt)]] * streams
        ways: dict[str, Callable[[], float]] = {
            name: partial(generation, llm, prompts, new, clock) for name, llm in engines.items()
        }
        if other is not None:
            ways[LLAMA] = partial(llama_step, other, prompts, new)
        times[label] = in_turns(ways, turns)
        for llm in engines.values():
            llm.close()
    if other is not None:
        other.close()
    return times


def llama_step(other: LlamaProcess, prompts: list[list[int]], new: int) -> float:
    """Seconds a step of llama.cpp."""
    return other.took(prompts, new) / new


def generation(llm: LLM, prompts: list[list[int]], new: int, clock: Clock) -> float:
    """Seconds a step of prompts and new tokens."""
    begin = clock()
    samples = llm.generate(prompts, GREEDY, StopCriteria(max_tokens=new, ignore_eos=True))
    took = clock() - begin
    return took / max(len(sample.token_ids) for sample in samples)


harness = Harness(__file__, __doc__, repeats=7)
harness.flag("--chats", type=int, default=16)
harness.flag("--processor-time", action="store_true", help="of one thread")
harness.flag("--llama", type=Path, help="a Python that has llama-cpp-python")


@harness.part
def formats(run: Run) -> None:
    """All formats."""
    options = run.options
    if options.processor_time:
        torch.set_num_threads(1)
    clock = time.process_time if options.processor_time else time.perf_counter
    texts = continued_chats(resolve_model("demo"), options.chats)
    for name, quality in judge(texts).items():
        run.row(quality, table="distance to float32", format=name)
    times = measure(options.repeats, options.llama, clock)
    for label, of in times.items():
        for name, seconds in of.items():
            figures = {"ms": spread(seconds, 1e3), "times_faster": ratio_of(of[BASE], seconds)}
            run.row(table=label, format=name, **figures)
    run.note(f"times_faster: than {BASE} in the same turn")


if __name__ == "__main__":
    sys.exit(harness.main())
