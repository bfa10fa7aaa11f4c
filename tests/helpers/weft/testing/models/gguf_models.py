"""Tiny GGUF files, and the same models in floats as Hugging Face keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from weft.checkpoint.gguf_metadata import LAYER_TENSORS, OUTER_TENSORS
from weft.testing.models.quantised_models import copy_of_model

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
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
    writer = GGUFWriter(path, kind)
    _write_metadata(writer, config)
    _write_tokenizer(writer, path, config["vocab_size"])
    wide = {}
    for name, weight in load_file(source / "model.safetensors").items():
        own = gguf_name(name)
        values = weight.numpy().astype(np.float32)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        part = own.split(".")[2] if own.startswith("blk.") else ""
        count = config[heads[part]] if kind == "llama" and part in heads else 0
        if count:  # llama.cpp's converter pairs neighbours.
            values = values.reshape(count, 2, values.shape[0] // count // 2, -1)
            values = values.swapaxes(1, 2).reshape(weight.shape)
        found = next((of for end, of in types.items() if name.endswith(end)), "F32")
        data, values = _in_type(values, GGMLQuantizationType[found])
        writer.add_tensor(own, data, raw_dtype=GGMLQuantizationType[found])
        if count:
            values = values.reshape(count, values.shape[0] // count // 2, 2, -1)
            values = values.swapaxes(1, 2).reshape(weight.shape)
        wide[name] = torch.from_numpy(np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, copy_of_model(source, path.with_suffix(".floats"), wide, {})


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    outer = {own: gguf for gguf, own in OUTER_TENSORS.items()}
    if name in outer:
        return outer[name]
    _, _, layer, *module, part = name.split(".")
    kinds = {own: gguf for gguf, own in LAYER_TENSORS.items()}
    return f"blk.{layer}.{kinds['.'.join(module)]}.{part}"


def source_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that was written into a file of `gguf_models`."""
    return Tokenizer.from_file(str(path.with_suffix(".tokenizer")))


def _in_type(values: Any, kind: GGMLQuantizationType) -> tuple[Any, Any]:
    """The file's bytes and the numbers that they stand for."""
    if kind == GGMLQuantizationType.Q4_K:
        data = _random_q4_k(values)
    elif kind == GGMLQuantizationType.Q6_K:
        data = _random_q6_k(values)
    else:
        data = quantize(values, kind)
    return data, dequantize(data, kind).reshape(values.shape).astype(np.float32)


def _random_q4_k(values: Any) -> Any:
    """Bytes of numbers about as large as `values`; gguf only reads this type."""
    blocks = np.random.default_rng().integers(0, 256, (values.size // 256, 144), dtype=np.uint8)
    factors = np.full((len(blocks), 2), values.std() / 200, np.float16)
    factors[:, 1] *= 7  # Offsets take about half of what numbers add.
    blocks[:, :4] = factors.view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def _random_q6_k(values: Any) -> Any:
    blocks = np.random.default_rng().integers(0, 256, (values.size // 256, 210), dtype=np.uint8)
    factors = np.full((len(blocks), 1), values.std() / 1500, np.float16)
    blocks[:, 208:] = factors.view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


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


def _write_tokenizer(writer: GGUFWriter, path: Path, size: int) -> None:
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
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
