"""What users of other servers reported of weights that change in place.

sleep of level 2, then old weights (trl#5312)    test_sleep.py, after level 2
one tag awake (vllm-omni#4473)                   test_sleep.py, text after sleep
log-probabilities of another temperature         test_logprob_modes.py, ratio
  (trl#4159, vllm#42259), not finite (SkyRL)       and tokens that could hardly be drawn
a pause that never ends (AReaL#1160)             test_refits.py, a pause that nobody renews
leaks (torch_memory_saver#71, #88)               test_sleep.py, test_sleep_of_parts.py, cycles
routes on prefix hits and apart (sglang#16379,   models/test_routes.py
  vime#32), with MTP                               and below
the rest                                         below
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.contract.request import StopCriteria
from weft.contract.weights import WeightCommand
from weft.engine.loop.llm import LLM
from weft.testing.engine.weight_commands import Commands
from weft.testing.models.choices import asks_surely
from weft.testing.models.every_family import load_reference
from weft.testing.models.lenders import lent_by_host
from weft.testing.models.reference_models import VOCAB
from weft.testing.models.reference_routes import reference_routes
from weft.testing.models.senders import tensors_of
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import make_tiny_mtp

pytestmark = pytest.mark.usefixtures("single_thread")

PROMPTS = [list(range(3, 43)), list(range(5, 20))]
SETTINGS: dict[str, Any] = {
    "page_size": 8,
    "prefill_chunk_tokens": 24,
    "num_pages": 96,
    "dtype": "float32",
}
STOP = StopCriteria(max_tokens=24, ignore_eos=True)
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]


def packed(llm: LLM) -> bytes:
    return llm.engine.parts.local.refits.packed_digest()


@pytest.mark.parametrize("quantization", ["auto", pytest.param("int8", marks=pytest.mark.full)])
def test_every_further_update_of_packed_experts_is_a_fresh_load(
    quantization: str, tmp_path: Path, seed: int
) -> None:
    """SkyRL#1680, vllm#42821, NeMo-RL#3659: the second update wrote the checkpoint's layout into
    packed experts.
    """
    settings = SETTINGS | {"quantization": quantization}
    folders = [
        make_tiny("qwen3_moe", tmp_path / str(at), seed + at, vocab_size=517, **MOE)
        for at in range(2)
    ]
    right = []
    for folder in folders:
        with LLM(folder, **settings) as fresh:
            right.append((texts(fresh), packed(fresh)))
    with LLM(folders[0], **settings) as llm:
        for turn in range(1, 5):
            folder = folders[turn % 2]
            if turn < 3:
                llm.refit(folder)
            else:
                with lent_by_host(tensors_of(folder)) as tensors:
                    llm.command_weights("receive", tensors=tensors)
            assert (texts(llm), packed(llm)) == right[turn % 2], turn


def test_seventeen_updates_hit_no_page_of_an_older_one(tmp_path: Path, seed: int) -> None:
    """NeMo-RL#4018, lmdeploy#4917: caches answered with pages that were 17 updates old."""
    folders = [make_tiny("llama", tmp_path / str(at), seed + at, vocab_size=517) for at in range(3)]
    right = []
    for folder in folders:
        with LLM(folder, **SETTINGS) as fresh:
            right.append(texts(fresh))
    assert right[0] != right[1] != right[2]
    with LLM(folders[0], **SETTINGS) as llm:
        for turn in range(1, 18):
            llm.refit(folders[turn % 3])
            assert texts(llm) == right[turn % 3], turn
        assert llm.engine.scheduler.num_prefix_hit_tokens > 0, "a version that came again"


@pytest.mark.full
def test_ranks_that_pause_while_they_compute_do_not_wait_for_one_another(
    tmp_path: Path, seed: int
) -> None:
    """vllm#32103, #38761, #39366, prime-rl#2325: ranks waited in collectives of steps and of
    updates.
    """
    folders = [
        make_tiny("llama", tmp_path / str(at), seed + at, num_attention_heads=8, vocab_size=517)
        for at in range(2)
    ]
    with LLM(folders[1], **SETTINGS) as fresh:
        right = texts(fresh)
    with LLM(folders[0], **SETTINGS, tp=2) as llm:
        for turn in range(4):
            commands = Commands(llm)
            at = random.randint(2, 12)
            commands.at(at, WeightCommand(query=1, action="pause", mode="keep"))
            folder = str(folders[(turn + 1) % 2])
            commands.after(1, WeightCommand(query=2, action="refit", folder=folder))
            commands.after(2, WeightCommand(query=3, action="resume"))
            found = llm.generate(PROMPTS, stop=STOP)
            commands.wait(3)
            assert [commands.replies[query].failure for query in (1, 2, 3)] == [None] * 3
            assert all(len(one.token_ids) == STOP.max_tokens for one in found)
            if not turn % 2:
                assert texts(llm) == right


def test_nothing_of_the_host_is_kept_after_waking(tmp_path: Path, seed: int) -> None:
    """vllm#16663: the host's copy was not given back. On a GPU it is kept, and counted."""
    with LLM(make_tiny("llama", tmp_path / "m", seed, vocab_size=517), **SETTINGS) as llm:
        texts(llm)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            llm.sleep()
            llm.wake()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.full
def test_routes_with_an_mtp_head_are_the_targets(tmp_path: Path, seed: int) -> None:
    """vime#32: drafts that were refused, and the head's own experts, came among them."""
    make_tiny_mtp("deepseek", tmp_path / "m", seed)
    drafts = {"drafter": "mtp", "draft_gate": "fixed", "enable_return_routed_experts": True}
    reference = load_reference(tmp_path / "m")
    prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in (9, 30)]
    with LLM(tmp_path / "m", **SETTINGS, **drafts) as llm:
        for _ in range(2):
            for prompt, sample in zip(
                prompts, llm.generate(prompts, stop=STOP, routes_from=0), strict=True
            ):
                tokens = prompt + sample.token_ids[:-1]
                found = np.concatenate(sample.routes)
                assert len(found) == len(tokens)
                if asks_surely(reference, tokens):
                    right = reference_routes(reference, tokens)
                    assert all((found[:, at] == chosen).all() for at, chosen in right.items())
        assert llm.engine.counters()["drafted_tokens"] > 0
