"""`weft model`: what it prints and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from weft.checkpoint import demo
from weft.checkpoint.digest import file_digest
from weft.cli.main import main
from weft.engine.model.loader import load_model
from weft.testing.models.tiny_embedders import make_embedder
from weft.testing.models.tiny_models import make_tiny


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model", shards=2, tokenizer=True)


def fake_conversion(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    """Makes `model_dir` the converted demo model, all its files in the manifest."""
    digests = {path.name: file_digest(path).hex() for path in model_dir.iterdir()}
    monkeypatch.setattr(demo, "demo_dir", lambda: model_dir)
    monkeypatch.setattr(demo, "manifest_digests", lambda: digests)


def test_list_says_whether_the_demo_model_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path)
    assert main(["model", "list"]) == 0
    out = capsys.readouterr().out
    assert "not converted" in out
    assert str(demo.demo_dir()) in out  # Whole, however long.
    assert "--model ORG/NAME[@REVISION]." in out


def test_verify_prints_the_digests_that_a_worker_has(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "verify", str(model_dir), "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert load_model(model_dir, "float32").digest.hex() in out
    for path in model_dir.glob("*.safetensors"):
        assert f"{file_digest(path).hex()}  {path.name}" in out


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("model-00001-of-00002.safetensors", None, "model-00001-of-00002.safetensors"),
        ("model-00002-of-00002.safetensors", b"", "model-00002-of-00002.safetensors"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("tokenizer_config.json", b'{"chat_template": "{% for x in %}"}', "chat template"),
        ("generation_config.json", b'{"temperature": "hot"}', "generation_config.json"),
    ],
)
def test_verify_names_what_is_damaged(
    model_dir: Path,
    name: str,
    content: bytes | None,
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = model_dir / name
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    assert main(["model", "verify", str(model_dir)]) == 1
    captured = capsys.readouterr()
    assert named in captured.err
    for weights in model_dir.glob("*.safetensors"):
        assert f"{file_digest(weights).hex()}  {weights.name}" in captured.out


def test_verify_compares_tensors_with_the_configuration(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    assert main(["model", "verify", str(model_dir)]) == 1
    assert "config.json asks for (96, " in capsys.readouterr().err


def test_verify_takes_the_task_that_a_worker_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of vectors without modules.json looks like one of texts that has lost its head."""
    folder = make_embedder("qwen3", tmp_path / "model", tokenizer=True)
    (folder / "modules.json").unlink()
    assert main(["model", "verify", str(folder), "--dtype", "float32"]) == 1
    assert "lm_head.weight" in capsys.readouterr().err
    assert main(["model", "verify", str(folder), "--dtype", "float32", "--task", "embed"]) == 0
    loaded = load_model(folder, "float32", task="embed")
    assert loaded.digest.hex() in capsys.readouterr().out
    assert main(["model", "verify", str(folder), "--task", "classify"]) == 1
    assert "has no classification head" in capsys.readouterr().err


def test_verify_of_the_demo_model_names_the_changed_file(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_conversion(monkeypatch, model_dir)
    assert main(["model", "verify"]) == 0
    with (model_dir / "generation_config.json").open("a") as file:
        file.write("\n")
    assert main(["model", "verify"]) == 1
    captured = capsys.readouterr()
    assert "generation_config.json CHANGED" in captured.out
    assert "weft model convert --force" in captured.err


@pytest.mark.parametrize("arguments", [["verify", "/nowhere"], ["verify"], ["convert"]])
def test_failures_are_one_line_and_a_status(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "_PACKAGES", ("weft_no_such_package",))
    assert main(["model", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("weft model: ")
    assert captured.err.count("\n") == 1
