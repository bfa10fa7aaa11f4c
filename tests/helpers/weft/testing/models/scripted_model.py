"""A checkpoint whose weights make it write given texts, one for each turn of a conversation.

Its chat template decides which text is due and ends the prompt with a token of its own for it. Each
text is a chain of tokens that occur nowhere else, and the head's row of each is the embedding of
the one before: the model needs no attention to continue. Everything around the weights is real:
the tokenizer is the demo model's, so prompts have as many tokens as with other models.

One that looks at images has a tower in SmolVLM's form, which makes rows of the colours of patches.
One token's attention reads them, and the colour decides what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from weft.checkpoint.demo import DEMO_NAME
from weft.checkpoint.resolve import resolve_model

SEEING_DEMO = Path(__file__).parents[5] / "models" / "smollm2-135m-images"
_HIDDEN, _HEAD_DIM, _INNER = 256, 64, 64
_PIECE = 5
"""Bytes of most tokens of a text."""
_TOWER, _TOWER_SIDE, _PATCH, _SQUARE = 48, 256, 16, 2
_KEY, _ASK, _SEEN, _TOLD = _HIDDEN, _HIDDEN + 1, _HIDDEN + 2, _HIDDEN + 5
"""Elements behind the signs of a model that looks: of rows of images, of the token that looks, of
the three colours in a row, and of those that attention has found.
"""
_MORE = 64
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
LOOK = "<look>"
"""A turn that says the colour of the images so far: `seen`."""
END, BY_THE_WAY, UNSEEN = "<|im_end|>", "A small task.", "I have not seen the word."


@dataclass(frozen=True, slots=True)
class Act:
    """What the model writes once a user's message has named it, as `[NAME]`.

    Attributes:
        name: Of letters and hyphens.
        turns: One text for each answer. After the last one the model repeats it.
        word: The last text is written only if a tool's result in the conversation has this word;
            else `UNSEEN` is. Some agents send a tool's image as a user's message after its result.
    """

    name: str
    turns: tuple[str, ...]
    word: str = ""


def seen(colour: str) -> str:
    """What a model that looks says of an image of one of `COLOURS`."""
    return f"The window is {colour}."


def make_scripted(
    folder: Path, acts: Sequence[Act], max_context_tokens: int, *, looks: bool = False
) -> Path:
    """Writes a model directory; returns `folder`.

    A conversation without tools, or without the name of an act, is answered with `BY_THE_WAY`.
    With `looks` it takes images, which have one colour each.
    """
    texts = {
        f"{act.name}-{turn}": text
        for act in acts
        for turn, text in enumerate(act.turns)
        if text != LOOK
    }
    texts |= {"by-the-way": BY_THE_WAY, "unseen": UNSEEN}
    if looks:
        texts |= {"look": "", **{f"seen-{colour}": seen(colour) for colour in COLOURS}}
    folder.mkdir(parents=True, exist_ok=True)
    source = resolve_model(str(SEEING_DEMO) if looks else DEMO_NAME)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    chains = _add_chains(tokenizer, texts)
    size = max(max(chain) for chain in chains) + 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": "<|im_start|>", "eos_token": END, "pad_token": END}
    settings = {**names, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"model_max_length": max_context_tokens, "chat_template": chat_template(acts)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end_token = tokenizer["model"]["vocab"][END]
    config = _config(size, end_token, max_context_tokens)
    tensors = _weights(size, end_token, [chain for chain in chains if len(chain) > 1])
    if looks:
        of_text = dict(zip(texts, chains, strict=True))
        told = [of_text[f"seen-{colour}"][1] for colour in COLOURS]
        tensors = _looking(tensors, of_text["look"][0], told)
        config = _seeing_config(config, tokenizer["model"]["vocab"]["<image>"])
        for name in ("preprocessor_config.json", "processor_config.json"):
            (folder / name).write_text((source / name).read_text())
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _add_chains(tokenizer: dict[str, Any], texts: Mapping[str, str]) -> list[list[int]]:
    """Adds tokens for texts; the ids of each text's, from the one that begins it."""
    vocab = tokenizer["model"]["vocab"]
    chains = []
    for name, text in texts.items():
        begin = {"id": len(vocab), "content": start_token(name), "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({**begin, **flags})
        vocab[start_token(name)] = len(vocab)
        chains.append([len(vocab) - 1])
        for piece in _new_pieces(_visible(text), vocab):
            chains[-1].append(len(vocab))
            vocab[piece] = len(vocab)
    return chains


def _new_pieces(text: str, known: Mapping[str, int]) -> list[str]:
    """Parts of a text, each of a few bytes, that are no tokens yet."""
    pieces: list[str] = []
    taken = set(known)
    while text:
        length = _PIECE
        while length < len(text) and text[:length] in taken:
            length += 1
        piece, text = text[:length], text[length:]
        while piece in taken:  # Nothing follows that would make it another one.
            piece = pieces.pop() + piece
        pieces.append(piece)
        taken.add(piece)
    return pieces


def _visible(text: str) -> str:
    """The characters by which byte-level BPE writes a text's bytes."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    table = [chr(byte if byte in plain else next(others)) for byte in range(256)]
    return "".join(table[byte] for byte in text.encode())


def _config(vocab_size: int, end_token: int, max_context_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": end_token,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "max_position_embeddings": max_context_tokens,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }


def _weights(
    vocab_size: int, end_token: int, chains: Iterable[Sequence[int]]
) -> dict[str, NDArray[np.float32]]:
    """Parameters that add nothing to a token's embedding but the head.

    The logit of the token that is due is the size of the embeddings, which are random signs; those
    of others are smaller by some twenty of its square roots.
    """
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (vocab_size, _HIDDEN)).astype("f4")
    head = np.zeros((vocab_size, _HIDDEN), np.float32)
    last = signs[end_token].copy()
    for chain in chains:
        for token, following in pairwise(chain):
            head[following] = signs[token]
    # All texts end alike, so that one row of the head ends them.
    for chain in chains:
        if len(chain) > 1:
            head[chain[-1]] = signs[chain[-2]]
        signs[chain[-1]] = last
    head[end_token] = last
    square = np.zeros((_HEAD_DIM, _HIDDEN), np.float32)
    ones = np.ones(_HIDDEN, np.float32)
    return {
        "model.embed_tokens.weight": signs,
        "model.layers.0.input_layernorm.weight": ones,
        "model.layers.0.self_attn.q_proj.weight": square,
        "model.layers.0.self_attn.k_proj.weight": square,
        "model.layers.0.self_attn.v_proj.weight": square,
        "model.layers.0.self_attn.o_proj.weight": square.T.copy(),
        "model.layers.0.post_attention_layernorm.weight": ones,
        "model.layers.0.mlp.gate_proj.weight": square,
        "model.layers.0.mlp.up_proj.weight": square,
        "model.layers.0.mlp.down_proj.weight": square.T.copy(),
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }


def _seeing_config(config: dict[str, Any], image_id: int) -> dict[str, Any]:
    vision = {
        "hidden_size": _TOWER,
        "image_size": _TOWER_SIDE,
        "intermediate_size": _TOWER,
        "model_type": "smolvlm_vision",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": _PATCH,
    }
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": image_id,
        "model_type": "smolvlm",
        "scale_factor": _SQUARE,
        "text_config": config | {"hidden_size": _HIDDEN + _MORE},
        "tie_word_embeddings": False,
        "vision_config": vision,
    }


def _looking(
    tensors: Mapping[str, NDArray[np.float32]], look: int, told: Sequence[int]
) -> dict[str, NDArray[np.float32]]:
    """Adds what finds colours in images: for the token `look` alone, attention goes to rows of
    images, and what it finds there decides which of the tokens `told` follows.
    """

    def wider(name: str, tensor: NDArray[np.float32]) -> NDArray[np.float32]:
        axis = 0 if "o_proj" in name or "down_proj" in name else tensor.ndim - 1
        widths = [(0, _MORE if at == axis else 0) for at in range(tensor.ndim)]
        return np.pad(tensor, widths, constant_values=1 if tensor.ndim == 1 else 0)

    made = {name: wider(name, tensor) for name, tensor in tensors.items()}
    made["model.embed_tokens.weight"][look, _ASK] = 16
    layer = "model.layers.0.self_attn"
    # The pair of elements that positions turn least.
    made[f"{layer}.q_proj.weight"][_HEAD_DIM // 2 - 1, _ASK] = 8
    made[f"{layer}.k_proj.weight"][_HEAD_DIM // 2 - 1, _KEY] = 8
    for number, token in enumerate(told):
        made[f"{layer}.v_proj.weight"][number, _SEEN + number] = 1
        made[f"{layer}.o_proj.weight"][_TOLD + number, number] = 20
        made["lm_head.weight"][token] = 0
        made["lm_head.weight"][token, _TOLD : _TOLD + len(told)] = -1
        made["lm_head.weight"][token, _TOLD + number] = 1
    return made | _tower()


def _tower() -> dict[str, NDArray[np.float32]]:
    """Makes of each patch its colours and their opposites, whose mean is 0, so that norms keep
    them.
    """
    size, side = _TOWER, _PATCH
    patches = np.zeros((size, 3, side, side), np.float32)
    for row in range(size):
        patches[row, row % 3] = (1 if row % 6 < 3 else -1) / side**2
    projection = np.zeros((_HIDDEN + _MORE, size * _SQUARE**2), np.float32)
    projection[_KEY, :3] = -4
    projection[_SEEN : _SEEN + 3, :3] = np.eye(3)
    square, zeros, ones = np.zeros((size, size), "f4"), np.zeros(size, "f4"), np.ones(size, "f4")
    tower, layer = "model.vision_model", "model.vision_model.encoder.layers.0"
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    made = {
        "model.connector.modality_projection.proj.weight": projection,
        f"{tower}.embeddings.patch_embedding.weight": patches,
        f"{tower}.embeddings.patch_embedding.bias": zeros,
        f"{tower}.embeddings.position_embedding.weight": np.zeros(
            ((_TOWER_SIDE // side) ** 2, size), np.float32
        ),
    }
    for part in (*parts, "mlp.fc1", "mlp.fc2"):
        made |= {f"{layer}.{part}.weight": square.copy(), f"{layer}.{part}.bias": zeros.copy()}
    for norm in (f"{layer}.layer_norm1", f"{layer}.layer_norm2", f"{tower}.post_layernorm"):
        made |= {f"{norm}.weight": ones.copy(), f"{norm}.bias": zeros.copy()}
    return made


def start_token(name: str) -> str:
    return f"<|text-{name}|>"


def chat_template(acts: Sequence[Act]) -> str:
    """ChatML with Qwen's tool calls, and the token behind which the due text comes."""
    finds = "".join(
        f"{{%- if '[{act.name}]' in ns.text %}}{{%- set ns.act = {index} %}}"
        f"{{%- set ns.turn = 0 %}}{{%- endif %}}\n"
        for index, act in enumerate(acts)
    )
    table = [
        [
            act.word,
            [
                start_token("look" if text == LOOK else f"{act.name}-{turn}")
                for turn, text in enumerate(act.turns)
            ],
        ]
        for act in acts
    ]
    parts = {"ACTS": json.dumps(table), "FIND": finds, "UNSEEN": start_token("unseen")}
    text = _TEMPLATE
    for name, part in {**parts, "BY_THE_WAY": start_token("by-the-way")}.items():
        text = text.replace(f"%{name}%", part)
    return text


_TEMPLATE = """\
{%- set acts = %ACTS% %}
{%- set ns = namespace(act=-1, turn=0, results='', text='') %}
{%- if tools %}
<|im_start|>system
You may call these functions, each call as a JSON object within <tool_call></tool_call>:
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- set ns.text = m.content if m.content is string else '' %}
{%- for part in (m.content if m.content is not string else []) or [] %}
{%- set ns.text = ns.text + ('<image>' if part.type == 'image' else part.text) %}
{%- endfor %}
<|im_start|>{{ m.role }}
{{ ns.text }}
{%- for call in m.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% if m.role == 'user' %}
%FIND%
{%- if ns.turn and '<image>' in ns.text %}
{%- set ns.results = ns.results + '<image>' %}
{%- endif %}
{%- elif m.role == 'assistant' %}
{%- set ns.turn = ns.turn + 1 %}
{%- elif m.role == 'tool' %}
{%- set ns.results = ns.results + ns.text %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if ns.act < 0 or not tools %}
%BY_THE_WAY%
{%- else %}
{%- set word, texts = acts[ns.act] %}
{%- if ns.turn < texts | length - 1 %}
{{- texts[ns.turn] }}
{%- elif word in ns.results %}
{{- texts[-1] }}
{%- else %}
%UNSEEN%
{%- endif %}
{%- endif %}
{%- endif %}"""
