"""Which rank has which experts of a layer, and how that is chosen from counts. Numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from weft.contract.arrays import Int64Array
from weft.kernels.ops.moe.spec import CYCLES

UNUSED = -1
"""The expert of a place whose weights no row takes."""
READ_ROWS = {"cpu": 10.0, "cuda": 128.0}
"""Rows whose products take as long as reading an expert's weights, by kind of device. Measured on a
CPU (10 for 512 and 768 columns in float32), calculated for an H200.
"""
_LEAST_GAIN = 0.02
"""Share of the most loaded rank's work that a new placement must save."""

Floats: TypeAlias = NDArray[np.float64]


class ExpertLoad(NamedTuple):
    """What was counted of one layer."""

    rows: Int64Array
    """[E]: rows that chose each expert."""
    steps: Int64Array
    """[E]: steps in which some row did."""


class Move(NamedTuple):
    expert: int
    rank: int
    place: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts of all ranks in one layer. An expert has at most one place on a rank."""

    places: tuple[tuple[int, ...], ...]
    """[ranks][places of a rank]: the expert in each place, or `UNUSED`."""
    num_experts: int

    @classmethod
    def first(cls, num_experts: int, ranks: int, spares: int) -> Placement:
        """Equal shares in order, as a model is loaded. Nobody uses the spare places."""
        share = num_experts // ranks
        own = (range(rank * share, (rank + 1) * share) for rank in range(ranks))
        return cls(tuple((*each, *[UNUSED] * spares) for each in own), num_experts)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], num_experts: int, ranks: int) -> Placement:
        """Out of `numbers`."""
        each = len(numbers) // ranks
        rows = (tuple(numbers[rank * each : (rank + 1) * each]) for rank in range(ranks))
        return cls(tuple(rows), num_experts)

    @property
    def numbers(self) -> list[int]:
        return [expert for own in self.places for expert in own]

    def holders(self) -> list[list[int]]:
        """The ranks that have each expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, own in enumerate(self.places):
            for expert in own:
                if expert != UNUSED:
                    found[expert].append(rank)
        return found

    def table(self, rank: int) -> NDArray[np.int32]:
        """[`CYCLES`, E]: each expert's place on this rank for rows of each number modulo `CYCLES`,
        or the number of places where another rank takes it. The copies of an expert take turns.
        """
        own = self.places[rank]
        found = np.full((CYCLES, self.num_experts), len(own), np.int32)
        holders, cycle = self.holders(), np.arange(CYCLES)
        for place, expert in enumerate(own):
            if expert != UNUSED:
                ranks = np.array(holders[expert])
                found[ranks[(cycle + expert) % len(ranks)] == rank, expert] = place
        return found

    def loads(self, load: ExpertLoad, read_rows: float) -> Floats:
        """[ranks]: the work of each rank, in rows."""
        found, holders = np.zeros(len(self.places)), self.holders()
        for expert, ranks in enumerate(holders):
            found[ranks] += _work(load, expert, len(ranks), read_rows)
        return found

    def imbalance(self, load: ExpertLoad, read_rows: float) -> float:
        """The most loaded rank's work over the mean; 1 without work."""
        found = self.loads(load, read_rows)
        return float(found.max() / found.mean()) if found.any() else 1.0

    def moves_from(self, old: Placement) -> list[Move]:
        """The places that get another expert's weights."""
        return [
            Move(expert, rank, place)
            for rank, own in enumerate(self.places)
            for place, expert in enumerate(own)
            if expert not in (UNUSED, old.places[rank][place])
        ]


def _work(load: ExpertLoad, expert: int, copies: int, read_rows: float) -> float:
    rows = int(load.rows[expert]) / copies
    return rows + read_rows * min(int(load.steps[expert]), rows)


def balanced(old: Placement, load: ExpertLoad, read_rows: float) -> Placement:
    """A placement under which ranks have equal work, or `old` if that is nearly as good.

    Experts are copied and packed as in DeepSeek's expert parallelism load balancer
    (github.com/deepseek-ai/EPLB): the expert with most rows a copy gets the next copy, and copies,
    heaviest first, go to the rank with the least work that has room. Different numbers of copies
    are tried, since each copy reads its weights.
    """
    ranks, size = len(old.places), len(old.places[0])
    free = ranks * size - old.num_experts
    before = best = float(old.loads(load, read_rows).max())
    chosen: list[list[int]] | None = None
    for extra in sorted({0, free, *(1 << n for n in range(free.bit_length()) if 1 << n < free)}):
        copies = _copies(load.rows, extra, ranks)
        packs = _packed(load, copies, ranks, size, read_rows)
        if packs is None:
            continue
        places = tuple(tuple(own) for own in packs)
        most = float(Placement(places, old.num_experts).loads(load, read_rows).max())
        if most < best:
            best, chosen = most, packs
    if chosen is None or best > before * (1 - _LEAST_GAIN):
        return old
    return settled(chosen, old)


def _copies(rows: Int64Array, extra: int, most: int) -> Int64Array:
    """[E]: copies of each expert, of which there are `extra` beyond one each, at most `most`."""
    copies = np.ones(len(rows), np.int64)
    for _ in range(extra):
        each = np.where(copies < most, rows / copies, -1.0)
        expert = int(each.argmax())
        if each[expert] <= 0:
            break
        copies[expert] += 1
    return copies


def _packed(
    load: ExpertLoad, copies: Int64Array, ranks: int, size: int, read_rows: float
) -> list[list[int]] | None:
    """[ranks]: experts, at most `size` a rank; None: copies of one would meet on a rank."""
    work = [_work(load, expert, int(n), read_rows) for expert, n in enumerate(copies)]
    # Experts with several copies come first, while several ranks have room.
    order = sorted(range(len(work)), key=lambda expert: (copies[expert] == 1, -work[expert]))
    packs, sums = [list[int]() for _ in range(ranks)], [0.0] * ranks
    for expert in order:
        open_ranks = [rank for rank in range(ranks) if len(packs[rank]) < size]
        if len(open_ranks) < copies[expert]:
            return None
        for rank in sorted(open_ranks, key=sums.__getitem__)[: copies[expert]]:
            packs[rank].append(expert)
            sums[rank] += work[expert]
    return packs


def settled(packs: Sequence[Sequence[int]], old: Placement) -> Placement:
    """Gives each set of experts the rank that has most of them, and each expert that stays its
    place.
    """
    ranks, size = len(old.places), len(old.places[0])
    kept = [[len(set(pack) & set(own)) for pack in packs] for own in old.places]
    pairs = sorted((-kept[r][p], r, p) for r in range(ranks) for p in range(ranks))
    pack_of, taken = dict[int, int](), set[int]()
    for _, rank, pack in pairs:
        if rank not in pack_of and pack not in taken:
            pack_of[rank] = pack
            taken.add(pack)
    places = []
    for rank, before in enumerate(old.places):
        wanted = set(packs[pack_of[rank]])
        own = [expert if expert in wanted else UNUSED for expert in before]
        coming = sorted(wanted - set(own))
        # Places that nobody uses come first: what they have may still be read.
        free = sorted(
            (place for place in range(size) if own[place] == UNUSED),
            key=lambda place: before[place] != UNUSED,
        )
        for place, expert in zip(free, coming, strict=False):
            own[place] = expert
        places.append(tuple(own))
    return Placement(tuple(places), old.num_experts)
