"""Prompts with images against transformers: one to four images, text between, chunks that end
inside images, cached prefixes, little memory for rows, drafts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from transformers import AutoModelForImageTextToText
from weft.contract.errors import InvalidRequest, MediaMissing, RanksLost
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.engine.loop.llm import LLM
from weft.engine.model.vision.tower import VisionTower
from weft.engine.scheduler.plan import Plan
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_vision import IMAGE_TOKEN_ID, image_logits, make_vision

pytestmark = pytest.mark.usefixtures("single_thread")

SIZE, TOKENS = 64, 16
"""Sides of a tile, and tokens of one."""
NEAR_TIE = 3e-5
"""A tower adds its roundings to those of the language model."""
STOP = StopCriteria(max_tokens=12, ignore_eos=True)


class Prompt(NamedTuple):
    ids: list[int]
    spans: list[MediaSpan]
    media: list[Media]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "model"
    return make_vision("smolvlm", path, random.randrange(1 << 30))


def tile() -> Media:
    return Media.of("image", "test", (SIZE, SIZE, 3), random.randbytes(SIZE * SIZE * 3))


def text(most: int = 24) -> list[int]:
    return [random.randrange(3, 256) for _ in range(random.randint(1, most))]


def prompt_of(tiles: list[Media], begin: list[int] | None = None) -> Prompt:
    """Text, the tiles with text between some of them, text."""
    ids, spans = list(begin or text()), list[MediaSpan]()
    for one in tiles:
        spans.append(MediaSpan(position=len(ids), length=TOKENS, digest=one.digest))
        ids += [IMAGE_TOKEN_ID] * TOKENS
        if random.random() < 0.7:
            ids += text()
    return Prompt([*ids, *text()], spans, list({one.digest: one for one in tiles}.values()))


class Reference:
    """transformers' model in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._settings = json.loads((folder / "preprocessor_config.json").read_text())

    def check(self, prompt: Prompt, tokens: list[int], count: int = 12) -> None:
        """Each token is the model's choice, where float32 can tell."""
        assert len(tokens) == count
        by_digest = {one.digest: one for one in prompt.media}
        pixels = torch.stack(
            [
                torch.frombuffer(bytearray(by_digest[span.digest].data), dtype=torch.uint8)
                for span in prompt.spans
            ]
        ).view(-1, SIZE, SIZE, 3)
        mean, std = (torch.tensor(self._settings[n]) for n in ("image_mean", "image_std"))
        numbers = (pixels * self._settings["rescale_factor"] - mean) / std
        pixels = numbers.permute(0, 3, 1, 2)[None]
        logits = image_logits(self._model, prompt.ids, tokens, pixel_values=pixels)
        check_choices(logits, tokens, NEAR_TIE)

    def check_all(self, prompts: Sequence[Prompt], found: Sequence[list[int]]) -> None:
        for prompt, tokens in zip(prompts, found, strict=True):
            self.check(prompt, tokens)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, dtype="float32", num_pages=400, **settings)


def run(llm: LLM, *prompts: Prompt) -> list[list[int]]:
    llm.put([one for prompt in prompts for one in prompt.media])
    found = llm.generate(
        [prompt.ids for prompt in prompts], stop=STOP, spans=[prompt.spans for prompt in prompts]
    )
    return [sample.token_ids for sample in found]


@pytest.mark.parametrize("chunk", [256, 16])
def test_tokens_are_those_of_transformers(folder: Path, reference: Reference, chunk: int) -> None:
    """In a batch, with chunks that hold whole prompts, or end inside of images."""
    prompts = [prompt_of([tile() for _ in range(count)]) for count in (1, 2, 4)]
    with engine(folder, prefill_chunk_tokens=chunk) as llm:
        reference.check_all(prompts, run(llm, *prompts))


