"""Three ways in which prefix caches over recurrent layers went wrong in public, rebuilt:
vllm#53912, sglang#39830 and LMCache#4247.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.contract.handle import FillEvent
from weft.contract.request import StopCriteria
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.engine.loop.reports import load_report
from weft.engine.sampling.sampler import derive_seed
from weft.testing.engine.drafters import KnownDrafter
from weft.testing.engine.eagle3_cases import WatchedHead
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import (
    OF_STATES,
    check_choices,
    check_same,
    where_experts_are_sure,
)
from weft.testing.models.reference_models import VOCAB
from weft.testing.models.tiny_mtp import make_tiny_mtp

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, NUM_NEW = 8, 18
PAGE_BYTES = 2_048
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "checkpoint_tokens": 4 * PAGE,
    "max_running_requests": 2,
    "poison_free_pages": True,
}
States = Mapping[tuple[int, ...], Sequence[torch.Tensor]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """A small Qwen3-Next with an MTP head."""
    path = tmp_path_factory.mktemp("hybrid") / "model"
    make_tiny_mtp("qwen", path, seed)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> torch.nn.Module:
    """The same in transformers."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def random_tokens(count: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(count)]


def ask(llm: LLM, prompt: list[int], num_new: int = NUM_NEW) -> tuple[list[int], int]:
    """A greedy answer, and how many tokens of the prompt were found in the prefix cache."""
    before = llm.engine.counters()["prefix_hit_tokens"]
    (sample,) = llm.generate([prompt], stop=StopCriteria(max_tokens=num_new, ignore_eos=True))
    return sample.token_ids, llm.engine.counters()["prefix_hit_tokens"] - before


