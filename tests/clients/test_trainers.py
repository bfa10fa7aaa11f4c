"""TRL's trainer, unmodified, against a mesh with a random model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from weft.testing.meshes.tiny_mesh import TinyMesh

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-trainers" / "bin" / "python"
UPDATES = 20
pytestmark = [pytest.mark.full, pytest.mark.needs("go", "trainers"), pytest.mark.timeout(900)]


def test_trl_trains_adapters_that_a_mesh_serves(tmp_path: Path, rest_binary: Path) -> None:
    root = tmp_path / "adapters"
    out = root / "trl"
    out.mkdir(parents=True)
    mesh = TinyMesh(
        tmp_path / "mesh",
        *("--prefill", "1", "--local-prefill-max-tokens", "0", "--adapter-root", str(root)),
        *("--gateway-args", "--rl"),
    )
    try:
        mesh.wait_ready()
        mesh.wait_healthy()
        token = (mesh.state / "admin-token").read_text().strip()
        url = mesh.url.replace("//", f"//trl:{token}@")
        done = subprocess.run(
            [PYTHON, HERE / "trainers" / "trl_async_grpo.py", mesh.model_dir, url, out],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"step"')]
        rewards = [json.loads(line)["reward"] for line in lines]
        assert len(rewards) == UPDATES, done.stdout[-2000:]
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05, rewards
    finally:
        assert mesh.stop() == 0, mesh.text