def test_cached_prefixes_are_those_of_the_same_images(folder: Path, reference: Reference) -> None:
    """The same image is found again, up to a page inside of it; another one in its place is not."""
    first, second = tile(), tile()
    begin = text()
    seen = prompt_of([first, second], begin)
    again = Prompt([*seen.ids, *text()], seen.spans, seen.media)
    # Ends inside of the second image's tokens.
    cut = Prompt(
        [*seen.ids[: seen.spans[1].position + 5], *text()],
        [seen.spans[0], MediaSpan(position=seen.spans[1].position, length=5, digest=second.digest)],
        seen.media,
    )
    spans = [
        MediaSpan(position=span.position, length=span.length, digest=other.digest)
        for span, other in zip(seen.spans, (first, tile()), strict=True)
    ]
    third = tile()
    spans[1] = MediaSpan(position=spans[1].position, length=TOKENS, digest=third.digest)
    other = Prompt(seen.ids, spans, [first, third])
    swapped = Prompt(
        seen.ids,
        [
            MediaSpan(position=span.position, length=TOKENS, digest=one.digest)
            for span, one in zip(seen.spans, (second, first), strict=True)
        ],
        seen.media,
    )
    with engine(folder) as llm:
        for prompt, most in (
            (seen, 0),
            (again, len(seen.ids)),
            (other, seen.spans[1].position),
            (swapped, seen.spans[0].position),
        ):
            llm.put(prompt.media)
            (sample,) = llm.generate([prompt.ids], stop=STOP, spans=[prompt.spans])
            reference.check(prompt, sample.token_ids)
            assert sample.timeline is not None
            matched = sample.timeline.matched_tokens
            assert matched <= most
            assert matched > most - 16 - TOKENS
        llm.put(cut.media)
        (sample,) = llm.generate([cut.ids], stop=STOP, spans=[cut.spans])
        assert sample.timeline is not None
        assert sample.timeline.matched_tokens >= seen.spans[1].position + 5 - 16


def test_rows_are_made_again_where_memory_is_short(folder: Path, reference: Reference) -> None:
    """Room for four images in all, eight requests of three at once."""
    prompts = [prompt_of([tile() for _ in range(3)]) for _ in range(8)]
    with engine(folder, media_rows=64, prefill_chunk_tokens=32) as llm:
        reference.check_all(prompts, run(llm, *prompts))
        assert llm.engine.media is not None
        assert llm.engine.media.num_encoded >= 24


def test_an_image_seen_before_is_not_encoded_again(folder: Path) -> None:
    one = tile()
    with engine(folder) as llm:
        run(llm, prompt_of([one]), prompt_of([one, one]))
        run(llm, prompt_of([one]))
        assert llm.engine.media is not None
        counters = llm.engine.counters()
        assert counters["encoded_media"] == 1
        patches = (SIZE // 8) ** 2
        assert counters["encoded_patches"] == patches
        assert counters["reused_media"] >= 1


@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.full)])
def test_pages_of_images_come_back_from_a_tier(
    folder: Path, reference: Reference, tier: str, tmp_path: Path
) -> None:
    """Without encoding anything; other images in their places find nothing there."""
    settings: dict[str, Any] = {"num_pages": 48, "media_rows": 64, "load_back_threshold": 0}
    if tier == "host":
        settings["host_cache_bytes"] = 64 << 20
    else:
        settings |= {"disk_cache_dir": tmp_path / "pages", "disk_cache_bytes": 64 << 20}
    clock = ManualClock()
    pair = EnginePair(make_engine(folder, "decode", clock, **settings), [], clock)

    def ask(prompt: Prompt) -> int:
        """Tokens that the tier has given."""
        pair.send(media=list(prompt.media))
        name = pair.submit(prompt.ids, STOP.max_tokens, spans=list(prompt.spans))
        (tokens,) = pair.finish(name)
        reference.check(prompt, tokens)
        fills = pair.answers[name].finished[-1].timeline.fills
        assert not any(fill.failure for fill in fills)
        return sum(fill.accepted_tokens for fill in fills)

    def push_out() -> None:
        """Takes the pages of others, and the rows of their images."""
        for _ in range(6):
            ask(prompt_of([tile() for _ in range(3)]))
        pair.settle()

    first, second = tile(), tile()
    asked = prompt_of([first, second])
    swapped = [
        MediaSpan(position=span.position, length=TOKENS, digest=digest)
        for span, digest in zip(asked.spans, (second.digest, first.digest), strict=True)
    ]
    try:
        assert ask(asked) == 0
        push_out()
        before = pair.owner.counters()["encoded_media"]
        # But for the last tokens all pages come from there.
        assert ask(asked) > asked.spans[1].position
        assert pair.owner.counters()["encoded_media"] <= before + 1
        push_out()
        assert ask(Prompt(asked.ids, swapped, asked.media)) <= asked.spans[0].position
        pair.settle()
    finally:
        pair.close()


