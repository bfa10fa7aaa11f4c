"""What `weft up` refuses before it starts anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from weft.cli.up.ports import free_ports
from weft.testing.models.tiny_encoders import make_encoder
from weft.testing.models.tiny_models import make_tiny


def refused(tmp_path: Path, *flags: str) -> str:
    """Its words; no service has left a log."""
    state = tmp_path / "state"
    command = [sys.executable, "-m", "weft.cli", "up", "--no-rest", "--state-dir", str(state)]
    command += ["--grpc-port", str(free_ports("127.0.0.1", 1)[0]), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(state.rglob("*.log"))
    return done.stderr


@pytest.mark.parametrize("device", [(), ("--device", "cpu")])
def test_float16_needs_a_gpu(tmp_path: Path, device: tuple[str, ...]) -> None:
    model = make_tiny("llama", tmp_path / "model", 1)
    told = refused(tmp_path, "--model", str(model), "--dtype", "float16", *device)
    assert "float16 is not supported on a CPU; use bfloat16 or float32" in told


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--tp", "3"), "tp = 3: the model's 4 query heads cannot be divided evenly; it can be"),
        (("--tp", "2", "--ep", "2"), "LlamaForCausalLM has no experts; take ep = 1"),
    ],
)
def test_ranks_that_cannot_divide_a_model(
    flags: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    model = make_tiny("llama", tmp_path / "model", 1, num_attention_heads=4)
    assert expected in refused(tmp_path, "--model", str(model), "--device", "cpu", *flags)


@pytest.mark.full
def test_encoders_keep_no_kv(tmp_path: Path) -> None:
    model = make_encoder("bert", tmp_path / "encoder", 1)
    flags = ("--model", str(model), "--device", "cpu", "--kv-dtype", "int8")
    assert "encoder: encoders keep no KV; leave the flag out" in refused(tmp_path, *flags)


def test_a_model_without_a_class_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "deepseek"
    folder.mkdir()
    config = {"architectures": ["DeepseekV32ForCausalLM"], "text_config": {"vocab_size": 9}}
    (folder / "config.json").write_text(json.dumps(config))
    told = refused(tmp_path, "--model", str(folder))
    reason = "(missing: sparse attention, by an indexer)"
    assert f"'DeepseekV32ForCausalLM' is not supported {reason}; supported: " in told
    assert "hidden_size" not in told
