"""The simplest driver of a model over a paged pool: page numbers handed out in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from weft.contract.layout import StatePlane
from weft.engine.model.interface import Model
from weft.engine.model.state_step import StatePools, StateRound, StateStep
from weft.engine.model.step import Step
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.recurrence.sequences import Sequences


@dataclass
class PagedRequest:
    """A request's tokens so far and the pages that hold them."""

    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    blocks: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Blocks of recurrent states by the number of tokens before them: at page borders, and at the
    end of each step.
    """

    def begin_with(self, other: PagedRequest, num_pages: int, page_size: int) -> None:
        """Begins with the first pages of another request."""
        self.pages, self.num_cached = other.pages[:num_pages], num_pages * page_size
        self.blocks = {at: block for at, block in other.blocks.items() if at == self.num_cached}


class PlainStates:
    """Blocks of a model's recurrent layers, without rings: every step writes those that the next
    one begins with, and those of all page borders.
    """

    def __init__(self, plane: StatePlane, page_size: int, count: int = 200) -> None:
        shapes = [(part.shape, getattr(torch, part.dtype)) for part in plane.parts]
        self._pools = StatePools(
            tuple(
                torch.full((count, plane.layers, *shape), float("nan"), dtype=dtype)
                for shape, dtype in shapes
            ),
            tuple(
                torch.zeros(1, 1, plane.layers, *part.shape, dtype=getattr(torch, part.dtype))
                for part in plane.ring
            ),
        )
        for pool in self._pools.blocks:
            pool[0] = 0.0
        self._page_size = page_size
        self._num_blocks = 1

    def step(self, work: Sequence[tuple[PagedRequest, int]]) -> StateStep:
        """The states of a step of so many new tokens of each request, not counted yet."""
        pieces = []
        first = 0
        for request, count in work:
            begin, end = request.num_cached, request.num_cached + count
            size = self._page_size
            ends = [*range((begin // size + 1) * size, end, size), end]
            pieces.append([(first + a - begin, first + b - begin, b)
                           for a, b in zip([begin, *ends], ends, strict=False)])  # fmt: skip
            first += count
        none = torch.empty(0, dtype=torch.int64)
        rounds, order = list[StateRound](), list[int]()
        for number in range(max(map(len, pieces))):
            rows, made = self._round(work, pieces, number)
            order += rows
            rounds.append(made)
        return StateStep(
            pools=self._pools,
            ring_slots=none,
            ring_rows=none,
            order=torch.tensor(order),
            rounds=tuple(rounds),
            back=torch.tensor(order).argsort(),
            new_rows=none,
            new_slots=none,
            new_ring_rows=none,
        )

    def _round(
        self,
        work: Sequence[tuple[PagedRequest, int]],
        pieces: list[list[tuple[int, int, int]]],
        index: int,
    ) -> tuple[list[int], StateRound]:
        taken = [n for n, found in enumerate(pieces) if index < len(found)]
        before = [n for n, found in enumerate(pieces) if index - 1 < len(found)]
        rows: list[int] = []
        bounds, begins, blocks = [0], [], []
        for n in taken:
            request, (begin, end, position) = work[n][0], pieces[n][index]
            rows += range(begin, end)
            bounds.append(len(rows))
            begins.append(before.index(n) if index else request.blocks[request.num_cached])
            blocks.append(self._num_blocks)
            request.blocks[position] = self._num_blocks
            self._num_blocks += 1
        return rows, StateRound(
            sequences=Sequences.of(torch.tensor(bounds)),
            begins=torch.tensor(begins),
            kept=torch.arange(len(taken)),
            blocks=torch.tensor(blocks),
        )


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
        plane = layout.states
        self._states = None if plane is None else PlainStates(plane, page_size)

    def batch(
        self,
        work: Sequence[tuple[PagedRequest, Sequence[int]]],
        logits_rows: Sequence[int] | None = None,
    ) -> Step:
        """Describes a step, on the pool's device, and counts its tokens as cached.

        Args:
            work: Requests with their new tokens.
            logits_rows: Rows whose logits are wanted; None for the last row of each request.
        """
        counts = [(request, len(tokens)) for request, tokens in work]
        states = None if self._states is None else self._states.step(counts)
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
        device = self.pool.device
        group = AttentionMetadata(
            page_table=torch.tensor(table, dtype=torch.int32, device=device),
            places=torch.tensor(places, device=device),
            cu_q_lens=torch.tensor(starts, dtype=torch.int32, device=device),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            max_q_len=max(len(tokens) for _, tokens in work),
            max_kv_len=max(kv_lens),
        )
        return Step(
            token_ids=torch.tensor(
                [token for _, tokens in work for token in tokens], device=device
            ),
            positions=torch.tensor(positions, device=device),
            groups=(group,),
            logits_rows=torch.tensor(rows, dtype=torch.int64, device=device),
            slots=torch.tensor([request.slot for request, _ in work], device=device),
            states=states,
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
