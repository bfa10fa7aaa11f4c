"""Small random models that hear, in the form of Voxtral and Qwen2-Audio, written by
transformers.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from weft.contract.spans import Media, MediaSpan
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_models import save_weights
from weft.testing.models.tiny_vision import randomise, write_marked_tokenizer

VOCAB_SIZE = 421
POSITIONS, MELS = 100, 16
"""Rows that an encoder makes of a window, which has two frames for each."""
SECONDS = POSITIONS // 50
"""Length of a window."""
END = "<|im_end|>"
MARKS = {
    "voxtral": ("[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]"),
    "qwen2_audio": ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
}
"""Special tokens, the last ones of the vocabulary in this order."""
AUDIO = {"voxtral": "[AUDIO]", "qwen2_audio": "<|AUDIO|>"}
ROWS = {"voxtral": POSITIONS // 4, "qwen2_audio": POSITIONS // 2}
"""Placeholder tokens of a whole window."""
_ARCHITECTURES = {
    "voxtral": "VoxtralForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
}
_TEMPLATES = {
    "voxtral": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ message['content'] + eos_token }}{% else %}[INST]"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
        "[BEGIN_AUDIO][AUDIO]{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "[/INST]{% endif %}{% endfor %}"
    ),
    # Qwen's own, of the model's processor.
    "qwen2_audio": (
        "{% set audio_count = namespace(value=0) %}{% for message in messages %}"
        "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
        "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
        "{% for content in message['content'] %}{% if 'audio' in content or 'audio_url' in content "
        "or message['type'] == 'audio' or content['type'] == 'audio' %}"
        "{% set audio_count.value = audio_count.value + 1 %}"
        "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
        "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_AUDIO: dict[str, dict[str, int]] = {
    "voxtral": {
        "hidden_size": 48,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    },
    "qwen2_audio": {
        "d_model": 48,
        "encoder_ffn_dim": 80,
        "encoder_layers": 2,
        "encoder_attention_heads": 3,
    },
}
_KINDS = {
    "voxtral": {"model_type": "llama", "head_dim": 64},
    "qwen2_audio": {"model_type": "qwen2"},
}


def audio_token_id(kind: str) -> int:
    """The placeholder token of a kind of model."""
    return VOCAB_SIZE - len(MARKS[kind]) + MARKS[kind].index(AUDIO[kind])


def config_of(kind: str) -> Any:
    """transformers' configuration of a kind of model, voxtral or qwen2_audio."""
    import transformers

    sizes = {"num_mel_bins": MELS, "max_source_positions": POSITIONS}
    token = "audio_token_index" if kind == "qwen2_audio" else "audio_token_id"
    return transformers.AutoConfig.for_model(
        kind,
        audio_config={**_AUDIO[kind], **sizes},
        text_config={**_TEXT, **_KINDS[kind]},
        **{token: audio_token_id(kind)},
    )


def make_hearing(kind: str, path: Path, seed: int) -> Path:
    """Writes a model directory with tokenizer, chat template and processor."""
    import transformers

    model = getattr(transformers, _ARCHITECTURES[kind])(config_of(kind)).float()
    randomise(model, seed)
    model.save_pretrained(path)
    # transformers 5.17 writes `model.` twice, unlike what is published.
    tensors = load_file(path / "model.safetensors")
    twice, once = "language_model.model.model.", "language_model.model."
    named = {name.replace(twice, once): tensor for name, tensor in tensors.items()}
    save_weights(path, named)
    write_marked_tokenizer(path, VOCAB_SIZE, MARKS[kind], _TEMPLATES[kind], END)
    extractor_of().save_pretrained(path)
    return path


def add_hearing(folder: Path, *, kind: str = "voxtral") -> None:
    """Makes a model directory, whose weights nobody reads, one of a model that hears."""
    file = folder / "config.json"
    config = {**config_of(kind).to_dict(), "architectures": [_ARCHITECTURES[kind]]}
    config["max_position_embeddings"] = json.loads(file.read_text())["max_position_embeddings"]
    config["text_config"]["max_position_embeddings"] = config["max_position_embeddings"]
    file.write_text(json.dumps(config))
    write_marked_tokenizer(folder, VOCAB_SIZE, MARKS[kind], _TEMPLATES[kind], END)
    extractor_of().save_pretrained(folder)


def hearing_tokenizer(kind: str = "voxtral") -> Any:
    """The tokenizer of these models."""
    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_marked_tokenizer(Path(folder), VOCAB_SIZE, MARKS[kind], _TEMPLATES[kind], END)
        return Tokenizer.from_file(f"{folder}/tokenizer.json")


