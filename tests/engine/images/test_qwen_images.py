"""Rotations along three axes, and rows that are added to the first layers, where requests begin
anew and share slots; of every family, drafts behind images and ranks that divide them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from weft.contract.errors import InvalidRequest
from weft.contract.request import StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import check_choices
from weft.testing.models.image_families import (
    FAMILIES,
    ImageFamily,
    Prompt,
    random_picture,
    text,
)
from weft.testing.models.tiny_qwen_vl import QWEN_FAMILIES, SQUARE

pytestmark = pytest.mark.usefixtures("single_thread")

NEAR_TIE = 1e-4
STOP = StopCriteria(max_tokens=12, ignore_eos=True)


class Case:
    """One kind of model, and transformers' reading of it in float32."""

    def __init__(self, family: ImageFamily, folder: Path) -> None:
        self.family, self.folder = family, folder
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    def check(self, prompt: Prompt, tokens: list[int], count: int = 12) -> None:
        """Each token is the model's choice, where float32 can tell."""
        assert len(tokens) == count
        check_choices(self.family.logits(self._model, prompt, tokens), tokens, NEAR_TIE)

    def prompt(self, count: int, begin: list[int] | None = None) -> Prompt:
        return self.family.prompt([self.family.picture() for _ in range(count)], begin)


ALL = {**FAMILIES, **QWEN_FAMILIES}


def each_family(*usual: str, without: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Runs a test with all families, and other than `usual` ones only with `--full`."""
    names = [
        pytest.param(name, marks=[] if name in usual else [pytest.mark.full])
        for name in ALL
        if name not in without
    ]
    return pytest.mark.parametrize("case", names, indirect=True)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("images") / request.param
    family = ALL[request.param]()
    return Case(family, family.make(path, random.randrange(1 << 30)))


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "num_pages": 400, **settings})


def run(llm: LLM, prompts: list[Prompt], stop: StopCriteria = STOP) -> list[list[int]]:
    llm.put([one for prompt in prompts for one in prompt.media])
    ids, spans = [prompt.ids for prompt in prompts], [prompt.spans for prompt in prompts]
    return [sample.token_ids for sample in llm.generate(ids, stop=stop, spans=spans)]


@each_family("qwen3_vl")
def test_ranks_divide_images_of_many_sizes(case: Case, tmp_path: Path) -> None:
    if isinstance(case.family, QWEN_FAMILIES["qwen2_5_vl"]):
        # An even number of heads.
        rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 4]}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
        case = Case(case.family, case.family.make(tmp_path, random.randrange(1 << 30), text=heads))
    prompts = [case.prompt(count) for count in (1, 3)]
    limits = {"rank_timeout_s": 60.0, "check_ranks": True}
    with engine(case.folder, prefill_chunk_tokens=64, tp=2, **limits) as llm:
        for prompt, tokens in zip(prompts, run(llm, prompts), strict=True):
            case.check(prompt, tokens)


@pytest.mark.parametrize("case", ["qwen2_vl"], indirect=True)
def test_towers_without_windows(case: Case) -> None:
    prompts = [case.prompt(count) for count in (1, 3)]
    with engine(case.folder, prefill_chunk_tokens=16) as llm:
        for prompt, tokens in zip(prompts, run(llm, prompts), strict=True):
            case.check(prompt, tokens)


def test_slots_that_had_images_then_have_text(case: Case) -> None:
    """One request after another in one slot; rotations of the one before are gone."""
    prompts = [case.prompt(1), Prompt(text(), [], []), case.prompt(2)]
    with engine(case.folder, max_running_requests=1, prefix_cache=False) as llm:
        (alone,) = run(llm, prompts[1:2])
        found = run(llm, prompts)
    assert found[1] == alone
    for number in (0, 2):
        case.check(prompts[number], found[number])


def test_preempted_requests_go_on(case: Case) -> None:
    """There is room for the first three prompts, and not for their answers: some requests are
    preempted, and compute their images' pages anew.
    """
    prompts = [case.prompt(2) for _ in range(5)]
    pages = [-(-len(prompt.ids) // 16) for prompt in prompts]
    num_pages = max(sum(pages[:3]), max(pages)) + 5
    with engine(case.folder, num_pages=num_pages, prefix_cache=False) as llm:
        found = run(llm, prompts, StopCriteria(max_tokens=60, ignore_eos=True))
        assert llm.engine.scheduler.num_preemptions
    for prompt, tokens in zip(prompts, found, strict=True):
        case.check(prompt, tokens, 60)


@each_family("qwen2_5_vl", "qwen3_vl", without=("qwen3_5", "qwen3_5_moe"))
def test_drafts_are_verified_where_they_stand(case: Case) -> None:
    """Drafts are found in the prompt's text, where the answer repeats some of it. Those of Qwen3.5,
    whose answers repeat nothing, come from an MTP head.
    """
    with engine(case.folder, drafter="ngram", draft_gate="fixed") as llm:
        for _ in range(30):
            again = text(12) * 3
            prompts = [case.prompt(1, again) for _ in range(3)]
            prompts = [Prompt([*ids, *again], spans, media) for ids, spans, media in prompts]
            for prompt, tokens in zip(prompts, run(llm, prompts), strict=True):
                case.check(prompt, tokens)
            if llm.engine.counters()["drafted_tokens"]:
                break
        assert llm.engine.counters()["drafted_tokens"]


def test_rotations_follow_the_grid(case: Case) -> None:
    """Pictures of the same bytes and another shape are others."""
    first, second = random_picture(2 * SQUARE, 6 * SQUARE), None
    second = Media.of("image", "test", (6 * SQUARE, 2 * SQUARE, 3), first.data)
    begin, end = text(), text()
    prompts = []
    for one in (first, second):
        ids, spans = list(begin), list[MediaSpan]()
        case.family.put(ids, spans, one)
        prompts.append(Prompt([*ids, *end], spans, [one]))
    with engine(case.folder) as llm:
        for prompt, tokens in zip(prompts, run(llm, prompts), strict=True):
            case.check(prompt, tokens)


def test_other_shapes_are_refused(case: Case) -> None:
    wrong, large = random_picture(SQUARE, SQUARE + 1), random_picture(16 * SQUARE, 5 * SQUARE)
    with engine(case.folder) as llm:
        for one in (wrong, large):
            llm.put([one])
            span = MediaSpan(position=0, length=1, digest=one.digest)
            with pytest.raises(InvalidRequest, match="in multiples of 8 with at most 4096 pixels"):
                llm.generate([text()], stop=STOP, spans=[[span]])


def test_an_mtp_head_drafts_behind_images(tmp_path: Path) -> None:
    """A head of random weights hardly guesses right, and changes no token."""
    family = QWEN_FAMILIES["qwen3_5"]()
    case = Case(family, family.make(tmp_path, random.randrange(1 << 30)))
    file = tmp_path / "model.safetensors"
    tensors, hidden = load_file(file), 72
    begin = "model.language_model.layers.1."
    layer = {n.removeprefix(begin): one for n, one in tensors.items() if n.startswith(begin)}
    tensors |= {f"mtp.layers.0.{name}": one.clone() for name, one in layer.items()}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    tensors |= {f"mtp.{name}.weight": torch.zeros(hidden) for name in norms}
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) / hidden
    save_file(tensors, file)
    prompts = [case.prompt(count) for count in (1, 2)]
    with engine(tmp_path, drafter="mtp", draft_gate="fixed", prefill_chunk_tokens=32) as llm:
        for prompt, tokens in zip(prompts, run(llm, prompts), strict=True):
            case.check(prompt, tokens)
        assert llm.engine.counters()["drafted_tokens"]
