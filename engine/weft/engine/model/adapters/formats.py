"""Reads a PEFT directory into an `Adapter`: everything in it is applied, or the load fails.

First names, shapes and sizes are checked by the file's header alone (`plan`). Then tensors are
read, scaled and checked for NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from weft.checkpoint.adapters.digest import Hashing
from weft.checkpoint.adapters.files import AdapterFiles, TensorEntry, open_adapter
from weft.checkpoint.adapters.plan import (
    DENSE,
    AdapterPlan,
    PairPlan,
    VocabularyPlan,
    plan_adapter,
    projection_shape,
)
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import AdapterError
from weft.contract.give_way import give_way
from weft.engine.model.adapters.adapter import Adapter, ExpertLora, LoraPair, VocabularyChange
from weft.engine.model.adapters.words import words_of

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_adapter(
    directory: Path,
    config: ModelConfig,
    *,
    max_rank: int,
    max_bytes: int | None = None,
    dtype: torch.dtype = torch.float32,
    parts: Collection[str] = (DENSE,),
    is_lenient: bool = False,
    num_tokens: Callable[[], int] | None = None,
) -> Adapter:
    """Reads, checks and normalises an adapter.

    Args:
        directory: adapter_config.json and adapter_model.safetensors, as PEFT writes them.
        max_rank: Largest rank of any of its modules.
        max_bytes: Most host memory for its tensors; None: no limit.
        dtype: Dtype of the returned tensors. Scaling is done in float32 before.
        parts: Those of `plan.PARTS` that the caller applies; an adapter with further ones is
            refused.
        is_lenient: Lists in `Adapter.ignored`, and does not read, tensors of modules that the model
            does not have, that the configuration does not target or that the caller does not apply.
            Damaged files are refused all the same.
        num_tokens: Returns the size of the model's tokenizer: an embedding or LM head needs at
            least as many rows. None: as many rows as the model's.

    Raises:
        AdapterError: The message names the directory, and the tensor or field.
    """
    with open_adapter(directory) as files:
        plan = plan_adapter(
            files,
            config,
            max_rank=max_rank,
            parts=parts,
            is_lenient=is_lenient,
            num_tokens=num_tokens or (lambda: config.vocab_size),
        )
        reader = _Reader(files, config, dtype)
        reader.check_size(plan.num_elements, max_bytes)
        try:
            with Hashing(files, is_lenient=is_lenient) as hashing:
                adapter = reader.adapter(plan, is_lenient=is_lenient)
                digest = hashing.result()
        finally:
            files.check_unchanged()  # If the file has changed, the error found may be wrong.
    return replace(adapter, digest=digest)


@dataclass(slots=True)
class _Reader:
    files: AdapterFiles
    config: ModelConfig
    dtype: torch.dtype

    def check_size(self, num_elements: int, max_bytes: int | None) -> None:
        """Refuses an adapter that is too large. The message shows the calculation."""
        num_bytes = num_elements * self.dtype.itemsize
        if max_bytes is not None and num_bytes > max_bytes:
            raise AdapterError(
                f"adapter {self.files.directory}: its {num_elements} numbers take {num_bytes} "
                f"bytes of host memory as {self.dtype}, the limit is {max_bytes}"
            )

    def adapter(self, plan: AdapterPlan, *, is_lenient: bool) -> Adapter:
        """Reads the whole adapter, without added tokens if lenient; its digest stays empty."""
        changes = {name: self.vocabulary(part) for name, part in plan.vocabulary.items()}
        if is_lenient:
            size = self.config.vocab_size
            changes = {name: _without_added(name, one, size) for name, one in changes.items()}
        if plan.ties_vocabulary and "embed_tokens" in changes:
            embedding = changes["embed_tokens"]
            head = changes.setdefault("lm_head", _tied(embedding))
            if head.rows is None and head.weight is None and embedding.rows is not None:
                # The LM head has a separate LoRA, on top of the embedding's trained tokens.
                changes["lm_head"] = replace(
                    head,
                    token_ids=embedding.token_ids,
                    rows=embedding.rows,
                    tensor=embedding.tensor,
                )
        return Adapter(
            digest=b"",
            rank=max((pair.rank for pair in plan.pairs), default=0),
            modules=self.dense(plan.dense),
            experts=self.experts(plan.experts),
            embed_tokens=changes.get("embed_tokens"),
            lm_head=changes.get("lm_head"),
            ignored=plan.ignored,
        )

    def dense(self, plans: Sequence[PairPlan]) -> Mapping[tuple[int, str], LoraPair]:
        pairs: dict[tuple[int, str], LoraPair] = {}
        for plan in plans:
            pair = self._pair(plan)
            parts = self._split(plan, pair.b, 0)
            for kind, b in zip(plan.module.kinds, parts, strict=True):
                pairs[plan.module.layer, kind] = LoraPair(pair.a, b)
        return pairs

    def experts(self, plans: Sequence[PairPlan]) -> Mapping[tuple[int, str], ExpertLora]:
        stacks: dict[tuple[int, str], ExpertLora] = {}
        single: dict[tuple[int, str], list[PairPlan]] = {}
        for plan in plans:
            if plan.module.expert is not None:
                for kind in plan.module.kinds:
                    single.setdefault((plan.module.layer, kind), []).append(plan)
                continue
            pair = self._pair(plan)
            a, b = pair.a, pair.b
            if plan.module.parameter is not None:
                # PEFT (`ParamWrapper.get_delta_weight`) keeps rows of A by expert, then rank, and
                # columns of B by rank, then expert.
                count = a.shape[0] // plan.rank
                a = a.view(count, plan.rank, a.shape[1])
                b = b.view(b.shape[0], plan.rank, count).permute(2, 0, 1)
            for kind, part in zip(plan.module.kinds, self._split(plan, b, 1), strict=True):
                stacks[plan.module.layer, kind] = ExpertLora(a, part)
        for (layer, kind), members in single.items():
            stacks[layer, kind] = self._stack(kind, members)
        return _shared_outer(stacks)

    def vocabulary(self, plan: VocabularyPlan) -> VocabularyChange:
        if plan.copy and not self._are_same(plan.weight, plan.copy):
            raise AdapterError(
                f"adapter {self.files.directory}: tensors {plan.weight} and {plan.copy} are of the "
                "same module, and differ"
            )
        return VocabularyChange(
            weight=self._read(plan.weight) if plan.weight else None,
            token_ids=plan.token_ids,
            rows=self._read(plan.tokens) if plan.tokens else None,
            lora=self._pair(plan.pair) if plan.pair else None,
            tensor=plan.tokens or plan.weight,
        )

    def _stack(self, kind: str, plans: Sequence[PairPlan]) -> ExpertLora:
        """Stacks the pairs of single experts. Missing experts, and missing ranks of some, become
        zeros.
        """
        assert self.config.moe is not None, "the plan has experts"
        count, rank = self.config.moe.num_experts, max(plan.rank for plan in plans)
        width, out = projection_shape(self.config, plans[0].module, kind)
        a = torch.zeros((count, rank, width), dtype=self.dtype)
        b = torch.zeros((count, out, rank), dtype=self.dtype)
        for plan in plans:
            expert, pair = plan.module.expert, self._pair(plan)
            a[expert, : plan.rank] = pair.a
            b[expert, :, : plan.rank] = self._split(plan, pair.b, 0)[plan.module.kinds.index(kind)]
        return ExpertLora(a, b)

    def _split(self, plan: PairPlan, b: torch.Tensor, axis: int) -> list[torch.Tensor]:
        rows = [projection_shape(self.config, plan.module, kind)[1] for kind in plan.module.kinds]
        if len(rows) == 1:
            return [b.contiguous()]
        if plan.module.kinds == ("q", "k", "v"):
            groups, order = self.config.names.qkv_rows(self.config.num_kv_heads)
            widths = [rows[kind] // groups for kind in order]
            parts = torch.split(b.view(groups, -1, b.shape[1]), widths, dim=1)
            return [parts[order.index(kind)].flatten(0, 1) for kind in range(len(rows))]
        return [part.contiguous() for part in torch.split(b, rows, dim=axis)]

    def _are_same(self, first: str, second: str) -> bool:
        entries = self.files.tensors[first], self.files.tensors[second]
        one, other = (self.files.read(entry) for entry in entries)
        return entries[0].dtype == entries[1].dtype and one == other

    def _pair(self, plan: PairPlan) -> LoraPair:
        return LoraPair(self._read(plan.a), self._read(plan.b, plan.scaling))

    def _read(self, name: str, scaling: float = 1.0) -> torch.Tensor:
        """Raises AdapterError if the tensor has NaN or infinite numbers, or gets them by scaling or
        conversion.
        """
        give_way()
        entry = self.files.tensors[name]
        stored = _as_tensor(self.files.read(entry), entry)
        scaled = (stored.float() * scaling if scaling != 1.0 else stored).to(self.dtype)
        if not _is_finite(scaled):
            cause = "as scaled" if _is_finite(stored) else "as stored"
            raise AdapterError(
                f"adapter {self.files.directory}: tensor {name} has NaN or infinite numbers, "
                f"{cause}"
            )
        return scaled


def _shared_outer(
    stacks: Mapping[tuple[int, str], ExpertLora],
) -> Mapping[tuple[int, str], ExpertLora]:
    """Merges outer matrices that are equal for all experts into one.

    Trainers export shared outer matrices under the names of the single experts. They are merged
    only if they are equal in all layers, since an adapter has one form.
    """
    outer = [pair.b if kind == "down" else pair.a for (_, kind), pair in stacks.items()]
    if not all(side.shape[0] > 1 and bool((side == side[:1]).all()) for side in outer):
        return stacks
    return {
        (layer, kind): ExpertLora(pair.a, pair.b[:1].clone())
        if kind == "down"
        else ExpertLora(pair.a[:1].clone(), pair.b)
        for (layer, kind), pair in stacks.items()
    }


def _tied(change: VocabularyChange) -> VocabularyChange:
    if change.lora is None:
        return change
    return replace(
        change, lora=LoraPair(change.lora.b.T.contiguous(), change.lora.a.T.contiguous())
    )


def _without_added(name: str, change: VocabularyChange, vocab_size: int) -> VocabularyChange:
    weight, rows, lora = change.weight, change.rows, change.lora
    kept = [i for i, token in enumerate(change.token_ids) if token < vocab_size]
    if lora is not None and name == "embed_tokens":
        lora = LoraPair(lora.a[:, :vocab_size].contiguous(), lora.b)
    elif lora is not None:
        lora = LoraPair(lora.a, lora.b[:vocab_size].contiguous())
    return replace(
        change,
        weight=None if weight is None else weight[:vocab_size],
        token_ids=tuple(change.token_ids[i] for i in kept),
        rows=None if rows is None else rows[kept],
        lora=lora,
    )


def _is_finite(values: torch.Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinities: no exponent has all bits set.

    This is several times as fast as `torch.isfinite`. It also does not use torch's threads, for
    which steps on a CPU would have to wait.
    """
    if not values.numel():
        return True
    infinity = int(words_of(torch.tensor([torch.inf], dtype=values.dtype))[0])
    # The mask 2^(bits - 1) - 1 clears the sign.
    magnitudes = words_of(values.contiguous()) & ((1 << (8 * values.element_size() - 1)) - 1)
    return int(magnitudes.max()) < infinity


def _as_tensor(data: bytearray, entry: TensorEntry) -> torch.Tensor:
    if not data:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.shape)
