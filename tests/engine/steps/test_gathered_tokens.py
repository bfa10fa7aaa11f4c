"""Next tokens that gather in the engine: the same tokens in order, in fewer messages."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import GatewayBatch, Submit
from weft.engine.loop.llm import LLM
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

LENGTHS = [random.randint(2, 30) for _ in range(9)]


def batches_of(model_dir: Path, interval_s: float | None, drafter: str) -> list[GatewayBatch]:
    """What an engine tells of equal requests at two gateways."""
    with (
        one_thread(),
        LLM(
            model_dir,
            dtype="float32",
            num_threads=1,
            num_pages=200,
            page_size=8,
            drafter=drafter,
            draft_gate="fixed",
            stream_interval_s=interval_s,
        ) as llm,
    ):
        submits = [
            Submit(
                gateway=number % 2,
                request_id=f"r{number}",
                attempt=1,
                prompt=[7, 3, 7, 3, number],
                sampling=SamplingParams(temperature=0.0),
                stop=StopCriteria(max_tokens=length, ignore_eos=True),
            )
            for number, length in enumerate(LENGTHS)
        ]
        told = llm.engine.turn(Inbox(submits=submits)).gateways
        while llm.engine.has_work:
            told += llm.engine.turn(None).gateways
    return told


def tokens_of(batches: list[GatewayBatch]) -> dict[str, list[int]]:
    """Tokens by request, each behind those before it; ends come behind all tokens."""
    found: dict[str, list[int]] = defaultdict(list)
    ended: set[str] = set()
    for batch in batches:
        for tokens in batch.all_tokens():
            assert tokens.first_index == len(found[tokens.request_id])
            assert tokens.request_id not in ended
            found[tokens.request_id] += tokens.ids
        ended |= {finished.request_id for finished in batch.finished}
    assert ended == found.keys()
    return found


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_gathered_tokens_are_the_same(tmp_path: Path, drafter: str) -> None:
    model_dir = make_tiny("llama", tmp_path, seed=5, vocab_size=40, num_hidden_layers=2)
    plain = tokens_of(batches_of(model_dir, 0.0, drafter))
    assert sorted(map(len, plain.values())) == sorted(LENGTHS)
    gathered = batches_of(model_dir, 1.0, drafter)
    assert tokens_of(gathered) == plain
    assert tokens_of(batches_of(model_dir, None, drafter)) == plain
