"""`weft fault` against a mesh that runs."""

from __future__ import annotations

import asyncio

import pytest
from weft.cli.main import main
from weft.testing.meshes.chaos_mesh import Chaos

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.needs("nixl"),
    pytest.mark.timeout(300),
]


async def test_faults_are_armed_shown_and_cleared(
    chaos: Chaos, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state-dir", str(chaos.mesh.logs.parent)]

    async def weft_fault(*arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, ["fault", *arguments])
        return status, *capsys.readouterr()

    service = ["--service", "prefill-0", *state]
    status, out, _ = await weft_fault("add", "ship.post", "drop", "--count", "7", *service)
    assert (status, out) == (0, "prefill-0: armed\n")
    status, out, _ = await weft_fault("list", *state)
    assert status == 0
    (line,) = [line.split() for line in out.splitlines() if "ship.post" in line]
    assert line == ["prefill-0", "ship.post", "drop", "1", "0", "0", "7"]
    status, out, _ = await weft_fault("clear", *service)
    assert (status, out) == (0, "prefill-0: 1 faults cleared\n")
    assert (await weft_fault("list", *state))[1] == "no fault is armed\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["add", "ship.pots", "drop"], "no fault point 'ship.pots'"),
        (["add", "ship.post", "corrupt"], "ship.post knows"),
        (["add", "ship.post", "drop", "--probability", "2"], "probability"),
        (["list", "--service", "decode-7"], "no service decode-7"),
    ],
)
async def test_what_cannot_be_done_is_said(
    chaos: Chaos, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    given = ["fault", *arguments, "--state-dir", str(chaos.mesh.logs.parent)]
    assert await asyncio.to_thread(main, given) == 1
    assert problem in capsys.readouterr().err
