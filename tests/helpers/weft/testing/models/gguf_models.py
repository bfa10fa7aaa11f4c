"""Tiny GGUF files, and the same models in floats as Hugging Face keeps them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from weft.testing.models.quantised_models import copy_of_model

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 256,
}
"""Of models whose rows are whole blocks of every type; for `make_tiny`."""
SPECIAL = ("<|begin|>", "<|end|>")


def gguf_models(source: Path, path: Path, types: dict[str, str]) -> tuple[Path, Path]:
    """A GGUF file of a model with a byte-level tokenizer, and the model in the file's numbers.

    Args:
        source: From `make_tiny` with `SIZES`.
        path: Of the file; the model is beside it.
        types: Type of the tensors whose Hugging Face names end with a key; others are F32.
    """
    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    writer = GGUFWriter(path, kind.replace("_moe", "moe"))
    _write_metadata(writer, config)
    _write_tokenizer(writer, path, config["vocab_size"])
    wide = {}
    tensors = load_file(source / "model.safetensors")
    for own, names in _named(tensors, kind, config["num_hidden_layers"]).items():
        values = np.stack([tensors[name].numpy().astype(np.float32) for name in names])
        values = values if ".experts." in names[0] else values[0]
        shape = values.shape
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        part = own.split(".")[2] if own.startswith("blk.") else ""
        count = config[heads[part]] if kind == "llama" and part in heads else 0
        if count:  # llama.cpp's converter pairs neighbours.
            values = values.reshape(count, 2, values.shape[0] // count // 2, -1)
            values = values.swapaxes(1, 2).reshape(shape)
        found = next((of for end, of in types.items() if names[0].endswith(end)), "F32")
        data, values = _in_type(values, GGMLQuantizationType[found])
        writer.add_tensor(own, data, raw_dtype=GGMLQuantizationType[found])
        if count:
            values = values.reshape(count, values.shape[0] // count // 2, 2, -1)
            values = values.swapaxes(1, 2).reshape(shape)
        for name, part_of in zip(names, values if len(names) > 1 else [values], strict=True):
            wide[name] = torch.from_numpy(np.ascontiguousarray(part_of))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, copy_of_model(source, path.with_suffix(".floats"), wide, {})


def write_layer(
    path: Path, architecture: str, kind: str, numbers: dict[str, int], rows: dict[str, int]
) -> dict[str, Any]:
    """A GGUF file of one layer's matrices of 256 columns, and a draft head after it; returns the
    matrices' numbers.

    Args:
        path: Of the file.
        architecture: GGUF's name.
        kind: Type of the matrices.
        numbers: Metadata `ssm.*` of the architecture.
        rows: Number of rows by the tensors' names.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_nextn_predict_layers(1)
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.ssm.{key}", value)
    written, rng = {}, np.random.default_rng()
    for name, count in rows.items():
        values = rng.standard_normal((count, 256), dtype=np.float32)
        data, written[name] = _in_type(values, GGMLQuantizationType[kind])
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=GGMLQuantizationType[kind])
    writer.add_tensor("blk.1.nextn.eh_proj.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _named(names: Any, kind: str, layers: int) -> dict[str, list[str]]:
    """GGUF's names, each with the Hugging Face tensors that it holds: one, or all experts'."""
    arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == kind.replace("_moe", "moe"))
    known, found = get_tensor_name_map(arch, layers), dict[str, list[str]]()
    numbers = re.compile(r"\.experts\.(\d+)\.")
    for name in sorted(names, key=lambda one: [int(n) for n in numbers.findall(one)]):
        own = known.get_name(numbers.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        found.setdefault(own, []).append(name)
    return found


def source_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that was written into a file of `gguf_models`."""
    return Tokenizer.from_file(str(path.with_suffix(".tokenizer")))


def _in_type(values: Any, kind: GGMLQuantizationType) -> tuple[Any, Any]:
    """The file's bytes and the numbers that they stand for."""
    data = _random_blocks(values, kind) if kind.name in _PLACES else quantize(values, kind)
    return data, dequantize(data, kind).reshape(values.shape).astype(np.float32)


_PLACES = {
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Bytes of a block at which the types that gguf only reads have a factor, a float16 each."""


def _random_blocks(values: Any, kind: GGMLQuantizationType) -> Any:
    """Bytes of numbers about as large as `values`."""
    per_block, size = GGML_QUANT_SIZES[kind]
    count, rng = values.size // per_block, np.random.default_rng()
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)

    def with_factors(factor: float) -> Any:
        for number, place in enumerate(_PLACES[kind.name]):
            # Scales of offsets: these would be larger than what they are added to.
            own = np.full((count, 1), factor * (7 if number else 1), np.float16)
            blocks[:, place : place + 2] = own.view(np.uint8)
        return dequantize(blocks.reshape(-1), kind)

    with_factors(float(values.std() / with_factors(1.0).std()))
    return blocks.reshape(*values.shape[:-1], -1)


def _write_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def write_tokenizer(path: Path, pre: str) -> None:
    """A GGUF file of a tokenizer alone, of a byte-level vocabulary, whose `pre` this is."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    _write_tokenizer(writer, path, 300, pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: GGUFWriter, path: Path, size: int, pre: str = "gpt-2") -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (Path(__file__).parent / "tiny_models.py").read_text()
    tokenizer.train_from_iterator([text, text], trainer)
    tokenizer.save(str(path.with_suffix(".tokenizer")))
    content = json.loads(tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])]
    assert len(tokens) == size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
