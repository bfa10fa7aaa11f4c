"""Where a sample is in its grammar: what it has consumed, and the masks of what may follow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from weft.contract.errors import Internal, InvalidRequest, WeftError
from weft.engine.base.token_trees import parents_of
from weft.engine.features.constraints.compiling import TOO_SLOW
from weft.engine.features.constraints.unique import UNCLEAR
from weft.engine.scheduler.ports import Masks

if TYPE_CHECKING:
    from weft.engine.features.constraints.unique import Matcher

SLOW_MASK_S = 5e-3
"""CPU seconds above which a mask counts as slow; llguidance ends it at about 20 ms."""
MAX_SLOW_S = 1.0
"""CPU seconds that a sample's slow masks may take together; above that, the sample is ended."""
_WRONG_TOKEN = ("doesn't satisfy the grammar", "parser stopped in consume_token")
"""Parts of llguidance's messages about a token that the grammar does not allow. All its other
messages are about limits.
"""


class ChargedTime:
    """CPU seconds that were charged to a request, for all of its samples."""

    def __init__(self) -> None:
        self.seconds = 0.0


class ConstraintState:
    """The position of one sample in its grammar: a function of the grammar and the tokens so far.

    Args:
        grammar: Matcher at the beginning of a text; it is copied.
        eos_token_ids: Tokens that end a text; a matcher never sees them.
        charged: Shared by all samples of a request; None: the request has one sample.
    """

    def __init__(
        self,
        grammar: Matcher,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        charged: ChargedTime | None = None,
    ) -> None:
        self.grammar = grammar
        self.charged = ChargedTime() if charged is None else charged
        self.matcher = grammar.deep_copy()
        """A copy of `grammar` that has consumed the sample's tokens so far."""
        self.eos_token_ids = eos_token_ids
        self._slow_s = 0.0
        self._num_words = -(-vocab_size // 32)
        self.num_accepted = 0
        """Number of the sample's tokens that `matcher` has consumed."""
        self.num_alone = 0
        """Number of next masks to be computed outside groups, so that each is timed."""
        self.is_lost = False
        """Whether the sample gets no masks any more, because its grammar is too slow."""

    @property
    def in_group(self) -> ConstraintState | None:
        """This state, if its next mask may be computed in a group with other samples; else None."""
        is_timed = self.num_alone > 0 or self.is_lost
        return None if is_timed or not isinstance(self.matcher, LLMatcher) else self

    def follow(self, tokens: Sequence[int]) -> None:
        """Follows more tokens of the sample, those from `num_accepted` on. Raises Internal if a
        token is not of the grammar, and InvalidRequest if the grammar takes too long to follow.
        """
        if self.is_lost:
            raise too_slow()
        for token in tokens:
            if token in self.eos_token_ids or not self.matcher.consume_token(token):
                raise self.refusal(token)
            self.num_accepted += 1

    def refusal(self, token: int) -> WeftError:
        """The error that says why the matcher refused the sample's next token."""
        told = self.matcher.get_error()
        is_wrong = any(wrong in told for wrong in _WRONG_TOKEN)
        message = f"token {token} behind {self.num_accepted} is not of the sample's grammar"
        return (None if is_wrong else self.problem()) or Internal(message, stage="decode")

    def problem(self) -> InvalidRequest | None:
        """The error if following the grammar takes too long, or no text can continue."""
        if not self.matcher.is_error():
            return None
        told = self.matcher.get_error()
        if "NoExtension" not in told and told != UNCLEAR:
            return too_slow()
        message = told if told == UNCLEAR else "no text satisfies it that goes on from here"
        return InvalidRequest(message, stage="decode", param="constraint")

    def _check(self) -> None:
        if (error := self.problem()) is not None:
            raise error

    def next_masks(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> Masks:
        """Consumes more tokens of the sample, then returns the masks of the tokens that may follow.

        Args:
            tokens: Those from `num_accepted` on.
            ahead: Tokens that may follow, a chain or a `TokenTree`. The matcher is rolled back
                after each.

        Returns:
            New arrays, whose bits from vocab_size on are 0: the mask of the next token, then the
                mask that follows each of `ahead`. After a token that the grammar does not allow,
                the mask allows no token.

        Raises:
            Internal: A token is not of the grammar.
            InvalidRequest: The grammar takes too long to follow.
        """
        began = time.thread_time()
        self.follow(tokens)
        words = np.zeros((1 + len(ahead), self._num_words), np.uint32)
        self._fill(words[0])
        if ahead:
            self._fill_behind(ahead, words)
        self.num_alone = max(0, self.num_alone - 1)
        taken_s = time.thread_time() - began
        if taken_s > SLOW_MASK_S * len(words):
            self._slow_s += taken_s
        if self._slow_s > MAX_SLOW_S:
            raise too_slow()
        return list(words)

    def _fill(self, row: npt.NDArray[np.uint32]) -> None:
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def _fill_behind(self, ahead: Sequence[int], words: npt.NDArray[np.uint32]) -> None:
        """Writes the mask that follows each of these tokens into its row."""
        paths: list[list[int] | None] = [[]]
        """For each row, the rows from the root to it; None: the grammar does not allow them."""
        behind: list[int] = []
        """The path of rows that the matcher has consumed."""
        for row, (token, parent) in enumerate(zip(ahead, parents_of(ahead), strict=True), 1):
            before = paths[parent]
            is_allowed = words[parent, token // 32] >> token % 32 & 1
            if before is None or not is_allowed or token in self.eos_token_ids:
                paths.append(None)
                continue
            path = [*before, row]
            paths.append(path)
            self._go_from(behind, path, ahead)
            self._fill(words[row])
            behind = path
        self._go_from(behind, [], ahead)

    def _go_from(self, behind: list[int], path: list[int], ahead: Sequence[int]) -> None:
        same = 0
        while same < min(len(behind), len(path)) and behind[same] == path[same]:
            same += 1
        if len(behind) > same:
            self.matcher.rollback(len(behind) - same)
        for row in path[same:]:
            self.matcher.consume_token(ahead[row - 1])
        self._check()


def too_slow() -> InvalidRequest:
    return InvalidRequest(TOO_SLOW, stage="decode", param="constraint")
