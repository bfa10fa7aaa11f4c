"""The history of a request and of its fills, and its possible fillers."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.contract.wire import wire

MAX_FILLS = 128
"""Most fills of a timeline that are reported, the newest."""
_MAX_NAME_BYTES = 256
_MAX_FAILURE_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FillCandidate:
    """A possible filler of a request: a prefill worker as the router saw it, or a KV store."""

    worker_id: str
    address: str
    epoch: int
    first_token: int = 0
    """Position at which the pages begin that a KV store holds."""
    match_tokens: int = 0
    """Number of leading tokens that it holds; for a KV store, position where the held pages end."""
    queued_tokens: int = 0
    tokens_per_second: float = field(default=0.0, metadata=wire(low=0.0, clamps=True))
    kind: str = "prefill"
    """Kind of filler: prefill or kvstore."""


@dataclass(slots=True, kw_only=True)
class FillRecord:
    """One fill of a request, for its timeline. Times are seconds since the submit."""

    source: str
    """Kind of filler: prefill or kvstore."""
    worker_id: str = field(metadata=wire(cut_bytes=_MAX_NAME_BYTES))
    transport: str
    start_token: int
    end_token: int
    start_s: float
    end_s: float = 0.0
    accepted_tokens: int = 0
    computed_tokens: int = 0
    bytes: int = 0
    first_write_posted_s: float = 0.0
    last_chunk_computed_s: float = 0.0
    last_write_complete_s: float = 0.0
    announced_s: float = 0.0
    """When the digests of the last chunk were noted."""
    arrived_s: float = 0.0
    """When the arrival of the last chunk's bytes was noted."""
    checked_s: float = 0.0
    """When the last chunk's digests were found to be right."""
    failure: str = field(default="", metadata=wire(cut_bytes=_MAX_FAILURE_BYTES))
    filler_failed: bool = False
    """Whether the filler was at fault: neither declined nor stopped by this owner."""
    lease_id: str = ""
    """Lease of the fill, hexadecimal; empty if no filler was asked."""

    @classmethod
    def not_asked(
        cls, candidate: FillCandidate, at_token: int, at_s: float, why: str
    ) -> FillRecord:
        """The record of a candidate that was passed over."""
        return cls(
            source=candidate.kind,
            worker_id=candidate.worker_id,
            transport="",
            start_token=at_token,
            end_token=at_token,
            start_s=at_s,
            end_s=at_s,
            failure=f"not asked: {why}",
        )


@dataclass(slots=True, kw_only=True)
class Timeline:
    """The history of a request. Times are seconds since the submit."""

    submitted_at: float
    """Time of the submit on the engine's clock."""
    admitted_s: float | None = field(default=None, metadata=wire(name="queued_time"))
    matched_tokens: int = 0
    local_prefill_tokens: int = 0
    local_prefill_began_s: float | None = None
    """When this engine planned the first step that computed prompt tokens of the request."""
    fills: list[FillRecord] = field(default_factory=list, metadata=wire(newest=MAX_FILLS))
    first_token_s: float | None = None
    finish_s: float | None = None
    num_steps: int = 0
    num_drafted_tokens: int = 0
    """Number of drafts that were verified."""
    num_accepted_tokens: int = 0
    """Number of drafts that were accepted."""
    num_tree_steps: int = 0
    """Number of steps in which its drafts formed a tree."""
    num_preemptions: int = 0
    remote_cost_s: float | None = None
    local_cost_s: float | None = None
