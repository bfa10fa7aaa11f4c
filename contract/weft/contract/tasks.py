"""Tasks of a model: tokens, or vectors made from the hidden states of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.contract.wire import wire

Task = Literal["generate", "embed", "classify", "score"]
"""Task of a model: tokens, embeddings, values of its classification head, or scores from the
logits of named tokens after a prompt.
"""
TASKS: tuple[Task, ...] = ("generate", "embed", "classify", "score")
Output = Literal[
    "embedding",
    "token_embeddings",
    "sparse",
    "multi_vector",
    "classes",
    "label_logits",
    "alignment",
]
"""embedding: one vector per prompt; token_embeddings: one vector per token; sparse: the lexical
weight of each token, one number; multi_vector: one vector per token from a separate head, for
late interaction; classes: values of the classification head; label_logits: logits of
`PoolingParams.label_ids` for the token after the prompt; alignment: for each token from
`PoolingParams.aligned_from` on, the frame of the clip at which the next token is spoken, as a model
that transcribes tells it.
"""
HEADED_OUTPUTS: frozenset[Output] = frozenset({"sparse", "multi_vector"})
"""Outputs for which a model needs a separate head."""
TOKEN_OUTPUTS: frozenset[Output] = HEADED_OUTPUTS | {"token_embeddings"}
"""Outputs with one vector for each token of a prompt."""
Pooling = Literal["last", "mean", "first"]
"""The hidden states that become a prompt's vector: the last token's, the mean of all tokens', or
the first token's.
"""
MAX_LABELS = 64
"""Most tokens whose logits a request may name."""

_TASK_OF: dict[Output, Task] = {
    "embedding": "embed",
    "token_embeddings": "embed",
    "sparse": "embed",
    "multi_vector": "embed",
    "classes": "classify",
    "label_logits": "score",
    "alignment": "generate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """A request's parameters for vectors in place of tokens."""

    output: Output = field(metadata=wire(is_required=True, param="pool"))
    label_ids: tuple[int, ...] = ()
    """The 1 to `MAX_LABELS` tokens whose logits are returned, if the output is label_logits."""
    dimensions: int | None = None
    """Number of leading entries of an embedding to return, cut off before normalisation
    (Matryoshka); None: all.
    """
    normalises: bool | None = field(default=None, metadata=wire(name="normalize"))
    """Whether embeddings are scaled to length 1; None: the model's files decide."""
    segment_start: int = 0
    """Position of the first token of the second of a pair of texts; 0: there is one text."""
    aligned_from: int = 0
    """With alignment: position of the first token that is aligned to the prompt's clip."""
    num_frames: int = 0
    """With alignment: the encoder's frames of the clip that are of the file."""
    pooling: Pooling = "last"
    """The hidden states to use; the engine sets this field from the model's files."""
    is_whole: bool = False
    """Whether the model computes a prompt in one step and without cached pages; the engine sets
    this field."""

    @property
    def task(self) -> Task:
        return _TASK_OF[self.output]

    @property
    def wants_all_rows(self) -> bool:
        """Whether hidden states of tokens before the last one are needed too."""
        return self.pooling != "last" or self.output in TOKEN_OUTPUTS


class PooledVectors(NamedTuple):
    request_id: str
    attempt: int
    first_row: int
    """Index of the first of these vectors among the prompt's vectors."""
    width: int
    """Entries of each vector."""
    values: bytes
    """float32, little-endian, one vector after another."""
