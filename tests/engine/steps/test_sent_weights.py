"""Weights that a trainer sends through a process group: what an engine generates afterwards, and
what becomes of updates that do not end.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.contract.errors import (
    ConfigError,
    GroupFailed,
    ModelError,
    RefitRunning,
    WeightsIncomplete,
)
from weft.contract.request import StopCriteria
from weft.contract.weights import WeightGroup
from weft.engine.executor import weight_groups
from weft.engine.loop.llm import LLM
from weft.testing.models.senders import Sender, described, free_port, packed, tensors_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = {"num_attention_heads": 8, "vocab_size": 517}
PROMPTS = [list(range(3, 43)), list(range(5, 20))]
SETTINGS = {"page_size": 8, "prefill_chunk_tokens": 24, "num_pages": 64, "dtype": "float32"}
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
NAME = "trainer"


def model(path: Path, seed: int) -> Path:
    return make_tiny("llama", path, seed, tokenizer=True, **SIZES)


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]


def group_at(port: int, ranks: int = 1, wait_s: float = 60.0) -> WeightGroup:
    return WeightGroup(
        name=NAME,
        address="127.0.0.1",
        port=port,
        rank=1,
        size=1 + ranks,
        backend="gloo",
        wait_s=wait_s,
    )


def beside(work: Callable[[], Any], command: Callable[[], Any]) -> Any:
    """What a trainer's thread returns that works while an engine obeys."""
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(work)
        command()
        return done.result(60)


@contextmanager
def joined(llm: LLM, ranks: int = 1) -> Iterator[Sender]:
    port = free_port()
    sender = beside(
        lambda: Sender(port, 1 + ranks),
        lambda: llm.command_weights("join", group=group_at(port, ranks)),
    )
    assert isinstance(sender, Sender)
    try:
        yield sender
    finally:
        sender.close()


def send(llm: LLM, sender: Sender, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    beside(
        lambda: sender.send(tensors.values()),
        lambda: llm.command_weights(
            "receive", group_name=NAME, tensors=described(tensors), **options
        ),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"quantization": "int8"}, marks=pytest.mark.full),
        pytest.param({"tp": 2}, marks=pytest.mark.full),
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.full),
    ],
)
def test_text_after_sent_weights_is_a_fresh_workers(
    settings: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    with LLM(second, **(SETTINGS | settings)) as fresh:
        right = texts(fresh)
        in_memory = fresh.engine.parts.local.refits.packed_digest()
    new, old = tensors_of(second), tensors_of(first)
    ranks = settings.get("tp", 1)
    with LLM(first, **(SETTINGS | settings)) as llm, joined(llm, ranks) as sender:
        before = texts(llm)
        assert before != right
        known = llm.weights.model_digest
        assert llm.weights.groups == [NAME]
        llm.command_weights("begin")
        send(llm, sender, new)
        with pytest.raises(RefitRunning):
            llm.resume()
        status = llm.command_weights("end", version="sent")
        assert (status.state, status.version) == ("ready", "sent")
        digest = status.model_digest
        assert digest != known
        assert llm.engine.parts.local.refits.packed_digest() == in_memory
        hits = llm.engine.scheduler.num_prefix_hit_tokens
        assert texts(llm) == right
        assert llm.engine.scheduler.num_prefix_hit_tokens == hits
        # In parts, in another order, and without a beginning: the last tensor ends the update.
        names = list(old)
        random.shuffle(names)
        for part in (names[:5], names[5:]):
            send(llm, sender, {name: old[name] for name in part}, version="back")
        assert llm.weights.version == "back"
        assert texts(llm) == before
        # The same bytes in another order have the same name, so their pages are found again.
        many = packed([new[name] for name in reversed(new)], 20_000)
        assert 1 < len(many) < len(new)
        turned = {name: new[name] for name in reversed(new)}
        beside(
            lambda: sender.send(many),
            lambda: llm.command_weights(
                "receive", group_name=NAME, tensors=described(turned), packed_bytes=20_000
            ),
        )
        assert llm.weights.model_digest == digest
        assert texts(llm) == right
        assert llm.engine.scheduler.num_prefix_hit_tokens > hits
        llm.command_weights("leave", group_name=NAME)
        assert llm.weights.groups == []


def test_what_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path, seed: int) -> None:
    first = model(tmp_path / "first", seed)
    tensors = tensors_of(first)
    name = "model.embed_tokens.weight"
    wrong: Sequence[tuple[dict[str, torch.Tensor], str]] = [
        ({"model.no_such.weight": torch.zeros(2)}, "no tensor model.no_such.weight"),
        ({name: torch.zeros(3, 3)}, "is sent as"),
        ({name: tensors[name].to(torch.int32)}, "int32"),
    ]
    with LLM(first, **SETTINGS) as llm:
        right = texts(llm)
        with pytest.raises(GroupFailed, match="no group"):
            llm.command_weights("receive", group_name=NAME, tensors=described(tensors))
        for sent, problem in wrong:
            with joined(llm), pytest.raises(ModelError, match=problem):
                llm.command_weights("receive", group_name=NAME, tensors=described(sent))
            # The trainer may have begun to send, so that the group is of no more use.
            assert llm.weights.groups == []
            assert llm.weights.state == "ready"
            assert texts(llm) == right
        group = group_at(free_port())
        group.backend = "nccl"
        with pytest.raises(ConfigError, match="nccl needs GPUs"):
            llm.command_weights("join", group=group)
        with pytest.raises(GroupFailed, match="did not form"):
            llm.command_weights("join", group=group_at(free_port(), wait_s=0.2))
        assert texts(llm) == right


