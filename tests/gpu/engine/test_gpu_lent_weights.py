"""Weights that a trainer on the same card lends by handles of CUDA's driver."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import ModelError
from weft.contract.request import StopCriteria
from weft.contract.weights import SentTensor, TensorHandle
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.models.families import make_family
from weft.testing.models.senders import tensors_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

PROMPTS = [list(range(3, 43)), list(range(5, 20))]
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
SETTINGS: dict[str, Any] = {"num_pages": 256, "device": "cuda", "prefix_cache": False}
TRAINER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from weft.testing.models.lenders import lent_by_gpu
from weft.testing.models.senders import tensors_of

folder, card = sys.argv[1:]
tensors = {name: one.to(f"cuda:{card}") for name, one in tensors_of(Path(folder)).items()}
print(json.dumps([asdict(one) for one in lent_by_gpu(tensors)], default=bytes.hex), flush=True)
sys.stdin.readline()
"""


@contextmanager
def lent(folder: Path, card: int = 0) -> Iterator[list[SentTensor]]:
    """What another process lends."""
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(folder), str(card)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        try:
            assert child.stdout is not None
            rows = json.loads(child.stdout.readline())
            yield [
                SentTensor(**(row | {"handles": [handle(one) for one in row["handles"]]}))
                for row in rows
            ]
        finally:
            child.kill()


def handle(found: dict[str, Any]) -> TensorHandle:
    return TensorHandle(**(found | {"handle": bytes.fromhex(found["handle"])}))


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"sleep_host_bytes": 0}, {"quantization": "fp8"}, {"device": "cuda:1"}],
    ids=str,
)
def test_lent_weights_are_a_fresh_loads(settings: dict[str, Any], tmp_path: Path) -> None:
    card = int(settings.get("device", "cuda:0").removeprefix("cuda:"))
    if card >= torch.cuda.device_count():
        pytest.skip("it needs a second GPU")
    first, second = (make_tiny("llama", tmp_path / str(seed), seed) for seed in (1, 2))
    with LLM(second, **(SETTINGS | settings)) as fresh:
        right, packed = texts(fresh), fresh.engine.parts.local.refits.packed_digest()
    with LLM(first, **(SETTINGS | settings)) as llm, lent(second, card) as tensors:
        assert texts(llm) != right
        for _ in range(2):
            llm.command_weights("receive", tensors=tensors)
            assert llm.weights.state == "ready"
            assert llm.engine.parts.local.refits.packed_digest() == packed
            assert texts(llm) == right


def test_handles_of_nothing_are_refused_and_the_old_weights_stay(tmp_path: Path) -> None:
    first = make_tiny("llama", tmp_path / "m", 3)
    with LLM(first, **SETTINGS) as llm, lent(first) as tensors:
        right, own = texts(llm), tensors[0].handles[0]
        wrong = [
            (replace(own, handle=bytes(64)), "CUDA error"),
            (replace(own, offset=1 << 50), "of memory of"),
            (replace(own, gpu="00000000-0000-0000-0000-000000000000"), "no handle for GPU"),
        ]
        for one, told in wrong:
            with pytest.raises(ModelError, match=told):
                llm.command_weights(
                    "receive", tensors=[replace(tensor, handles=[one]) for tensor in tensors]
                )
            assert llm.weights.state == "ready"
        assert texts(llm) == right


def test_an_update_may_be_read_by_way_of_the_host(tmp_path: Path) -> None:
    """As matrices that lie transposed in files."""
    first, second = (make_family("gpt2", tmp_path / str(seed), seed) for seed in (1, 2))
    model, fresh = (load_model(one, "bfloat16", "cuda:0") for one in (first, second))
    sent = model.refit.expect()
    sent.put({name: one.to("cuda:0") for name, one in tensors_of(second).items()})
    sent.complete()
    model.refit.from_sent(sent)
    assert model.refit.packed_digest() == fresh.refit.packed_digest()
