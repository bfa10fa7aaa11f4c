"""The demo model's draft head and its draft adapter: small, readable, and of use."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer
from weft.checkpoint.adapters.files import CONFIG_FILE, DRAFT_FOLDER, WEIGHTS_FILE
from weft.checkpoint.eagle3_config import Eagle3Config
from weft.checkpoint.end_tokens import end_token_ids
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import StopCriteria
from weft.engine.features.speculative.adapted import AdaptedDrafter
from weft.engine.loop.llm import LLM
from weft.engine.model.heads.draft_adapter import read_draft_adapter
from weft.engine.model.heads.eagle3 import adaptable_shapes
from weft.testing.engine.drafters import RandomGate

ROOT = Path(__file__).resolve().parents[3]
DRAFT = ROOT / "drafts" / "smollm2-135m-eagle3"
ADAPTER = ROOT / "adapters" / "pirate"
HELD_OUT = ROOT / "scripts" / "draft_training" / "held_out.json"


def test_it_is_small_and_names_no_place_of_its_maker() -> None:
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) < 20 << 20
    with safe_open(DRAFT / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name in ("config.json", "README.md"):
        assert not re.search(r"/(?:tmp|root|home|work)/", (DRAFT / name).read_text())


def test_it_can_name_what_ends_a_text() -> None:
    tensors = load_file(DRAFT / "model.safetensors")
    named = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(tensors["t2d"].nonzero().flatten(), named)
    model = resolve_model("demo")
    config, generation = (
        json.loads((model / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    ends = end_token_ids(config, generation)
    assert ends
    assert set(ends) <= set(named.tolist())
    assert config["vocab_size"] == len(tensors["t2d"])


def test_its_lm_head_is_the_models() -> None:
    """Servers that read the published layout take the rows of the file, and no others."""
    tensors = load_file(DRAFT / "model.safetensors")
    named = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    (embedding,) = (
        load_file(path)["model.embed_tokens.weight"]
        for path in resolve_model("demo").glob("*.safetensors")
    )
    assert torch.equal(tensors["lm_head.weight"], embedding[named].bfloat16())


def test_the_draft_adapter_is_small_and_fits_the_head() -> None:
    folder = ADAPTER / DRAFT_FOLDER
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1 << 20
    assert "/" not in (folder / CONFIG_FILE).read_text()
    changes = read_draft_adapter(folder, adaptable_shapes(Eagle3Config.load(DRAFT)))
    weights = load_file(DRAFT / "model.safetensors")
    for module, change in changes.items():
        weight = weights[f"midlayer.{module}.weight"].float()
        assert 0.01 < change.norm() / weight.norm() < 1


def held_out_prompts() -> list[list[int]]:
    """Of each kind some, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo"))
    chosen = json.loads(HELD_OUT.read_text())[::8]
    assert {prompt["kind"] for prompt in chosen} == {"chat", "summary", "code"}
    return [
        tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True, return_dict=False
        )
        for prompt in chosen
    ]


@pytest.mark.full
def test_the_draft_adapter_is_better_than_the_head_alone(tmp_path: Path) -> None:
    """On prompts that neither was trained on; the text is what it is without drafts."""
    prompts, stop = held_out_prompts(), StopCriteria(max_tokens=64)
    alone = tmp_path / "pirate"
    alone.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copy(ADAPTER / name, alone)
    texts, gains = [], []
    for folder, drafter in ((ADAPTER, "none"), (alone, "eagle3"), (ADAPTER, "eagle3")):
        settings = {"dtype": "float32", "kv_memory_bytes": 1 << 28, "draft_dir": DRAFT}
        settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
        with LLM(resolve_model("demo"), drafter=drafter, max_draft_tokens=3, **settings) as llm:
            engine = llm.engine
            digest = llm.load_adapter(folder)
            if drafter != "none":
                used = engine.drafter
                assert isinstance(used, AdaptedDrafter)
                end = time.monotonic() + 60
                while used.sizes()["draft_adapter_reads"] and time.monotonic() < end:
                    used.draft([])
                    time.sleep(0.01)
                assert list(used.drafters) == ([digest] if folder == ADAPTER else [])
                engine.scheduler.running_plans.gate = RandomGate((3,))
            samples = llm.generate(prompts, stop=stop, adapters=[digest] * len(prompts))
            texts.append([sample.token_ids for sample in samples])
            counters = engine.counters()
            gains.append(counters["accepted_tokens"] / max(counters["verified_runs"], 1))
    assert texts[0] == texts[1] == texts[2]
    print(gains)
    assert 0 < gains[1] < gains[2] - 0.2


@pytest.mark.full
def test_drafts_are_right_on_prompts_it_was_not_trained_on() -> None:
    model, prompts = resolve_model("demo"), held_out_prompts()
    with LLM(
        model, kv_memory_bytes=1 << 28, drafter="eagle3", draft_dir=DRAFT, max_draft_tokens=3
    ) as llm:
        for prompt in prompts:  # One at a time, where drafts pay most.
            llm.generate([prompt], stop=StopCriteria(max_tokens=128))
        counters = llm.engine.counters()
    assert counters["verified_runs"] > 100
    assert counters["accepted_tokens"] / counters["verified_runs"] > 0.6
