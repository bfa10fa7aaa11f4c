"""Debian's Chromium, headless, on the console."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright, expect

_CHROMIUM = "/usr/bin/chromium"
TIMEOUT_MS = 30_000
expect.set_options(timeout=TIMEOUT_MS)
SHOTS = os.environ.get("WEFT_SCREENSHOTS")
"""Folder that screenshots are kept in; None: the test's own."""


class Console:
    """A page of the console, and everything that went wrong in it."""

    def __init__(self, page: Page, url: str, folder: Path) -> None:
        self.page = page
        self.url = url
        self._folder = Path(SHOTS) if SHOTS else folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", self._on_message)
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))

    def _on_message(self, message: Any) -> None:
        # What the browser itself says of refused calls, which tests provoke.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.problems.append(f"console: {message.text}")

    async def open(self, *, key: str = "", token: str = "") -> None:
        """Opens the console, with keys as if they had been given in this tab before."""
        await self.page.add_init_script(
            f"sessionStorage.setItem('weft-api-key', {key!r});"
            f"sessionStorage.setItem('weft-operators-token', {token!r})"
        )
        await self.page.goto(f"{self.url}/console")

    async def live(self) -> None:
        """Returns once the stream has come."""
        await expect(self.page.locator("#connection")).to_have_text("live", timeout=TIMEOUT_MS)

    async def view(self, name: str) -> Any:
        """Changes to a view, by its link; its section."""
        await self.page.get_by_role("link", name=name, exact=True).click()
        section = self.page.locator(f"#view-{name.lower()}")
        await expect(section).to_be_visible()
        return section

    async def shoot(self, name: str) -> None:
        """Keeps a screenshot of the whole page."""
        await self.page.wait_for_timeout(400)
        await self.page.screenshot(path=self._folder / f"{name}.png", full_page=True)

    async def said(self, text: str) -> None:
        """Returns once a message with a text has been shown."""
        await expect(self.page.locator("#toasts")).to_contain_text(text, timeout=TIMEOUT_MS)


@asynccontextmanager
async def console(
    url: str, folder: Path, *, width: int = 1440, height: int = 900, **context: Any
) -> AsyncIterator[Console]:
    """Starts the browser; nothing may have gone wrong in the page by the end."""
    async with async_playwright() as driver:
        # Tests may run as root, where Chromium has no sandbox of its own.
        browser = await driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": height}, **context)
        page.set_default_timeout(TIMEOUT_MS)
        opened = Console(page, url, folder)
        yield opened
        await browser.close()
    assert not opened.problems
