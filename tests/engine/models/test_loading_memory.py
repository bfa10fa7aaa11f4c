"""How much of the host's memory loading a model of several files takes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weft.contract.cache_folder import cache_folder
from weft.testing.models import loading_memory
from weft.testing.models.tiny_models import make_tiny, tiny_config, tiny_weights

SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12}
LAYERS_A_FILE = 3
SLACK_BYTES = 3 << 20
"""What the allocator keeps."""


def make_shards(path: Path) -> int:
    """A model in files of some layers; bytes of the largest."""
    config = tiny_config("llama", head_dim=64, **SIZES)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    weights = tiny_weights(config, random.randrange(1 << 30))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0 if "embed" in name else -1
        number = layer // LAYERS_A_FILE if layer >= 0 else SIZES["num_hidden_layers"]
        files.setdefault(f"model-{number:05d}.safetensors", {})[name] = tensor
    for file, tensors in files.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return max((path / file).stat().st_size for file in files)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="linux: /proc has no smaps")
def test_no_more_than_one_file_is_in_memory(tmp_path: Path) -> None:
    warm = make_tiny("llama", tmp_path / "warm")
    largest = make_shards(tmp_path / "model")
    program = Path(loading_memory.__file__)
    done = subprocess.run(
        [sys.executable, str(program), str(warm), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "WEFT_CACHE_DIR": str(cache_folder())},
    )
    found = json.loads(done.stdout)
    print(f"largest file {largest:,}: {found}")
    assert found["beyond"] <= 1.2 * largest + SLACK_BYTES
    assert found["left"] == 0
