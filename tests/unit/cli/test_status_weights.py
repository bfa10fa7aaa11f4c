"""What `weft status` says of a worker's weights."""

from __future__ import annotations

import pytest
from weft.cli.status import WorkerStatus, describe_weights


@pytest.mark.parametrize(
    ("version", "state", "text"),
    [
        ("", "", ""),
        ("step-3", "", "weights step-3"),
        ("", "keep", "paused by a trainer (keep)"),
        ("step-3", "updating", "weights step-3, weights are being changed"),
        ("", "failed", "no version of the weights"),
    ],
)
def test_versions_and_pauses_are_told(version: str, state: str, text: str) -> None:
    worker = WorkerStatus(
        worker_id="decode-0",
        role="decode",
        address="",
        healthy=True,
        weight_version=version,
        weight_state=state,
    )
    assert describe_weights(worker) == text
