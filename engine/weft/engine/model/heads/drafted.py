"""A target with a draft head: every step of the target also writes the head's K and V.

So on every worker, a page that holds the target's K and V also holds the head's, and pages are
cached, shipped and stored with both.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from weft.contract.errors import AdapterError, ModelError
from weft.contract.layout import CacheLayout, PageGroup, StatePart
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.draft_adapter import read_draft_adapter
from weft.engine.model.heads.draft_head import DraftHead, load_draft_head
from weft.engine.model.heads.eagle3 import Eagle3Head, adapt_eagle3, adaptable_shapes
from weft.engine.model.heads.elsewhere import eagle_elsewhere
from weft.engine.model.loader import LoadedModel
from weft.engine.model.stage import Stage
from weft.engine.model.step import Step
from weft.kernels.ops.lora.spec import LoraStep
from weft.kernels.ops.slot_rows import hold_rows, put_rows


def load_drafted(
    loaded: LoadedModel, draft_dir: Path, max_requests: int, max_step_tokens: int
) -> DraftedModel:
    """Loads a head for a model. Raises ModelError if the head cannot be used, or does not fit this
    model.
    """
    if not isinstance(loaded.model, DecoderOnlyLM):
        raise ModelError(
            f"draft_dir = {draft_dir}: {type(loaded.model).__name__} does not support draft heads",
            param="draft_dir",
        )
    stage = loaded.model.stage
    is_here = stage is None or stage.is_last
    head = (load_draft_head if is_here else eagle_elsewhere)(draft_dir, loaded.model)
    check_width(head, loaded.model, draft_dir)
    if isinstance(head, Eagle3Head) and head.copies_lm_head:
        loaded.refit.on_change.append(partial(head.copy_lm_head, loaded.model))
    return DraftedModel(loaded.model, head, max_requests, max_step_tokens, draft_dir)


def check_width(head: DraftHead, target: DecoderOnlyLM, draft_dir: Path) -> None:
    """Raises ModelError if the head is of another width than the model and the ranks, which are on
    GPUs then, add up rows of the model's width alone.
    """
    peers, width = target.model.peers, target.config.hidden_size
    if peers is None or peers.width in (None, head.hidden_size):
        return
    raise ModelError(
        f"draft_dir = {draft_dir}: the head's hidden_size is {head.hidden_size}, the model's "
        f"{width}, and ranks on GPUs add up rows of the model's size alone; take a head of that "
        "size, or tp = 1",
        param="draft_dir",
    )


class DraftedModel:
    """`Model` of a target and the head that drafts for it.

    The head combines the target's state at a position with the token at the next position. For the
    first row of a request in a step, `kept` holds the state of the previous step in the request's
    slot. If there is no such state, as after a prefix hit, the step begins one token earlier and
    the head's entries of that token go to the null page. With recurrent layers the state of the
    last token before a border is part of its block instead.

    Args:
        max_requests: Number of slots.
        max_step_tokens: Rows of the largest step after which `keep_accepted` may be called.
        draft_dir: Directory of the head; None: the head cannot be adapted.
    """

    def __init__(
        self,
        target: DecoderOnlyLM,
        head: DraftHead,
        max_requests: int,
        max_step_tokens: int,
        draft_dir: Path | None = None,
    ) -> None:
        self.config = target.config
        self._draft_dir = draft_dir
        self.head = head
        self._target = target
        embedding, width = target.model.embed_tokens, head.hidden_size
        self.kept = embedding.new_zeros((max_requests + 1, width))
        """[max_requests + 1, hidden]: state of each slot's last row; the last entry is a dummy."""
        self.last = embedding.new_zeros((max_step_tokens, width))
        """[T, hidden], or more on a GPU: the rows of the last step."""

    def adapted(self, folder: Path) -> DraftedModel:
        """This model with an adapted head. Both share states and pages. Raises WeftError if the
        draft adapter cannot be used, or does not fit this head.
        """
        if not isinstance(self.head, Eagle3Head) or self._draft_dir is None:
            raise AdapterError(f"draft adapter {folder}: only EAGLE-3 heads can be adapted")
        changes = read_draft_adapter(folder, adaptable_shapes(self.head.config))
        made = copy(self)
        try:
            made.head = adapt_eagle3(self.head, self._draft_dir, self._target, changes)
        except ValueError as error:
            raise AdapterError(f"draft adapter {folder}: {error}") from error
        return made

    @property
    def waits_for_layers(self) -> bool:
        """The head's layer comes with the target's last ones."""
        return self._target.waits_for_layers

    def kv_layout(self, page_size: int) -> CacheLayout:
        """The target's page with the head's layer, or plane, after the target's own."""
        return self.layout_of(self._target.stage, page_size)

    def layout_of(self, stage: Stage | None, page_size: int) -> CacheLayout:
        """As `DecoderOnlyLM.layout_of`; of stages with pages of their own the last has the head."""
        layout = self._target.layout_of(stage, page_size)
        if stage is not None and stage.has_own_pages and not stage.is_last:
            return layout
        plane, states = layout.plane, layout.states
        own, draft = self.head.place.plane, self.head.digest.hex()
        if own is None:
            both = [replace(plane, layers=plane.layers + 1, draft=draft)]
        else:
            both = [replace(plane, draft=draft), own]
        if states is not None:
            # A request continues at a block, where no step can begin a token earlier.
            row = StatePart("draft", (self.head.hidden_size,), plane.dtype)
            states = replace(states, rows=(row,))
        # In other layers a step's first row may be the token before, whose window begins earlier.
        windows = (
            replace(group, reach=None if group.reach is None else group.reach + 1)
            for group in layout.groups[1:]
        )
        return CacheLayout(page_size, (PageGroup(tuple(both)), *windows), states)

    def forward(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """`step.slots` must not be None."""
        hidden, states = self.head.extend(self._target, step, self.kept, pool)
        self.last = hold_rows(self.last, states)
        return hidden

    def logits(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        return self._target.logits(hidden, lora)

    def logits_part(self, hidden: torch.Tensor, tokens: slice) -> torch.Tensor | None:
        return self._target.logits_part(hidden, tokens)

    def keep_accepted(
        self, rows: torch.Tensor, slots: torch.Tensor, states: torch.Tensor | None = None
    ) -> None:
        """Records, after a verification, which row of the step is each request's last one.

        Args:
            rows: [R] int64, on the device: rows of the step, in its order.
            slots: [R] int64, on the device: the requests' slots, all different.
            states: `last` after that step; None: no step has run since.
        """
        put_rows(self.kept, slots, self.last if states is None else states, rows)
