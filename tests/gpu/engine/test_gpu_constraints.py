"""Constrained output on a GPU, with graphs and with steps in flight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weft.engine.loop.llm import LLM
from weft.testing.engine.constrained import Desk, check_schemas
from weft.testing.engine.random_schemas import varied_schemas
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

VOCAB = 517
"""Of a tokenizer that has all bytes and some pairs."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = make_tiny(
        "llama",
        tmp_path_factory.mktemp("tiny"),
        seed=11,
        tokenizer=True,
        vocab_size=VOCAB,
        head_dim=64,
    )
    settings = {"device": "cuda", "num_pages": 4096, "poison_free_pages": True}
    with LLM(folder, dtype="float32", **settings) as llm:
        yield Desk(llm.engine, folder)
        sizes = llm.engine.sizes()
        assert all(count == 0 for count in sizes.values()), sizes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_hundred_answers_are_valid_under_their_schemas(desk: Desk, temperature: float) -> None:
    schemas = varied_schemas(200)
    for begin in range(0, len(schemas), 50):
        check_schemas(desk, schemas[begin : begin + 50], temperature)
