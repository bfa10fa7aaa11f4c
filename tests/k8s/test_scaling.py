"""A planner that scales workers at a real kube-apiserver, and KEDA's calls as it makes them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from weft.cli import certs
from weft.keda import externalscaler_pb2 as keda
from weft.keda import externalscaler_pb2_grpc
from weft.planner import main as planner_main
from weft.planner.forecast import Counts
from weft.planner.planner import MeshPlanner
from weft.planner.settings import PlannerSettings
from weft.testing.k8s.kube_api import KubeApi
from weft.testing.k8s.manifests import ROOT, Object, named, render_folder
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import decode_pb2

sys.path.insert(0, str(ROOT / "scripts"))
import gen_helm_chart as chart

pytestmark = [pytest.mark.needs("go", "kube-apiserver"), pytest.mark.timeout(900)]

TOKEN = "an operators' token of some length"
TIMEOUT_S = 120.0


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 4])


@asynccontextmanager
async def mesh_of(folder: Path, **settings: Any) -> AsyncIterator[Harness]:
    (folder / "token").write_text(TOKEN)
    token = {"admin_port": 0, "admin_token_file": folder / "token"}
    async with gateway(folder, script, num_prefill=1, **token, **settings) as mesh:
        for worker in mesh.workers:
            worker.prefill_tokens_per_second = 2000.0
            worker.decode_step_s, worker.decode_step_requests = 0.01, 1.0
        yield mesh


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.1)


def scaled(api: KubeApi, item: Object, order: int | None = None) -> int:
    """Replicas of an object; `order` sets them, as an operator would."""
    with api.client() as client:
        if order is not None:
            merge = {"content-type": "application/merge-patch+json"}
            change = {"spec": {"replicas": order}}
            assert client.patch(api.path(item), json=change, headers=merge).is_success
        return int(client.get(api.path(item)).json()["spec"]["replicas"])


async def test_a_planner_scales_and_tells_what_others_do(api: KubeApi, tmp_path: Path) -> None:
    components = ("disaggregated", "planner", "scale-by-planner")
    chart.overlay(tmp_path, components, "weft")
    objects = render_folder(tmp_path)
    workers = {role: named(objects, "StatefulSet", f"weft-{role}") for role in Counts._fields}
    binding = named(objects, "RoleBinding", "weft-planner")
    access = [named(objects, kind, "weft-planner") for kind in ("ServiceAccount", "Role")]
    for item in (*access, binding, *workers.values()):
        assert (await asyncio.to_thread(api.apply, item, dry_run=False)).is_success
        if item["kind"] == "StatefulSet":
            await asyncio.to_thread(scaled, api, item, 1)
    (tmp_path / "account").write_text(api.tokens["planner"])
    async with mesh_of(tmp_path) as mesh:
        settings = PlannerSettings(
            gateway=[mesh.app.server.admin_address],
            admin_token_file=tmp_path / "token",
            interval_s=1.0,
            act=["kubernetes"],
            kubernetes_scale=[f"{MODEL}:{r}=statefulsets/weft-{r}" for r in Counts._fields],
            kubernetes_api=api.url,
            kubernetes_namespace="weft",
            kubernetes_token_file=tmp_path / "account",
            kubernetes_ca_file=api.ca,
            least_decode=3,
        )
        planner = MeshPlanner(settings, "a", None)
        running = asyncio.create_task(planner.run())

        def alarms() -> set[str]:
            plan = planner.plans.get(MODEL)
            return set() if plan is None else {alarm.name for alarm in plan.alarms}

        async def replicas() -> Counts:
            values = [await asyncio.to_thread(scaled, api, workers[r]) for r in Counts._fields]
            return Counts(*values)

        try:
            async with asyncio.timeout(TIMEOUT_S):
                while await replicas() != Counts(1, 3):
                    await asyncio.sleep(0.2)
            assert "foreign_edit" not in alarms()
            # Nobody is fought: an operator's number stays, and it is told.
            await asyncio.to_thread(scaled, api, workers["decode"], 6)
            await until(lambda: "foreign_edit" in alarms())
            for _ in range(3):
                await planner.changed.wait()
            assert await replicas() == Counts(1, 6)
            # Orders that are refused are no secret either.
            await asyncio.to_thread(api.delete, binding)
            await until(lambda: "no_effect" in alarms())
            assert await replicas() == Counts(1, 6)
            assert (await asyncio.to_thread(api.apply, binding, dry_run=False)).is_success
            await until(lambda: "no_effect" not in alarms())
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_keda_asks_over_tls_by_the_planners_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the certificates that the guide makes, and the names of the ScaledObjects."""
    chart.overlay(tmp_path, ("disaggregated", "planner", "scale-by-keda"), "weft")
    triggers = {
        item["metadata"]["name"]: item["spec"]["triggers"][0]["metadata"]
        for item in render_folder(tmp_path)
        if item["kind"] == "ScaledObject"
    }
    host = triggers["weft-decode"]["scalerAddress"].partition(":")[0]
    tls = tmp_path / "tls"
    assert certs.main([str(tls)]) == 0
    assert certs.main([str(tls), "--service", "planner", "--host", host]) == 0
    monkeypatch.setattr(planner_main, "configure_logging", lambda *_: None)
    files = {
        service: {
            "tls_cert": tls / f"{service}.pem",
            "tls_key": tls / f"{service}-key.pem",
            "tls_ca": tls / "ca.pem",
        }
        for service in ("planner", "client", "rest")
    }
    (tmp_path / "token").write_text(TOKEN)
    ready = tmp_path / "ready.json"
    settings = PlannerSettings(
        gateway=["127.0.0.1:1"],
        admin_token_file=tmp_path / "token",
        metrics_port=None,
        ready_file=ready,
        **files["planner"],
    )
    serving = asyncio.create_task(planner_main.run_planner(settings))
    try:
        await until(ready.exists)
        address = json.loads(ready.read_text())["address"]

        def channel(service: str) -> grpc.aio.Channel:
            own = files[service]
            made = grpc.ssl_channel_credentials(
                own["tls_ca"].read_bytes(),
                own["tls_key"].read_bytes(),
                own["tls_cert"].read_bytes(),
            )
            options = (("grpc.ssl_target_name_override", host),)
            return grpc.aio.secure_channel(address, made, options=options)

        for name, metadata in triggers.items():
            sent = {**metadata, "modelFromEnv": "served"}
            trigger = keda.ScaledObjectRef(name=name, namespace="weft", scalerMetadata=sent)
            async with channel("client") as made:
                stub = externalscaler_pb2_grpc.ExternalScalerStub(made)
                (spec,) = (await stub.GetMetricSpec(trigger, timeout=TIMEOUT_S)).metricSpecs
                assert spec.metricName == f"weft-served-{metadata['role']}"
                question = keda.GetMetricsRequest(
                    scaledObjectRef=trigger, metricName=spec.metricName
                )
                # No gateway is heard. Without an answer KEDA leaves the numbers as they are.
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetMetrics(question, timeout=TIMEOUT_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # Nobody else's business.
        async with channel("rest") as made:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await externalscaler_pb2_grpc.ExternalScalerStub(made).GetMetricSpec(trigger)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
