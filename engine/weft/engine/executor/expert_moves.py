"""Puts experts on other ranks while steps run.

    send   each rank copies the experts that others are to get into memory of all ranks, in a thread
    take   each rank copies those that it is to get out of there, and compares their digests, in a
           thread
    place  between two steps, on all ranks: weights and table of a layer change together

Nothing of a layer is changed before all ranks have what they need. A layer that failed keeps its
placement.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from weft.contract.errors import ConfigError, Internal, ModelError
from weft.engine.base.device_copies import on_stream, sent
from weft.engine.executor.rank_jobs import Combine, RankJobs, RankResult, of_one_rank
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.layers.plain_moe import PlainSparseMLP
from weft.engine.model.weights.refill import parts_of_kind
from weft.engine.parallel.expert_places import Move, Placement
from weft.kernels.ops.moe.places import can_move, form_at, tensors_at
from weft.kernels.ops.moe.spec import ExpertWeights
from weft.kernels.ops.page_digest import page_digests
from weft.kernels.ops.plain_experts.spec import PlainExperts

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16
_ALIGNED = 64
_WORD_BYTES, _WORD = 8, (1 << 64) - 1


class _Layer(NamedTuple):
    weights: ExpertWeights | PlainExperts
    table: torch.Tensor
    """The memory of `ExpertWeights.placement`, which a move overwrites."""
    num_places: int
    num_bytes: int
    """Of an expert in the memory of all ranks."""


class _Taken(NamedTuple):
    layer: int
    places: Sequence[tuple[int, list[torch.Tensor]]]
    """Places of this rank, and the tensors that they get."""


class ExpertMoves:
    """The experts of one rank. Belongs to the thread that runs its steps; one job at a time.

    Args:
        model: Of a process that has a share of each layer's experts.
        num_layers: Layers whose experts may move; those of a head that predicts further tokens
            stay.
        num_ranks: Ranks among which the experts are divided.
    """

    def __init__(
        self,
        model: object,
        num_layers: int,
        rank: int,
        num_ranks: int,
        device: torch.device,
        combine: Combine = of_one_rank,
    ) -> None:
        self.jobs = RankJobs("experts", device, combine)
        self._rank, self._num_ranks, self._device = rank, num_ranks, device
        self._layers: Mapping[int, _Layer] = {
            part.layer: _layer_of(part)
            for part in parts_of_kind(model, _KINDS)
            if part.layer < num_layers
        }
        self._memory: torch.Tensor | None = None
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._taken: _Taken | None = None

    @property
    def layers(self) -> Sequence[int]:
        """Numbers of the layers with experts, ascending."""
        return sorted(self._layers)

    @property
    def num_places(self) -> int:
        """Places of this rank in each layer."""
        return next(iter(self._layers.values())).num_places

    @property
    def memory_bytes(self) -> int:
        """Memory that all ranks need together, for the moves of one layer."""
        most = max((one.num_bytes * one.num_places for one in self._layers.values()), default=0)
        return most * self._num_ranks

    def form(self) -> str:
        """What all ranks must have in common, in words."""
        forms = (form_at(one.weights, 0) for one in self._layers.values())
        digest = hashlib.blake2b("\n".join(forms).encode(), digest_size=_DIGEST_BYTES)
        return digest.hexdigest()

    def use(self, memory: torch.Tensor) -> None:
        """Sends through this memory of all ranks, [memory_bytes] uint8."""
        self._memory = memory

    def send(self, layer: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Begins to send the experts of this rank that others get.

        Args:
            old, new: `Placement.numbers`.
        """
        self._begin(lambda: self._send(layer, *self._moves(layer, old, new)))

    def take(self, layer: int, old: Sequence[int], new: Sequence[int], digests: str) -> None:
        """Begins to take the experts that this rank gets, with the digests of all experts that were
        sent, from `send`.
        """
        found = {int(number): text for number, text in json.loads(digests)}
        self._begin(lambda: self._take(layer, self._moves(layer, old, new)[1], found))

    def drop(self) -> None:
        """Forgets what was taken."""
        self._taken = None

    def place(self, layer: int, new: Sequence[int]) -> None:
        """Changes a layer's weights and its table, between two steps."""
        own, taken = self._layers[layer], self._taken
        assert taken is not None, "nothing was taken"
        assert taken.layer == layer, "another layer was taken"
        self._taken = None
        table = self._placement(layer, new).table(self._rank)
        with torch.inference_mode():
            for place, tensors in taken.places:
                for to, tensor in zip(tensors_at(own.weights, place), tensors, strict=True):
                    to.copy_(tensor)
                    if self._stream is not None:
                        # Else the jobs' stream could reuse its memory before it is copied.
                        tensor.record_stream(torch.cuda.current_stream(self._device))
            own.table.copy_(sent(table if own.table.dim() == 2 else table[0], self._device))

    # -- jobs, each in a thread of its own ---------------------------------------------------------

    def _begin(self, job: Callable[[], RankResult]) -> None:
        if self._stream is not None:
            # The steps' stream may still have to write what `place` has put in place.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.jobs.begin(lambda: self._outcome(job))

    def _outcome(self, job: Callable[[], RankResult]) -> RankResult:
        try:
            with on_stream(self._stream):
                result = job()
                if self._stream is not None:
                    self._stream.synchronize()
                return result
        except ModelError as error:
            return RankResult(problem=error.message, reason=error.reason)
        except Exception as error:
            logger.exception("experts were not moved")
            problem = f"{type(error).__name__}: {error}"
            return RankResult(problem=problem, reason=Internal.reason)

    def _placement(self, layer: int, numbers: Sequence[int]) -> Placement:
        num_experts = self._layers[layer].table.shape[-1]
        return Placement.of_numbers(numbers, num_experts, self._num_ranks)

    def _moves(
        self, layer: int, old: Sequence[int], new: Sequence[int]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, Move]]]:
        """Pairs of a room's number in the memory and the place whose expert this rank sends there,
        and pairs of a room's number and a move to this rank.
        """
        before = self._placement(layer, old)
        moves = self._placement(layer, new).moves_from(before)
        number_of = {expert: at for at, expert in enumerate(sorted({m.expert for m in moves}))}
        holders = before.holders()
        sends = [
            (at, before.places[self._rank].index(expert))
            for expert, at in number_of.items()
            if holders[expert][0] == self._rank
        ]
        return sends, [(number_of[move.expert], move) for move in moves if move.rank == self._rank]

    def _room(self, layer: int, number: int) -> torch.Tensor:
        assert self._memory is not None, "all ranks share memory"
        size = self._layers[layer].num_bytes
        return self._memory[number * size : (number + 1) * size]

    def _send(self, layer: int, sends: Sequence[tuple[int, int]], _: object = None) -> RankResult:
        digests = list[tuple[int, str]]()
        with torch.inference_mode():
            for number, place in sends:
                tensors = tensors_at(self._layers[layer].weights, place)
                for room, tensor in _parts(self._room(layer, number), tensors):
                    room.copy_(_bytes(tensor))
                digests.append((number, _digest(tensors)))
        return RankResult(offer=json.dumps(digests))

    def _take(
        self, layer: int, takes: Sequence[tuple[int, Move]], digests: Mapping[int, str]
    ) -> RankResult:
        taken = list[tuple[int, list[torch.Tensor]]]()
        with torch.inference_mode():
            for number, move in takes:
                like = tensors_at(self._layers[layer].weights, move.place)
                tensors = [torch.empty_like(tensor) for tensor in like]
                for room, tensor in _parts(self._room(layer, number), tensors):
                    _bytes(tensor).copy_(room)
                if _digest(tensors) != digests[number]:
                    raise ModelError(
                        f"layer {layer}: expert {move.expert} came damaged to rank {self._rank}"
                    )
                taken.append((move.place, tensors))
        self._taken = _Taken(layer, taken)
        return RankResult()


