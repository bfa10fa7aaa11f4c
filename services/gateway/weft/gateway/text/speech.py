"""How a model that transcribes speech is prompted: its special tokens, and what it never says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from weft.checkpoint.audio_config import AudioConfig, check_spectrograms
from weft.checkpoint.whisper_config import WhisperConfig, read_whisper_config
from weft.contract.errors import ModelError

MODEL_TYPE = "whisper"
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_MULTILINGUAL = 51_865
"""A Whisper model of several languages has at least so many tokens in its vocabulary."""
_MAX_INITIAL = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTokens:
    """The special tokens of a Whisper model, and its sizes."""

    audio: AudioConfig
    max_tokens: int
    """Most tokens after a clip."""
    start: int
    end: int
    previous: int
    """Goes ahead of what was said before."""
    no_speech: int
    transcribe: int
    translate: int
    first_time: int
    """The token of time 0; others follow in steps of 0.02 s."""
    languages: Mapping[str, int]
    """Tokens of languages by their codes; empty: the model knows English alone."""
    never: tuple[int, ...]
    """Tokens that are not to be drawn."""
    max_initial: int
    """Largest time with which a clip's text may begin, in steps."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.audio.num_rows + self.max_tokens


def load_speech(
    folder: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> SpeechTokens | None:
    """None: the model transcribes nothing. Raises ModelError if its files cannot be used."""
    if config.get("model_type") != MODEL_TYPE:
        return None
    model = read_whisper_config(config, generation, str(folder / "config.json"))
    assert isinstance(model, WhisperConfig), "made above"
    assert model.audio is not None, "made above"
    check_spectrograms(folder, model.audio)

    def token(*names: str) -> int:
        found = (tokenizer.token_to_id(name) for name in names)
        known: int | None = next((one for one in found if one is not None), None)
        if known is None:
            raise ModelError(f"{folder}: the tokenizer has no token {names[0]}")
        return known

    start, no_times = token("<|startoftranscript|>"), token("<|notimestamps|>")
    translate, transcribe = token("<|translate|>"), token("<|transcribe|>")
    is_multilingual = generation.get("is_multilingual", model.vocab_size >= _MULTILINGUAL)
    languages = {}
    if is_multilingual:
        for number in range(start + 1, translate):
            found = _LANGUAGE.fullmatch(tokenizer.id_to_token(number) or "")
            if found is not None:
                languages[found[1]] = number
    never = generation.get("suppress_tokens") or config.get("suppress_tokens") or ()
    if not all(isinstance(one, int) and 0 <= one < model.vocab_size for one in never):
        raise ModelError(f"{folder}: suppress_tokens has what is no token")
    previous, no_speech = token("<|startofprev|>"), token("<|nospeech|>", "<|nocaptions|>")
    initial = generation.get("max_initial_timestamp_index", _MAX_INITIAL)
    specials = (start, previous, no_speech, transcribe, translate, token("<|startoflm|>"))
    end = token("<|endoftext|>")
    return SpeechTokens(
        audio=model.audio,
        max_tokens=model.max_target_positions,
        start=start,
        end=end,
        previous=previous,
        no_speech=no_speech,
        transcribe=transcribe,
        translate=translate,
        first_time=no_times + 1,
        languages=languages,
        never=tuple(sorted({*never, *specials, *languages.values()} - {end})),
        max_initial=initial if isinstance(initial, int) and initial >= 0 else _MAX_INITIAL,
    )
