"""Types of draft head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraStep
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.shared import cpu

FIRST_POSITION = 1
"""First position at which a head has K and V."""
MAX_NATIVE_DEPTH = 32
"""`MAX_DEPTH` of csrc/draft.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadWeight:
    """Parameters of a head; H is its hidden size, and W the width of the target's states side by
    side.

    Raises:
        ValueError: A table is not contiguous, or a product's matrix is rotated.
    """

    fc: LinearWeight
    """[H, W]."""
    qkv: LinearWeight
    """[(Hq + 2 * Hkv) * D, 2 * H]."""
    kv: LinearWeight
    """[2 * Hkv * D, 2 * H]: `qkv` without the rows of q."""
    o: LinearWeight
    """[H, Hq * D]."""
    gate_up: LinearWeight
    """[2 * I, H], from `pack_gate_up`."""
    down: LinearWeight
    """[H, I]."""
    lm_head: LinearWeight
    """[draft vocabulary, H]."""
    input_norm: torch.Tensor
    """[H]: norm of the embeddings."""
    hidden_norm: torch.Tensor
    """[H]: norm of the hidden states."""
    post_norm: torch.Tensor
    """[H]: norm before the MLP."""
    norm: torch.Tensor
    """[H]: norm before the LM head."""
    embedding: torch.Tensor
    """[vocab, H]."""
    target_ids: torch.Tensor
    """[draft vocabulary] int64: ids of its tokens in the target's vocabulary."""
    cos_sin: torch.Tensor
    """[max_positions, D] float32, as in `rope_and_cache`."""
    num_heads: int
    eps: float
    """Epsilon of all norms."""
    norms_first: bool = False
    """Whether the layer's residual is the normed state rather than the state itself, as in heads of
    the library speculators.
    """
    peers: Peers | None = None
    """Ranks that hold the other shares of the layer's heads and MLP; None: this process has all of
    it.
    """
    native: cpu.DraftHeadStruct | None = field(init=False)
    """The head as native operations read it; None if some part is not in native form."""

    def __post_init__(self) -> None:
        products = (self.fc, self.qkv, self.kv, self.o, self.gate_up, self.down, self.lm_head)
        if any(part.is_rotated for part in products):
            raise ValueError("products of a draft head cannot be of rotated matrices")
        native = None
        if all(part.native is not None for part in products):
            norms = (self.input_norm, self.hidden_norm, self.post_norm, self.norm)
            tables = (*norms, self.embedding, self.target_ids, self.cos_sin)
            if not all(table.is_contiguous() for table in tables):
                raise ValueError("norms, embedding and tables of a draft head must be contiguous")
            native = cpu.DraftHeadStruct(
                *(part.address for part in products),
                *(table.data_ptr() for table in tables),
                *(*self.embedding.shape, self.cos_sin.shape[0], self.num_heads),
                *(self.eps, self.scale, self.norms_first),
            )
        object.__setattr__(self, "native", native)

    @property
    def hidden_size(self) -> int:
        return self.fc.out_features

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.cos_sin.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The rows of a target's step: T of R requests, as in `paged_attention`."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    slots: torch.Tensor
    """[T] int64: page * page_size + offset."""
    cu_q_lens: torch.Tensor
    """[R + 1] int32; requests of padding begin after the last row."""
    request_slots: torch.Tensor
    """[R] int64: rows of `kept`."""
    is_uniform: bool = False
    """Whether every request brings exactly one row."""
    ancestors: torch.Tensor | None = None
    """[T] int64, contiguous: as in `paged_attention`. None: each row follows the one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChains:
    """Where chains of D draft tokens, which follow the last tokens of R requests, have their K and
    V.
    """

    positions: torch.Tensor
    """[D, R] int64: positions of the tokens that each step reads."""
    slots: torch.Tensor
    """[D, R] int64: page * page_size + offset of these tokens."""
    kv_lens: torch.Tensor
    """[D, R] int32: positions + 1."""
    counts: Sequence[int]
    """For each step, the number of leading requests that it runs; it never increases."""
    page_table: torch.Tensor
    """[R, max_pages] int32, contiguous along a row."""
    one_row_each: torch.Tensor
    """[R + 1] int32: 0, 1, 2 ..., the offsets of one row for each request."""
    max_kv_len: int
    """Upper bound of `kv_lens`."""
    turned_by: torch.Tensor | None = None
    """[D, R] int64: as `positions`, for the rotations of an MTP head; None: they are the same."""
    lora: LoraStep | None = None
    """What adapters add to the head's layer, number 0. With it every step runs all requests. For
    EAGLE-3 heads only.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRows:
    """The rows of one run of the head: T rows of R requests, as in `paged_attention`."""

    positions: torch.Tensor
    """[T] int64."""
    slots: torch.Tensor
    """[T] int64: page * page_size + offset where K and V go."""
    page_table: torch.Tensor
    """[R, max_pages] int32."""
    cu_q_lens: torch.Tensor
    """[R + 1] int32."""
    kv_lens: torch.Tensor
    """[R] int32."""
    max_kv_len: int
    max_q_len: int = 1
    ancestors: torch.Tensor | None = None
    """[T] int64; None: each row sees all earlier rows of its request."""
    earlier_rows: int = 0
    lora: LoraStep | None = None
    """What these rows' adapters add to the head's layer, number 0."""
