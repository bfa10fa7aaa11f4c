"""The calls that manage adapters, for both faces and the operators' port."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.timestamp_pb2 import Timestamp
from weft.common.adapters.manifest import Entry
from weft.common.rpc.errors import Context
from weft.contract.codec.walk import enum_names
from weft.contract.errors import PermissionDenied
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.adapters.manager import FleetAdapterManager, LoadOrder
from weft.gateway.admission.authenticate import current_tenant
from weft.gateway.catalogue import Catalogue
from weft.gateway.validate import invalid
from weft.v1 import common_pb2, gateway_pb2

_STATES = enum_names(gateway_pb2.RegistryState.DESCRIPTOR)


class AdapterCalls:
    """Converts calls; has no logic of its own. With `asks_for_keys` callers need API keys, and not
    every key may manage adapters.
    """

    def __init__(
        self, manager: FleetAdapterManager, models: Catalogue, asks_for_keys: bool
    ) -> None:
        self._manager = manager
        self._models = models
        self._asks_for_keys = asks_for_keys

    @property
    def _directory(self) -> AdapterDirectory:
        return self._models.adapters

    def check_caller(self) -> None:
        """Raises PermissionDenied unless the current call may change adapters.

        Without API keys every caller of the face may; the operators' port needs its token.
        """
        tenant = current_tenant.get()
        if self._asks_for_keys and (tenant is None or not tenant.manages_adapters):
            raise PermissionDenied(
                "this API key may not load or unload adapters; one made by `weft keys add TENANT "
                "--adapters` may, and the operators' port",
                stage="authorize",
            )

    async def load(
        self, request: gateway_pb2.LoadAdapterRequest, context: Context
    ) -> gateway_pb2.LoadAdapterResponse:
        given_s = _timeout_s(request)
        entry = await self.load_order(
            LoadOrder(
                name=request.name,
                path=request.path,
                model=request.model,
                replaces=request.replace,
                is_pinned=request.pinned,
                is_lenient=request.lenient,
                timeout_s=_least(given_s, context.time_remaining()),
            )
        )
        return gateway_pb2.LoadAdapterResponse(adapter=self._describe(entry))

    async def load_order(self, order: LoadOrder) -> Entry:
        """An order without a model is for the only one."""
        model = self._models.base(order.model).model.name
        return await self._manager.load(replace(order, model=model))

    def left_out(self, entry: Entry) -> list[str]:
        """Some of the tensors that workers left out of an adapter."""
        return sorted({name for one in self._manager.holders(entry) for name in one.left_out})

    async def unload(
        self, request: gateway_pb2.UnloadAdapterRequest, context: Context
    ) -> gateway_pb2.UnloadAdapterResponse:
        given_s = _timeout_s(request)
        entry = await self.unload_name(request.name, _least(given_s, context.time_remaining()))
        return gateway_pb2.UnloadAdapterResponse(adapter=_ref(entry))

    async def unload_name(self, name: str, timeout_s: float | None) -> Entry:
        return await self._manager.unload(name, timeout_s)

    async def list(
        self, request: gateway_pb2.ListAdaptersRequest, context: Context
    ) -> gateway_pb2.ListAdaptersResponse:
        await self._directory.refresh()
        manifest = self._directory.manifest
        entries = sorted(manifest.entries, key=lambda entry: (entry.name, -entry.generation))
        return gateway_pb2.ListAdaptersResponse(
            adapters=[self._describe(entry) for entry in entries], generation=manifest.generation
        )

    def _describe(self, entry: Entry) -> gateway_pb2.RegisteredAdapter:
        return gateway_pb2.RegisteredAdapter(
            adapter=_ref(entry),
            parent=entry.model,
            path=entry.path,
            state=_STATES.numbers[entry.state],
            create_time=Timestamp(seconds=int(entry.created)),
            pinned=entry.is_pinned,
            lenient=entry.is_lenient,
            generation=entry.generation,
            holders=[
                gateway_pb2.AdapterHolder(
                    worker_id=one.worker_id,
                    role=one.role,
                    state=one.state,
                    error=one.error,
                    num_requests=one.num_requests,
                    rank=one.rank,
                    weight_bytes=one.weight_bytes,
                    left_out=one.left_out,
                )
                for one in self._manager.holders(entry)
            ],
        )


def _ref(entry: Entry) -> common_pb2.AdapterRef:
    return common_pb2.AdapterRef(name=entry.name, digest=entry.digest_bytes)


def _timeout_s(
    request: gateway_pb2.LoadAdapterRequest | gateway_pb2.UnloadAdapterRequest,
) -> float | None:
    if not request.HasField("timeout"):
        return None
    given_s = request.timeout.ToNanoseconds() / 1e9
    if given_s < 0:
        raise invalid("timeout", f"{given_s:g} s is below 0")
    return given_s


def _least(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)
