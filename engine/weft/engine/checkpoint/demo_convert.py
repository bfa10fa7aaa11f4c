"""SmolLM2's GGUF file to a Hugging Face directory.

The weights are Q4_1 and Q8_0 there; their values (scale * integer + offset, with float16 scales)
have more bits than bfloat16 holds, so they are stored as float32.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.files import Progress

FloatArray = npt.NDArray[np.float32]

_CONTROL_TOKEN = 3
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of the converted model."""

    num_bytes: int
    digest: str
    """BLAKE2b-256 of the file, hexadecimal."""


def convert_gguf(source: Path, out: Path, progress: Progress | None) -> dict[str, WrittenFile]:
    """Writes config.json, generation_config.json, the tokenizer's files and model.safetensors.

    Args:
        source: A Llama-architecture GGUF with SmolLM's tokenizer.
        out: An existing, empty directory.
        progress: Called with (bytes of weights written, bytes in all).

    Returns:
        What was written, by file name.

    Raises:
        ModelError: The file is not such a GGUF.
        OSError: A file cannot be read or written.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise ModelError(f"{source} is not a GGUF file: {error}") from error
    metadata = _Metadata({name: field.contents for name, field in reader.fields.items()}, source)
    documents = {
        "config.json": _config(metadata),
        "generation_config.json": _generation_config(metadata),
        "tokenizer.json": _tokenizer(metadata),
        "tokenizer_config.json": _tokenizer_config(metadata),
    }
    written = {name: _write_json(out / name, content) for name, content in documents.items()}
    tensors = [_Tensor(tensor, metadata) for tensor in reader.tensors]
    written["model.safetensors"] = _write_weights(out / "model.safetensors", tensors, progress)
    return written


class _Metadata:
    """Key-value section of a GGUF file."""

    def __init__(self, readers: Mapping[str, Callable[[], Any]], where: Path) -> None:
        self._readers = readers
        self.where = where
        if (pre := self["tokenizer.ggml.pre"]) != "smollm" or self[
            "general.architecture"
        ] != "llama":
            raise ModelError(f"{where}: expected a Llama with tokenizer smollm, found {pre!r}")

    def __getitem__(self, key: str) -> Any:
        if key not in self._readers:
            raise ModelError(f"{self.where}: no metadata {key}")
        return self._readers[key]()

    def number(self, key: str) -> float:
        """A float32, as the decimal number that it was written from."""
        return float(str(np.float32(self[key])))


class _Tensor:
    """A tensor under its Hugging Face name, dequantised on access."""

    def __init__(self, tensor: Any, metadata: _Metadata) -> None:
        self._tensor = tensor
        self.name, kind = _hugging_face_name(tensor.name, metadata.where)
        self.shape = [int(size) for size in reversed(tensor.shape)]
        self.num_bytes = 4 * math.prod(self.shape)
        heads = {
            "attn_q": "llama.attention.head_count",
            "attn_k": "llama.attention.head_count_kv",
        }
        self._heads = int(metadata[heads[kind]]) if kind in heads else 0

    def values(self) -> FloatArray:
        """The weights in Hugging Face's layout, float32."""
        from gguf.quants import dequantize

        values: FloatArray = dequantize(self._tensor.data, self._tensor.tensor_type)
        values = values.reshape(self.shape)
        return _split_halves(values, self._heads) if self._heads else values


def _split_halves(values: FloatArray, heads: int) -> FloatArray:
    """Undoes GGUF's order of q and k rows.

    GGUF pairs neighbouring rows of a head for the rotation, Hugging Face pairs row i with
    i + head_dim / 2.
    """
    rows, columns = values.shape
    paired = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, columns)


def _hugging_face_name(name: str, where: Path) -> tuple[str, str]:
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name], ""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}", parts[2]
    raise ModelError(f"{where}: unexpected tensor {name}")


def _config(metadata: _Metadata) -> dict[str, Any]:
    heads, hidden_size = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    theta = metadata.number("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(metadata: _Metadata) -> dict[str, Any]:
    """Byte-level BPE with SmolLM's pre-tokenizer.

    `tokenizer.ggml.pre = smollm` means: every digit alone first, then GPT-2's pattern. A plain
    ByteLevel (what transformers 5 makes of this file) differs where spaces precede a digit.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges: list[str] = metadata["tokenizer.ggml.merges"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _special_token(index, token)
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _special_token(index: int, token: str) -> dict[str, Any]:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]

    def token(kind: str) -> str:
        return str(tokens[metadata[f"tokenizer.ggml.{kind}_token_id"]])

    return {
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": metadata["tokenizer.ggml.add_space_prefix"],
        "bos_token": token("bos"),
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": token("eos"),
        "model_max_length": metadata["llama.context_length"],
        "pad_token": token("padding"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": token("unknown"),
    }


def _write_json(path: Path, content: object) -> WrittenFile:
    data = json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"
    return _write(path, iter([data]))


def _write_weights(
    path: Path, tensors: Sequence[_Tensor], progress: Progress | None
) -> WrittenFile:
    """safetensors: length of the header (u64), JSON header, then the tensors one after another."""
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
