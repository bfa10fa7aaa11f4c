"""Writes docs/reference/combinations.md: which settings go with one another and with which models,
as the checks before a start answer.

python scripts/combinations_table.py [--print]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.contract.errors import WeftError
from weft.engine.base.config import EngineConfig
from weft.engine.loop.combinations import check_combination

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "combinations.md"
_SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    **_EXPERTS,
}
_DELTA: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 4,
    **_EXPERTS,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense (Qwen 3)": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "experts (Qwen 3)": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_EXPERTS,
    },
    "windows (Gemma 3)": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
    },
    "latent attention (DeepSeek-V3)": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_LATENT,
    },
    "recurrent layers (Qwen3-Next)": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **_DELTA,
    },
    "layers that differ (Gemma 4)": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "sliding_window": 512,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Mamba 2 (Nemotron-H)": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-*-M-*-",
        "num_hidden_layers": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "conv_kernel": 4,
    },
    "by transformers (NanoChat)": {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
    },
    "embeddings (BERT)": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    },
}
"""A small configuration of each kind of model."""
_HOST = {"host_cache_bytes": 1 << 30}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "two ranks": {"tp": 2},
    "experts on two ranks": {"tp": 2, "ep": 2},
    "shared experts": {"attention_dp": 2, "attention_dp_group": "group"},
    "pages divided by two": {"tp": 4, "dcp": 2},
    "LoRA": {"enable_lora": True},
    "n-gram drafts": {"drafter": "ngram"},
    "MTP drafts": {"drafter": "mtp"},
    "deterministic": {"deterministic": True},
    "KV in int8": {"kv_dtype": "int8"},
    "int8 at load": {"quantization": "int8"},
    "FP8 at load": {"quantization": "fp8"},
    "windows freed": {"window_pages": "free"},
    "host tier": _HOST,
    "KV store": {"has_store": True},
}
PAIRED = ("dense (Qwen 3)", "recurrent layers (Qwen3-Next)")
"""Models with which pairs of features are tried."""
_DEVICES = ("cpu", "cuda:0")
_HEAD = """# Combinations

Made by `scripts/combinations_table.py` from the checks that `weft up` and workers make before they start. Models are small configurations; sizes that do not divide are not part of it. *yes*: not refused. Numbers name refusals, which stand below.
"""  # noqa: E501


class Refusals:
    """Reasons, each with a number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cell(self, folder: Path, settings: Mapping[str, Any]) -> str:
        """yes, or the number of the reason for which these settings are refused."""
        try:
            check_combination(EngineConfig(model_dir=folder, **settings))
        except WeftError as error:
            reason = error.message.replace(str(folder), "MODEL")
            return str(self._numbers.setdefault(reason, len(self._numbers) + 1))
        return "yes"

    def lines(self) -> Iterator[str]:
        for reason, number in self._numbers.items():
            yield f"{number}. {reason}"


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of two features; None: they contradict one another."""
    if any(second.get(name, value) != value for name, value in first.items()):
        return None
    return {**first, **second}


def page() -> str:
    refusals, parts = Refusals(), [_HEAD]
    with tempfile.TemporaryDirectory() as root:
        folders = {name: write(Path(root) / str(i), name) for i, name in enumerate(MODELS)}
        for device in _DEVICES:
            parts.append(f"## Models on {_word(device)}\n")
            rows = {
                name: [
                    refusals.cell(folder, {**own, "device": device}) for own in FEATURES.values()
                ]
                for name, folder in folders.items()
            }
            parts.append(_table("model", rows))
        for name in PAIRED:
            for device in _DEVICES:
                parts.append(f"## Features together: {name}, {_word(device)}\n")
                parts.append(_table("", _pairs(folders[name], device, refusals)))
    parts.append("## Refusals\n")
    parts.append("\n".join(refusals.lines()) + "\n")
    return "\n".join(parts)


def _pairs(folder: Path, device: str, refusals: Refusals) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for name, first in FEATURES.items():
        rows[name] = []
        for other, second in FEATURES.items():
            both = merged(first, second)
            is_pair = both is not None and name != other
            settings = {**(both or {}), "device": device}
            rows[name].append(refusals.cell(folder, settings) if is_pair else "")
    return rows


def write(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_SIZES, **MODELS[name]}))
    return folder


def _word(device: str) -> str:
    return "a CPU" if device == "cpu" else "a GPU"


def _table(corner: str, rows: Mapping[str, list[str]]) -> str:
    lines = [f"| {corner} | {' | '.join(FEATURES)} |", "| --- " * (len(FEATURES) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    if "--print" in sys.argv[1:]:
        print(page(), end="")
    else:
        PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
