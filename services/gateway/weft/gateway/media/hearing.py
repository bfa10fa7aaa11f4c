"""Reads how a model takes clips of audio in chats from its folder, and makes their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from weft.checkpoint.audio_config import WindowConfig, check_spectrograms
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ModelError
from weft.gateway.media.clip_forms import ClipForm
from weft.gateway.media.prompts import Expansion, Run

_TOKEN_FIELDS = ("audio_token_id", "audio_token_index")
SECTION = "audio_config"
"""Field of config.json of models that hear."""


class ClipPrompts:
    """How one model hears. Safe to use from several threads."""

    def __init__(self, window: WindowConfig, place_id: int, place: str) -> None:
        self.form = ClipForm(window)
        self.place_id = place_id
        """The token that the chat template writes for a clip, and that stands for its rows."""
        self.tokens = (place,)

    @property
    def most_tokens(self) -> int:
        window = self.form.window
        return window.num_rows if window.takes_lengths else 0

    def expansion(self, *size: int, is_coarse: bool = False) -> Expansion:
        (num_samples,) = size
        start, runs = 0, []
        for number, frames in enumerate(self.form.frames(num_samples)):
            length = self.form.window.rows_of(frames)
            runs.append(Run(start, length, number, 0))
            start += length
        return Expansion((self.place_id,) * start, tuple(runs))

    def with_texts_around(self, rendered: str) -> str:
        return rendered


def load_clip_prompts(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer
) -> ClipPrompts | None:
    """How a model hears; None: it does not. `config` is its config.json. Raises ModelError if it
    does so in a way that is not served; the message names it.
    """
    if not isinstance(config.get(SECTION), dict):
        return None
    audio = ModelConfig.from_dict(config, where=str(folder / "config.json")).audio
    if audio is None or audio.projector is None:
        raise ModelError(f"{config.get('model_type')!r:.60}: its {SECTION} is not supported")
    check_spectrograms(folder, audio)
    number = next((config[name] for name in _TOKEN_FIELDS if config.get(name) is not None), None)
    place: str | None = None
    if isinstance(number, int) and number >= 0:
        place = tokenizer.id_to_token(number)
    if number is None or place is None:
        raise ModelError(f"config.json: {_TOKEN_FIELDS[0]} is {number!r:.20}, which is no token")
    return ClipPrompts(audio.window, number, place)
