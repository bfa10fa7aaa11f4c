"""An adapter in host memory, laid out as rows of the device's adapter memory.

With several ranks, a change B A of a projection is divided as the projection is: B by its output,
or A by its input, and then the ranks' results add up. Each rank has all of the matrix that is not
divided. Where ranks have whole experts, each rank has A and B of the experts that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn.functional import pad
from weft.checkpoint.adapters.projections import (
    B_SUFFIX,
    EMBED_TOKENS,
    LM_HEAD,
    WHOLE_SUFFIX,
    Projection,
)
from weft.contract.arrays import Int32Array
from weft.contract.errors import AdapterError
from weft.contract.give_way import give_way
from weft.engine.model.adapters.adapter import Adapter, ExpertLora, LoraPair, VocabularyChange
from weft.engine.model.adapters.words import words_of
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.layout import ROW_RANK, pack_b


@dataclass(frozen=True, slots=True)
class LoraMatrix:
    """All A matrices of one kind of projection, or all B matrices."""

    rows: torch.Tensor
    """[n, ROW_RANK, features]. Rows of B are packed for a CPU
    (`weft.kernels.ops.lora.layout.pack_b`).
    """
    index: Int32Array
    """[layers, places, max_rows]: row numbers of each layer and place (`Projection.num_places`), in
    order of rank; 0 after the last one.
    """

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()


@dataclass(frozen=True, slots=True)
class KindRows:
    """Rows of one kind of projection. Except for experts, A and B have the same index."""

    a: LoraMatrix
    b: LoraMatrix
    counts: Int32Array
    """[layers, places]: number of rows."""
    others: tuple[tuple[LoraMatrix, LoraMatrix], ...] = ()
    """A and B of rank 1 and further ranks. A matrix that is not divided is the first rank's object.
    """

    def of_rank(self, rank: int) -> tuple[LoraMatrix, LoraMatrix]:
        return self.others[rank - 1] if rank else (self.a, self.b)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of all ranks. Shared matrices count once."""
        halves = [self.a, self.b, *(half for pair in self.others for half in pair)]
        return sum({id(half): half.num_bytes for half in halves}.values())


WholeMatrix = torch.Tensor | LinearWeight
"""A matrix that replaces the model's embedding or LM head, [num_embeddings, hidden]: page-locked
for a GPU, packed for a CPU.
"""


@dataclass(frozen=True, slots=True)
class HostWeights:
    """An adapter in host memory, as rows of the device's memory."""

    digest: bytes
    """32 bytes that name the adapter's content."""
    rank: int
    """Largest rank among its modules."""
    kinds: Mapping[str, KindRows]
    """Rows by `Projection.name`."""
    vocab_end: int
    """First token id that the adapter's LM head does not have."""
    whole: Mapping[str, WholeMatrix] = field(default_factory=dict)
    """Whole matrices by name, EMBED_TOKENS or LM_HEAD. Tied matrices are one object."""
    left_out: tuple[str, ...] = ()
    """Tensors that a lenient load did not apply."""

    @property
    def num_bytes(self) -> int:
        rows = sum(kind.num_bytes for kind in self.kinds.values())
        matrices = {id(one): one.data for one in self.whole.values()}.values()
        return rows + sum(data.numel() * data.element_size() for data in matrices)

    @property
    def needs(self) -> dict[str, int]:
        """Device rows needed of each kind."""
        needs = {name + WHOLE_SUFFIX: 1 for name in self.whole}
        for name, kind in self.kinds.items():
            needs[name] = len(kind.a.rows)
            if kind.counts.shape[1] > 1:
                needs[name + B_SUFFIX] = len(kind.b.rows)
        return needs


OwnWeight = Callable[[str], torch.Tensor | None]
"""Returns the model's own embed_tokens or lm_head, [num_embeddings, hidden], on the host; None: not
available.
"""


