"""A mesh over a tiny random model, what operators see of it, and what transformers make of it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from weft.contract.codec.pairs import FAULT
from weft.contract.faults import FaultSpec
from weft.testing.draws import draw_until
from weft.testing.meshes.local_mesh import LocalMesh, wait_until
from weft.testing.models.choices import NEAR_TIE, are_clear, are_clear_draws, check_choices
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny
from weft.v1 import admin_pb2

VOCAB = 517
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 1, "head_dim": 64}
"""Of the model: heads as GPUs take them too."""
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Footprint:
    """System resources of one process."""

    num_fds: int
    num_tasks: int


def _add_marks(path: Path, marks: Sequence[str]) -> None:
    """Makes special tokens of the last ones of a tokenizer, which are pairs of letters."""
    if not marks:
        return
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    for mark in marks:
        left, right = tokenizer["model"]["merges"].pop()
        id_ = vocab.pop(left + right)
        vocab[mark] = id_
        given = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"].append({**given, "id": id_, "content": mark})
    tokenizer["added_tokens"].sort(key=lambda token: int(token["id"]))
    path.write_text(json.dumps(tokenizer))


def _make_alike(model_dir: Path, texts: Sequence[str]) -> None:
    """Gives some tokens the same logits everywhere."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = [tokenizer.token_to_id(text) for text in texts]
    tensors = load_file(model_dir / "model.safetensors")
    rows = tensors["lm_head.weight"]
    rows[ids] = rows[ids[:1]]
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


class TinyMesh(LocalMesh):
    """`weft up` over a random model that answers in milliseconds.

    Args:
        folder: For the model, state and logs.
        flags: Of `weft up`.
        max_context_tokens: Of the model.
        gateways: How many.
        has_draft: Pages hold the KV of a random head too.
        draft_vocab_size: Tokens that it can draft.
        marks: Special tokens in place of the last ones of its vocabulary.
        alike: Tokens that have the same logits, so that biases alone decide between them.
        chat_template: Its own; empty: that of all such models.
        num_heads: Its attention heads.
        kind: Its kind; see `make_tiny`.
        shape: Its configuration, beyond that of all such models.
    """

    model = MODEL
    is_tiny = True

    def __init__(
        self,
        folder: Path,
        *flags: str,
        max_context_tokens: int = 2048,
        gateways: int = 1,
        has_draft: bool = False,
        draft_vocab_size: int = 150,
        marks: Sequence[str] = (),
        alike: Sequence[str] = (),
        chat_template: str = "",
        num_heads: int = 6,
        kind: str = "llama",
        shape: dict[str, Any] | None = None,
    ) -> None:
        self._armed: set[tuple[str, str]] = set()
        self.model_dir = make_tiny(
            kind,
            folder / MODEL,
            seed=random.randrange(2**31),
            tokenizer=True,
            max_position_embeddings=max_context_tokens,
            num_attention_heads=num_heads,
            **{**SHAPE, **(shape or {})},
        )
        _add_marks(self.model_dir / "tokenizer.json", marks)
        if alike:
            _make_alike(self.model_dir, alike)
        if chat_template:
            (self.model_dir / "chat_template.jinja").write_text(chat_template)
        places = ["--model", str(self.model_dir), "--dtype", "float32"]
        if has_draft:
            self.draft_dir = make_tiny_draft(
                folder / "draft",
                self.model_dir,
                max_position_embeddings=max_context_tokens,
                draft_vocab_size=draft_vocab_size,
                eagle_aux_hidden_state_layer_ids=[0, 0, 0],
            )
            places += ["--draft-dir", str(self.draft_dir)]
        super().__init__(folder, *places, *flags, gateways=gateways)

    def services(self) -> list[str]:
        """Names of all services that operators can talk to."""
        ready = {path.stem: path for path in sorted((self.state / "run").glob("*.json"))}
        return [name for name in ready if self.service(name).get("admin_address")]

    def flush(self, name: str) -> None:
        """Drops a service's cached pages."""
        with self.operators(name) as (stub, metadata):
            stub.FlushCache(admin_pb2.FlushCacheRequest(), metadata=metadata, timeout=60)

    def arm(self, name: str, spec: FaultSpec) -> None:
        """Arms a fault in a service whose mesh has `--enable-faults`."""
        request = admin_pb2.InjectFaultRequest(fault=FAULT.encode(spec))
        with self.operators(name) as (stub, metadata):
            stub.InjectFault(request, metadata=metadata, timeout=60)
        self._armed.add((name, spec.point))

    def disarm(self, name: str, point: str) -> None:
        """Disarms the faults at a point."""
        request = admin_pb2.ClearFaultsRequest(point=point)
        with self.operators(name) as (stub, metadata):
            stub.ClearFaults(request, metadata=metadata, timeout=60)
        self._armed.discard((name, point))

    def disarm_all(self) -> None:
        """Disarms what a test that failed has left; services that were restarted have nothing."""
        for name, point in list(self._armed):
            self._armed.discard((name, point))
            if self.ready_file(name) is not None:
                with suppress(grpc.RpcError):
                    self.disarm(name, point)

    def tasks(self, name: str) -> int:
        """Asyncio tasks of a service's server process."""
        return int(self.dump(name)["server"]["tasks"])

    def fds(self) -> dict[str, int]:
        """Open file descriptors of every process, by service."""
        found: dict[str, int] = {}
        for process in self.family():
            name = next((n for n in self._pids if process.pid in self._pids[n]), None)
            assert name is not None, process
            key = name if process.pid == self._pids[name][0] else f"{name} engine"
            found[key] = process.num_fds()
        return found

    @property
    def _pids(self) -> dict[str, tuple[int, ...]]:
        names = [path.stem for path in (self.state / "run").glob("*.json")]
        ready = {name: self.service(name) for name in names}
        return {
            name: tuple(file[key] for key in ("pid", "engine_pid") if file.get(key))
            for name, file in ready.items()
        }

    def wait_empty(self) -> None:
        """Returns once no engine holds anything for anybody."""
        workers = [*self.names("prefill"), *self.names("decode")]

        def left() -> list[tuple[str, Any]]:
            states = [(name, self.dump(name)["engine"]) for name in workers]
            return [
                (name, state)
                for name, state in states
                if any(state["sizes"].values())
                or not state["is_idle"]
                or state["pages"]["promised"]
                or state["pages"]["quarantined"]
                or state["pages"]["free"] + state["pages"]["cached"] != state["pages"]["total"]
            ]

        wait_until(lambda: not left(), 30, lambda: str(left()))


