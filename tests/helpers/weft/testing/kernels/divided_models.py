"""Ranks that run steps of a model as GPUs do, by Triton's interpreter on memory of the host: two
that divide its pages, or two in each of two stages.

    python -m weft.testing.kernels.divided_models FD BYTES FOLDER SEED STORE STAGES RANK
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from weft.checkpoint.config import ModelConfig
from weft.engine.base.config import EngineConfig
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.ranks.share import query_shape
from weft.engine.model.loader import load_model
from weft.engine.model.stage import ModelShare, Stage
from weft.engine.parallel import device_peers
from weft.engine.parallel.device_peers import DevicePeers
from weft.engine.parallel.device_stages import DeviceStages
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shards import layout_of_rank, num_pages_here
from weft.engine.parallel.stages import layers_of_stages, stage_of_rank
from weft.testing.kernels import peer_ranks
from weft.testing.kernels.as_on_gpu import as_on_gpu

SIZE, PAGE, NUM_PAGES, SLOTS, VOCAB = 2, 8, 40, 3, 250
MAX_STEP_TOKENS = 64
BYTES_OF_RANK = 1 << 24


class Rows(NamedTuple):
    """New rows of a request."""

    slot: int
    start: int
    count: int


STEPS: Sequence[Sequence[Rows]] = (
    (Rows(0, 0, 21), Rows(1, 0, 3)),
    (Rows(0, 21, 9), Rows(1, 3, 1), Rows(2, 0, 8)),
    (Rows(0, 30, 1), Rows(1, 4, 1), Rows(2, 8, 4)),
    (Rows(0, 31, 1), Rows(1, 5, 1), Rows(2, 12, 1)),
)
"""Chunks, one of which ends with a page, beside decodes; then decodes alone."""


def run_alone(folder: Path, seed: int) -> list[torch.Tensor]:
    """Logits of each step, as one process on a CPU computes them."""
    return _run(_executor(folder, None), seed)


def run_divided(folder: Path, seed: int, store_path: str, count: int = 1) -> list[torch.Tensor]:
    """Logits of each step on rank 0.

    Args:
        count: Of stages. The two ranks of one divide pages.
    """
    size = SIZE * count
    segment = Segment.create(size * BYTES_OF_RANK, "test")
    given = (segment.number, segment.size, folder, seed, store_path, count)
    command = [sys.executable, "-m", __name__, *map(str, given)]
    others = [
        subprocess.Popen([*command, str(rank)], pass_fds=(segment.number,))
        for rank in range(1, size)
    ]
    try:
        found = run_rank(segment, 0, folder, seed, store_path, count)
        for other in others:
            assert other.wait(120) == 0
    finally:
        for other in others:
            other.kill()
            other.wait()
    return found


def run_rank(
    segment: Segment, rank: int, folder: Path, seed: int, store_path: str, count: int
) -> list[torch.Tensor]:
    size = SIZE * count
    calls = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: 0,
        cudaHostUnregister=lambda address: 0,
    )
    group: Any = SimpleNamespace(
        rank=rank, size=size, words=(0, 0), stop_address=0, limit_address=0
    )
    with as_on_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_ranks, "BYTES_OF_RANK", BYTES_OF_RANK)
        memory = peer_ranks.HostMemory(segment, rank, size)
        patch.setattr(device_peers, "symmetric", memory)
        patch.setattr(torch.cuda, "cudart", lambda: calls)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(device_peers, "_LOGITS_ROWS", 1)
        patch.setattr(device_peers, "_ONCE_BYTES", {8: 4096})
        patch.setattr(device_peers, "_TWICE_BYTES", 8192)
        patch.setattr(device_peers, "MAX_ROWS", 8)
        for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
            patch.setenv(name, "1")
        ranks = device_peers.join(rank, size, store_path)
        try:
            model = ModelConfig.load(folder)
            device, width, dtype = torch.device("cpu"), model.hidden_size, torch.float32
            sizes = width, dtype, model.num_embeddings
            peers = DevicePeers(group, device, ranks, *sizes, lambda phase: dist.barrier(), SIZE)
            stage = None
            if count == 1:
                settings = EngineConfig(model_dir=folder, dtype="float32", tp=SIZE, dcp=SIZE)
                peers.divide_pages(SIZE, *query_shape(settings, model))
            else:
                beside = DeviceStages(
                    group, device, peers.mapped, MAX_STEP_TOKENS, width, dtype, SIZE
                )
                number = stage_of_rank(rank, count, SIZE)
                layers = layers_of_stages(model.num_layers, count)[number]
                stage = Stage(number, count, layers, beside, has_own_pages=True)
            executor = _executor(folder, peers, stage)
            executor.own_pool.fill_(float("nan"))  # A page elsewhere is nowhere here.
            dist.barrier()
            with torch.inference_mode():
                found = _run(executor, seed)
            dist.barrier()
        finally:
            dist.destroy_process_group()
    return found


def _executor(folder: Path, peers: DevicePeers | None, stage: Stage | None = None) -> LocalExecutor:
    loaded = load_model(folder, "float32", share=ModelShare(peers=peers, stage=stage))
    layout, num_pages = loaded.model.kv_layout(PAGE), NUM_PAGES
    if peers is not None:
        layout = layout_of_rank(layout, SIZE)
        num_pages = num_pages_here(NUM_PAGES, 1 if peers.pages is None else SIZE)
    sizes = num_pages, SLOTS + 1, 12 * PAGE, torch.device("cpu")
    return LocalExecutor(
        loaded.model,
        layout,
        *sizes,
        max_step_tokens=MAX_STEP_TOKENS,
        cuda_graphs=False,
        has_logits=stage is None or stage.is_last,
    )


def _run(executor: LocalExecutor, seed: int) -> list[torch.Tensor]:
    numbers = np.random.default_rng(seed)
    pages = 1 + numbers.permutation(NUM_PAGES - 1)[: 12 * SLOTS].reshape(SLOTS, 12)
    executor.page_table.pages[:SLOTS, :12] = pages
    tokens = numbers.integers(3, VOCAB, (SLOTS, 12 * PAGE))
    found = []
    for step in STEPS:
        logits = executor.run(_arrays(step, tokens, pages))
        assert logits is not None
        found.append(logits.clone())
    return found


def _arrays(step: Sequence[Rows], tokens: Any, pages: Any) -> StepArrays:
    spans = [(rows.slot, np.arange(rows.start, rows.start + rows.count)) for rows in step]
    counts = np.array([rows.count for rows in step])
    bounds = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    lengths = np.array([rows.start + rows.count for rows in step], np.int32)
    places = [pages[slot, at // PAGE].astype(np.int64) * PAGE + at % PAGE for slot, at in spans]
    return StepArrays(
        token_ids=np.concatenate([tokens[slot, at] for slot, at in spans]).astype(np.int64),
        positions=np.concatenate([at for _, at in spans]).astype(np.int64),
        places=np.concatenate(places),
        slots=np.array([rows.slot for rows in step], np.int64),
        cu_q_lens=bounds,
        kv_lens=lengths,
        logits_rows=(bounds[1:] - 1).astype(np.int64),
        max_q_len=int(counts.max()),
        max_kv_len=int(lengths.max()),
    )


def main(argv: list[str]) -> None:
    number, num_bytes, folder, seed, store_path, count, rank = argv
    segment = Segment(int(number), int(num_bytes))
    run_rank(segment, int(rank), Path(folder), int(seed), store_path, int(count))


if __name__ == "__main__":
    main(sys.argv[1:])
