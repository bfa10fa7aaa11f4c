"""A target, its head, and adapters of which some bring draft adapters; drafts compared with plain
readings of the merged heads."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.checkpoint.adapters.files import DRAFT_FOLDER
from weft.engine.loop.llm import LLM
from weft.testing.engine.eagle3_cases import HeadReference, WatchedHead
from weft.testing.engine.tree_drafters import WatchedTrees
from weft.testing.models.merged_adapters import merged, read
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_draft_adapter, make_tiny_draft, merged_head
from weft.testing.models.tiny_models import make_tiny, tiny_config

VOCAB = 517
PAGE = 16


class DraftAdapterCase:
    """Three adapters; the first and the third bring draft adapters.

    Args:
        folder: For the models.
        seed: Of their weights.
        **shape: Of the target.
    """

    def __init__(self, folder: Path, seed: int, **shape: Any) -> None:
        shape = {"vocab_size": VOCAB, "num_hidden_layers": 4, **shape}
        self.config = tiny_config("llama", **shape)
        self.target_dir = make_tiny("llama", folder / "t", seed, **shape)
        self.draft_dir = make_tiny_draft(folder / "d", self.target_dir, seed + 1)
        self.adapters = [make_adapter(folder / f"a{i}", self.config, seed + i) for i in range(3)]
        for path in self.adapters[::2]:
            seed += 7
            make_draft_adapter(path / DRAFT_FOLDER, self.draft_dir, seed)
        self._folder = folder

    def llm(self, **settings: Any) -> LLM:
        """An engine with room for two adapters."""
        given: dict[str, Any] = {"dtype": "float32", "page_size": PAGE, "max_running_requests": 4}
        given |= {"enable_lora": True, "max_loras": 2, **settings}
        return LLM(self.target_dir, **given)

    def drafting(self, **settings: Any) -> LLM:
        """Creates an engine that drafts."""
        return self.llm(drafter="eagle3", draft_dir=self.draft_dir, **settings)

    def check(
        self,
        watched: WatchedHead | WatchedTrees,
        names: Mapping[tuple[int, ...], str],
        allowed: int = 0,
        tolerance: float = 1e-4,
    ) -> None:
        """Checks that each request's drafts are those of its adapter's own head.

        Args:
            watched: Has seen them.
            names: By prompt, all of one length: its adapter's folder; empty: none.
            allowed: Chains of each adapter that may differ.
            tolerance: Of trees, see `WatchedTrees.check`.
        """
        length = len(next(iter(names)))
        for name, (target_dir, draft_dir) in self._heads.items():
            reference = HeadReference(target_dir, draft_dir)
            if isinstance(watched, WatchedHead):
                own = [c for c in watched.chains if c[1] and names[tuple(c[0][:length])] == name]
                chosen = random.sample(own, 12)
                different = [c for c in chosen if not reference.agrees(c[0], c[1])]
                assert len(different) <= allowed, (name, different)
            else:
                grown = watched.trees
                watched.trees = [t for t in grown if names[tuple(t[0][:length])] == name]
                watched.check(reference, 4, tolerance)
                watched.trees = grown

    @cached_property
    def _heads(self) -> dict[str, tuple[Path, Path]]:
        """By adapter folder (or none): the target and the head with everything merged."""
        found = {"": (self.target_dir, self.draft_dir)}
        for adapter in self.adapters:
            served = self._folder / f"served-{adapter.name}"
            shutil.copytree(self.target_dir, served)
            merged(self.target_dir, read(adapter, self.target_dir)).save_pretrained(served)
            head, brought = self.draft_dir, adapter / DRAFT_FOLDER
            if brought.is_dir():
                head = merged_head(self._folder / f"head-{adapter.name}", head, brought)
            found[str(adapter)] = (served, head)
        return found


def random_prompts(number: int, length: int = 2 * PAGE + 3) -> list[list[int]]:
    """Random prompts of one length."""
    return [[random.randrange(3, VOCAB) for _ in range(length)] for _ in range(number)]
