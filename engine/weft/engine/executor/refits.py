"""Changes of one rank's weights, in threads, while no step runs."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from weft.contract.errors import ConfigError, GroupFailed, Internal, ModelError, WeftError
from weft.contract.weights import WeightGroup, WeightOffer
from weft.engine.base.device_threads import use_device
from weft.engine.executor.peer_weights import OfferedWeights, PeerWeights
from weft.engine.executor.rank_jobs import Combine, RankJobs, RankResult, of_one_rank
from weft.engine.executor.received import TOGETHER_BYTES, copies, ranges
from weft.engine.executor.shared_tensors import check_lent, opened
from weft.engine.executor.weight_groups import Broadcasts, join
from weft.engine.model.refit import Refit
from weft.engine.model.weights.announced import (
    Announced,
    Handles,
    Layout,
    decode_tensors,
    dtype_of,
    layouts,
)
from weft.engine.model.weights.packed import Origin, PackedTensors
from weft.engine.model.weights.sent import listed

logger = logging.getLogger(__name__)

_Received: TypeAlias = tuple[Sequence[str], Sequence[torch.Tensor]]
"""Names of some of the tensors of a call, and what came."""

AS_GROUP = -1
"""Number of bytes of a broadcast that stands for the group's own."""


class _Update:
    """An update whose tensors come one after another."""

    def __init__(self, refit: Refit, device: torch.device) -> None:
        self._refit = refit
        self.sent = refit.expect()
        self._digest = b""
        self._error: Exception | None = None
        self._device = device
        self._thread = threading.Thread(target=self._run, name="refit-fill", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what the model has against a tensor that came."""
        if self._error is not None:
            raise self._error

    def end(self) -> bytes:
        """The new digest. Raises ModelError if tensors are missing."""
        if lacking := self.sent.lacking:
            raise ModelError(f"the update lacks tensors: {listed(lacking)}", param="names")
        self.sent.complete()
        self._thread.join()
        self.check()
        return self._digest

    def give_up(self, problem: str) -> None:
        self.sent.close(problem)
        self._thread.join()
        self._error = None  # Its traceback has tensors that came.

    def _run(self) -> None:
        try:
            use_device(self._device)
            self._digest = self._refit.from_sent(self.sent)
        except Exception as error:
            self._error = error
        finally:
            self.sent.complete()  # Nobody reads what still comes.


class WeightRefits:
    """Belongs to the thread that runs the steps of one rank. One job at a time: `read`, `join`,
    `receive` and `end` begin one, and `take` has its result.

    Args:
        refit: None: the model's weights cannot be changed.
        packed: The tensors of the model; None: nobody may read them.
        rank: Among the worker's.
        is_in_arena: Whether the weights lie in memory of a GPU that is mapped piece by piece.
    """

    def __init__(
        self,
        refit: Refit | None,
        device: torch.device,
        rank: int = 0,
        *,
        combine: Combine = of_one_rank,
        packed: PackedTensors | None = None,
        is_in_arena: bool = False,
    ) -> None:
        self._refit = refit
        self._device = device
        self._rank = rank
        self.jobs = RankJobs("refit", device, combine)
        problem = "weights that were made to sleep (sleep_host_bytes) cannot be read by others"
        self._packed = packed
        self._offered = OfferedWeights(rank, problem if is_in_arena else "")
        self._groups: dict[str, tuple[WeightGroup, Broadcasts]] = {}
        self._update: _Update | None = None

    @property
    def is_possible(self) -> bool:
        return self._refit is not None

    @property
    def origin(self) -> Origin:
        """What the weights were made from when the process began."""
        return Origin(b"", b"") if self._packed is None else self._packed.origin

    @property
    def groups(self) -> list[str]:
        """Names of the groups that this rank has joined."""
        return list(self._groups)

    def packed_digest(self) -> bytes:
        """32 bytes over this rank's parameters as they lie in memory. Reads all of them."""
        return b"" if self._refit is None else self._refit.packed_digest()

    def read(self, folder: str) -> None:
        """Changes the weights to those in a folder."""
        self._begin(lambda: self._read(Path(folder)))

    def join(self, group: str) -> None:
        """Joins a group, a `WeightGroup` from `encode_group`."""
        self._begin(lambda: self._join(_decode_group(group)))

    def leave(self, name: str) -> None:
        _, member = self._groups.pop(name, (None, None))
        if member is not None:
            member.close()

    def receive(self, group: str, tensors: str, packed_bytes: int, *, ends: bool) -> None:
        """Receives tensors, from `encode_tensors`, for an update that this may begin.

        Args:
            packed_bytes: As in `WeightGroup`; `AS_GROUP`: as the group's.
            ends: Whether the update ends with the last of the model's tensors.
        """
        self._begin(lambda: self._receive(group, tensors, packed_bytes, ends))

    def end(self, *, is_given_up: bool = False) -> None:
        """Ends the update that is under way, if any."""
        self._begin(lambda: self._end(is_given_up))

    def offer(self, version: bytes) -> None:
        """Lets other workers read the packed weights, which `version` names."""
        self._begin(lambda: self._offer(version))

    def copy(self, offer: str) -> None:
        """Changes the weights to those of another worker, of whose ranks the offer is."""
        self._begin(lambda: self._copy(WeightOffer.of_json(offer)))

    def withdraw(self) -> None:
        """Lets nobody read the packed weights any more."""
        self._offered.withdraw()

    # -- jobs, each in a thread of its own ---------------------------------------------------------

    def _begin(self, job: Callable[[], RankResult]) -> None:
        self.jobs.begin(lambda: self._outcome(job))

    def _outcome(self, job: Callable[[], RankResult]) -> RankResult:
        self._has_begun = False
        try:
            return job()
        except WeftError as error:
            problem, reason = error.message, error.reason
        except Exception as error:
            logger.exception("the weights were not changed")
            problem, reason = f"{type(error).__name__}: {error}", Internal.reason
        is_update = self._has_begun or self._update is not None
        if self._update is not None:
            self._update.give_up(problem)
            self._update = None
        is_mixture = is_update and self._possible.has_written
        return RankResult(problem=problem, reason=reason, is_mixture=is_mixture)

    @property
    def _possible(self) -> Refit:
        if self._refit is None:
            raise ConfigError("this model's weights cannot be changed; restart the worker")
        return self._refit

    def _read(self, folder: Path) -> RankResult:
        self._possible.check(folder)
        self._has_begun = True
        return RankResult(digest=self._possible.from_folder(folder))

    def _offer(self, version: bytes) -> RankResult:
        if self._packed is None:
            raise ConfigError("this worker's weights cannot be read by others")
        offered = self._offered.offer(self._packed, version)
        return RankResult(offer=json.dumps([asdict(offered)], default=bytes.hex))

    def _copy(self, offer: WeightOffer) -> RankResult:
        peer = PeerWeights(offer, self._rank)
        self._possible.check_peer(peer)
        with peer.reached(self._device):
            peer.connect()  # Nothing is written if it is gone.
            self._has_begun = True
            return RankResult(digest=self._possible.from_peer(peer))

    def _join(self, group: WeightGroup) -> RankResult:
        self.leave(group.name)
        self._groups[group.name] = group, join(group, self._rank, self._device)
        return RankResult()

    def _receive(self, name: str, announcement: str, packed_bytes: int, ends: bool) -> RankResult:
        tensors, lent = decode_tensors(announcement)
        is_lent = check_lent(lent)
        if not is_lent and name not in self._groups:
            raise GroupFailed(f"this worker is in no group {name!r}: join it first")
        if self._update is None:
            self._update = _Update(self._possible, self._device)
        update = self._update
        try:
            update.sent.check(tensors)
            found = (
                self._lent(tensors, lent) if is_lent else self._sent(name, tensors, packed_bytes)
            )
            with closing(found):
                for names, came in found:
                    update.check()
                    update.sent.put(dict(zip(names, came, strict=True)))
            if not ends or update.sent.lacking:
                return RankResult()
            digest = update.end()
        except Exception:
            # What the trainer still sends belongs to nothing.
            if not is_lent:
                self.leave(name)
            raise
        self._update = None
        return RankResult(digest=digest)

    def _sent(
        self, name: str, tensors: Announced, packed_bytes: int
    ) -> Generator[_Received, None, None]:
        group, member = self._groups[name]
        most = group.packed_bytes if packed_bytes == AS_GROUP else packed_bytes
        for pack in layouts(tensors, tensors.sizes(), most):
            part = tensors.part(pack.tensors)
            if most:
                yield from _received(member, part, pack)
                continue
            (dtype,), (shape,) = part.dtypes, part.shapes
            out = torch.empty(shape, dtype=dtype_of(dtype), device=member.device)
            member.receive(out)
            yield part.names, [out]

    def _lent(
        self, tensors: Announced, lent: Mapping[str, Handles]
    ) -> Generator[_Received, None, None]:
        with opened(self._device, tensors.names, lent) as shared:
            for layout in layouts(tensors, tensors.sizes(), TOGETHER_BYTES):
                yield tensors.names[layout.tensors], shared.read(layout)

    def _end(self, is_given_up: bool) -> RankResult:
        if self._update is None:
            raise ModelError("no update is under way that could end")
        if is_given_up:
            raise GroupFailed("the trainer has not ended its update in time")
        digest = self._update.end()
        self._update = None
        return RankResult(digest=digest)


def encode_group(group: WeightGroup) -> str:
    return json.dumps(asdict(group) | {"nccl_id": group.nccl_id.hex()})


def _decode_group(text: str) -> WeightGroup:
    values = json.loads(text)
    return WeightGroup(**(values | {"nccl_id": bytes.fromhex(values["nccl_id"])}))


def _received(
    member: Broadcasts, part: Announced, pack: Layout
) -> Generator[_Received, None, None]:
    offsets = np.cumsum(pack.sizes) - pack.sizes
    packed = torch.empty(int(pack.sizes.sum()), dtype=torch.uint8, device=member.device)
    member.receive(packed)
    handles = Handles((), np.zeros_like(offsets), offsets)
    for layout in layouts(part, pack.sizes, TOGETHER_BYTES):
        # Copies, so that little memory is kept for one of them, and numbers lie where they may.
        found = copies(layout, ranges(layout, handles), {0: packed})
        yield part.names[layout.tensors], found