def extractor_of() -> Any:
    """transformers' extractor of spectrograms for these models."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)


@torch.no_grad()
def rows_of(
    model: Any, prompt: list[int], mels: list[torch.Tensor], num_frames: list[int]
) -> torch.Tensor:
    """[placeholders, hidden]: the rows that transformers' model puts into a prompt. `mels` are its
    windows, [mels, frames], of which `num_frames` are a clip's own.
    """
    found: list[torch.Tensor] = []
    hook = model.model.multi_modal_projector.register_forward_hook(
        lambda _module, _given, made: found.append(made)
    )
    features = torch.stack(mels)
    given: dict[str, Any] = {"input_ids": torch.tensor([prompt]), "input_features": features}
    is_qwen = model.config.model_type == "qwen2_audio"
    if is_qwen:
        mask = torch.arange(features.shape[-1]) < torch.tensor(num_frames)[:, None]
        given["feature_attention_mask"] = mask.long()
        # Asked for where no clip has two rows.
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    try:
        model(**given)
    finally:
        hook.remove()
    (made,) = found
    if not is_qwen:
        return made
    counts = [((frames - 1) // 2 + 1 - 2) // 2 + 1 for frames in num_frames]
    return torch.cat([one[:count] for one, count in zip(made, counts, strict=True)])


@torch.no_grad()
def hearing_logits(
    model: Any, prompt: list[int], rows: torch.Tensor, tokens: list[int]
) -> torch.Tensor:
    """[tokens, vocab]: what transformers' model makes of a prompt whose placeholders have these
    rows, before each of the tokens after it.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    embedded = model.get_input_embeddings()(ids)
    token = getattr(model.config, "audio_token_id", None) or model.config.audio_token_index
    places = (torch.tensor(prompt) == token).nonzero()[:, 0]
    embedded[0, places] = rows
    hidden = model.model.language_model(inputs_embeds=embedded).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden)[0, len(prompt) - 1 : -1]
    return logits


def text(most: int = 24) -> list[int]:
    """Tokens of some text."""
    return [random.randrange(3, 256) for _ in range(random.randint(1, most))]


class Clip(NamedTuple):
    """A window of a clip."""

    media: Media
    whole: torch.Tensor
    """[mels, frames] of all of the window."""
    num_frames: int
    """Those of the clip."""
    num_rows: int


class Prompt(NamedTuple):
    """Tokens with clips among them."""

    ids: list[int]
    spans: list[MediaSpan]
    clips: list[Clip]


class HearingModel(NamedTuple):
    """A model's folder, and transformers' model of it in float32."""

    kind: str
    folder: Path
    reference: Any

    def clip(self) -> Clip:
        """One whose length is not a window's, where the model knows lengths."""
        mel = np.random.default_rng(random.randrange(1 << 30)).normal(0, 0.7, (MELS, 2 * POSITIONS))
        data, frames, own = mel.astype("<f4"), 2 * POSITIONS, 2 * POSITIONS
        if self.kind == "qwen2_audio":
            own = random.randint(3, 2 * POSITIONS)
            frames = min(2 * POSITIONS, 2 * ((own + 1) // 2) + 1)
        rows = POSITIONS // 4 if self.kind == "voxtral" else (((own + 1) // 2) - 2) // 2 + 1
        media = Media.of("audio", "test", (MELS, frames, 4), data[:, :frames].tobytes())
        return Clip(media, torch.from_numpy(data), own, rows)

    def prompt(self, clips: list[Clip], begin: list[int] | None = None) -> Prompt:
        """Text, the clips with text between some of them, text."""
        ids, spans = list(begin or text()), list[MediaSpan]()
        for one in clips:
            span = MediaSpan(position=len(ids), length=one.num_rows, digest=one.media.digest)
            spans.append(span)
            ids += [audio_token_id(self.kind)] * one.num_rows
            if random.random() < 0.7:
                ids += text()
        return Prompt([*ids, *text()], spans, clips)

    def check(self, prompt: Prompt, tokens: list[int], near_tie: float = 3e-5) -> None:
        """Each token is the reference's choice, where float32 can tell: an encoder adds its
        roundings to those of the language model.
        """
        clips = prompt.clips
        mels, frames = [one.whole for one in clips], [one.num_frames for one in clips]
        rows = rows_of(self.reference, prompt.ids, mels, frames)
        logits = hearing_logits(self.reference, prompt.ids, rows, tokens)
        check_choices(logits, tokens, near_tie)


def load_hearing(kind: str, folder: Path, seed: int) -> HearingModel:
    """Makes a model in `folder`."""
    import transformers

    make_hearing(kind, folder, seed)
    found = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
    return HearingModel(kind, folder, found.eval())
