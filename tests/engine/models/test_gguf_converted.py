"""Files that llama.cpp's own converter made of tiny models, against transformers."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from weft.checkpoint.resolve import resolve_model
from weft.engine.model.loader import load_model
from weft.testing.models.choices import where_experts_are_sure
from weft.testing.models.every_family import greedy_tokens, load_reference
from weft.testing.models.paging import PagedDriver
from weft.testing.models.threads import one_thread

TOOLS = Path(__file__).parents[2] / "tools" / "gguf-converter"
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "mixtral", "qwen2-moe", "internlm3"),
    *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "youtu", "minimax-m2"),
    *("gpt-oss", "glm4", "glm4-moe", "dots1", "ling2", "afmoe", "exaone4", "exaone-moe", "llama4"),
    *("ernie", "ernie4_5", "granite", "granite-moe", "granite-shared", "cohere", "cohere2"),
    *("olmo", "olmo2", "olmo3", "olmoe", "gemma", "gemma2", "gemma3", "phi", "phi3", "nemotron"),
    *("smollm3", "seed_oss", "stablelm", "stablelm-parallel", "starcoder2", "apertus", "arcee"),
    *("jais2", "minicpm", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("gemma4", "gemma4-keys", "gemma4-experts", "nemotron_h", "nemotron_h-experts"),
)

pytestmark = [pytest.mark.full, pytest.mark.needs("gguf-converter")]


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process converts all: it imports another `gguf` than this one."""
    folder = tmp_path_factory.mktemp("converted")
    command = [sys.executable, "-m", "weft.testing.models.gguf_converter"]
    done = subprocess.run(
        [*command, str(TOOLS), str(folder), *FAMILIES],
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
        check=False,
    )
    missing = [name for name in FAMILIES if not (folder / name / "file.gguf").exists()]
    assert not missing, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_the_converter(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.checkpoint.gguf_folder.cache_folder", lambda: tmp_path / "cache")
    model = load_model(resolve_model(str(files / name / "file.gguf")), "float32").model
    prompt = [random.randrange(3, 250) for _ in range(33)]
    (tokens,) = PagedDriver(model, num_pages=64).greedy([prompt], 24)
    reference = load_reference(files / name / "model")
    with torch.inference_mode(), where_experts_are_sure(lambda: reference, prompt + tokens):
        assert greedy_tokens(reference, prompt, 24) == tokens
