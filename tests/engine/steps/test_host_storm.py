"""Sixty cuts, kills, stalls, delays and slow links between the hosts of engines under load."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from weft.chaos.proxy import Mode
from weft.contract.errors import RanksLost
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine import host_process
from weft.testing.engine.host_network import Network
from weft.testing.engine.host_proxy import ProxyThread
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.usefixtures("single_thread"), pytest.mark.full]

VOCAB, LIMIT_S, NUM_STRIKES = 517, 4.0, 60
SIZES = host_process.SIZES | {"prefill_chunk_tokens": 288, "max_step_tokens": 288}
"""Rows of the longest chunks fill the buffers of a connection, and are sent by threads."""
LATE_S = 30.0
"""Time that a busy machine may take beyond the limit."""
GREEDY = SamplingParams(temperature=0.0)
LENGTH = 24
ENDINGS = ("kill", "stop", "cut", "black-hole", "link")
MOMENTS = ("delay", "stall", "slow")


class Engine:
    """Host 0 in this process, the others in namespaces, each link but that of rows by a proxy."""

    def __init__(self, folder: Path, count: int, tp: int, stack: ExitStack) -> None:
        self.network = Network(count, stack)
        at = f"{self.network.of_tests}:{self.network.port}"
        self.proxy = ProxyThread(at, self.network.of_tests)
        stack.callback(self.proxy.close)
        self.processes: list[subprocess.Popen[bytes]] = []
        stack.callback(self._end)
        settings = {"pp": count, "hosts": count, "tp": tp}
        starting = threading.Thread(target=self._start, args=(folder, settings))
        starting.start()
        tiers = {"host_cache_bytes": 1 << 20, "load_back_threshold": 0, "num_pages": 128}
        llm = LLM(
            folder,
            **SIZES | settings | tiers,
            rendezvous=at,
            rank_timeout_s=LIMIT_S,
        )
        self.llm = stack.enter_context(llm)
        starting.join()

    def _start(self, folder: Path, settings: dict[str, Any]) -> None:
        """Once host 0 listens, which a proxy hides from those who come earlier."""
        address = (self.network.of_tests, self.network.port)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(address, 1):
                break
            time.sleep(0.1)
        for host in range(1, settings["hosts"]):
            own = settings | {"host_rank": host, "rendezvous": self.proxy.proxy.address}
            command = [*self.network.before(host), sys.executable, "-m", host_process.__name__]
            command += [str(folder), json.dumps(own), "[]"]
            self.processes.append(subprocess.Popen(command))

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def kinds(self) -> list[str]:
        has_link = self.network.has_namespaces
        return [kind for kind in (*ENDINGS, *MOMENTS) if has_link or kind != "link"]

    def strike(self, kind: str) -> None:
        host, is_shaped = random.randrange(len(self.processes)), False
        process = self.processes[host]
        if kind == "kill":
            process.kill()
        elif kind in ("stop", "stall"):
            process.send_signal(signal.SIGSTOP)
        elif kind == "cut":
            self.proxy.set_mode(Mode.CUT)
        elif kind == "black-hole":
            self.proxy.set_mode(Mode.BLACK_HOLE)
        elif kind == "link":
            self.network.cut(host + 1)
        elif kind == "slow":
            rate = random.uniform(50e3, 500e3)
            is_shaped = self.network.shape(host + 1, 8 * rate)
            self.proxy.proxy.bytes_per_s = None if is_shaped else rate
        else:
            self.proxy.set_mode(Mode.DELAY, random.uniform(0.01, LIMIT_S / 20))
        if kind in MOMENTS:
            time.sleep(random.uniform(0.05, LIMIT_S / 4))
            process.send_signal(signal.SIGCONT)
            self.proxy.set_mode(Mode.PASS)
            if is_shaped:
                self.network.unshape(host + 1)
            self.proxy.proxy.bytes_per_s = None


class Texts:
    """Prompts, and what one process answers."""

    def __init__(self, folder: Path) -> None:
        shared = [random.randrange(3, VOCAB) for _ in range(40)]
        lengths = random.sample(range(1, 110), 9) + random.sample(range(300, 400), 3)
        self.prompts = [
            (shared + [random.randrange(3, VOCAB) for _ in range(n)])[-n:] for n in lengths
        ]
        with LLM(folder, **SIZES) as llm:
            self.expected = self._ask(llm, self.prompts, LENGTH)

    def _ask(self, llm: LLM, prompts: list[list[int]], length: int) -> list[list[int]]:
        stop = StopCriteria(max_tokens=length, ignore_eos=True)
        return [sample.token_ids for sample in llm.generate(prompts, GREEDY, stop)]

    def check(self, llm: LLM) -> None:
        """Asks some of them at once."""
        chosen = random.sample(range(len(self.prompts)), random.randint(1, 8))
        found = self._ask(llm, [self.prompts[number] for number in chosen], LENGTH)
        assert found == [self.expected[number] for number in chosen]

    def check_resumed(self, llm: LLM) -> None:
        """What a lost engine had made of a text goes on elsewhere as it would have there."""
        number, made = random.randrange(len(self.prompts)), random.randrange(1, LENGTH)
        prompt = self.prompts[number] + self.expected[number][:made]
        (rest,) = self._ask(llm, [prompt], LENGTH - made)
        assert rest == self.expected[number][made:]


def check_pages(llm: LLM) -> None:
    """No request holds a page, every page is free or cached, and tiers gave back what they got."""
    memory, deadline = llm.engine.memory, time.monotonic() + LIMIT_S
    # Pages on their way to host memory are in use until they are there.
    while (llm.engine.has_work or memory.counts().used) and time.monotonic() < deadline:
        llm.engine.turn()
        time.sleep(0.001)
    memory.check_integrity()
    counts = memory.counts()
    assert counts.used == 0
    assert counts.free + counts.cached == counts.total
    assert llm.engine.tiers is not None
    for tier in llm.engine.tiers.report():
        assert tier.counters.get("corrupt_pages", 0) == 0


@contextlib.contextmanager
def engine_of(folder: Path) -> Iterator[Engine]:
    with ExitStack() as stack:
        count, tp = random.choice(((2, 1), (2, 2), (3, 1)))
        yield Engine(folder, count, tp, stack)


def strike_until_lost(folder: Path, texts: Texts, most: int, deck: list[str]) -> list[str]:
    """Strikes one engine until it ends; what was struck. A kind comes again once all have come."""
    struck: list[str] = []
    with engine_of(folder) as engine:
        texts.check_resumed(engine.llm)
        while len(struck) < most:
            if not deck:
                deck += random.sample(engine.kinds, len(engine.kinds))
            kind, at_s = deck.pop(), float("inf")
            is_over = threading.Event()

            def act(kind: str = kind, is_over: threading.Event = is_over) -> None:
                nonlocal at_s
                time.sleep(random.uniform(0.0, 1.0))
                at_s = time.monotonic()
                engine.strike(kind)
                is_over.set()

            acting = threading.Thread(target=act)
            acting.start()
            struck.append(kind)
            try:
                while not is_over.is_set() or kind in ENDINGS:
                    texts.check(engine.llm)
            except RanksLost:
                took_s = time.monotonic() - at_s
                acting.join()
                assert kind in ENDINGS, kind
                assert took_s < LIMIT_S + LATE_S
                with pytest.raises(RanksLost):
                    engine.llm.engine.turn()
                return struck
            acting.join()
            texts.check(engine.llm)
            check_pages(engine.llm)
    return struck


@pytest.mark.timeout(3600)
def test_hosts_that_are_struck_at_any_moment_make_the_right_texts_or_none(
    tmp_path: Path, seed: int
) -> None:
    """One that is gone or stays away ends the engine within its limit, and others go on with its
    texts; a delay, a stall or a slow link changes nothing, and costs no page.
    """
    folder = make_tiny("qwen3", tmp_path / "model", seed, tokenizer=True, vocab_size=VOCAB)
    texts, struck, deck = Texts(folder), Counter[str](), list[str]()
    while (left := NUM_STRIKES - struck.total()) > 0:
        struck.update(strike_until_lost(folder, texts, left, deck))
        print(struck.total(), flush=True)
    print(sorted(struck.items()))
    assert set(struck) >= {"kill", "stop", "cut", "black-hole", *MOMENTS}
