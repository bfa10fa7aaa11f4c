"""Draft adapters: requests with an adapter that brings one are drafted for with it."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.checkpoint.adapters.files import DRAFT_FOLDER
from weft.contract.errors import AdapterError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.features.speculative.adapted import AdaptedDrafter
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.engine.model.heads.draft_adapter import MODULES, read_draft_adapter
from weft.testing.engine.drafters import KnownDrafter
from weft.testing.engine.eagle3_cases import WatchedHead, check_chains
from weft.testing.models.merged_adapters import merged, read
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import (
    DRAFT_RANK,
    make_draft_adapter,
    make_tiny_draft,
    merged_head,
)
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 517
LAYERS = 4
GREEDY = SamplingParams(temperature=0.0)
STOP = StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    folder = tmp_path_factory.mktemp("t")
    return make_tiny("llama", folder, seed, vocab_size=VOCAB, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def draft_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), target_dir, seed + 1)


def llm(target_dir: Path, **settings: Any) -> LLM:
    given = {"dtype": "float32", "page_size": PAGE, "prefill_chunk_tokens": 2 * PAGE}
    return LLM(target_dir, enable_lora=True, **given, **settings)


def drafter_of(engine: Engine, digest: bytes) -> AdaptedDrafter:
    """Once it has read an adapter's draft adapter."""
    drafter = engine.drafter
    assert isinstance(drafter, AdaptedDrafter)
    for _ in range(6000):
        drafter.draft([])
        if digest in drafter.drafters:
            return drafter
        time.sleep(0.01)
    raise TimeoutError("no draft adapter was read")


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.full)])
def test_drafts_are_those_of_the_adapted_head(
    pp: int, target_dir: Path, draft_dir: Path, tmp_path: Path, seed: int
) -> None:
    """In batches with others; and the text is what it is without."""
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS)
    own, other = (make_adapter(tmp_path / name, config, seed + i) for i, name in enumerate("ab"))
    draft = make_draft_adapter(own / DRAFT_FOLDER, draft_dir, seed + 7)
    prompts = [[random.randrange(3, VOCAB) for _ in range(3 * PAGE + 3)] for _ in range(12)]
    with llm(target_dir) as plain:
        adapters = [plain.load_adapter(own), plain.load_adapter(other), b""] * 4
        expected = [s.token_ids for s in plain.generate(prompts, GREEDY, STOP, adapters=adapters)]
    texts = {(tuple(p), GREEDY.seed): p + e for p, e in zip(prompts, expected, strict=True)}
    known = KnownDrafter(texts, VOCAB, 0.6)
    with llm(target_dir, draft_dir=draft_dir, drafter="eagle3", pp=pp) as drafting:
        engine = drafting.engine
        assert [drafting.load_adapter(own), drafting.load_adapter(other)] == adapters[:2]
        drafter = drafter_of(engine, adapters[0])
        assert list(drafter.drafters) == adapters[:1]
        watched = WatchedHead(engine, known)
        for _ in range(3):  # After the first time on a warm cache.
            samples = drafting.generate(prompts, GREEDY, STOP, adapters=adapters)
            assert [sample.token_ids for sample in samples] == expected
        drafting.unload_adapter(adapters[0])
        assert not drafter.drafters
    heads = {
        adapters[0]: merged_head(tmp_path / "head", draft_dir, draft),
        adapters[1]: draft_dir,
        b"": draft_dir,
    }
    folders = dict(zip(adapters[:3], (own, other, None), strict=True))
    chains = watched.chains
    for digest, head in heads.items():
        begins = [p for p, used in zip(prompts, adapters, strict=True) if used == digest]
        watched.chains = [c for c in chains if any(c[0][: len(b)] == b for b in begins)]
        served, folder = target_dir, folders[digest]
        if folder is not None:
            served = tmp_path / f"served-{digest.hex()[:8]}"
            shutil.copytree(target_dir, served)
            merged(target_dir, read(folder, target_dir)).save_pretrained(served)
        check_chains(watched, served, head)


def test_what_cannot_be_used_is_left_out(
    target_dir: Path, draft_dir: Path, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS)
    own = make_adapter(tmp_path / "a", config, seed)
    make_draft_adapter(own / DRAFT_FOLDER, draft_dir, seed)
    file = own / DRAFT_FOLDER / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.midlayer.self_attn.o_proj.lora_B.weight"
    save_file({**tensors, name: torch.zeros(5, DRAFT_RANK)}, file)
    with llm(target_dir, draft_dir=draft_dir, drafter="eagle3") as drafting:
        digest = drafting.load_adapter(own)
        (sample,) = drafting.generate([[5, 6, 7]], GREEDY, STOP, adapters=[digest])
        assert len(sample.token_ids) == STOP.max_tokens
    assert "o_proj" in caplog.text
    shapes = dict.fromkeys(MODULES, (6, 7))
    half, other = torch.zeros(6, DRAFT_RANK), name.replace("lora_B", "lora_A")
    for bad, message in (
        ({name.replace("o_proj", "k_proj"): half}, "k_proj"),
        ({name: half}, "do not fit together"),
        ({name: half, other: torch.zeros(DRAFT_RANK + 1, 7)}, "do not fit together"),
        ({name: half.long()}, "I64"),
        ({name: torch.zeros(5, DRAFT_RANK)}, "size 0 of lora_B is 6"),
        ({name: torch.zeros(6, 0)}, "size 0 of lora_B is 6"),
        ({name: torch.zeros(6, 7), other: torch.zeros(7, 7)}, "rank 7"),
        ({name: half + torch.inf, other: torch.ones(DRAFT_RANK, 7)}, "not finite"),
        ({name: torch.zeros(100_000, 1), other: torch.zeros(1, 100_000)}, "lora_"),
        ({name: half, name.replace("midlayer", "layers.0"): half.clone()}, "twice"),
    ):
        save_file(bad, file)
        with pytest.raises(AdapterError, match=message):
            read_draft_adapter(own / DRAFT_FOLDER, shapes)
