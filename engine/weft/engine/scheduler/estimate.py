"""Estimate of the tokens that running requests will still generate, for which admission keeps
pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.requests.request import Request

MAX_EXPECTED_TOKENS = 4096
"""Most tokens expected of one request: requests ask for more than they generate."""
SPARE_TOKENS = 20
"""Tokens kept in reserve beyond what running requests had generated at a preemption."""
DECAY = 0.98
"""Decay of the ratio with each running request that ends without an error."""


class NewTokenEstimate:
    """Adaptive share of `max_tokens` that requests are expected to generate.

    The share begins at 0: nothing is kept back. A preemption shows that too many requests were
    admitted: the share rises to what the running requests have generated of what they may, and a
    little more. Each running request that ends without an error lets it decay. The rule is SGLang's
    `new_token_ratio`.
    """

    def __init__(self) -> None:
        self.ratio = 0.0

    def expected_tokens(self, requests: Iterable[Request]) -> int:
        if not self.ratio:
            return 0
        left = sum(
            max(0, min(request.max_tokens, MAX_EXPECTED_TOKENS) - request.num_generated)
            for request in requests
            if request.draws
        )
        return int(left * self.ratio)

    def on_preemption(self, running: Iterable[Request]) -> None:
        generated = allowed = 0
        for request in running:
            generated += request.num_generated + SPARE_TOKENS
            allowed += min(request.max_tokens, MAX_EXPECTED_TOKENS)
        if allowed:
            self.ratio = max(self.ratio, min(1.0, generated / allowed))

    def on_success(self) -> None:
        self.ratio *= DECAY
