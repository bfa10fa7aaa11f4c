"""Stages on several hosts make the text of one process; hosts that differ or are lost are named."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from weft.cli.certs import files_of
from weft.contract.version import version
from weft.engine.loop.llm import LLM
from weft.engine.parallel.host_sockets import receive_message, send_message
from weft.testing.engine import host_process
from weft.testing.engine.host_network import Network
from weft.testing.engine.host_proxy import ProxyThread
from weft.testing.models.moe_families import make_any_family
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.certificates import make_certificates

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB, LIMIT_S, LATE_S = 250, 3.0, 60.0
FULL = pytest.mark.full


def random_prompts() -> list[list[int]]:
    shared = [random.randrange(3, VOCAB) for _ in range(40)]
    lengths = (5, 60, 33)
    return [(shared + [random.randrange(3, VOCAB) for _ in range(n)])[-n:] for n in lengths]


def await_listener(host: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.1)


class Hosts:
    """Processes of an engine's hosts.

    Args:
        others: Settings of the hosts other than host 0, by their number, where they differ.
        proxy: By which the others reach host 0; None: directly.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        prompts: list[list[int]],
        count: int,
        others: dict[int, dict[str, Any]] | None = None,
        folders: dict[int, Path] | None = None,
        proxy: ProxyThread | None = None,
        **settings: Any,
    ) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        meet = f"{network.address(0)}:{network.port}"
        for host in range(count):
            if host and proxy is not None:
                # Whoever comes before host 0 listens would be turned away by the proxy.
                await_listener(network.address(0), network.port)
                meet = proxy.proxy.address
            own = {"pp": count, "hosts": count, "rendezvous": meet}
            own |= settings | (others or {}).get(host, {})
            self.start(network, (folders or {}).get(host, folder), prompts, host, **own)

    def start(
        self, network: Network, folder: Path, prompts: list[list[int]], host: int, **settings: Any
    ) -> None:
        own = {"host_rank": host, "rank_timeout_s": 60.0} | settings
        command = [*network.before(host), sys.executable, "-m", host_process.__name__]
        command += [str(folder), json.dumps(own, default=str), json.dumps(prompts)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.processes.append(subprocess.Popen(command, **pipes))

    def answer(self) -> dict[str, Any]:
        """What host 0 prints at its end."""
        told, log = self.processes[0].communicate(timeout=240)
        assert told, log
        found: dict[str, Any] = json.loads(told.splitlines()[-1])
        return found

    def ended(self, host: int) -> str:
        """The log of another host, which must have ended by itself."""
        return self.processes[host].communicate(timeout=120)[1]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@contextmanager
def hosts_of(network: Network, *args: Any, **settings: Any) -> Iterator[Hosts]:
    hosts = Hosts(network, *args, **settings)
    try:
        yield hosts
    finally:
        hosts.close()


@pytest.fixture
def network() -> Iterator[Callable[[int], Network]]:
    with ExitStack() as stack:
        yield lambda count: Network(count, stack)


def tls_in(folder: Path) -> dict[str, Any]:
    """Settings of an identity under a new authority."""
    make_certificates(folder, "decode")
    files = files_of(folder, "decode")
    return {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}


def alone(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    with LLM(folder, **host_process.SIZES | settings) as llm:
        return host_process.texts_of(llm, prompts)


@FULL
@pytest.mark.parametrize(
    ("name", "count", "tp"),
    [
        *(("llama", 2, 1), ("llama", 3, 1), ("mistral", 2, 1), ("qwen3_moe", 2, 1)),
        *(("falcon_h1", 2, 1), ("llama", 2, 2), ("llama", 3, 2), ("falcon_h1", 2, 2)),
        *(("deepseek-v3", 2, 1), ("gemma3", 2, 1), ("llama int8", 2, 1), ("llama int4", 3, 1)),
        *(("llama", 4, 1), ("qwen3_moe", 4, 2)),
    ],
)
def test_texts_of_hosts_are_those_of_one_process(
    name: str,
    count: int,
    tp: int,
    network: Callable[[int], Network],
    tmp_path: Path,
    seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With TLS, chunks, prefix hits and drafts; host 0 starts last."""
    folder = tmp_path / "model"
    kind, *form = name.split()
    settings = {"quantization": form[0] if form else "auto"}
    if kind in ("llama", "mistral", "qwen3_moe"):
        make_tiny(kind, folder, seed, tokenizer=True, vocab_size=517, num_hidden_layers=4)
    else:
        make_any_family(kind, folder, seed)
    prompts, net, tls = random_prompts(), network(count), tls_in(tmp_path / "ca")
    with hosts_of(net, folder, prompts, count, tp=tp, **tls, **settings) as hosts:
        found = hosts.answer()
    with capsys.disabled():
        print("network namespaces" if net.has_namespaces else "loopback", end=" ")
    assert "texts" in found, found
    (notice,) = (text for text in found["notices"] if "pipeline" in text)
    assert f"{count} stages" in notice
    assert all(net.address(host) in notice for host in range(count))
    assert found["texts"] == alone(folder, prompts, **settings)


@FULL
@pytest.mark.parametrize("link", ["25 Gbit/s", "1 Mbit/s", "1 Mbit/s by the proxy"])
def test_a_slow_link_changes_no_text(
    link: str,
    network: Callable[[int], Network],
    tmp_path: Path,
    seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By token buckets of the kernel, or by the project's own proxy, which all connections but that
    of rows to the last stage pass. Rows fill the connection's buffers.
    """
    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, vocab_size=517)
    lengths = (300, 150, 90, 5)
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    sizes = {"prefill_chunk_tokens": 288, "max_step_tokens": 288, "num_pages": 192}
    bits_per_s, net = 25e9 if "Gbit" in link else 1e6, network(2)
    has_proxy = "proxy" in link
    if not has_proxy and not all(net.shape(host, bits_per_s) for host in range(2)):
        pytest.skip("this machine has no network namespaces or no token buckets")
    with ExitStack() as stack:
        proxy = None
        if has_proxy:
            proxy = ProxyThread(f"{net.address(0)}:{net.port}", net.of_tests)
            stack.callback(proxy.close)
            proxy.proxy.bytes_per_s = bits_per_s / 8
        hosts = Hosts(net, folder, prompts, 2, proxy=proxy, **sizes)
        stack.callback(hosts.close)
        found = hosts.answer()
    with capsys.disabled():
        print("the fault proxy" if has_proxy else "tc tbf", end=" ")
    assert found["texts"] == alone(folder, prompts, **sizes)


@FULL
@pytest.mark.parametrize("how", ["killed", "stopped", "cut"])
def test_a_host_that_is_lost_ends_all_in_time(
    how: str, network: Callable[[int], Network], tmp_path: Path, seed: int
) -> None:
    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, vocab_size=517)
    net = network(2)
    if how == "cut" and not net.has_namespaces:
        pytest.skip("this machine allows no network namespaces")
    with hosts_of(net, folder, [], 2, rank_timeout_s=LIMIT_S) as hosts:
        log = hosts.processes[0].stderr
        assert log is not None
        for line in log:
            if "a text" in line:
                break
        time.sleep(0.5)
        if how == "cut":
            net.cut(1)
        else:
            sent = signal.SIGKILL if how == "killed" else signal.SIGSTOP
            os.kill(hosts.processes[1].pid, sent)
        found = hosts.answer()
        assert "rank 1" in found["error"]
        assert found["seconds"] < LIMIT_S + LATE_S
        if how == "cut":
            # Host 0 notices that the connection has ended, or that heartbeats do not come.
            last = hosts.ended(1).splitlines()[-1]
            assert "rank 0" in last or "host 0 has been silent" in last


@FULL
def test_hosts_that_differ_are_refused_by_name(
    network: Callable[[int], Network], tmp_path: Path, seed: int
) -> None:
    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, vocab_size=517)
    other = make_tiny("llama", tmp_path / "other", seed + 1, tokenizer=True, vocab_size=517)
    with hosts_of(network(2), folder, random_prompts(), 2, folders={1: other}) as hosts:
        assert "rank 1 has the model" in hosts.answer()["error"]
        hosts.ended(1)
    with hosts_of(network(2), folder, [], 2, {1: {"hosts": 3, "pp": 3}}) as hosts:
        assert "host 1 has --hosts 3, host 0 has 2" in hosts.ended(1)
    tls, strange = tls_in(tmp_path / "ca"), tls_in(tmp_path / "other-ca")
    with hosts_of(network(2), folder, [], 2, {1: strange}, **tls) as hosts:
        assert "no TLS connection as decode.weft.internal" in hosts.ended(1)


