"""Adapters at the gateway: names, loads, replacements and unloads, with workers without engines."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.empty_pb2 import Empty
from weft.checkpoint.adapters.digest import adapter_digest
from weft.common.adapters.manifest import Entry, Manifest
from weft.gateway.adapters import manager
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.adapters.manager import FleetAdapterManager
from weft.testing.models.adapter_files import WEIGHTS
from weft.testing.services.fake_adapters import LEFT_OUT
from weft.testing.services.gateway_adapters import (
    LONG,
    adapter_mesh,
    adapters,
    ask,
    complete,
    error_of,
    listed,
    load,
    make_root,
    script,
    submits,
    unload,
)
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import gateway_pb2, openai_pb2


def set_step(mesh: Harness, step_s: float) -> None:
    """How long each step of the workers takes from now on."""
    for worker in mesh.workers:
        worker.step_s = step_s


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "adapters")


@pytest.fixture
async def mesh(tmp_path: Path, root: Path) -> AsyncIterator[Harness]:
    async with adapter_mesh(tmp_path, root) as harness:
        yield harness


async def test_a_name_means_a_digest_on_all_workers(mesh: Harness, root: Path) -> None:
    loaded = await load(mesh, "pirate")
    digest = adapter_digest(root / "pirate")
    assert (loaded.adapter.name, loaded.adapter.digest, loaded.parent) == ("pirate", digest, MODEL)
    assert {one.worker_id: one.state for one in loaded.holders} == {
        "decode-0": "device",
        "decode-1": "device",
        "prefill-0": "device",
    }
    for name in ("pirate", f"{MODEL}:pirate"):
        answer = await complete(mesh, name)
        assert answer["model"] == "pirate"
    assert [submit.adapter.digest for submit in submits(mesh)] == [digest, digest]
    assert {submit.model for submit in submits(mesh)} == {MODEL}
    await complete(mesh, MODEL)
    assert [submit.HasField("adapter") for submit in submits(mesh)].count(False) == 1


async def test_copies_are_what_workers_read(mesh: Harness, root: Path) -> None:
    digest = adapter_digest(root / "pirate")
    await load(mesh, "pirate")
    for worker in mesh.workers:
        (order,) = adapters(worker).orders
        assert (order.action, order.digest, order.name) == ("load", digest, "pirate")
        assert adapter_digest(Path(order.directory)) == digest
        assert Path(order.directory) != root / "pirate"


async def test_models_list_adapters_with_their_parent(mesh: Harness) -> None:
    await load(mesh, "pirate")
    data = json.loads((await mesh.openai.Models(Empty())).data)["data"]
    assert [(one["id"], one["parent"]) for one in data] == [(MODEL, None), ("pirate", MODEL)]
    typed = (await mesh.typed.ListModels(gateway_pb2.ListModelsRequest())).models
    assert [(one.name, one.parent, one.ready) for one in typed] == [
        (MODEL, "", True),
        ("pirate", MODEL, True),
    ]
    for name in ("pirate", f"{MODEL}:pirate"):
        request = openai_pb2.RetrieveModelRequest(model=name)
        one = json.loads((await mesh.openai.RetrieveModel(request)).data)
        assert (one["id"], one["parent"]) == ("pirate", MODEL)
        got = await mesh.typed.GetModel(gateway_pb2.GetModelRequest(model=name))
        assert got.model.parent == MODEL


@pytest.mark.parametrize("name", ["nobody", "tiny:nobody", "pirate:tiny", "other:pirate", "tiny:"])
async def test_unknown_names_are_told_what_there_is(mesh: Harness, name: str) -> None:
    await load(mesh, "pirate")
    error = await error_of(complete(mesh, name))
    assert (error.http_status, error.reason) == (404, "MODEL_NOT_FOUND")
    assert "`pirate`" in error.message
    assert f"`{MODEL}`" in error.message


async def test_rest_loads_and_unloads(mesh: Harness) -> None:
    answer = await mesh.json("LoadLoraAdapter", {"lora_name": "pirate", "lora_path": "pirate"})
    assert (answer["id"], answer["parent"], answer["status"]) == ("pirate", MODEL, "success")
    error = await error_of(
        mesh.post("LoadLoraAdapter", {"lora_name": "pirate", "lora_path": "other"})
    )
    assert (error.http_status, error.reason) == (400, "ADAPTER_EXISTS")
    assert error.param == "lora_name"
    body = {"lora_name": "pirate", "lora_path": "other", "load_inplace": True}
    replaced = await mesh.json("LoadLoraAdapter", body)
    assert replaced["digest"] != answer["digest"]
    await mesh.json("UnloadLoraAdapter", {"lora_name": "pirate"})
    error = await error_of(mesh.post("UnloadLoraAdapter", {"lora_name": "pirate"}))
    assert (error.http_status, error.reason) == (404, "ADAPTER_NOT_FOUND")
    assert error.param == "lora_name"


async def test_rest_loads_for_the_base_model_that_is_named(mesh: Harness) -> None:
    body = {"lora_name": "pirate", "lora_path": "pirate"}
    for name in ("model", "base_model_name"):
        error = await error_of(mesh.post("LoadLoraAdapter", {**body, name: "other"}))
        assert (error.http_status, error.reason, error.param) == (404, "MODEL_NOT_FOUND", name)
    two = {**body, "model": MODEL, "base_model_name": "other"}
    error = await error_of(mesh.post("LoadLoraAdapter", two))
    assert (error.http_status, error.param) == (400, "base_model_name")
    same = {**body, "model": MODEL, "base_model_name": MODEL}
    assert (await mesh.json("LoadLoraAdapter", same))["parent"] == MODEL


def copies(mesh: Harness) -> list[str]:
    folder = mesh.app.adapters.registry.root / ".weft"
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


async def test_a_load_that_fails_on_one_worker_leaves_the_old_state(
    mesh: Harness, root: Path
) -> None:
    await load(mesh, "pirate")
    adapters(mesh.workers[1]).problem = lambda order: "layers.3.q_proj.lora_A has a NaN"
    error = await error_of(load(mesh, "pirate", "other", replace=True))
    assert (error.http_status, error.reason) == (400, "ADAPTER_INVALID")
    assert "decode-1: layers.3.q_proj.lora_A has a NaN" in error.message
    assert "decode-0" not in error.message
    assert await listed(mesh) == {"pirate": ["serving"]}
    await complete(mesh, "pirate")
    assert (await error_of(load(mesh, "json"))).reason == "ADAPTER_INVALID"
    assert (await error_of(complete(mesh, "json"))).http_status == 404
    await mesh.wait(lambda: copies(mesh) == [adapter_digest(root / "pirate").hex()])
    adapters(mesh.workers[1]).problem = lambda order: ""
    await load(mesh, "json")
    await complete(mesh, "json")


async def test_what_serves_already_is_pinned_by_all_workers_or_not(mesh: Harness) -> None:
    await load(mesh, "pirate")
    adapters(mesh.workers[1]).problem = lambda order: "no room" if order.is_pinned else ""
    error = await error_of(load(mesh, "pirate", pinned=True))
    assert (error.http_status, error.reason) == (400, "ADAPTER_INVALID")
    assert "decode-1: no room" in error.message
    assert await listed(mesh) == {"pirate": ["serving"]}
    await complete(mesh, "pirate")
    again = await load(mesh, "pirate")
    assert not again.pinned
    async with asyncio.timeout(60):
        while any(one.error for one in (await load(mesh, "pirate")).holders):
            await asyncio.sleep(0.02)
    adapters(mesh.workers[1]).problem = lambda order: ""
    assert (await load(mesh, "pirate", pinned=True)).pinned
    assert await listed(mesh) == {"pirate": ["serving"]}
    for worker in mesh.workers:
        assert adapters(worker).orders[-1].is_pinned


async def test_callers_who_load_the_same_share_one_load(mesh: Harness) -> None:
    loads = [load(mesh, "pirate") for _ in range(5)]
    found = await asyncio.gather(*loads)
    assert len({(one.adapter.digest, one.generation) for one in found}) == 1
    for worker in mesh.workers:
        assert len(adapters(worker).orders) == 1


async def test_a_lenient_load_tells_what_was_left_out(mesh: Harness) -> None:
    body = {"lora_name": "pirate", "lora_path": "pirate", "lenient": True}
    answer = await mesh.json("LoadLoraAdapter", body)
    assert answer["left_out"] == list(LEFT_OUT)
    loaded = await load(mesh, "pirate", lenient=True)
    assert {tuple(one.left_out) for one in loaded.holders} == {LEFT_OUT}


async def test_a_load_waits_no_longer_than_it_is_given(mesh: Harness) -> None:
    await load(mesh, "pirate")
    adapters(mesh.workers[2]).is_stuck = True
    error = await error_of(load(mesh, "pirate", "other", replace=True, timeout_s=2.0))
    assert (error.http_status, error.reason) == (504, "DEADLINE_EXCEEDED")
    assert "prefill-0 still loads it" in error.message
    assert await listed(mesh) == {"pirate": ["serving"]}
    await complete(mesh, "pirate")


async def test_a_timeout_below_zero_is_refused(mesh: Harness) -> None:
    error = await error_of(load(mesh, "pirate", timeout_s=-1.0))
    assert (error.reason, error.param) == ("INVALID_REQUEST", "timeout")


async def test_a_caller_that_goes_away_leaves_the_old_state(mesh: Harness) -> None:
    adapters(mesh.workers[0]).is_stuck = True
    call = asyncio.create_task(load(mesh, "pirate"))
    await mesh.wait(lambda: adapters(mesh.workers[0]).orders)
    assert await listed(mesh) == {"pirate": ["loading"]}
    assert (await error_of(complete(mesh, "pirate"))).http_status == 404
    call.cancel()
    await mesh.wait(lambda: not mesh.app.adapters.manifest.entries)


async def test_a_caller_that_goes_away_while_it_is_registered_leaves_nothing(
    mesh: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name can be loaded at once by somebody else."""
    adapters = mesh.app.adapters
    change, manager = adapters.registry.change, mesh.app._adapter_manager
    has_begun, may_go_on, is_known = threading.Event(), threading.Event(), threading.Event()

    def slowly(changing: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(30)
        return change(changing)

    async def known(*arguments: Any) -> None:
        is_known.set()
        await take_back(*arguments)

    monkeypatch.setattr(adapters.registry, "change", slowly)
    take_back = manager._take_back
    monkeypatch.setattr(manager, "_take_back", known)
    call = asyncio.create_task(load(mesh, "pirate"))
    await mesh.wait(has_begun.is_set)
    call.cancel()
    await mesh.wait(is_known.is_set)
    may_go_on.set()
    await mesh.wait(lambda: adapters.manifest.generation >= 2 and not adapters.manifest.entries)
    assert await listed(mesh) == {}
    await load(mesh, "pirate")


async def test_a_disk_that_does_not_answer_costs_a_load_its_time(
    mesh: Harness, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is copied too late does not stay."""
    registry = mesh.app.adapters.registry
    add_copy, answers = registry.add_copy, threading.Event()
    copied: list[bytes] = []

    def slowly(*arguments: Any) -> bytes:
        assert answers.wait(30)
        copied.append(add_copy(*arguments))
        return copied[-1]

    with monkeypatch.context() as patched:
        patched.setattr(registry, "add_copy", slowly)
        errors = [error_of(load(mesh, "pirate", timeout_s=0.3)) for _ in range(3)]
        for error in await asyncio.gather(*errors):
            assert (error.http_status, error.reason) == (504, "DEADLINE_EXCEEDED")
        await complete(mesh, MODEL)
        digest = adapter_digest(root / "pirate")
        answers.set()
        await mesh.wait(lambda: digest in copied)
        await mesh.wait(lambda: not registry.directory(digest).exists())
    await load(mesh, "pirate")


async def test_a_worker_that_leaves_is_not_waited_for(mesh: Harness) -> None:
    """The name is served everywhere where anything is."""
    adapters(mesh.workers[1]).is_stuck = True
    call = asyncio.create_task(load(mesh, "pirate"))
    await mesh.wait(lambda: adapters(mesh.workers[1]).orders)
    await mesh.workers[1].stop()
    loaded = await call
    assert {one.worker_id for one in loaded.holders if one.state == "device"} == {
        "decode-0",
        "prefill-0",
    }
    await complete(mesh, "pirate")


async def test_a_replacement_serves_the_old_until_the_new_is_everywhere(
    mesh: Harness, root: Path
) -> None:
    old, new = adapter_digest(root / "pirate"), adapter_digest(root / "other")
    await load(mesh, "pirate")
    set_step(mesh, 0.1)
    running = ask(mesh, "pirate")
    await mesh.wait(lambda: submits(mesh))
    adapters(mesh.workers[1]).is_stuck = True
    call = asyncio.create_task(load(mesh, "pirate", "other", replace=True))
    await mesh.wait(lambda: new in adapters(mesh.workers[0]).states)
    await complete(mesh, "pirate")
    assert submits(mesh)[-1].adapter.digest == old
    adapters(mesh.workers[1]).is_stuck = False
    await call
    await complete(mesh, "pirate")
    by_id = {submit.request_id: submit.adapter.digest for submit in submits(mesh)}
    assert sorted(by_id.values()).count(new) == 1
    assert all(old in adapters(worker).states for worker in mesh.workers), "it is still used"
    set_step(mesh, 0.002)
    assert (await running)["usage"]["completion_tokens"] == LONG
    await mesh.wait(lambda: not any(old in adapters(worker).states for worker in mesh.workers))
    assert await listed(mesh) == {"pirate": ["serving"]}
    await mesh.wait(lambda: not mesh.app.adapters.registry.directory(old).exists())
    assert mesh.app.adapters.registry.directory(new).exists()


async def test_an_unload_waits_for_its_requests_and_refuses_new_ones(
    mesh: Harness, root: Path
) -> None:
    digest = adapter_digest(root / "pirate")
    await load(mesh, "pirate")
    set_step(mesh, 0.1)
    running = ask(mesh, "pirate")
    await mesh.wait(lambda: submits(mesh))
    unloading = asyncio.create_task(unload(mesh, "pirate"))
    await mesh.wait(lambda: not mesh.app.adapters.serving())
    error = await error_of(complete(mesh, "pirate"))
    assert (error.http_status, error.reason) == (404, "MODEL_NOT_FOUND")
    assert not unloading.done()
    assert not running.done()
    set_step(mesh, 0.002)
    assert (await running)["usage"]["completion_tokens"] == LONG
    await unloading
    await mesh.wait(lambda: not any(digest in adapters(worker).states for worker in mesh.workers))
    assert await listed(mesh) == {}


def test_another_models_adapter_does_not_stand_for_the_requests_of_the_same_content() -> None:
    directory = AdapterDirectory(None)  # type: ignore[arg-type]
    content = bytes([7] * 32)
    retired, twin, again = (
        Entry(
            name=name,
            digest=content.hex(),
            model=model,
            path="p",
            state=state,
            generation=1,
            created=1.0,
        )
        for name, model, state in (
            ("one", "tiny", "retired"),
            ("two", "other", "serving"),
            ("three", "tiny", "serving"),
        )
    )
    adapters = FleetAdapterManager.__new__(FleetAdapterManager)
    adapters._directory = directory
    adapters._fleet = SimpleNamespace(workers=lambda model: [])  # type: ignore[assignment]
    adapters._num_running = {content: 5}.__getitem__
    for others, num_left in (((), 5), ((twin,), 5), ((twin, again), 0)):
        directory._take(Manifest(generation=1, entries=(retired, *others)))
        assert adapters._num_left(retired) == num_left


async def test_a_second_gateway_sees_what_the_first_did(tmp_path: Path, root: Path) -> None:
    async with (
        gateway(tmp_path / "a", script, adapter_root=root, adapter_linger_s=0.1) as first,
        gateway(tmp_path / "b", script, adapter_root=root, adapter_linger_s=0.1) as second,
    ):
        await load(first, "pirate")
        await complete(second, "pirate")  # at once: it looks again before it says no
        await unload(second, "pirate")
        await first.wait(lambda: not first.app.adapters.serving())
        assert (await error_of(complete(first, "pirate"))).http_status == 404


async def test_a_restarted_gateway_knows_what_was_registered(tmp_path: Path, root: Path) -> None:
    async with gateway(tmp_path / "a", script, adapter_root=root) as first:
        await load(first, "pirate")
    async with gateway(tmp_path / "b", script, adapter_root=root) as second:
        answer = await complete(second, "pirate")
        assert answer["model"] == "pirate"


async def test_a_load_whose_gateway_died_is_in_nobodys_way(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry is forgotten; a load of the name waits for that."""
    monkeypatch.setattr(manager, "_LEASE_S", 1.0)
    monkeypatch.setattr(manager, "_RENEW_S", 0.1)
    async with gateway(tmp_path, script, adapter_root=root) as mesh:
        left = await left_by_a_dead_gateway(mesh)
        (entry,) = left.entries
        registry = mesh.app.adapters.registry
        registry.change(lambda old: old._with(left.entries))
        await mesh.wait(lambda: not registry.read().entries)
        assert time.time() >= entry.until, "its gateway may have been slow"
        registry.change(lambda old: old._with([replace(entry, until=time.time() + 0.5)]))
        adapters(mesh.workers[0]).is_stuck = False
        loaded = await load(mesh, "pirate", "json")
        assert loaded.adapter.digest == adapter_digest(root / "json")


async def test_a_gateway_that_stops_calls_its_loads_off(tmp_path: Path, root: Path) -> None:
    async with gateway(tmp_path, script, adapter_root=root) as mesh:
        adapters(mesh.workers[0]).is_stuck = True
        call = asyncio.create_task(error_of(load(mesh, "pirate")))
        await mesh.wait(lambda: mesh.app.adapters.manifest.entries)
        await mesh.app.stop()
        assert (await call).retryable
        assert mesh.app.adapters.registry.read().entries == ()


async def left_by_a_dead_gateway(mesh: Harness) -> Manifest:
    """The registry as a gateway leaves it that is killed while it loads."""
    adapters(mesh.workers[0]).is_stuck = True
    call = asyncio.create_task(load(mesh, "pirate"))
    await mesh.wait(lambda: mesh.app.adapters.manifest.entries)
    manifest = mesh.app.adapters.registry.read()
    call.cancel()
    await mesh.wait(lambda: not mesh.app.adapters.manifest.entries)
    return manifest


async def test_a_load_of_another_gateway_is_left_alone(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes."""
    monkeypatch.setattr(manager, "_LEASE_S", 3.0)
    monkeypatch.setattr(manager, "_RENEW_S", 0.1)
    async with (
        gateway(tmp_path / "a", script, adapter_root=root) as first,
        gateway(tmp_path / "b", script, adapter_root=root) as second,
    ):
        adapters(first.workers[0]).is_stuck = True
        call = asyncio.create_task(load(first, "pirate"))
        await second.wait(lambda: second.app.adapters.manifest.entries)
        error = await error_of(load(second, "pirate", "json"))
        assert (error.reason, error.retryable) == ("OVERLOADED", True)
        error = await error_of(load(first, "pirate", "json"))
        assert (error.reason, error.retryable) == ("OVERLOADED", True)
        (entry,) = second.app.adapters.manifest.entries
        await second.wait(lambda: time.time() > entry.until + 1.5)  # Longer than tidying takes.
        adapters(first.workers[0]).is_stuck = False
        assert (await call).adapter.digest == adapter_digest(root / "pirate")


async def test_bad_adapters_are_refused_and_service_goes_on(mesh: Harness, root: Path) -> None:
    (root / "linked").symlink_to(root / "pirate")
    (root / "pirate" / WEIGHTS).write_bytes(b"short")
    for name, path in (
        ("x", "pirate"),
        ("x", "linked"),
        ("x", "../adapters/json"),
        ("x", str(root.parent / "json")),
        ("x", "missing"),
        ("a:b", "json"),
        (MODEL, "json"),
        ("", "json"),
    ):
        error = await error_of(load(mesh, name, path))
        assert error.http_status == 400, (name, path, error)
    assert not any(adapters(worker).orders for worker in mesh.workers)
    assert await listed(mesh) == {}
    await complete(mesh, MODEL)


async def test_without_a_root_there_are_none(tmp_path: Path) -> None:
    async with gateway(tmp_path, script) as mesh:
        error = await error_of(load(mesh, "pirate"))
        assert "--adapter-root" in error.message
        assert await listed(mesh) == {}


async def test_workers_without_a_root_are_named(tmp_path: Path, root: Path) -> None:
    async with gateway(tmp_path, script, num_decode=2, adapter_root=root) as mesh:
        adapters(mesh.workers[1]).stop()
        mesh.workers[1].adapters = None
        await mesh.workers[1].stop(keeps_port=True)
        await mesh.workers[1].start(int(mesh.workers[1].address.rpartition(":")[2]))
        fleet = mesh.app.fleet
        await mesh.wait(
            lambda: any(
                worker.info is not None and not worker.info.HasField("adapters")
                for worker in fleet.workers()
            )
        )
        error = await error_of(load(mesh, "pirate"))
        assert "decode-1: it was started without --adapter-root" in error.message


async def test_only_keys_that_may_change_adapters(tmp_path: Path, root: Path) -> None:
    from weft.gateway.admission.keys import new_key, write_keys

    plain, plain_entry = new_key("alice")
    allowed, allowed_entry = new_key("ops", manages_adapters=True)
    keys = tmp_path / "keys.json"
    write_keys(keys, [plain_entry, allowed_entry])
    async with gateway(tmp_path, script, adapter_root=root, api_keys_file=keys) as mesh:
        request = gateway_pb2.LoadAdapterRequest(name="pirate", path="pirate")

        def metadata(key: str) -> tuple[tuple[str, str], ...]:
            return (("authorization", f"Bearer {key}"),)

        error = await error_of(mesh.typed.LoadAdapter(request, metadata=metadata(plain)))
        assert error.http_status == 403
        assert (await error_of(mesh.typed.LoadAdapter(request))).http_status == 401
        await mesh.typed.LoadAdapter(request, metadata=metadata(allowed))
        unloading = gateway_pb2.UnloadAdapterRequest(name="pirate")
        error = await error_of(mesh.typed.UnloadAdapter(unloading, metadata=metadata(plain)))
        assert error.http_status == 403


async def test_a_gateway_is_ready_once_the_expected_adapters_were_loaded(
    tmp_path: Path, root: Path
) -> None:
    names = ["pirate", f"{MODEL}:json"]
    async with gateway(
        tmp_path, script, adapter_root=root, wait=False, expected_adapters=names
    ) as mesh:
        await load(mesh, "pirate")
        error = await error_of(mesh.openai.Ready(Empty()))
        assert (error.http_status, error.stage) == (503, "adapter")
        assert error.message == f"not ready: adapters that are not loaded yet: {MODEL}:json"
        await load(mesh, "json")
        assert json.loads((await mesh.openai.Ready(Empty())).data) == {"status": "ready"}
        # Later unloads are operators' affair.
        await unload(mesh, "json")
        assert json.loads((await mesh.openai.Ready(Empty())).data) == {"status": "ready"}
