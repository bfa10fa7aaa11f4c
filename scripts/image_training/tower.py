"""The model that is trained: SmolVLM's form, on a language model that stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, SmolVLMConfig, SmolVLMForConditionalGeneration

from image_training.questions import IMAGE, TAKEN
from image_training.scenes import SIZE

PATCH, FACTOR = 16, 2
SIDE = SIZE // PATCH // FACTOR
"""Rows of a scene's side; a scene takes the square of it."""


def vision_config(width: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "smolvlm_vision",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "patch_size": PATCH,
        "image_size": SIZE,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }


def build(model_dir: Path, width: int, layers: int, device: str) -> SmolVLMForConditionalGeneration:
    """The directory's language model, frozen in bfloat16, with a new tower in float32."""
    text = AutoConfig.from_pretrained(model_dir).to_dict()
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    names = {name: taken for taken, name in TAKEN.items()}
    config = SmolVLMConfig(
        text_config=text,
        vision_config=vision_config(width, layers),
        scale_factor=FACTOR,
        image_token_id=tokenizer.token_to_id(names[IMAGE]),
        tie_word_embeddings=bool(text["tie_word_embeddings"]),
    )
    model = SmolVLMForConditionalGeneration(config).float()
    weights = {
        name.replace("model.", "model.text_model.", 1): one
        for name, one in load_file(model_dir / "model.safetensors").items()
    }
    missing, odd = model.load_state_dict(weights, strict=False)
    left = [one for one in missing if ".text_model." in one]
    if odd or left:
        raise ValueError(f"{model_dir}: tensors do not fit: {odd[:3]}, {left[:3]}")
    model.tie_weights()
    model.to(device)
    model.model.text_model.to(torch.bfloat16).requires_grad_(False)
    model.lm_head.to(torch.bfloat16).requires_grad_(False)
    _begin(model)
    return model


@torch.no_grad()
def _begin(model: SmolVLMForConditionalGeneration) -> None:
    """Weights of a usual deviation, and rows as long as embeddings."""
    for name, value in model.model.vision_model.named_parameters():
        if value.ndim > 1:
            torch.nn.init.trunc_normal_(value, std=value[0].numel() ** -0.5)
        elif name.endswith("bias"):
            value.zero_()
    embeddings = model.get_input_embeddings().weight.float()
    projection = model.model.connector.modality_projection.proj.weight
    size = embeddings.square().mean().sqrt()
    torch.nn.init.normal_(projection, std=float(size) * projection.shape[1] ** -0.5)
    model.model.vision_model.embeddings.position_embedding.weight.mul_(0.5)


def rows_of(model: SmolVLMForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """[N, SIZE, SIZE, 3] uint8 -> [N, rows, hidden]."""
    numbers = (pixels.float() / 255 - 0.5) / 0.5
    states = model.model.vision_model(numbers.permute(0, 3, 1, 2)).last_hidden_state
    found: torch.Tensor = model.model.connector(states)
    return found


def tower_weights(model: SmolVLMForConditionalGeneration) -> dict[str, torch.Tensor]:
    """The tensors that are trained, by their names in a checkpoint: matrices in int8 with a scale a
    row (`_scale`), the others in float32.
    """
    tensors = {
        name: value.detach().float().cpu()
        for name, value in model.named_parameters()
        if name.startswith(("model.vision_model.", "model.connector."))
    }
    return with_scales(tensors)


def with_scales(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of floats in the form of a tower's file."""
    written = {}
    for name, value in tensors.items():
        if value.ndim < 2:
            written[name] = value.float().contiguous()
            continue
        scales = value.float().flatten(1).abs().amax(1) / 127
        by_row = scales.view(-1, *[1] * (value.ndim - 1))
        written[name] = torch.round(value.float() / by_row).to(torch.int8).contiguous()
        written[f"{name}_scale"] = scales
    return written
