"""Drafts from a separate, smaller model of the same vocabulary.

The method is that of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
Decoding". Drafts are greedy, and the target verifies them like all other drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.engine.executor.encodings import DRAWN, StepArrays
from weft.engine.executor.local import LocalExecutor
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.scheduler.ports import Drafter
from weft.pages.memory.page_memory import OutOfPages, PageMemory

STEADY_TOKENS = 2
"""Most new tokens of a request that got drafts in the previous step: its last token, and the last
draft if all were accepted.
"""


class ModelDrafter(Drafter):
    """Runs a draft model, one forward pass per draft, for many requests at once.

    A request gets pages of the draft model's own pool when drafting for it begins, and gives them
    back with its slot. Before the draft model drafts, it reads the request's tokens that it has not
    seen, one chunk per step.

    Args:
        max_tokens: Positions that the draft model has; a longer request gets no drafts.
        chunk_tokens: Most unseen tokens of all requests that the model reads in one step.
    """

    def __init__(
        self,
        executor: LocalExecutor,
        memory: PageMemory,
        page_size: int,
        max_tokens: int,
        chunk_tokens: int,
    ) -> None:
        self._executor = executor
        self._page_size = page_size
        self._max_tokens = max_tokens
        self._chunk_tokens = chunk_tokens
        self.memory = memory
        self._texts: dict[int, _Text] = {}
        """Requests by slot."""

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        pieces = self._plan(items)
        drafts: list[Sequence[int]] = [()] * len(items)
        if pieces:
            with torch.inference_mode():
                chains = self._run(pieces)
            for piece, chain in zip(pieces, chains, strict=True):
                piece.text.tail = chain[:-1]  # The KV of the last draft was not computed.
                drafts[piece.item] = chain
        return drafts

    def forget(self, slot: int) -> None:
        text = self._texts.pop(slot, None)
        if text is not None:
            self.memory.release(text.pages)
            self._executor.page_table.clear(slot)

    def sizes(self) -> dict[str, int]:
        return {"draft_requests": len(self._texts), "draft_pages": self.memory.counts().used}

    def _plan(self, items: Sequence[VerifyItem]) -> list[_Piece]:
        """Plans the next step: requests with the most drafts first, those without drafts last.
        Requests with the fewest unread tokens are served first, so that no prompt delays others.
        """
        begins = [self._num_known(item) for item in items]
        order = sorted(range(len(items)), key=lambda index: items[index].start - begins[index])
        left = self._chunk_tokens + STEADY_TOKENS * len(items)
        pieces = []
        for index in order:
            (request, start, max_drafts, _), begin = items[index], begins[index]
            num_drafts = min(max_drafts, self._max_tokens - start)
            if start >= self._max_tokens:
                self.forget(request.slot)  # A request this long never gets drafts again.
            text = self._with_room(request.slot, start + num_drafts) if num_drafts > 0 else None
            end = min(start + 1, begin + left)
            request.drafts.is_behind = text is not None and end <= start
            request.drafts.lacks_room = text is None
            if text is None or end == begin:
                continue
            left -= end - begin
            # The KV before `begin` stays valid even if the step fails.
            text.num_tokens, text.tail = begin, []
            num_drafts = 0 if request.drafts.is_behind else num_drafts
            tokens = request.tokens[begin:end]
            pieces.append(_Piece(index, text, request.slot, begin, tokens, num_drafts))
        return sorted(pieces, key=lambda piece: -piece.num_drafts)

    def _num_known(self, item: VerifyItem) -> int:
        text = self._texts.get(item.request.slot)
        return 0 if text is None else text.num_known(item.request.tokens, item.start)

    def _with_room(self, slot: int, num_tokens: int) -> _Text | None:
        """The text in a slot, with pages for this many tokens. None: there are too few pages, and
        the slot's pages were released.
        """
        text = self._texts.setdefault(slot, _Text())
        num_lacking = -(-num_tokens // self._page_size) - len(text.pages)
        if num_lacking > 0:
            try:
                text.pages += self.memory.allocate(num_lacking)
            except OutOfPages:
                self.forget(slot)
                return None
            self._executor.page_table.extend(slot, text.pages)
        return text

    def _run(self, pieces: Sequence[_Piece]) -> list[list[int]]:
        counts = np.array([piece.num_drafts for piece in pieces], np.int64)
        slots = np.array([piece.slot for piece in pieces], np.int64)
        lengths = np.array([len(piece.tokens) for piece in pieces], np.int64)
        starts = np.array([piece.start for piece in pieces], np.int64)
        tokens = np.concatenate([np.array(piece.tokens, np.int64) for piece in pieces])
        drawn = self._step(slots, starts, lengths, int((counts > 0).sum()), tokens)
        found, ends = [drawn], starts + lengths
        for depth in range(1, int(counts.max())):
            going_on = int((counts > depth).sum())
            own, ones = slots[:going_on], np.ones(going_on, np.int64)
            places = ends[:going_on] + depth - 1
            found.append(self._step(own, places, ones, going_on, None))
        for piece, end in zip(pieces, ends.tolist(), strict=True):
            piece.text.num_tokens = end
        drafts, begins = torch.cat(found).tolist(), np.cumsum([0, *map(len, found)]).tolist()
        return [
            [drafts[begin + row] for begin in begins[:count]]
            for row, count in enumerate(counts.tolist())
        ]

    def _step(
        self,
        slots: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        num_drawing: int,
        tokens: Int64Array | None,
    ) -> torch.Tensor:
        """Runs one forward pass of the draft model. Returns [num_drawing] int64, on the device.

        Args:
            slots: [R].
            starts: [R]: position of each request's first token in this pass.
            lengths: [R]: tokens of each request in this pass.
            num_drawing: Number of leading requests that get a draft.
            tokens: Tokens of all pieces; None: each request's draft of the previous pass.
        """
        cu_q_lens = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=cu_q_lens[1:])
        request_of = np.repeat(np.arange(len(slots)), lengths)
        positions = np.arange(len(request_of)) + (starts - cu_q_lens[:-1])[request_of]
        pages = self._executor.page_table.pages[slots[request_of], positions // self._page_size]
        places = pages.astype(np.int64) * self._page_size + positions % self._page_size
        sources = slots if tokens is None else slots[:0]
        drawing = slots[:num_drawing]
        arrays = StepArrays(
            token_ids=np.full(len(slots), DRAWN, np.int64) if tokens is None else tokens,
            positions=positions,
            places=places,
            slots=slots,
            cu_q_lens=cu_q_lens,
            kv_lens=(starts + lengths).astype(np.int32),
            logits_rows=cu_q_lens[1 : num_drawing + 1].astype(np.int64) - 1,
            max_q_len=int(lengths.max()),
            max_kv_len=int((starts + lengths).max()),
            num_decodes=len(sources),
            drawing_slots=drawing,
            drawing_positions=(starts + lengths)[:num_drawing],
            sources=sources,
            owners=np.full(len(sources), -1, np.int64),
        )
        logits = self._executor.run(arrays)
        if logits is None:
            return torch.zeros(0, dtype=torch.int64, device=self._executor.device)
        drawn = logits.argmax(dim=-1)
        self._executor.keep(drawn)
        return drawn


class _Text:
    def __init__(self) -> None:
        self.pages: list[int] = []
        self.num_tokens = 0
        """Tokens of the request whose KV is in the pages."""
        self.tail: list[int] = []
        """Drafts whose KV follows in the pages."""

    def num_known(self, tokens: Sequence[int], most: int) -> int:
        """Number of a request's first `most` tokens whose KV is in the pages."""
        end = self.num_tokens
        for draft in self.tail:
            if end >= most or tokens[end] != draft:
                break
            end += 1
        return min(end, most)


class _Piece(NamedTuple):
    item: int
    """Index of the item to which the piece belongs."""
    text: _Text
    slot: int
    start: int
    tokens: list[int]
    num_drafts: int
    """Drafts to make after these tokens; 0: the model still has unread tokens."""
