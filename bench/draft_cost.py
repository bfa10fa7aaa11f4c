"""What drafting and verifying cost beside a decode step, by number of requests and of drafts.

An engine runs a fixed number of drafts per step, in chains or in trees. A step's time is the one
that the gate observes: it includes drafting and, with trees, following the accepted path and moving
its KV. Drafting is also timed alone: around the drafter, on a GPU after the run. How many drafts
are accepted hardly changes either time.
The roof of a decode step on a GPU is the time to read the weights and the KV
of its requests at the copy rate measured here; that of a draft, to read the head's weights.

    python bench/draft_cost.py                                  the demo model and its head
    python bench/draft_cost.py --shape llama-3.1-8b --device cuda --batches 1,8,64
    python bench/draft_cost.py --shape llama-3.1-8b --device cuda --trees 7x5,15x6,31x6
    python bench/draft_cost.py --drafts 0 --no-head         what a head costs that drafts nothing
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clocks import event_s
from gpu_roof import bytes_per_step, copy_rate
from harness import Harness, Run, numbers
from model_shapes import MODELS, write_config
from safetensors.torch import save_file
from speculation import DRAFT
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import StopCriteria
from weft.engine.base import drafts as draft_shapes
from weft.engine.base.config import MAX_TREE_REQUESTS
from weft.engine.base.drafts import DraftShape
from weft.engine.executor.drafts.tree_graphs import TreeArrays
from weft.engine.executor.step_input import StepInput
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.llm import LLM
from weft.engine.requests.request import Request
from weft.engine.scheduler.plan import Plan, VerifyItem
from weft.engine.scheduler.plan import Run as VerifiedRun
from weft.engine.scheduler.ports import Drafter

HEADS = {"smollm2-135m": DRAFT}
"""Published draft heads by model; other models get heads of random weights."""
PROMPT_TOKENS = 512
DRAFT_VOCAB = 32_000
NUM_SKIPPED = 3
"""First steps of a batch, which are not timed."""
NUM_CHAINS = 50
"""Number of chains timed together."""


@dataclass
class Cost:
    """Medians of one number of requests and drafts, in milliseconds."""

    batch: int
    drafts: int | None
    """None: the engine has no head."""
    depth: int
    """Levels of a tree; for a chain the number of drafts."""
    step_ms: float
    draft_ms: float
    """Time of all drafts of a step, measured alone on a GPU."""
    num_steps: int
    roof_ms: float | None = None
    """Roofline time of a decode step; None where no copy rate is measured."""
    draft_roof_ms: float | None = None
    """Roofline time of all drafts."""


@dataclass
class Watch:
    """Gate and drafter of an engine, with a fixed number of drafts, and timed."""

    drafter: Drafter | None
    drafts: DraftShape
    batch: int = 0
    steps_s: list[float] = field(default_factory=list)
    drafts_s: list[float] = field(default_factory=list)

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        return self.drafts

    def observe(self, plan: Plan, runs: Sequence[VerifiedRun], duration_s: float) -> None:
        """See `DraftGate.observe`; whole batches count, with all their drafts."""
        wanted = (self.drafts.num_drafts, self.drafts.depth)
        verifies = [i for i in plan.verifies if (i.max_drafts, i.max_accepted) == wanted]
        num_whole = len(verifies) if self.drafts.num_drafts else len(plan.decodes)
        if num_whole == self.batch and not plan.chunks:
            self.steps_s.append(duration_s)

    def depths(self) -> dict[int, int]:
        """See `DraftGate.depths`: nothing is chosen."""
        return {}

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        assert self.drafter is not None
        began = time.perf_counter()
        drafts = self.drafter.draft(items)
        self.drafts_s.append(time.perf_counter() - began)
        return drafts


def measure(
    llm: LLM,
    batch: int,
    drafts: DraftShape,
    num_tokens: int,
    config: ModelConfig,
    rate: float | None,
) -> Cost | None:
    """Runs random prompts with these drafts in each step; None if no step had all of them."""
    drafter = llm.engine.drafter
    assert isinstance(drafter, EagleDrafter)
    watch = Watch(drafter, drafts, batch)
    if not drafter.is_on_device:
        llm.engine.pipeline._drafter = watch
    steps = watched(llm, watch, num_tokens, config.vocab_size)
    chains = watch.drafts_s[NUM_SKIPPED:]
    if not steps:
        return None
    step_ms = 1e3 * statistics.median(steps)
    cost = Cost(batch, drafts.num_drafts, drafts.depth, step_ms, 0.0, len(steps))
    if drafts.num_drafts:
        on_device = drafter.is_on_device
        cost.draft_ms = 1e3 * (
            drafting_s(drafter, batch, drafts) if on_device else statistics.median(chains)
        )
    if rate is not None:
        context = PROMPT_TOKENS + num_tokens / 2
        cost.roof_ms = 1e3 * bytes_per_step(config, batch, context) / rate
        w = drafter._chains._model.head.weight
        read = (w.qkv, w.o, w.gate_up, w.down, w.lm_head)
        bytes_a_turn = sum(part.data.nbytes for part in read)
        cost.draft_roof_ms = 1e3 * drafts.depth * bytes_a_turn / rate
    return cost


def watched(llm: LLM, watch: Watch, num_tokens: int, vocab_size: int) -> list[float]:
    """Runs random prompts; returns the seconds of each step that the watch has seen."""
    engine = llm.engine
    engine.scheduler.running_plans.gate = watch
    prompts = [
        [random.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(watch.batch)
    ]
    llm.generate(prompts, None, StopCriteria(max_tokens=num_tokens, ignore_eos=True))
    return watch.steps_s[NUM_SKIPPED:]


def drafting_s(drafter: EagleDrafter, batch: int, drafts: DraftShape) -> float:
    """Seconds of captured drafting behind prompts that have ended, whose pages are unused."""
    chains, trees = drafter._graphs, drafter._tree_graphs
    slots, no_adapters = np.arange(batch), np.zeros(batch, np.int64)
    starts = np.full(batch, PROMPT_TOKENS)
    ends = starts + drafts.num_places + 1
    depths, count = np.full(batch, drafts.depth), 1 + drafts.num_drafts
    requests = StepInput(
        slots=slots,
        starts=starts,
        max_starts=starts,
        counts=np.full(batch, count),
        draft_limits=ends,
    )

    def draft() -> None:
        if drafts.is_tree:
            assert trees is not None
            trees.forward(TreeArrays(slots, starts, ends, depths, no_adapters), drafts)
        else:
            assert chains is not None
            chains.forward(requests, drafts.num_drafts)

    for _ in range(NUM_SKIPPED):
        draft()
    return event_s(lambda: [draft() for _ in range(NUM_CHAINS)]) / NUM_CHAINS


def write_head(path: Path, model_dir: Path) -> Path:
    """A head of random weights, as wide as the model's layers."""
    target = json.loads((model_dir / "config.json").read_text())
    hidden, inner = target["hidden_size"], target["intermediate_size"]
    dim, heads = target["head_dim"], target["num_attention_heads"]
    kv_heads, vocab_size = target["num_key_value_heads"], target["vocab_size"]
    size = min(DRAFT_VOCAB, vocab_size)
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")
    config = {name: target[name] for name in names}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"draft_vocab_size": size, "rope_theta": 10000.0, "num_hidden_layers": 1}
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    tensors = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02)
        for name, shape in shapes.items()
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


