"""A planner beside a gateway: what it is told, what it tells, and what KEDA gets from it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry
from weft.common.rpc.errors import from_rpc_error
from weft.contract.codec.walk import duration
from weft.gateway.console.plans import PlanBoard
from weft.keda import externalscaler_pb2 as keda
from weft.keda import externalscaler_pb2_grpc
from weft.planner import main as planner_main
from weft.planner.planner import MeshPlanner
from weft.planner.scaler import PlanCollector
from weft.planner.settings import PlannerSettings
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2, mesh_pb2, mesh_pb2_grpc

TOKEN = "an operators' token of some length"


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 4])


async def ask(mesh: Harness, count: int) -> None:
    request = gateway_pb2.CompleteRequest(token_ids=common_pb2.TokenIds(ids=[7] * 100))
    request.stop.max_tokens = 4
    for _ in range(count):
        last = [message async for message in mesh.typed.Complete(request)][-1]
        assert last.choices[0].finish_reason


def planner_of(mesh: Harness, folder: Path, name: str, **settings: Any) -> MeshPlanner:
    made = PlannerSettings(
        gateway=[mesh.app.server.admin_address],
        admin_token_file=folder / "token",
        interval_s=1.0,
        **settings,
    )
    return MeshPlanner(made, name, None)


async def plans_of(mesh: Harness) -> list[mesh_pb2.MeshPlan]:
    async with grpc.aio.insecure_channel(mesh.app.server.admin_address) as channel:
        stub = mesh_pb2_grpc.MeshServiceStub(channel)
        call = stub.WatchMesh(
            mesh_pb2.WatchMeshRequest(interval=duration(0.5)),
            metadata=(("authorization", f"Bearer {TOKEN}"),),
        )
        message = await call.read()
        call.cancel()
    return list(message.plans)


async def test_a_planner_is_told_and_tells(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    async with gateway(
        tmp_path,
        script,
        num_prefill=1,
        admin_port=0,
        admin_token_file=tmp_path / "token",
    ) as mesh:
        for worker in mesh.workers:
            worker.prefill_tokens_per_second = 2000.0
            worker.decode_step_s, worker.decode_step_requests = 0.01, 1.0
        first = planner_of(mesh, tmp_path, "first", act=["roles"])
        second = planner_of(mesh, tmp_path, "second", act=["roles"])
        running = asyncio.create_task(first.run())
        try:
            async with asyncio.timeout(60):
                while not first.acts:
                    await asyncio.sleep(0.05)
                other = asyncio.create_task(second.run())
                await ask(mesh, 3)
                while not second.plans or first.plans[MODEL].alarms:
                    await asyncio.sleep(0.05)
            plan = first.plans[MODEL]
            assert (plan.prefill, plan.decode) == (1, 1)
            assert "prompt tokens keep" in plan.why
            assert not second.acts
            async with asyncio.timeout(60):
                while len(told := await plans_of(mesh)) < 2:
                    await asyncio.sleep(0.2)
            assert [(one.planner_id, one.acts) for one in told] == [
                ("first", True),
                ("second", False),
            ]
            assert (told[0].seen_prefill, told[0].seen_decode) == (1, 1)
            # When the one that acts is gone, its lease ends, and the other one acts.
            running.cancel()
            async with asyncio.timeout(60):
                while not second.acts:
                    await asyncio.sleep(0.05)
            other.cancel()
            registry = CollectorRegistry()
            registry.register(PlanCollector(second))
            text = generate_latest(registry).decode()
            assert f'weft_desired_replicas{{model="{MODEL}",role="decode"}} 1.0' in text
            assert "weft_planner_acts 1.0" in text
        finally:
            running.cancel()


async def test_planners_that_gateways_disagree_about_agree(tmp_path: Path) -> None:
    """Each gateway hears another one first: one gives way, and never do two act."""
    (tmp_path / "token").write_text(TOKEN)
    options: dict[str, Any] = {"admin_port": 0, "admin_token_file": tmp_path / "token"}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with (
        gateway(tmp_path / "a", script, num_prefill=1, **options) as one,
        gateway(tmp_path / "b", script, num_prefill=1, **options) as other,
    ):
        addresses = [mesh.app.server.admin_address for mesh in (one, other)]
        for name, address in zip(("first", "second"), addresses, strict=True):
            request = mesh_pb2.TellPlanRequest(
                planner_id=name, wants_to_act=True, lease=duration(30)
            )
            async with grpc.aio.insecure_channel(address) as channel:
                stub = mesh_pb2_grpc.MeshServiceStub(channel)
                metadata = (("authorization", f"Bearer {TOKEN}"),)
                assert (await stub.TellPlan(request, metadata=metadata)).holder_id == name
        settings = PlannerSettings(
            gateway=addresses,
            admin_token_file=tmp_path / "token",
            interval_s=1.0,
            act=["roles"],
        )
        planners = [MeshPlanner(settings, name, None) for name in ("first", "second")]
        running = [asyncio.create_task(planner.run()) for planner in planners]
        try:
            async with asyncio.timeout(60):
                while not planners[0].acts:
                    assert not planners[1].acts
                    await asyncio.sleep(0.02)
            for _ in range(3):
                await planners[1].changed.wait()
                assert planners[0].acts
                assert not planners[1].acts
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def test_gateways_come_and_go_with_the_addresses_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the name server lists is waited for; one that it lists no longer is not."""
    (tmp_path / "token").write_text(TOKEN)
    async with gateway(
        tmp_path, script, num_prefill=1, admin_port=0, admin_token_file=tmp_path / "token"
    ) as mesh:
        for worker in mesh.workers:
            worker.prefill_tokens_per_second = 2000.0
            worker.decode_step_s, worker.decode_step_requests = 0.01, 1.0
        host, _, port = mesh.app.server.admin_address.rpartition(":")
        there = [host]

        async def resolve(name: str, number: int, **_: object) -> list[Any]:
            assert (name, number) == ("gateways.example.org", int(port))
            if not there:
                raise OSError("no such name")
            return [(0, 0, 0, "", (address, number)) for address in there]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        settings = PlannerSettings(
            gateway=[f"dns:gateways.example.org:{port}"],
            admin_token_file=tmp_path / "token",
            interval_s=1.0,
            act=["roles"],
        )
        planner = MeshPlanner(settings, "a", None)
        running = asyncio.create_task(planner.run())

        async def wait(acts: bool) -> None:
            async with asyncio.timeout(60):
                while planner.acts != acts:
                    await asyncio.sleep(0.05)

        try:
            await wait(True)
            there.append("127.0.0.99")  # Nobody listens there, so half of them do not answer.
            await wait(False)
            there.remove("127.0.0.99")
            await wait(True)
            there.clear()  # A name that is not resolved keeps its addresses.
            await planner.changed.wait()
            await planner.changed.wait()
            assert planner.acts
            assert not planner.plans[MODEL].alarms
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_keda_asks_a_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over its own four rpcs, by the names that KEDA calls."""
    monkeypatch.setattr(planner_main, "configure_logging", lambda *_: None)
    (tmp_path / "token").write_text(TOKEN)
    async with gateway(
        tmp_path,
        script,
        num_prefill=1,
        admin_port=0,
        admin_token_file=tmp_path / "token",
    ) as mesh:
        ready = tmp_path / "ready.json"
        settings = PlannerSettings(
            gateway=[mesh.app.server.admin_address],
            admin_token_file=tmp_path / "token",
            interval_s=1.0,
            metrics_port=None,
            ready_file=ready,
        )
        serving = asyncio.create_task(planner_main.run_planner(settings))
        try:
            async with asyncio.timeout(60):
                while not ready.exists():
                    await asyncio.sleep(0.02)
            address = json.loads(ready.read_text())["address"]
            async with grpc.aio.insecure_channel(address) as channel:
                stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
                trigger = keda.ScaledObjectRef(
                    name="decode", scalerMetadata={"model": MODEL, "role": "decode"}
                )
                (spec,) = (await stub.GetMetricSpec(trigger)).metricSpecs
                assert (spec.metricName, spec.targetSize) == (f"weft-{MODEL}-decode", 1)
                question = keda.GetMetricsRequest(
                    scaledObjectRef=trigger, metricName=spec.metricName
                )
                # Workers have not told their speeds, so nothing should change.
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetMetrics(question)
                assert from_rpc_error(caught.value).reason == "PEER_UNAVAILABLE"
                for worker in mesh.workers:
                    worker.prefill_tokens_per_second = 2000.0
                    worker.decode_step_s, worker.decode_step_requests = 0.01, 1.0
                values: list[keda.MetricValue] = []
                async with asyncio.timeout(60):
                    while not values:
                        try:
                            values = list((await stub.GetMetrics(question)).metricValues)
                        except grpc.aio.AioRpcError:
                            await asyncio.sleep(0.1)
                assert [(one.metricName, one.metricValue) for one in values] == [
                    (spec.metricName, 1)
                ]
                # As KEDA sends a variable of the scaled pods.
                by_variable = keda.ScaledObjectRef(
                    name="decode", scalerMetadata={"modelFromEnv": MODEL, "role": "decode"}
                )
                assert (await stub.IsActive(trigger)).result
                assert (await stub.IsActive(by_variable)).result
                odd = {"model": "Org/Model.1:latest", "role": "prefill"}
                (spec,) = (
                    await stub.GetMetricSpec(keda.ScaledObjectRef(scalerMetadata=odd))
                ).metricSpecs
                assert spec.metricName == "weft-org-model-1-latest-prefill"
                stream = stub.StreamIsActive(trigger)
                assert (await stream.read()).result
                stream.cancel()
                wrong = keda.ScaledObjectRef(scalerMetadata={"model": MODEL, "role": "gateway"})
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetMetricSpec(wrong)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def test_one_planner_acts_at_a_time() -> None:
    now_s = 0.0
    board = PlanBoard(lambda: now_s)
    plan = mesh_pb2.MeshPlan(model=MODEL)
    assert board.tell("advisor", [plan], 30.0, wants_to_act=False) == ""
    assert board.tell("a", [plan], 30.0, wants_to_act=True) == "a"
    assert board.tell("b", [plan], 30.0, wants_to_act=True) == "a"
    now_s = 20.0
    assert board.tell("b", [plan], 30.0, wants_to_act=True) == "a"
    assert [(one.planner_id, one.acts) for one in board.plans()] == [
        ("a", True),
        ("advisor", False),
        ("b", False),
    ]
    now_s = 31.0
    assert board.tell("b", [plan], 30.0, wants_to_act=True) == "b"
    assert board.tell("b", [plan], 30.0, wants_to_act=False) == ""
