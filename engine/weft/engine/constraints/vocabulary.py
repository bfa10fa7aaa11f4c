"""The model's vocabulary in the form that grammars are compiled against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xgrammar
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from weft.engine.constraints.wire import TOKENIZER_FILE


def load_vocabulary(
    model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> xgrammar.TokenizerInfo:
    """Reads the tokenizer of a model directory.

    Special tokens spell nothing: their text may be dropped from the answer, so that no grammar
    may count on it.

    Args:
        model_dir: Has `tokenizer.json`.
        vocab_size: Vocabulary size of the model; it may be larger than the tokenizer's.
        eos_token_ids: Tokens that may follow when a grammar is complete.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / TOKENIZER_FILE))
    detected = xgrammar.TokenizerInfo.from_huggingface(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer),
        vocab_size=vocab_size,
        stop_token_ids=list(eos_token_ids),
    )
    spelled = detected.decoded_vocab
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
