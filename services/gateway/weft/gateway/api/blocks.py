"""Turns an answer into the sequence of blocks that dialects with typed content show: reasoning,
text and tool calls. Each block begins once and ends before the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.text.answer import AnswerParser, AnswerPart, CallPart
from weft.gateway.text.answer.formats import END_THINK
from weft.v1 import common_pb2

Kind = Literal["reasoning", "text", "call"]
_PIECES = re.compile(r"[^>}\]]*[>}\]]|[^>}\]]+")
"""Cuts a text so that in each piece nothing follows the end of a call or of reasoning, because a
parser does not say in which order a piece adds reasoning, text and calls.
"""


@dataclass(slots=True)
class Block:
    """One block of an answer, as far as it has come."""

    number: int
    """Place in the answer, from 0."""
    kind: Kind
    call_id: str = ""
    """Id of a call."""
    name: str = ""
    """Function that a call names."""
    parts: list[str] = field(default_factory=list)
    """Text, reasoning, or the arguments of a call, in pieces."""
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    """Log-probabilities of a text's tokens, if they were asked for."""
    is_ended: bool = False

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self.parts)


class Step(NamedTuple):
    """One change of an answer."""

    what: Literal["begin", "add", "end"]
    block: Block
    text: str = ""
    """The added text."""
    logprobs: Sequence[common_pb2.TokenLogprob] = ()
    """Log-probabilities that came with the text."""


class BlockReader:
    """Turns the deltas of one sample into steps. Without `make_parser` all of the sample's text is
    text.
    """

    def __init__(self, make_parser: Callable[[], AnswerParser] | None) -> None:
        self._parser = None if make_parser is None else make_parser()
        self._blanks = ""
        """Blanks that begin a text; they are left out if no text follows."""
        self._logprobs: list[common_pb2.TokenLogprob] = []
        """Log-probabilities of tokens whose text is not known yet."""
        self.blocks: list[Block] = []
        """All blocks so far."""
        self.finish_reason: common_pb2.FinishReason.ValueType | None = None
        """Set once the sample has ended."""
        self.stop_reason: str | int | None = None
        """The stop string or the stop token that ended the sample; None: neither did."""

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    def push(self, delta: Delta) -> list[Step]:
        is_last = delta.finish_reason is not None
        self._logprobs += delta.logprobs
        steps: list[Step] = []
        if self._parser is None:
            self._take(steps, AnswerPart(content=delta.text))
        else:
            *pieces, last = _PIECES.findall(delta.text) or [""]
            for piece in pieces:
                self._take(steps, self._parser.push(piece))
            self._take(steps, self._parser.push(last, is_last=is_last))
        if is_last:
            self._finish(steps, delta)
        return steps

    def _take(self, steps: list[Step], part: AnswerPart) -> None:
        if part.reasoning:
            self._logprobs.clear()
            self._add(steps, self._open(steps, "reasoning"), part.reasoning)
        if part.content:
            self._add_content(steps, part.content)
        for call in part.calls:
            self._logprobs.clear()
            self._add_call(steps, call)

    def _finish(self, steps: list[Step], delta: Delta) -> None:
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if not self.blocks or (self._blanks and not self.has_calls):
            blanks, self._blanks = self._blanks, ""
            self._add(steps, self._open(steps, "text"), blanks)
        if self._logprobs and self._is_in("text"):
            # These are of a stop token, which has no text and may come in a delta of its own.
            self._add(steps, self.blocks[-1], "")
        self._end(steps)

    def _add_content(self, steps: list[Step], content: str) -> None:
        is_open = bool(self.blocks) and self._is_in("text")
        text = content if is_open else self._blanks + content
        if not is_open and not text.strip():
            self._blanks = text
            return
        self._blanks = ""
        self._add(steps, self._open(steps, "text"), text)

    def _add_call(self, steps: list[Step], call: CallPart) -> None:
        self._blanks = ""
        if call.id:
            self._end(steps)
            block = Block(len(self.blocks), "call", call.id, call.name)
            self.blocks.append(block)
            steps.append(Step("begin", block))
        if call.arguments:
            self._add(steps, self.blocks[-1], call.arguments)

    def _is_in(self, kind: Kind) -> bool:
        last = self.blocks[-1]
        return last.kind == kind and not last.is_ended

    def _open(self, steps: list[Step], kind: Kind) -> Block:
        if not self.blocks or not self._is_in(kind):
            self._end(steps)
            self.blocks.append(Block(len(self.blocks), kind))
            steps.append(Step("begin", self.blocks[-1]))
        return self.blocks[-1]

    def _add(self, steps: list[Step], block: Block, text: str) -> None:
        logprobs: list[common_pb2.TokenLogprob] = []
        if block.kind == "text":
            logprobs, self._logprobs = self._logprobs, []
            block.logprobs += logprobs
        if text or logprobs:
            block.parts.append(text)
            steps.append(Step("add", block, text, logprobs))

    def _end(self, steps: list[Step]) -> None:
        if self.blocks and not self.blocks[-1].is_ended:
            self.blocks[-1].is_ended = True
            steps.append(Step("end", self.blocks[-1]))


def num_reasoning_tokens(answer: Answer, blocks: Sequence[Block]) -> int:
    """Tokens of an answer's reasoning, up to and with its closing tag.

    If the tag is no single token, the reasoning's text is tokenised again.
    """
    reasoning = "".join([block.text for block in blocks if block.kind == "reasoning"])
    if not reasoning:
        return 0
    ids, tokenizer = answer.generations[0].samples[0].ids, answer.card.tokenizer
    end = tokenizer.token_to_id(END_THINK)
    if end is not None:
        return ids.index(end) + 1 if end in ids else len(ids)
    counted = len(tokenizer.encode(reasoning, add_special_tokens=False).ids)
    return min(counted, len(ids))
