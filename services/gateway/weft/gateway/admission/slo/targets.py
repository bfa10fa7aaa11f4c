"""Latency targets of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_TARGET_S = 0.001
MAX_TARGET_S = 3600.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets in seconds; None: no target."""

    first_token_s: float | None = None
    """Time from the request's arrival at the gateway to its first token."""
    between_tokens_s: float | None = None
    """Mean time between its tokens, after the first."""
    granted: Targets | None = field(default=None, compare=False, repr=False)
    """Targets that the request would have by its tenant; None: the same as its own."""

    @property
    def pace_s(self) -> float | None:
        """Time between tokens for the sake of which other requests may be held. A client's own
        tighter target does not count, only the tenant's.
        """
        if self.granted is None:
            return self.between_tokens_s
        granted_s = self.granted.between_tokens_s
        return None if granted_s is None else max(granted_s, self.between_tokens_s or 0.0)

    def __bool__(self) -> bool:
        return self.first_token_s is not None or self.between_tokens_s is not None

    def over(self, other: Targets) -> Targets:
        """These targets, completed by the other's."""
        return Targets(
            other.first_token_s if self.first_token_s is None else self.first_token_s,
            other.between_tokens_s if self.between_tokens_s is None else self.between_tokens_s,
            other,
        )

    def outcome(self, first_token_s: float | None, between_tokens_s: float | None) -> str:
        """Outcome of an answered request.

        Args:
            first_token_s: Measured time to the first token; None: there was no token.
            between_tokens_s: Measured mean time between tokens; None: there were fewer than two.

        Returns:
            met, late_first_token or slow_tokens.
        """
        target_s = self.first_token_s
        if target_s is not None and (first_token_s is None or first_token_s > target_s):
            return "late_first_token"
        target_s = self.between_tokens_s
        if target_s is not None and between_tokens_s is not None and between_tokens_s > target_s:
            return "slow_tokens"
        return "met"


NO_TARGETS = Targets()
