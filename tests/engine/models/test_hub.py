"""Models by name, from a mirror of a hub: `weft model pull | list | verify | rm`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from weft.checkpoint.hub import HubName
from weft.contract.cache_folder import cache_folder
from weft.testing.models.hub_mirror import Mirror, serving_mirror
from weft.testing.models.tiny_models import make_tiny
from weft.testing.terminal import run_on_terminal

NAME = "weft-tests/tiny-llama"
MODEL_COMMAND = (sys.executable, "-m", "weft.cli", "model")


@dataclass
class Hub:
    """A mirror with one model, and a user of it with a cache of their own."""

    mirror: Mirror
    source: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "HF_HOME": str(self.home),
            "HF_ENDPOINT": self.mirror.url,
            "HF_HUB_DISABLE_XET": "1",
            "WEFT_CACHE_DIR": str(self.home / "weft"),
        }

    def weft(
        self, *arguments: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs `weft model`."""
        return subprocess.run(
            [*MODEL_COMMAND, *arguments],
            env=self.environment | environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def pulled(self, *arguments: str, **environment: str) -> Path:
        """The folder that `weft model pull` prints."""
        done = self.weft("pull", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    source = make_tiny("llama", tmp_path / "source", shards=2, tokenizer=True)
    (source / "README.md").write_text("not needed")
    (source / "model.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"not read")
    (source / "original").mkdir()
    shutil.copy(next(source.glob("*.safetensors")), source / "original" / "model.safetensors")
    own_cache, native = tmp_path / "home" / "weft", cache_folder() / "native"
    native.mkdir(parents=True, exist_ok=True)
    own_cache.mkdir(parents=True)
    # Half a minute's work for a compiler.
    (own_cache / "native").symlink_to(native)
    with serving_mirror() as mirror:
        mirror.folders[NAME] = source
        yield Hub(mirror, source, tmp_path / "home")


def test_a_model_is_pulled_listed_verified_and_removed(hub: Hub) -> None:
    folder = hub.pulled(NAME)
    wanted = {
        path.name for path in hub.source.iterdir() if path.suffix in (".json", ".safetensors")
    }
    assert {path.name for path in folder.iterdir()} == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == (hub.source / name).read_bytes()
    listed = hub.weft("list", COLUMNS="300").stdout
    assert NAME in listed
    assert "downloaded" in listed
    verified = hub.weft("verify", NAME)
    assert verified.returncode == 0, verified.stderr
    assert hub.mirror.commit(NAME) in verified.stdout
    with next(folder.glob("*.safetensors")).resolve().open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    changed = hub.weft("verify", NAME)
    assert changed.returncode == 1
    assert "differ from the hub's" in changed.stderr
    assert hub.weft("rm", NAME).returncode == 0
    assert not folder.exists()
    assert NAME not in hub.weft("list", COLUMNS="300").stdout


def test_a_folder_whose_path_looks_like_a_name_is_verified(hub: Hub) -> None:
    *_, parent, name = hub.source.parts
    assert HubName.parse(f"{parent}/{name}") is not None
    done = hub.weft("verify", f"{parent}/{name}", cwd=hub.source.parents[1])
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout


def test_the_bars_of_a_download_end_before_its_folder_is_shown(hub: Hub) -> None:
    status, shown = run_on_terminal([*MODEL_COMMAND, "pull", NAME], hub.environment)
    assert status == 0, shown
    assert "Fetching" in shown
    (commit,) = (hub.home / "hub").glob("models--*/snapshots/*")
    assert shown.endswith(f"\n{commit}\r\n"), shown


def test_what_is_cached_is_served_without_a_hub_and_a_cut_download_goes_on(hub: Hub) -> None:
    weights = sorted(path.name for path in hub.source.glob("*.safetensors"))
    hub.mirror.cut_after = {weights[0]: 1000}
    folder = hub.pulled(NAME)  # The library tries again, from where it was cut.
    assert (folder / weights[0]).read_bytes() == (hub.source / weights[0]).read_bytes()
    sent = list(hub.mirror.sent)
    assert hub.pulled(NAME) == folder
    assert hub.mirror.sent == sent
    commit, hub.mirror.url = hub.mirror.commit(NAME), "http://127.0.0.1:9"
    assert hub.pulled(NAME) == folder
    assert hub.pulled(f"{NAME}@{commit}", HF_HUB_OFFLINE="1") == folder
    (folder / weights[1]).unlink()
    assert "weft model pull" in hub.weft("pull", NAME, HF_HUB_OFFLINE="1").stderr


def test_a_gated_model_needs_a_token_which_comes_from_the_environment(hub: Hub) -> None:
    hub.mirror.gated.add(NAME)
    refused = hub.weft("pull", NAME)
    assert refused.returncode == 1
    assert "HF_TOKEN" in refused.stderr
    hub.pulled(NAME, HF_TOKEN="hf_of_a_test")
    assert set(hub.mirror.tokens) == {"Bearer hf_of_a_test"}


def test_what_cannot_be_pulled_is_one_line_that_says_why(hub: Hub) -> None:
    (hub.source / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    done = hub.weft("pull", NAME)
    assert done.returncode == 1
    assert "MambaForCausalLM" in done.stderr
    assert not [path for path in hub.mirror.sent if path.endswith(".safetensors")]
    for name, said in (
        ("weft-tests/nothing", "no such repository"),
        (f"{NAME}@nowhere", "no revision 'nowhere'"),
    ):
        done = hub.weft("pull", name)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert hub.weft("pull", "no-organisation").returncode == 2


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", HubName("a/b")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a", None),
        ("a/b/c", None),
        ("../b", None),
        ("/a/b", None),
        ("a/b@", None),
        ("a/..", None),
        ("a/b@../../x", None),
        ("a/b c", None),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name
