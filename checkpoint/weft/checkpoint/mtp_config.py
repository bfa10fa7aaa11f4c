"""Where a checkpoint keeps its multi-token-prediction (MTP) head, and the head's form. Pure
Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.contract.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """A checkpoint's head that predicts the token after the next one (DeepSeek-V3, arXiv
    2412.19437, section 2.2): one more decoder layer over a projection of two normalised vectors.

    If there are several heads this is the first, and the others are left out. Names are full.
    """

    layer: str
    embedding_norm: str
    """Norm of the token's embedding."""
    state_norm: str
    """Norm of the model's hidden state at the position before."""
    projection: str
    """Projection of both norms' results, side by side, to the stream's width."""
    last_norm: str | None
    """Norm of the layer's result; None: there is none."""
    embedding: str | None = None
    """Copy of the model's embedding that some files have."""
    lm_head: str | None = None
    """Copy of the model's LM head that some files have."""
    is_state_first: bool = False
    """Whether the projection takes the state before the embedding."""
    is_sparse: bool = True
    """Whether the layer has experts if the model's layers have them."""

    @property
    def copies(self) -> tuple[str, ...]:
        """Modules that copy the model's embedding and LM head."""
        return tuple(name for name in (self.embedding, self.lm_head) if name is not None)

    @property
    def prefixes(self) -> tuple[str, ...]:
        names = (self.layer, self.embedding_norm, self.state_norm, self.projection)
        last = () if self.last_norm is None else (self.last_norm,)
        return tuple(f"{name}." for name in (*names, *last, *self.copies))

    def has_below(self, prefix: str) -> bool:
        """Whether names of the head begin with `prefix`."""
        return any(name.startswith(prefix) for name in self.prefixes)


def head_behind(num_layers: int) -> MtpConfig:
    """The head of DeepSeek V3 and GLM-4.5: a layer after the model's own."""
    layer = f"model.layers.{num_layers}"
    return MtpConfig(
        layer=layer,
        embedding_norm=f"{layer}.enorm",
        state_norm=f"{layer}.hnorm",
        projection=f"{layer}.eh_proj",
        last_norm=f"{layer}.shared_head.norm",
        embedding=f"{layer}.embed_tokens",
        lm_head=f"{layer}.shared_head.head",
    )


def ernie_head() -> MtpConfig:
    """The head of ERNIE 4.5: a layer without experts, and no norm after it."""
    return MtpConfig(
        layer="model.mtp_block.0",
        embedding_norm="model.mtp_emb_norm.0",
        state_norm="model.mtp_hidden_norm.0",
        projection="model.mtp_linear_proj.0",
        last_norm=None,
        is_sparse=False,
    )


def mimo_head() -> MtpConfig:
    """The head of MiMo (arXiv 2505.07608)."""
    layer = "model.mtp_layers.0"
    return MtpConfig(
        layer=layer,
        embedding_norm=f"{layer}.token_layernorm",
        state_norm=f"{layer}.hidden_layernorm",
        projection=f"{layer}.input_proj",
        last_norm=f"{layer}.final_layernorm",
        is_state_first=True,
    )


def qwen_head() -> MtpConfig:
    """The head of Qwen3-Next and Qwen3.5."""
    return MtpConfig(
        layer="mtp.layers.0",
        embedding_norm="mtp.pre_fc_norm_embedding",
        state_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        last_norm="mtp.norm",
    )


def missing_head(where: str, why: str) -> ModelError:
    """The error about a checkpoint that has no MTP head although settings ask for it."""
    return ModelError(
        f"{where} has no MTP head: {why}; take another drafter, and leave mtp_head off",
        param="mtp_head",
    )
