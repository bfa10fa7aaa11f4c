"""What the `tokenizer.json` files of models say about their vocabularies. Pure Python."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.fields import Fields, read_json_file

TOKENIZER_FILE = "tokenizer.json"


def num_tokens(model_dir: Path, config: ModelConfig) -> int:
    """Tokens of a model's tokenizer, which may be fewer than its embedding has rows; as many as
    rows where there is no `tokenizer.json`.

    Raises:
        ModelError: The file is malformed.
    """
    file = model_dir / TOKENIZER_FILE
    if not file.is_file():
        return config.vocab_size
    return 1 + max(token_ids(file).values(), default=0)


def token_ids(file: Path) -> dict[str, int]:
    """Token ids by token, for BPE, WordPiece and WordLevel models, and for Unigram, which has a
    list.
    """
    fields = Fields(read_json_file(file), str(file))
    vocabulary, added = fields.section("model").get("vocab"), fields.get("added_tokens") or []
    try:
        if isinstance(vocabulary, list):
            ids = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
        else:
            ids = {str(token): int(number) for token, number in vocabulary.items()}
        return ids | {str(token["content"]): int(token["id"]) for token in added}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise fields.error("model.vocab", f"not a vocabulary: {error!r}") from error