def test_a_sent_number_that_is_not_finite_is_told_with_its_tensor(
    tmp_path: Path, seed: int
) -> None:
    first = model(tmp_path / "first", seed)
    tensors = tensors_of(first)
    name = random.choice(list(tensors))
    broken = tensors[name].clone()
    broken.view(-1)[random.randrange(broken.numel())] = random.choice([torch.nan, -torch.inf])
    told = f"{re.escape(name)} has a number that is not finite.*send the whole update again"
    with LLM(first, **SETTINGS) as llm:
        right = texts(llm)
        with joined(llm) as sender:
            with pytest.raises(ModelError, match=told):
                send(llm, sender, tensors | {name: broken})
            with pytest.raises(WeightsIncomplete, match=told):
                texts(llm)
        with joined(llm) as sender:
            send(llm, sender, tensors)
        assert texts(llm) == right


@pytest.mark.full
def test_a_trainer_killed_in_the_middle_leaves_a_worker_that_refuses_until_an_update_ends(
    tmp_path: Path, seed: int
) -> None:
    first = model(tmp_path / "first", seed)
    tensors = tensors_of(model(tmp_path / "second", seed + 1))
    port = free_port()
    trainer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import signal, os
                from pathlib import Path
                from weft.testing.models.senders import Sender, tensors_of
                tensors = list(tensors_of(Path({str(tmp_path / "second")!r})).values())
                sender = Sender({port}, 2)
                sender.send(tensors[: len(tensors) // 2])
                print("half", flush=True)
                signal.pause()
                """
            ),
        ],
        stdout=subprocess.PIPE,
    )
    with LLM(first, **SETTINGS) as llm:
        right = texts(llm)
        llm.command_weights("join", group=group_at(port))

        def kill() -> None:
            assert trainer.stdout is not None
            trainer.stdout.readline()
            trainer.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(GroupFailed, match="did not end"):
            llm.command_weights("receive", group_name=NAME, tensors=described(tensors))
        killer.join(60)
        trainer.wait(60)
        assert llm.weights.state == "failed"
        assert llm.weights.model_digest == b""
        with pytest.raises(WeightsIncomplete, match="did not end"):
            texts(llm)
        # Neither a resume nor a folder that does not fit makes the mixture good.
        llm.resume()
        with pytest.raises(ModelError):
            llm.refit(tmp_path / "nothing")
        with pytest.raises(WeightsIncomplete):
            texts(llm)
        llm.refit(first)
        assert texts(llm) == right


def pass_time(llm: LLM, seconds: float) -> None:
    """On the clock by which pauses end."""
    control = llm.engine.weights
    clock = control._clock
    control._clock = lambda: clock() + seconds


def test_a_trainer_that_says_no_more_ends_its_update_with_its_pause(
    tmp_path: Path, seed: int
) -> None:
    first = model(tmp_path / "first", seed)
    tensors = tensors_of(model(tmp_path / "second", seed + 1))
    half = dict(list(tensors.items())[: len(tensors) // 2])
    with LLM(first, **SETTINGS) as llm:
        right = texts(llm)
        # Nothing was sent, so the old weights go on.
        llm.command_weights("begin", limit_s=100.0)
        pass_time(llm, 1000.0)
        assert texts(llm) == right
        assert llm.weights.state == "ready"
        with joined(llm) as sender:
            llm.command_weights("begin", limit_s=100.0)
            send(llm, sender, half)
            pass_time(llm, 1000.0)
        with pytest.raises(WeightsIncomplete, match="not ended its update in time"):
            texts(llm)
        assert llm.weights.state == "failed"
        llm.refit(first)
        assert texts(llm) == right


def test_a_transfer_that_outlasts_a_pause_renews_it(tmp_path: Path, seed: int) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    with LLM(second, **SETTINGS) as fresh:
        right = texts(fresh)
    with LLM(first, **SETTINGS) as llm, joined(llm) as sender:
        tensors = tensors_of(second)

        def send_late() -> None:
            while not llm.engine.weights._is_at_work:
                time.sleep(1e-3)
            pass_time(llm, 1000.0)
            sender.send(tensors.values())

        llm.pause(limit_s=100.0)
        options: dict[str, Any] = {"group_name": NAME, "tensors": described(tensors)}
        beside(send_late, lambda: llm.command_weights("receive", **options))
        llm.engine.turn()
        assert (llm.weights.pause, llm.weights.num_updates) == ("keep", 1)
        llm.resume()
        assert texts(llm) == right


def test_a_group_of_gpus_whose_members_do_not_meet_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the GPU still does for it would never end. Steps go on beside it, on another stream."""
    done = list[str]()
    streams = ["steps"]

    class Member:
        def __init__(self, *_: object) -> None: ...

        def all_reduce(self, data: torch.Tensor) -> None:
            done.append(f"meets on the stream of {streams[-1]}")

        def abort(self) -> None:
            done.append("ended")

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        streams.append(name)
        yield
        streams.pop()

    zeros = torch.zeros
    event = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    monkeypatch.setattr(weight_groups, "Communicator", Member)
    monkeypatch.setattr(torch, "zeros", lambda count, device: zeros(count))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "the group")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    group = WeightGroup(
        name="g", rank=1, size=2, backend="nccl", rendezvous="vllm", nccl_id=bytes(128), wait_s=0.01
    )
    with pytest.raises(GroupFailed, match="did not form: not within"):
        weight_groups.join(group, 0, torch.device("cuda", 0))
    assert done == ["meets on the stream of the group", "ended"]