class Greedy:
    """Transformers' greedy continuations of the mesh's model.

    Args:
        model_dir: Of the model.
        near_tie: Difference of logits, relative to the largest one, that float32 cannot tell.
    """

    def __init__(self, model_dir: Path, near_tie: float = NEAR_TIE) -> None:
        self._near_tie = near_tie
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._vocab_size = int(self._model.config.vocab_size)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def ids(self, prompt: list[int], num_new: int) -> list[int]:
        """Token ids, past any end of sequence."""
        found: list[int] = []
        tokens, cache = torch.tensor([prompt]), None
        with torch.inference_mode():
            for _ in range(num_new):
                out = self._model(tokens, past_key_values=cache, use_cache=True)
                cache, tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                found.append(int(tokens))
        return found

    def check(self, prompt: list[int], found: Sequence[int], num_new: int) -> None:
        """Each of these ids is the choice behind those before it, where float32 can tell."""
        assert len(found) == num_new
        check_choices(self._logits_behind(prompt, found), found, self._near_tie)

    def is_clear(self, prompt: list[int], num_new: int) -> bool:
        """Whether float32 can tell each of `ids`: for texts whose ids a client does not see."""
        return are_clear(self._logits_behind(prompt, self.ids(prompt, num_new)), self._near_tie)

    @torch.inference_mode()
    def is_clear_draw(
        self,
        prompt: Sequence[int],
        found: Sequence[int],
        *,
        bias: Mapping[int, float] | None = None,
        **drawn: Any,
    ) -> bool:
        """Whether float32 can tell these ids of a sample: see `are_clear_draws`."""
        logits = self._logits_behind(prompt, found)
        for token, value in (bias or {}).items():
            logits[:, token] += value
        return are_clear_draws(logits, found, len(prompt), **drawn)

    @torch.inference_mode()
    def _logits_behind(self, prompt: Sequence[int], found: Sequence[int]) -> torch.Tensor:
        """Before each of the ids, `[len(found), vocabulary]`."""
        logits: torch.Tensor = self._model(torch.tensor([[*prompt, *found]])).logits
        return logits[0, len(prompt) - 1 : -1]

    def prompt(self, length: int, num_new: int, *, begin: Sequence[int] = ()) -> list[int]:
        """A beginning and random tokens, of which `is_clear` is true."""
        return draw_until(
            lambda: [*begin, *(random.randrange(3, self._vocab_size) for _ in range(length))],
            lambda prompt: self.is_clear(prompt, num_new),
        )

    def text(self, ids: list[int]) -> str:
        """The text that a client should see."""
        return self._tokenizer.decode(ids)

    def ids_of(self, characters: str) -> list[int]:
        """Tokens that are made of such characters alone."""
        texts = {i: self.text([i]) for i in range(self._vocab_size)}
        return [i for i, text in texts.items() if text and set(text) <= set(characters)]