def test_a_prompt_that_came_while_running_requests_waited_for_an_image_waits_a_step(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, plans = ManualClock(), list[list[str]]()
    settings: dict[str, Any] = {"prefix_cache": False, "prefill_chunk_tokens": 64}
    pair = EnginePair(make_engine(folder, "decode", clock, **settings), [], clock)
    scheduler = pair.owner.scheduler
    plan_step = scheduler.plan

    def planned(now: float) -> Plan:
        plan = plan_step(now)
        plans.append([item.request.key.request_id for item in plan.chunks])
        return plan

    monkeypatch.setattr(scheduler, "plan", planned)
    asked = prompt_of([tile()], text(6))
    try:
        running = pair.submit(text(), 150)
        # Measures how many prompt tokens a step can take.
        pair.finish(*(pair.submit(prompt_of([]).ids * 8, 2) for _ in range(4)))
        pair.send(media=list(asked.media))
        image = pair.submit(asked.ids, STOP.max_tokens, spans=list(asked.spans))
        pair.run(lambda: pair.owner.counters()["encoded_media"] == 1)
        late = pair.submit(text(), STOP.max_tokens)
        assert not pair.answers[running].finished
        tokens = pair.finish(image, late, running)
    finally:
        pair.close()
    reference.check(asked, tokens[0])
    steps = [[name for name in step if name in (image, late)] for step in plans]
    steps = [step for step in steps if step]
    assert steps[:2] == [[image], [image]], "text before the image, then its rows"
    assert late in steps[2]


def test_samples_share_their_images(folder: Path, reference: Reference) -> None:
    prompt = prompt_of([tile(), tile()])
    with engine(folder) as llm:
        llm.put(prompt.media)
        sampling = SamplingParams(temperature=0.0, n=3)
        (group,) = llm.generate_all([prompt.ids], sampling, STOP, spans=[prompt.spans])
        reference.check_all([prompt] * 3, [sample.token_ids for sample in group])
        assert llm.engine.media is not None
        assert not llm.engine.scheduler.num_requests


def test_ranks_divide_the_images_of_a_turn(folder: Path, reference: Reference) -> None:
    """Several images in one turn, and one alone; chunks that end inside of images."""
    prompts = [prompt_of([tile() for _ in range(count)]) for count in (1, 3, 4)]
    settings: dict[str, Any] = {"tp": 2, "check_ranks": True, "rank_timeout_s": 60.0}
    with engine(folder, prefill_chunk_tokens=48, media_rows=96, **settings) as llm:
        reference.check_all(prompts, run(llm, *prompts))
        reference.check_all(prompts[:1], run(llm, prompts[0]))
        assert llm.engine.media is not None
        assert llm.engine.media.num_encoded >= 8


def test_a_rank_that_is_lost_among_images_ends_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children()
    with engine(folder, tp=2, rank_timeout_s=60.0) as llm:
        run(llm, prompt_of([tile()]))
        (rank,) = (one for one in psutil.Process().children() if one not in before)
        encode = VisionTower.encode

        def strike(tower: VisionTower, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
            rank.kill()
            return encode(tower, pictures)

        monkeypatch.setattr(VisionTower, "encode", strike)
        with pytest.raises(RanksLost, match=r"rank 1.*signal 9"):
            run(llm, prompt_of([tile(), tile()]))
        with pytest.raises(RanksLost):
            llm.engine.turn()
    assert not rank.is_running()


def test_preempted_requests_go_on(folder: Path, reference: Reference) -> None:
    """Pages for hardly two requests: some are preempted, and compute their images' pages anew."""
    stop = StopCriteria(max_tokens=80, ignore_eos=True)
    prompts = [prompt_of([tile(), tile()]) for _ in range(4)]
    with LLM(folder, dtype="float32", num_pages=32, prefix_cache=False) as llm:
        llm.put([one for prompt in prompts for one in prompt.media])
        found = llm.generate(
            [prompt.ids for prompt in prompts], stop=stop, spans=[p.spans for p in prompts]
        )
        assert llm.engine.scheduler.num_preemptions
    for prompt, one in zip(prompts, found, strict=True):
        reference.check(prompt, one.token_ids, 80)


def test_a_missing_image_is_told_and_disturbs_nobody(folder: Path, reference: Reference) -> None:
    prompt = prompt_of([tile()])
    with engine(folder) as llm:
        with pytest.raises(MediaMissing, match="lacks 1"):
            llm.generate([prompt.ids], stop=STOP, spans=[prompt.spans])
        wrong = Media.of("image", "test", (SIZE, SIZE // 2, 3), bytes(SIZE * SIZE // 2 * 3))
        llm.put([wrong])
        span = MediaSpan(position=0, length=4, digest=wrong.digest)
        with pytest.raises(InvalidRequest, match="shape"):
            llm.generate([prompt.ids], stop=STOP, spans=[[span]])
        reference.check_all([prompt], run(llm, prompt))


def test_without_its_tower_a_model_takes_text_alone(folder: Path) -> None:
    prompt = prompt_of([tile()])
    with engine(folder, language_model_only=True) as llm:
        llm.put(prompt.media)
        with pytest.raises(InvalidRequest, match="no images"):
            llm.generate([prompt.ids], stop=STOP, spans=[prompt.spans])
        (sample,) = llm.generate([text()], stop=STOP)
        assert len(sample.token_ids) == 12
