"""Packs the parameters of a head."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from weft.kernels.ops.draft_head.spec import DraftHeadWeight
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.shared import cpu


def pack_draft_head(
    *,
    fc: LinearWeight,
    qkv: LinearWeight,
    kv: LinearWeight,
    o: LinearWeight,
    gate_up: LinearWeight,
    down: LinearWeight,
    lm_head: LinearWeight,
    input_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    post_norm: torch.Tensor,
    norm: torch.Tensor,
    embedding: torch.Tensor,
    target_ids: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    eps: float,
    norms_first: bool = False,
    peers: Peers | None = None,
) -> DraftHeadWeight:
    """Packs a head's parameters, as `DraftHeadWeight` describes them; shapes must fit together.

    Raises:
        ValueError: A table is not contiguous, or a product's matrix is rotated.
    """
    native = None
    products = (fc, qkv, kv, o, gate_up, down, lm_head)
    if any(part.is_rotated for part in products):
        raise ValueError("products of a draft head cannot be of rotated matrices")
    tables = (input_norm, hidden_norm, post_norm, norm, embedding, target_ids, cos_sin)
    if all(part.native is not None for part in products):
        if not all(table.is_contiguous() for table in tables):
            raise ValueError("norms, embedding and tables of a draft head must be contiguous")
        (vocab, hidden), (positions, dim) = embedding.shape, cos_sin.shape
        native = cpu.DraftHeadStruct(
            *(part.address for part in products),
            *(table.data_ptr() for table in tables),
            *(vocab, hidden, positions, num_heads),
            *(eps, 1 / math.sqrt(dim), norms_first),
        )
    return DraftHeadWeight(
        fc=fc,
        qkv=qkv,
        kv=kv,
        o=o,
        gate_up=gate_up,
        down=down,
        lm_head=lm_head,
        input_norm=input_norm,
        hidden_norm=hidden_norm,
        post_norm=post_norm,
        norm=norm,
        embedding=embedding,
        target_ids=target_ids,
        cos_sin=cos_sin,
        num_heads=num_heads,
        eps=eps,
        native=native,
        norms_first=norms_first,
        peers=peers,
    )


def replace_layer(
    w: DraftHeadWeight,
    *,
    qkv: LinearWeight,
    o: LinearWeight,
    gate_up: LinearWeight,
    down: LinearWeight,
) -> DraftHeadWeight:
    """The same head with other products in its layer; `DraftHeadWeight.kv` stays."""
    parts = {field.name: getattr(w, field.name) for field in fields(w) if field.name != "native"}
    parts |= {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down}
    return pack_draft_head(**parts)
