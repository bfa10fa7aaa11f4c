"""Changes of a row's logits that depend on the request: bias, penalties.

Each change concerns a short list of token ids. So `LogitEdits` changes the row in place, and
reverts the changes once the row's token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from weft.contract.arrays import Float32Array, Int64Array
from weft.contract.request import SamplingParams
from weft.engine.sampling.times import TimeRules


class TokenCounts:
    """Token counts of one request, for the distinct tokens only."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._index: dict[int, int] = {}
        distinct = np.unique(np.asarray([*prompt_ids, *output_ids], np.int64))
        self._ids = np.zeros(max(64, 2 * len(distinct)), np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._ids[: len(distinct)] = distinct
        self._index = {token_id: i for i, token_id in enumerate(distinct.tolist())}
        for token_id in output_ids:
            self.add_output(token_id)
        self._prompt_ids = prompt_ids

    def add_output(self, token_id: int) -> None:
        i = self._index.get(token_id)
        if i is None:
            i = self._index[token_id] = len(self._index)
            if i == len(self._ids):
                self._ids = np.resize(self._ids, 2 * i)
                self._counts = np.concatenate([self._counts, np.zeros(i, np.float32)])
            self._ids[i] = token_id
        self._counts[i] += 1.0

    @property
    def ids(self) -> Int64Array:
        """[n]: distinct tokens of prompt and output."""
        return self._ids[: len(self._index)]

    @property
    def output_counts(self) -> Float32Array:
        return self._counts[: len(self._index)]

    @property
    def words(self) -> Int64Array:
        """The packed count of each of `ids`, as in
        `weft.kernels.ops.sampling.spec.SlotTensors.counts`.
        """
        in_prompt = np.isin(self.ids, np.asarray(self._prompt_ids, np.int64))
        return 2 * self.output_counts.astype(np.int64) + in_prompt


class LogitEdits:
    """Changes to the logits of one sample, and their reversal."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Prepares a sample that has `output_ids` already.

        Args:
            prompt_ids: Prompt tokens, which count for the repetition penalty only.
            output_ids: Generated tokens, which count for all penalties.
        """
        self.params = params
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), np.float32)
        self.counts = TokenCounts(prompt_ids, output_ids) if params.has_penalties else None
        self.times: TimeRules | None = None
        """Rules for the tokens that say times, or None."""
        if params.time_tokens is not None:
            self.times = TimeRules(params.time_tokens, output_ids)
        self._whole: list[tuple[Float32Array, Float32Array]] = []
        self._undo: list[tuple[Float32Array, Int64Array, Float32Array]] = []

    def apply(self, row: Float32Array) -> None:
        """Changes `row`, [vocab_size], in place: bias, then penalties, then the rules of
        times.
        """
        if len(self.bias_ids):
            self._remember(row, self.bias_ids)
            row[self.bias_ids] += self.bias
        if self.counts is not None and len(self.counts.ids):
            self._remember(row, self.counts.ids)
            row[self.counts.ids] = self._penalised(row[self.counts.ids], self.counts)
        if self.times is not None:
            self._whole.append((row, row.copy()))
            self.times.apply(row)

    def copy(self) -> LogitEdits:
        """As they are after the same tokens, for a sample without penalties."""
        made = copy(self)
        made.times, made._whole, made._undo = copy(self.times), [], []
        return made

    def add_output(self, token_id: int) -> None:
        """Counts a token that was drawn."""
        if self.counts is not None:
            self.counts.add_output(token_id)
        if self.times is not None:
            self.times.add(token_id)

    def take_back(self) -> None:
        """Reverts all changes that `apply` has made since the last call."""
        while self._whole:
            row, values = self._whole.pop()
            row[:] = values
        while self._undo:
            row, ids, values = self._undo.pop()
            row[ids] = values

    def _remember(self, row: Float32Array, ids: Int64Array) -> None:
        self._undo.append((row, ids, row[ids]))

    def _penalised(self, logits: Float32Array, counts: TokenCounts) -> Float32Array:
        params = self.params
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            logits = np.where(logits > 0, logits / penalty, logits * penalty)
        if params.frequency_penalty != 0.0:
            logits = logits - np.float32(params.frequency_penalty) * counts.output_counts
        if params.presence_penalty != 0.0:
            is_in_output = (counts.output_counts > 0).astype(np.float32)
            logits = logits - np.float32(params.presence_penalty) * is_in_output
        return logits
