"""Launches of a decode step, counted in the graph that was captured for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from weft.engine.base.config import EngineConfig
from weft.engine.executor.graphs import GraphBucket
from weft.engine.loop.build import load_parts
from weft.testing.engine.graph_nodes import kept_graphs, node_counts
from weft.testing.models.tiny_models import tiny_config

pytestmark = pytest.mark.needs("cuda")

SHAPES: dict[str, dict[str, Any]] = {
    "small llama": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3_moe": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
"""Layers of SmolLM2-135M, Llama-3.1-8B and Qwen3-30B-A3B: kernels are chosen by size."""
BATCHES = (1, 16, 64)
LAUNCHES: dict[tuple[str, int], tuple[int, int]] = {
    # qkv, rotation, attention in one or two, o, gate and up, down: products take the norms.
    ("small llama", 1): (6, 7),
    # Norms of their own; of 64 rows SiLU, too.
    ("small llama", 16): (8, 9),
    ("small llama", 64): (9, 14),
    # qkv, rotation, attention in one or two, o, norm, gate and up, down, norm.
    ("llama", 1): (8, 9),
    # The four products are cuBLAS's, which may sum parts in a second launch; SiLU is one more.
    ("llama", 16): (9, 14),
    ("llama", 64): (9, 14),
    # As above to the norm; router, choice, two of the experts, norm.
    ("qwen3_moe", 1): (10, 11),
    # Choice and sorting in one, the experts in three of which the last is also the norm.
    ("qwen3_moe", 16): (10, 14),
    ("qwen3_moe", 64): (10, 16),
}
"""Of a layer, at least and at most. One more costs a microsecond or two in each layer of each
step."""
MAX_OTHERS = 10
"""Outside of layers: the page table's rows, the embedding, norms."""


def nodes_by_batch(
    kind: str, layers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, int]:
    """Kernels, copies and fills of a decode step."""
    folder.mkdir()
    shape = tiny_config(kind.split()[-1], num_hidden_layers=layers, vocab_size=1000, **SHAPES[kind])
    (folder / "config.json").write_text(json.dumps(shape))
    config = EngineConfig(
        model_dir=folder,
        device="cuda",
        dtype="bfloat16",
        dummy_weights=True,
        num_pages=64,
        max_running_requests=max(BATCHES),
        max_step_tokens=max(BATCHES),
        prefill_chunk_tokens=max(BATCHES),
    )
    with kept_graphs(monkeypatch):
        graphs = load_parts(config).executor.graphs
    assert graphs is not None
    counts = {}
    for batch in BATCHES:
        graph, _ = graphs._graphs[GraphBucket(batch, batch, "decode")]
        found = node_counts(graph)
        print(f"{kind}, {layers} layers, batch {batch}: {dict(found)}")
        counts[batch] = sum(found[kind] for kind in ("kernel", "copy", "fill"))
    return counts


@pytest.mark.parametrize("kind", SHAPES)
def test_launches_of_a_layer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = nodes_by_batch(kind, 3, tmp_path / "few", monkeypatch)
    more = nodes_by_batch(kind, 6, tmp_path / "more", monkeypatch)
    by_layer = {batch: (more[batch] - few[batch]) / 3 for batch in BATCHES}
    print(f"{kind}: launches of a layer by batch {by_layer}")
    for batch in BATCHES:
        least, most = LAUNCHES[kind, batch]
        assert least <= by_layer[batch] <= most
        assert by_layer[batch] == int(by_layer[batch])
        assert few[batch] - 3 * by_layer[batch] <= MAX_OTHERS
