"""Copies of packed weights between workers: what one exposes, and how another one takes it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

import torch
from weft.contract.errors import ModelError
from weft.contract.start_work import CHECKING, CONNECTING, COPYING, START_WORK
from weft.contract.weights import GpuAllocation, PackedTensor, RankWeights, WeightOffer
from weft.engine.base.config import EngineConfig
from weft.engine.base.device_copies import on_host
from weft.engine.base.device_memory import SMALL_BYTES, UNIT_BYTES
from weft.engine.base.device_threads import use_device
from weft.engine.model.weights.computed_format import dtype_name
from weft.engine.model.weights.packed import PackedModel, PackedTensors, bytes_of, span_of
from weft.kernels.ops.page_digest import page_digests
from weft.pages.transfer.device_ranges import ForeignRanges, allocations_of, host_name
from weft.pages.transfer.digest import WORD_BYTES, digest_pages
from weft.pages.transfer.nixl_ranges import (
    MemoryRange,
    RangesReader,
    RangesTarget,
    SharedRanges,
)
from weft.pages.transfer.nixl_wire import TransferError

logger = logging.getLogger(__name__)

STALL_S = 20.0
"""Time in which nothing comes from a source, after which it counts as lost."""
_BLOCK_BYTES = 64 << 10
_MOST_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes under way at a time."""
_LOST: list[torch.Tensor] = []
"""Tensors to which a GPU that hangs may still write, so that nothing else gets their memory."""


class OfferedWeights:
    """The weights of one rank, which other processes may read.

    Args:
        problem: Why they may not; empty: they may.
    """

    def __init__(self, rank: int, problem: str = "") -> None:
        self._name = f"weights-{rank}"
        self._problem = problem
        self._shared: SharedRanges | None = None
        self._offer: tuple[bytes, RankWeights] | None = None

    def offer(self, packed: PackedTensors, version: bytes) -> RankWeights:
        """Registers the tensors with NIXL, if that was not done, and describes them.

        Args:
            version: Names the present numbers. While it is the same, digests are computed once.

        Raises:
            ModelError: They lie in memory that others cannot read.
            TransferError: NIXL cannot be used here.
        """
        if self._problem:
            raise ModelError(self._problem)
        if self._shared is not None and self._offer is not None and self._offer[0] == version:
            return self._offer[1]
        tensors = packed.tensors()
        if self._shared is None:
            self._shared = SharedRanges(self._name, _storages([one for _, one in tensors]))
        spans = [_range_of(place, one) for place, one in tensors]
        allocations = _allocations(spans)
        digests = _Digests().of([one for _, one in tensors], spans)
        listed = [
            PackedTensor(
                place=place,
                dtype=dtype_name(one.dtype),
                shape=list(one.shape),
                address=span.address,
                num_bytes=span.num_bytes,
                memory_type=span.memory_type,
                device_id=span.device_id,
                digest=digest,
            )
            for (place, one), span, digest in zip(tensors, spans, digests, strict=True)
        ]
        target = self._shared.target
        found = RankWeights(
            **packed.model._asdict(),
            nixl_version=target.version,
            agent_name=target.agent_name,
            agent_metadata=target.metadata,
            tensors=listed,
            host=host_name() if allocations else "",
            allocations=allocations,
        )
        self._offer = version, found
        return found

    def withdraw(self) -> None:
        """Takes the memory from NIXL, before it is given back."""
        shared, self._shared, self._offer = self._shared, None, None
        if shared is not None:
            shared.close()


