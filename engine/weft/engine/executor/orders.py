"""Orders to an executor: work that is no step, on the memory of its devices or about profiles.

An order is a value whose fields are numbers, texts or rows of numbers, so all orders reach other
ranks in one encoding. A new order takes a class in this module and a case in `LocalExecutor.order`.
Writing an adapter's rows is no order: it waits for no step, since no step uses those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from weft.contract.arrays import Int64Array


class CopyPages(NamedTuple):
    """Copies pages of the first group. No page may be both source and destination."""

    sources: Sequence[int]
    destinations: Sequence[int]


class ZeroPages(NamedTuple):
    """Fills pages of the first group with zeros."""

    pages: Sequence[int]


class PoisonPages(NamedTuple):
    """Fills free pages of the first group with NaN, so that reading one is noticed."""

    pages: Sequence[int]


class ZeroPieces(NamedTuple):
    """Fills pieces of a companion with zeros, if they are not written whole before they are read
    anyway.
    """

    companion: int
    """Its number in `CacheLayout.companions`, as in the orders below."""
    pieces: Sequence[int]


class PoisonPieces(NamedTuple):
    """Fills free pieces of a companion with NaN, so that reading one is noticed."""

    companion: int
    pieces: Sequence[int]


class PackPieces(NamedTuple):
    """Copies pieces of a companion into pages of the first group."""

    companion: int
    pieces: Sequence[int]
    into: Sequence[int]
    """The pages."""
    is_each: bool
    """Whether each piece gets an equal share of the pages; else they lie one after another."""


class UnpackPieces(NamedTuple):
    """Copies pieces of a companion out of the pages where `PackPieces` put them."""

    companion: int
    pieces: Sequence[int]
    out_of: Sequence[int]
    is_each: bool


class EncodeMedia(NamedTuple):
    """Runs the model's encoder on media, and keeps the rows that it makes. Several ranks divide the
    media among them, so each of them needs this order.
    """

    rows: Sequence[int]
    """The place of each row in the memory of media, medium after medium."""
    shapes: Sequence[int]
    """[height, width, 3] of each medium, one after another."""
    data: bytes
    """uint8, one medium after another."""


class PackRows(NamedTuple):
    """Copies rows of media, which all ranks have alike, end to end into pages."""

    rows: Sequence[int]
    """Places in the memory of media."""
    pages: Sequence[int]


class UnpackRows(NamedTuple):
    """Copies rows of media out of the pages where `PackRows` put them. One rank reads the pages, so
    each of them needs this order.
    """

    rows: Sequence[int]
    pages: Sequence[int]


class ShiftRotations(NamedTuple):
    """Sets what is added to the positions of a slot's rows for their rotations. The rows of images
    and those before them bring their own (`StepInput.turned`).
    """

    slot: int
    shift: int


class KeepTokens(NamedTuple):
    """Makes these the last tokens of their slots, in place of those that were drawn."""

    slots: Sequence[int]
    tokens: Sequence[int]


class PrepareProfile(NamedTuple):
    """Gets ready to record steps, in the background: on a GPU that may take seconds."""

    host: bool
    """Record PyTorch's operations on the host."""
    device: bool
    """Record kernels and copies of a GPU."""


class StartProfile(NamedTuple):
    """Records what follows. Waits until that is prepared."""


class StopProfile(NamedTuple):
    """Ends the recording and writes it to a file `rank-N.json` in the background."""

    folder: str


class RefitFromFolder(NamedTuple):
    """Changes the weights to those in a folder, in the background. No step may begin until it has
    ended.
    """

    folder: str


class JoinWeightGroup(NamedTuple):
    """Joins a trainer's process group, in the background."""

    group: str
    """A `WeightGroup` in JSON."""


class LeaveWeightGroup(NamedTuple):
    name: str


class ReceiveWeights(NamedTuple):
    """Receives tensors of an update, in the background, and begins it if none is under way. No step
    may begin until it has ended.
    """

    group: str
    tensors: str
    """From `encode_tensors`."""
    packed_bytes: int
    """As in `WeightGroup`; -1: as the group's."""
    ends: bool
    """Whether the update ends with the last of the model's tensors."""


class EndRefit(NamedTuple):
    """Ends an update in the background."""

    is_given_up: bool = False


