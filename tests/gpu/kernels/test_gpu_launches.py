"""Launches of a decode step, counted in the graph that was captured for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from weft.engine.base.config import EngineConfig
from weft.engine.executor.graphs import GraphBucket
from weft.engine.loop.build import load_parts
from weft.testing.engine.graph_nodes import SHAPES, Node, kept_graphs, nodes_of
from weft.testing.models.tiny_models import tiny_config

pytestmark = pytest.mark.needs("cuda")

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
) -> dict[int, list[Node]]:
    """Kernels, copies and fills of decode steps."""
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
        graphs = load_parts(config).local.graphs
    assert graphs is not None
    listed = {}
    for batch in BATCHES:
        graph, _ = graphs._graphs[GraphBucket(batch, batch, "decode")]
        nodes = nodes_of(graph)
        print(f"{kind}, {layers} layers, batch {batch}: {Counter(node.kind for node in nodes)}")
        listed[batch] = [node for node in nodes if node.kind in ("kernel", "copy", "fill")]
    return listed


@pytest.mark.parametrize("kind", SHAPES)
def test_launches_of_a_layer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = nodes_by_batch(kind, 3, tmp_path / "few", monkeypatch)
    more = nodes_by_batch(kind, 6, tmp_path / "more", monkeypatch)
    by_layer = {batch: (len(more[batch]) - len(few[batch])) / 3 for batch in BATCHES}
    print(f"{kind}: launches of a layer by batch {by_layer}")
    for batch in BATCHES:
        least, most = LAUNCHES[kind, batch]
        assert least <= by_layer[batch] <= most
        assert by_layer[batch] == int(by_layer[batch])
        assert len(few[batch]) - 3 * by_layer[batch] <= MAX_OTHERS
        # All layers alike, to the name and the grid.
        added = Counter(more[batch])
        added.subtract(Counter(few[batch]))
        assert {count % 3 for count in added.values()} == {0}
        rotations = [n for node, n in added.items() if "rope_and_cache" in node.name]
        assert rotations == [3]
