"""One request through every part of a real mesh; `make check` runs this beside tests/unit."""

from __future__ import annotations

import json

import grpc
import httpx
import pytest
from weft.testing.meshes.mesh_kinds import on
from weft.testing.meshes.tiny_mesh import MODEL, Greedy, TinyMesh
from weft.v1 import gateway_pb2, gateway_pb2_grpc

pytestmark = [pytest.mark.needs("go", "nixl"), on("shipped")]
NUM_PROMPT, NUM_NEW = 100, 8


def test_one_prompt_travels_from_rest_to_a_prefill_worker_and_back(
    mesh: TinyMesh, greedy: Greedy
) -> None:
    prompt = greedy.prompt(NUM_PROMPT, NUM_NEW)
    text = greedy.text(greedy.ids(prompt, NUM_NEW))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
    body |= {"ignore_eos": True, "weft_timeline": True}
    with httpx.Client(base_url=f"{mesh.url}/v1", timeout=60, trust_env=False) as client:
        answer = client.post("/completions", json=body).json()
        assert answer["choices"][0]["text"] == text
        (fill,) = answer["weft"]["timeline"]["fills"]
        assert (fill["source"], fill["end_token"]) == ("FILL_SOURCE_PREFILL", 96)
        with client.stream("POST", "/completions", json=body | {"stream": True}) as stream:
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        assert "".join(choice["text"] for choice in choices) == text
        refusal = client.post("/completions", json=body | {"max_tokens": -1})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "max_tokens")
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        models = stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=60).models
    assert [model.name for model in models] == [MODEL]
