"""Vectors of captured steps are those of steps without graphs, whatever they are padded to."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.kernels.ops import encoder_attention
from weft.kernels.shared import cpu
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.models.tiny_embedders import make_embedder, write_modules
from weft.testing.models.tiny_encoders import make_encoder

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.needs("triton-interpreter"),
]

KINDS = {
    "bert": "mean",
    "modernbert": "cls",
    "qwen3": "lasttoken",
    "qwen3, both ways": "lasttoken",
}


def compute_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without native operations, and with rows of padding behind the last sequence."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    monkeypatch.setattr(encoder_attention, "_check_bounds", lambda bounds, tokens: None)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_change_no_vector(
    kind: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_as_a_gpu(monkeypatch)
    if kind.startswith("qwen3"):
        fields = {"is_causal": False} if "both" in kind else {}
        make_embedder("qwen3", tmp_path, seed, pooling=KINDS[kind], **fields)
    else:
        make_encoder(kind, tmp_path, seed)
        write_modules(tmp_path, 48, seed, pooling=KINDS[kind])
    lengths = [1, 2, *(random.randint(1, 30) for _ in range(10))]
    prompts = [[random.randrange(5, 256) for _ in range(length)] for length in lengths]
    settings = {"dtype": "float32", "page_size": 4, "max_running_requests": 4, "overlap": "on"}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 32, "max_context_tokens": 40}
    embedding = PoolingParams(output="embedding")
    tokens = PoolingParams(output="token_embeddings", normalises=False)
    found = []
    for is_captured in (False, True):
        with LLM(tmp_path, **settings) as llm:
            steps = RecordedSteps(llm.engine, 0) if is_captured else None
            found.append(np.concatenate(llm.pool(prompts, embedding)))
            if steps is not None:
                # Twelve prompts, of which four run at a time: short ones take three steps.
                assert steps.num_replays["ragged"] >= 3
            found.append(np.concatenate(llm.pool(prompts[:4], tokens)))
    assert np.allclose(found[0], found[2], atol=1e-5)
    assert np.allclose(found[1], found[3], atol=1e-4)


def test_texts_of_pairs_are_told_apart(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_as_a_gpu(monkeypatch)
    make_encoder("bert", tmp_path, seed, num_labels=2)
    pairs = [[random.randrange(5, 256) for _ in range(random.randint(9, 30))] for _ in range(6)]
    settings = {"dtype": "float32", "page_size": 4, "max_running_requests": 4, "overlap": "on"}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 32, "max_context_tokens": 40}
    found = []
    for is_captured in (False, True):
        with LLM(tmp_path, **settings) as llm:
            steps = RecordedSteps(llm.engine, 0) if is_captured else None
            for second in (5, 0, 8):
                found += llm.pool(pairs, PoolingParams(output="classes", segment_start=second))
            assert steps is None or steps.num_replays["ragged"] > 5
    half = len(found) // 2
    assert np.allclose(found[:half], found[half:], atol=1e-5)
    assert not np.allclose(found[:6], found[6:12], atol=1e-5)
