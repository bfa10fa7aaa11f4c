"""The port between the loop and the device that computes its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from weft.contract.arrays import Int64Array
from weft.engine.base.device_copies import Mark
from weft.engine.executor.alignment import Alignments
from weft.engine.executor.orders import Order
from weft.engine.executor.pooling import PooledStates
from weft.engine.executor.step_input import StepInput
from weft.engine.sampling.device_draws import CapturedDraw, RowsOnDevice
from weft.engine.sampling.prompt_scores import PromptScores
from weft.pages.memory.page_table import PageTable


class Logits(NamedTuple):
    """Logits to draw tokens from, with the slots and positions of their rows."""

    compute: Callable[[], torch.Tensor]
    """[L, vocab] float32 on the model's device; not called where `captured` draws."""
    slots: Int64Array
    """[L]: the slot of each row."""
    positions: Int64Array
    """[L]: positions of the tokens to be drawn. For a request whose start only the device knows:
    the largest possible ones.
    """
    on_device: Callable[..., RowsOnDevice] | None = None
    """`DeviceInputs.drawing_rows` of the step; None: slots and positions are not on the device."""
    captured: CapturedDraw | None = None
    """Draws by a graph and keeps the tokens; None: the step has no such graph."""
    rows: Callable[[], torch.Tensor] | None = None
    """Returns [2, T] int64 on the device: the rows' tokens, and their ancestor masks if they form
    trees. None: the step verifies no drafts.
    """


class Launched(NamedTuple):
    """Results of a step that has begun."""

    logits: Logits | None
    """Rows of logits: one for each decode, then one for each row of the verified requests, then one
    for each chunk of a prompt that draws. None: no row draws.
    """
    scores: PromptScores | None = None
    """Log-probabilities of prompts; None: none are wanted."""
    vectors: PooledStates | Alignments | None = None
    """Vectors of prompts; None: none are wanted."""


class ExecutorFacts(NamedTuple):
    """What never changes while an executor works."""

    page_size: int
    """Token positions per page."""
    step_sizes: Sequence[int]
    """Token counts that steps with prompts are padded to; empty without graphs."""
    is_asynchronous: bool
    """Whether the device works while the host continues."""
    writes_after_draw: bool = False
    """Whether some device may still write to pages after a step's tokens have arrived."""
    num_lanes: int = 1
    """Steps that may be under way at once, each of other requests but for prompts' chunks. With
    several, each step brings all of its tokens, and none are kept on the device.
    """


class Executor(Protocol):
    """Computes the steps of one engine, in the order in which they are launched. No call waits for
    the device unless its docstring says so.
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
    def facts(self) -> ExecutorFacts: ...

    def launch(self, step: StepInput) -> Launched: ...

    def keep(self, tokens: torch.Tensor) -> None:
        """Keeps the drawn tokens on the device as input of later steps.

        Args:
            tokens: [L] int64, by row of the logits; negative where there is none. For a verified
                request, tokens count up to the first one that differs from its next row's.
        """
        ...

    def mark(self) -> Mark:
        """A mark that the device passes after all work so far."""
        ...

    def order(self, order: Order) -> None:
        """Does work on the device's memory after all steps so far and before all later ones."""
        ...

    def check(self) -> None:
        """Called in every turn. Raises RanksLost if a process that takes part in steps is gone."""
        ...

    def close(self) -> None:
        """Ends the processes that take part in steps."""
        ...
