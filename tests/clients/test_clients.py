"""Public clients in the flow of their tutorials, unmodified, against a mesh with the demo model.

Each client is a script in an environment of its own (`scripts/get_clients.py` makes it): a client's
dependencies are no business of Weft's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from weft.checkpoint.demo import DEMO_NAME
from weft.checkpoint.resolve import resolve_model
from weft.common.settings import list_text
from weft.testing.meshes.local_mesh import MODEL, LocalMesh
from weft.testing.models.tiny_embedders import make_classifier, make_embedder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEEING = ROOT / "models" / "smollm2-135m-images"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
POOLING = ("cohere_sdk", "langchain_embeddings", "llama_index_embeddings")
"""Scripts that ask small models for vectors and ranks."""
ABOVE_OTHERS = (
    *("langchain_chat.py", "litellm_completion.py", "openai_agents.py"),
    *("pydantic_ai_agent.py", "langchain_embeddings.py", "llama_index_embeddings.py"),
    "openai_agents.mjs",
)
"""Scripts whose packages call Weft by the same requests as those of other scripts."""
LOAD_TOOLS = ("aiperf_profile", "guidellm_benchmark")
"""Scripts whose packages `make test` does not install."""
pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[LocalMesh]:
    """One for all clients: the demo model, and small models for vectors and ranks."""
    folder = tmp_path_factory.mktemp("clients")
    shape: dict[str, Any] = {"vocab_size": 517, "max_position_embeddings": 1024}
    prompts = {"query": "Given a query, find passages: "}
    embedder = make_embedder("qwen3", folder / "embedder", tokenizer=True, prompts=prompts, **shape)
    labels = {"id2label": {"0": "LABEL_0"}}
    ranker = make_classifier("qwen3", folder / "ranker", **shape, **labels)
    (ranker / "tokenizer.json").write_bytes((embedder / "tokenizer.json").read_bytes())
    # The same text twice: the demo model has near-ties that bfloat16 cannot tell.
    flags = ["--prefill", "0", "--dtype", "float32", "--kv-memory-bytes", str(512 << 20)]
    flags += ["--model", DEMO_NAME, "--model-name", MODEL]
    for path in (embedder, ranker):
        flags += ["--model", list_text([str(path)]), "--model-name", path.name]
    mesh = LocalMesh(folder, *flags)
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[LocalMesh]:
    """A mesh with the demo model that takes images."""
    flags = ["--model", str(SEEING), "--dtype", "float32", "--prefill", "0"]
    mesh = LocalMesh(tmp_path_factory.mktemp("seeing"), *flags, "--kv-memory-bytes", str(256 << 20))
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def scripts(folder: str, suffix: str, without: Collection[str] = ()) -> list[Any]:
    found = sorted(path.stem for path in (HERE / folder).glob(f"*{suffix}"))
    return marked(
        [name for name in found if name not in ("settings", "pictures", *without)], suffix
    )


def marked(names: Iterable[str], suffix: str) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.full] if name + suffix in ABOVE_OTHERS else ())
        for name in names
    ]


def run(mesh: LocalMesh, *command: str, model: str = MODEL) -> None:
    """Runs a client's script, which asserts what its user expects."""
    environment = {
        **os.environ,
        "WEFT_TEST_URL": mesh.url,
        "WEFT_TEST_MODEL": model,
        "WEFT_TEST_SCENES": str(SEEING / "scenes"),
        "WEFT_TEST_MODEL_DIR": str(resolve_model(DEMO_NAME)),
        "OPENAI_BASE_URL": f"{mesh.url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": mesh.url,
        "ANTHROPIC_API_KEY": "none",
        "NO_PROXY": "127.0.0.1,localhost",
        # It asks the network for prices otherwise.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        command,
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.needs("python-clients")
@pytest.mark.parametrize("name", marked(POOLING, ".py"))
def test_a_client_that_asks_for_vectors_works(mesh: LocalMesh, name: str) -> None:
    run(mesh, str(PYTHON), f"python/{name}.py")


@pytest.mark.needs("python-clients")
@pytest.mark.parametrize("name", scripts("python", ".py", without=(*LOAD_TOOLS, *POOLING)))
def test_a_python_client_works(mesh: LocalMesh, name: str) -> None:
    run(mesh, str(PYTHON), f"python/{name}.py")


@pytest.mark.needs("load-clients")
@pytest.mark.parametrize("name", LOAD_TOOLS)
def test_a_load_generator_works(mesh: LocalMesh, name: str) -> None:
    run(mesh, str(PYTHON), f"python/{name}.py")


@pytest.mark.needs("node-clients")
@pytest.mark.parametrize("name", scripts("js", ".mjs"))
def test_a_javascript_client_works(mesh: LocalMesh, name: str) -> None:
    run(mesh, "node", f"js/{name}.mjs")


@pytest.mark.full
@pytest.mark.needs("python-clients")
@pytest.mark.parametrize("name", scripts("images", ".py"))
def test_a_python_client_shows_a_picture(seeing: LocalMesh, name: str) -> None:
    run(seeing, str(PYTHON), f"images/{name}.py", model=SEEING.name)


@pytest.mark.full
@pytest.mark.needs("node-clients")
def test_a_javascript_client_shows_a_picture(seeing: LocalMesh) -> None:
    run(seeing, "node", "images/ai_sdk.mjs", model=SEEING.name)
