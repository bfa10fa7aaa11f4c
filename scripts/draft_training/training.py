"""The training: steps, checkpoints, and what is written down of them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch.nn import functional

from .head import DraftHead
from .lora import LoraLinear
from .target import Target
from .texts import Batch, Text, batches

STEP_WEIGHT = 0.8
"""Of each further step of a chain in the loss, as in published training."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """What decides a run's weights."""

    steps: int
    batch_tokens: int = 16_384
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    max_gradient: float = 0.5
    chain: int = 5
    """Steps of training-time test."""
    prompt_weight: float = 0.0
    """What a token of a prompt counts, beside 1 of an answer's."""
    temperature: float = 1.0
    """The target's probabilities are sharpened by it."""
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of a step: it rises over the warm-up, then falls as a cosine to zero."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class StepLosses:
    """Of one batch."""

    total: torch.Tensor
    """The weighted mean that is minimised."""
    by_step: torch.Tensor
    """[chain]: mean cross-entropy of each step."""
    accuracy: torch.Tensor
    """[chain]: share of tokens that the draft's most likely token is, in each step."""


def autocast(target: Target, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Lower precision for the head where the target has it."""
    return torch.autocast(target.device.type, dtype, enabled=dtype != torch.float32)


def losses(
    head: DraftHead,
    target: Target,
    batch: Batch,
    is_drafted: torch.Tensor,
    settings: TrainingSettings,
) -> StepLosses:
    """Cross-entropy against the target's probabilities over the draft vocabulary.

    Of padding, of tokens that the draft cannot name and of the columns of a step that mean nothing
    (the first s of step s) nothing counts.

    Args:
        head: Trained.
        target: Frozen.
        batch: On the host.
        is_drafted: bool [vocab], on the host: the tokens that the draft can name.
        settings: Chain and temperature.
    """
    # On the host, so that it need not wait for the device. Column c predicts token c + 2; the last
    # column predicts nothing.
    following = functional.pad(batch.ids[:, 2:], (0, 1))
    weights = functional.pad(batch.weights[:, 2:], (0, 1)) * is_drafted[following]
    places = weights.nonzero(as_tuple=True)
    counted = weights[places] * (places[1] >= torch.arange(settings.chain)[:, None])
    shares = counted / counted.sum(-1, keepdim=True).clamp(min=1e-6)
    ids, token, shares, rows, columns = (
        tensor.to(target.device, non_blocking=True)
        for tensor in (batch.ids, following[places], shares, *places)
    )
    states = target.states(ids)
    with torch.no_grad():
        # Not the head's own rows, which a file may bring.
        wanted = functional.linear(
            states.last[:, 1:][rows, columns], target.lm_head[head.token_ids]
        )
        probabilities = (wanted.float() / settings.temperature).softmax(-1)
    rope = target.rope(1, ids.shape[1])
    by_step, accuracy = [], []
    for state, share in zip(
        head.unroll(states.aux, ids, rope, settings.chain), shares, strict=True
    ):
        logits = head.logits(state[rows, columns])
        entropy = functional.cross_entropy(logits.float(), probabilities, reduction="none")
        by_step.append((share * entropy).sum())
        is_right = head.token_ids[logits.argmax(-1)] == token
        accuracy.append((share * is_right).sum())
    factors = [STEP_WEIGHT**step for step in range(len(by_step))]
    total = torch.stack([f * loss for f, loss in zip(factors, by_step, strict=True)]).sum()
    return StepLosses(
        total / sum(factors), torch.stack(by_step).detach(), torch.stack(accuracy).detach()
    )


class Trainer:
    """Trains a head; its folder holds what is needed to go on after a stop.

    Args:
        head: In float32, on the target's device.
        target: Frozen.
        texts: To train on.
        settings: Of the run.
        folder: Checkpoint and log; what is there is continued.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        texts: Sequence[Text],
        settings: TrainingSettings,
        folder: Path,
    ) -> None:
        self.head, self.target, self.texts = head, target, texts
        self.settings, self.folder = settings, folder
        self._is_drafted = head.t2d.cpu()
        self._inputs = _digest(head, texts)
        self.step = 0
        self.log: list[dict[str, Any]] = []
        trained = [p for p in head.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2]
        vectors = [p for p in trained if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
        )
        if (folder / "state.json").exists():
            self._restore()

    def run(
        self,
        checkpoint_steps: int,
        evaluate: Callable[[], dict[str, Any]] | None = None,
        max_steps: int | None = None,
    ) -> None:
        """Trains to the end, or for `max_steps` steps.

        Args:
            checkpoint_steps: Between checkpoints, each with an evaluation.
            evaluate: Its result stands in the log.
            max_steps: Of this call.
        """
        settings = self.settings
        end = min(settings.steps, self.step + (max_steps or settings.steps))
        feed = batches(
            self.texts, settings.batch_tokens, settings.prompt_weight, settings.seed, self.step
        )
        began, tokens, recent = time.monotonic(), 0, []
        with Progress() as progress:
            task = progress.add_task("train", total=settings.steps, completed=self.step)
            while self.step < end:
                batch = next(feed)
                recent.append(self._advance(batch))
                tokens += int(batch.weights.count_nonzero())
                is_kept = self.step % checkpoint_steps == 0 or self.step == end
                if is_kept or self.step % 20 == 0:
                    seconds = time.monotonic() - began
                    entry = self._note(recent, tokens / seconds)
                    recent = []
                    progress.update(task, description=f"loss {entry['loss']:.3f}")
                if is_kept:
                    if evaluate is not None:
                        self.log[-1] |= evaluate()
                    self.save()
                progress.update(task, completed=self.step)

    def _advance(self, batch: Batch) -> StepLosses:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate(self.step)
        with autocast(self.target, self.head.lm_head.dtype):
            found = losses(self.head, self.target, batch, self._is_drafted, self.settings)
        found.total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.max_gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return found

    def _note(self, recent: Sequence[StepLosses], tokens_per_s: float) -> dict[str, Any]:
        """Adds the means of the steps since the last entry to the log."""
        by_step = torch.stack([found.by_step for found in recent]).mean(0).tolist()
        entry = {
            "step": self.step,
            "rate": self.settings.rate(self.step - 1),
            "loss": sum(by_step) / len(by_step),
            "losses": by_step,
            "accuracy": torch.stack([found.accuracy for found in recent]).mean(0).tolist(),
            "tokens_per_s": tokens_per_s,
        }
        self.log.append(entry)
        return entry

    def save(self) -> None:
        """Writes the checkpoint: the tensors first, then the file that names them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        for name, parameter in self._trained():
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        file = f"state-{self.step}.safetensors"
        save_file({name: value.contiguous() for name, value in tensors.items()}, self.folder / file)
        state = {
            "file": file,
            "step": self.step,
            "settings": asdict(self.settings),
            "inputs": self._inputs,
            "log": self.log,
        }
        part = self.folder / ".state.json.part"
        part.write_text(json.dumps(state))
        os.replace(part, self.folder / "state.json")
        for old in self.folder.glob("state-*.safetensors"):
            if old.name != file:
                old.unlink()

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.head.named_parameters() if p.requires_grad]

    def _restore(self) -> None:
        state = json.loads((self.folder / "state.json").read_text())
        if state["settings"] != asdict(self.settings):
            raise SystemExit(
                f"{self.folder} holds a run with other settings ({state['settings']}): "
                "give the same, or another folder"
            )
        if state.get("inputs") != self._inputs:
            raise SystemExit(
                f"{self.folder} holds a run with other texts, or another target, head, vocabulary "
                "or alpha: give the same, or another folder"
            )
        tensors = load_file(self.folder / state["file"], device=str(self.target.device))
        prefix = "head."
        self.head.load_state_dict(
            {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        )
        self.step, self.log = state["step"], state["log"]
        for name, parameter in self._trained():
            moments = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step)),
                **moments,
            }


def _digest(head: DraftHead, texts: Sequence[Text]) -> str:
    """SHA-256 of what a run begins with and does not change: frozen tensors, scales and texts."""
    digest = hashlib.sha256()
    trained = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    for name, tensor in (*head.named_parameters(), *head.named_buffers()):
        if name not in trained:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    for module in head.modules():
        if isinstance(module, LoraLinear):
            digest.update(f"{module.scaling} ".encode())
    for text in texts:
        digest.update(f"{len(text.tokens)} {text.num_prompt} ".encode())
        digest.update(np.ascontiguousarray(text.tokens))
    return digest.hexdigest()
