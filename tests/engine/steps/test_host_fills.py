"""Hosts that are struck while they write pages to another worker: right texts, and no page lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from weft.chaos.proxy import Mode
from weft.contract.errors import RanksLost
from weft.contract.fills import FillerEvent
from weft.contract.handle import FillEvent
from weft.contract.messages import ProcessExited
from weft.testing.engine import host_process
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine, num_quarantined
from weft.testing.engine.host_network import Network
from weft.testing.engine.host_proxy import ProxyThread
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.usefixtures("single_thread"), pytest.mark.full, pytest.mark.needs("nixl")]

PAGE, VOCAB, NUM_STRIKES = 8, 517, 24
LIMIT_S = 10.0
"""A host that is silent for so long is lost; moments are a tenth of it."""
FILLER = "p0"
ENDINGS = ("kill", "stop", "cut", "black-hole", "link")
"""Faults that end the worker."""
MOMENTS = ("delay", "stall", "slow")
"""Faults that pass, after which the worker must still be alive."""
WHEN = ("accepted", "written")
"""Events of a fill after one of which a strike comes: the filler has accepted it and written
nothing, or has written some pages.
"""


class Pair:
    """A decode worker of one host, and a prefill worker of two, of which the second is in a
    namespace of its own and reaches the first through a proxy.
    """

    def __init__(self, folder: Path, network: Network, stack: ExitStack) -> None:
        self.network = network
        at = f"{self.network.of_tests}:{self.network.port}"
        self.proxy = ProxyThread(at, self.network.of_tests)
        stack.callback(self.proxy.close)
        self.process: subprocess.Popen[bytes] | None = None
        stack.callback(self._end)
        starting = threading.Thread(target=self._start, args=(folder,), daemon=True)
        starting.start()
        clock = ManualClock()
        way: dict[str, Any] = {"transport": "nixl", "num_threads": 1}
        hosts = {"pp": 2, "hosts": 2, "rendezvous": at, "rank_timeout_s": LIMIT_S}
        owner = make_engine(folder, "decode", clock, **way)
        filler = make_engine(folder, "prefill", clock, worker_id=FILLER, **way, **hosts)
        self.pair, self.is_alive = EnginePair(owner, [filler], clock), True
        stack.callback(self.pair.close)
        starting.join()

    def _start(self, folder: Path) -> None:
        """Starts host 1 once host 0 listens: the proxy accepts connections earlier."""
        while True:
            address = (self.network.of_tests, self.network.port)
            with contextlib.suppress(OSError), socket.create_connection(address, 1):
                break
            time.sleep(0.1)
        own = {"pp": 2, "hosts": 2, "host_rank": 1, "rendezvous": self.proxy.proxy.address}
        own |= {"num_threads": 1, "role": "prefill"}
        command = [*self.network.before(0), sys.executable, "-m", host_process.__name__]
        device = "eth0" if self.network.has_namespaces else "lo"
        command += [str(folder), json.dumps(own), "[]"]
        self.process = subprocess.Popen(command, env=os.environ | {"UCX_NET_DEVICES": device})

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def kinds(self) -> list[str]:
        has_link = self.network.has_namespaces
        return [kind for kind in (*ENDINGS, *MOMENTS) if has_link or kind != "link"]

    def strike(self, kind: str) -> Callable[[], None]:
        """Returns what undoes the fault."""
        assert self.process is not None
        if kind == "kill":
            self.process.kill()
        elif kind in ("stop", "stall"):
            self.process.send_signal(signal.SIGSTOP)
        elif kind == "link":
            self.network.cut(0)
            return partial(self.network.uncut, 0)
        elif kind == "slow":
            self.proxy.proxy.bytes_per_s = random.uniform(50e3, 500e3)
        else:
            modes = {"cut": Mode.CUT, "black-hole": Mode.BLACK_HOLE, "delay": Mode.DELAY}
            self.proxy.set_mode(modes[kind], random.uniform(0.01, LIMIT_S / 50))
        return self._pass

    def _pass(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.proxy.proxy.bytes_per_s = None
        self.proxy.set_mode(Mode.PASS)

    def ship(self, prompt: list[int], expected: list[int], strike: Callable[[], None]) -> None:
        """Has a prompt filled and shipped, and calls `strike` after one of `WHEN`. The text must be
        right all the same.
        """
        self.pair.owner.memory.flush_cache()
        at = random.choice(WHEN)

        def struck(event: FillEvent) -> list[FillEvent]:
            if event.kind == at:
                self.pair.on_event = lambda later: [later]
                strike()
            return [event]

        self.pair.on_event = struck
        request = self.pair.submit(prompt, max_tokens=len(expected))
        self.turn_until(lambda: bool(self.pair.answers[request].finished))
        assert self.pair.answers[request].tokens[0] == expected

    def turn_until(self, is_so: Callable[[], bool]) -> None:
        began_at = last_at = time.monotonic()
        while not is_so():
            now = time.monotonic()
            assert now < began_at + 120, self.pair.owner.counters()
            self.pair.clock.offset_s += now - last_at
            last_at = now
            try:
                self.pair.turn()
            except RanksLost:
                self.is_alive = False
                self._report_lost()
            time.sleep(5e-4)

    def _report_lost(self) -> None:
        """What the filler's server tells the owner: its streams broke, its process is gone."""
        self.pair.paused.add(FILLER)
        event = FillEvent(kind="broken", message="the filler is gone")
        leases = list(self.pair._streams.values())
        self.pair.send(filler_events=[FillerEvent(lease_id=one, event=event) for one in leases])
        epoch = self.pair.fillers[FILLER].info.epoch
        self.pair.send(exits=[ProcessExited(worker_id=FILLER, epoch=epoch, query=1)])

    def check_pages(self) -> None:
        """No request holds a page of the owner, and none is in quarantine for good."""
        owner = self.pair.owner
        self.turn_until(lambda: owner.is_idle)
        owner.memory.check_integrity()
        counts = owner.memory.counts()
        assert (counts.used, num_quarantined(owner)) == (0, 0)
        assert counts.free + counts.cached == counts.total
        assert owner.counters()["digest_mismatches"] == 0


