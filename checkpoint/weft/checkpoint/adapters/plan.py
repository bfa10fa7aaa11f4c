"""Plans how an adapter's tensors apply to the model, from the file's header alone. No torch.

It does not read the tensors' contents, so that a worker reserves memory only after all sizes have
been checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from weft.checkpoint.adapters.files import AdapterFiles
from weft.checkpoint.adapters.names import (
    RECURRENT_KINDS,
    ROUTER,
    VOCABULARY,
    ModuleName,
    parse_module,
    parse_name,
)
from weft.checkpoint.adapters.peft_config import PeftConfig
from weft.checkpoint.adapters.projections import layer_shapes, recurrent_shapes
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.encoder_config import EncoderConfig, is_unused_of_encoder
from weft.contract.errors import AdapterError
from weft.contract.give_way import give_way

DENSE = "dense"
EXPERTS = "experts"
PARTS = (DENSE, EXPERTS, ROUTER, *VOCABULARY)
"""Parts of a model that adapters can change."""
DTYPES = ("F32", "F16", "BF16")

_LINEAR_HALVES = ("A", "B")
_EMBEDDING_HALVES = ("embedding_A", "embedding_B")
_SAVED = ("weight", "copy", "frozen", "tokens")
_SOME_EXPERT = -1
_MLP_KINDS = ("gate", "up", "down")
_ATTENTION_KINDS = ("q", "k", "v", "o")
_NAMES_OF_SOME = (
    *("out_proj", "dense", "query_key_value", "c_attn", "c_proj", "c_fc"),
    *("w1", "w2", "w3", "fc1", "fc2", "fc_in", "fc_out", "dense_h_to_4h", "dense_4h_to_h"),
)
"""Modules that only some decoders have."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    module: ModuleName
    a: str
    """Name of the tensor A."""
    b: str
    rank: int
    scaling: float
    """Factor on B."""
    experts: tuple[int, int] = (0, 0)
    """Entries along the first axis of A and of B; 0: the tensor has no axis of experts."""