class PeerWeights:
    """A `PackedSource`: the weights of a rank of another worker, for the same rank of this one.

    Args:
        progress: Called with (bytes copied, all bytes).
    """

    def __init__(
        self,
        offer: WeightOffer,
        rank: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._offer = offer
        self._rank = rank
        self._progress = progress
        self._source: Future[ForeignRanges | RangesReader]
        self._has_digests: Future[None]

    @property
    def model_digest(self) -> bytes:
        return self._offer.model_digest

    @property
    def start_digest(self) -> bytes:
        return self._offer.start_digest

    @property
    def files(self) -> bytes:
        return self._offer.files

    @property
    def num_bytes(self) -> int:
        tensors = [one for one in self._theirs().tensors if one.memory_type == "VRAM"]
        sizes = {one.address: one.num_bytes for one in tensors if one.num_bytes > SMALL_BYTES}
        return sum(-(-size // UNIT_BYTES) * UNIT_BYTES for size in sizes.values())

    def check(self, packed: PackedTensors) -> None:
        """Raises ModelError unless it has tensors of the same forms, packed in the same way."""
        own, theirs = packed.model, self._theirs()
        told = PackedModel(theirs.scheme, theirs.share, theirs.packing, theirs.constants)
        if told.scheme != own.scheme:
            raise ModelError("the worker has another model, dtype or number format")
        if told.share != own.share:
            raise ModelError(f"the worker's rank has {told.share[:200]}, this one {own.share}")
        if told.packing != own.packing:
            raise ModelError(
                f"the worker packs weights in another way: {told.packing[:300]}; here {own.packing}"
            )
        if told.constants != own.constants:
            raise ModelError("the worker has made other factors of its weights")
        known = {one.place: one for one in theirs.tensors}
        for place, tensor in packed.tensors():
            one, span = known.get(place), _range_of(place, tensor)
            form = dtype_name(tensor.dtype), list(tensor.shape), *span[1:3]
            if one is None or form != (one.dtype, one.shape, one.num_bytes, one.memory_type):
                raise ModelError(f"the worker has {place} in another form, or not at all")

    @contextmanager
    def reached(self, device: torch.device) -> Iterator[None]:
        """Its thread also loads the kernel of digests, and closes the memory at the end, for which
        nobody waits.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        thread = ThreadPoolExecutor(1, "peer-weights")
        self._source = thread.submit(self._connect, device)
        self._has_digests = thread.submit(_load_digests, device)
        if device.type == "cpu":  # Its cores are wanted for packing.
            wait([self._source], STALL_S)
        try:
            yield
        finally:
            thread.submit(self._close)
            thread.shutdown(wait=False)

    def connect(self) -> None:
        """Waits, in `reached`, until the worker's memory can be read. Raises TransferError if it
        cannot.
        """
        with START_WORK.time(CONNECTING):
            wait([self._source], STALL_S)
        if not self._source.done():
            raise TransferError(f"the worker's memory was not reached within {STALL_S:g} s")
        self._source.result()

    def fill(self, packed: PackedTensors) -> None:
        """Raises TransferError if the worker is gone or does not answer, ModelError if bytes that
        came are not those that it has offered.
        """
        theirs, began = self._theirs(), time.monotonic()
        known = {one.place: one for one in theirs.tensors}
        tensors = packed.tensors()
        spans = [_range_of(place, one) for place, one in tensors]
        wanted = dict[MemoryRange, _Wanted]()
        device = next((one.device for _, one in tensors if one.is_cuda), torch.device("cpu"))
        for (place, tensor), span in zip(tensors, spans, strict=True):
            # What a GPU's model has in the host's memory is made from its configuration.
            if span.num_bytes and (device.type == "cpu" or span.memory_type == "VRAM"):
                one = known[place]
                far = MemoryRange(one.address, one.num_bytes, one.memory_type, one.device_id)
                wanted[span] = _Wanted(span, far, tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        try:
            lanes, digests = self._read(list(wanted.values()), device)
        except TransferError as error:
            if error.may_still_arrive:
                _LOST.extend(one for _, one in tensors)
            raise
        read_s = time.monotonic() - began
        with START_WORK.time(CHECKING):
            found = digests.of([one for _, one in tensors], spans)
        for (place, _), digest in zip(tensors, found, strict=True):
            if digest != known[place].digest:
                raise ModelError(
                    f"{place} came with other bytes than the worker has offered: its weights have "
                    "changed meanwhile, or a lane is faulty"
                )
        logger.info(
            "weights copied from a worker",
            extra={
                "bytes": sum(span.num_bytes for span in wanted),
                "read_s": round(read_s, 3),
                "checked_s": round(time.monotonic() - began - read_s, 3),
                "lanes": lanes,
            },
        )

    def _read(self, wanted: Sequence[_Wanted], device: torch.device) -> tuple[str, _Digests]:
        """Returns the way that the bytes took, and the digests that have begun."""
        total = sum(one.span.num_bytes for one in wanted)
        pairs = [(one.span, one.far) for one in wanted]

        def watched() -> tuple[_Digests, Callable[[int], None]]:
            """Digests that a GPU computes of what has come, while more comes."""
            digests, left, end = _Digests(), deque(wanted), 0

            def report(done: int) -> None:
                nonlocal end
                self._has_digests.result()
                while left and device.type == "cuda" and end + left[0].span.num_bytes <= done:
                    one = left.popleft()
                    digests.begin(one.tensor, one.span)
                    end += one.span.num_bytes
                self._progress(done, total)

            return digests, report

        self.connect()
        source = self._source.result()
        digests, report = watched()
        if isinstance(source, ForeignRanges):
            try:
                with START_WORK.time(COPYING):
                    source.read(pairs, stall_s=STALL_S, report=report)
                return "CUDA IPC", digests
            except TransferError as error:
                if error.may_still_arrive:
                    raise
                logger.info("weights of this host are read over NIXL: %s", error.message)
            self._close()
            source, (digests, report) = self._over_nixl(device), watched()
        source.read(self._target, pairs, report)
        return source.lanes, digests

    def _connect(self, device: torch.device) -> ForeignRanges | RangesReader:
        use_device(device)
        theirs = self._theirs()
        if device.type == "cuda" and theirs.allocations and theirs.host == host_name():
            try:
                return ForeignRanges(theirs.allocations, device.index)
            except TransferError as error:
                logger.info("weights of this host are read over NIXL: %s", error.message)
        return self._over_nixl(device)

    def _over_nixl(self, device: torch.device) -> RangesReader:
        reader = RangesReader("weights", most_bytes=_MOST_BYTES[device.type], stall_s=STALL_S)
        reader.open(self._target, [])
        return reader

    def _close(self) -> None:
        if not self._source.exception():
            try:
                self._source.result().close()
            except TransferError as error:
                logger.warning("a worker's memory stays open: %s", error.message)

    @property
    def _target(self) -> RangesTarget:
        theirs = self._theirs()
        return RangesTarget(theirs.nixl_version, theirs.agent_name, theirs.agent_metadata)

    def _theirs(self) -> RankWeights:
        if self._rank >= len(self._offer.ranks):
            raise ModelError(f"the worker has {len(self._offer.ranks)} ranks, this is another one")
        return self._offer.ranks[self._rank]


def peer_weights(
    config: EngineConfig,
    rank: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PeerWeights | None:
    """The worker from which a rank is to copy its weights; None: from none."""
    if not config.weights_offer:
        return None
    return PeerWeights(WeightOffer.of_json(config.weights_offer), rank, progress)


def _range_of(place: str, tensor: torch.Tensor) -> MemoryRange:
    address, num_bytes = span_of(place, tensor)
    is_device = tensor.is_cuda
    number = tensor.device.index or 0 if is_device else 0
    return MemoryRange(address, num_bytes, "VRAM" if is_device else "DRAM", number)


def _storages(tensors: Sequence[torch.Tensor]) -> list[MemoryRange]:
    """The memory that PyTorch has allocated for tensors, each allocation once."""
    found = dict[int, MemoryRange]()
    for one in tensors:
        memory = one.untyped_storage()
        if memory.nbytes():
            kind, number = ("VRAM", one.device.index or 0) if one.is_cuda else ("DRAM", 0)
            found[memory.data_ptr()] = MemoryRange(memory.data_ptr(), memory.nbytes(), kind, number)
    return list(found.values())


def _allocations(spans: Sequence[MemoryRange]) -> list[GpuAllocation]:
    """What processes of this host need to open the memory; empty: they cannot, or could not tell
    that they are on this host.
    """
    if not host_name():
        return []
    try:
        return allocations_of([one for one in spans if one.memory_type == "VRAM" and one.num_bytes])
    except TransferError as error:
        logger.info("processes of this host read weights over NIXL: %s", error.message)
        return []


def _load_digests(device: torch.device) -> None:
    """Computes a digest, since the first one on a GPU takes as long as some copies."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            one = torch.zeros(2 * _BLOCK_BYTES + 1, dtype=torch.uint8, device=device)
            _Digests().of([one], [_range_of("", one)])


class _Wanted(NamedTuple):
    """Memory to be filled."""

    span: MemoryRange
    far: MemoryRange
    """Where the other process has its bytes."""
    tensor: torch.Tensor
    """One that fills the span."""


class _Digests:
    """32 bytes over the memory of each tensor: the digests of its blocks, as of pages, and its last
    bytes.
    """

    def __init__(self) -> None:
        self._begun: dict[MemoryRange, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, tensor: torch.Tensor, span: MemoryRange) -> None:
        """Has a GPU compute the digests of a tensor's blocks; a CPU has done so on return."""
        if span not in self._begun:
            self._begun[span] = _block_digests(bytes_of(tensor, span.num_bytes))

    def of(self, tensors: Sequence[torch.Tensor], spans: Sequence[MemoryRange]) -> list[bytes]:
        for tensor, span in zip(tensors, spans, strict=True):
            self.begin(tensor, span)
        parts = iter(_on_host([part for both in self._begun.values() for part in both]))
        made = dict[MemoryRange, bytes]()
        for span, blocks, rest in zip(self._begun, parts, parts, strict=True):
            digest = hashlib.blake2b(span.num_bytes.to_bytes(8, "little"), digest_size=32)
            digest.update(blocks)
            digest.update(rest)
            made[span] = digest.digest()
        return [made[span] for span in spans]


def _on_host(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The bytes of each of these vectors. A GPU is asked once, for each answer takes as long."""
    flat = [one.view(torch.uint8) for one in tensors]
    far = [one for one in flat if one.is_cuda]
    came = iter(torch.split(on_host(torch.cat(far)), [len(one) for one in far]) if far else ())
    return [(next(came) if one.is_cuda else one).numpy().tobytes() for one in flat]


def _block_digests(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks] int64, and the bytes after the last whole block."""
    count = data.numel() // _BLOCK_BYTES
    rest = data[count * _BLOCK_BYTES :]
    if not count:
        return torch.empty(0, dtype=torch.int64), rest
    if data.data_ptr() % WORD_BYTES:
        data = data.clone()
    rows = data[: count * _BLOCK_BYTES].view(count, _BLOCK_BYTES)
    numbers = torch.arange(count, device=data.device)
    if data.is_cuda:
        return page_digests(rows, numbers), rest
    return torch.from_numpy(digest_pages(rows.numpy(), range(count)).view("i8")), rest
