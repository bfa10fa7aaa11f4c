"""Small random models of architectures that Weft has no reader for, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_BERT = {"is_decoder": True}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus1p5_text": ("Apertus1p5TextForCausalLM", _GROUPED),
    "aria_text": ("AriaTextForCausalLM", _GROUPED | {"moe_num_experts": 4, "moe_topk": 2}),
    "axk1": ("AXK1ForCausalLM", _LATENT | {"n_group": 1, "topk_group": 1}),
    "beam": ("BeamForCausalLM", _GROUPED | {"sliding_window": 24}),
    "bert": ("BertLMHeadModel", _BERT),
    "bert-generation": ("BertGenerationDecoder", _BERT),
    "biogpt": ("BioGptForCausalLM", {}),
    "bitnet": ("BitNetForCausalLM", _GROUPED),
    "camembert": ("CamembertForCausalLM", _BERT),
    "ctrl": ("CTRLLMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 3, "dff": 96}),
    "data2vec-text": ("Data2VecTextForCausalLM", _BERT),
    "diffllama": ("DiffLlamaForCausalLM", _GROUPED),
    "dory": ("DoryForCausalLM", _GROUPED | {"sliding_window": 24}),
    "electra": ("ElectraForCausalLM", _BERT | {"embedding_size": 64}),
    "ernie": ("ErnieForCausalLM", _BERT),
    "hrm_text": ("HrmTextForCausalLM", {}),
    "jetmoe": (
        "JetMoeForCausalLM",
        {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4},
    ),
    "kolibri1": ("Kolibri1ForCausalLM", _GROUPED | {"sliding_window": 24}),
    "longcat_flash": ("LongcatFlashForCausalLM", _LATENT | {"num_layers": 2}),
    "modernbert-decoder": ("ModernBertDecoderForCausalLM", {"local_attention": 24}),
    "moshi": ("MoshiForCausalLM", _GROUPED),
    "nanochat": ("NanoChatForCausalLM", _GROUPED),
    "persimmon": ("PersimmonForCausalLM", {}),
    "roberta": ("RobertaForCausalLM", _BERT),
    "xlm-roberta-xl": ("XLMRobertaXLForCausalLM", _BERT),
}
"""By their `model_type`: architectures of transformers' registry, and fields of their
configurations.
"""
PLANNED = (
    *("apertus1p5_text", "aria_text", "axk1", "beam", "hrm_text", "kolibri1", "longcat_flash"),
    "nanochat",
)
"""Those of which transformers says how ranks divide them."""
WITH_EXPERTS = ("aria_text", "axk1", "jetmoe", "longcat_flash")


def make_unread(kind: str, path: Path, seed: int, **fields: Any) -> Path:
    """Writes a model directory; `kind` is a key of `UNREAD`."""
    import transformers

    name, own = UNREAD[kind]
    known = transformers.AutoConfig.for_model(kind)
    sizes = {key: value for key, value in _SIZES.items() if hasattr(known, key)}
    config = type(known)(**{**sizes, **own, **fields})
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config).float()
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape)
            if value.ndim > 1 and "norm" not in key:
                value.copy_(noise if "embed" in key else noise / value.shape[-1] ** 0.5)
            elif not key.endswith("bias"):
                value.add_(0.1 * noise)
    model.tie_weights()
    model.save_pretrained(path)
    return path


def load_unread(path: Path) -> Any:
    """A model directory in transformers, float32, with its plainest attention.

    RoBERTa's kind gives no position to a token with the padding's id. The model may draw that
    token, and then it is one like others, so positions count all tokens here.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            module.create_position_ids_from_input_ids = _count_all
    return model


def _count_all(ids: torch.Tensor, padding_idx: int, cache_length: int = 0) -> torch.Tensor:
    return padding_idx + 1 + cache_length + torch.arange(ids.shape[1]).expand_as(ids)
