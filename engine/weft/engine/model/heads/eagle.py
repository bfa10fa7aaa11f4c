"""The draft head of EAGLE-1 and EAGLE-2: one decoder layer over the target's last hidden states.

Its entry for position i comes from the target's normalised state at i - 1 and the token at i;
position 0 has none. K and V of the entries are one more layer of the target's pages, after the
target's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from weft.checkpoint.draft_config import HeadKind, head_digest
from weft.checkpoint.eagle_config import EagleConfig
from weft.contract.errors import ModelError
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.place import draft_rows, place_of_head
from weft.engine.model.layers.attention import o_spec, qkv_spec
from weft.engine.model.layers.mlp import down_spec, gate_up_spec
from weft.engine.model.layers.rotary import cos_sin_table
from weft.engine.model.stage import ModelShare
from weft.engine.model.step import Step
from weft.engine.model.weights.checkpoint import Checkpoint, is_rotary_buffer
from weft.engine.model.weights.reader import CheckpointReader
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.draft_head.spec import DraftChains
from weft.kernels.ops.eagle_head import eagle_chain, eagle_entries
from weft.kernels.ops.eagle_head.spec import EagleHeadWeight
from weft.kernels.ops.linear.spec import LinearWeight


class EagleHead:
    """A `DraftHead` loaded for one target, whose embedding and LM head it may share."""

    kind: HeadKind = "eagle"
    group = 0
    """Number of the step's page group that holds the head's K and V: the target's."""

    def __init__(self, config: EagleConfig, target: DecoderOnlyLM, file: CheckpointReader) -> None:
        self.hidden_size = config.hidden_size
        self.place = place_of_head(config, target)
        self.digest = b""
        self.weight = w = _read_weight(config, target, file)
        self.layer_bytes = sum(one.data.nbytes for one in (w.qkv, w.o, w.gate_up, w.down))

    def extend(
        self, target: DecoderOnlyLM, step: Step, kept: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = target.forward_all(step, pool)
        rows = draft_rows(step, self.group)
        eagle_entries(states, self.weight, rows, kept, *self.place.of(pool))
        return states.index_select(0, step.logits_rows), states

    def chain(
        self, state: torch.Tensor, token_ids: torch.Tensor, chains: DraftChains, pool: torch.Tensor
    ) -> torch.Tensor:
        return eagle_chain(state, token_ids, self.weight, chains, *self.place.of(pool))


def load_eagle(draft_dir: Path, target: DecoderOnlyLM) -> EagleHead:
    """Loads an EAGLE-1 or EAGLE-2 head in the published layout. Raises ModelError as
    `load_draft_head`.
    """
    config = EagleConfig.load(draft_dir)
    config.check_target(target.config, draft_dir)
    with Checkpoint(draft_dir, unused=is_rotary_buffer) as file:
        _check_fc(file, config, draft_dir)
        head = EagleHead(config, target, file)
        file.finish()
    head.digest = head_digest(config.fingerprint(), str(target.dtype), draft_dir)
    return head


def _read_weight(
    config: EagleConfig, target: DecoderOnlyLM, file: CheckpointReader
) -> EagleHeadWeight:
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    device, share = target.model.embed_tokens.device, ModelShare(peers=target.model.peers)
    top = Weights(file, PlainScheme(), target.dtype, device, share=share)
    layer = top.at("layers").at(0)
    attention, mlp = layer.at("self_attn"), layer.at("mlp")
    qkv = qkv_spec(hidden, config.num_heads, config.num_kv_heads, config.head_dim)

    def product(weights: Weights, spec: LinearSpec) -> LinearWeight:
        # Whether there are biases differs from head to head, and config.json seldom says.
        return weights.linear(replace(spec, bias=weights.has(f"{spec.names[-1]}.bias")))

    embedding, lm_head = target.model.embed_tokens, target.lm_head.weight
    if top.has("embed_tokens.weight"):
        size = (config.vocab_size, hidden)
        embedding = top.vocabulary("embed_tokens", *size, target.config.num_added_tokens)
    if top.has("lm_head.weight"):
        lm_head = top.packed(top.vocabulary("lm_head", config.vocab_size, hidden))
    # The head drafts at all positions of the target; its own limit is only that of its training.
    positions = target.config.max_position_embeddings
    return EagleHeadWeight(
        fc=product(top, LinearSpec(names=("fc",), in_features=2 * hidden, rows=(hidden,))),
        qkv=product(attention, qkv),
        # A second copy without q, since most steps of the target need only K and V.
        kv=product(attention, qkv.last(2)),
        o=product(attention, o_spec(hidden, config.num_heads, config.head_dim)),
        gate_up=mlp.linear(gate_up_spec(hidden, inner)),
        down=product(mlp, down_spec(hidden, inner)),
        lm_head=lm_head,
        post_norm=layer.norm("post_attention_layernorm", hidden),
        embedding=embedding,
        cos_sin=cos_sin_table(config.rope, config.head_dim, positions).to(embedding.device),
        num_heads=config.num_heads // share.shard.size,
        eps=eps,
        peers=share.peers,
    )


def _check_fc(file: CheckpointReader, config: EagleConfig, where: Path) -> None:
    shape = file.shape_of(name := "fc.weight")
    if shape is not None and shape[1] == 3 * config.hidden_size:
        raise ModelError(
            f"{where}: {name} {shape} joins three states: a head of EAGLE-3, whose config.json "
            "names LlamaForCausalLMEagle3 and has a draft_vocab_size"
        )
