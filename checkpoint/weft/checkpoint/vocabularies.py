"""Reads vocabularies from the `tokenizer.json` files of models. Pure Python."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.fields import fields_of_file
from weft.contract.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"


def num_tokens(model_dir: Path, config: ModelConfig) -> int:
    """The highest token id of a model's tokenizer plus 1, which may be fewer than the rows of its
    embedding; the number of rows if there is no `tokenizer.json`.
    """
    file = model_dir / TOKENIZER_FILE
    if not file.is_file():
        return config.vocab_size
    return 1 + max(token_ids(file).values(), default=-1)


def token_ids(file: Path) -> dict[str, int]:
    """Token ids by token, for BPE, WordPiece and WordLevel models, and for Unigram, whose file has
    a list.
    """
    fields = fields_of_file(file)
    vocabulary, added = fields.section("model").get("vocab"), fields.get("added_tokens") or []
    try:
        if isinstance(vocabulary, list):
            ids = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
        else:
            ids = {str(token): int(number) for token, number in vocabulary.items()}
        return ids | {str(token["content"]): int(token["id"]) for token in added}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise fields.error("model.vocab", f"not a vocabulary: {error!r}") from error


def check_same_vocabulary(
    draft_dir: Path, draft: ModelConfig, target_dir: Path, target: ModelConfig
) -> None:
    """Raises ModelError, whose message says how, if a draft model's token ids differ in meaning
    from the target's, or a file is malformed.

    The rows of their embeddings must be equally many, padded ones included, which can differ within
    a family of models. If one of them has no `tokenizer.json`, only these are compared.
    """
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"vocab_size of the draft model is {draft.vocab_size}, of the target model "
            f"{target.vocab_size}; give a model whose embedding has as many rows, padded ones "
            "included",
            param="vocab_size",
        )
    files = [folder / TOKENIZER_FILE for folder in (draft_dir, target_dir)]
    if not all(file.is_file() for file in files):
        return
    mine, its = (token_ids(file) for file in files)
    token = next((t for t in sorted(mine.keys() | its.keys()) if mine.get(t) != its.get(t)), None)
    if token is not None:
        raise ModelError(
            f"token {token!r} is {mine.get(token)} for the draft model, "
            f"{its.get(token)} for the target model (None: it has no such token); "
            "give a model with the same tokenizer",
        )
