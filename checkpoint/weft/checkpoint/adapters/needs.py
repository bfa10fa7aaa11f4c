"""What a worker needs so that it can hold given adapters, from their files' headers. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from weft.checkpoint.adapters.files import open_adapter
from weft.checkpoint.adapters.names import ROUTER, VOCABULARY
from weft.checkpoint.adapters.plan import PARTS, plan_adapter
from weft.checkpoint.adapters.projections import (
    EXPERTS,
    SHARED_EXPERTS,
    default_projections,
)
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.vocabularies import num_tokens
from weft.engine.base.config import BOUNDS, EngineConfig


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """What one adapter needs."""

    projections: frozenset[str]
    """Projections beyond `default_projections`, as `EngineConfig.lora_projections` names them."""
    rank: int
    """Largest rank."""
    has_whole_matrix: bool
    """Whether it brings a whole embedding or LM head."""
    num_added_tokens: int
    """Tokens that it adds to the vocabulary."""


def needs_of(folder: Path, model_dir: Path, model: ModelConfig) -> AdapterNeeds:
    """Reads what an adapter needs.

    Args:
        folder: The adapter's.
        model_dir: The directory of the model that it is for.
        model: That model's configuration.

    Raises:
        AdapterError: The files are damaged, or do not fit the model.
    """
    with open_adapter(folder) as files:
        plan = plan_adapter(
            files,
            model,
            max_rank=int(BOUNDS["max_lora_rank"].le or 0),
            parts=PARTS,
            is_lenient=True,
            num_tokens=lambda: num_tokens(model_dir, model),
        )
        whole = [files.tensors[one.weight] for one in plan.vocabulary.values() if one.weight]
    names = set(plan.vocabulary)
    added = max((tensor.shape[0] - model.vocab_size for tensor in whole), default=0)
    if added > 0 or (plan.ties_vocabulary and names):
        names |= set(VOCABULARY)
    if any(pair.module.kinds == (ROUTER,) for pair in plan.dense):
        names.add(ROUTER)
    if plan.experts:
        outer = (pair.experts[pair.module.kinds == ("down",)] for pair in plan.experts)
        names.add(SHARED_EXPERTS if all(entries == 1 for entries in outer) else EXPERTS)
    rank = max((pair.rank for pair in plan.pairs), default=0)
    return AdapterNeeds(frozenset(names), rank, bool(whole), max(0, added))


def with_needs(
    config: EngineConfig, model: ModelConfig, needs: Iterable[AdapterNeeds]
) -> EngineConfig:
    """Settings under which the default projections and all of these adapters can be held."""
    every = list(needs)
    names = {name for one in every for name in one.projections}
    if EXPERTS in names:
        names.discard(SHARED_EXPERTS)  # They hold every form of adapters of experts.
    values: dict[str, int | tuple[str, ...]] = {}
    if names:
        values["lora_projections"] = (*default_projections(model), *sorted(names))
    if (rank := max((one.rank for one in every), default=0)) > config.max_lora_rank:
        values["max_lora_rank"] = rank
    num_whole = min(sum(one.has_whole_matrix for one in every), config.max_loras)
    if config.tp == 1 and num_whole > config.lora_whole_matrices:
        values["lora_whole_matrices"] = num_whole
    added = max((one.num_added_tokens for one in every), default=0)
    if added > config.lora_added_tokens:
        values["lora_added_tokens"] = added
    return replace(config, **values)
