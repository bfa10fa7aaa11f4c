"""Trainers send weights to a mesh on another GPU, if there is one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.testing.engine.nccl_members import one_of_two
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.tiny_mesh import MODEL, SHAPE, VOCAB, TinyMesh
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("cuda", "rest"), pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "clients" / "trainers" / "trl_weights.py"
KIT = ROOT / "build" / "trl-kit" / "site.tar.xz"
SMALL = "--num-pages 200 --max-running-requests 4 --max-step-tokens 128 --prefill-chunk-tokens 64"
UPDATES, NUM_NEW = 3, 24
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def member(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in one_of_two("worker").items():
        monkeypatch.setenv(name, value)


class Trainer:
    """The script as a process on the last GPU."""

    def __init__(self, folder: Path, url: str) -> None:
        site = folder / "site"
        with tarfile.open(KIT) as archive:
            archive.extractall(site, filter="data")
        gpus = ",".join(map(str, range(torch.cuda.device_count())))
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", gpus).split(",")
        settings = {
            "CUDA_VISIBLE_DEVICES": seen[-1],
            "VLLM_HOST_IP": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        self._log = folder / "trainer.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, SCRIPT, site, url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | settings | one_of_two("trainer"),
            )
        self._lines = Queue[str]()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def next(self) -> dict[str, float]:
        """The seconds of its next calls."""
        try:
            line = self._lines.get(timeout=WAIT_S)
        except Empty:
            line = ""
        if not line:
            raise AssertionError(f"TRL's client has ended, or not gone on:\n{self.text}")
        found: dict[str, float] = json.loads(line)
        return found

    def send(self, model: Path) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{model}\n")
        self._process.stdin.flush()
        return self.next()

    def end(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(WAIT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)


@contextmanager
def running(folder: Path) -> Iterator[tuple[TinyMesh, Trainer]]:
    """A mesh of one worker on the first GPU, and TRL's client, which start beside each other."""
    mesh = TinyMesh(
        *(folder / "mesh", "--device", "cuda:0", "--prefill", "0", "--decode-args", SMALL),
        *("--gateway-args", "--rl"),
    )
    trainer: Trainer | None = None
    try:
        token = mesh.state / "admin-token"
        wait_until(token.exists, 30, lambda: mesh.text)
        # It sends no other credentials than those of the URL.
        url = mesh.url.replace("//", f"//trl:{token.read_text().strip()}@")
        trainer = Trainer(folder, url)
        mesh.wait_ready()
        mesh.wait_healthy()
        yield mesh, trainer
    finally:
        if trainer is not None:
            trainer.kill()
        print(mesh.text[-3000:])
        for name in mesh.names("decode"):
            print(mesh.log(name)[-3000:])
        mesh.stop()


def complete(mesh: TinyMesh, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NUM_NEW,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        "logprobs": 0,
    }
    url = f"{mesh.url}/v1/completions"
    answer = httpx.post(url, json=body, timeout=WAIT_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def check_is_of(model: Path, prompt: list[int], found: tuple[list[int], list[float]]) -> None:
    """As transformers computes it with these weights."""
    tokens, logprobs = found
    assert len(tokens) == NUM_NEW
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    check_choices(logits, tokens)
    right = logits.log_softmax(-1)[torch.arange(NUM_NEW), torch.tensor(tokens)]
    assert logprobs == pytest.approx(right.tolist(), abs=1e-3)


@pytest.mark.needs("trl-kit")
def test_trls_client_sends_three_updates(tmp_path: Path) -> None:
    sizes = {"max_position_embeddings": 2048, "num_attention_heads": 6, **SHAPE}
    models = [
        make_tiny("llama", tmp_path / f"version-{at}", random.randrange(2**31), **sizes)
        for at in range(UPDATES)
    ]
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in (90, 40)]
    began = time.monotonic()
    with running(tmp_path) as (mesh, trainer):
        print(f"mesh after {time.monotonic() - began:.1f} s, trainer {trainer.next()}")
        before = [complete(mesh, prompt) for prompt in prompts]
        for prompt, answer in zip(prompts, before, strict=True):
            check_is_of(mesh.model_dir, prompt, answer)
        for model in models:
            print(f"{model.name} {trainer.send(model)}")
            for prompt in prompts:
                check_is_of(model, prompt, complete(mesh, prompt))
        assert trainer.end() == 0, trainer.text
        for prompt in prompts:
            check_is_of(models[-1], prompt, complete(mesh, prompt))
    print(f"all after {time.monotonic() - began:.1f} s")