@dataclass(frozen=True, slots=True)
class VocabularyPlan:
    """The tensors of the embedding or of the LM head; an empty name: there is none."""

    weight: str = ""
    copy: str = ""
    """Name of a second tensor, which must be equal."""
    tokens: str = ""
    token_ids: tuple[int, ...] = ()
    pair: PairPlan | None = None


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The tensors to read, by the module they apply to."""

    dense: tuple[PairPlan, ...]
    experts: tuple[PairPlan, ...]
    vocabulary: Mapping[str, VocabularyPlan]
    """Plans for embed_tokens and lm_head."""
    ties_vocabulary: bool
    """Whether a change of the embedding also applies to the LM head."""
    ignored: tuple[str, ...]
    """Names of tensors that a lenient reading leaves out, or that no result depends on."""
    num_elements: int
    """Elements that reading keeps in memory."""

    @property
    def pairs(self) -> tuple[PairPlan, ...]:
        vocabulary = (plan.pair for plan in self.vocabulary.values())
        return (*self.dense, *self.experts, *(pair for pair in vocabulary if pair is not None))


def plan_adapter(
    files: AdapterFiles,
    config: ModelConfig,
    *,
    max_rank: int,
    parts: Collection[str],
    is_lenient: bool,
    num_tokens: Callable[[], int],
) -> AdapterPlan:
    """Sorts an adapter's tensors and checks their names, shapes, dtypes and ranks.

    Args:
        max_rank: Largest rank of any module.
        parts: Those of `PARTS` that are applied.
        is_lenient: Whether to leave out tensors that cannot be applied, instead of refusing the
            adapter.
        num_tokens: As in `read_adapter`.
    """
    planner = _Planner(files, config, max_rank, frozenset(parts), is_lenient, num_tokens)
    planner.sort()
    for module, tensors in planner.modules.items():
        give_way()
        planner.plan(module, tensors)
    return planner.finish()


def projection_shape(config: ModelConfig, module: ModuleName, kind: str) -> tuple[int, int]:
    """Sizes (in, out) of one projection; the input of the embedding is the vocabulary."""
    hidden, moe = config.hidden_size, config.moe
    if kind in RECURRENT_KINDS:
        _, width, out, _ = recurrent_shapes(config)[kind]
        return width, out
    if module.is_expert and moe is not None:
        inner = moe.intermediate_size
        return (inner, hidden) if kind == "down" else (hidden, inner)
    if kind in VOCABULARY:
        vocab = config.vocab_size
        return (vocab, hidden) if kind == "embed_tokens" else (hidden, vocab)
    if kind == ROUTER:
        return hidden, 0 if moe is None else moe.num_experts
    shape = layer_shapes(config, module.layer)[kind]
    return shape.in_features, shape.out_features


def _has_projection(config: ModelConfig, module: ModuleName) -> bool:
    kind, leaf = module.kinds[0], module.rest.rpartition(".")[2]
    if config.adapted_kinds is not None:
        return set(module.kinds) <= set(config.adapted_kinds)
    if kind in RECURRENT_KINDS:
        recurrent = () if config.decoder is None else config.decoder.recurrent_layers
        return kind in recurrent_shapes(config) and module.layer in recurrent
    if leaf in _NAMES_OF_SOME and not module.is_expert and not isinstance(config, EncoderConfig):
        names = config.names
        own = {"q": names.qkv, "o": names.o, "gate": names.gate, "up": names.up}
        return leaf == own.get(kind, names.down)
    if kind in _ATTENTION_KINDS and module.layer < config.num_layers:
        found = layer_shapes(config, module.layer).items()
        return set(module.kinds) <= {kind for kind, shape in found if shape.kind == kind}
    return True


def _in_layers(module: ModuleName, config: ModelConfig) -> ModuleName:
    """The module with the number of its layer, of models whose checkpoints count mixers and MLPs
    as blocks of their own.
    """
    if module.layer < 0 or not config.names.blocks:
        return module
    is_mlp = bool(module.kinds) and (module.is_expert or module.kinds[0] in _MLP_KINDS)
    for layer, (mixer, feed) in enumerate(config.names.blocks):
        if module.layer == (feed if is_mlp else mixer):
            return replace(module, layer=layer)
        if module.layer in (mixer, feed):
            return replace(module, layer=layer, kinds=())
    return replace(module, layer=config.num_layers)


@dataclass(slots=True)
class _Planner:
    files: AdapterFiles
    config: ModelConfig
    max_rank: int
    parts: frozenset[str]
    is_lenient: bool
    num_tokens: Callable[[], int]
    modules: dict[ModuleName, dict[str, str]] = field(default_factory=dict)
    """Names of tensors by module and part."""
    _peft: PeftConfig = field(init=False)
    _dense: list[PairPlan] = field(default_factory=list)
    _experts: list[PairPlan] = field(default_factory=list)
    _vocabulary: dict[str, VocabularyPlan] = field(default_factory=dict)
    _ignored: list[str] = field(default_factory=list)
    _changed: dict[tuple[int, str, int | None], str] = field(default_factory=dict)
    """Name of the tensor that changes a projection of a layer and expert."""

    def __post_init__(self) -> None:
        self._peft = PeftConfig.parse(self.files.config, self.files.directory)

    def error(self, problem: str) -> AdapterError:
        return AdapterError(f"adapter {self.files.directory}: {problem}")

    def sort(self) -> None:
        if not self.files.tensors:
            raise self.error("it has no tensors")
        for name in self.files.tensors:
            give_way()
            parsed = parse_name(name)
            parsed = replace(parsed, module=_in_layers(parsed.module, self.config))
            if parsed.part == "magnitude":
                raise self.error(f"tensor {name}: DoRA is not supported")
            if parsed.part == "original" and parsed.module.kinds:
                # If the vocabulary has grown, PEFT also saves the parameter that was replaced.
                continue
            if self._has_no_part(parsed.module):
                self._ignored.append(name)
                continue
            if parsed.part in ("bias", "original", "other"):
                self._leave_out("only LoRA matrices and saved embeddings are applied", name)
                continue
            tensors = self.modules.setdefault(parsed.module, {})
            if parsed.part in tensors:
                raise self.error(f"tensors {tensors[parsed.part]} and {name} are the same one")
            tensors[parsed.part] = name

    def _has_no_part(self, module: ModuleName) -> bool:
        """True for an encoder's unused pooler, and for K and V of a layer that uses those of
        another layer, which PEFT gave a LoRA where transformers still built them.
        """
        config = self.config
        if isinstance(config, EncoderConfig):
            return is_unused_of_encoder(module.rest, config)
        is_kv = module.kinds in (("k",), ("v",)) and module.layer in config.attention_layers
        return is_kv and config.kv_source(module.layer) != module.layer

    def plan(self, module: ModuleName, tensors: dict[str, str]) -> None:
        if module.parameter is not None and self.config.moe is not None:
            module = self._resolve(module, *self._halves(module, tensors))
        if problem := self._problem(module, tensors):
            self._leave_out(problem, *tensors.values())
        elif module.rest in VOCABULARY:
            self._vocabulary[module.rest] = self._plan_vocabulary(module, tensors)
        elif module.is_expert:
            self._experts.append(self._plan_pair(module, tensors))
        else:
            self._dense.append(self._plan_pair(module, tensors))

    def finish(self) -> AdapterPlan:
        self._check_saved()
        self._check_mixture()
        ties = self.config.tie_word_embeddings
        return AdapterPlan(
            dense=tuple(self._dense),
            experts=tuple(self._experts),
            vocabulary=self._vocabulary,
            ties_vocabulary=ties and (self._peft.ties_weights or bool(self._peft.token_indices)),
            ignored=tuple(self._ignored),
            num_elements=self._num_elements(),
        )

    def _leave_out(self, problem: str, *names: str) -> None:
        if not self.is_lenient:
            raise self.error(f"tensor {names[0]}: {problem}")
        self._ignored.extend(names)

    def _resolve(self, module: ModuleName, a: str, b: str) -> ModuleName:
        """The widths of A and B tell which expert parameter is wrapped."""
        assert self.config.moe is not None, "asked before"
        hidden, inner = self.config.hidden_size, self.config.moe.intermediate_size
        shape = self.files.tensors[b].shape[:1] + self.files.tensors[a].shape[1:]
        if shape == (2 * inner, hidden):
            return replace(module, parameter="gate_up_proj", kinds=("gate", "up"))
        if shape == (hidden, inner):
            return replace(module, parameter="down_proj", kinds=("down",))
        raise self.error(
            f"tensors {a} and {b} fit neither gate_up_proj nor down_proj of experts with hidden "
            f"size {hidden} and intermediate size {inner}"
        )

    def _halves(self, module: ModuleName, tensors: Mapping[str, str]) -> tuple[str, str]:
        parts = _EMBEDDING_HALVES if module.rest == "embed_tokens" else _LINEAR_HALVES
        a, b = (tensors.get(part, "") for part in parts)
        if not a or not b:
            there, missing = (a, parts[1]) if a else (b or next(iter(tensors.values())), parts[0])
            raise self.error(f"tensor {there}: its other half, lora_{missing}, is missing")
        return a, b

    def _problem(self, module: ModuleName, tensors: dict[str, str]) -> str:
        config, moe = self.config, self.config.moe
        is_vocabulary, is_router = module.rest in VOCABULARY, module.kinds == (ROUTER,)
        if not module.kinds:
            return "the model has no such projection, or adapters cannot change it"
        if not _has_projection(config, module):
            return "this layer of the model has no such projection"
        if module.layer >= config.num_layers:
            return f"the model has {config.num_layers} layers"
        is_sparse = moe is not None and module.layer >= 0 and moe.is_sparse(module.layer)
        if (module.is_expert or is_router) and not is_sparse:
            return f"layer {module.layer} of the model has no experts"
        if module.expert is not None and moe is not None and module.expert >= moe.num_experts:
            return f"the model has {moe.num_experts} experts"
        has_no_mlp = is_sparse and moe is not None and not moe.is_beside_mlp
        if has_no_mlp and not module.is_expert and module.kinds[0] in _MLP_KINDS:
            return f"layer {module.layer} of the model has experts in the place of this"
        part = EXPERTS if module.is_expert else DENSE
        part = module.kinds[0] if is_vocabulary or is_router else part
        if part not in self.parts:
            return (
                f"changes of this part of a model ({part}) are not applied here: lora_projections "
                f"does not name {part}"
            )
        halves = _EMBEDDING_HALVES if module.rest == "embed_tokens" else _LINEAR_HALVES
        if tensors.keys() - {*halves, *(_SAVED if is_vocabulary else ())}:
            return f"of this module only {' and '.join(halves)} of LoRA are applied"
        if not tensors.keys().isdisjoint(halves) and not self._is_targeted(module):
            return "adapter_config.json does not target its module"
        return ""

    def _is_targeted(self, module: ModuleName) -> bool:
        is_tied = module.rest in VOCABULARY and self._peft.ties_weights
        modules = [parse_module(rest) for rest in VOCABULARY] if is_tied else [module]
        return any(self._peft.is_targeted(one.names) for one in modules)

    def _plan_pair(
        self, module: ModuleName, tensors: Mapping[str, str], vocab_size: int | None = None
    ) -> PairPlan:
        a, b = self._halves(module, tensors)
        config = replace(self.config, vocab_size=vocab_size or self.config.vocab_size)
        shapes = [projection_shape(config, module, kind) for kind in module.kinds]
        width, out = shapes[0][0], sum(shape[1] for shape in shapes)
        own_rank = rank = self._peft.rank_of(module.names)
        embedding = parse_module("embed_tokens").names
        is_tied = module.rest == "lm_head" and self._peft.ties_weights
        if is_tied and self._peft.is_targeted(embedding):
            # PEFT takes the embedding's matrices, whatever their rank, and scales by its own.
            rank = self._peft.rank_of(embedding)
        experts = self._expert_axes(module, a, b)
        self._check_rank(a, rank, module)
        if module.parameter is not None and config.moe is not None:
            count = config.moe.num_experts
            self._check_tensor(a, (count * rank, width))
            self._check_tensor(b, (out, rank * count))
        else:
            axis_a, axis_b = ((entries,) if entries else () for entries in experts)
            self._check_tensor(a, (*axis_a, rank, width))
            self._check_tensor(b, (*axis_b, out, rank))
        self._check_once(module, a)
        scaling = self._peft.scaling_of(module.names, own_rank)
        return PairPlan(module, a, b, rank, scaling, experts)

    def _expert_axes(self, module: ModuleName, a: str, b: str) -> tuple[int, int]:
        if not module.is_expert or module.expert is not None or module.parameter is not None:
            return 0, 0
        assert self.config.moe is not None, "checked before"
        count = self.config.moe.num_experts
        # The outer side, towards the stream, may be one for all.
        outer = b if module.kinds == ("down",) else a
        shape = self.files.tensors[outer].shape
        entries = 1 if len(shape) == 3 and shape[0] == 1 else count
        return (count, entries) if outer == b else (entries, count)

    def _check_rank(self, name: str, rank: int, module: ModuleName) -> None:
        shape = self.files.tensors[name].shape
        stored = shape[-2] if len(shape) in (2, 3) else 0
        if module.parameter is not None and self.config.moe is not None:
            stored //= self.config.moe.num_experts
        if len(shape) in (2, 3) and stored != rank:
            raise self.error(f"tensor {name} has rank {stored}, adapter_config.json says {rank}")
        if rank > self.max_rank:
            raise self.error(
                f"tensor {name} has rank {rank}, more than max_lora_rank {self.max_rank} "
                "(--max-lora-rank of the workers)"
            )

    def _check_tensor(self, name: str, expected: tuple[int, ...]) -> None:
        entry = self.files.tensors[name]
        if entry.shape != expected:
            raise self.error(
                f"tensor {name} has shape {entry.shape}; the model and adapter_config.json ask "
                f"for {expected}"
            )
        if entry.dtype not in DTYPES:
            raise self.error(
                f"tensor {name} is {entry.dtype}; only {', '.join(DTYPES)} are supported"
            )

    def _check_once(self, module: ModuleName, name: str) -> None:
        for kind in module.kinds:
            all_experts = (module.layer, kind, None)
            one = (module.layer, kind, _SOME_EXPERT if module.expert is None else module.expert)
            if other := self._changed.get(all_experts) or self._changed.get(one):
                raise self.error(f"tensors {other} and {name} change the same projection")
            self._changed[module.layer, kind, module.expert] = name
            if module.expert is not None:
                self._changed[module.layer, kind, _SOME_EXPERT] = name

    def _plan_vocabulary(self, module: ModuleName, tensors: Mapping[str, str]) -> VocabularyPlan:
        weights = [tensors[part] for part in ("weight", "copy", "frozen") if part in tensors]
        weight, copy = (*weights, "", "")[:2]
        rows = self.config.vocab_size
        if weight:
            rows = self._vocabulary_rows(weight)
            for name in weights:
                self._check_tensor(name, (rows, self.config.hidden_size))
            if self.is_lenient and rows > self.config.vocab_size:
                self._ignored.append(f"{weight}[{self.config.vocab_size}:{rows}]")
        tokens = tensors.get("tokens", "")
        token_ids: tuple[int, ...] = ()
        if tokens:
            token_ids = self._token_ids(module, tokens, rows)
            self._check_tensor(tokens, (len(token_ids), self.config.hidden_size))
        pair = self._plan_pair(module, tensors, rows) if tensors.keys() - {*_SAVED} else None
        return VocabularyPlan(weight, copy, tokens, token_ids, pair)

    def _vocabulary_rows(self, name: str) -> int:
        shape = self.files.tensors[name].shape
        rows = shape[0] if shape else 0
        # A model may have more rows than tokens; resizing its vocabulary then removes rows.
        if rows < self.config.vocab_size and rows < (least := self.num_tokens()):
            raise self.error(
                f"tensor {name} has shape {shape}, fewer rows than the vocabulary's {least} tokens"
            )
        return rows

    def _token_ids(self, module: ModuleName, name: str, rows: int) -> tuple[int, ...]:
        names = module.names
        if module.rest == "lm_head" and self.config.tie_word_embeddings:
            # PEFT saves them again with a resized embedding; they are the embedding's tokens.
            names += parse_module("embed_tokens").names
        for key, ids in self._peft.token_indices.items():
            if any(full == key or full.endswith(f".{key}") for full in names):
                if max(ids, default=0) >= rows:
                    raise self.error(
                        f"tensor {name}: trainable_token_indices names token {max(ids)}, the "
                        f"vocabulary has {rows}"
                    )
                return ids
        raise self.error(f"tensor {name}: trainable_token_indices does not name its module")

    def _check_saved(self) -> None:
        saved = [m for m, tensors in self.modules.items() if tensors.keys() & {"weight", "copy"}]
        names = [name for module in saved for name in module.names]
        for target in self._peft.modules_to_save:
            is_tied = target == "lm_head" and self._peft.ties_weights
            if is_tied or any(name == target or name.endswith(f".{target}") for name in names):
                continue
            if not self.is_lenient:
                raise self.error(
                    f"adapter_config.json: modules_to_save: there is no tensor of {target!r}"
                )

    def _check_mixture(self) -> None:
        forms: dict[bool, str] = {}
        for pair in self._experts:
            outer = pair.experts[pair.module.kinds == ("down",)]
            forms.setdefault(outer == 1, pair.a)
        if len(forms) > 1:
            raise self.error(
                f"tensor {forms[True]} is one for all experts, tensor {forms[False]} is one for "
                "each: mixtures are not supported"
            )

    def _num_elements(self) -> int:
        """Pairs of single experts are stacked, with zeros for experts and ranks that the adapter
        leaves out.
        """
        count = sum(
            math.prod(self.files.tensors[name].shape)
            for plan in self._vocabulary.values()
            for name in (plan.weight, plan.tokens)
            if name
        )
        single = [pair for pair in self._experts if pair.module.expert is not None]
        stacked = [pair for pair in self._experts if pair.module.expert is None]
        vocabulary = [plan.pair for plan in self._vocabulary.values() if plan.pair]
        for pair in (*self._dense, *vocabulary, *stacked):
            count += sum(math.prod(self.files.tensors[name].shape) for name in (pair.a, pair.b))
        widest: dict[tuple[int, str], int] = {}
        for pair in single:
            for kind in pair.module.kinds:
                size = pair.rank * sum(projection_shape(self.config, pair.module, kind))
                key = (pair.module.layer, kind)
                widest[key] = max(widest.get(key, 0), size)
        num_experts = self.config.moe.num_experts if self.config.moe else 0
        return count + num_experts * sum(widest.values())
