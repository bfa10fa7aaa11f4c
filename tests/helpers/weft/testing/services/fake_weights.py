"""What trainers order a worker without an engine: pauses, and updates that change nothing."""

from __future__ import annotations

from typing import Any

from weft.common.rpc.errors import abort
from weft.contract.codec.pairs import PAUSE_MODES
from weft.contract.errors import WeftError
from weft.v1 import admin_pb2_grpc, weights_pb2


class FakeWeights(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.pause = ""
        self.orders: list[str] = []
        self.refusals: dict[str, WeftError] = {}
        """What it says in place of obeying, by the order."""

    async def _obey(self, order: str, context: Any) -> weights_pb2.WeightStatus:
        self.orders.append(order)
        if (error := self.refusals.get(order)) is not None:
            await abort(context, error)
        return self._status()

    def _status(self) -> weights_pb2.WeightStatus:
        return weights_pb2.WeightStatus(
            state="ready", version="1", model_digest=bytes(range(32)), pause=self.pause, num_ranks=1
        )

    async def Pause(self, request: weights_pb2.PauseRequest, context: Any) -> Any:
        await self._obey("pause", context)
        self.pause = PAUSE_MODES[request.mode]
        return weights_pb2.PauseResponse(status=self._status())

    async def Resume(self, request: Any, context: Any) -> Any:
        await self._obey("resume", context)
        self.pause = ""
        return weights_pb2.ResumeResponse(status=self._status())

    async def Refit(self, request: Any, context: Any) -> Any:
        return weights_pb2.RefitResponse(status=await self._obey("refit", context))

    async def ShowWeights(self, request: Any, context: Any) -> Any:
        return weights_pb2.ShowWeightsResponse(status=await self._obey("show", context))
