"""The draft head of EAGLE-3 (Li et al. 2025): one decoder layer over the target's hidden states.

Its entry for position i comes from the target's state at i - 1 and the token at i; position 0 has
none. K and V of the entries are one more layer of the target's pages, after the target's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch
from weft.checkpoint.draft_config import HeadKind, head_digest
from weft.checkpoint.eagle3_config import NUM_AUX_LAYERS, Eagle3Config
from weft.contract.errors import ModelError
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.place import draft_rows, place_of_head
from weft.engine.model.layers.attention import o_spec, qkv_spec
from weft.engine.model.layers.mlp import down_spec, gate_up_spec
from weft.engine.model.layers.rotary import cos_sin_table
from weft.engine.model.stage import ModelShare
from weft.engine.model.step import Step
from weft.engine.model.weights.checkpoint import Checkpoint, is_rotary_buffer
from weft.engine.model.weights.reader import ChangedWeights, CheckpointReader
from weft.engine.model.weights.refill import pairs_of
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.draft_head import DraftEntries, draft_chain
from weft.kernels.ops.draft_head.spec import DraftChains, DraftHeadWeight
from weft.kernels.ops.draft_tree import draft_tree
from weft.kernels.ops.draft_tree.spec import DraftTrees
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.stream.taps import Taps
from weft.kernels.shared.memory import WeightArena


class Eagle3Head:
    """A `DraftHead` loaded for one target, whose embedding (and LM head) it may share."""

    kind: HeadKind = "eagle3"
    group = 0
    """Number of the step's page group that holds the head's K and V: the target's."""

    def __init__(self, config: Eagle3Config, target: DecoderOnlyLM, names: _Names) -> None:
        self.config = config
        self.hidden_size = config.hidden_size
        self.aux_layers = config.layers_of(target.config)
        self.place = place_of_head(config, target)
        self.digest = b""
        """32 bytes over files, configuration and dtype."""
        self.copies_lm_head = not names.has_lm_head
        """Whether its LM head is made of rows of the target's."""
        self.weight = w = _read_weight(config, target, names)
        self.layer_bytes = sum(one.data.nbytes for one in (w.qkv, w.o, w.gate_up, w.down))

    def copy_lm_head(self, target: DecoderOnlyLM) -> None:
        """Copies the rows of the target's LM head anew, after the target's weights have changed."""
        changed = pack_linear(target.lm_head.rows(self.weight.target_ids))
        with torch.inference_mode(False):
            for _, old, new in pairs_of(self.weight.lm_head, changed):
                old.copy_(new)

    def extend(
        self, target: DecoderOnlyLM, step: Step, kept: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = step.token_ids.shape[0], len(self.aux_layers) * target.config.hidden_size
        entries = self.entries(aux := kept.new_empty((rows, width)), step, kept, pool)
        hidden = target.forward(step, pool, Taps(self.aux_layers, aux, entries))
        return hidden, entries.finish()

    def entries(
        self, aux: torch.Tensor, step: Step, kept: torch.Tensor, pool: torch.Tensor
    ) -> DraftEntries:
        """Describes how to write the head's K and V during a step of the target.

        Args:
            aux: [T, 3 * target_hidden]: the inputs of `aux_layers`, concatenated.
            step: Its `slots` must not be None.
            kept: [slots + 1, hidden]: the returned state of each request's last row in the previous
                step. This step overwrites it.
            pool: The target's pool, with the head's layer.

        Returns:
            A description whose result is [T, hidden]: the target's states in the form that the head
                reads.
        """
        assert step.slots is not None, "a step of a drafted model names its slots"
        group = step.groups[self.group]
        is_uniform = group.max_q_len == 1 and step.positions.shape == step.slots.shape
        rows = draft_rows(step, self.group, is_uniform=is_uniform, ancestors=group.ancestors)
        return DraftEntries(aux, self.weight, rows, kept, *self.place.of(pool))

    def chain(
        self, state: torch.Tensor, token_ids: torch.Tensor, chains: DraftChains, pool: torch.Tensor
    ) -> torch.Tensor:
        return draft_chain(state, token_ids, self.weight, chains, *self.place.of(pool))

    def tree(
        self, state: torch.Tensor, token_ids: torch.Tensor, trees: DraftTrees, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Grows trees from the last tokens of requests, as `draft_tree` describes."""
        return draft_tree(state, token_ids, self.weight, trees, *self.place.of(pool))


def adapt_eagle3(
    head: Eagle3Head, draft_dir: Path, target: DecoderOnlyLM, changes: Mapping[str, torch.Tensor]
) -> Eagle3Head:
    """A head with changed projections after K and V, which shares everything else with the
    original.

    Args:
        head: Head that was loaded from `draft_dir` for `target`.
        draft_dir: Read again, for the weights before packing.
        changes: [out, in] by module of the head's layer (q, o, gate, up, down), added to the
            weights.

    Raises:
        ModelError: The files are no longer there.
        ValueError: A change does not fit.
    """
    device = target.model.embed_tokens.device
    with Checkpoint(draft_dir) as file:
        name = _Names(file, head.config, target, draft_dir).layer_name
        added = {f"{name}.{module}.weight": change for module, change in changes.items()}
        changed = ChangedWeights(file, added)
        arena = WeightArena(0)
        layer = Weights(changed, PlainScheme(), target.dtype, device, arena=arena).at(name)
        adapted = copy(head)
        adapted.weight = replace(head.weight, **_read_layer(head.config, layer))
    return adapted


def adaptable_shapes(config: Eagle3Config) -> dict[str, tuple[int, int]]:
    """[out, in] of the weights that `adapt_eagle3` may change, by module."""
    hidden, inner, q_size = (
        config.hidden_size,
        config.intermediate_size,
        config.num_heads * config.head_dim,
    )
    return {
        "self_attn.q_proj": (q_size, 2 * hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


class _Layer(TypedDict):
    """Products of a head's layer, by their names in `DraftHeadWeight`."""

    qkv: LinearWeight
    o: LinearWeight
    gate_up: LinearWeight
    down: LinearWeight


def _read_layer(config: Eagle3Config, layer: Weights) -> _Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention, mlp = layer.at("self_attn"), layer.at("mlp")
    return {
        "qkv": attention.linear(_qkv_spec(config)),
        "o": attention.linear(o_spec(hidden, config.num_heads, config.head_dim)),
        "gate_up": mlp.linear(gate_up_spec(hidden, inner)),
        "down": mlp.linear(down_spec(hidden, inner)),
    }


def _qkv_spec(config: Eagle3Config) -> LinearSpec:
    width = 2 * config.hidden_size
    return qkv_spec(width, config.num_heads, config.num_kv_heads, config.head_dim)


def _read_weight(config: Eagle3Config, target: DecoderOnlyLM, names: _Names) -> DraftHeadWeight:
    hidden, layer = config.hidden_size, names.layer
    fc_width = NUM_AUX_LAYERS * config.target_hidden_size
    fc = LinearSpec(names=("fc",), in_features=fc_width, rows=(hidden,))
    target_ids = names.target_ids(config).to(target.model.embed_tokens.device)
    embedding = target.model.embed_tokens
    if names.has_embedding:
        size = (config.vocab_size, hidden)
        embedding = names.base.vocabulary("embed_tokens", *size, target.config.num_added_tokens)
    if names.has_lm_head:
        lm_head = names.lm_head.vocabulary("lm_head", config.draft_vocab_size, hidden)
    else:
        lm_head = target.lm_head.rows(target_ids)
    # The head drafts at all positions of the target; its own limit is only that of its training.
    positions = target.config.max_position_embeddings
    return DraftHeadWeight(
        **_read_layer(config, layer),
        fc=names.base.linear(fc),
        # A second copy without q, since most steps of the target need only K and V.
        kv=layer.at("self_attn").linear(_qkv_spec(config).last(2)),
        lm_head=names.base.packed(lm_head),
        input_norm=layer.norm("input_layernorm", hidden),
        hidden_norm=layer.norm("hidden_norm", hidden),
        post_norm=layer.norm("post_attention_layernorm", hidden),
        norm=names.base.norm("norm", hidden),
        embedding=embedding,
        target_ids=target_ids,
        cos_sin=cos_sin_table(config.rope, config.head_dim, positions).to(embedding.device),
        num_heads=config.num_heads // names.base.shard.size,
        eps=config.rms_norm_eps,
        norms_first=config.norms_first,
        peers=target.model.peers,
    )


class _Names:
    """Parameter names of a head's file. Training codes name its one layer differently."""

    def __init__(
        self, file: CheckpointReader, config: Eagle3Config, target: DecoderOnlyLM, where: Path
    ) -> None:
        self._file, self._where = file, where
        device, share = target.model.embed_tokens.device, ModelShare(peers=target.model.peers)
        self._top = top = Weights(file, PlainScheme(), target.dtype, device, share=share)
        self._prefix = "model." if file.has("model.fc.weight") else ""
        self.base = top.at("model") if self._prefix else top
        is_numbered = self.base.has("layers.0.hidden_norm.weight")
        self.layer_name = self._prefix + ("layers.0" if is_numbered else "midlayer")
        self.layer = top.at(self.layer_name)
        self.lm_head = top if top.has("lm_head.weight") else self.base
        self.has_lm_head = self.lm_head.has("lm_head.weight")
        self.has_embedding = self.base.has("embed_tokens.weight")
        self._check_fc(config)
        is_same_width = config.hidden_size == config.target_hidden_size
        if not (is_same_width or (self.has_lm_head and self.has_embedding)):
            raise ModelError(
                f"{where}: a head of {config.hidden_size} wide states cannot share embedding and "
                f"LM head of a model of {config.target_hidden_size}, and does not bring its own"
            )

    def target_ids(self, config: Eagle3Config) -> torch.Tensor:
        """[draft_vocab_size] int64, on the host: the head's tokens in the target's vocabulary.
        Raises ModelError if the map is missing, leads outside or names a token twice, or `t2d`
        contradicts it.
        """
        size, vocab_size = config.draft_vocab_size, config.vocab_size
        offsets, flags = (self._table(name) for name in ("d2t", "t2d"))
        ids = torch.arange(size)
        if offsets is not None:
            ids = ids + self._top.table(offsets, size)
        elif size != vocab_size:
            raise ModelError(
                f"{self._where} lacks tensors: d2t, which maps the head's {size} tokens to the "
                f"model's {vocab_size}"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ModelError(
                f"{self._where}: d2t leads to tokens {int(ids.min())} to {int(ids.max())} of a "
                f"vocabulary of {vocab_size}"
            )
        if len(set(ids.tolist())) < size:
            raise ModelError(f"{self._where}: d2t maps several of the head's tokens to one")
        if flags is not None:
            marked = self._top.table(flags, vocab_size).bool()
            if int(marked.sum()) != size or not bool(marked[ids].all()):
                raise ModelError(f"{self._where}: t2d and d2t name different tokens")
        return ids

    def _table(self, name: str) -> str | None:
        return next((n for n in (name, self._prefix + name) if self._file.has(n)), None)

    def _check_fc(self, config: Eagle3Config) -> None:
        name = f"{self._prefix}fc.weight"
        shape = self._file.shape_of(name)  # A missing tensor is reported with all others.
        if shape == (config.hidden_size, 2 * config.hidden_size):
            raise ModelError(
                f"{self._where}: {name} {shape} joins one state and one embedding: a head of "
                "EAGLE-1 or EAGLE-2, whose config.json names LlamaForCausalLMEagle"
            )


def load_eagle3(draft_dir: Path, target: DecoderOnlyLM) -> Eagle3Head:
    """Loads an EAGLE-3 head in the published layout. Raises ModelError as `load_draft_head`."""
    config = Eagle3Config.load(draft_dir)
    config.check_target(target.config, draft_dir)
    with Checkpoint(draft_dir, unused=is_rotary_buffer) as file:
        head = Eagle3Head(config, target, _Names(file, config, target, draft_dir))
        file.finish()
    head.digest = head_digest(config.fingerprint(), str(target.dtype), draft_dir)
    return head
