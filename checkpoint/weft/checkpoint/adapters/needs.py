"""Reads the requirements that given adapters have of a worker from the headers of their files. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.adapters.files import open_adapter
from weft.checkpoint.adapters.names import ROUTER, VOCABULARY
from weft.checkpoint.adapters.plan import PARTS, plan_adapter
from weft.checkpoint.adapters.projections import EXPERTS, SHARED_EXPERTS
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.vocabularies import num_tokens


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    projections: frozenset[str]
    """Projections beyond `default_projections`, as `EngineConfig.lora_projections` names them."""
    rank: int
    has_whole_matrix: bool
    """Whether the adapter brings a whole embedding or LM head."""
    num_added_tokens: int
    """Tokens that the adapter adds to the vocabulary."""


def needs_of(folder: Path, model_dir: Path, model: ModelConfig, max_rank: int) -> AdapterNeeds:
    """Reads from its files what an adapter needs of workers for the model. `max_rank` is the
    largest rank that any worker takes.
    """
    with open_adapter(folder) as files:
        plan = plan_adapter(
            files,
            model,
            max_rank=max_rank,
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
