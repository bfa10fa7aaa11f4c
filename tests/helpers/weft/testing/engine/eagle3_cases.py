"""An engine's EAGLE drafts, noted and compared with a plain reading of the head."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.eagle_config import head_kind
from weft.contract.keys import PageKeys
from weft.engine.loop.draws import SampledTokens
from weft.engine.loop.engine import Engine
from weft.engine.scheduler.plan import Plan, VerifyItem
from weft.engine.scheduler.ports import Drafter, DraftGate
from weft.testing.engine.drafters import KnownDrafter, RandomGate
from weft.testing.engine.later_drafts import fetched
from weft.testing.models.tiny_drafts import NaiveEagle, NaiveHead

NEAR_TIE = 1e-5
"""Difference of logits, relative to the largest, that roundings in float32 may turn over."""
NUM_CHECKED = 50


class WatchedHead:
    """Notes the head's drafts, and has better ones verified, so that some are accepted.

    Args:
        engine: With a head.
        known: Drafts these.
    """

    def __init__(self, engine: Engine, known: KnownDrafter) -> None:
        assert engine.drafter is not None
        self._drafter: Drafter = engine.drafter
        self._known = known
        self._tokens = engine.parts.local.known
        self.chains: list[tuple[list[int], list[int]]] = []
        """Tokens so far, and what was drafted behind them."""
        engine.pipeline._drafter = self
        # These drafts follow from what the host knows.
        engine.scheduler.running_plans.drafts_on_device = False
        engine.scheduler.running_plans.gate = RandomGate((0, 1, 3, 5))

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        chains = fetched(self._drafter, items, self._tokens)
        for item, chain in zip(items, chains, strict=True):
            assert len(chain) == item.max_drafts
            self.chains.append((item.request.tokens[: item.start + 1], list(chain)))
        return self._known.draft(items)


class NotedChains:
    """Notes what was drafted behind which tokens, when a step has ended.

    Args:
        engine: Drafts on its device.
        gate: Says how much.
    """

    def __init__(self, engine: Engine, gate: DraftGate) -> None:
        self.chains: list[tuple[list[int], list[int]]] = []
        """Tokens so far, and what was drafted behind them."""
        engine.scheduler.running_plans.gate = gate
        self._done, engine.pipeline._owner = engine.step_done, self
        self.step_failed = engine.step_failed

    def step_done(self, plan: Plan, drawn: SampledTokens | None, duration_s: float) -> None:
        """See `StepOwner.step_done`."""
        for item, drafts in zip(plan.verifies, plan.drafts, strict=True):
            self.chains.append((list(item.request.tokens), list(drafts)))
        self._done(plan, drawn, duration_s)


class HasChains(Protocol):
    """An object that has watched an engine's chains."""

    chains: list[tuple[list[int], list[int]]]
    """Tokens so far, and what was drafted behind them."""


def check_chains(
    watched: HasChains, target_dir: Path, draft_dir: Path, *, allowed: int = 0
) -> None:
    """Checks that drafts are those that the head computes from transformers' hidden states.

    Args:
        watched: Has seen more than `NUM_CHECKED`.
        target_dir: Of the model.
        draft_dir: Of an EAGLE-1 head, or of one of EAGLE-3 that taps where such do by default.
        allowed: How many may differ.
    """
    reference = HeadReference(target_dir, draft_dir)
    chains = [(tokens, chain) for tokens, chain in watched.chains if chain]
    assert len(chains) > NUM_CHECKED
    num_different = 0
    for tokens, chain in random.sample(chains, NUM_CHECKED):
        num_different += not reference.agrees(tokens, chain)
    assert num_different <= allowed


class HeadReference:
    """A plain implementation of a head over transformers' hidden states.

    Args:
        target_dir: Of the model.
        draft_dir: As of `check_chains`.
    """

    def __init__(self, target_dir: Path, draft_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
        weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        layers = ModelConfig.load(target_dir).num_layers
        if head_kind(draft_dir) == "eagle":
            make, self._taps = NaiveEagle, (layers,)
        else:
            make, self._taps = NaiveHead, (2, layers // 2, layers - 3)
        self._model = model
        self._naive = make(draft_dir, *(weight.detach() for weight in weights))

    def agrees(self, tokens: list[int], chain: list[int]) -> bool:
        """Whether these are the drafts behind a text, as far as float32 can tell."""
        return self._naive.lack(self._states(tokens)[:-1], tokens, chain) <= NEAR_TIE

    def tree(
        self, tokens: list[int], width: int, depth: int
    ) -> tuple[dict[tuple[int, ...], float], float]:
        """See `NaiveHead.tree`."""
        return self._naive.tree(self._states(tokens)[:-1], tokens, width, depth)

    def entries(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n - 1, kv_heads, dim] float64 of a text's positions from 1 on, made at once."""
        return self._naive.entries(self._states(tokens)[:-1], tokens[1:])

    def _states(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            streams = self._model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return self._naive.fuse(torch.cat([streams[i][0] for i in self._taps], dim=-1))


class PublishedEntries:
    """A head's entries in the pages that an engine has published.

    Args:
        engine: On a CPU, with a head and an empty cache.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pages: dict[bytes, int] = {}
        engine.memory.on_published.append(self._note)
        engine.memory.on_evicted.append(lambda key: self._pages.pop(key, None))

    def check(self, tokens: list[int], reference: HeadReference) -> int:
        """Compares those of a text's first pages.

        Args:
            tokens: The text, of the base model and no tenant.
            reference: Of the head.

        Returns:
            How many pages there are.
        """
        layout = self._engine.parts.layout
        keys = PageKeys(self._engine._intake.namespace(""), layout.page_size)
        known = (self._pages.get(key) for key in keys.upto(tokens, len(tokens) // layout.page_size))
        pages = list(takewhile(lambda page: page is not None, known))
        if not pages:
            return 0
        end = len(pages) * layout.page_size
        # [n, kv_heads, 2, dim]; nobody reads the entry of position 0.
        found = self._engine.parts.local.pool[pages, :, -1]
        found = found.permute(0, 3, 1, 2, 4).flatten(0, 1)[1:].double()
        exact = torch.stack(reference.entries(tokens[:end]), dim=2)
        assert found.shape == exact.shape
        error = float((found - exact).abs().max() / exact.abs().max())
        assert error < 1e-4, (error, len(tokens), pages)
        return len(pages)

    def _note(self, page: int, key: bytes, parent: bytes) -> None:
        self._pages[key] = page