STRANGERS: list[tuple[dict[str, Any], str]] = [
    ({"version": "0.0.1"}, "host 1 runs version 0.0.1, host 0"),
    ({"role": "prefill"}, "host 1 is of a prefill worker, host 0 of a decode worker"),
    ({"hosts": 3}, "host 1 has --hosts 3, host 0 has 2"),
    ({"host_rank": 2}, "--host-rank 2: must be from 1 to 1"),
    ({"host_rank": [1]}, "must be from 1 to 1"),
    ({"host_rank": True}, "must be from 1 to 1"),
    ({"device": "cuda"}, "host 1 computes on cuda, host 0 on cpu: give all the same --device"),
    ({"kind": "frames"}, "must be from 1 to 1"),
    ({"kind": {}}, "must be from 1 to 1"),
    ({"rows_at": None}, "no address at which it takes rows"),
    ({"rows_at": ["a host", 1 << 16]}, "no address at which it takes rows"),
]


@FULL
def test_what_is_no_host_of_this_engine_is_refused_and_others_come(
    network: Callable[[int], Network], tmp_path: Path, seed: int
) -> None:
    """Also what is no message at all."""
    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, vocab_size=517)
    net, prompts = network(2), random_prompts()
    address = (net.address(0), net.port)
    with hosts_of(net, folder, prompts, 1, pp=2, hosts=2) as hosts:
        await_listener(*address)
        for changed, why in STRANGERS:
            right = {"kind": "link", "host_rank": 1, "hosts": 2, "version": version()}
            right |= {"device": "cpu", "role": "decode"}
            with socket.create_connection(address, LATE_S) as stranger:
                send_message(stranger, right | {"rows_at": [address[0], 1]} | changed)
                assert why in receive_message(stranger)["error"]
        for size in range(0, 40, 3):
            with socket.create_connection(address, LATE_S) as stranger:
                stranger.sendall(random.randbytes(size))
        for body in (b"[]", b"1", b"{", b"[" * 20_000):
            with socket.create_connection(address, LATE_S) as stranger:
                stranger.sendall(len(body).to_bytes(4, "little") + body)
        meet = f"{address[0]}:{address[1]}"
        hosts.start(net, folder, prompts, 1, pp=2, hosts=2, rendezvous=meet)
        assert hosts.answer()["texts"] == alone(folder, prompts)
