"""Finds a worker whose packed weights this one may copy when it starts, or for an update."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc
from weft.common.rpc.channel import open_channel
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.tls import Identity
from weft.common.worker.kernel_files import (
    MAX_FILE_BYTES,
    KernelFolders,
    KernelKeeper,
    kernel_version,
)
from weft.common.worker.settings import FROM_DISK, OF_MESH
from weft.contract.codec.pairs import WEIGHT_OFFER
from weft.contract.errors import InvalidRequest, WeftError
from weft.contract.weights import WeightOffer
from weft.v1 import gateway_pb2, gateway_pb2_grpc, weights_pb2, worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

_ASK_S = 5.0
"""Longest wait for a gateway's list of workers."""
_OFFER_S = 60.0
"""Longest wait for an offer. Its worker reads all of its weights once, for their digests."""
_KERNELS_S = 60.0
"""Longest time to take kernels, after which compiling them is no worse."""
_ROLES = ("decode", "prefill")
"""Whose certificate a worker may have."""


async def ask_for_weights(address: str, identity: Identity | None) -> WeightOffer:
    """The packed weights of the worker at host:port. Raises WeftError if it does not offer them."""
    request, problem = weights_pb2.OfferWeightsRequest(), WeftError("")
    for role in _ROLES if identity is not None else _ROLES[:1]:
        async with open_channel(address, role, identity) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                return WEIGHT_OFFER.decode(await stub.OfferWeights(request, timeout=_OFFER_S))
            except grpc.aio.AioRpcError as error:
                problem = from_rpc_error(error)
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    break
    raise problem


async def fetch_kernels(
    source: str, model: str, own_address: str, identity: Identity, folders: KernelFolders
) -> int:
    """Takes the compiled kernels of the first worker that has some, among those that a
    `weights_from` setting names. Returns the number of files; 0: the log says why.

    Args:
        identity: Peers must show a certificate of the same authority, since kernels are code.
    """
    problem = "no other worker has this model"
    try:
        for address in await _addresses(source, model, identity):
            if address == own_address:
                continue
            try:
                return await _take_kernels(address, identity, folders)
            except (WeftError, OSError, TimeoutError) as error:
                problem = f"{address}: {error}"
    except WeftError as error:
        problem = error.message
    logger.warning("kernels are compiled here: %s", problem)
    return 0


async def _take_kernels(address: str, identity: Identity, folders: KernelFolders) -> int:
    problem = WeftError("")
    for role in _ROLES:
        async with open_channel(address, role, identity) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).GetKernels(
                worker_pb2.GetKernelsRequest(version=kernel_version()), timeout=_KERNELS_S
            )
            content = bytearray()
            try:
                with KernelKeeper(folders) as keeper:
                    async for part in call:
                        content += part.data
                        if len(content) > MAX_FILE_BYTES:
                            raise InvalidRequest("a compiled kernel is too large")
                        if part.digest:
                            keeper.take(part.name, bytes(content), part.digest)
                            content.clear()
            except grpc.aio.AioRpcError as error:
                problem = from_rpc_error(error)
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    break
                continue
            logger.info("took compiled kernels", extra={"files": keeper.num_files})
            return keeper.num_files
    raise problem


async def find_weights(
    source: str, model: str, own_address: str, identity: Identity | None
) -> WeightOffer | None:
    """The first offer of the workers that a `weights_from` setting names; None: weights are to be
    read from files, and the log says why unless the setting does.

    Args:
        model: Name of the model that is served.
        own_address: host:port of this worker, which is not asked.
    """
    if source == FROM_DISK:
        return None
    problem = "no other worker has this model"
    try:
        addresses = await _addresses(source, model, identity)
    except WeftError as error:
        addresses, problem = [], f"gateway {source.removeprefix(OF_MESH)}: {error.message}"
    for address in addresses:
        if address == own_address:
            continue
        try:
            offer = await ask_for_weights(address, identity)
        except WeftError as error:
            problem = f"{address}: {error.message}"
            continue
        logger.info("a worker offers its weights", extra={"address": address})
        return offer
    logger.warning("weights are read from files: %s", problem)
    return None


async def _addresses(source: str, model: str, identity: Identity | None) -> Sequence[str]:
    if not source.startswith(OF_MESH):
        return [one.strip() for one in source.split(",") if one.strip()]
    async with open_channel(source.removeprefix(OF_MESH), "gateway", identity) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        try:
            fleet = await stub.GetFleet(gateway_pb2.GetFleetRequest(), timeout=_ASK_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    return [one.address for one in fleet.workers if one.healthy and one.model == model]