_KINDS = SparseMLP, PlainSparseMLP


def _layer_of(part: SparseMLP | PlainSparseMLP) -> _Layer:
    weights = part.weight.experts if isinstance(part, SparseMLP) else part.experts
    assert weights.placement is not None, "this process has a share of the experts"
    if not can_move(weights):
        raise ConfigError(
            f"layer {part.layer}: experts that oneDNN has packed cannot be moved; take dtype = "
            "float32, a host with a C compiler, or no balance_experts",
            param="balance_experts",
        )
    num_places = _num_places(weights)
    forms = {form_at(weights, place) for place in range(num_places)}
    if len(forms) > 1:
        raise ConfigError(
            f"layer {part.layer}: its experts are of several forms ({'; '.join(sorted(forms))}) "
            "and cannot take each other's place; leave balance_experts off",
            param="balance_experts",
        )
    sizes = (-(-_size(tensor) // _ALIGNED) * _ALIGNED for tensor in tensors_at(weights, 0))
    return _Layer(weights, weights.placement, num_places, sum(sizes))


def _num_places(weights: ExpertWeights | PlainExperts) -> int:
    if isinstance(weights, ExpertWeights):
        return weights.num_experts
    return len(weights.up) if weights.stacked is None else weights.stacked[0].shape[0]


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _parts(
    room: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found, begin = [], 0
    for tensor in tensors:
        size = _size(tensor)
        found.append((room[begin : begin + size], tensor))
        begin += -(-size // _ALIGNED) * _ALIGNED
    return found


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    if tensors[0].is_cuda:
        return digest_there(tensors)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in tensors:
        numbers: Any = _bytes(tensor).cpu().numpy()
        digest.update(memoryview(numbers))
    return digest.hexdigest()


def digest_there(tensors: Sequence[torch.Tensor]) -> str:
    """A digest that the tensors' device computes: the host takes 10 ms for 10 MB."""
    words, first = list[torch.Tensor](), torch.zeros(1, dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        found = _bytes(tensor)
        if found.numel() % _WORD_BYTES or found.storage_offset() % _WORD_BYTES:
            found = torch.nn.functional.pad(found, (0, -found.numel() % _WORD_BYTES))
        words.append(page_digests(found.view(1, -1), first))
    return "".join(f"{number & _WORD:016x}" for number in torch.cat(words).tolist())
