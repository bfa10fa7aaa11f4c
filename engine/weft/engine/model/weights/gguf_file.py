"""Reads parameters from a GGUF file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from weft.checkpoint.files import GGUF_FILE, Progress
from weft.checkpoint.gguf_metadata import FACTORS, GgufMetadata, Source
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice

GROUP = 32
"""Columns that share a scale, in all types that are kept as integers."""
_NAMES_SHOWN = 8
_LAYER = re.compile(r"^model\.layers\.(\d+)\.$")


class GgufGroups(NamedTuple):
    """A matrix of scale * number + offset, with one scale and offset per `GROUP` columns."""

    numbers: torch.Tensor
    """[N, K] int8. Of 4 bits: 0 to 15, or without offsets -8 to 7, or codes of e2m1 from 0 to 15.
    Of 8 bits: -128 to 127.
    """
    scales: torch.Tensor
    """[N, K / GROUP] float32."""
    offsets: torch.Tensor | None
    """[N, K / GROUP] float32, or None."""
    bits: int
    """4 or 8."""
    is_e2m1: bool = False
    """Whether the numbers are codes of MXFP4."""


class GgufFile(CheckpointReader):
    """The tensors of a GGUF file by their Hugging Face names. Use it as a context manager, which
    keeps the file mapped into memory.
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
        self._left = set(self._metadata.tensors) - set(FACTORS)
        self._missing: list[str] = []
        tensors = self._metadata.tensors
        self._total_bytes = sum(int(tensors[name].n_bytes) for name in self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The mapping ends with the last array that is made of it."""

    def has(self, name: str) -> bool:
        if (made := self._metadata.made_tensor(name)) is not None:
            return all(self._metadata.has_tensor(source) for source in made[1])
        return self._metadata.source_of(name) is not None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        if not self.has(name):
            return None
        if (made := self._metadata.made_tensor(name)) is not None:
            shapes = [self._shape(source) for source in made[1]]
            empty = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
            return tuple(made[0].make(empty).shape)
        source = self._source(name)
        rows, *others = self._shape(source.name)[source.expert is not None :]
        return (rows if source.half is None else rows // 2, *others)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """None: a file's number formats are no dtypes."""
        return None

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        if not self.has(part.name):
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
        values = self._values(part.name, is_read=not out.is_meta)
        if values is None:
            return
        if not np.isfinite(values).all():
            raise ModelError(f"{self._where}: {part.name}: a number is not finite")
        # Values that are not a copy are mapped from the file and are not writeable.
        values = np.asarray(values, order="C")
        values = values if values.flags.writeable else values.copy()
        out.copy_(torch.from_numpy(values)[part.slices])

    def _values(self, name: str, *, is_read: bool) -> npt.NDArray[Any] | None:
        """A tensor of the model in floats; None if it need not be read."""
        if (made := self._metadata.made_tensor(name)) is not None:
            for source in made[1]:
                self._take(source)
            return made[0].make([self._decoded(one) for one in made[1]]) if is_read else None
        found = self._source(name)
        self._take(found.name)
        if not is_read:
            return None
        return _half(self._decoded(found.name, found.expert), found)

    def _decoded(self, source: str, expert: int | None = None) -> npt.NDArray[Any]:
        """A tensor of the file in floats and the model's order, or that of one expert."""
        from gguf.quants import dequantize

        if (number := self._metadata.number_of(source)) is not None:
            return np.float32(number).reshape(1)
        tensor, shape = self._metadata.tensors[source], self._shape(source)
        data = tensor.data if expert is None else tensor.data[expert]
        try:
            values = dequantize(np.asarray(data), tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self._where}: {source}: {kind} is not supported") from error
        values = values.reshape(shape[expert is not None :])
        order = self._metadata.order_of(source)
        return values if order is None else order.of(values)

    def _shape(self, source: str) -> tuple[int, ...]:
        if (tensor := self._metadata.tensors.get(source)) is None:
            return (1,)  # A number of the metadata.
        return tuple(int(size) for size in reversed(tensor.shape))

    def _source(self, name: str) -> Source:
        found = self._metadata.source_of(name)
        assert found is not None, f"{name} is not in the file"
        return found

    def groups(self, name: str) -> GgufGroups | None:
        """A matrix as the integers of the file; None if it has another format, or floats. Raises
        ModelError if a scale is not finite.
        """
        found = self._metadata.source_of(name)
        if found is None or self._metadata.made_tensor(name) is not None:
            return None
        tensor, order = self._metadata.tensors[found.name], self._metadata.order_of(found.name)
        decode = _DECODERS.get(tensor.tensor_type.name)
        if decode is None or not (order is None or order.keeps_groups(GROUP)):
            return None
        self._take(found.name)
        data = _half(tensor.data if found.expert is None else tensor.data[found.expert], found)
        numbers, scales, offsets, bits = decode(np.asarray(data))
        parts = [numbers, scales, *([] if offsets is None else [offsets])]
        if order is not None:
            parts = [order.of(numbers), *(order.of(part, GROUP) for part in parts[1:])]
        if not all(np.isfinite(part).all() for part in parts[1:]):
            raise ModelError(f"{self._where}: {name}: a scale is not finite")
        first, second, *rest = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
        is_e2m1 = tensor.tensor_type.name == "MXFP4"
        return GgufGroups(first, second, rest[0] if rest else None, bits, is_e2m1)

    def skip(self, prefix: str) -> None:
        layer = _LAYER.match(prefix)
        own = f"blk.{layer.group(1)}." if layer else prefix
        self._left = {name for name in self._left if not name.startswith(own)}

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

    def _take(self, source: str) -> None:
        if source in self._left:
            self._left.remove(source)
            self._done_bytes += int(self._metadata.tensors[source].n_bytes)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def _half(rows: npt.NDArray[Any], source: Source) -> npt.NDArray[Any]:
    if source.half is None:
        return rows
    middle = len(rows) // 2
    return rows[:middle] if source.half == 0 else rows[middle:]


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


def _fives(low: npt.NDArray[Any], high: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[.., 16] bytes and [.., 4] bytes of the highest bits -> 32 numbers of 5 bits."""
    bits = np.unpackbits(high, axis=-1, bitorder="little").astype(np.int8)
    return np.asarray(_fours(low) | bits << 4)


def _q5_0(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 32: scale, 4 bytes of highest bits, 16 bytes."""
    blocks = _blocks(data, 22)
    numbers = _fives(blocks[..., 6:], blocks[..., 2:6]) - 16
    return numbers.reshape(len(data), -1), _halves(blocks[..., :2])[..., 0], None, 8


def _q5_1(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 32: scale, offset, 4 bytes of highest bits, 16 bytes."""
    blocks = _blocks(data, 24)
    both = _halves(blocks[..., :4])
    numbers = _fives(blocks[..., 8:], blocks[..., 4:8])
    return numbers.reshape(len(data), -1), both[..., 0], both[..., 1], 8


def _q5_k(data: npt.NDArray[Any]) -> _Decoded:
    """As Q4_K, with 32 bytes before the numbers: bit i of byte j is the highest bit of number j of
    group i.
    """
    blocks = _blocks(data, 176)
    rest = np.concatenate((blocks[..., :16], blocks[..., 48:]), axis=-1)
    low, scales, offsets, _ = _q4_k(rest.reshape(len(data), -1))
    high = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little").swapaxes(-1, -2)
    return low | high.reshape(low.shape).astype(np.int8) << 4, scales, offsets, 8


_IQ4 = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.int8
)
"""The numbers that four bits of IQ4 stand for."""


def _iq4_nl(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 32: scale, 16 bytes."""
    blocks = _blocks(data, 18)
    numbers = _IQ4[_fours(blocks[..., 2:])]
    return numbers.reshape(len(data), -1), _halves(blocks[..., :2])[..., 0], None, 8


def _iq4_xs(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 256: scale of scales, 8 scales of 6 bits (the upper two of all, then the lower
    four), 8 times 16 bytes.
    """
    blocks = _blocks(data, 136)
    upper = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16).astype(np.int32)
    high = upper >> 2 * np.arange(8) & 3
    low = np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), axis=-1)
    scales = (low.reshape(high.shape) | high << 4) - 32
    numbers = _IQ4[_fours(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))]
    wide = _halves(blocks[..., :2]) * scales.astype(np.float32)
    return numbers.reshape(len(data), -1), wide.reshape(len(data), -1), None, 8


def _mxfp4(data: npt.NDArray[Any]) -> _Decoded:
    """Block of 32: exponent of 2 with a bias of 127, 16 bytes."""
    blocks = _blocks(data, 17)
    scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 127)
    return _fours(blocks[..., 1:]).reshape(len(data), -1), scales, None, 4


_DECODERS = {
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q8_0": _q8_0,
}
"""Types of llama.cpp (ggml-quants.c) whose groups the kernels take without conversion."""
