"""Draws the next tokens of running requests: their sampler rows, and masks of their constraints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.constraints.constraints import Constraints
from weft.engine.errors import WeftError
from weft.engine.request import TokenLogprob
from weft.engine.runner.runner import Drawable
from weft.engine.sampling.sampler import Sampler, SampleRow, SamplesUnderWay
from weft.engine.scheduler.state import Request


class Drawn(NamedTuple):
    """What a step drew, by row of the logits."""

    requests: Sequence[Request]
    tokens: list[int]
    """Of rows with an error they mean nothing."""
    logprobs: Sequence[TokenLogprob | None]
    errors: dict[int, WeftError]


class Draw(NamedTuple):
    """The tokens of a step, which may be under way."""

    requests: Sequence[Request]
    samples: SamplesUnderWay
    mask_errors: dict[int, WeftError]
    """By row."""

    @property
    def tokens(self) -> torch.Tensor:
        """`[len(requests)]` where they are drawn; negative where there is none."""
        return self.samples.tokens

    def wait(self) -> Drawn:
        """The tokens, once they are there."""
        output = self.samples.wait()
        errors = {**output.errors, **self.mask_errors}
        return Drawn(self.requests, output.token_ids.tolist(), output.logprobs, errors)


class Drawing:
    """Keeps a row of the sampler for each slot that is drawn for.

    Args:
        sampler: Rows by slot.
        constraints: Make masks while the forward runs.
    """

    def __init__(self, sampler: Sampler, constraints: Constraints) -> None:
        self._sampler = sampler
        self._constraints = constraints
        self._has_row = np.zeros(sampler.null_slot + 1, np.bool_)
        self._has_row[sampler.null_slot] = True
        self.num_slots = 0
        """Slots that have a row."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Gets ready what drawing needs beside the logits.

        Args:
            requests: That will draw; the tokens before those to be drawn are known.
        """
        slots = self._slots(requests)
        for row in np.flatnonzero(~self._has_row[slots]).tolist():
            self._take_slot(requests[row])
        self._constraints.begin_masks(requests)

    def begin(self, requests: Sequence[Request], drawable: Drawable) -> Draw:
        """Draws a token each; `prepare` was told of the same requests.

        Args:
            requests: By row; what is drawn for those that have ended means nothing.
            drawable: Of these rows.
        """
        errors: dict[int, WeftError] = {}
        for request, mask in self._constraints.take_masks():
            if isinstance(mask, WeftError):
                errors[requests.index(request)] = mask
            else:
                self._sampler.set_mask(request.slot, mask)
        slots = self._slots(requests)
        samples = self._sampler.begin(drawable.logits, slots, drawable.positions)
        return Draw(requests, samples, errors)

    def _slots(self, requests: Sequence[Request]) -> npt.NDArray[np.int64]:
        slots = np.array([request.slot for request in requests], np.int64)
        slots[slots < 0] = self._sampler.null_slot
        return slots

    def give_up(self) -> None:
        """The step failed after `prepare`: its masks are of no use."""
        self._constraints.take_masks()

    def free(self, slot: int) -> None:
        """The slot's request is gone."""
        if self._has_row[slot]:
            self._has_row[slot] = False
            self.num_slots -= 1
            self._sampler.remove(slot)

    def _take_slot(self, request: Request) -> None:
        row = SampleRow(
            params=request.params,
            stop=request.stop,
            seed=request.seed,
            eos_token_ids=tuple(request.eos_token_ids),
            top_logprobs=request.top_logprobs,
        )
        prompt = request.tokens[: request.num_prompt_tokens]
        self._sampler.add(request.slot, row, prompt, request.tokens[request.num_prompt_tokens :])
        self._has_row[request.slot] = True
        self.num_slots += 1
