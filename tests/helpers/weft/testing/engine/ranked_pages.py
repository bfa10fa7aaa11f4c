"""Pages of an engine with ranks or stages that come from another worker, from tiers or from a KV
store, in a process of its own, since a process can have one engine with ranks on GPUs.

    python -m weft.testing.engine.ranked_pages shipped|tiers|stored MODEL_DIR SETTINGS OF_FILLER

Settings are JSON, as are the results on standard output.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from weft.contract.messages import Inbox, Outbox
from weft.engine.loop.engine import Engine
from weft.engine.sources import store
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.store_pair import StorePair
from weft.testing.engine.tier_bench import VOCAB, TierBench

PAGE = 16
SIZES = {"page_size": PAGE, "prefill_chunk_tokens": 2 * PAGE, "max_step_tokens": 8 * PAGE}
SIZES |= {"max_running_requests": 8}


def new_prompt(num_pages: int) -> list[int]:
    """Random tokens, some more than fill the pages."""
    return [random.randrange(3, VOCAB) for _ in range(num_pages * PAGE + 3)]


def engine_there(folder: Path, role: str, clock: ManualClock, **settings: Any) -> Engine:
    """An engine whose turns are made on its device, beside others."""
    device = settings["device"].partition(",")[0]
    engine = make_engine(folder, role, clock, **(SIZES | settings))
    if device != "cpu":
        turn = engine.turn

        def turn_there(inbox: Inbox | None = None) -> Outbox:
            with torch.cuda.device(device):
                return turn(inbox)

        engine.turn = turn_there  # type: ignore[method-assign]
    return engine


def ship(folder: Path, settings: dict[str, Any], of_filler: dict[str, Any]) -> dict[str, Any]:
    """Prompts that the owner computes, then has another worker compute: their texts, and those of
    longer prompts that begin alike, which the owner computes each time.
    """
    clock = ManualClock()
    owner = engine_there(folder, "decode", clock, **settings)
    filler = engine_there(folder, "prefill", clock, worker_id="p0", **of_filler)
    pair = EnginePair(owner, [filler], clock)
    found: dict[str, Any] = {"alone": [], "shipped": [], "tokens": [], "failures": []}
    found |= {"longer": [], "after": []}
    for _ in range(3):
        prompt = new_prompt(6)
        longer = prompt + new_prompt(5)
        owner.memory.flush_cache()
        found["longer"] += pair.finish(pair.submit(longer, max_tokens=16, candidates=[]))
        owner.memory.flush_cache()
        found["alone"] += pair.finish(pair.submit(prompt, max_tokens=16, candidates=[]))
        owner.memory.flush_cache()
        request_id = pair.submit(prompt, max_tokens=16)
        found["shipped"] += pair.finish(request_id)
        (fill,) = pair.answers[request_id].finished[0].timeline.fills
        found["tokens"].append(fill.accepted_tokens)
        found["failures"].append(fill.failure)
        found["after"] += pair.finish(pair.submit(longer, max_tokens=16, candidates=[]))
        pair.settle()
    found["transport"] = owner.info.transport_detail
    pair.close()
    return found


def push_to_tiers(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Texts of prompts whose pages went to host memory and disk and came back, and of longer
    prompts after them, which an engine without ranks computes too.
    """
    with tempfile.TemporaryDirectory() as disk:
        tiers = {"host_cache_bytes": 1 << 20, "disk_cache_dir": Path(disk)}
        sizes = SIZES | {"num_pages": 64, "load_back_threshold": 0}
        prompts = [new_prompt(19) for _ in range(2)]
        longer = [prompt + new_prompt(5) for prompt in prompts]
        ranks = ("tp", "pp", "dcp", "cp", "hosts", "rendezvous")
        own = {name: value for name, value in settings.items() if name not in ranks}
        own["device"] = settings["device"].partition(",")[0]
        one = TierBench(folder, 40 * PAGE, **(sizes | {"host_cache_bytes": 1 << 20} | own))
        found: dict[str, Any] = {"longer": [one.ask(prompt) for prompt in longer]}
        one.close()
        bench = TierBench(folder, 40 * PAGE, **(sizes | tiers | settings))
        found["alone"] = [bench.ask(prompt) for prompt in prompts]
        bench.push_out()
        found["again"] = [bench.ask(prompt) for prompt in prompts]
        found["after"] = [bench.ask(prompt) for prompt in longer]
        found["corrupt"] = bench.counters("host")["corrupt_pages"]
        found["loaded"] = [bench.counters(tier)["loaded_pages"] for tier in ("host", "disk")]
        found["notices"] = bench.engine.info.notices
        bench.close()
    return found


class _Store(StorePair):
    """A store of pages of models without windows and recurrent layers."""

    def blocks_of(self, key: bytes) -> list[bytes]:
        """None: all that a request needs lies in pages."""
        return []


def keep_in_store(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Texts of prompts whose pages went to a KV store and came back."""
    store.LOOKUP_TIMEOUT_S = 60.0
    clock, sizes = ManualClock(), {"has_store": True, "load_back_threshold": 0, "num_pages": 64}
    pair = _Store(engine_there(folder, "decode", clock, **sizes, **settings), clock, 1, 6)
    prompts = [new_prompt(6) for _ in range(2)]
    found: dict[str, Any] = {"alone": [pair.ask(prompt) for prompt in prompts]}
    pair.forget()
    found["again"], found["sources"] = [], []
    for prompt in prompts:
        found["again"].append(pair.ask(prompt))
        found["sources"] += [fill.source for fill in pair.fills()]
    pair.close()
    return found


def ranked_pages(
    what: str, folder: Path, settings: dict[str, Any], of_filler: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Starts the process; its results."""
    command = [sys.executable, "-m", __name__, what, str(folder)]
    command += [json.dumps(settings, default=str), json.dumps(of_filler, default=str)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(argv: list[str]) -> None:
    """Runs the engines."""
    what, folder, *given = argv
    settings, of_filler = map(json.loads, given)
    for one in (settings, of_filler or {}):
        if one.get("draft_dir"):
            one["draft_dir"] = Path(one["draft_dir"])
    if what == "tiers":
        found = push_to_tiers(Path(folder), settings)
    elif what == "stored":
        found = keep_in_store(Path(folder), settings)
    else:
        found = ship(Path(folder), settings, of_filler)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