def strike_until_lost(folder: Path, network: Network, most: int, deck: list[str]) -> list[str]:
    """Strikes a worker's hosts until it ends; what was struck. A kind comes again once all have."""
    struck: list[str] = []
    with ExitStack() as stack:
        workers = Pair(folder, network, stack)
        pair = workers.pair
        while workers.is_alive and len(struck) < most:
            if not deck:
                deck += random.sample(workers.kinds, len(workers.kinds))
            struck.append(kind := deck.pop())
            prompt = [random.randrange(3, VOCAB) for _ in range(random.randint(60, 300))]
            (expected,) = pair.finish(pair.submit(prompt, candidates=[]))
            timers: list[threading.Timer] = []

            def strike(kind: str = kind, timers: list[threading.Timer] = timers) -> None:
                end = workers.strike(kind)
                if kind == "link":
                    stack.callback(end)
                elif kind in MOMENTS:
                    timers.append(threading.Timer(random.uniform(0.05, LIMIT_S / 10), end))
                    timers[-1].start()

            workers.ship(prompt, expected, strike)
            assert timers or kind in ENDINGS
            for timer in timers:
                timer.join()
            workers.check_pages()
            if kind in MOMENTS:
                assert workers.is_alive, kind
                pair.check_shipped(prompt, len(prompt) // PAGE)
                continue
            workers.turn_until(lambda workers=workers: not workers.is_alive)  # type: ignore[misc]
    return struck


@pytest.mark.timeout(3600)
def test_hosts_that_are_struck_while_they_write_pages(tmp_path: Path, seed: int) -> None:
    folder = make_tiny("qwen3", tmp_path / "model", seed, vocab_size=VOCAB)
    struck, deck = list[str](), list[str]()
    with ExitStack() as stack:
        # UCX looks at the routes of a process once, so that all workers are in one network. The
        # second end of its bridge is there so that the bridge is up when the first is not.
        network = Network(2, stack)
        own = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": network.device_of_tests}
        own |= {"UCX_TCP_BRIDGE_ENABLE": "y"}  # NIXL would find that these hosts share memory.
        stack.enter_context(mock.patch.dict(os.environ, own))
        while (left := NUM_STRIKES - len(struck)) > 0:
            struck += strike_until_lost(folder, network, left, deck)
            print(len(struck), struck[-1], flush=True)
    assert set(struck) >= {"kill", "stop", "cut", "black-hole", *MOMENTS}
