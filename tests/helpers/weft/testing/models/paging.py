"""The simplest driver of a model over a paged pool: page numbers handed out in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from weft.engine.model.interface import Model
from weft.engine.model.step import Step
from weft.kernels.attention import GroupStep


@dataclass
class PagedRequest:
    """A request's tokens so far and the pages that hold them."""

    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0


class PagedDriver:
    """Runs ragged steps on a pool of its own, NaN wherever nothing was written.

    Pages are given in a shuffled order, so that no test passes because pages lie in sequence.
    """

    def __init__(self, model: Model, num_pages: int, page_size: int = 8, seed: int = 0) -> None:
        layout = model.kv_layout(page_size)
        dtype = getattr(torch, layout.plane.dtype)
        self.model = model
        self.page_size = page_size
        self.pool = torch.full(layout.pool_shape(num_pages), float("nan"), dtype=dtype)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
        self._free_pages: list[int] = order.tolist()

    def batch(
        self,
        work: Sequence[tuple[PagedRequest, Sequence[int]]],
        logits_rows: Sequence[int] | None = None,
    ) -> Step:
        """Describes a step and counts its tokens as cached.

        Args:
            work: Requests with their new tokens.
            logits_rows: Rows whose logits are wanted; None for the last row of each request.
        """
        positions: list[int] = []
        places: list[int] = []
        starts = [0]
        for request, tokens in work:
            new = range(request.num_cached, request.num_cached + len(tokens))
            while len(request.pages) * self.page_size < new.stop:
                request.pages.append(self._free_pages.pop())
            positions += new
            places += [
                request.pages[p // self.page_size] * self.page_size + p % self.page_size
                for p in new
            ]
            starts.append(starts[-1] + len(tokens))
            request.num_cached = new.stop
        width = max(len(request.pages) for request, _ in work) + 1
        table = [r.pages + [-1] * (width - len(r.pages)) for r, _ in work]
        rows = [end - 1 for end in starts[1:]] if logits_rows is None else list(logits_rows)
        kv_lens = [request.num_cached for request, _ in work]
        group = GroupStep(
            page_table=torch.tensor(table, dtype=torch.int32),
            places=torch.tensor(places),
            cu_q_lens=torch.tensor(starts, dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            max_q_len=max(len(tokens) for _, tokens in work),
            max_kv_len=max(kv_lens),
        )
        return Step(
            token_ids=torch.tensor([token for _, tokens in work for token in tokens]),
            positions=torch.tensor(positions),
            groups=(group,),
            logits_rows=torch.tensor(rows, dtype=torch.int64),
            slots=torch.tensor([request.slot for request, _ in work]),
        )

    @torch.inference_mode()
    def step(
        self,
        work: Sequence[tuple[PagedRequest, Sequence[int]]],
        logits_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Runs a step: [L, vocab] float32 logits."""
        hidden = self.model.forward(self.batch(work, logits_rows), self.pool)
        return self.model.logits(hidden)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of several prompts as one batch, without any stop token."""
        requests = [PagedRequest() for _ in prompts]
        last = self.step(list(zip(requests, prompts, strict=True))).argmax(-1).tolist()
        out = [[token] for token in last]
        for _ in range(num_tokens - 1):
            work = [(request, tokens[-1:]) for request, tokens in zip(requests, out, strict=True)]
            for tokens, token in zip(out, self.step(work).argmax(-1).tolist(), strict=True):
                tokens.append(token)
        return out
