"""Parts of tensors read from files, against the same parts taken by torch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.contract.errors import ModelError
from weft.engine.model.weights import tensor_reads
from weft.engine.model.weights.checkpoint import Checkpoint
from weft.engine.model.weights.reader import TensorSlice

SHAPES = ((), (1,), (7,), (5, 3), (40, 11), (4, 9, 6), (3, 1, 5, 2))
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a tensor, and several threads on any machine."""
    monkeypatch.setattr(tensor_reads, "num_cores", lambda: 3)
    monkeypatch.setattr(tensor_reads, "_MIN_PIECE_BYTES", 16)
    monkeypatch.setattr(tensor_reads, "_MAX_PIECE_BYTES", random.choice((16, 50, 200)))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 50).to(dtype)


def random_part(shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Some numbers, then slices, as models ask for; fewer than there are axes."""
    count = random.randint(0, len(shape))
    numbers = [random.randrange(n) for n in shape[: random.randint(0, count)]]
    slices = []
    for n in shape[len(numbers) : count]:
        first = random.randint(0, n - 1)
        slices.append(slice(first, random.randint(first + 1, n)))
    return (*numbers, *slices)


@pytest.mark.parametrize(("stored", "wanted"), [(FLOATS, FLOATS), (WHOLE, (torch.int64,))])
def test_parts_are_those_that_torch_takes(
    stored: tuple[torch.dtype, ...], wanted: tuple[torch.dtype, ...], tmp_path: Path
) -> None:
    tensors = {
        f"{number}-{dtype}": random_tensor(shape, dtype)
        for number, shape in enumerate(SHAPES)
        for dtype in stored
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"about": "é" * 9})
    with Checkpoint(tmp_path) as file:
        for name, tensor in tensors.items():
            for dtype in wanted:
                part = TensorSlice(name, tuple(tensor.shape), random_part(tuple(tensor.shape)))
                out = torch.full(part.size, 77, dtype=dtype)
                file.read_into(part, out)
                assert torch.equal(out, tensor[part.slices].to(dtype)), part
        file.finish()


def test_a_file_that_was_cut_meanwhile_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_file({"a": torch.randn(300, 5)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as file:
        with (tmp_path / "model.safetensors").open("r+b") as cut:
            cut.truncate(2000)
        with pytest.raises(ModelError, match=r"cannot read a in .*model\.safetensors: .*ends"):
            file.read_into(TensorSlice("a", (300, 5)), torch.empty(300, 5))
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"cannot read a in .*No such file"):
            file.read_into(TensorSlice("a", (300, 5)), torch.empty(300, 5))


def test_fp8_is_read_as_itself(tmp_path: Path) -> None:
    tensor = torch.randn(9, 16).to(torch.float8_e4m3fn)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    out = torch.zeros(4, 16, dtype=torch.float8_e4m3fn)
    with Checkpoint(tmp_path) as file:
        file.read_into(TensorSlice("a", (9, 16), (slice(2, 6),)), out)
    saved = load_file(tmp_path / "model.safetensors")["a"]
    assert torch.equal(out.view(torch.uint8), saved[2:6].view(torch.uint8))


@pytest.mark.parametrize("stored", [*FLOATS, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(
    stored: torch.dtype, bad: float, tmp_path: Path
) -> None:
    rows, columns = random.randint(2, 40), random.randint(1, 30)
    sound, poisoned = random_tensor((rows, columns), stored), random_tensor((rows, columns), stored)
    row = random.randrange(rows)
    is_fp8 = stored == torch.float8_e4m3fn  # It has no infinities.
    poisoned[row, random.randrange(columns)] = torch.nan if is_fp8 else bad
    save_file({"a.sound": sound, "a.poisoned": poisoned}, tmp_path / "model.safetensors")
    dtype = stored if is_fp8 else random.choice(FLOATS)
    with Checkpoint(tmp_path) as file:
        part = TensorSlice("a.sound", (rows, columns))
        file.read_into(part, torch.empty(part.size, dtype=dtype))
        part = TensorSlice("a.poisoned", (rows, columns), (slice(0, row),))
        file.read_into(part, torch.empty(part.size, dtype=dtype))
        part = TensorSlice("a.poisoned", (rows, columns), (slice(row, None),))
        with pytest.raises(ModelError, match=r"a\.poisoned has a number that is not finite"):
            file.read_into(part, torch.empty(part.size, dtype=dtype))


def test_a_dtype_that_is_too_narrow_is_told(tmp_path: Path) -> None:
    save_file({"wide": torch.full((3, 5), 1e6)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as file:
        part = TensorSlice("wide", (3, 5))
        file.read_into(part, torch.empty(part.size, dtype=torch.bfloat16))
        with pytest.raises(ModelError, match=r"wide has .*dtype too narrow"):
            file.read_into(part, torch.empty(part.size, dtype=torch.float16))
