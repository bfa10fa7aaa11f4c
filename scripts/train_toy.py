"""Trains a small model against a mesh by policy gradients, as a trainer of reinforcement learning
does: sample from the mesh, compute the loss here, let the mesh take the new weights.

The task is a toy: an answer's reward is the share of its tokens with an even id. The gateway needs
`--rl`. The weights go through a folder that this host and the workers' share, or are broadcast over
gloo to a process group of all workers, as SGLang's trainers do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

PROMPT = (5, 9, 11, 40, 77, 123)
TIMEOUT_S = 600.0
GROUP = "toy"
KEPT = 2
"""Versions that stay on disk: workers may still read the one before the newest."""


class Sampled(NamedTuple):
    """Answers to one prompt."""

    ids: torch.Tensor
    """[answers, tokens]."""
    logprobs: torch.Tensor
    """[answers, tokens]: as the mesh says, at temperature 1."""

    @property
    def rewards(self) -> torch.Tensor:
        """[answers]."""
        return (self.ids % 2 == 0).float().mean(1)


class Mesh:
    """The REST port of a mesh, for a trainer."""

    def __init__(self, url: str, token: str, model: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False
        )
        self._model = model

    def sample(self, answers: int, tokens: int, seed: int) -> Sampled:
        body = {
            "model": self._model,
            "prompt": list(PROMPT),
            "n": answers,
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        choices = self.post("/v1/completions", body)["choices"]
        return Sampled(
            torch.tensor([one["token_ids"] for one in choices]),
            torch.tensor([one["logprobs"]["token_logprobs"] for one in choices]),
        )

    def update(self, folder: Path, version: str) -> None:
        body = {"model_path": str(folder.resolve()), "weight_version": version}
        answer = self.post("/update_weights_from_disk", body)
        assert answer["weight_version"] == version, answer

    @property
    def num_ranks(self) -> int:
        return int(self._client.get("/get_world_size").json()["world_size"])

    def post(self, path: str, body: object) -> Any:
        answer = self._client.post(path, json=body)
        if answer.status_code != 200:
            raise SystemExit(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()


class Group:
    """The process group of this trainer, rank 0, and all ranks of a mesh. Each update is announced
    by a call, which answers when all workers have received it, while this process broadcasts.
    """

    def __init__(self, mesh: Mesh, host: str) -> None:
        self._mesh = mesh
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        size = 1 + mesh.num_ranks
        place = {"master_address": host, "master_port": port, "backend": "gloo"}
        body = {**place, "rank_offset": 1, "world_size": size, "group_name": GROUP}

        def join() -> None:
            address = f"tcp://{host}:{port}"
            wait = timedelta(seconds=TIMEOUT_S)
            made = dist.rendezvous(address, 0, size, timeout=wait)  # type: ignore[attr-defined]
            store, _, _ = next(made)
            # The prefixes that PyTorch gives the keys of a group with this name.
            for prefix in (GROUP, f"{GROUP}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
            self._group = dist.ProcessGroupGloo(  # type: ignore[attr-defined]
                store, 0, size, wait
            )

        self._beside(join, "/init_weights_update_group", body)

    def update(self, weights: dict[str, torch.Tensor], version: str) -> None:
        body = {
            "names": list(weights),
            "dtypes": [str(one.dtype).removeprefix("torch.") for one in weights.values()],
            "shapes": [list(one.shape) for one in weights.values()],
            "group_name": GROUP,
            "weight_version": version,
        }

        def send() -> None:
            for one in weights.values():
                self._group.broadcast(one, 0).wait()

        answer = self._beside(send, "/update_weights_from_distributed", body)
        assert answer["weight_version"] == version, answer

    def close(self) -> None:
        self._mesh.post("/destroy_weights_update_group", {"group_name": GROUP})

    def _beside(self, work: Callable[[], None], path: str, body: object) -> Any:
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(work)
            answer = self._mesh.post(path, body)
            done.result(TIMEOUT_S)
        return answer


def logprobs_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """[answers, tokens] of [answers, tokens] after the prompt."""
    prompts = torch.tensor(PROMPT).expand(len(ids), -1)
    logits = model(torch.cat([prompts, ids], 1)).logits[:, len(PROMPT) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def save(weights: dict[str, torch.Tensor], version: Path) -> None:
    version.mkdir(parents=True)
    save_file(weights, version / "model.safetensors", metadata={"format": "pt"})


def train(
    mesh: Mesh, folder: Path, out: Path, updates: int, rate: float, group: Group | None
) -> list[float]:
    """Returns the mean reward before each update and after the last.

    Args:
        out: Folder for the versions, unless there is a group.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    found = list[float]()
    for step in range(updates + 1):
        sampled = mesh.sample(64, 16, step)
        rewards = sampled.rewards
        found.append(float(rewards.mean()))
        own = logprobs_of(model, sampled.ids)
        gap = float((own.detach() - sampled.logprobs).abs().max())
        print(json.dumps({"step": step, "reward": found[-1], "gap": gap}), flush=True)
        if step == updates:
            break
        gains = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        optimizer.zero_grad()
        (-(gains[:, None] * own).mean()).backward()
        optimizer.step()
        version = out / f"step-{step + 1}"
        weights = {name: one.detach().contiguous() for name, one in model.named_parameters()}
        if group is not None:
            group.update(weights, version.name)
            continue
        save(weights, version)
        mesh.update(version, version.name)
        shutil.rmtree(out / f"step-{step + 1 - KEPT}", ignore_errors=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if the reward has risen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="its name in requests")
    parser.add_argument("--token-file", type=Path, required=True, help="the operators' token")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--out", type=Path, help="a new folder for the weights")
    way.add_argument("--gloo", metavar="HOST", help="this host's address, for a group over gloo")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rate", type=float, default=3e-3)
    given = parser.parse_args(arguments)
    mesh = Mesh(given.url, given.token_file.read_text().strip(), given.model)
    group = None if given.gloo is None else Group(mesh, given.gloo)
    out = given.out or Path()
    rewards = train(mesh, given.folder, out, given.updates, given.rate, group)
    if group is not None:
        group.close()
    return 0 if rewards[-1] > rewards[0] else 1


if __name__ == "__main__":
    sys.exit(main())