def host_weights(
    adapter: Adapter,
    projections: Sequence[Projection],
    max_rank: int,
    own_weight: OwnWeight,
    *,
    vocab_size: int,
    for_gpu: bool,
    takes_whole: bool = False,
    num_ranks: int = 1,
) -> HostWeights:
    """Cuts an adapter into rows.

    Args:
        adapter: In the model's dtype.
        projections: Projections that the adapter may change, as one rank has them.
        own_weight: Called only if the adapter has whole rows of the vocabulary.
        vocab_size: Tokens of the model itself.
        for_gpu: Whether rows lie in page-locked memory, from which a GPU copies directly; if not, B
            is packed for a CPU.
        takes_whole: Whether the adapter may replace the embedding or the LM head.

    Raises:
        AdapterError: The adapter changes another part, or changes one in an unsupported way.
    """
    kinds: dict[str, KindRows] = {}
    wanted = {(key, False) for _, key in adapter.modules} | {(k, True) for _, k in adapter.experts}
    vocabulary = {EMBED_TOKENS: adapter.embed_tokens, LM_HEAD: adapter.lm_head}
    wanted |= {(name, False) for name, change in vocabulary.items() if change is not None}
    known = {(part.kind, part.is_expert) for part in projections}
    if wanted - known:
        lacking = [
            f"{kind} of experts" if is_expert else kind for kind, is_expert in wanted - known
        ]
        names = dict.fromkeys(
            part.name if part.is_expert else part.kind for part in projections if not part.is_draft
        )
        raise AdapterError(
            f"it changes {', '.join(sorted(lacking))}, for which no memory is set aside here: "
            f"lora_projections names {', '.join(names)}"
        )
    low_rank: dict[str, LoraPair] = {}
    replaced: dict[str, torch.Tensor] = {}
    matrices: dict[int, torch.Tensor] = {}
    for part in projections:
        name, change = part.kind, vocabulary.get(part.kind)
        if change is not None:
            is_changed = change.weight is not None or change.rows is not None
            own = own_weight(name) if is_changed else None
            filled = _of_models_size(part, change, vocab_size, own, matrices)
            pair, matrix = _divided(part, filled, max_rank, own, takes_whole=takes_whole)
            low_rank |= {} if pair is None else {name: pair}
            replaced |= {} if matrix is None else {name: matrix}
    max_rows = -(-max_rank // ROW_RANK)
    most: list[int] = []  # Counts rows of the vocabulary that have become ranks.
    for part in projections:
        changes = _changes(adapter, part, low_rank)
        if not any(change is not None for change in changes):
            continue
        given_a = [change.a if change else None for change in changes]
        given_b = [change.b.mT if change else None for change in changes]
        size_a, size_b = part.in_features, part.out_features
        all_a, all_b = list[LoraMatrix](), list[LoraMatrix]()
        for rank in range(num_ranks):
            sizes = (rank, num_ranks, part, max_rows)
            if not all_a or _is_divided(given_a, size_a, part):
                all_a.append(_half(given_a, size_a, *sizes, is_pinned=for_gpu))
            if not all_b or _is_divided(given_b, size_b, part):
                b = _half(given_b, size_b, *sizes, is_pinned=for_gpu)
                all_b.append(b if for_gpu else LoraMatrix(pack_b(b.rows), b.index))
        a, b = all_a[0], all_b[0]
        others = tuple(
            (all_a[rank % len(all_a)], all_b[rank % len(all_b)]) for rank in range(1, num_ranks)
        )
        ranks = np.array([change.rank if change else 0 for change in changes], np.int32)
        most.append(int(ranks.max()))
        counts = np.repeat(-(-ranks // ROW_RANK)[:, None], part.num_places, axis=1)
        counts[:, part.num_experts :] = 0
        kinds[part.name] = KindRows(a, b, counts.astype(np.int32), others)
    head = None if adapter.lm_head is None else adapter.lm_head.weight
    return HostWeights(
        digest=adapter.digest,
        rank=max([adapter.rank, *most]),
        kinds=kinds,
        vocab_end=vocab_size if head is None else max(vocab_size, len(head)),
        whole=_whole_matrices(replaced, for_gpu=for_gpu),
        left_out=adapter.ignored,
    )


def _changes(
    adapter: Adapter, part: Projection, vocabulary: Mapping[str, LoraPair]
) -> list[ExpertLora | None]:
    """The change of a projection in each layer, in the form for experts. A dense projection counts
    as one expert.
    """
    if part.is_expert:
        of_experts = [adapter.experts.get((layer, part.kind)) for layer in range(part.num_layers)]
        for expert in filter(None, of_experts):
            is_wrong = (part.is_a_shared and len(expert.a) != 1) or (
                part.is_b_shared and len(expert.b) != 1
            )
            if is_wrong:
                raise AdapterError(
                    f"its experts do not share their sides of {part.kind}, as lora_projections = "
                    "shared_experts wants; workers with `experts` take it"
                )
        return of_experts
    if part.kind in (EMBED_TOKENS, LM_HEAD):
        pairs = [vocabulary.get(part.kind)]
    else:
        pairs = [
            adapter.modules.get((layer, part.kind))
            if part.layers is None or layer in part.layers
            else None
            for layer in range(part.num_layers)
        ]
    return [ExpertLora(pair.a[None], pair.b[None]) if pair else None for pair in pairs]


def _of_models_size(
    part: Projection,
    change: VocabularyChange,
    vocab_size: int,
    own: torch.Tensor | None,
    matrices: dict[int, torch.Tensor],
) -> VocabularyChange:
    """Gives a change as many rows as the model has; missing rows are copied from the model's weight
    `own`. `matrices` has the matrices made so far by id, so that tied parts share one.
    """
    is_input = part.kind == EMBED_TOKENS
    size = part.in_features if is_input else part.out_features
    weight, lora = change.weight, change.lora
    if weight is not None and len(weight) > size:
        raise AdapterError(
            f"tensor {change.tensor} has {len(weight):,} tokens, {len(weight) - vocab_size:,} more "
            f"than the model: workers with lora_added_tokens = {size - vocab_size} take as many; "
            "a lenient load leaves them out"
        )
    if weight is not None and len(weight) < size:
        if id(weight) not in matrices:
            if own is None:  # The model has random weights.
                own = weight.new_zeros(size, weight.shape[1])
            matrices[id(weight)] = torch.cat([weight, own[len(weight) :]])
        weight = matrices[id(weight)]
    if lora is not None and is_input and lora.a.shape[1] < size:
        lora = LoraPair(pad(lora.a, (0, size - lora.a.shape[1])), lora.b)
    elif lora is not None and not is_input and len(lora.b) < size:
        lora = LoraPair(lora.a, pad(lora.b, (0, 0, 0, size - len(lora.b))))
    return replace(change, weight=weight, lora=lora)


def _divided(
    part: Projection,
    change: VocabularyChange,
    max_rank: int,
    own: torch.Tensor | None,
    *,
    takes_whole: bool,
) -> tuple[LoraPair | None, torch.Tensor | None]:
    """Divides a change of the vocabulary into one LoRA and a matrix that replaces the model's.

    If few rows differ from the model's, each takes one rank: W' = W + the sum of e_t d_t^T over
    these tokens t. One of A and B holds the one-hot vectors e_t, the other the differences d_t.
    PEFT saves the unchanged embedding beside its LoRA by default; then no row differs. Returns the
    LoRA or None, and the matrix [num_embeddings, hidden] or None. Raises AdapterError if more rows
    differ than there are ranks, and whole matrices are not allowed.
    """
    lora = change.lora
    if change.weight is None and change.rows is None:
        return lora, None
    name = part.kind
    if own is None and takes_whole and change.weight is not None:
        return lora, _replaced(change, change.weight)
    if own is None:
        raise AdapterError(
            f"tensor {change.tensor} takes the place of rows of {name}, and the model's own "
            "weights, of which it would be a change, are not there"
        )
    ids, whole = _changed_rows(change, own)
    rank = len(ids) + (lora.rank if lora is not None else 0)
    if rank > max_rank and takes_whole:
        return lora, whole
    if rank > max_rank:
        raise AdapterError(
            f"tensor {change.tensor} changes {len(ids):,} rows of {name}, of which each takes a "
            f"rank; with the adapter's LoRA of it that is {rank:,}, more than max_lora_rank = "
            f"{max_rank}. Workers with lora_whole_matrices take a whole matrix (modules_to_save)"
        )
    if not ids:
        return lora, None
    ones = torch.zeros((len(ids), len(own)), dtype=own.dtype)
    ones[range(len(ids)), ids] = 1.0
    difference = (whole[ids].float() - own[ids].float()).to(own.dtype)
    a, b = (ones, difference.T) if name == EMBED_TOKENS else (difference, ones.T)
    if lora is not None:
        a, b = torch.cat([lora.a, a]), torch.cat([lora.b, b], 1)
    return LoraPair(a.contiguous(), b.contiguous()), None


def _changed_rows(change: VocabularyChange, own: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    changed = torch.zeros(len(own), dtype=torch.bool)
    if change.weight is not None:
        changed = (change.weight != own).any(1)
    if change.rows is not None:
        given = list(change.token_ids)
        changed[given] = (change.rows != own[given]).any(1)
    whole = _replaced(change, own if change.weight is None else change.weight)
    return changed.nonzero()[:, 0].tolist(), whole


def _replaced(change: VocabularyChange, matrix: torch.Tensor) -> torch.Tensor:
    if change.rows is None:
        return matrix
    return matrix.index_copy(0, torch.tensor(change.token_ids), change.rows)


def _whole_matrices(
    replaced: Mapping[str, torch.Tensor], *, for_gpu: bool
) -> Mapping[str, WholeMatrix]:
    made: dict[int, WholeMatrix] = {}
    for matrix in replaced.values():
        if matrix.data_ptr() not in made:
            made[matrix.data_ptr()] = matrix.pin_memory() if for_gpu else pack_linear(matrix)
    return {name: made[matrix.data_ptr()] for name, matrix in replaced.items()}


def _width(layers: Sequence[torch.Tensor | None]) -> int:
    return next(values.shape[2] for values in layers if values is not None)


def _is_divided(layers: Sequence[torch.Tensor | None], width: int, part: Projection) -> bool:
    """Whether ranks have different rows: parts of the features, or different experts."""
    num_experts = next(len(values) for values in layers if values is not None)
    return _width(layers) > width or num_experts > part.num_experts


def _half(
    layers: Sequence[torch.Tensor | None],
    width: int,
    rank: int,
    num_ranks: int,
    part: Projection,
    max_rows: int,
    *,
    is_pinned: bool,
) -> LoraMatrix:
    """Lays out a rank's rows of each layer from [experts or 1, ranks of the change, features].

    Each rank gets `width` of the features; if there are fewer shares than ranks, several ranks get
    the same one. Each rank gets as many experts as the projection has.
    """
    count = part.num_experts
    index = np.zeros((len(layers), part.num_places, max_rows), np.int32)
    begin = rank * (_width(layers) // width) // num_ranks * width
    there = [values[..., begin : begin + width] for values in layers if values is not None]
    there = [values[rank * count :][:count] if len(values) > count else values for values in there]
    total = sum(len(values) * -(-values.shape[1] // ROW_RANK) for values in there)
    size = (total, ROW_RANK, width)
    rows = torch.empty(size, dtype=there[0].dtype, pin_memory=is_pinned)
    used = 0
    numbers_of = [layer for layer, values in enumerate(layers) if values is not None]
    for layer, values in zip(numbers_of, there, strict=True):
        give_way()
        given, ranks, features = values.shape
        each = -(-ranks // ROW_RANK)
        own = rows[used : used + given * each].view(given, each * ROW_RANK, features)
        # numpy copies a transposed B faster, and does not use torch's threads, for which steps
        # on a CPU would have to wait.
        words = words_of(own)
        words[:, :ranks] = words_of(values)
        words[:, ranks:] = 0
        numbers = used + np.arange(given * each).reshape(given, each)
        index[layer, :count, :each] = numbers  # A matrix that all experts share is broadcast.
        used += given * each
    return LoraMatrix(rows, index)
