"""What sleeps beside a language model: draft heads and models, adapters, towers, embedders."""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from weft.contract.errors import ConfigError
from weft.contract.request import StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_embedders import make_embedder
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import make_tiny_mtp
from weft.testing.models.tiny_vision import IMAGE_TOKEN_ID, make_vision

pytestmark = pytest.mark.usefixtures("single_thread")

SETTINGS: dict[str, Any] = {"page_size": 8, "num_pages": 64, "dtype": "float32"}
STOP = StopCriteria(max_tokens=24, ignore_eos=True)
PROMPTS = [list(range(3, 43)), list(range(5, 20))]
LARGE, LEAST, PAGE = 64 << 20, 1 << 14, 1 << 12
SIZE, TOKENS = 64, 16
"""Side of an image, and its tokens."""

Answers = Callable[[LLM], Any]


def texts(llm: LLM, adapters: tuple[bytes, ...] = ()) -> list[list[int]]:
    found = llm.generate(PROMPTS, stop=STOP, adapters=adapters)
    return [one.token_ids for one in found]


@contextmanager
def with_head(path: Path, seed: int) -> Iterator[tuple[LLM, Answers]]:
    target = make_tiny("llama", path / "m", seed)
    draft = make_tiny_draft(path / "draft", target, seed, shares=False)
    drafts = {"draft_dir": draft, "drafter": "eagle3", "draft_gate": "fixed"}
    with LLM(target, **SETTINGS, **drafts) as llm:
        yield llm, texts


@contextmanager
def with_mtp(path: Path, seed: int) -> Iterator[tuple[LLM, Answers]]:
    make_tiny_mtp("deepseek", path / "m", seed)
    with LLM(path / "m", **SETTINGS, drafter="mtp", draft_gate="fixed") as llm:
        yield llm, texts


@contextmanager
def with_draft_model(path: Path, seed: int) -> Iterator[tuple[LLM, Answers]]:
    target, draft = (make_tiny("llama", path / name, seed) for name in ("m", "draft"))
    with LLM(target, **SETTINGS, drafter="model", draft_dir=draft, draft_gate="fixed") as llm:
        yield llm, texts


@contextmanager
def with_adapters(path: Path, seed: int) -> Iterator[tuple[LLM, Answers]]:
    folder = make_tiny("llama", path / "m", seed)
    config = json.loads((folder / "config.json").read_text())
    adapters = [make_adapter(path / str(at), config, seed + at) for at in range(2)]
    with LLM(folder, **SETTINGS, enable_lora=True) as llm:
        first, _ = (llm.load_adapter(one, is_pinned=True) for one in adapters)
        yield llm, lambda llm: texts(llm, (first, b""))


@contextmanager
def with_tower(path: Path, seed: int) -> Iterator[tuple[LLM, Answers]]:
    folder = make_vision("smolvlm", path / "m", seed)
    data = random.randbytes(SIZE * SIZE * 3)

    def answers(llm: LLM) -> list[int]:
        # Of each call another image, as far as its digest goes, so that the tower encodes it.
        count = getattr(llm, "num_asked", 0)
        llm.num_asked = count + 1  # type: ignore[attr-defined]
        one = Media.of("image", f"test-{count}", (SIZE, SIZE, 3), data)
        llm.put([one])
        prompt = [5, *[IMAGE_TOKEN_ID] * TOKENS, 9, 11]
        span = MediaSpan(position=1, length=TOKENS, digest=one.digest)
        return llm.generate([prompt], stop=STOP, spans=[[span]])[0].token_ids

    with LLM(folder, **(SETTINGS | {"num_pages": 200})) as llm:
        yield llm, answers


@contextmanager
def with_vectors(path: Path, seed: int) -> Iterator[tuple[LLM, Answers]]:
    folder = make_embedder("qwen3", path / "m", seed)
    with LLM(folder, **SETTINGS, max_running_requests=16) as llm:
        params = PoolingParams(output="embedding")
        yield llm, lambda llm: [one.tobytes() for one in llm.pool(PROMPTS, params)]


