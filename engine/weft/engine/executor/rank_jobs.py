"""Jobs of a rank in threads, while no step runs, and the results of all ranks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import torch
from weft.contract.errors import ConfigError, Internal
from weft.engine.base.device_threads import use_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    digest: bytes = b""
    """The model's new digest; empty: the update failed, or has not ended."""
    problem: str = ""
    reason: str = ""
    """Reason of the error; empty: there was none."""
    is_mixture: bool = False
    """Whether the failed update had begun to write, or weights were dropped for a sleep."""
    offer: str = ""
    """What the rank offers the others, such as a description of its packed weights: an array in
    JSON; of all ranks, their items one after another. Empty: nothing.
    """

    def to_message(self) -> dict[str, object]:
        return asdict(self) | {"digest": self.digest.hex()}

    @classmethod
    def of_message(cls, message: object) -> RankResult:
        """Raises ValueError if that is no message of a result."""
        values: dict[str, Any] = message if isinstance(message, dict) else {}
        kinds = {field.name: type(field.default) for field in fields(cls)} | {"digest": str}
        if {name: type(value) for name, value in values.items()} != kinds:
            raise ValueError("no result of a rank")
        if values["offer"] and not isinstance(json.loads(values["offer"]), list):
            raise ValueError("no offer of a rank")
        return cls(**(values | {"digest": bytes.fromhex(values["digest"])}))


Combine: TypeAlias = Callable[[RankResult], RankResult | None]
"""Waits for the results of all ranks, and joins them with this one's. On a rank that follows it
sends the result to rank 0, and returns None.
"""


def of_one_rank(own: RankResult) -> RankResult:
    """`Combine` of a process without other ranks."""
    return own


class RankJobs:
    """Jobs of one rank, one at a time, each in a thread of its own."""

    def __init__(self, name: str, device: torch.device, combine: Combine) -> None:
        self._name, self._device = name, device
        self._combine = combine
        self._result: RankResult | None = None

    def begin(self, job: Callable[[], RankResult]) -> None:
        """Begins a job, which raises nothing."""
        self._result = None
        threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True).start()

    def take(self) -> RankResult | None:
        """The result of all ranks, once there is one; None: a job runs."""
        result, self._result = self._result, None
        return result

    def _run(self, job: Callable[[], RankResult]) -> None:
        try:
            use_device(self._device)
            self._result = self._combine(job())
        except Exception as error:
            logger.exception("the results of the ranks were not joined")
            problem = f"{type(error).__name__}: {error}"
            self._result = RankResult(problem=problem, reason=Internal.reason, is_mixture=True)


def joined(results: list[RankResult]) -> RankResult:
    """The result of all ranks."""
    failed = [one for one in results if one.reason]
    if failed:
        is_mixture = any(one.is_mixture or one.digest for one in results)
        first = failed[0]
        return RankResult(problem=first.problem, reason=first.reason, is_mixture=is_mixture)
    if len({one.digest for one in results}) > 1:
        problem = "the ranks have read different files"
        return RankResult(problem=problem, reason=ConfigError.reason, is_mixture=True)
    if results[0].offer:
        ranks = [one for result in results for one in json.loads(result.offer)]
        return RankResult(offer=json.dumps(ranks))
    return results[0]
