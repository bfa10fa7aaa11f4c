"""Tiny models of many families as llama.cpp's own converter writes them.

    python -m weft.testing.models.gguf_converter TOOLS FOLDER NAME...

`TOOLS` is where scripts/get_gguf_converter.py put the converter. For each family `FOLDER` gets
`NAME/model`, a Hugging Face directory, and `NAME/file.gguf`. A family that fails is named on
stderr, and the others go on.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from weft.testing.models.families import FAMILIES

_VOCAB = 331
_SPECIAL = ("<pad>", "<s>", "</s>")
_YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 128},
}
FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": {"global_attn_every_n_layers": 4},
    "deepseek-v3": {"rope_parameters": _YARN},
    "dots1": {"sliding_window": None, "max_window_layers": 9},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "lfm2": {"conv_bias": False},
    "llama4": {
        **{"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
        **{"attn_scale": 0.1, "use_qk_norm": True},
    },
    "mistral": {"sliding_window": None},
    "nemotron": {"head_dim": 8},
    "phi": {"num_key_value_heads": 6, "intermediate_size": 192},
    "qwen2-moe": {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 60},
    "qwen3-moe": {"norm_topk_prob": True},
    "stablelm": {"qk_layernorm": False},
}
"""Values that llama.cpp has as constants, where the tests' models have others."""
LATER: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "gemma4": {"global_head_dim": 24},
    "gemma4-experts": {"global_head_dim": 24},
    "gemma4-keys": {"global_head_dim": 32, "num_global_key_value_heads": 1},
    "minimax-m2": {"rotary_dim": 12},
    "nemotron_h": {
        **{"num_hidden_layers": 8, "hybrid_override_pattern": "M-M*-MM-", "mamba_d_head": 16},
    },
    "nemotron_h-experts": {
        **{"num_hidden_layers": 7, "hybrid_override_pattern": "MEM*EM-", "mamba_d_head": 16},
    },
}
"""Fields of older configurations that the converter still reads."""


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).read_text()
    tokenizer.train_from_iterator([text, text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _set_vocab(converter: Any) -> None:
    """What a converter's class does for a vocabulary, for that of `_write_tokenizer`."""
    content = json.loads((converter.dir_model / "tokenizer.json").read_text())["model"]
    writer = converter.gguf_writer
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in _SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _with_vocab(kind: Any) -> None:
    kind.set_vocab = _set_vocab
    for below in kind.__subclasses__():
        _with_vocab(below)


def _converter(tools: Path) -> Any:
    """The converter's package, with its own `gguf`, which lacks some of the names that it reads."""
    sys.path.insert(0, str(tools))
    import gguf

    names: dict[str, Any] = {
        "MODEL_ARCH": gguf.MODEL_ARCH_NAMES,
        "MODEL_TENSOR": gguf.TENSOR_NAMES,
    }
    for source in (tools / "conversion").glob("*.py"):
        for kind, name in re.findall(r"gguf\.(MODEL_TENSOR|MODEL_ARCH)\.(\w+)", source.read_text()):
            if not hasattr(getattr(gguf, kind), name):
                number = 90_000 + len(names[kind])
                type.__setattr__(getattr(gguf, kind), name, number)
                names[kind][number] = name.lower()
    import conversion  # type: ignore[import-not-found]

    conversion.load_all_models()
    conversion.ModelBase.no_mtp = True
    _with_vocab(conversion.TextModel)
    return conversion


def _convert(name: str, folder: Path, conversion: Any) -> None:
    import gguf
    from weft.testing.models.every_family import write_model

    source = folder / "model"
    is_nested = "text_config" in FAMILIES.get(name, ("", {}))[1]
    fields = ({} if is_nested else {"vocab_size": _VOCAB}) | FIELDS.get(name, {})
    write_model(name, source, random.randrange(10**6), **fields)
    _write_tokenizer(source)
    with torch.inference_mode():
        values = conversion.ModelBase.load_hparams(source, False) | LATER.get(name, {})
        architecture = conversion.get_model_architecture(values, conversion.ModelType.TEXT)
        kind = conversion.get_model_class(architecture, mmproj=False)
        kind(source, gguf.LlamaFileType.ALL_F32, folder / "file.gguf", hparams=values).write()


def main(tools: str, folder: str, *names: str) -> None:
    conversion = _converter(Path(tools))
    for name in names:
        try:
            _convert(name, Path(folder, name), conversion)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
