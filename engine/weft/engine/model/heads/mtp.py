"""Multi-token-prediction (MTP) heads: a decoder layer of the target's kind, which the target's
checkpoint contains (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The head's entry for position i comes from the target's normalised state at i - 1 and the token at
i; position 0 has none. The entries are one more layer of the target's pages, after its own. A step
of the target writes them with the layer's projections alone. Only drafts run the rest of the layer,
such as experts. A chain continues from the head's own states. A checkpoint may have several heads;
the first one drafts all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from weft.checkpoint.draft_config import HeadKind
from weft.checkpoint.mtp_config import missing_head
from weft.engine.model.archs.decoder import Decoder, read_norm
from weft.engine.model.decoder_only import DecoderOnlyLM, LMHead
from weft.engine.model.heads.place import HeadPlace, draft_rows
from weft.engine.model.interface import Model
from weft.engine.model.layers.layer import Layer
from weft.engine.model.stack import run_all, runs_of
from weft.engine.model.step import Step
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.draft_head.spec import FIRST_POSITION, DraftChains
from weft.kernels.ops.eagle_head import keep_last_states, states_before
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import AnyNorm
from weft.kernels.ops.stream.reference import Stream


class MtpHead:
    """A `DraftHead` made of the target's parts."""

    kind: HeadKind = "mtp"
    group = 0
    """Number of the step's page group that holds the head's entries: the target's."""

    def __init__(
        self,
        target: DecoderOnlyLM,
        *,
        embedding: torch.Tensor,
        norms: tuple[AnyNorm, AnyNorm],
        projection: LinearWeight,
        layer: Layer,
        last_norm: AnyNorm | None,
        logits: Callable[[torch.Tensor], torch.Tensor],
        is_state_first: bool = False,
    ) -> None:
        """Places the layer's entries after those of the target's layers.

        Args:
            embedding: [num_embeddings, H].
            norms: Norms of embeddings and of states.
            projection: [H, 2 * H]: of both, concatenated.
            last_norm: Norm of the layer's result, or None.
            logits: Computes logits, [R, vocab], of states, [R, H].
            is_state_first: Whether the projection takes the state before the embedding.
        """
        self.hidden_size = target.config.hidden_size
        self.place = HeadPlace(target.kv_layout(1).plane.layers)
        self.digest = b""
        self.layer_bytes = projection.data.nbytes  # Only EAGLE-3 heads are ever copied.
        layer.mixer.move(self.group, self.place.layer)
        self._embedding = embedding
        self._norms = norms
        self._projection = projection
        self._layer = layer
        self._runs = runs_of([layer])
        self._last_norm = last_norm
        self._logits = logits
        self._is_state_first = is_state_first
        self._peers = target.model.peers

    def extend(
        self, target: DecoderOnlyLM, step: Step, kept: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = target.model.turned(step)
        states = target.forward_all(step, pool)
        rows = draft_rows(step, self.group)
        if step.states is None:
            before = states_before(states, rows, kept)
        else:
            before = step.states.rows_before(states)
        x = self._joined(step.token_ids, before)
        normed = Stream(x).normed(self._layer.input_norm)
        self._layer.mixer.write(normed, step.without_additions(), pool)
        keep_last_states(states, rows, kept)
        return states.index_select(0, step.logits_rows), states

    def chain(
        self, state: torch.Tensor, token_ids: torch.Tensor, chains: DraftChains, pool: torch.Tensor
    ) -> torch.Tensor:
        tokens = torch.zeros(chains.positions.shape, dtype=torch.int64, device=state.device)
        for number, count in enumerate(chains.counts):
            token_ids = token_ids[:count]
            x = self._joined(token_ids, state[:count])
            step = _step_of(chains, number, token_ids)
            state = run_all(self._runs, x, step, pool, peers=self._peers)
            if self._last_norm is not None:
                state = self._last_norm(state)
            token_ids = self._logits(state).argmax(dim=1)
            tokens[number, :count] = token_ids
        return tokens

    def _joined(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The layer's input: [T], [T, H] -> [T, H]."""
        of_tokens, of_states = self._norms
        both = [of_tokens(self._embedding.index_select(0, token_ids)), of_states(states)]
        if self._is_state_first:
            both.reverse()
        return linear(torch.cat(both, dim=1), self._projection)


def _step_of(chains: DraftChains, number: int, token_ids: torch.Tensor) -> Step:
    count = len(token_ids)
    group = AttentionMetadata(
        page_table=chains.page_table[:count],
        places=chains.slots[number, :count],
        cu_q_lens=chains.one_row_each[: count + 1],
        kv_lens=chains.kv_lens[number, :count],
        max_q_len=1,
        max_kv_len=chains.max_kv_len,
    )
    return Step(
        token_ids=token_ids,
        positions=chains.positions[number, :count],
        groups=(group,),
        logits_rows=chains.one_row_each[:count],
        wants_all=True,
        turned_by=None if chains.turned_by is None else chains.turned_by[number, :count],
    )


def read_mtp(target: Model, weights: Weights, own: Collection[str], where: str) -> MtpHead:
    """Reads the head that a target's checkpoint contains.

    Args:
        weights: All parameters of the checkpoint.
        own: The head's embedding and LM head (`MtpConfig.copies`), if they differ from the model's.
        where: Name of the checkpoint in messages.

    Raises:
        ModelError: Models of this kind have no supported MTP head, or the checkpoint has none.
    """
    config = target.config
    if not isinstance(target, Decoder) or config.mtp is None or config.decoder is None:
        raise missing_head(where, f"{config.architecture} brings none that is supported")
    mtp, hidden, parts = config.mtp, config.hidden_size, config.decoder
    if not weights.has(f"{mtp.projection}.weight"):
        raise missing_head(where, f"there is no tensor {mtp.projection}.weight")

    def norm(name: str) -> AnyNorm:
        return read_norm(parts.norm, weights, name, hidden)

    embedding, size = target.model.embed_tokens, (config.vocab_size, hidden)
    logits: Callable[[torch.Tensor], torch.Tensor] = target.logits
    if mtp.embedding is not None and mtp.embedding in own:
        embedding = weights.vocabulary(mtp.embedding, *size, config.num_added_tokens)
    if mtp.lm_head is not None and mtp.lm_head in own:
        logits = LMHead(weights.packed(weights.vocabulary(mtp.lm_head, *size)))
    both = LinearSpec(names=(mtp.projection,), in_features=2 * hidden, rows=(hidden,))
    return MtpHead(
        target,
        embedding=embedding,
        norms=(norm(mtp.embedding_norm), norm(mtp.state_norm)),
        # Quantised checkpoints keep it as floats, without listing it as such.
        projection=PlainScheme().linear(both, weights),
        layer=target.further_layer(weights.at(mtp.layer), FIRST_POSITION, is_sparse=mtp.is_sparse),
        last_norm=None if mtp.last_norm is None else norm(mtp.last_norm),
        logits=logits,
        is_state_first=mtp.is_state_first,
    )