class OfferWeights(NamedTuple):
    """Registers the packed weights for other workers, and describes them, in the background."""

    version: bytes
    """The model's digest."""


class CopyWeights(NamedTuple):
    """Copies the packed weights of another worker, in the background. No step may begin until it
    has ended.
    """

    offer: str
    """A `WeightOffer` in JSON."""


class Sleep(NamedTuple):
    """Gives memory back to the system, in the background. No step may begin until it is back."""

    weights: bool
    pages: bool
    keeps_weights: bool
    """Whether the weights are put away in another memory; otherwise they are dropped."""


class Wake(NamedTuple):
    """Takes that memory again, in the background."""

    weights: bool
    pages: bool


class SendExperts(NamedTuple):
    """Copies a layer's experts for other ranks into memory of all ranks, in the background."""

    layer: int
    old: Sequence[int]
    new: Sequence[int]
    """`Placement.numbers`, as they are and as they are to be."""


class TakeExperts(NamedTuple):
    """Copies a layer's experts of other ranks out of the memory of all ranks, in the background."""

    layer: int
    old: Sequence[int]
    new: Sequence[int]
    digests: str
    """Pairs of a place in the memory and a digest, in JSON."""


class PlaceExperts(NamedTuple):
    """Puts the experts that were taken in their places."""

    layer: int
    new: Sequence[int]


class DropExperts(NamedTuple):
    """Forgets experts that were taken."""


PageOrder: TypeAlias = (
    CopyPages
    | ZeroPages
    | PoisonPages
    | ZeroPieces
    | PoisonPieces
    | PackPieces
    | UnpackPieces
    | PackRows
)
"""Orders on pages and pieces. Ranks that share their pages need one of them to do these."""
Order: TypeAlias = (
    PageOrder
    | EncodeMedia
    | UnpackRows
    | ShiftRotations
    | KeepTokens
    | PrepareProfile
    | StartProfile
    | StopProfile
    | RefitFromFolder
    | JoinWeightGroup
    | LeaveWeightGroup
    | ReceiveWeights
    | EndRefit
    | OfferWeights
    | CopyWeights
    | Sleep
    | Wake
    | SendExperts
    | TakeExperts
    | PlaceExperts
    | DropExperts
)
"""Every order. A follower of rank 0 knows an order by its place in this union."""

_KINDS: tuple[type[Order], ...] = get_args(Order)
_READERS: Mapping[object, Callable[[NDArray[Any]], object]] = {
    int: lambda row: int(row[0]),
    bool: lambda row: bool(row[0]),
    str: lambda row: row.tobytes().decode(),
    bytes: lambda row: row.tobytes(),
    Sequence[int]: lambda row: row.tolist(),
}
"""Makes a field of each type out of its numbers, or of its bytes."""
_WORD_BYTES = 8


def encode_order(order: Order) -> Int64Array:
    """The number of the order's class, the lengths of its fields, and the fields. Texts and bytes
    lie in whole numbers, and their lengths are in bytes.
    """
    lengths, fields = list[int](), list[Int64Array]()
    for value in order:
        if isinstance(value, str | bytes):
            data = value.encode() if isinstance(value, str) else value
            lengths.append(len(data))
            fields.append(np.frombuffer(data + bytes(-len(data) % _WORD_BYTES), np.int64))
        else:
            row = np.array([value] if isinstance(value, int) else value, np.int64)
            lengths.append(len(row))
            fields.append(row)
    return np.concatenate([np.array([_KINDS.index(type(order)), *lengths], np.int64), *fields])


@cache
def _types_of(kind: Callable[..., Order]) -> Sequence[object]:
    return list(get_type_hints(kind).values())


def decode_order(numbers: Int64Array) -> Order:
    kind: Callable[..., Order] = _KINDS[numbers[0]]
    types = _types_of(kind)
    values = list[object]()
    at = 1 + len(types)
    for of, length in zip(types, numbers[1:at].tolist(), strict=True):
        is_data = of in (str, bytes)
        end = at + (-(-length // _WORD_BYTES) if is_data else length)
        row = numbers[at:end].view(np.uint8)[:length] if is_data else numbers[at:end]
        values.append(_READERS[of](row))
        at = end
    return kind(*values)
