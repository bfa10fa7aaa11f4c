"""Turns the tokens of one sample into the text that its client may see."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass

from weft.gateway.text.answer.formats import ReasoningFormat
from weft.gateway.text.answer.reasoning_gate import ReasoningGate
from weft.gateway.text.detokenize import Vocabulary, make_detokenizer
from weft.gateway.text.stop_patterns import PatternScanner, ScannerChain, StopPatterns
from weft.gateway.text.stops import StopAutomaton, StopScanner


@dataclass(frozen=True, slots=True, eq=False)
class RenderPlan:
    """The part of rendering that all samples of a prompt share."""

    vocabulary: Vocabulary
    prompt_ids: Sequence[int]
    _: KW_ONLY
    stops: StopAutomaton | None
    """Stop strings, shared by the prompts of a request; None: there are none."""
    stop_ids: Collection[int]
    """Tokens that end a sample; the last one's text is not shown."""
    min_tokens: int
    """Stop strings count only if at least this many tokens come before their end."""
    include_stop: bool
    """Keep the text of the stop string or token."""
    skip_special_tokens: bool
    """Special tokens give no text."""
    told_ids: Collection[int] = ()
    """Tokens of `stop_ids` that are reported to the client if they end a sample."""
    shown_ids: Collection[int] = ()
    """Special tokens that give text in any case."""
    reasoning: ReasoningFormat | None = None
    """Format of the reasoning, within which stop strings do not count; None: they count everywhere.
    """
    begins_reasoning: bool = False
    """Whether a sample begins within the reasoning."""
    patterns: StopPatterns | None = None
    """Regular expressions that count as stop strings do; None: there are none."""


class SampleRenderer:
    """Detokenises one sample and applies its stop strings."""

    # A gateway touches thousands of these in turn, so their memory must be near.
    __slots__ = (
        "_detokenizer",
        "_gate",
        "_include_stop",
        "_is_plain",
        "_min_tokens",
        "_num_tokens",
        "_pending_stop",
        "_scanner",
        "_stop_id",
        "_stop_ids",
        "_told_ids",
        "is_stopped",
    )

    def __init__(self, plan: RenderPlan) -> None:
        self._detokenizer = make_detokenizer(
            plan.vocabulary, plan.prompt_ids, plan.skip_special_tokens, plan.shown_ids
        )
        self._scanner = _make_scanner(plan)
        self._is_plain = self._scanner is None
        """Whether only tokens end the text."""
        self._gate = (
            ReasoningGate(plan.reasoning, plan.begins_reasoning)
            if plan.reasoning is not None and self._scanner is not None
            else None
        )
        self._stop_ids = frozenset(plan.stop_ids)
        self._include_stop = plan.include_stop
        self._min_tokens = plan.min_tokens
        self._told_ids = plan.told_ids
        self._pending_stop: int | None = None
        self._stop_id: int | None = None
        self._num_tokens = 0
        self.is_stopped = False
        """Whether a stop string or expression was found, after which nothing more is shown."""

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or expression that was found, else the stop token that ended the text."""
        if self.is_stopped and self._scanner is not None:
            return self._scanner.found
        return self._stop_id

    def push_all(self, ids: Sequence[int]) -> tuple[str, int]:
        """`push` of each of these tokens until one completes a stop string; returns the text to
        show, and the number of tokens taken.
        """
        if self._is_plain and self._pending_stop is None and self._stop_ids.isdisjoint(ids):
            return self._detokenizer.push_all(ids), len(ids)
        text = ""
        for count, token_id in enumerate(ids, 1):
            text += self.push(token_id)
            if self.is_stopped:
                return text, count
        return text, len(ids)

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text to show, and sets `is_stopped`."""
        if self._is_plain and self._pending_stop is None and token_id not in self._stop_ids:
            return self._detokenizer.push(token_id)
        text = ""
        # The stop token did not end the sample, so its text is shown like any other.
        if self._pending_stop is not None:
            pending, self._pending_stop = self._pending_stop, None
            text = self._show(pending)
            if self.is_stopped:
                return text
        if token_id in self._stop_ids:
            self._pending_stop = token_id
            return text
        return text + self._show(token_id)

    def _show(self, token_id: int) -> str:
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        if self._scanner is None:
            return text
        counts = self._num_tokens > self._min_tokens
        return self._scan(text, counts=counts)

    def _scan(self, text: str, *, counts: bool = True, is_last: bool = False) -> str:
        """The text up to a stop string, if one ends in it; sets `is_stopped`."""
        assert self._scanner is not None
        free = ""
        if self._gate is not None:
            free, text = self._gate.push(text, is_last=is_last)
        text, self.is_stopped = self._scanner.push(text, counts=counts)
        return free + text

    def finish(self, by_stop_token: bool) -> str:
        """Ends the sample; returns the last text to show. `by_stop_token` says that the last token
        pushed ended the sample.
        """
        text = ""
        if self._pending_stop is not None and (self._include_stop or not by_stop_token):
            text = self._show(self._pending_stop)
        if by_stop_token and self._pending_stop in self._told_ids:
            self._stop_id = self._pending_stop
        self._pending_stop = None
        if self.is_stopped:
            return text
        rest = self._detokenizer.finish()
        if self._scanner is None:
            return text + rest
        rest = self._scan(rest, is_last=True)
        if self.is_stopped:
            return text + rest
        last = self._scanner.finish()
        self.is_stopped = bool(self._scanner.found)
        return text + rest + last


def _make_scanner(plan: RenderPlan) -> StopScanner | PatternScanner | ScannerChain | None:
    """None: only tokens end the text."""
    strings = patterns = None
    if plan.stops is not None:
        strings = StopScanner(plan.stops, plan.include_stop)
    if plan.patterns is not None:
        patterns = PatternScanner(plan.patterns, plan.include_stop)
    if strings is not None and patterns is not None:
        return ScannerChain(strings, patterns)
    return strings or patterns
