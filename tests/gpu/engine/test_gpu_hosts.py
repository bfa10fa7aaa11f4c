"""Stages on GPUs of several hosts, which are processes of this machine, make the tokens of one
GPU.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from weft.testing.engine import host_process
from weft.testing.engine.other_hosts import other_hosts
from weft.testing.engine.ranked_texts import (
    check_texts,
    gpus_of_ranks,
    make_llm,
    make_model,
    random_prompts,
    ranked,
    texts_of,
)
from weft.testing.models.tiny_drafts import make_tiny_draft

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

SIZES: dict[str, Any] = {"drafter": "none", "num_pages": 90}
LIMIT_S, LATE_S = 3.0, 30.0
OVER_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


@pytest.mark.parametrize(
    ("kind", "count", "link", "drafter"),
    [
        ("llama", 2, "NVLink", "none"),
        ("llama", 2, "sockets", "none"),
        ("qwen3_moe", 2, "sockets", "ngram"),
        ("llama", 3, "sockets", "ngram"),
        ("llama", 2, "sockets", "eagle3"),
        ("llama", 3, "sockets", "eagle3"),
    ],
)
def test_texts_of_hosts_are_those_of_one_gpu(
    kind: str,
    count: int,
    link: str,
    drafter: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With prompts in chunks, prefix hits, constraints, and too few pages for all. Hosts share
    GPUs where there are fewer.
    """
    num_gpus = min(2, torch.cuda.device_count())
    if link == "NVLink" and num_gpus < 2:
        pytest.skip("two hosts on one GPU are not linked by NVLink")
    folder = make_model(kind, tmp_path / "model", num_hidden_layers=4)
    drafts: dict[str, Any] = {"drafter": drafter}
    if drafter == "eagle3":
        drafts["draft_dir"] = make_tiny_draft(tmp_path / "head", folder, random.randrange(1 << 30))
    prompts = random_prompts((5, 90, 41, 177, 12, 63, 100, 33, 54))
    with make_llm(folder, device="cuda:0", **SIZES) as llm:
        alone = texts_of(llm, prompts)
    for name, value in OVER_SOCKETS.items() if link == "sockets" else ():
        monkeypatch.setenv(name, value)
    # Host 0 has the last stage. Neighbouring stages have different GPUs, if there are two.
    devices = [f"cuda:{(count - host) % count % num_gpus}" for host in range(count)]
    with other_hosts(folder, count, devices=devices) as hosts:
        found = ranked("texts", folder, prompts, **SIZES | hosts | drafts)
    assert any(f"{count} stages" in notice for notice in found["notices"])
    assert any("over NCCL" in notice and "by lo" in notice for notice in found["notices"])
    assert found["counters"]["prefix_hit_tokens"] > 0
    assert drafter != "eagle3" or found["counters"]["drafted_tokens"] > 0
    check_texts(found["texts"], alone)


@pytest.mark.parametrize(("how", "lost"), [("killed", 0), ("killed", 1), ("stopped", 1)])
def test_a_host_that_is_lost_ends_the_other_in_time(how: str, lost: int, tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model")
    with other_hosts(folder, 2, devices=gpus_of_ranks(2).split(",")) as meet:
        settings = SIZES | meet | {"rank_timeout_s": LIMIT_S}
        command = [sys.executable, "-m", host_process.__name__]
        command += [str(folder), json.dumps(settings), "[]"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        first = subprocess.Popen(command, text=True, **pipes)
        try:
            (other,) = [
                one
                for one in psutil.Process().children()
                if host_process.__name__ in one.cmdline() and one.pid != first.pid
            ]
            assert first.stderr is not None
            for line in first.stderr:
                if "a text" in line:
                    break
            time.sleep(random.uniform(0.2, 1.0))
            sent = signal.SIGKILL if how == "killed" else signal.SIGSTOP
            os.kill([first.pid, other.pid][lost], sent)
            began = time.monotonic()
            if lost == 0:
                other.wait(2 * LIMIT_S + LATE_S)
            else:
                told, _ = first.communicate(timeout=LIMIT_S + LATE_S)
                found = json.loads(told.splitlines()[-1])
                assert "rank 1" in found["error"]
            print(f"{how} host {lost}: {time.monotonic() - began:.1f} s", end=" ")
        finally:
            first.kill()
            first.wait()
