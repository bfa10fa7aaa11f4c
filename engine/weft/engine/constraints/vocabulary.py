"""The model's vocabulary in the form that grammars are compiled against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xgrammar
from transformers import PreTrainedTokenizerFast
from weft.engine.tokenizer_files import decoder_types, read_tokenizer

_SPACE = "\u2581".encode()
"""How vocabularies with a Metaspace decoder write a space."""


def load_vocabulary(
    model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> xgrammar.TokenizerInfo:
    """Reads the tokenizer of a model directory.

    Special tokens spell nothing: their text may be dropped from the answer, so that no grammar
    may count on it.

    Args:
        model_dir: Has `tokenizer.json`, and files beside it.
        vocab_size: Vocabulary size of the model; it may be larger than the tokenizer's.
        eos_token_ids: Tokens that may follow when a grammar is complete.

    Raises:
        ModelError: The files give no tokenizer.
    """
    tokenizer = read_tokenizer(model_dir).tokenizer
    detected = xgrammar.TokenizerInfo.from_huggingface(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer),
        vocab_size=vocab_size,
        stop_token_ids=list(eos_token_ids),
    )
    spelled = detected.decoded_vocab
    if detected.vocab_type is xgrammar.VocabType.RAW and "Metaspace" in decoder_types(tokenizer):
        spelled = [text.replace(_SPACE, b" ") for text in spelled]
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and token_id < vocab_size:
            spelled[token_id] = b""
        elif token_id < vocab_size:
            spelled[token_id] = token.content.encode()
    return xgrammar.TokenizerInfo(
        spelled,
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(eos_token_ids),
    )
