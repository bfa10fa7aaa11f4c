"""Small random models in the forms of Qwen2.5-VL, Qwen3-VL and Qwen3.5, written by transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from weft.contract.spans import Media, MediaSpan
from weft.testing.models.image_families import (
    MEAN,
    STD,
    ImageFamily,
    Prompt,
    normalised,
    random_picture,
)
from weft.testing.models.tiny_vision import randomise, write_marked_tokenizer

VOCAB_SIZE = 480
START, END, IMAGE, VIDEO, STOP = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|im_end|>",
)
MARKS = (START, END, IMAGE, VIDEO, STOP)
"""Special tokens, the last ones of the vocabulary in this order."""
IDS = {mark: VOCAB_SIZE - len(MARKS) + number for number, mark in enumerate(MARKS)}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen2.5-VL's and Qwen3-VL's, as far as images go."""
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": IDS[STOP],
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "depth": 4,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 72,
}
_INTERLEAVED = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}
_LINEAR = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {**_INTERLEAVED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
}
_OF_KIND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [2, 4, 6],
            },
        },
        {"window_size": 16, "fullatt_block_indexes": [1, 3], "hidden_act": "silu"},
    ),
    "qwen2_vl": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [2, 3, 4],
            },
        },
        {"embed_dim": 48, "hidden_size": 72, "mlp_ratio": 2},
    ),
    "qwen3_vl": (
        {"head_dim": 16, "rope_parameters": {**_INTERLEAVED, "mrope_section": [4, 2, 2]}},
        {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36},
    ),
    "qwen3_5": (_LINEAR, {"num_position_embeddings": 36}),
}
_OF_KIND["qwen3_vl_moe"] = (
    {**_OF_KIND["qwen3_vl"][0], **_EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
    _OF_KIND["qwen3_vl"][1],
)
_OF_KIND["qwen3_5_moe"] = ({**_LINEAR, **_EXPERTS}, _OF_KIND["qwen3_5"][1])
KINDS = tuple(_OF_KIND)
_PROCESSORS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}
SQUARE = 8
"""Sides in pixels of what becomes one row."""


def qwen_config(kind: str, vision: dict[str, Any], text: dict[str, Any]) -> Any:
    """transformers' configuration; the arguments are as in `make_qwen_vl`."""
    import transformers

    of_text, of_vision = _OF_KIND[kind]
    return transformers.AutoConfig.for_model(
        kind,
        text_config={**_TEXT, **of_text, **text},
        vision_config={**_VISION, **of_vision, **vision},
        image_token_id=IDS[IMAGE],
        video_token_id=IDS[VIDEO],
        vision_start_token_id=IDS[START],
        vision_end_token_id=IDS[END],
        tie_word_embeddings=False,
    )


def make_qwen_vl(
    kind: str,
    path: Path,
    seed: int,
    *,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    template: str = CHAT_TEMPLATE,
) -> Path:
    """Writes a model directory with tokenizer, chat template and processor.

    Args:
        kind: One of KINDS.
        path: Directory to create.
        seed: Of the weights.
        vision: Fields of `vision_config`.
        text: Fields of `text_config`.
        processor: Fields of preprocessor_config.json.
        template: Of chats.

    Returns:
        `path`.
    """
    import transformers

    config = qwen_config(kind, vision or {}, text or {})
    model = transformers.AutoModelForImageTextToText.from_config(config).float()
    randomise(model, seed)
    model.save_pretrained(path)
    write_marked_tokenizer(path, VOCAB_SIZE, MARKS, template, STOP)
    image_processor = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "merge_size": 2,
        "patch_size": SQUARE // 2,
        "processor_class": _PROCESSORS.get(kind, "Qwen3VLProcessor"),
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 4 * SQUARE**2, "longest_edge": 64 * SQUARE**2},
        "temporal_patch_size": 2,
        **(processor or {}),
    }
    (path / "preprocessor_config.json").write_text(json.dumps(image_processor, indent=1))
    return path


