"""`weft top` against a gateway with scripted workers, on a terminal and for scripts."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from weft.cli.main import main
from weft.common.mesh import NOT_ASKED
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import gateway
from weft.testing.services.terminal import Terminal
from weft.v1 import decode_pb2, mesh_pb2, mesh_pb2_grpc

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


async def test_one_picture_comes_although_the_stream_ends_early(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waiting = mesh_pb2.MeshMember(
        member_id="store-0", role=mesh_pb2.MEMBER_ROLE_KVSTORE, problem=NOT_ASKED
    )
    messages = [
        mesh_pb2.WatchMeshResponse(members=[waiting], points=[mesh_pb2.MeshPoint()])
        for _ in range(2)
    ]
    intervals_s = set()

    class Ending(mesh_pb2_grpc.MeshServiceServicer):
        async def WatchMesh(self, request: Any, context: Any) -> Any:
            intervals_s.add(request.interval.ToNanoseconds() / 1e9)
            for message in messages:
                yield message

    server = grpc.aio.server()
    mesh_pb2_grpc.add_MeshServiceServicer_to_server(Ending(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    flags = ["top", "--address", address, "--once", "--json", "--interval", "60"]
    try:
        assert await asyncio.to_thread(main, flags) == 0
        found = json.loads(capsys.readouterr().out)
        assert [member["member_id"] for member in found["members"]] == ["store-0"]
        assert len(found["points"]) == 2
        messages.clear()
        assert await asyncio.to_thread(main, flags) == 1
        assert "ended the stream without a picture" in capsys.readouterr().err
    finally:
        await server.stop(None)
    assert intervals_s == {0.5}
