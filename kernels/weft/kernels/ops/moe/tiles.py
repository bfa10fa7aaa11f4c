"""Tile sizes for products of sorted experts, from tables that bench/tune_moe.py measures."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import triton

_TABLE = Path(__file__).with_name("tiles.json")


class Tile(NamedTuple):
    """The tile of one program, and how it iterates over K."""

    columns: int
    depth: int
    """Elements of K taken at once."""
    warps: int
    stages: int
    """Tiles that are being loaded."""


class Tiles(NamedTuple):
    """The tiles of both products of a mixture of experts."""

    rows: int
    """Pairs of a block."""
    up: Tile
    """For gate and up; `columns` counts the columns of each."""
    down: Tile
    is_rounded: bool = False
    """Whether `triton_rounded` computes the products, from rows in FP8."""


FIXED_FP8 = Tiles(32, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))
"""For FP8 weights in deterministic mode, whatever the number of pairs. For larger blocks
`multiply_sorted` rounds rows to FP8, so that a row's result would depend on its batch.
"""


_MAX_ROUNDED_PAIRS = 20
"""Average pairs of an expert up to which `rounded_tiles` are used."""


def tiles_for(rows: int, top_k: int, experts: int, hidden: int, width: int) -> Tiles:
    """The tiles measured to be fastest for the nearest number of rows, T; for other shapes a
    default. `hidden` is H, `width` is I.
    """
    measured = _tables().get((top_k, experts, hidden, width))
    if measured is None:
        return default_tiles(rows * top_k, experts)
    nearest = min(measured, key=lambda known: abs(_octave(known) - _octave(rows)))
    return measured[nearest]


def default_tiles(pairs: int, experts: int) -> Tiles:
    """Default tiles for the average number of pairs per expert."""
    rows = min(128, max(16, triton.next_power_of_2(triton.cdiv(pairs, experts))))
    tile = Tile(64, 128, 4, 4) if rows <= 32 else Tile(128, 64, 8 if rows == 128 else 4, 3)
    return Tiles(rows, tile, tile)


def fp8_tiles(pairs: int, experts: int) -> Tiles:
    """Tiles for FP8 weights in blocks and rows in 16-bit floats, by the average number of pairs of
    an expert. bench/notes/ranks.md and bench/notes/gpu-steps.md have the measurements.
    """
    average = triton.cdiv(pairs, experts)
    if average <= 12:
        return Tiles(16, Tile(64, 128, 4, 4), Tile(128, 128, 4, 3))
    if average <= 64:
        return Tiles(64, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))
    return Tiles(128, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))


def rounded_tiles(pairs: int, experts: int) -> Tiles | None:
    """Tiles for few FP8 pairs of an expert, whose rows are rounded (`triton_rounded`), by their
    average number; None: those of `fp8_tiles` are faster.
    """
    average = triton.cdiv(pairs, experts)
    if average > _MAX_ROUNDED_PAIRS:
        return None
    # An expert rarely has twice the average, so most have one block.
    rows, warps = (16, 4) if average <= 9 else (32, 8)
    return Tiles(rows, Tile(128, 128, warps, 3), Tile(128, 128, warps, 4), is_rounded=True)


def packed_tiles(pairs: int, experts: int, *, is_plain: bool, is_nvfp4: bool = False) -> Tiles:
    """Tiles for weights of 4 bits in groups, of which only `rows` counts.

    Args:
        is_plain: Without adapters, whose kernels take no fewer than 16 pairs.
        is_nvfp4: Whether the weights are in NVFP4, which is slower in blocks of 8 pairs.
    """
    # Twice the average, since an expert of two blocks has its weights read twice.
    rows = triton.next_power_of_2(2 * triton.cdiv(pairs, experts))
    rows = min(64, max(8 if is_plain and not is_nvfp4 else 16, rows))
    return Tiles(rows, *default_tiles(pairs, experts)[1:])


def as_json(tiles: Tiles) -> dict[str, Any]:
    """An entry of the table."""
    return {"rows": tiles.rows, "up": list(tiles.up), "down": list(tiles.down)}


def _octave(rows: int) -> float:
    return float(rows.bit_length()) + rows / (1 << rows.bit_length())


@functools.cache
def _tables() -> dict[tuple[int, int, int, int], dict[int, Tiles]]:
    """Keys: top_k, experts, hidden and width; then the number of rows."""
    if not _TABLE.is_file():
        return {}
    tables = {}
    for entry in json.loads(_TABLE.read_text())["shapes"]:
        shape = (entry["top_k"], entry["experts"], entry["hidden"], entry["width"])
        tables[shape] = {
            int(rows): Tiles(tiles["rows"], Tile(*tiles["up"]), Tile(*tiles["down"]))
            for rows, tiles in entry["tiles"].items()
        }
    return tables