harness = Harness(__file__, __doc__)
harness.flag("--shape", choices=MODELS, help="made-up weights; default: demo model")
harness.flag("--device", default="cpu")
harness.flag("--batches", type=numbers, default=[1, 4], help="numbers of requests, by commas")
harness.flag(
    "--drafts", type=numbers, default=[0, 1, 2, 3, 4, 5], help="numbers of drafts, by commas"
)
harness.flag(
    "--trees", default="", help="nodes and levels of trees, as in 7x5,15x6,31x6; default: none"
)
harness.flag("--width", type=int, default=4, help="of trees: children of a node")
harness.flag("--tokens", type=int, default=128, help="new tokens a request")
harness.flag("--no-head", action="store_true", help="an engine without a head, too")
harness.flag("--eager", action="store_true", help="without CUDA graphs")


@harness.check
def complete(options: argparse.Namespace) -> None:
    """Trees as pairs of numbers."""
    trees = [tree.split("x") for tree in options.trees.split(",") if tree]
    options.trees = [(int(nodes), int(depth)) for nodes, depth in trees]


@harness.part
def drafts(run: Run) -> None:
    """Chains and trees by number of requests."""
    options = run.options
    if options.shape is None:
        model_dir, draft_dir = resolve_model("demo"), DRAFT
    else:
        folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
        model_dir = write_config(folder, options.shape)
        own = HEADS.get(options.shape)
        draft_dir = own or write_head(folder / "head", model_dir)
    # Chains and steps are captured for the numbers that a gate compares.
    draft_shapes.DEPTHS = tuple(sorted({0, *options.drafts}))
    draft_shapes.TREES = tuple(sorted(options.trees))
    config = ModelConfig.load(model_dir)
    dtype = resolve_dtype("auto" if options.shape is None else "bfloat16", options.device)
    settings: dict[str, Any] = {"dtype": dtype, "device": options.device}
    settings |= {"draft_dir": draft_dir, "drafter": "eagle3", "prefix_cache": False}
    settings |= {"max_draft_tokens": max(1, *options.drafts)}
    settings |= {"draft_width": options.width if options.trees else 1}
    settings |= {"max_running_requests": max(options.batches), "max_context_tokens": 2048}
    settings |= {"num_pages": 64 * max(options.batches) + 1}
    settings |= {"dummy_weights": options.shape is not None}
    settings |= {"cuda_graphs": not options.eager}
    if options.device.startswith("cuda"):
        # All prompts are there before the first answer ends.
        settings |= {"max_step_tokens": 4096, "prefill_chunk_tokens": 512}
    llm = run.stack.enter_context(LLM(model_dir, **settings))
    if options.no_head:
        for name in ("draft_dir", "drafter", "max_draft_tokens", "draft_width"):
            del settings[name]
        plain = run.stack.enter_context(LLM(model_dir, **settings))
    rate = copy_rate() if options.device.startswith("cuda") else None
    decode: dict[int, float] = {}
    chains = [DraftShape.chain(drafts) for drafts in options.drafts]
    trees = [DraftShape(*tree, options.width) for tree in options.trees]
    for batch in options.batches:
        if options.no_head:
            watch = Watch(None, DraftShape.chain(0), batch)
            steps = watched(plain, watch, options.tokens, config.vocab_size)
            run.row(Cost(batch, None, 0, 1e3 * statistics.median(steps), 0.0, len(steps)))
        for drafts in [*chains, *(trees if batch <= MAX_TREE_REQUESTS else [])]:
            cost = measure(llm, batch, drafts, options.tokens, config, rate)
            if cost is None:
                run.note(f"no step had all of {batch} requests with {drafts}: left out")
                continue
            if cost.drafts == 0:
                decode[batch] = cost.step_ms
            run.row(cost, of_decode=cost.step_ms / decode.get(batch, float("nan")))


if __name__ == "__main__":
    sys.exit(harness.main())
