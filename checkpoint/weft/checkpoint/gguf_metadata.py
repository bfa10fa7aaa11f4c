"""Converts the metadata of a GGUF file to the form of Hugging Face's files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from weft.contract.errors import ModelError

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""`general.architecture` to the name of the class and `model_type`."""
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's tensors, with the names of the modules that they belong to."""
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROTATION_FACTORS = "rope_freqs.weight"
"""Tensor of divisors of the wavelengths in Llama 3.1's rotation; `rope_parameters` replaces it."""


class GgufMetadata:
    """Key-value section of a GGUF file, and its tensors."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.where = path
        try:
            reader = GGUFReader(path)
        except (ValueError, OSError) as error:
            raise ModelError(f"{path} is not a GGUF file: {error}") from error
        self._readers: Mapping[str, Callable[[], Any]] = {
            name: field.contents for name, field in reader.fields.items()
        }
        self.tensors: Mapping[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        """`ReaderTensor` by GGUF's names."""
        self.architecture = str(self["general.architecture"])
        """GGUF's name for the architecture."""
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {self.architecture!r} is not supported "
                f"({', '.join(ARCHITECTURES)} are)"
            )

    def __contains__(self, key: str) -> bool:
        return key in self._readers

    def __getitem__(self, key: str) -> Any:
        if key not in self._readers:
            raise ModelError(f"{self.where}: no metadata {key}")
        return self._readers[key]()

    def get(self, key: str, default: Any = None) -> Any:
        reader = self._readers.get(key)
        return default if reader is None else reader()

    def own(self, key: str) -> Any:
        """A value whose key begins with the architecture's name."""
        return self[f"{self.architecture}.{key}"]

    def number(self, key: str) -> float:
        """Like `own`, for a float32, as the decimal number that it was written from."""
        return float(str(np.float32(self.own(key))))

    def heads_of(self, kind: str) -> int:
        """Heads whose rows are in GGUF's order in a layer's tensors of this kind; 0: rows are in
        order.

        Files of the architecture llama put rows that are rotated together next to each other, where
        Hugging Face pairs row i with i + head_dim / 2.
        """
        if self.architecture != "llama" or kind not in ("attn_q", "attn_k"):
            return 0
        return int(self.own("attention.head_count" + ("_kv" if kind == "attn_k" else "")))

    def hugging_face_name(self, name: str) -> tuple[str, str]:
        """The Hugging Face name of a tensor, and its kind if it belongs to a layer, else ""."""
        if name in OUTER_TENSORS:
            return OUTER_TENSORS[name], ""
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
            return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}", parts[2]
        raise ModelError(f"{self.where}: unexpected tensor {name}")

    def config(self) -> dict[str, Any]:
        """Content of config.json."""
        architecture, model_type = ARCHITECTURES[self.architecture]
        heads, hidden_size = self.own("attention.head_count"), self.own("embedding_length")
        theta = self.number("rope.freq_base")
        head_dim = self.get(f"{self.architecture}.attention.key_length", hidden_size // heads)
        self._refuse("rope.dimension_count", head_dim)
        self._refuse("attention.sliding_window", 0)
        self._refuse("attention.value_length", head_dim)
        special = {
            f"{kind}_token_id": self[f"tokenizer.ggml.{name}_token_id"]
            for kind, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if f"tokenizer.ggml.{name}_token_id" in self
        }
        content = {
            "attention_bias": False,
            "dtype": "float32",
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": self.own("feed_forward_length"),
            "max_position_embeddings": self.own("context_length"),
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": self.own("block_count"),
            "num_key_value_heads": self.own("attention.head_count_kv"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": {"rope_theta": theta, **self._rotation(theta, head_dim)},
            "rope_theta": theta,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            **special,
        }
        return {
            "architectures": [architecture],
            "model_type": model_type,
            **dict(sorted(content.items())),
        }

    def _refuse(self, key: str, only: int) -> None:
        """Raises ModelError if a value of the architecture would change the computation."""
        value = self.get(f"{self.architecture}.{key}", only)
        if value != only:
            raise ModelError(
                f"{self.where}: {self.architecture}.{key} is {value}; only {only} is supported"
            )

    def _rotation(self, theta: float, head_dim: int) -> dict[str, Any]:
        prefix = f"{self.architecture}.rope.scaling"
        kind = self.get(f"{prefix}.type", "none")
        if ROTATION_FACTORS in self.tensors:
            return self._llama3_rotation(theta, head_dim)
        if kind == "none" or float(self.get(f"{prefix}.factor", 1.0)) == 1.0:
            return {"rope_type": "default"}
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
        raise ModelError(f"{self.where}: {prefix}.type {kind!r} is not supported")

    def _llama3_rotation(self, theta: float, head_dim: int) -> dict[str, Any]:
        """The parameters of Llama 3.1 and 3.2, if they explain the file's factors."""
        found = np.asarray(self.tensors[ROTATION_FACTORS].data, dtype=np.float64).reshape(-1)
        original, low, high, factor = 8192, 1.0, 4.0, float(round(found.max()))
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        share = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        expected = 1 / ((1 - share) / factor + share)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
            raise ModelError(
                f"{self.where}: {ROTATION_FACTORS} is not that of Llama 3.1 or 3.2, the only ones "
                "that are supported"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }


def split_halves(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undoes GGUF's order of the rows of `heads` heads, which `GgufMetadata.heads_of` describes."""
    paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
