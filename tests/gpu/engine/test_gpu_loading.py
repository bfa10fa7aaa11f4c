"""Tensors read from files into a GPU's memory, against the same parts taken by torch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weft.contract.errors import ModelError
from weft.engine.model.weights import tensor_reads
from weft.engine.model.weights.checkpoint import Checkpoint
from weft.engine.model.weights.reader import TensorSlice

pytestmark = pytest.mark.needs("cuda")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("most_bytes", [4096, 1 << 20])
def test_parts_are_those_that_torch_takes(
    most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reads, "_MIN_PIECE_BYTES", 1024)
    monkeypatch.setattr(tensor_reads, "_MAX_PIECE_BYTES", most_bytes)
    tensors = {
        f"{rows}-{dtype}": torch.randn(rows, 301).to(dtype)
        for rows in (1, 90, 1500)
        for dtype in DTYPES
    }
    save_file(tensors, tmp_path / "model.safetensors")
    # Which tensors are read is drawn, so that some may be left.
    with Checkpoint(tmp_path, unused=lambda _: True) as file:
        for _ in range(40):
            name, tensor = random.choice(list(tensors.items()))
            first, left = random.randrange(len(tensor)), random.randrange(300)
            slices = random.choice(
                [(), (first,), (slice(first, None),), (slice(first, None), slice(left, None))]
            )
            part = TensorSlice(name, tuple(tensor.shape), slices)
            # Memory that work enqueued before still writes to.
            out = torch.zeros(part.size, dtype=random.choice(DTYPES), device="cuda")
            for _ in range(20):
                out.add_(1)
            file.read_into(part, out)
            doubled = out * 2
            assert torch.equal(doubled.cpu(), tensor[slices].to(out.dtype) * 2), part
        file.finish()


@pytest.mark.parametrize("stored", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("rows", [5, 700])
def test_numbers_that_are_not_finite_are_refused_by_name(
    stored: torch.dtype, bad: float, rows: int, tmp_path: Path
) -> None:
    tensors = {name: torch.randn(rows, 301).to(stored) for name in ("sound", "poisoned")}
    is_fp8 = stored == torch.float8_e4m3fn  # It has no infinities.
    bad = torch.nan if is_fp8 else bad
    tensors["poisoned"][random.randrange(rows), random.randrange(301)] = bad
    save_file(tensors, tmp_path / "model.safetensors")
    dtype = stored if is_fp8 else random.choice(DTYPES)
    with Checkpoint(tmp_path, unused=lambda _: True) as file:

        def read(name: str) -> None:
            out = torch.empty(rows, 301, dtype=dtype, device="cuda")
            file.read_into(TensorSlice(name, (rows, 301)), out)
            file.finish()  # The GPU's answer about a large tensor may be noted.

        read("sound")
        with pytest.raises(ModelError, match="poisoned has a number that is not finite"):
            read("poisoned")