@torch.inference_mode()
def check_answer(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> None:
    """Each token is the most likely one behind all the text before it."""
    logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    with where_experts_are_sure(lambda: model, [*prompt, *answer]):
        check_choices(logits[len(prompt) - 1 : -1], answer, OF_STATES)


def cached_states(engine: Engine) -> States:
    """What the prefix cache has of recurrent layers, by the tokens before it."""
    (states,), executor = engine.parts.companions, engine.parts.local
    assert states is not None
    assert states._index is not None
    assert executor.states is not None
    pools = (*executor.states.pools.blocks, *executor.states.pools.row_blocks)
    found: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for node, kept in states._index._of_node.items():
        at, packed = node, b""
        while at.parent is not None:
            at, packed = at.parent, at.tokens + packed
        tokens = tuple(np.frombuffer(packed, np.int32).tolist())
        found[tokens] = [pool[kept.block].clone() for pool in pools]
    return found


def check_states(path: Path, model: torch.nn.Module, found: States) -> None:
    """States are those of an engine that computes each text alone, in one piece, without drafts."""
    assert found
    values = SETTINGS | {"checkpoint_tokens": PAGE, "max_running_requests": 64, "mtp_head": True}
    with LLM(path, num_pages=400, **values) as plain:
        for tokens in sorted(found, key=len, reverse=True):
            ask(plain, [*tokens, 3], 1)
        expected = cached_states(plain.engine)
    for tokens, states in found.items():
        with where_experts_are_sure(lambda: model, tokens):
            # Engines without the head keep no rows for it.
            for state, right in zip(states, expected[tokens], strict=False):
                assert (state - right).abs().max() <= 1e-3 * right.abs().max(), len(tokens)


def test_rejected_drafts_leave_nothing_in_states_that_are_cached(
    path: Path, model: torch.nn.Module
) -> None:
    """vllm#53912: with an MTP head the same prompt was answered otherwise once others were asked,
    and from then on, since states of drafts had been cached.
    """
    tools = random_tokens(61)
    first, other = [*tools, *random_tokens(9)], [*random_tokens(13), *tools]
    with LLM(path, num_pages=200, prefix_cache=False, **SETTINGS) as plain:
        texts = {tuple(prompt): ask(plain, prompt)[0] for prompt in (first, other, tools)}
        turn = [*first, *texts[tuple(first)], *random_tokens(7)]
        texts[tuple(turn)] = ask(plain, turn)[0]
    for asked, answer in texts.items():
        check_answer(model, list(asked), answer)
    known = {(asked, derive_seed(0, 0)): [*asked, *answer] for asked, answer in texts.items()}
    with LLM(path, num_pages=200, drafter="mtp", **SETTINGS) as llm:
        WatchedHead(llm.engine, KnownDrafter(known, VOCAB, 0.6))
        hits = []
        for prompt in (first, other, first, turn, tools, turn, other, first):
            answer, hit = ask(llm, prompt)
            check_same(lambda: model, prompt, answer, texts[tuple(prompt)], near_tie=OF_STATES)
            hits.append(hit)
        assert [hit > 0 for hit in hits] == [False] * 2 + [True] * 6
        counters = llm.engine.counters()
        assert 0 < counters["accepted_tokens"] < counters["drafted_tokens"]
        check_states(path, model, cached_states(llm.engine))


@pytest.mark.parametrize(("num_pages", "num_slots"), [(24, 400), (90, 0)])
def test_pages_without_their_states_are_not_continued(
    path: Path, model: torch.nn.Module, num_pages: int, num_slots: int
) -> None:
    """sglang#39830: pages came back from host memory with states of other requests, and then lay in
    the pool as if they were right. In the small pool pages are lost, in the large one only the
    states behind them; host memory has room for some of both.
    """
    tiers = {"host_cache_bytes": num_slots * PAGE_BYTES, "load_back_threshold": 0}
    prompts = [random_tokens(42 + 9 * index) for index in range(6)]
    with LLM(path, num_pages=num_pages, **SETTINGS, **tiers) as llm:
        assert llm.engine.info.page_bytes == PAGE_BYTES
        answers = [ask(llm, prompt)[0] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            check_answer(model, prompt, answer)
        again = [ask(llm, prompt) for prompt in prompts]
        for prompt, (answer, _), expected in zip(prompts, again, answers, strict=True):
            check_same(lambda: model, prompt, answer, expected, near_tie=OF_STATES)
        assert 0 in [hit for _, hit in again]
        counts = load_report(llm.engine.wired).state_counts
        assert counts is not None
        assert counts.checkpoint_tokens == SETTINGS["checkpoint_tokens"]
        assert 0 < counts.continuable_pages <= counts.prefix_pages < num_pages
        assert num_pages == 24 or counts.continuable_pages < counts.prefix_pages
        assert (llm.engine.counters()["evicted_pages"] > 0) == (num_pages == 24)
        turn = [*prompts[-1], *answers[-1], 3]
        answer, hit = ask(llm, turn)
        assert hit == (len(turn) - 2) // PAGE * PAGE
        check_answer(model, turn, answer)
        check_states(path, model, cached_states(llm.engine))
        if llm.engine.tiers is not None:
            (host,) = llm.engine.tiers.report()
            assert host.counters["loaded_pages"]


def without_block(is_whole: bool, event: FillEvent) -> list[FillEvent]:
    """All events, or those but for the last chunk's, which has the state."""
    return [event] if is_whole or event.end_token <= 12 * PAGE else []


def test_a_prefix_from_here_and_its_tail_from_elsewhere(path: Path, model: torch.nn.Module) -> None:
    """LMCache#4247: a state from elsewhere behind a prefix from here gave another text. Here the
    state is the one at the end of what came, or the last one from here if not all came.
    """
    clock, sizes = ManualClock(), {"num_pages": 300, "prefill_chunk_tokens": 2 * PAGE}
    owner, filler = (
        make_engine(path, role, clock, **SETTINGS | sizes) for role in ("decode", "prefill")
    )
    pair, leases = EnginePair(owner, [filler], clock), owner.fills._fills
    try:
        for here in (0, 3 * PAGE, 7 * PAGE + 3, 12 * PAGE + 5):
            for is_whole in (True, False):
                prompt, begin = random_tokens(12 * PAGE + 5), here // PAGE * PAGE
                if here:
                    pair.finish(pair.submit(prompt[:here], 1, []))
                pair.on_event = partial(without_block, is_whole)
                request = pair.submit(prompt, NUM_NEW)
                if not is_whole and begin < 12 * PAGE:
                    # The clock stands still until ten pages are accepted: the fill brings no more.
                    pair.run(lambda: [f.accepted_token for f in leases.values()] == [10 * PAGE])
                    pair.stall(owner.config.fill_progress_timeout_s + 1)
                (answer,) = pair.finish(request)
                check_answer(model, prompt, answer)
                fills = pair.answers[request].finished[0].timeline.fills
                assert [fill.start_token for fill in fills] == [begin] * (begin < 12 * PAGE)
                for fill in fills:
                    end = fill.start_token + fill.accepted_tokens
                    assert end == (12 * PAGE if is_whole else 10 * PAGE)
                    assert ("no progress" in fill.failure) == (not is_whole)
        for engine in (owner, filler):
            check_states(path, model, cached_states(engine))
    finally:
        pair.close()
