"""Prefix hits of a model with recurrent layers beside a model whose layers all have KV.

    python bench/hybrid_prefixes.py [--agents 64]

Agents with long system prompts, shared by many, have several turns; a third of them go back to an
earlier turn and go on otherwise. Both models (random weights, Qwen3.5's form with every fourth
layer's KV, and Qwen3's) get the same load one after another and the same memory. A state has the
bytes of the KV of 1,536 tokens of its model, about as in Qwen3.5-9B. The oracle is a cache without
bounds, in whole pages. Nothing is timed.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chats.workload import PAGE_SIZE, EndlessCache, make_chats
from harness import Harness, Run
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from weft.testing.models.families import make_family
from weft.testing.models.tiny_models import make_tiny

VOCAB = 512
NEW_TOKENS = 24
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
}
LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MEMORY = {"ample": 96 << 20, "scarce": 32 << 20}
"""Bytes of KV and states together."""
_MODEL_SEED = 1


@dataclass(frozen=True, slots=True)
class Hits:
    """One model with one size of memory."""

    model: str
    memory: str
    memory_bytes: int
    prompt_tokens: int
    oracle: float
    """Share of the prompts' tokens that a cache without bounds has."""
    hits: float
    """Share that the engine had."""
    kv_bytes_of_token: int
    block_bytes: int
    """Bytes of the states behind one page; 0: there are none."""
    cached_pages: int
    cached_blocks: int


def waves(count: int, seed: int) -> list[list[tuple[str, list[int]]]]:
    """Rounds of (agent, what it says next); an agent that is named `a/b` goes on from `a`, whose
    last turn was withdrawn.
    """
    rng = random.Random(seed)
    chats = make_chats(
        count,
        1.0,
        VOCAB,
        seed,
        num_systems=8,
        system_tokens=(900, 2400),
        message_tokens=(30, 300),
        turns=(3, 6),
    )
    found: list[list[tuple[str, list[int]]]] = [[] for _ in range(count // 8 + 12)]
    for number, chat in enumerate(chats):
        first = number // 8
        found[first].append((chat.name, [*chat.system, *chat.messages[0]]))
        for at, message in enumerate(chat.messages[1:], first + 1):
            found[at].append((chat.name, list(message)))
        if rng.random() < 1 / 3:
            other = [rng.randrange(3, VOCAB) for _ in range(rng.randint(30, 300))]
            found[first + rng.randrange(2, len(chat.messages) + 1)].append((f"{chat.name}/", other))
    return [wave for wave in found if wave]


def run(name: str, folder: Path, memory: str, count: int) -> Hits:
    """Has all agents' turns answered."""
    oracle, said = EndlessCache(), dict[str, list[int]]()
    before: dict[str, list[int]] = {}
    stop = StopCriteria(max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        page_size=PAGE_SIZE,
        kv_memory_bytes=MEMORY[memory],
        max_running_requests=8,
    ) as llm:
        for wave in waves(count, seed=0):
            prompts = []
            for agent, message in wave:
                history = before[agent[:-1]] if agent.endswith("/") else said.get(agent, [])
                before[agent] = history
                prompts.append([*history, *message])
                oracle.sent(prompts[-1])
            answers = llm.generate(prompts, SamplingParams(temperature=0.0), stop)
            for (agent, _), prompt, answer in zip(wave, prompts, answers, strict=True):
                said[agent] = [*prompt, *answer.token_ids]
                oracle.ended(said[agent])
        counters, layout = llm.engine.counters(), llm.engine.parts.layout
        shown = llm.engine.snapshot(0)
    assert counters["prefix_query_tokens"] <= oracle.prompt_tokens
    return Hits(
        model=name,
        memory=memory,
        memory_bytes=MEMORY[memory],
        prompt_tokens=oracle.prompt_tokens,
        oracle=1 - oracle.computed_tokens / oracle.prompt_tokens,
        hits=counters["prefix_hit_tokens"] / oracle.prompt_tokens,
        kv_bytes_of_token=layout.page_bytes // layout.page_size,
        block_bytes=0 if layout.states is None else layout.states.block_bytes,
        cached_pages=shown["pages"]["cached"],
        cached_blocks=shown["state_blocks"]["cached"] if shown["state_blocks"] else 0,
    )


harness = Harness(__file__, __doc__)
harness.flag("--agents", type=int, default=64)


@harness.part
def prefixes(bench: Run) -> None:
    """Both models with both sizes of memory."""
    folder = Path(bench.stack.enter_context(tempfile.TemporaryDirectory()))
    hybrid = make_family("qwen3_5", folder / "hybrid", _MODEL_SEED, **SHAPE, **LINEAR)
    full = make_tiny("qwen3", folder / "full", _MODEL_SEED, **SHAPE)
    for memory in MEMORY:
        for name, path in (("hybrid", hybrid), ("full attention", full)):
            hits = run(name, path, memory, bench.options.agents)
            kv_mb = hits.cached_pages * PAGE_SIZE * hits.kv_bytes_of_token / 1e6
            states_mb = hits.cached_blocks * hits.block_bytes / 1e6
            bench.row(hits, kv_mb=kv_mb, states_mb=states_mb)


if __name__ == "__main__":
    sys.exit(harness.main())
