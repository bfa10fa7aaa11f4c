"""`weft top` against a gateway with scripted workers, on a terminal and for scripts."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import gateway
from weft.testing.services.terminal import Terminal
from weft.v1 import decode_pb2

WEFT = (sys.executable, "-m", "weft.cli", "top", "--address")


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script([[1]])


async def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, [*WEFT, *flags], capture_output=True, text=True, timeout=60
    )


async def test_the_screen_follows_the_mesh_and_the_keys(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, num_decode=2) as mesh:
        terminal = Terminal(*WEFT, mesh.app.server.address, "--interval", "0.5")
        try:
            await asyncio.to_thread(terminal.until, " ok")
            await asyncio.to_thread(terminal.until, "s sort: role")
            mesh.workers[0].is_draining = True
            await asyncio.to_thread(terminal.until, "draining")
            terminal.type(b"s")
            await asyncio.to_thread(terminal.until, "s sort: running")
            terminal.forget()
            terminal.resize(120)
            await asyncio.to_thread(terminal.until, "address")
            terminal.type(b"q")
            await asyncio.to_thread(terminal.until, "")
            assert await asyncio.to_thread(terminal.process.wait, 60) == 0
        finally:
            terminal.close()


async def test_scripts_get_one_picture(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, num_decode=2) as mesh:
        address = mesh.app.server.address
        once, found = await asyncio.gather(run(address, "--once"), run(address, "--once", "--json"))
    assert once.returncode == 0, once.stderr
    assert "\x1b" not in once.stdout
    members = json.loads(found.stdout)["members"]
    roles = [member["role"].removeprefix("MEMBER_ROLE_") for member in members]
    assert sorted(roles) == ["DECODE", "DECODE", "GATEWAY"]
    for member in members:
        assert re.search(rf"^{member['member_id']} +ok", once.stdout, re.MULTILINE)
    refused = await run(address, "--once")
    assert refused.returncode == 1
    assert f"no gateway answers at {address}" in refused.stderr
