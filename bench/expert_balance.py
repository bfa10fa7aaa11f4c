"""Experts of a router that is biased by Zipf's law: places of the start beside balanced ones.

Popularities are those of Zipf 1. A draw gives them to the experts of each layer in random order,
which is the same as giving the experts random places: so one model serves all draws. For each draw
experts are counted where they are, and prompts or decodes are timed; the engine balances experts by
the counts, and the same is timed again. Further repeats change placements in turns. On a CPU the
processor time of the busiest rank is told beside the time, since others may use the cores too: the
ranks wait for that one in each layer.

    python bench/expert_balance.py                                    two ranks of a CPU
    python bench/expert_balance.py --shape qwen3-30b --device cuda    two GPUs
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from harness import Harness, Run, ratio_of, spread
from numpy.typing import NDArray
from safetensors.torch import save_file
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.parallel.expert_places import READ_ROWS, UNUSED, ExpertLoad, Placement

SHAPES: dict[str, dict[str, int]] = {
    "small": {
        **{"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 64},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    },
    "qwen3-30b": {
        **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    },
}
TOP_K, VOCAB = 8, 2048
BIAS = 4.0
"""Value of the stream's first column, which nothing changes, relative to the others' deviation."""
PROMPT, NUM_PROMPTS = 512, 4
SHORT, FEW = 8, 2
"""Tokens of prompts before decodes, and generated tokens without the timed ones."""
GREEDY = SamplingParams(temperature=0.0)


def write_model(folder: Path, shape: Mapping[str, int], layers: int, dtype: torch.dtype) -> Path:
    """A checkpoint of random numbers, but for the routers."""
    hidden, inner, experts = (
        shape[name] for name in ("hidden_size", "moe_intermediate_size", "num_experts")
    )
    config = {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **shape},
        **{"num_hidden_layers": layers, "num_experts_per_tok": TOP_K, "vocab_size": VOCAB},
        **{"intermediate_size": inner, "norm_topk_prob": True, "decoder_sparse_step": 1},
        **{"mlp_only_layers": [], "max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu"},
        **{"torch_dtype": str(dtype).removeprefix("torch."), "eos_token_id": 0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    queries, keys = (
        shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )

    numbers = torch.randn(1 << 24).mul_(0.02).to(dtype)

    def noise(rows: int, columns: int, *, writes: bool = False) -> torch.Tensor:
        size = rows * columns
        begin = random.randrange(len(numbers) - size)
        found = numbers[begin : begin + size].view(rows, columns).clone()
        if writes:
            found[0] = 0.0
        return found

    embedding = torch.randn(VOCAB, hidden)
    embedding[:, 0] = BIAS
    top = {"model.embed_tokens.weight": embedding.to(dtype), "lm_head.weight": noise(VOCAB, hidden)}
    top |= {"model.norm.weight": torch.ones(hidden, dtype=dtype)}
    save_file(top, folder / "model-top.safetensors")
    files = dict.fromkeys(top, "model-top.safetensors")
    for layer in range(layers):
        at, popularity = f"model.layers.{layer}.", 1.0 / torch.arange(1, experts + 1)
        router = torch.randn(experts, hidden) / math.sqrt(hidden)
        router[:, 0] = popularity.log() / BIAS
        found = {
            f"{at}input_layernorm.weight": torch.ones(hidden, dtype=dtype),
            f"{at}post_attention_layernorm.weight": torch.ones(hidden, dtype=dtype),
            f"{at}self_attn.q_norm.weight": torch.ones(shape["head_dim"], dtype=dtype),
            f"{at}self_attn.k_norm.weight": torch.ones(shape["head_dim"], dtype=dtype),
            f"{at}self_attn.q_proj.weight": noise(queries, hidden),
            f"{at}self_attn.k_proj.weight": noise(keys, hidden),
            f"{at}self_attn.v_proj.weight": noise(keys, hidden),
            f"{at}self_attn.o_proj.weight": noise(hidden, queries, writes=True),
            f"{at}mlp.gate.weight": router.to(dtype),
        }
        for expert in range(experts):
            own = f"{at}mlp.experts.{expert}."
            found[f"{own}gate_proj.weight"] = noise(inner, hidden)
            found[f"{own}up_proj.weight"] = noise(inner, hidden)
            found[f"{own}down_proj.weight"] = noise(hidden, inner, writes=True)
        name = f"model-{layer}.safetensors"
        save_file(found, folder / name)
        files |= dict.fromkeys(found, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def random_start(old: Placement) -> Placement:
    """Equal numbers of experts in random order, without copies."""
    ranks, size = len(old.places), len(old.places[0])
    order = random.sample(range(old.num_experts), old.num_experts)
    share = old.num_experts // ranks
    parts = (order[rank * share : (rank + 1) * share] for rank in range(ranks))
    return Placement(tuple((*own, *[UNUSED] * (size - share)) for own in parts), old.num_experts)


class Taken(NamedTuple):
    """Seconds that work took."""

    wall: float
    busiest: float
    """Processor time of the rank with most."""


class Bench:
    def __init__(self, llm: LLM, steps: int) -> None:
        self.llm, self._steps = llm, steps
        self.experts = llm.engine.experts
        own = psutil.Process()
        ranks = [
            one for one in own.children() if any("rank_process" in word for word in one.cmdline())
        ]
        self._ranks = [own, *ranks]

    def _processor_s(self) -> NDArray[np.float64]:
        times = [one.cpu_times() for one in self._ranks]
        return np.array([one.user + one.system for one in times])

    def generate(self, count: int, length: int, tokens: int) -> NDArray[np.float64]:
        """Seconds, and the processor time of each rank."""
        prompts = [[random.randrange(1, VOCAB) for _ in range(length)] for _ in range(count)]
        began, before = time.perf_counter(), self._processor_s()
        self.llm.generate(prompts, GREEDY, StopCriteria(max_tokens=tokens, ignore_eos=True))
        return np.array([time.perf_counter() - began, *(self._processor_s() - before)])

    def time(self, wanted: Mapping[int, Placement], rows: int) -> Taken:
        """A step that decodes so many requests, or without rows a prompt token, with these
        placements.
        """
        self.put(wanted)
        if rows:
            more = self.generate(rows, SHORT, FEW + self._steps)
            each = (more - self.generate(rows, SHORT, FEW)) / self._steps
        else:
            each = self.generate(NUM_PROMPTS, PROMPT, 1) / (NUM_PROMPTS * PROMPT)
        return Taken(float(each[0]), float(each[1:].max()))

    def put(self, wanted: Mapping[int, Placement]) -> None:
        self.experts.begin(wanted)
        while self.experts.job is not None:
            self.llm.engine.turn()
        balance = self.experts.balance
        if balance is None or balance.num_failed:
            raise RuntimeError(f"experts were not moved: {balance}")

    def count(self, rows: int) -> None:
        """Counts the experts of such work as is timed."""
        self.llm.command_experts("start")
        self.generate(*((rows, SHORT, FEW + self._steps) if rows else (NUM_PROMPTS, PROMPT, 1)))
        self.llm.command_experts("stop")

    def balance(self) -> float:
        """Balances by what was counted. Returns the imbalance before."""
        self.llm.command_experts("balance")
        state = self.llm.command_experts("dump")
        assert state.balance is not None
        return state.balance.imbalance


harness = Harness(__file__, __doc__, repeats=3)
harness.flag("--shape", choices=SHAPES, default="small", help="of the model")
harness.flag("--layers", type=int, default=4, help="of the model")
harness.flag("--device", default="cpu", help="torch device")
harness.flag("--dtype", default="float32", help="of the model; bfloat16 on GPUs")
harness.flag("--draws", type=int, default=10, help="orders of experts")
harness.flag("--steps", type=int, default=32, help="timed decodes")
harness.flag("--redundant", type=int, default=4, help="--redundant-experts")
harness.flag("--rows", type=int, nargs="+", default=[16, 32, 64], help="requests that decode")
harness.flag("--folder", help="where the model is written; it is kept for further runs")


@harness.part
def expert_balance(run: Run) -> None:
    """Each draw with both placements, in turns; then the gain over all draws."""
    options = run.options
    folder = Path(options.folder or run.stack.enter_context(tempfile.TemporaryDirectory()))
    if not (folder / "model.safetensors.index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        dtype: torch.dtype = getattr(torch, options.dtype)
        write_model(folder, SHAPES[options.shape], options.layers, dtype)
    settings: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    if options.device == "cpu":
        settings |= {"num_threads": 1, "num_pages": 400, "max_running_requests": 64}
        settings |= {"prefill_chunk_tokens": 512, "max_step_tokens": 512}
    llm = run.stack.enter_context(
        LLM(
            folder,
            **settings,
            **{"tp": 2, "ep": 2, "balance_experts": "order", "prefix_cache": False},
            redundant_experts=options.redundant,
            rank_timeout_s=120.0,
        )
    )
    bench = Bench(llm, options.steps)
    kinds = {"prompts": 0, **{f"{rows} decodes": rows for rows in options.rows}}
    gains: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for draw in range(options.draws):
        for name, rows in kinds.items():
            fixed = {layer: random_start(old) for layer, old in bench.experts.placements.items()}
            bench.put(fixed)
            bench.count(rows)
            times = {"fixed": [bench.time(fixed, rows)]}
            imbalance = bench.balance()
            placed = dict(bench.experts.placements)
            counted = {layer.layer: layer for layer in llm.command_experts("dump").layers}
            times["placed"] = [bench.time(placed, rows)]
            for _ in range(options.repeats - 1):
                for way, wanted in (("fixed", fixed), ("placed", placed)):
                    times[way].append(bench.time(wanted, rows))
            wall = {way: [one.wall for one in found] for way, found in times.items()}
            busiest = {way: [one.busiest for one in found] for way, found in times.items()}
            gain = ratio_of(wall["fixed"], wall["placed"])
            work_gain = ratio_of(busiest["fixed"], busiest["placed"])
            gains[name].append((gain.median, work_gain.median))
            kind = "cpu" if options.device == "cpu" else "cuda"
            after = [
                placed[layer].imbalance(_load(found.rows, found.steps), READ_ROWS[kind])
                for layer, found in counted.items()
            ]
            run.row(
                table="draws",
                draw=draw,
                work=name,
                fixed_us=spread(wall["fixed"], 1e6),
                placed_us=spread(wall["placed"], 1e6),
                gain=gain,
                busiest_gain=work_gain,
                fixed_imbalance=imbalance,
                placed_imbalance=sum(after) / len(after),
            )
    for name, found in gains.items():
        both = (spread(own) for own in zip(*found, strict=True))
        names = ("gain", "busiest_gain")
        run.row(table="gains over all draws", work=name, **dict(zip(names, both, strict=True)))


def _load(rows: list[int], steps: list[int]) -> ExpertLoad:
    return ExpertLoad(torch.tensor(rows).numpy(), torch.tensor(steps).numpy())


if __name__ == "__main__":
    sys.exit(harness.main())
