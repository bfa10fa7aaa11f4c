"""Types of numeric arguments, which refuse values out of range."""

from __future__ import annotations

import argparse
from collections.abc import Callable

MAX_DAYS = 36_500
"""Longest lifetime of certificates and keys: a century."""
MAX_SECONDS = 1e6


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """The `type` of an argument: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {low} to {high}, not {text!r}"
            )
        return number

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """The `type` of an argument: a number from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:  # Comparisons with NaN are false.
            raise argparse.ArgumentTypeError(
                f"must be a number from {low:g} to {high:g}, not {text!r}"
            )
        return value

    return parse
