"""Converts SmolLM2's GGUF file to a Hugging Face directory.

The file's weights are Q4_1 and Q8_0. Their values (scale * integer + offset, with float16 scales)
have more bits than bfloat16 holds, so that they are stored as float32.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from weft.checkpoint.files import Progress
from weft.checkpoint.gguf_metadata import GgufMetadata
from weft.checkpoint.gguf_tokenizer import tokenizer_files
from weft.contract.arrays import Float32Array
from weft.contract.errors import ModelError


@dataclass(frozen=True, slots=True)
class WrittenFile:
    num_bytes: int
    digest: str
    """BLAKE2b-256 of the file, hexadecimal."""


def convert_gguf(source: Path, out: Path, progress: Progress | None) -> dict[str, WrittenFile]:
    """Writes config.json, generation_config.json, the tokenizer's files and model.safetensors;
    returns them by name.

    Args:
        source: A Llama-architecture GGUF with SmolLM's tokenizer.
        out: An existing, empty directory.
        progress: Called with (bytes of weights written, bytes in all).
    """
    metadata = GgufMetadata(source)
    pre = metadata.get("tokenizer.ggml.pre")
    if (metadata.architecture, pre) != ("llama", "smollm"):
        raise ModelError(f"{source}: expected a Llama with tokenizer smollm, found {pre!r}")
    config = metadata.config()
    documents = {
        "config.json": config,
        "generation_config.json": {
            name: config[name] for name in config if name.endswith("_token_id")
        },
        **tokenizer_files(metadata),
    }
    written = {name: _write_json(out / name, content) for name, content in documents.items()}
    tensors = [_Tensor(tensor, metadata) for tensor in metadata.tensors.values()]
    written["model.safetensors"] = _write_weights(out / "model.safetensors", tensors, progress)
    return written


class _Tensor:
    """A tensor under its Hugging Face name; its values are dequantised to float32 on access."""

    def __init__(self, tensor: Any, metadata: GgufMetadata) -> None:
        self._tensor = tensor
        self.name = metadata.hugging_face_name(tensor.name)
        self.shape = [int(size) for size in reversed(tensor.shape)]
        self.num_bytes = 4 * math.prod(self.shape)
        self._order = metadata.order_of(tensor.name)

    def values(self) -> Float32Array:
        from gguf.quants import dequantize

        values: Float32Array = dequantize(self._tensor.data, self._tensor.tensor_type)
        values = values.reshape(self.shape)
        return values if self._order is None else self._order.of(values)


def _write_json(path: Path, content: object) -> WrittenFile:
    data = json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"
    return _write(path, iter([data]))


def _write_weights(
    path: Path, tensors: Sequence[_Tensor], progress: Progress | None
) -> WrittenFile:
    """The format: length of the header (u64), JSON header, then the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": "F32",
            "shape": tensor.shape,
            "data_offsets": [total, total + tensor.num_bytes],
        }
        total += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text)) + text
        done = 0
        for tensor in tensors:
            yield tensor.values().astype("<f4", copy=False).data.cast("B")
            done += tensor.num_bytes
            if progress is not None:
                progress(done, total)

    return _write(path, pieces())


def _write(path: Path, pieces: Iterator[bytes | memoryview]) -> WrittenFile:
    digest = hashlib.blake2b(digest_size=32)
    file: BinaryIO
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
        return WrittenFile(file.tell(), digest.hexdigest())
