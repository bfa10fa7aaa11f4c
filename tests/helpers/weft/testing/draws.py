"""Draws that are made anew until they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Drawn = TypeVar("Drawn")

MAX_DRAWS = 1000
"""More than any draw needs that fits once in ten times."""


def draw_until(draw: Callable[[], Drawn], fits: Callable[[Drawn], bool]) -> Drawn:
    """Raises AssertionError if none of MAX_DRAWS draws fits."""
    for _ in range(MAX_DRAWS):
        if fits(drawn := draw()):
            return drawn
    raise AssertionError(f"none of {MAX_DRAWS} draws fits")
