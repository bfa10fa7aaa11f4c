"""Engines on GPUs that share experts, each in a process of its own.

    python -m weft.testing.engine.shared_experts WHAT MODEL_DIR SETTINGS PROMPTS

An engine prints its texts as JSON and goes on with the steps of the others until its standard input
ends; then it prints its counters.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from weft.contract.errors import RanksLost
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.parallel import device_dispatch
from weft.testing.engine.ranked_texts import greedy_texts, make_llm, texts_of

WAIT_S = 200.0
"""Longest wait for an engine's results."""
COMPILING_S = 60.0
"""Longest wait of an engine for another one that compiles kernels of steps without graphs."""


def engines(
    what: str, folder: Path, prompts: Sequence[list[list[int]]], **settings: Any
) -> list[dict[str, Any]]:
    """Starts an engine for each list of prompts; their results.

    Args:
        what: texts, greedy, killed or stopped. The last two strike the last engine under load.
        settings: Of all engines; `piece_rows`: most rows of an engine in one exchange.
    """
    count = torch.cuda.device_count()
    group = f"test-{random.randrange(1 << 40):x}"
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, own in enumerate(prompts):
            of_rank = {"attention_dp": len(prompts), "attention_dp_group": group}
            of_rank |= {"rank_timeout_s": settings.get("rank_timeout_s", COMPILING_S)}
            of_rank |= {"attention_dp_rank": rank, "device": f"cuda:{rank % count}"}
            command = [sys.executable, "-m", __name__, what, str(folder)]
            command += [json.dumps(settings | of_rank, default=str), json.dumps(own)]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        if what in ("killed", "stopped"):
            return _strike(started, what)
        found = [json.loads(_line_of(one)) for one in started]
        for one, own in zip(started, found, strict=True):
            assert one.stdin is not None
            one.stdin.close()
            own["counters"] = json.loads(_line_of(one))
        assert [one.wait(WAIT_S) for one in started] == [0] * len(started)
        return found
    finally:
        for one in started:
            one.kill()
            one.wait()


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    timer = threading.Timer(WAIT_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def _strike(started: list[subprocess.Popen[str]], how: str) -> list[dict[str, Any]]:
    """Ends the last engine under load. What the others raise, and seconds after which they do."""
    assert [json.loads(_line_of(one)) for one in started] == ["under load"] * len(started)
    struck_at = time.monotonic()
    started[-1].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    found = []
    for one in started[:-1]:
        error = json.loads(_line_of(one))
        found.append({"error": error, "seconds": time.monotonic() - struck_at})
    return found


def _load(llm: LLM) -> None:
    """Generates for ever, and tells when it has begun. Prints how the group has ended."""
    is_told = False
    try:
        while True:
            prompts = [[random.randrange(3, 500) for _ in range(count)] for count in (50, 20)]
            llm.generate(prompts, stop=StopCriteria(max_tokens=60))
            if not is_told:
                print(json.dumps("under load"), flush=True)
                is_told = True
    except RanksLost as error:
        print(json.dumps(str(error)), flush=True)


def main(argv: list[str]) -> None:
    """Runs one engine."""
    what, folder, settings, prompts = argv
    chosen = json.loads(settings)
    if rows := chosen.pop("piece_rows", None):
        device_dispatch._PIECE_ROWS = rows * chosen["attention_dp"]
    llm = make_llm(Path(folder), **chosen)
    if what in ("killed", "stopped"):
        _load(llm)
        os._exit(0)
    given = json.loads(prompts)
    texts = {"texts": texts_of, "greedy": greedy_texts}[what](llm, given) if given else []
    print(json.dumps({"texts": texts, "notices": llm.engine.info.notices}), flush=True)
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    try:
        while not is_over.is_set():
            llm.engine.turn()
            time.sleep(min(1e-3, llm.engine.rest_s()))
    except RanksLost:
        pass  # Another engine was told first.
    print(json.dumps(llm.engine.counters()), flush=True)
    llm.close()


if __name__ == "__main__":
    main(sys.argv[1:])
