"""An engine's EAGLE-3 drafts, noted and compared with a plain reading of the head."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from drafters import KnownDrafter, RandomGate
from tiny_drafts import NaiveHead
from weft.engine.engine import Engine
from weft.engine.models.config import ModelConfig
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.speculative.drafter import Drafter

NUM_CHECKED = 50


class WatchedHead:
    """Notes the head's drafts, and has better ones verified, so that some are accepted.

    Args:
        engine: With a head.
        known: Drafts these.
    """

    def __init__(self, engine: Engine, known: KnownDrafter) -> None:
        assert engine.drafting.drafter is not None
        self._drafter: Drafter = engine.drafting.drafter
        self._known = known
        self.chains: list[tuple[list[int], list[int]]] = []
        """Tokens so far, and what was drafted behind them."""
        engine.pipeline._drafter = self
        engine.drafting.gate = engine.scheduler.running_plans.gate = RandomGate((0, 1, 3, 5))

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        chains = self._drafter.draft(items)
        for item, chain in zip(items, chains, strict=True):
            assert len(chain) == item.max_drafts
            self.chains.append((item.request.tokens[: item.start + 1], list(chain)))
        return self._known.draft(items)


def check_chains(
    watched: WatchedHead, target_dir: Path, draft_dir: Path, *, allowed: int = 0
) -> None:
    """Of some drafts, that they are what the head makes of transformers' hidden states.

    Args:
        watched: Has seen more than `NUM_CHECKED`.
        target_dir: Of the model.
        draft_dir: Of a head that taps where heads do by default.
        allowed: How many may differ.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    weights = (reference.get_input_embeddings().weight, reference.get_output_embeddings().weight)
    naive = NaiveHead(draft_dir, *(weight.detach() for weight in weights))
    layers = ModelConfig.load(target_dir).num_layers
    chains = [(tokens, chain) for tokens, chain in watched.chains if chain]
    assert len(chains) > NUM_CHECKED
    num_different = 0
    for tokens, chain in random.sample(chains, NUM_CHECKED):
        with torch.inference_mode():
            streams = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            aux = torch.cat([streams[i][0] for i in (2, layers // 2, layers - 3)], dim=-1)
            num_different += chain != naive.chain(naive.fuse(aux)[:-1], tokens, len(chain))
    assert num_different <= allowed
