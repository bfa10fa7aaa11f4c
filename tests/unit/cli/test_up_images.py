"""`weft up` lets bodies with images through where a model takes them."""

from __future__ import annotations

from pathlib import Path

from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings
from weft.gateway.settings import GatewaySettings
from weft.testing.models.tiny_images import write_image_model
from weft.testing.models.tiny_tokenizers import write_model_dir


def edge_command(folder: Path, model: Path) -> list[str]:
    settings = load_settings(UpSettings, [], {})
    models = [ModelFolder("tiny", model)]
    plan = plan_mesh(settings, StateFolder(folder / "state"), models, Path("weft-rest"))
    (command,) = [list(one.command) for one in plan.services if one.name == "rest"]
    return command


def test_the_edge_takes_as_many_bytes_as_the_gateway(tmp_path: Path) -> None:
    model = write_image_model(tmp_path / "images")
    command = edge_command(tmp_path, model)
    flags = [f"--model-dir={model}", "--decode=127.0.0.1:1"]
    most = load_settings(GatewaySettings, flags, {}).image_body_bytes
    assert command[command.index("--max-body-bytes") + 1] == str(most)
    assert most * 3 // 4 > 64 << 20


def test_models_for_text_change_nothing(tmp_path: Path) -> None:
    command = edge_command(tmp_path, write_model_dir(tmp_path / "text"))
    assert "--max-body-bytes" not in command
