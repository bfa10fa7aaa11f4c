"""The port between the loop and the device that computes its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from weft.contract.arrays import Int64Array
from weft.contract.pages import PageCopy
from weft.engine.base.device_copies import Mark
from weft.engine.executor.device_sampling import CapturedDraw, RowsOnDevice
from weft.engine.executor.pooling import PooledStates
from weft.engine.executor.prompt_scores import PromptScores
from weft.engine.executor.step_input import StepInput
from weft.engine.memory.page_table import PageTable
from weft.engine.transfer.page_pool import PagePool


class Logits(NamedTuple):
    """Logits to draw tokens from, and the slots and positions of their rows."""

    logits: Callable[[], torch.Tensor]
    """Computes [L, vocab] float32 on the model's device; not called where `captured` draws."""
    slots: Int64Array
    """The slot of each row that draws, [L]."""
    positions: Int64Array
    """Positions of the tokens to be drawn, [L]; for requests that start late the largest possible
    ones.
    """
    on_device: Callable[..., RowsOnDevice] | None = None
    """`DeviceInputs.drawing_rows` of the step; None: slots and positions are not on the device."""
    captured: CapturedDraw | None = None
    """Draws by a graph and keeps the tokens; None: this step has no such graph."""
    rows: Callable[[], torch.Tensor] | None = None
    """Returns [2, T] int64 on the device: the rows' tokens, and their ancestor words if they form
    trees. None: the step verifies none.
    """


class Launched(NamedTuple):
    """Results of a step that has begun."""

    drawable: Logits | None
    """Logits to draw from: a row for each decode, then one for each row of the requests to
    verify, then one for each piece of a prompt that draws; None: no row draws.
    """
    scores: PromptScores | None = None
    """Log-probabilities of prompts; None: none are wanted."""
    vectors: PooledStates | None = None
    """Vectors of prompts; None: none are wanted."""


class Executor(Protocol):
    """Computes the steps of one engine, in the order in which they are launched.

    No call waits for the device unless it says so.
    """

    @property
    def page_table(self) -> PageTable:
        """The page table on the host; changes reach the device with the next step."""
        ...

    @property
    def window_tables(self) -> Sequence[PageTable]:
        """The host's page table of each further page group."""
        ...

    @property
    def page_size(self) -> int:
        """Token positions a page."""
        ...

    @property
    def step_sizes(self) -> Sequence[int]:
        """Token counts that steps with prompts are padded to; empty without graphs."""
        ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device works while the host continues."""
        ...

    @property
    def works_behind_draws(self) -> bool:
        """Whether some device may still write to pages when a step's tokens have come."""
        ...

    def launch(self, step: StepInput) -> Launched:
        """Starts one step."""
        ...

    def keep(self, tokens: torch.Tensor) -> None:
        """Keeps the drawn tokens on the device as input of later steps.

        Args:
            tokens: [L] int64, by row of the logits; negative where there is none. For a verified
                request, tokens count up to the first one that differs from its next row's.
        """
        ...

    def mark(self) -> Mark:
        """A mark of the device's work so far."""
        ...

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages, none of which may be both source and destination."""
        ...

    def zero(self, pages: Sequence[int], group: int = 0) -> None:
        """Zeroes pages of a group."""
        ...

    def poison(self, pages: Sequence[int], group: int = 0) -> None:
        """Fills free pages of a group with NaN, so that reading one is noticed."""
        ...

    def poison_blocks(self, blocks: Sequence[int]) -> None:
        """Fills free blocks of recurrent layers with NaN, so that reading one is noticed."""
        ...

    def pack_block(self, block: int, pages: Sequence[int]) -> None:
        """Copies a block of recurrent layers into pages of the first group."""
        ...

    def unpack_block(self, block: int, pages: Sequence[int]) -> None:
        """Copies a block of recurrent layers out of pages of the first group."""
        ...

    def pack_pages(
        self, pages: Sequence[int], group: int, into: Sequence[int], *, is_each: bool = False
    ) -> None:
        """Copies pages of a further group, one behind the other, into pages of the first group.

        Args:
            pages: Of the further group.
            group: Its number.
            into: Of the first group.
            is_each: Each page has an equal share of `into` to itself.
        """
        ...

    def unpack_pages(
        self, pages: Sequence[int], group: int, out_of: Sequence[int], *, is_each: bool = False
    ) -> None:
        """Copies as many pages of a further group as these out of pages of the first group, into
        which `pack_pages` put them.
        """
        ...

    def block_pool(self, num_pages: int, page_bytes: int) -> PagePool:
        """Access for one thread to blocks of recurrent layers, as so many pages each."""
        ...

    def window_pool(self, num_pages: int, page_bytes: int) -> PagePool:
        """Access for one thread to pages of the window group, as so many pages each."""
        ...

    def page_digests(self, pages: Sequence[int]) -> list[int]:
        """Digests of pages as they are in the pool now; waits for them."""
        ...

    def reset_slot(self, slot: int) -> None:
        """Clears the slot's page table row for its next request."""
        ...

    def check(self) -> None:
        """Called in every turn.

        Raises:
            RanksLost: A process that takes part in steps is gone.
        """
        ...

    def close(self) -> None:
        """Ends the processes that take part in steps."""
        ...
