"""The training: steps, checkpoints, and what is written down of them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from .model import HybridLM
from .texts import START_ID, IdArray, batches

_NO_DECAY = ("norm", "A_log", "dt_bias", "conv1d", "embed_tokens")
"""Parts of names of parameters without weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides a run's weights, but for the device's speed if `seconds` ends it."""

    steps: int
    """Batches in all."""
    seconds: float = math.inf
    """Time of training in all; the learning rate falls with what is nearer its end."""
    batch: int = 64
    """Rows of a batch."""
    length: int = 512
    """Tokens of a row, a multiple of `delta.CHUNK`."""
    learning_rate: float = 2.5e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    max_gradient: float = 1.0
    mtp_weights: tuple[float, ...] = (0.3, 0.1)
    """Of each step of a chain of the MTP head in the loss."""
    seed: int = 0

    def done(self, step: int, seconds: float) -> float:
        """Share of the run that is over."""
        return max(step / self.steps, seconds / self.seconds)

    def rate(self, step: int, seconds: float) -> float:
        """Learning rate of a step: it rises over the warm-up, and falls as a cosine to zero."""
        falling = 0.5 * (1 + math.cos(math.pi * min(self.done(step, seconds), 1.0)))
        return self.learning_rate * falling * min((step + 1) / self.warmup_steps, 1.0)


def losses(model: HybridLM, rows: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Mean cross-entropy of the model and of each step of its head, float32 [1 + chain].

    Where a conversation begins nothing counts: nobody can tell when a text was cut.

    Args:
        model: Trained.
        rows: int64 [B, T + 1].
        weights: One for each step of the chain.
    """
    states, chain = model(rows[:, :-1], len(weights))
    targets = rows[:, 1:].masked_fill(rows[:, 1:] == START_ID, -100)
    head = model.model.embed_tokens.weight
    found = [entropy(each, head, targets[:, -each.shape[1] :]) for each in (states, *chain)]
    return torch.stack(found)


def entropy(states: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of targets [B, T], those of -100 left out; states [B, T, hidden]."""
    logits = functional.linear(states, head).flatten(0, 1)
    return functional.cross_entropy(logits.float(), targets.flatten())


class Trainer:
    """Trains, and goes on where a run was stopped.

    Args:
        model: On its device.
        texts: Of the training split.
        settings: Of the whole run.
        folder: Of checkpoints.
        is_compiled: Whether layers are compiled.
    """

    def __init__(
        self,
        model: HybridLM,
        texts: Sequence[IdArray],
        settings: Settings,
        folder: Path,
        *,
        is_compiled: bool,
    ) -> None:
        self.model, self._texts, self.settings = model, texts, settings
        self._path = folder / "checkpoint.pt"
        self._device = next(model.parameters()).device
        if is_compiled:
            # Layers of a kind share what is made of them.
            torch._dynamo.config.recompile_limit = 32
            for layer in (*model.model.layers, *model.mtp.layers):
                layer.compile(dynamic=False)
        decayed, others = [], []
        for name, parameter in model.named_parameters():
            (others if any(part in name for part in _NO_DECAY) else decayed).append(parameter)
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=self._device.type == "cuda",
        )
        self.step, self.seconds = 0, 0.0
        self.log: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._resume()

    def run(
        self, log_steps: int, checkpoint_seconds: float, checkpointed: Callable[[], dict[str, Any]]
    ) -> None:
        """Trains to the end.

        Args:
            log_steps: Steps of one entry of the log, which has their mean losses.
            checkpoint_seconds: Between checkpoints.
            checkpointed: Called at each; what it returns goes into the log.
        """
        settings = self.settings
        weights = settings.mtp_weights
        factors = torch.tensor([1.0, *weights], device=self._device)
        source = batches(
            self._texts, settings.batch, settings.length, settings.seed, start=self.step
        )
        sums = torch.zeros(1 + len(weights), device=self._device)
        began, saved, counted = time.monotonic() - self.seconds, self.seconds, 0
        while settings.done(self.step, self.seconds) < 1:
            rows = next(source)
            if self._device.type == "cuda":
                rows = rows.pin_memory().to(self._device, non_blocking=True)
            for group in self._optimizer.param_groups:
                group["lr"] = settings.rate(self.step, self.seconds)
            with torch.autocast(
                self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"
            ):
                found = losses(self.model, rows, weights)
            (found * factors).sum().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_gradient)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            sums += found.detach()
            self.step, counted = self.step + 1, counted + 1
            self.seconds = time.monotonic() - began
            is_over = settings.done(self.step, self.seconds) >= 1
            if counted == log_steps or is_over:
                # Waits for the device, so that the time is that of the steps.
                means = (sums / counted).tolist()
                self.seconds = time.monotonic() - began
                entry = {"step": self.step, "seconds": round(self.seconds, 2), "losses": means}
                self.log.append(entry)
                sums.zero_()
                counted = 0
            if is_over or (counted == 0 and self.seconds - saved > checkpoint_seconds):
                self.log[-1] |= checkpointed()
                self._save()
                # Measuring is no part of the training.
                began, saved = time.monotonic() - self.seconds, self.seconds

    def _save(self) -> None:
        part = self._path.with_suffix(".part")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "log": json.dumps(self.log),
        }
        torch.save(state, part)
        os.replace(part, self._path)

    def _resume(self) -> None:
        # Written by `_save`: with `weights_only` torch builds tensors and plain containers alone.
        state = torch.load(self._path, map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.log = json.loads(state["log"])


@torch.no_grad()
def held_out_losses(
    model: HybridLM, texts: Sequence[IdArray], settings: Settings, num_batches: int
) -> list[float]:
    """Mean losses of texts that are not trained on, as `losses` gives them."""
    device = next(model.parameters()).device
    batch = min(settings.batch, max(sum(map(len, texts)) // (2 * settings.length), 1))
    source = batches(texts, batch, settings.length, 0, start=0)
    found = []
    # A few batches are not worth further compilation.
    with torch.compiler.set_stance("force_eager"):
        for _ in range(num_batches):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                found.append(losses(model, next(source).to(device), settings.mtp_weights))
    means: list[float] = torch.stack(found).mean(0).tolist()
    return means
