"""docs/reference/combinations.md cell by cell on a CPU: what is served starts with a tiny model and
answers, what is refused is refused before the start for the reason that the page gives.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import WeftError
from weft.contract.request import StopCriteria
from weft.contract.tasks import PoolingParams
from weft.engine.base.config import EngineConfig
from weft.engine.loop.combinations import check_combination
from weft.engine.loop.llm import LLM

pytestmark = pytest.mark.usefixtures("single_thread")

ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    "num_pages": 64,
    "max_running_requests": 2,
    "dummy_weights": True,
    "max_context_tokens": 256,
}
NUM_QUICK = 2
"""Cells that start in every run, drawn at random; all start in full ones."""


def read_script() -> Any:
    path = ROOT / "scripts" / "combinations_table.py"
    spec = importlib.util.spec_from_file_location("combinations_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLE = read_script()


def cells() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The model, the features' names and their settings of each cell of a CPU."""
    for model, (name, settings) in itertools.product(TABLE.MODELS, TABLE.FEATURES.items()):
        yield model, name, settings
    for model in TABLE.PAIRED:
        for first, second in itertools.combinations(TABLE.FEATURES, 2):
            both = TABLE.merged(TABLE.FEATURES[first], TABLE.FEATURES[second])
            if both is not None:
                yield model, f"{first}, {second}", both


CELLS = list(cells())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: TABLE.write(root / str(i), name) for i, name in enumerate(TABLE.MODELS)}


def refusal(folder: Path, settings: Mapping[str, Any]) -> str:
    """Empty: not refused."""
    try:
        check_combination(EngineConfig(model_dir=folder, device="cpu", **settings))
    except WeftError as error:
        return error.message
    return ""


def answer(folder: Path, settings: Mapping[str, Any]) -> None:
    with LLM(folder, device="cpu", **(SMALL | dict(settings))) as llm:
        prompts = [[random.randrange(3, 500) for _ in range(length)] for length in (5, 40)]
        if llm.engine.info.task == "generate":
            stop = StopCriteria(max_tokens=3, ignore_eos=True)
            assert [len(one.token_ids) for one in llm.generate(prompts, stop=stop)] == [3, 3]
        else:
            assert len(llm.pool(prompts, PoolingParams(output="embedding"))) == 2


def test_what_is_refused_is_refused_before_the_start(folders: dict[str, Path]) -> None:
    num_refused = 0
    for model, _, settings in CELLS:
        if told := refusal(folders[model], settings):
            with pytest.raises(WeftError) as caught:
                LLM(folders[model], device="cpu", **(SMALL | dict(settings)))
            assert caught.value.message == told
            num_refused += 1
    assert num_refused > 20


def test_some_of_what_is_served_starts(folders: dict[str, Path]) -> None:
    served = [
        cell for cell in CELLS if not refusal(folders[cell[0]], cell[2]) and "tp" not in cell[2]
    ]
    for model, name, settings in random.sample(served, NUM_QUICK):
        print(model, name)
        answer(folders[model], settings)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(CELLS)), ids=[f"{m}: {n}" for m, n, _ in CELLS])
def test_all_that_is_served_starts(number: int, folders: dict[str, Path]) -> None:
    model, _, settings = CELLS[number]
    if told := refusal(folders[model], settings):
        assert told
        return
    answer(folders[model], settings)
