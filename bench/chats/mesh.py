"""Meshes for chats: `weft up` over a random model that is large enough for prompts to matter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

from weft.testing.meshes.local_mesh import LocalMesh, wait_until
from weft.testing.models.tiny_models import make_tiny

MODEL = "chats"
VOCAB = 2048
CONTEXT = 4096
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 6,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
"""With this shape a prompt token costs a tenth of what it costs with the demo model."""


def make_model(folder: Path) -> Path:
    """A model directory; the same weights each time."""
    return make_tiny("llama", folder / MODEL, seed=1, tokenizer=True, **SHAPE)


@contextmanager
def chat_mesh(folder: Path, model_dir: Path, *flags: str) -> Iterator[LocalMesh]:
    """A ready mesh, with KV in float32.

    Args:
        folder: Folder for state and logs, which is created.
        model_dir: From `make_model`.
        flags: Further flags of `weft up`.
    """
    folder.mkdir(parents=True)
    mesh = LocalMesh(folder, "--model", str(model_dir), "--dtype", "float32", *flags)
    try:
        mesh.wait_ready()
        wait_until(lambda: not _problems(mesh), 60, lambda: str(_problems(mesh)))
        yield mesh
    finally:
        mesh.stop()


def _problems(mesh: LocalMesh) -> list[str]:
    """Why workers get no requests yet."""
    workers = mesh.dump("gateway")["workers"]
    return [worker["problem"] for worker in workers if worker["problem"]]


def prompt_tokens(mesh: LocalMesh) -> dict[str, int]:
    """Prompt tokens that each worker has computed since its start, for itself or for others."""
    names = [*mesh.names("prefill"), *mesh.names("decode")]
    return {name: mesh.counters(name)["prompt_tokens"] for name in names}
