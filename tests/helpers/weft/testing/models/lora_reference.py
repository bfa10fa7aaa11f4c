"""PEFT's own forward beside the engine's, and engines that hold adapters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from weft.checkpoint.adapters.digest import adapter_digest
from weft.contract.adapters import AdapterOrder
from weft.contract.messages import Inbox
from weft.contract.request import TokenLogprob
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import GeneratedSample
from weft.testing.models.choices import NEAR_TIE, Choices, check_choices, where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_adapters import peft_model

BASE = b""
LAST_LAYER_MLP = {"r": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"]}


def settings_of(num_layers: int) -> list[dict[str, Any]]:
    """`peft.LoraConfig` fields of eight adapters that differ in every way that there is."""
    mlp = ["gate_proj", "up_proj", "down_proj"]
    return [
        {"r": 8, "lora_alpha": 16},
        {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        {"r": 16, "lora_alpha": 8, "use_rslora": True},
        {"r": 3, "target_modules": ["down_proj"]},
        {"r": 8, "rank_pattern": {"q_proj": 20}, "alpha_pattern": {"down_proj": 4}},
        {"r": 24, "target_modules": ["k_proj", "o_proj"]},
        {"r": 1, "target_modules": ["gate_proj", "up_proj"]},
        {"r": 8, "target_modules": mlp, "layers_to_transform": [num_layers - 1]},
    ]


class PeftModels:
    """A base model in transformers, and adapters on it in PEFT, by digest.

    Args:
        model_dir: Of the base model.
        folder: Where adapters are written.
    """

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self.model_dir = model_dir
        self._folder = folder
        self._models = {BASE: load_reference(model_dir)}
        self.directories: dict[bytes, Path] = {}

    @property
    def digests(self) -> list[bytes]:
        """Digests of all adapters."""
        return list(self.directories)

    def add(self, seed: int, **settings: Any) -> bytes:
        """Makes a random adapter and writes it; returns its digest."""
        model = peft_model(self.model_dir, seed, **settings)
        directory = self._folder / f"adapter-{len(self.directories)}"
        model.save_pretrained(directory)
        return self.put(directory, model)

    def put(self, directory: Path, model: Any) -> bytes:
        """Takes an adapter's directory, and a model that computes the same; returns its digest."""
        digest = adapter_digest(directory)
        self._models[digest] = model
        self.directories[digest] = directory
        return digest

    @torch.inference_mode()
    def greedy(self, digest: bytes, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely tokens after a prompt."""
        return Choices(
            lambda tokens: self.logits(digest, tokens), prompt, num_tokens, self._models[digest]
        )

    @torch.inference_mode()
    def clear_greedy(
        self, digest: bytes, prompt: Sequence[int], num_tokens: int
    ) -> tuple[list[int], float]:
        """The same, and how far at least a token was ahead of the next, as a share of the logits'
        size: below 1e-6 either may come first in float32.
        """
        tokens, least = list(prompt), float("inf")
        for _ in range(num_tokens):
            logits = self._models[digest](input_ids=torch.tensor([tokens])).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            least = min(least, (best - second) / float(logits.abs().max()))
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :], least

    @torch.inference_mode()
    def logits(self, digest: bytes, tokens: Sequence[int]) -> torch.Tensor:
        """[T, vocab] float32, behind each token."""
        found: torch.Tensor = self._models[digest](input_ids=torch.tensor([list(tokens)])).logits[0]
        return found

    def check(
        self,
        digest: bytes,
        prompt: Sequence[int],
        sample: GeneratedSample,
        near_tie: float = NEAR_TIE,
    ) -> None:
        """Tokens are PEFT's greedy ones; log-probabilities are within 1e-4 of the logits' size, or
        twice `near_tie` if this is more.
        """
        text = [*prompt, *sample.token_ids]
        with where_experts_are_sure(lambda: self._models[digest], text):
            self._check(digest, prompt, sample, near_tie)

    @torch.inference_mode()
    def _check(
        self, digest: bytes, prompt: Sequence[int], sample: GeneratedSample, near_tie: float
    ) -> None:
        tokens = torch.tensor([[*prompt, *sample.token_ids]])
        logits = self._models[digest](input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        check_choices(logits, sample.token_ids, near_tie)
        right = logits.double().log_softmax(-1)
        assert len(sample.logprobs) == len(sample.token_ids)
        for row, found in enumerate(sample.logprobs):
            tolerance = max(1e-4, 2 * near_tie) * float(logits[row].abs().max())
            for token, logprob in _told(found):
                assert abs(logprob - float(right[row, token])) <= tolerance, (row, token)


def _told(found: TokenLogprob) -> list[tuple[int, float]]:
    return [(found.token_id, found.logprob), *found.top]


_queries = itertools.count(1 << 30)
"""Other numbers than those that tests give to orders themselves."""


def load(engine: Engine, directory: Path, **fields: Any) -> bytes:
    """Loads an adapter into an engine that does nothing else; returns its digest."""
    digest = adapter_digest(directory, is_lenient=bool(fields.get("is_lenient")))
    fields = {"name": directory.name, "directory": str(directory), **fields}
    order(engine, AdapterOrder(query=next(_queries), action="load", digest=digest, **fields))
    return digest


def unload(engine: Engine, digest: bytes) -> None:
    """Unloads an adapter."""
    order(engine, AdapterOrder(query=next(_queries), action="unload", digest=digest))


def order(engine: Engine, message: AdapterOrder, timeout_s: float = 60.0) -> None:
    """Gives an order, and waits for its answer.

    Raises:
        WeftError: The answer.
    """
    inbox: Inbox | None = Inbox(adapter_orders=[message])
    deadline = time.monotonic() + timeout_s
    while True:
        replies = engine.turn(inbox).adapter_replies
        for reply in (r for r in replies if r.query == message.query):
            if reply.failure is not None:
                raise reply.failure.to_error()
            return
        inbox = None
        assert time.monotonic() < deadline, "the order was not answered"
        time.sleep(1e-3)


def unload_all(engine: Engine) -> None:
    """Unloads all adapters, and checks that nothing of them is left."""
    manager = engine.adapters
    assert manager is not None
    for state in manager.states():
        unload(engine, state.digest)
    manager.residency.check_integrity()
    assert manager.states() == []
    assert not any(manager.sizes().values()), manager.sizes()
    rows = manager.residency._rows
    assert rows.num_free_slots == rows.max_loras
    assert all(rows.num_free_rows(kind) == count for kind, count in rows.num_rows.items())
