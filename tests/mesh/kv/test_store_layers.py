"""Decode workers that begin to compute while a KV store's pages come layer by layer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy, TinyMesh
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = [pytest.mark.full, pytest.mark.needs("nixl", "go")]
NUM_NEW, LENGTH = 12, 800


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    args = "--load-back-threshold 0 --kv-memory-bytes 16777216 --load-by-layer always"
    mesh = TinyMesh(
        tmp_path_factory.mktemp("store"),
        *("--decode", "2", "--prefill", "0", "--kvstore", "1"),
        f"--decode-args={args} {PATIENT}",
        "--gateway-args=--decode-policy round_robin",
        shape={"num_hidden_layers": 5},
    )
    mesh.wait_ready()
    mesh.wait_healthy()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def ask(mesh: TinyMesh, greedy: Greedy, prompt: list[int]) -> list[common_pb2.FillTimeline]:
    """Asks, checks the tokens, and says where pages came from."""
    request = gateway_pb2.CompleteRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopCriteria(max_tokens=NUM_NEW, ignore_eos=True),
    )
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        (message,) = stub.Complete(request, timeout=120)
    (choice,) = message.choices
    greedy.check(prompt, choice.token_ids, NUM_NEW)
    return list(message.timeline.fills)


def test_another_worker_reads_pages_of_the_store_by_layer(mesh: TinyMesh) -> None:
    greedy = Greedy(mesh.model_dir)
    names = mesh.names("decode")
    sources = list[list[common_pb2.FillTimeline]]()
    for _ in range(3):
        prompt = [random.randrange(3, VOCAB) for _ in range(LENGTH)]
        before = stored(mesh)
        ask(mesh, greedy, prompt)
        wait_until(lambda before=before: stored(mesh) - before >= LENGTH // 16, 60)

        def comes_by_layer(prompt: list[int] = prompt) -> bool:
            for name in names:
                mesh.flush(name)
            more = [random.randrange(3, VOCAB) for _ in range(40)]
            sources.append(ask(mesh, greedy, prompt + more))
            # A store that answers late, as it may on a busy machine, is passed over or sends the
            # pages whole.
            is_whole = any(one.last_write_complete_time.ToNanoseconds() for one in sources[-1])
            kinds = [fill.source for fill in sources[-1]]
            return kinds == [common_pb2.FILL_SOURCE_KVSTORE] and not is_whole

        wait_until(comes_by_layer, 60)
        (fill,) = sources[-1]
        assert fill.transport == common_pb2.TRANSPORT_KIND_NIXL
        assert fill.accepted_tokens == LENGTH // 16 * 16


def stored(mesh: TinyMesh) -> int:
    names = mesh.names("decode")
    return sum(mesh.load_now(name).counters["store_stored_pages"] for name in names)