class QwenVl(ImageFamily):
    """One of these models. A row has all that its taps make, beside its embedding."""

    name = "Qwen2VL"
    kind: ClassVar[str]

    def config(self, **fields: Any) -> Any:
        return qwen_config(self.kind, fields.pop("vision", {}), fields.pop("text", {}))

    def make(self, path: Path, seed: int, **fields: Any) -> Path:
        settings = {"image_mean": list(MEAN), "image_std": list(STD)}
        return make_qwen_vl(self.kind, path, seed, processor=settings, **fields)

    def picture(self) -> Media:
        return random_picture(*(random.randint(1, 6) * SQUARE for _ in range(2)))

    def put(self, ids: list[int], spans: list[MediaSpan], medium: Media) -> None:
        count = medium.shape[0] * medium.shape[1] // SQUARE**2
        ids.append(IDS[START])
        spans.append(
            MediaSpan(position=len(ids), length=count, digest=medium.digest, shape=medium.shape)
        )
        ids += [*[IDS[IMAGE]] * count, IDS[END]]

    def rows(self, model: Any, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = model.model.get_image_features(**_inputs(pictures))
        whole = torch.cat([torch.cat(list(found.pooler_output)), *_taps(found)], dim=1)
        return list(whole.split([len(one) for one in found.pooler_output]))

    @torch.no_grad()
    def logits(self, model: Any, prompt: Prompt, tokens: list[int]) -> torch.Tensor:
        whole = model.model
        by_digest = {one.digest: normalised(one) for one in prompt.media}
        of_images = _inputs([by_digest[span.digest] for span in prompt.spans])
        found = whole.get_image_features(**of_images)
        ids = torch.tensor([[*prompt.ids, *tokens]])
        is_row = torch.zeros_like(ids)
        for span in prompt.spans:
            is_row[0, span.position : span.end] = 1
        positions, _ = whole.get_rope_index(
            ids, mm_token_type_ids=is_row, image_grid_thw=of_images["image_grid_thw"]
        )
        embedded = model.get_input_embeddings()(ids).clone()
        embedded[is_row.bool()] = torch.cat(list(found.pooler_output))
        more: dict[str, Any] = {}
        if taps := _taps(found):
            more = {"visual_pos_masks": is_row.bool(), "deepstack_visual_embeds": taps}
        hidden = whole.language_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False, **more
        ).last_hidden_state
        logits: torch.Tensor = model.lm_head(hidden)[0, len(prompt.ids) - 1 : -1]
        return logits


class Qwen2Vl(QwenVl):
    """No windows; biases and LayerNorms in the tower."""

    kind = "qwen2_vl"


class Qwen25Vl(QwenVl):
    """Windows, and full attention in every second layer of the tower."""

    kind = "qwen2_5_vl"


class Qwen3Vl(QwenVl):
    """Taps behind two layers of the tower."""

    kind = "qwen3_vl"


class Qwen3VlMoe(QwenVl):
    kind = "qwen3_vl_moe"


class Qwen35(QwenVl):
    """Recurrent layers, and heads that are rotated in part."""

    kind = "qwen3_5"
    has_states = True


class Qwen35Moe(QwenVl):
    kind = "qwen3_5_moe"
    has_states = True


QWEN_FAMILIES: dict[str, type[QwenVl]] = {
    one.kind: one for one in (Qwen2Vl, Qwen25Vl, Qwen3Vl, Qwen3VlMoe, Qwen35, Qwen35Moe)
}


def _taps(found: Any) -> list[torch.Tensor]:
    """[rows of all, hidden] of each layer of the vision transformer that is tapped; later versions
    of transformers have them by picture.
    """
    levels = getattr(found, "deepstack_features", None) or ()
    return [one if isinstance(one, torch.Tensor) else torch.cat(list(one)) for one in levels]


def _inputs(pictures: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers' model takes of pictures, [3, height, width] of normalised numbers."""
    side = SQUARE // 2
    grids = [[1, one.shape[1] // side, one.shape[2] // side] for one in pictures]
    return {
        "pixel_values": torch.cat([_patches_of(one) for one in pictures]),
        "image_grid_thw": torch.tensor(grids),
    }


def _patches_of(picture: torch.Tensor) -> torch.Tensor:
    """[patches, 3 * 2 * side * side], in the order of Qwen2-VL's processor."""
    side = SQUARE // 2
    _, height, width = picture.shape
    along = [(size // SQUARE, 2, side) for size in (height, width)]
    parts = picture.reshape(3, *along[0], *along[1]).permute(1, 4, 2, 5, 0, 3, 6)
    frames = parts.unsqueeze(5).expand(*parts.shape[:5], 2, *parts.shape[5:])
    return frames.reshape(height * width // side**2, -1)
