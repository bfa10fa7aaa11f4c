"""A worker whose pool is lost to quarantine hands its requests back and ends."""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from weft.common.rpc.server import QUARANTINE_STATUS
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.processes import ServiceProcess
from weft.testing.services.silent_prefill import silent_prefill
from weft.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
)

PAGE = 16
NUM_PAGES = 201
LEASE_PAGES = 12
"""A lease's: one is below a tenth of the pool, two are above."""


def decode_process(folder: Path, *flags: str) -> ServiceProcess:
    model_dir = make_tiny("llama", folder / "tiny", seed=random.randrange(2**31))
    token = folder / "token"
    token.write_text(secrets.token_urlsafe(32))
    command = [sys.executable, "-m", "weft.cli", "serve", "decode", "--model-dir", str(model_dir)]
    command += ["--dtype", "float32", "--transport", "data", "--num-threads", "1"]
    command += ["--page-size", str(PAGE), "--num-pages", str(NUM_PAGES)]
    command += ["--local-prefill-max-tokens", "0", "--drain-grace-s", "4"]
    command += ["--lease-s", "1", "--renew-interval-s", "0.3", "--fill-progress-timeout-s", "0.5"]
    command += ["--enable-faults", "--admin-port", "0", "--admin-token-file", str(token)]
    return ServiceProcess("decode", [*command, *flags], folder)


async def slow_down(ready: dict[str, Any], token: str) -> None:
    """So that answers are under way when the worker drains."""
    fault = admin_pb2.Fault(point="engine.step", kind=admin_pb2.FAULT_KIND_DELAY, count=0)
    fault.delay.FromMilliseconds(100)
    async with grpc.aio.insecure_channel(ready["admin_address"]) as channel:
        await admin_pb2_grpc.AdminServiceStub(channel).InjectFault(
            admin_pb2.InjectFaultRequest(fault=fault),
            metadata=(("authorization", f"Bearer {token}"),),
            timeout=60,
        )


def submit(request_id: str, filler: str, address: str) -> decode_pb2.SessionRequest:
    prompt = [random.randrange(3, 90) for _ in range(LEASE_PAGES * PAGE + 3)]
    candidate = decode_pb2.PrefillCandidate(worker_id=filler, address=address, epoch=1)
    return decode_pb2.SessionRequest(
        submit=decode_pb2.Submit(
            request_id=request_id,
            attempt=1,
            prompt=common_pb2.TokenIds(ids=prompt),
            prompt_length=len(prompt),
            sampling=common_pb2.SamplingParams(temperature=0.0),
            stop=common_pb2.StopCriteria(max_tokens=800, ignore_eos=True),
            prefill_candidates=[candidate],
            first_token_timeout=Duration(seconds=300),
            total_timeout=Duration(seconds=300),
            model="tiny",
        )
    )


async def test_two_unanswered_leases_end_the_worker(tmp_path: Path) -> None:
    with decode_process(tmp_path) as process:
        ready = await process.ready(120)
        await slow_down(ready, (tmp_path / "token").read_text())
        async with (
            silent_prefill() as (filler, address),
            grpc.aio.insecure_channel(ready["address"]) as channel,
        ):
            session = decode_pb2_grpc.DecodeServiceStub(channel).Session(timeout=300)
            hello = decode_pb2.SessionRequest.Hello(
                gateway_id="g", gateway_epoch=1, ping_interval=Duration(seconds=100)
            )
            await session.write(decode_pb2.SessionRequest(hello=hello))
            for name in ("p0", "p1"):
                await session.write(submit(f"r-{name}", name, address))
            failed: dict[str, decode_pb2.SessionEvent.Failed] = {}
            begun: set[str] = set()
            while len(failed) < 2:
                event = await session.read()
                assert isinstance(event, decode_pb2.SessionEvent), process.log
                begun |= {tokens.request_id for tokens in event.tokens}
                failed |= {each.request_id: each for each in event.failed}
            assert filler.num_fills == 2
            # Both had been answered in part: they are handed back, to go on elsewhere.
            assert begun == set(failed) == {"r-p0", "r-p1"}
            assert {each.error.code for each in failed.values()} == {"DRAINING"}
            assert all(each.error.retryable for each in failed.values())
            session.cancel()
        assert await asyncio.to_thread(process.wait, 60) == QUARANTINE_STATUS
        assert f"{2 * LEASE_PAGES} of {NUM_PAGES - 1} KV pages are in quarantine" in process.log
