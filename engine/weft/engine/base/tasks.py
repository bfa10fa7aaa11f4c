"""What a request wants of a model: tokens, or vectors made of its prompt's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Task = Literal["generate", "embed", "classify", "score"]
"""What a model serves: tokens, embeddings, values of its classification head, or logits of named
tokens behind a prompt.
"""
TASKS: tuple[Task, ...] = ("generate", "embed", "classify", "score")
Output = Literal["embedding", "token_embeddings", "classes", "label_logits"]
"""embedding: one vector a prompt; token_embeddings: one a token; classes: values of the
classification head; label_logits: logits of `Pool.label_ids` for the token behind the prompt.
"""
Pooling = Literal["last", "mean", "first"]
"""The hidden states that a prompt's vector is made of: the last token's, the mean of all, or the
first token's.
"""
MAX_LABELS = 64
"""Most tokens whose logits a request may name."""

_TASK_OF: dict[Output, Task] = {
    "embedding": "embed",
    "token_embeddings": "embed",
    "classes": "classify",
    "label_logits": "score",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Vectors that a request wants in place of tokens."""

    output: Output
    label_ids: tuple[int, ...] = ()
    """With label_logits: the tokens, 1 to `MAX_LABELS`."""
    dimensions: int | None = None
    """Leading entries of an embedding that are wanted, before it is normalised (Matryoshka); None:
    all.
    """
    normalises: bool | None = None
    """Whether embeddings get length 1; None: as the model's files say."""
    segment_start: int = 0
    """Position of the first token of the second of a pair of texts; 0: there is one text."""
    pooling: Pooling = "last"
    """Set by the engine from the model's files."""
    is_whole: bool = False
    """Whether prompts are computed in one step, of nothing that is cached; set by the engine."""

    @property
    def task(self) -> Task:
        """The task that the model must serve."""
        return _TASK_OF[self.output]

    @property
    def wants_all_rows(self) -> bool:
        """Whether hidden states of tokens before the last one are needed too."""
        return self.pooling != "last" or self.output == "token_embeddings"


class PooledVectors(NamedTuple):
    """Vectors of one prompt."""

    request_id: str
    attempt: int
    first_row: int
    """Number of the first of these vectors; 0 where a prompt has one."""
    width: int
    """Numbers in each."""
    values: bytes
    """float32, little-endian, one vector after another."""
