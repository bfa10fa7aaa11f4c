"""Trainers' orders that some workers of a mesh do not obey."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import ModelError, RefitRunning
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import gateway
from weft.v1 import decode_pb2, dialects_pb2_grpc

UPDATE = "UpdateWeightsFromDisk", {"model_path": "/x", "abort_all_requests": True}
ABORT = "AbortRequests", {"abort_all": True}


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65]])


@pytest.mark.parametrize("before", ["", "keep"])
@pytest.mark.parametrize(
    ("call", "refused"), [(UPDATE, "pause"), (UPDATE, "refit"), (ABORT, "pause")]
)
async def test_a_call_that_fails_half_way_leaves_pauses_as_they_were(
    call: tuple[str, dict[str, Any]], refused: str, before: str, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token := secrets.token_urlsafe(32))
    options = {"rl": True, "console": "operate", "admin_token_file": token_file}
    async with gateway(tmp_path, script, num_decode=2, num_prefill=1, **options) as mesh:
        weights = [worker.weights for worker in mesh.workers]
        for one in weights:
            one.pause = before
        last = mesh.workers[-1]
        kind = RefitRunning if refused == "pause" else ModelError
        last.weights.refusals[refused] = kind("this worker cannot do that", stage="weights")
        method, body = call
        stub = dialects_pb2_grpc.TrainerServiceStub(mesh.channel)
        order = HttpBody(data=json.dumps(body).encode())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(order, metadata=[("authorization", f"Bearer {token}")])
        error = from_rpc_error(caught.value)
        assert (error.reason, error.worker_id) == (kind.reason, last.worker_id)
        assert "this worker cannot do that" in error.message
        # Those that obeyed were paused, and go on unless a trainer had paused them before.
        assert all(one.orders.count("pause") == 1 for one in weights)
        is_paused = [bool(one.pause) for one in weights]
        assert is_paused == [bool(before)] * len(weights)
        assert sum(one.orders.count("refit") for one in weights) == (3 if refused == "refit" else 0)
