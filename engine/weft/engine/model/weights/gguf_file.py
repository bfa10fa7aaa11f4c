"""Reads parameters from a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from weft.checkpoint.files import GGUF_FILE, Progress
from weft.checkpoint.gguf_metadata import ROTATION_FACTORS, GgufMetadata, split_halves
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice

GROUP = 32
"""Columns that share a scale, in all types that are kept as integers."""
_NAMES_SHOWN = 8


class GgufGroups(NamedTuple):
    """A matrix of scale * number + offset, with one scale and offset per `GROUP` columns."""

    numbers: torch.Tensor
    """[N, K] int8. Of 4 bits: 0 to 15, or without offsets -8 to 7. Of 8 bits: -128 to 127."""
    scales: torch.Tensor
    """[N, K / GROUP] float32."""
    offsets: torch.Tensor | None
    """[N, K / GROUP] float32, or None."""
    bits: int
    """4 or 8."""


class GgufFile:
    """The tensors of a GGUF file by their Hugging Face names; a `CheckpointReader`. Use it as a
    context manager, which keeps the file mapped into memory.
    """

    def __init__(self, model_dir: Path, progress: Progress | None = None) -> None:
        """Reads the header.

        Args:
            model_dir: From `gguf_folder`.
            progress: Called with (bytes read, total bytes) as tensors are read.

        Raises:
            ModelError: The file is damaged, or has tensors that models of its architecture lack.
        """
        self._progress, self._done_bytes = progress, 0
        self._metadata = GgufMetadata(model_dir / GGUF_FILE)
        self._where = (model_dir / GGUF_FILE).resolve()
        self._tensors: dict[str, tuple[Any, int]] = {}
        for name, tensor in self._metadata.tensors.items():
            if name != ROTATION_FACTORS:
                own, kind = self._metadata.hugging_face_name(name)
                self._tensors[own] = (tensor, self._metadata.heads_of(kind))
        self._left = set(self._tensors)
        self._missing: list[str] = []
        self._total_bytes = sum(int(tensor.n_bytes) for tensor, _ in self._tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        if name not in self._tensors:
            return None
        return tuple(int(size) for size in reversed(self._tensors[name][0].shape))

    def dtype_of(self, name: str) -> torch.dtype | None:
        """None: a file's number formats are no dtypes."""
        return None

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        from gguf.quants import dequantize

        if part.name not in self._tensors:
            self._missing.append(part.name)
            out.zero_()
            return
        if not out.dtype.is_floating_point:
            raise ModelError(f"{self._where}: {part.name} is asked for as {out.dtype}")
        shape = self.shape_of(part.name)
        if shape != part.shape:
            raise ModelError(
                f"{self._where}: {part.name} has shape {shape}, its metadata ask for {part.shape}"
            )
        tensor, heads = self._take(part.name)
        if out.is_meta:
            return
        try:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self._where}: {part.name}: {kind} is not supported") from error
        values = split_halves(values, heads) if heads else np.ascontiguousarray(values)
        if not np.isfinite(values).all():
            raise ModelError(f"{self._where}: {part.name}: a number is not finite")
        # Values that are not a copy are mapped from the file and are not writeable.
        values = values if values.flags.writeable else values.copy()
        out.copy_(torch.from_numpy(values)[part.slices])

    def groups(self, name: str) -> GgufGroups | None:
        """A matrix as the integers of the file; None if it has another format, or floats. Raises
        ModelError if a scale is not finite.
        """
        if name not in self._tensors:
            return None
        tensor, heads = self._tensors[name]
        decode = _DECODERS.get(tensor.tensor_type.name)
        if decode is None:
            return None
        self._take(name)
        numbers, scales, offsets, bits = decode(np.asarray(tensor.data))
        parts = [numbers, scales, *([] if offsets is None else [offsets])]
        if heads:
            parts = [split_halves(part, heads) for part in parts]
        if not all(np.isfinite(part).all() for part in parts[1:]):
            raise ModelError(f"{self._where}: {name}: a scale is not finite")
        first, second, *rest = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
        return GgufGroups(first, second, rest[0] if rest else None, bits)

    def skip(self, prefix: str) -> None:
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def finish(self) -> None:
        for problem, names in (
            ("lacks tensors", self._missing),
            ("has tensors that the model does not use", sorted(self._left)),
        ):
            if names:
                more = " and more" if len(names) > _NAMES_SHOWN else ""
                raise ModelError(
                    f"{self._where} {problem}: {', '.join(names[:_NAMES_SHOWN])}{more}"
                )

    def _take(self, name: str) -> tuple[Any, int]:
        tensor, heads = self._tensors[name]
        if name in self._left:
            self._left.remove(name)
            self._done_bytes += int(tensor.n_bytes)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)
        return tensor, heads


_Decoded = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None, int]
"""Numbers, scales, offsets, bits."""


def _blocks(data: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """[N, bytes of a row] -> [N, blocks, bytes of a block]."""
    return data.reshape(data.shape[0], -1, size)


def _halves(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Bytes of float16, [.., 2 n] -> [.., n] float32."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _fours(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[.., 16] bytes -> 32 numbers: the lower bits of all bytes first."""
    return np.concatenate((data & 15, data >> 4), axis=-1).astype(np.int8)


def _q4_0(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 32: scale, 16 bytes."""
    blocks = _blocks(data, 18)
    numbers = _fours(blocks[..., 2:]) - 8
    return numbers.reshape(len(data), -1), _halves(blocks[..., :2])[..., 0], None, 4


def _q4_1(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 32: scale, offset, 16 bytes."""
    blocks = _blocks(data, 20)
    both = _halves(blocks[..., :4])
    return _fours(blocks[..., 4:]).reshape(len(data), -1), both[..., 0], both[..., 1], 4


def _q8_0(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 32: scale, 32 int8."""
    blocks = _blocks(data, 34)
    numbers = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return numbers.reshape(len(data), -1), _halves(blocks[..., :2])[..., 0], None, 8


def _q4_k(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 256: scale of scales, scale of offsets, 8 of each in 6 bits (12 bytes), 4 times 32
    bytes whose lower bits are a group and whose higher bits are the next.
    """
    blocks = _blocks(data, 144)
    factors = _halves(blocks[..., :4])
    low, middle, high = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate((low & 63, high & 15 | low >> 6 << 4), axis=-1)
    offsets = np.concatenate((middle & 63, high >> 4 | middle >> 6 << 4), axis=-1)
    bytes_of = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    numbers = np.stack((bytes_of & 15, bytes_of >> 4), axis=-2).astype(np.int8)
    rows = len(data)
    return (
        numbers.reshape(rows, -1),
        (factors[..., :1] * scales).reshape(rows, -1),
        (-factors[..., 1:] * offsets).reshape(rows, -1),
        4,
    )


_DECODERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k}
"""Types of llama.cpp (ggml-quants.c) whose groups the kernels take without conversion."""
