"""Converts the metadata of a GGUF file to the form of Hugging Face's files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from weft.checkpoint.gguf_archs import (
    ARCHITECTURES,
    ROTATED_BY_KIND,
    ROTATED_IN_PART,
    config_values,
)
from weft.checkpoint.gguf_values import MADE, PAIRED, TILED, MadeTensor, Order, turned
from weft.contract.errors import ModelError

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


_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROTATION_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
"""Tensors that become fields of config.json."""
_EXPERT = re.compile(
    r"^(?:model|backbone)\.layers\.(\d+)\."
    r"(?:(?:[a-z_.]+\.)?experts\.|block_sparse_moe\.|)(\d+)\.(?=[a-z])"
)
"""A tensor of one expert, in all spellings that models have."""
_OTHER_SPELLINGS = re.compile(
    r"layers\.|tok_embeddings\.|output\.|norm\.|.*\.block_sparse_moe\.(?:input|output)_linear\."
)
"""Mistral's own names and Granite's tensors of all experts: files have them as other models do."""
_SPELLINGS = (
    (re.compile(r"e_score_correction_bias$"), "e_score_correction.bias"),
    (re.compile(r"(?:feed_forward|mlp\.gate)\.expert_bias$"), "mlp.gate.e_score_correction.bias"),
    (re.compile(r"experts\.w1\."), "experts.gate_proj."),
    (re.compile(r"experts\.w2\."), "experts.down_proj."),
    (re.compile(r"experts\.w3\."), "experts.up_proj."),
)
"""Names of the model that `gguf` knows in another spelling."""


class Source(NamedTuple):
    """Where a file has a tensor of the model."""

    name: str
    """The file's tensor."""
    expert: int | None = None
    """Number of the expert, if the file's tensor has all experts."""
    half: int | None = None
    """0: the first half of the rows, 1: the second, where the file joins gate and up."""


