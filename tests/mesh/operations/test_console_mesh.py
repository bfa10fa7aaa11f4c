"""The console before a whole mesh under load, whose workers die and come back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("playwright", reason="chromium: the package `playwright` is not installed")

from playwright.async_api import expect
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, TinyMesh
from weft.testing.services.browser import console

pytestmark = [
    pytest.mark.needs("go", "nixl", "chromium"),
    pytest.mark.full,
    pytest.mark.timeout(600),
]

STREAMS = 4


@pytest.fixture
def mesh(tmp_path: Path, rest_binary: Path) -> Iterator[TinyMesh]:
    flags = ["--decode", "2", "--prefill", "2", "--kvstore", "1"]
    flags += ["--local-prefill-max-tokens", "0", "--decode-args", PATIENT]
    mesh = TinyMesh(tmp_path, *flags)
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


@asynccontextmanager
async def load(mesh: TinyMesh) -> AsyncIterator[list[str]]:
    """Requests without a pause; yields the ids of those that were answered."""
    ids: list[str] = []

    async def one(client: httpx.AsyncClient) -> None:
        while True:
            prompt = [random.randrange(3, VOCAB) for _ in range(random.choice((80, 300)))]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
            answer = await client.post("/completions", json=body)
            if answer.status_code == 200:
                ids.append(answer.json()["id"])

    async with httpx.AsyncClient(base_url=f"{mesh.url}/v1", timeout=60, trust_env=False) as client:
        tasks = [asyncio.create_task(one(client)) for _ in range(STREAMS)]
        yield ids
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_worker_is_killed_and_drained_under_load(mesh: TinyMesh, tmp_path: Path) -> None:
    token = (mesh.state / "admin-token").read_text().strip()
    async with load(mesh) as ids, console(mesh.url, tmp_path) as shown:
        await shown.open(token=token)
        await shown.live()
        page = shown.page
        fleet = await shown.view("Fleet")
        for name in ("decode-0", "decode-1", "prefill-0", "prefill-1", "kvstore-0"):
            await expect(fleet.locator(".member.good", has_text=name)).to_be_visible()
        for kind in ("requests", "pages", "puts"):
            await expect(fleet.locator(f".flow.{kind}").first).to_be_attached()
        await shown.shoot("live-fleet")
        for view in ("Load", "Models"):
            await shown.view(view)
            await shown.shoot(f"live-{view.lower()}")

        requests = await shown.view("Requests")
        while not ids:
            await asyncio.sleep(0.1)
        await page.evaluate("id => { location.hash = `requests/${id}` }", ids[-1])
        for service in ("gateway", "decode", "prefill"):
            await expect(requests.locator(f".waterfall .bar.{service}").first).to_be_attached()
        await shown.shoot("live-requests")

        fleet = await shown.view("Fleet")
        card = fleet.locator(".member", has_text="decode-1")
        await card.click()
        member = page.get_by_role("dialog", name="decode-1")
        await member.get_by_role("button", name="Drain").click()
        await page.get_by_role("button", name="Drain", exact=True).last.click()
        await shown.said("decode-1 drains")
        await expect(card).to_contain_text("draining")
        await member.get_by_role("button", name="Undrain").click()
        await expect(fleet.locator(".member.good", has_text="decode-1")).to_be_visible()
        for name in ("Flush cache", "Flush"):
            await page.get_by_role("button", name=name, exact=True).last.click()
        await shown.said("pages flushed")
        await member.get_by_label("Log level").select_option("warning")
        await shown.said("decode-1 logs warning")
        await page.keyboard.press("Escape")

        await fleet.locator(".member", has_text="kvstore-0").click()
        store = page.get_by_role("dialog", name="kvstore-0")
        await store.get_by_label("Log level").select_option("debug")
        await shown.said("kvstore-0 logs debug")
        await page.keyboard.press("Escape")

        os.kill(int(mesh.service("decode-0")["engine_pid"]), signal.SIGKILL)
        await expect(fleet.locator(".member.good", has_text="decode-0")).to_have_count(0)
        await shown.shoot("killed-fleet")
        await expect(fleet.locator(".member.good", has_text="decode-0")).to_have_count(
            1, timeout=120_000
        )
        assert len(ids) > 1
