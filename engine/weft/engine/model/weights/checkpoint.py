"""Reads parameters from the safetensors files of a Hugging Face directory."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from weft.checkpoint.files import Progress, weight_files
from weft.contract.errors import ModelError
from weft.contract.start_work import READING, START_WORK
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice
from weft.engine.model.weights.sent import KnownTensor
from weft.engine.model.weights.tensor_reads import NotFiniteError, StoredTensor, TensorReads

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE_NUMBERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_FP8 = {"F8_E4M3": torch.float8_e4m3fn}
_DTYPES: Mapping[str, torch.dtype] = {**_FLOATS, **_WHOLE_NUMBERS, **_FP8}
_NAMES_SHOWN = 8
_ALWAYS_READ_BYTES = 64 << 10
"""Size up to which a tensor is read although the rest comes from elsewhere: such tensors decide in
which form larger ones are packed.
"""
_MOST_UNCHECKED = 4096
"""Most tensors on a GPU whose checks may be under way. Asking for one answer waits for all of them.
"""
_SIZE_BYTES = 8
"""Bytes of the number at the start of a file, which is the header's length."""


class _Tensor(NamedTuple):
    path: Path
    begin: int
    """Offset of the first byte in the file."""
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        return _DTYPES[self.dtype].itemsize if self.dtype in _DTYPES else 1

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    def stored(self) -> StoredTensor:
        return StoredTensor(self.path, self.begin, self.shape, _DTYPES[self.dtype])


