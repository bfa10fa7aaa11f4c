"""The state of one sample: what was received, and what the client does not have yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.gateway.text.render import SampleRenderer
from weft.v1 import common_pb2


@dataclass(slots=True, eq=False)
class SampleOutput:
    """One sample of one prompt. It outlives attempts: its text continues where it was."""

    index: int
    """Index among all samples of the client's request."""
    renderer: SampleRenderer
    ids: list[int] = field(default_factory=list)
    """All tokens so far; a new owner continues from these."""
    num_ids_taken: int = 0
    text: str = ""
    """Text not yet taken."""
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    """Log-probabilities not yet taken."""
    finish_reason: common_pb2.FinishReason.ValueType | None = None
    is_dirty: bool = False
    """Whether there is something to take."""
    first_token_time: float = 0.0
    """Event loop time; 0: no token yet."""
    last_token_time: float = 0.0

    @property
    def pace_s(self) -> float | None:
        """Mean seconds between its tokens; None: it has fewer than two."""
        num_gaps = len(self.ids) - 1
        return (self.last_token_time - self.first_token_time) / num_gaps if num_gaps > 0 else None

    def push(self, ids: Sequence[int]) -> str:
        """Takes tokens up to the one that completes a stop string; returns the text to show."""
        renderer = self.renderer
        if len(ids) == 1:
            self.ids.append(ids[0])
            return renderer.push(ids[0])
        text = ""
        for token_id in ids:
            self.ids.append(token_id)
            text += renderer.push(token_id)
            if renderer.is_stopped:
                break
        return text
