"""An encoder in a mesh: adapters, limits of its tenant, and traces of its requests."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from transformers import AutoModel
from weft.chaos.tiny import write_tokenizer
from weft.testing.meshes.local_mesh import LocalMesh, wait_until
from weft.testing.meshes.mesh_adapters import load, post, unload
from weft.testing.models.tiny_embedders import write_modules
from weft.testing.models.tiny_encoders import make_encoder
from weft.testing.services.otlp_collector import Collector, collector

pytestmark = [pytest.mark.needs("go"), pytest.mark.full]

MODEL, HIDDEN, TOKENS_A_MINUTE = "encoder", 48, 3000
TERMS = f"[default]\ntokens_per_minute = {TOKENS_A_MINUTE}\n"


class EncoderMesh(LocalMesh):
    """`weft up` with one encoder; `reference` is the model with its adapter."""

    def __init__(self, folder: Path, spans: Collector) -> None:
        seed = random.randrange(2**31)
        model_dir = make_encoder("xlm-roberta", folder / MODEL, seed)
        write_modules(model_dir, HIDDEN, seed, pooling="mean")
        write_tokenizer(model_dir, 517, max_context_tokens=190)
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        base = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
        torch.manual_seed(seed)
        lora = LoraConfig(r=4, init_lora_weights=False, target_modules=["query", "value", "dense"])
        self.reference: PeftModel = get_peft_model(base, lora)
        self.reference.save_pretrained(folder / "adapters" / "own")
        (folder / "tenants.toml").write_text(TERMS)
        self.spans = spans
        super().__init__(
            folder,
            *("--model", str(model_dir), "--model-name", MODEL, "--dtype", "float32"),
            *("--prefill", "0", "--adapter-root", str(folder / "adapters")),
            *("--gateway-args", f"--tenants-file {folder / 'tenants.toml'}"),
        )

    def embed(self, model: str, text: str, **headers: str) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/embeddings",
            json={"model": model, "input": text},
            headers=headers,
            timeout=60,
            trust_env=False,
        )

    @torch.no_grad()
    def wanted(self, text: str, *, has_adapter: bool) -> torch.Tensor:
        model: Any = self.reference if has_adapter else self.reference.get_base_model()
        ids = torch.tensor([self.tokenizer.encode(text).ids])
        if has_adapter:
            vector = model(ids).last_hidden_state[0].mean(0)
        else:
            with self.reference.disable_adapter():
                vector = model(ids).last_hidden_state[0].mean(0)
        return vector / vector.norm()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[EncoderMesh]:
    with collector() as spans, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.address)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        mesh = EncoderMesh(tmp_path_factory.mktemp("encoder"), spans)
        mesh.wait_ready()
        wait_until(lambda: mesh.embed(MODEL, "x").status_code == 200, 120, lambda: mesh.text)
        yield mesh
        assert mesh.stop() == 0, mesh.text


def test_an_adapter_changes_vectors_as_peft_does(mesh: EncoderMesh) -> None:
    answer = load(mesh, "own", "own")
    assert answer.status_code == 200, answer.text
    text = "a text of some words"
    for model, has_adapter in (("own", True), (MODEL, False), ("own", True)):
        answer = mesh.embed(model, text)
        assert answer.status_code == 200, answer.text
        found = torch.tensor(answer.json()["data"][0]["embedding"])
        assert float(found @ mesh.wanted(text, has_adapter=has_adapter)) > 0.99999
    plain, own = (mesh.wanted(text, has_adapter=has) for has in (False, True))
    assert float(plain @ own) < 0.999
    assert unload(mesh, "own").status_code == 200
    assert mesh.embed("own", text).status_code == 404


def test_a_request_is_one_trace(mesh: EncoderMesh) -> None:
    trace_id = secrets.token_hex(16)
    header = f"00-{trace_id}-{secrets.token_hex(8)}-01"
    assert mesh.embed(MODEL, "traced", traceparent=header).status_code == 200
    wanted = {"rest", "gateway", "decode"}

    def services() -> set[str]:
        return {span.service for span in mesh.spans.spans(trace_id)}

    wait_until(lambda: services() == wanted, 30, lambda: str(services()))


def test_a_tenant_has_as_many_tokens_as_it_may(mesh: EncoderMesh) -> None:
    """Goes last: nothing is left of the minute's tokens behind it."""
    used = 0
    for _ in range(TOKENS_A_MINUTE):
        answer = mesh.embed(MODEL, "x" * 150)
        if answer.status_code != 200:
            break
        used += answer.json()["usage"]["prompt_tokens"]
        assert answer.headers["x-ratelimit-limit-tokens"] == str(TOKENS_A_MINUTE)
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert float(answer.headers["retry-after"]) > 0
    assert 0 < used < 2 * TOKENS_A_MINUTE
    assert post(mesh, "/v1/rerank", {"model": MODEL, "query": "x", "documents": ["y"]}).is_error