PARTS = {
    "eagle3": with_head,
    "mtp": with_mtp,
    "model": with_draft_model,
    "adapters": with_adapters,
    "tower": with_tower,
    "vectors": with_vectors,
}
SHORT = ("eagle3", "adapters", "vectors")
MARKED = [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.full) for kind in PARTS]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def lasting(llm: LLM, answers: Answers) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All tensors of this process in which the system can take whole pages and which requests do
    not change, each with a copy.
    """
    gc.collect()  # Engines of earlier tests: up to gigabytes, compared after each sleep.
    found = [one.detach() for one in gc.get_objects() if type(one) in (torch.Tensor, Parameter)]
    found = [one for one in found if one.is_cpu and not one.is_mkldnn and one.is_contiguous()]
    copied = [(one, one.clone()) for one in found if one.nbytes >= LEAST and not is_gone(one)]
    answers(llm)
    return [(one, copy) for one, copy in copied if torch.equal(one, copy)]


def is_gone(one: torch.Tensor) -> bool:
    """Whether its memory is zeros, beside what shares pages with others."""
    flat = one.view(-1).view(torch.uint8)
    return not flat[PAGE:-PAGE].any()


@pytest.mark.parametrize("kind", MARKED)
def test_parts_are_as_they_were(kind: str, tmp_path: Path, seed: int) -> None:
    with PARTS[kind](tmp_path, seed) as (llm, answers):
        right = answers(llm)
        assert answers(llm) == right
        known = lasting(llm, answers)
        files = sum(one.stat().st_size for one in tmp_path.rglob("*.safetensors"))
        for _ in range(2):
            assert llm.sleep().asleep == ["weights", "kv_cache"]
            gone = {one.data_ptr(): one.nbytes for one, _ in known if is_gone(one)}
            assert sum(gone.values()) > 0.6 * files
            assert llm.wake().asleep == []
            assert all(torch.equal(one, copy) for one, copy in known)
            assert answers(llm) == right


@pytest.mark.full
@pytest.mark.parametrize("kind", PARTS)
def test_a_hundred_cycles_lose_nothing(kind: str, tmp_path: Path, seed: int) -> None:
    with PARTS[kind](tmp_path, seed) as (llm, answers):
        right, found = answers(llm), []
        known = lasting(llm, answers)
        for turn in range(100):
            llm.sleep(tags=[["weights"], ["weights", "kv_cache"]][turn % 2])
            llm.wake()
            assert all(torch.equal(one, copy) for one, copy in known)
            if turn % 10 == 0:
                assert answers(llm) == right
                found.append(resident())
        assert max(found[1:]) - min(found[1:]) < LARGE


@pytest.mark.parametrize("kind", ["vectors", pytest.param("tower", marks=pytest.mark.full)])
def test_what_no_update_brings_is_not_dropped(kind: str, tmp_path: Path, seed: int) -> None:
    with PARTS[kind](tmp_path, seed) as (llm, answers):
        right = answers(llm)
        with pytest.raises(ConfigError, match="give 1"):
            llm.sleep(level=2)
        assert llm.weights.asleep == []
        assert answers(llm) == right


def test_a_head_outlives_dropped_weights(tmp_path: Path, seed: int) -> None:
    with with_head(tmp_path, seed) as (llm, answers):
        right = answers(llm)
        llm.sleep(level=2)
        llm.wake()
        llm.refit(tmp_path / "m")
        assert answers(llm) == right


def test_adapters_that_come_while_weights_sleep_are_written_afterwards(
    tmp_path: Path, seed: int
) -> None:
    folder = make_tiny("llama", tmp_path / "m", seed)
    config = json.loads((folder / "config.json").read_text())
    known, late = (make_adapter(tmp_path / str(at), config, seed + at) for at in range(2))
    with LLM(folder, **SETTINGS, enable_lora=True) as llm:
        digests = [llm.load_adapter(one) for one in (known, late)]
        right = [texts(llm, (one, one)) for one in digests]
        llm.unload_adapter(digests[1])
        writes = llm.engine.counters()["adapter_writes"]
        llm.sleep()
        llm.load_adapter(late, is_pinned=True)
        for _ in range(20):
            llm.engine.turn()
        assert llm.engine.counters()["adapter_writes"] == writes
        llm.wake()
        assert [texts(llm, (one, one)) for one in digests] == right