def tensor_names(architecture: str, layers: int) -> Any:
    """`gguf.TensorNameMap` of an architecture, from Hugging Face's names to the file's."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(kind, layers)


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
        self.architecture = str(self["general.architecture"])
        """GGUF's name for the architecture."""
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {self.architecture!r} is not supported "
                f"({', '.join(ARCHITECTURES)} are)"
            )
        layers = int(self.own("block_count"))
        heads = tuple(
            f"blk.{layers - 1 - n}." for n in range(self.own_or("nextn_predict_layers", 0))
        )
        self.tensors: Mapping[str, Any] = {
            tensor.name: tensor for tensor in reader.tensors if not tensor.name.startswith(heads)
        }
        """`ReaderTensor` by GGUF's names, without the draft heads that are the last layers."""
        self._names = tensor_names(self.architecture, layers)
        known = {name for _, name in self._names.mapping.values()}
        for name in self.tensors:
            if name not in known and name.rpartition(".")[0] not in known:
                raise ModelError(f"{path}: unexpected tensor {name}")
        self._made = MADE.get(self.architecture, ())

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

    def own_or(self, key: str, default: Any = None) -> Any:
        """As `own`, or a default. A float32 is the decimal number that it was written from."""
        value = self.get(f"{self.architecture}.{key}", default)
        return self.number(key) if isinstance(value, float) and value != default else value

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of this name of its own, or the number `key[layer]`."""
        return name in self.tensors or name.partition("[")[0] in self

    def number_of(self, source: str) -> float | None:
        """The number `key[layer]` of the metadata; None: the source is a tensor."""
        key, _, layer = source.partition("[")
        return float(self[key][int(layer.rstrip("]"))]) if layer else None

    def rows_of(self, tensor: str) -> int:
        return int(self.tensors[tensor].shape[1])

    def problem(self, text: str) -> ModelError:
        return ModelError(f"{self.where}: {text}")

    def number(self, key: str) -> float:
        """Like `own`, for a float32, as the decimal number that it was written from."""
        return float(str(np.float32(self.own(key))))

    def order_of(self, source: str) -> Order | None:
        """Where a tensor of the file has the model's rows or columns; None: in the same places."""
        kind = source.split(".")[2] if source.startswith("blk.") else ""
        if self.architecture in PAIRED and kind in ("attn_q", "attn_k"):
            heads = int(self.own("attention.head_count" + ("_kv" if kind == "attn_k" else "")))
            rows = int(self.tensors[source].shape[-1])
            return Order(0, turned(heads, rows // heads // 2, 2))
        if kind == "ssm_ba":
            # Beta and decay of each key head in turn become beta of all, then decay of all.
            keys, values = self.own("ssm.group_count"), self.own("ssm.time_step_rank")
            return Order(0, turned(1, keys, 2, values // keys))
        return self._order_of_value_heads(kind) if self.architecture in TILED else None

    def _order_of_value_heads(self, kind: str) -> Order | None:
        keys, values, width = (
            int(self.own(f"ssm.{key}")) for key in ("group_count", "time_step_rank", "inner_size")
        )
        before, dim = 0, width // values
        if kind in ("attn_qkv", "ssm_conv1d"):
            before = 2 * keys * int(self.own("ssm.state_size"))
        elif kind in ("ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt"):
            dim = 1
        elif kind not in ("attn_gate", "ssm_out"):
            return None
        own = turned(1, values // keys, keys, dim)
        return Order(int(kind == "ssm_out"), np.concatenate((np.arange(before), before + own)))

    def made_tensor(self, name: str) -> tuple[MadeTensor, tuple[str, ...]] | None:
        """How a tensor of the model is computed from tensors of the file, and their names; None:
        it is one of them.
        """
        for made in self._made:
            if (match := made.pattern.match(name)) is not None:
                return made, tuple(source.format(*match.groups()) for source in made.sources)
        return None

    def source_of(self, name: str) -> Source | None:
        """Where the file has a tensor of the model; None: it has no such tensor."""
        if _OTHER_SPELLINGS.match(name):
            return None
        whole, expert = name, None
        if (found := _EXPERT.search(name)) is not None:
            whole, expert = _EXPERT.sub(r"model.layers.\1.mlp.experts.", name), int(found.group(2))
        for old, new in _SPELLINGS:
            whole = old.sub(new, whole)
        own = self._names.get_name(whole, try_suffixes=(".weight", ".bias"))
        if own is None:
            return self._joined(whole, expert)
        # Tensors of all experts have no such names: each expert's are read.
        others = () if ".experts." in whole else (f"{own}.weight", f"{own}.bias")
        for written in (own, *others):
            if written in self.tensors:
                return Source(written, expert)
        for half, part in enumerate(("ffn_gate_exps", "ffn_up_exps")):
            joined = own.replace(part, "ffn_gate_up_exps")
            if joined != own and joined in self.tensors:
                return Source(joined, expert, half)
        return None

    def _joined(self, name: str, expert: int | None) -> Source | None:
        """A tensor of experts that the architecture's files have only with another one."""
        for half, part in enumerate(("gate_proj", "up_proj")):
            joined = name.replace(f".experts.{part}.", ".experts.gate_up_proj.")
            own = self._names.get_name(joined, try_suffixes=(".weight",)) if joined != name else ""
            if own in self.tensors:
                return Source(own, expert, half)
        return None

    def hugging_face_name(self, name: str) -> str:
        """The Hugging Face name of a tensor."""
        if name in OUTER_TENSORS:
            return OUTER_TENSORS[name]
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
            return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
        raise ModelError(f"{self.where}: unexpected tensor {name}")

    def config(self) -> dict[str, Any]:
        """Content of config.json."""
        special = {
            f"{kind}_token_id": self[f"tokenizer.ggml.{name}_token_id"]
            for kind, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if f"tokenizer.ggml.{name}_token_id" in self
        }
        values = config_values(self.architecture, self)
        rotation = self._rope(values)
        content = {
            **values,
            "dtype": "float32",
            "rope_parameters": rotation,
            "rope_theta": rotation.get("rope_theta"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "vocab_size": self.rows_of("token_embd.weight"),
            **special,
        }
        first = ("architectures", "model_type")
        return {name: content.pop(name) for name in first} | dict(sorted(content.items()))

    def _rope(self, values: dict[str, Any]) -> dict[str, Any]:
        theta, head_dim = self.own_or("rope.freq_base", 10_000.0), values["head_dim"]
        rotated = self.own_or("rope.dimension_count", head_dim)
        share = {} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}
        if self.architecture in ROTATED_IN_PART:
            # Windows rotate the whole head; others a share of the head, which is wider there.
            factors = np.asarray(self.tensors[ROTATION_FACTORS].data).reshape(-1)
            part, share = float((factors == 1).mean()), {}
            whole = {"rope_type": "proportional", "partial_rotary_factor": part}
        else:
            whole = self._rotation(theta, rotated) | share
        whole = {"rope_theta": theta, **whole}
        of_windows = self.own_or("rope.freq_base_swa")
        if self.architecture not in ROTATED_BY_KIND or of_windows is None:
            return whole
        kinds = {
            "full_attention": whole,
            "sliding_attention": {"rope_theta": of_windows, "rope_type": "default", **share},
        }
        return {name: kinds[name] for name in sorted(set(values["layer_types"]))}

    def _rotation(self, theta: float, head_dim: int) -> dict[str, Any]:
        prefix = "rope.scaling"
        kind = self.own_or(f"{prefix}.type", "none")
        if ROTATION_FACTORS in self.tensors:
            return self._llama3_rotation(theta, head_dim)
        if _LONG_FACTORS in self.tensors:
            return self._long_rotation()
        factor = self.own_or(f"{prefix}.factor", 1.0)
        if kind == "none" or float(factor) == 1.0:
            return {"rope_type": "default"}
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return self._yarn(factor)
        raise self.problem(f"{self.architecture}.{prefix}.type {kind!r} is not supported")

    def _yarn(self, factor: float) -> dict[str, Any]:
        named = {
            "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        found = {own: self.own_or(f"rope.scaling.{key}") for own, key in named.items()}
        rotation = {name: value for name, value in found.items() if value is not None}
        scale = self.own_or("rope.scaling.yarn_log_multiplier")
        if scale is not None:
            # llama.cpp keeps a tenth of DeepSeek's factor.
            rotation |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * scale, 6))
        if self.architecture == "gpt-oss":
            rotation["truncate"] = False
        growth = self.own_or("attention.temperature_scale")
        if growth is not None:
            rotation["llama_4_scaling_beta"] = growth
        return {"rope_type": "yarn", "factor": factor, **rotation}

    def _long_rotation(self) -> dict[str, Any]:
        long, short = (
            [float(str(value)) for value in np.asarray(self.tensors[name].data).reshape(-1)]
            for name in (_LONG_FACTORS, _SHORT_FACTORS)
        )
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": self.own("rope.scaling.original_context_length"),
        }

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
