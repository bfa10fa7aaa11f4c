"""Changes of one rank's weights, in a thread, while no step runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.contract.errors import ConfigError, Internal, WeftError
from weft.engine.model.refit import Refit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitResult:
    digest: bytes = b""
    """The model's new digest; empty: the update failed."""
    problem: str = ""
    reason: str = ""
    """Reason of the error; empty: there was none."""
    is_mixture: bool = False
    """Whether the failed update had begun to write."""


class WeightRefits:
    """Belongs to the thread that runs the steps of one rank. `refit` None: the model's weights
    cannot be changed.
    """

    def __init__(self, refit: Refit | None) -> None:
        self._refit = refit
        self._thread: threading.Thread | None = None
        self._result: RefitResult | None = None
        self.tell: Callable[[RefitResult], None] | None = None
        """Sends the result of a rank that follows; None: this is rank 0."""
        self.hear: Callable[[], list[RefitResult]] = list
        """Waits for the results of all other ranks."""

    @property
    def is_possible(self) -> bool:
        return self._refit is not None

    def begin(self, folder: str) -> None:
        self._result = None
        self._thread = threading.Thread(
            target=self._run, args=(Path(folder),), name="refit", daemon=True
        )
        self._thread.start()

    def take(self) -> RefitResult | None:
        """The result of all ranks, once there is one; None: the update runs."""
        result, self._result = self._result, None
        return result

    def packed_digest(self) -> bytes:
        """32 bytes over this rank's parameters as they lie in memory. Reads all of them."""
        return b"" if self._refit is None else self._refit.packed_digest()

    def _run(self, folder: Path) -> None:
        own = self._update(folder)
        if self.tell is not None:
            self.tell(own)
            return
        self._result = _joined([own, *self.hear()])

    def _update(self, folder: Path) -> RefitResult:
        has_begun = False
        try:
            if self._refit is None:
                raise ConfigError("this model's weights cannot be changed; restart the worker")
            self._refit.check(folder)
            has_begun = True
            return RefitResult(digest=self._refit.from_folder(folder))
        except WeftError as error:
            problem, reason = error.message, error.reason
        except Exception as error:
            logger.exception("the weights were not changed")
            problem, reason = f"{type(error).__name__}: {error}", Internal.reason
        return RefitResult(problem=problem, reason=reason, is_mixture=has_begun)


def _joined(results: list[RefitResult]) -> RefitResult:
    failed = [one for one in results if not one.digest]
    if failed:
        is_mixture = len(failed) < len(results) or any(one.is_mixture for one in failed)
        first = failed[0]
        return RefitResult(problem=first.problem, reason=first.reason, is_mixture=is_mixture)
    if len({one.digest for one in results}) > 1:
        problem = "the ranks have read different files"
        return RefitResult(problem=problem, reason=ConfigError.reason, is_mixture=True)
    return results[0]