class Checkpoint(CheckpointReader):
    """The tensors of a model directory, read one by one. Use it as a context manager, which ends
    the threads that read.
    """

    def __init__(
        self,
        model_dir: Path,
        progress: Progress | None = None,
        unused: Callable[[str], bool] = lambda name: False,
        *,
        is_outline: bool = False,
    ) -> None:
        """Reads the files' headers.

        Args:
            progress: Called with (bytes read, total bytes) as tensors are read.
            unused: Says which tensors have no part in inference.
            is_outline: Reading a tensor checks its name, shape and dtype, and gives zeros unless it
                is small.

        Raises:
            ModelError: The files are missing or malformed.
        """
        self._progress = progress
        self._is_outline = is_outline
        self._where = model_dir
        self._unused = unused
        self._tensors: dict[str, _Tensor] = {}
        self._left: set[str] = set()
        self._reads = TensorReads()
        self._missing: list[str] = []
        self._skipped: set[str] = set()
        self._done_bytes = 0
        self._are_finite: dict[str, torch.Tensor] = {}
        self._num_reads = Counter[str]()
        for path in weight_files(model_dir):
            self._read_header(path)
        self._total_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reads.close()

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of the files."""
        return tuple(self._tensors)

    @property
    def known(self) -> Mapping[str, KnownTensor]:
        """All tensors, with the reads so far."""
        return {
            name: KnownTensor(
                one.shape,
                _DTYPES.get(one.dtype),
                self._num_reads[name],
                not self._unused(name),
            )
            for name, one in self._tensors.items()
        }

    def has(self, name: str) -> bool:
        return name in self._tensors

    def has_below(self, prefix: str) -> bool:
        """Whether some tensor's name begins with `prefix`."""
        return any(name.startswith(prefix) for name in self._tensors)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._tensors[name].shape if name in self._tensors else None

    def dtype_of(self, name: str) -> torch.dtype | None:
        return _DTYPES.get(self._tensors[name].dtype) if name in self._tensors else None

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Raises ModelError also if a file cannot be read, or if too many tensors are missing by
        now.
        """
        if self._is_missing(part.name):
            out.zero_()
            return
        tensor = self._check(part, _kinds_for(out.dtype))
        is_left_out = self._is_outline and tensor.num_bytes > _ALWAYS_READ_BYTES
        try:
            if is_left_out:
                out.zero_()
            elif not out.is_meta:
                with START_WORK.time(READING):
                    is_finite = self._reads.read(tensor.stored(), part.slices, out)
                self._check_finite(part.name, is_finite)
        except NotFiniteError as error:
            raise self._not_finite(part.name) from error
        except (OSError, EOFError) as error:
            raise ModelError(f"cannot read {part.name} in {tensor.path}: {error}") from error
        self._left.discard(part.name)
        self._num_reads[part.name] += 1
        self._advance(out.numel() * tensor.item_bytes)

    def _check_finite(self, name: str, are_finite: torch.Tensor | None) -> None:
        """Notes the answer that a GPU is computing for a tensor. An error is raised with a later
        tensor.
        """
        if are_finite is not None:
            known = self._are_finite.get(name)
            self._are_finite[name] = are_finite if known is None else known & are_finite
        if len(self._are_finite) >= _MOST_UNCHECKED:
            self._check_noted()

    def _check_noted(self) -> None:
        noted, self._are_finite = self._are_finite, {}
        if noted:
            answers = torch.stack(list(noted.values())).tolist()
            for name, is_finite in zip(noted, answers, strict=True):
                if not is_finite:
                    raise self._not_finite(name)

    def _not_finite(self, name: str) -> ModelError:
        return ModelError(
            f"{self._where}: {name} has a number that is not finite in the dtype it is read as; "
            "the file is damaged, or the dtype too narrow"
        )

    def check_alike(self, name: str, copy: str) -> None:
        """Raises ModelError if two tensors, where both exist, differ."""
        if not self.are_alike(name, copy):
            raise ModelError(
                f"{self._where}: {copy} is not {name}, though config.json has "
                "tie_word_embeddings: set it to false, or remove the tensor"
            )

    def are_alike(self, name: str, copy: str) -> bool:
        """Whether two tensors are equal; True if one of them does not exist."""
        if not (self.has(name) and self.has(copy)):
            return True
        first, second = (_whole(self._tensors[one].path, one) for one in (name, copy))
        is_same = first.shape == second.shape and first.dtype == second.dtype
        return is_same and torch.equal(first, second)

    def _is_missing(self, name: str) -> bool:
        """`finish` reports all missing tensors at once."""
        if name in self._tensors:
            return bool(self._missing)
        self._missing.append(name)
        if len(self._missing) > _NAMES_SHOWN:
            raise self._lacks()
        return True

    def skip(self, prefix: str) -> None:
        self._skipped.add(prefix)

    def finish(self) -> None:
        """Checks that model and files name the same tensors. Raises ModelError if tensors are
        missing, left over or not finite; the message names them.
        """
        if self._missing:
            raise self._lacks()
        self._check_noted()
        if left := sorted(self._wanted(self._left)):
            raise ModelError(
                f"{self._where} has tensors that the model does not use: {_listing(left)}"
            )
        self._advance(self._total_bytes - self._done_bytes)

    def _lacks(self) -> ModelError:
        return ModelError(f"{self._where} lacks tensors: {_listing(self._missing)}")

    def _read_header(self, path: Path) -> None:
        try:
            # `safe_open` checks that sizes and places of tensors agree with one another and the
            # file.
            with safe_open(path, framework="pt") as opened, path.open("rb") as file:
                size = int.from_bytes(file.read(_SIZE_BYTES), "little")
                header = json.loads(file.read(size))
                names = list(opened.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        for name in names:
            if name in self._tensors:
                raise ModelError(f"{path}: tensor {name} stands in two files")
            entry = header[name]
            begin = _SIZE_BYTES + size + int(entry["data_offsets"][0])
            self._tensors[name] = _Tensor(path, begin, tuple(entry["shape"]), str(entry["dtype"]))
        self._left.update(name for name in names if not self._unused(name))

    def _wanted(self, names: set[str]) -> list[str]:
        """The names among these that this rank reads itself."""
        if not self._skipped:
            return list(names)
        return [name for name in names if self._skipped.isdisjoint(_prefixes(name))]

    def _check(self, part: TensorSlice, dtypes: Mapping[str, torch.dtype]) -> _Tensor:
        name, tensor = part.name, self._tensors[part.name]
        if tensor.shape != part.shape:
            raise ModelError(
                f"{self._where}: {name} has shape {tensor.shape}, config.json asks for {part.shape}"
            )
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{self._where}: {name} is {tensor.dtype}; only {', '.join(dtypes)} are supported"
            )
        return tensor

    def _advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _whole(path: Path, name: str) -> torch.Tensor:
    """A tensor of a file, mapped into memory while it exists."""
    try:
        with safe_open(path, framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return found


def _kinds_for(dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """File dtypes that may be read as `dtype`. Quantised numbers are read only as themselves."""
    if dtype == torch.float8_e4m3fn:
        return _FP8
    return _FLOATS if dtype.is_floating_point else _WHOLE_NUMBERS


def is_rotary_buffer(name: str) -> bool:
    """Whether a tensor of old checkpoints is a rotary table, which the engine computes instead."""
    return name.endswith("rotary_emb.inv_freq")


def _prefixes(name: str) -> list[str]:
    return [name[: at + 1] for at, letter in enumerate(name) if letter == "."]


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and more" if len(names) > _NAMES_SHOWN else shown
