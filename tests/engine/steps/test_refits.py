"""Changed weights: what an engine generates after a refit, with what cache, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import ModelError, Paused, WeightsIncomplete
from weft.contract.messages import Inbox
from weft.contract.request import StopCriteria
from weft.contract.weights import WeightCommand, WeightReply
from weft.engine.loop.llm import LLM
from weft.engine.loop.reports import load_report
from weft.engine.model.refit import Refit
from weft.engine.model.weights.refill import numbers_of
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.weight_commands import Commands
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = {"num_attention_heads": 8, "vocab_size": 517}
PROMPTS = [list(range(3, 43)), list(range(5, 20))]
SETTINGS = {"page_size": 8, "prefill_chunk_tokens": 24, "num_pages": 64, "dtype": "float32"}
STOP = StopCriteria(max_tokens=40, ignore_eos=True)


def model(path: Path, seed: int) -> Path:
    return make_tiny("llama", path, seed, tokenizer=True, **SIZES)


def texts(llm: LLM, **options: Any) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP, **options)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"tp": 2}, marks=pytest.mark.full),
        {"quantization": "int8"},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.full),
    ],
)
def test_text_after_a_refit_is_a_fresh_workers(
    settings: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    with LLM(second, **(SETTINGS | settings)) as fresh:
        right, digest = texts(fresh), fresh.weights.model_digest
        packed = fresh.engine.parts.local.refits.packed_digest()
    with LLM(first, **(SETTINGS | settings)) as llm:
        before = texts(llm)
        assert before != right
        old = llm.weights.model_digest
        status = llm.refit(second, "step-1")
        assert (status.state, status.version, status.num_updates) == ("ready", "step-1", 1)
        # The new version has the name, the bytes and the text of a worker that has just started.
        assert status.model_digest == digest != old
        assert llm.engine.parts.local.refits.packed_digest() == packed
        # Pages of the old version are still in the cache, but no prompt hits them.
        hits = llm.engine.scheduler.num_prefix_hit_tokens
        assert texts(llm) == right
        assert llm.engine.scheduler.num_prefix_hit_tokens == hits
        # A version that comes again finds the pages that it has made.
        llm.refit(first)
        assert texts(llm) == before
        assert llm.engine.scheduler.num_prefix_hit_tokens > hits


@pytest.mark.full
def test_no_page_of_old_weights_comes_back_from_host_memory_or_disk(
    tmp_path: Path, seed: int
) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    tiers = {
        "num_pages": 32,
        "host_cache_bytes": 400 << 10,
        "disk_cache_dir": tmp_path / "disk",
        "disk_cache_bytes": 4 << 20,
        "load_back_threshold": 0,
    }
    others = [[3 + (7 * number + at) % 500 for at in range(40)] for number in range(20)]

    def hits(llm: LLM) -> int:
        return sum(tier.counters["hit_pages"] for tier in load_report(llm.engine.wired).tiers)

    with LLM(second, **SETTINGS) as fresh:
        right = texts(fresh)
    with LLM(first, **(SETTINGS | tiers)) as llm:
        before = texts(llm)
        llm.generate(others, stop=STOP)
        known = hits(llm)
        assert texts(llm) == before
        assert hits(llm) > known
        llm.generate(others, stop=STOP)
        llm.refit(second)
        known = hits(llm)
        assert texts(llm) == right
        assert hits(llm) == known
        llm.refit(first)
        assert texts(llm) == before
        assert hits(llm) > known
    # The folder outlives the process; its pages keep their names.
    with LLM(second, **(SETTINGS | tiers)) as llm:
        assert texts(llm) == right


@pytest.mark.full
def test_adapters_apply_to_the_new_weights(tmp_path: Path, seed: int) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    adapter = make_adapter(tmp_path / "adapter", tiny_config("llama", **SIZES), seed, spread=0.3)

    def with_adapter(llm: LLM) -> list[list[int]]:
        return texts(llm, adapters=[llm.load_adapter(adapter)] * len(PROMPTS))

    with LLM(second, enable_lora=True, **SETTINGS) as fresh:
        right, plain = with_adapter(fresh), texts(fresh)
    with LLM(first, enable_lora=True, **SETTINGS) as llm:
        assert with_adapter(llm) != right
        llm.refit(second)
        assert with_adapter(llm) == right
        assert texts(llm) == plain != right


def test_a_head_from_another_folder_keeps_its_weights_and_drafts_for_the_new_ones(
    tmp_path: Path, seed: int
) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    head = make_tiny_draft(tmp_path / "head", first, seed)
    settings = SETTINGS | {"drafter": "eagle3", "draft_dir": head, "draft_gate": "fixed"}

    def of_head(llm: LLM) -> dict[str, torch.Tensor]:
        drafted = llm.engine.parts.local._model
        return {path: one.clone() for path, one in numbers_of(drafted.head.weight).tensors}

    with LLM(second, **SETTINGS) as fresh:
        right = texts(fresh)
    with LLM(second, **settings) as llm:
        assert texts(llm) == right
        drafted, wanted = llm.engine.counters()["accepted_tokens"], of_head(llm)
    with LLM(first, **settings) as llm:
        texts(llm)
        before = of_head(llm)
        llm.refit(second)
        known, found = llm.engine.counters()["accepted_tokens"], of_head(llm)
        # The embedding and the LM head's rows, which the head shares, are the new ones.
        assert sum(not torch.equal(before[path], one) for path, one in found.items()) == 2
        assert all(torch.equal(wanted[path], one) for path, one in found.items())
        assert texts(llm) == right
        assert llm.engine.counters()["accepted_tokens"] - known == drafted


def test_requests_go_on_across_a_refit_with_private_pages(tmp_path: Path, seed: int) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    with LLM(second, **SETTINGS) as fresh:
        right = texts(fresh)
    with LLM(first, **SETTINGS) as llm:
        before = texts(llm)
        commands = Commands(llm)
        change = WeightCommand(query=1, action="refit", folder=str(second), version="second")
        commands.at(12, change)
        answers = llm.generate(PROMPTS, stop=STOP)
        mixed = [one.token_ids for one in answers]
        assert commands.replies[1].failure is None
        for one in answers:
            # Each answer says which weights have drawn which of its tokens.
            first_span, second_span = one.weight_versions
            assert first_span.start == 0 < first_span.end == second_span.start < second_span.end
            assert second_span.end == len(one.token_ids)
            assert second_span.version == "second" != first_span.version
        for one, old, new in zip(mixed, before, right, strict=True):
            assert len(one) == len(old)
            assert one[:8] == old[:8]
            assert one not in (old, new)
        for one, old in zip(answers, before, strict=True):
            known = one.weight_versions[0].end
            assert one.token_ids[:known] == old[:known]
        # Nothing that the two versions have made together is found by anyone.
        assert texts(llm) == right
        llm.refit(first)
        assert texts(llm) == before


def test_retracted_requests_are_computed_anew_by_the_new_weights(tmp_path: Path, seed: int) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    with LLM(second, **SETTINGS) as fresh, LLM(first, **SETTINGS) as llm:
        commands = Commands(llm)
        commands.at(12, WeightCommand(query=1, action="pause", mode="retract"))
        commands.at(14, WeightCommand(query=2, action="refit", folder=str(second)))
        resumed = WeightCommand(query=3, action="resume")
        commands.at(60, resumed)
        mixed = texts(llm)
        assert [commands.replies[query].failure for query in (1, 2, 3)] == [None] * 3
        # What follows is what the new weights say after the tokens that the old ones have drawn.
        for prompt, one in zip(PROMPTS, mixed, strict=True):
            for known in range(len(one)):
                rest = StopCriteria(max_tokens=len(one) - known, ignore_eos=True)
                (tail,) = fresh.generate([prompt + one[:known]], stop=rest)
                if tail.token_ids == one[known:]:
                    break
            assert 0 < known < len(one) - 10


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_a_pause_changes_no_token(mode: Any, tmp_path: Path, seed: int) -> None:
    with LLM(model(tmp_path / "model", seed), **SETTINGS) as llm:
        right = texts(llm)
        commands = Commands(llm)
        commands.at(9, WeightCommand(query=1, action="pause", mode=mode))
        commands.at(10, WeightCommand(query=2, action="pause", mode=mode))
        commands.at(15, WeightCommand(query=3, action="show"))
        commands.at(20, WeightCommand(query=4, action="resume"))
        commands.at(21, WeightCommand(query=5, action="resume"))
        assert texts(llm) == right
        assert all(reply.failure is None for reply in commands.replies.values())
        assert commands.replies[3].status.pause == mode
        assert commands.replies[5].status.pause == ""


def test_abort_ends_requests_and_refuses_new_ones(tmp_path: Path, seed: int) -> None:
    with LLM(model(tmp_path / "model", seed), **SETTINGS) as llm:
        right = texts(llm)
        commands = Commands(llm)
        commands.at(9, WeightCommand(query=1, action="pause", mode="abort"))
        found = llm.generate(PROMPTS, stop=STOP)
        assert {one.finish_reason for one in found} == {"cancelled"}
        for one, old in zip(found, right, strict=True):
            assert one.token_ids == old[: len(one.token_ids)]
        with pytest.raises(Paused):
            texts(llm)
        llm.resume()
        assert texts(llm) == right


def test_a_pause_that_nobody_renews_ends_with_an_error_for_those_who_wait(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model(tmp_path / "model", seed), **SETTINGS) as llm:
        right = texts(llm)
        control, scheduler = llm.engine.weights, llm.engine.scheduler
        clock = control._clock
        # Time passes once requests wait.
        control._clock = lambda: clock() + 1000.0 * bool(scheduler.num_requests)
        llm.pause(limit_s=100.0)
        with pytest.raises(Paused, match="has ended after 100 s"):
            texts(llm)
        assert llm.weights.pause == ""
        assert texts(llm) == right


def test_a_folder_that_does_not_fit_leaves_the_old_weights(tmp_path: Path, seed: int) -> None:
    first = model(tmp_path / "first", seed)
    other = make_tiny("llama", tmp_path / "other", seed, **(SIZES | {"hidden_size": 128}))
    (other / "config.json").unlink()
    with LLM(first, **SETTINGS) as llm:
        right = texts(llm)
        for folder in (other, tmp_path / "nothing", first / "config.json", tmp_path / ("x" * 300)):
            with pytest.raises(ModelError):
                llm.refit(folder)
            assert llm.weights.state == "ready"
            assert texts(llm) == right


def broken_copy(folder: Path, into: Path, name: str = "") -> tuple[Path, str]:
    """A copy with NaN in a tensor, by default the last one, and its name. It is found only when it
    is read.
    """
    weights = shutil.copytree(folder, into) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    head = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + head])
    header.pop("__metadata__", None)
    name = name or max(header, key=lambda one: header[one]["data_offsets"][1])
    at = 8 + head + header[name]["data_offsets"][0]
    data[at : at + 4] = b"\xff" * 4
    weights.write_bytes(data)
    return into, name


@pytest.mark.full_after(1)
@pytest.mark.parametrize("size", [2, 1])
def test_a_half_written_version_is_never_served(size: int, tmp_path: Path, seed: int) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    broken, name = broken_copy(second, tmp_path / "broken")
    with LLM(first, tp=size, **SETTINGS) as llm:
        right = texts(llm)
        told = f"{re.escape(name)} has a number that is not finite.*send the whole update again"
        with pytest.raises(ModelError, match=told):
            llm.refit(broken)
        assert llm.weights.state == "failed"
        assert llm.weights.model_digest == b""
        reported = load_report(llm.engine.wired).weights
        assert reported is not None
        assert name in reported.problem
        with pytest.raises(ModelError, match="is no folder"):
            llm.refit(tmp_path / "nowhere")
        llm.resume()
        with pytest.raises(WeightsIncomplete, match=told):
            texts(llm)
        llm.refit(first)
        assert texts(llm) == right


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_update_that_fails_before_it_writes_leaves_the_old_weights(
    size: int, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    broken, name = broken_copy(second, tmp_path / "broken", "model.embed_tokens.weight")
    check = Refit.check

    def check_and_lose(refit: Refit, folder: Path) -> None:
        check(refit, folder)
        (folder / "model.safetensors").unlink()

    with LLM(first, tp=size, **SETTINGS) as llm:
        right, digest = texts(llm), llm.weights.model_digest
        # What an update before has written does not count.
        llm.refit(first)
        with pytest.raises(ModelError, match=f"{re.escape(name)} has a number that is not finite"):
            llm.refit(broken)
        assert (llm.weights.state, llm.weights.model_digest) == ("ready", digest)
        assert texts(llm) == right
        monkeypatch.setattr(Refit, "check", check_and_lose)
        with pytest.raises(ModelError):
            llm.refit(second)
        assert llm.weights.state == "ready"
        assert texts(llm) == right


def test_a_prefill_worker_fills_nothing_while_its_weights_are_a_mixture(
    tmp_path: Path, seed: int
) -> None:
    folder = model(tmp_path / "first", seed)
    broken, _ = broken_copy(model(tmp_path / "second", seed + 1), tmp_path / "broken")
    clock = ManualClock()
    roles = ("decode", "prefill")
    owner, filler = (make_engine(folder, role, clock, num_pages=64) for role in roles)

    def refit(from_folder: Path) -> WeightReply:
        command = WeightCommand(query=1, action="refit", folder=str(from_folder))
        inbox: Inbox | None = Inbox(weight_commands=[command])
        deadline = time.monotonic() + 60
        while not (replies := filler.turn(inbox).weight_replies):
            inbox = None
            assert time.monotonic() < deadline, "the update does not end"
        return replies[0]

    with closing(EnginePair(owner, [filler], clock)) as pair:
        prompt = PROMPTS[0]
        (right,) = pair.finish(pair.submit(prompt, candidates=[]))
        assert refit(broken).status.state == "failed"
        owner.memory.flush_cache()
        request_id = pair.submit(prompt)
        assert pair.finish(request_id) == [right]
        (fill,) = pair.answers[request_id].finished[0].timeline.fills
        assert fill.accepted_tokens == 0
        assert "without a version of the weights" in fill.failure
        assert refit(folder).status.state == "ready"
        pair.check_shipped(prompt, len(prompt) // 8)
