"""Small random models that take images, in the form of SmolVLM and Idefics3, written by
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from weft.chaos.tiny import write_tokenizer

VOCAB_SIZE = 517
MAX_GRID = 6
"""Most rows and columns of tiles that have tokens."""
IMAGE, FAKE, GLOBAL, END = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
)
MARKS = (
    *(IMAGE, FAKE, GLOBAL, END),
    *(f"<row_{row}_col_{col}>" for row in range(1, MAX_GRID + 1) for col in range(1, MAX_GRID + 1)),
)
"""Special tokens, the last ones of the vocabulary in this order."""
IMAGE_TOKEN_ID = VOCAB_SIZE - len(MARKS)
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'] is string %}{{': ' + message['content']}}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's."""
_TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "head_dim": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": VOCAB_SIZE - len(MARKS) + MARKS.index(END),
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 64,
}
_TABLES = ("embed_tokens.weight", "position_embedding.weight", "pos_embed.weight")
_NAMES = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}


def make_vision(
    kind: str,
    path: Path,
    seed: int,
    *,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Writes a model directory with tokenizer, chat template and processor.

    Args:
        kind: smolvlm or idefics3.
        path: Directory to create.
        seed: Of the weights.
        vision: Fields of `vision_config`. By default a tile of 64 x 64 pixels has 16 tokens.
        text: Fields of `text_config`.
        processor: Fields of preprocessor_config.json.
        **overrides: Further fields of config.json.

    Returns:
        `path`.
    """
    import transformers

    settings = {
        "vision_config": {**_VISION, "model_type": f"{kind}_vision", **(vision or {})},
        "text_config": {**_TEXT, **(text or {})},
        "image_token_id": IMAGE_TOKEN_ID,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        **overrides,
    }
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForImageTextToText.from_config(config).float()
    randomise(model, seed)
    model.save_pretrained(path)
    write_marked_tokenizer(path, VOCAB_SIZE, MARKS, CHAT_TEMPLATE, END)
    size = settings["vision_config"]["image_size"]
    _write_processor(kind, path, size, config, processor or {})
    return path


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Gives a model's parameters values with which all of its parts have an effect."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim == 1:
            value.copy_(0.3 * noise if name.endswith("bias") else 1 + 0.2 * noise)
        else:
            is_table = name.endswith(_TABLES)
            value.copy_(noise if is_table else noise / value[0].numel() ** 0.5)


def write_marked_tokenizer(
    path: Path, vocab_size: int, marks: Sequence[str], template: str, end: str
) -> None:
    """Writes a byte-level tokenizer whose last tokens are these special ones, in place of pairs of
    letters; `end` ends an answer.
    """
    write_tokenizer(path, vocab_size, 8192)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    for mark in reversed(marks):
        id_ = vocab.pop("".join(tokenizer["model"]["merges"].pop()))
        vocab[mark] = id_
        added.append({**added[0], "id": id_, "content": mark})
    added.sort(key=lambda token: int(token["id"]))
    file.write_text(json.dumps(tokenizer))
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings |= {"chat_template": template, "eos_token": end}
    file.write_text(json.dumps(settings))


def _write_processor(
    kind: str, path: Path, size: int, config: Any, processor: dict[str, Any]
) -> None:
    name, tokens = _NAMES[kind], (size // config.vision_config.patch_size // config.scale_factor)
    image_processor = {
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": f"{name}ImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": size},
        "processor_class": f"{name}Processor",
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 4 * size},
        **processor,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(image_processor, indent=1))
    whole = {"image_seq_len": tokens**2, "processor_class": f"{name}Processor"}
    (path / "processor_config.json").write_text(json.dumps(whole, indent=1))


@torch.no_grad()
def image_logits(
    model: Any, prompt: list[int], tokens: list[int], **pixels: torch.Tensor
) -> torch.Tensor:
    """[tokens, vocab]: what transformers' model makes of a prompt with images, before each of the
    tokens after it. Placeholders among those are tokens like others: a model of random weights
    draws them.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    embedded = model.get_input_embeddings()(ids)
    features = model.model.get_image_features(**pixels).pooler_output
    rows = (torch.tensor(prompt) == model.config.image_token_id).nonzero()[:, 0]
    embedded[0, rows] = torch.cat(list(features)).reshape(len(rows), -1)
    hidden = model.model.text_model(inputs_embeds=embedded).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden)[0, len(prompt) - 1 : -1]
    return logits
