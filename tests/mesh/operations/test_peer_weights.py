"""Workers that copy their weights from others of their mesh, with mutual TLS."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from weft.common.worker.kernel_files import KernelFolders, KernelKeeper, kernel_version
from weft.contract.cache_folder import cache_folder
from weft.contract.request import StopCriteria
from weft.contract.start_work import DIGESTS, READING
from weft.engine.loop.llm import LLM
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.secure_mesh import SecureMesh
from weft.testing.meshes.tiny_mesh import MODEL, SHAPE, VOCAB, Greedy, TinyMesh
from weft.testing.models.tiny_models import make_tiny
from weft.v1 import weights_pb2, worker_pb2, worker_pb2_grpc

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600)]

NUM_NEW = 8


def test_a_worker_that_starts_again_copies_its_weights(tmp_path: Path, rest_binary: Path) -> None:
    mesh = SecureMesh(tmp_path, "--weights-from", "auto")
    try:
        mesh.wait_ready()
        greedy = Greedy(mesh.model_dir)
        prompt = greedy.prompt(60, NUM_NEW)
        expected = greedy.text(greedy.ids(prompt, NUM_NEW))
        assert mesh.complete(prompt, NUM_NEW) == expected
        os.kill(mesh.service("decode-0")["pid"], signal.SIGKILL)
        wait_until(lambda: "weights copied from a worker" in mesh.log("decode-0"), 120)
        mesh.wait_ready()
        wait_until(lambda: mesh.ready_file("decode-0") is not None, 120)

        def answers() -> bool:
            return mesh.complete(prompt, NUM_NEW) == expected

        wait_until(answers, 60)

        def info(name: str) -> worker_pb2.GetInfoResponse:
            stub, request = worker_pb2_grpc.WorkerServiceStub, worker_pb2.GetInfoRequest()
            found: worker_pb2.GetInfoResponse = mesh.call("cli", name, stub, "GetInfo", request)
            return found

        copied = {"starting the engine", "copying the model from a worker", "opening the ports"}
        assert copied <= set(info("decode-0").start_seconds)
        assert {READING, DIGESTS} <= set(info("prefill-0").start_work_seconds)
        assert DIGESTS not in info("decode-0").start_work_seconds
        # Another worker's weights are an update, here to the same.
        refit = ("refit", "decode-0", "--from", "prefill-0", "--state-dir", str(mesh.state))
        done = mesh.weft(*refit, "--version", "again")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("decode-0: version again, ")
        assert answers()
        # Only workers are told where weights lie.
        stub, request = worker_pb2_grpc.WorkerServiceStub, weights_pb2.OfferWeightsRequest()
        assert mesh.call("prefill", "decode-0", stub, "OfferWeights", request).ranks
        for caller in ("gateway", "client", "cli"):
            with pytest.raises(grpc.RpcError) as refused:
                mesh.call(caller, "decode-0", stub, "OfferWeights", request)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        check_kernels(mesh, tmp_path / "kernels")
    finally:
        assert mesh.stop() == 0, mesh.text


@pytest.mark.full
def test_two_workers_of_a_mesh_copy_a_third_at_once(tmp_path: Path, rest_binary: Path) -> None:
    """A decode and a prefill worker copy, over REST, while the mesh answers."""
    workers = ("--decode", "2", "--prefill", "1", "--local-prefill-max-tokens", "0")
    mesh = TinyMesh(tmp_path, *workers, "--decode-args", PATIENT, "--gateway-args", "--rl")
    try:
        mesh.wait_ready()
        mesh.wait_healthy()
        sizes = {"max_position_embeddings": 2048, "num_attention_heads": 6, **SHAPE}
        other = make_tiny("llama", tmp_path / "other", 91, tokenizer=True, **sizes)
        prompts = [[random.randrange(3, VOCAB) for _ in range(70)] for _ in range(4)]
        before, right = (greedy_tokens(folder, prompts) for folder in (mesh.model_dir, other))
        assert before != right
        headers = {"Authorization": f"Bearer {(mesh.state / 'admin-token').read_text().strip()}"}

        def post(path: str, body: object) -> httpx.Response:
            url = f"{mesh.url}/{path}"
            return httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)

        def answer(prompt: list[int]) -> list[int]:
            body = {
                **{"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW, "ignore_eos": True},
                **{"temperature": 0, "return_token_ids": True},
            }
            done = post("v1/completions", body)
            assert done.status_code == 200, done.text
            found: list[int] = done.json()["choices"][0]["token_ids"]
            return found

        def weights() -> dict[str, Any]:
            done = post("weights_checker", {"action": "checksum"})
            assert done.status_code == 200, done.text
            found: dict[str, Any] = done.json()["workers"]
            return found

        assert [answer(prompt) for prompt in prompts] == before
        first = weights()
        assert len(first) == 3
        with mesh.operators("decode-0") as (stub, metadata):
            request = weights_pb2.RefitRequest(folder=str(other), version="2")
            stub.Refit(request, metadata=metadata, timeout=120)
        second = weights()
        (source,) = (name for name in second if second[name] != first[name])
        with ThreadPoolExecutor(4) as threads:
            # Long enough to go on across the copies.
            asked = [threads.submit(answer, prompt) for prompt in prompts * 4]
            copied = post("update_weights_from_peer", {"worker": source})
            assert copied.status_code == 200, copied.text
            assert all(len(one.result(120)) == NUM_NEW for one in asked)
        told = copied.json()
        assert sorted(told["workers"]) == sorted(set(first) - {source})
        assert {one["version"] for one in told["workers"].values()} == {"2"}
        assert len({one["packed_digest"] for one in weights().values()}) == 1
        for _ in range(2):
            with ThreadPoolExecutor(4) as threads:
                assert list(threads.map(answer, prompts)) == right
        unknown = post("update_weights_from_peer", {"worker": "nobody"})
        assert (unknown.status_code, source in unknown.text) == (400, True), unknown.text
    finally:
        assert mesh.stop() == 0, mesh.text


def greedy_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(folder, dtype="float32", num_pages=64) as fresh:
        return [one.token_ids for one in fresh.generate(prompts, stop=stop)]


def check_kernels(mesh: SecureMesh, folder: Path) -> None:
    """A worker gets the library that another one has compiled and uses; others get nothing."""
    request = worker_pb2.GetKernelsRequest(version=kernel_version())
    came: dict[str, bytes] = {}
    with mesh.open("prefill", "decode-0") as channel:
        for part in worker_pb2_grpc.WorkerServiceStub(channel).GetKernels(request, timeout=60):
            came[part.name] = came.get(part.name, b"") + part.data
            if part.digest:
                assert hashlib.blake2b(came[part.name], digest_size=32).digest() == part.digest
    native = {name: content for name, content in came.items() if name.startswith("native/")}
    used = {path.name: path.read_bytes() for path in (cache_folder() / "native").glob("*.so")}
    assert native
    assert all(used[name.removeprefix("native/")] == content for name, content in native.items())
    with KernelKeeper(KernelFolders(folder / "triton", folder / "native")) as keeper:
        for name, content in came.items():
            keeper.take(name, content, hashlib.blake2b(content, digest_size=32).digest())
    assert len(list((folder / "native").iterdir())) == len(native)
    for caller, version in (
        ("gateway", kernel_version()),
        ("prefill", "triton 0, cpython-30, ia64"),
    ):
        stub = worker_pb2_grpc.WorkerServiceStub
        other = worker_pb2.GetKernelsRequest(version=version)
        with mesh.open(caller, "decode-0") as channel, pytest.raises(grpc.RpcError) as refused:
            list(stub(channel).GetKernels(other, timeout=60))
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert (refused.value.code() == denied) == (caller == "gateway")
