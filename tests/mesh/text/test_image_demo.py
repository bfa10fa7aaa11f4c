"""The demo model with its trained image tower says what is in a picture, behind the whole mesh."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_kinds import PATIENT

pytestmark = [pytest.mark.needs("go"), pytest.mark.full, pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m-images"
TURNS = {
    "elephant.jpg": [("What is in the picture?", "An elephant.")],
    "three-cats.jpg": [
        ("How many cats are there?", "Three."),
        ("What colour is the background?", "Blue."),
    ],
    "apple-key-rocket.jpg": [
        ("Is there a rocket in the picture?", "Yes."),
        ("Is there a dog in the picture?", "No."),
    ],
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[LocalMesh]:
    flags = ("--model", str(MODEL), "--dtype", "float32", "--local-prefill-max-tokens", "0")
    flags += ("--kv-memory-bytes", str(256 << 20), "--decode-args", PATIENT)
    mesh = LocalMesh(tmp_path_factory.mktemp("mesh"), *flags)
    with mesh.serving():
        yield mesh


def test_pictures_are_named_and_counted(mesh: LocalMesh) -> None:
    with httpx.Client(base_url=f"{mesh.url}/v1", timeout=300) as client:
        for file, turns in TURNS.items():
            data = base64.b64encode((MODEL / "scenes" / file).read_bytes()).decode()
            image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
            for question, answer in turns:
                content = [image, {"type": "text", "text": question}]
                body = {
                    "model": MODEL.name,
                    "messages": [{"role": "user", "content": content}],
                    "temperature": 0,
                    "max_completion_tokens": 24,
                }
                made = client.post("/chat/completions", json=body)
                assert made.status_code == 200, made.text
                assert made.json()["choices"][0]["message"]["content"] == answer
