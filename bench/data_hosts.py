"""KV pages between hosts: GB/s as gRPC data, where the time goes, and bytes on each host's link.

    python bench/data_hosts.py            as root, with `ip`: network namespaces with a bridge

A prefill and a decode worker, each in a namespace, have pages as large as Llama-3.1-8B's, and a
prompt that the prefill worker has cached is shipped again and again. `gb_per_s` counts from the
fill's start to its end as the owner's timeline has them. Beside it stand the processor seconds a
gigabyte of each of the four processes. Two hosts have more cores than this machine: the busiest
process is what bounds them, so `bound_gb_per_s` is what it could move with a core of its own.

`plain` is the same bytes over one TCP connection between the namespaces, by Python's sockets.
`one_host` ships the prompt between two workers of one host, over NIXL and in shared memory.

`links` ships it from a prefill worker of two hosts (`--pp 2 --hosts 2`) to a decode worker on a
third, and counts what each host sends and receives on its network device, as shares of the pages'
bytes.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import grpc
import psutil
from harness import Harness, Run, spread
from weft.common.rpc.channel import CHANNEL_OPTIONS
from weft.testing.engine.host_network import Network
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.processes import ServiceProcess
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

VOCAB = 517
SHAPE = {"vocab_size": VOCAB, "num_hidden_layers": 32, "head_dim": 128, "hidden_size": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 8192}
READER = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("listens", flush=True)
    caller, _ = server.accept()
    memory = memoryview(bytearray(1 << 20))
    while caller.recv_into(memory):
        pass
    caller.send(b"x")
"""
WRITER = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as there:
    data, began_s, left = bytes(1 << 20), time.perf_counter(), int(sys.argv[3])
    for _ in range(left):
        there.sendall(data)
    there.shutdown(socket.SHUT_WR)
    there.recv(1)
    print((left << 20) / 1e9 / (time.perf_counter() - began_s))
"""

harness = Harness(__file__, __doc__, repeats=9)
harness.flag("--prompt", type=int, default=2048, help="tokens, of 128 KiB each")
harness.flag("--worker-args", default="", help="of all workers")


def network_of(run: Run, hosts: int = 2) -> Network:
    network = Network(hosts, run.stack)
    if not network.has_namespaces:
        raise SystemExit("this needs root, `ip`, and network namespaces")
    return network


@harness.part
def plain(run: Run) -> None:
    """One TCP connection."""
    network = network_of(run)
    rates = []
    for _ in range(run.options.repeats):
        at = (network.address(1), str(network.port))
        command = [*network.before(1), sys.executable, "-c", READER, *at]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            command = [*network.before(0), sys.executable, "-c", WRITER, *at, "1024"]
            rates.append(float(subprocess.check_output(command, text=True, timeout=60)))
    run.row(table="plain", gb_per_s=spread(rates))


class Hosts:
    """A prefill worker on the first hosts, one for each of its stages, a decode worker on the next,
    and a gateway outside of them. Without a network all are on one.

    Args:
        stages: Hosts of the prefill worker, the first ones of the network.
    """

    def __init__(
        self,
        stack: ExitStack,
        run: Run,
        transport: str,
        network: Network | None = None,
        stages: int = 1,
    ) -> None:
        temporary = tempfile.TemporaryDirectory(prefix="weft-data-hosts-")
        folder = Path(stack.enter_context(temporary))
        make_tiny("llama", folder / "model", tokenizer=True, **SHAPE, **HEADS)
        model = ("--model-dir", str(folder / "model"), "--model-name", "m")
        weft = [sys.executable, "-m", "weft.cli", "serve"]
        self.workers: dict[str, ServiceProcess] = {}
        addresses = {}
        for host, role in (*((host, "prefill") for host in range(stages)), (stages, "decode")):
            more = ["--transport", transport, *run.options.worker_args.split()]
            if role == "decode":  # Every prompt comes anew.
                more += ["--no-prefix-cache", "--local-prefill-max-tokens", "0"]
            command = [*weft, role, *model, "--device", "cpu", *more]
            if network is not None:
                command = [*network.before(host), *command]
                command += ["--host", network.address(host), "--insecure"]
            if stages > 1 and role == "prefill" and network is not None:
                command += ["--pp", str(stages), "--hosts", str(stages), "--host-rank", str(host)]
                command += ["--rendezvous", f"{network.address(0)}:{network.port}"]
            name = f"{role}-{host}" if role == "prefill" and host else role
            self.workers[name] = stack.enter_context(ServiceProcess(name, command, folder))
        for role in ("prefill", "decode"):
            addresses[role] = self.workers[role].wait_ready(300)["address"]
        command = [*weft, "gateway", *model, "--port", "0"]
        command += [part for role, at in addresses.items() for part in (f"--{role}", at)]
        gateway = stack.enter_context(ServiceProcess("gateway", command, folder))
        self.gateway: str = gateway.wait_ready(60)["address"]

    def processor_s(self) -> dict[str, float]:
        """Processor seconds of each process so far."""
        found = {}
        for role, process in self.workers.items():
            server = psutil.Process(process.pid)
            times = [one.cpu_times() for one in (server, *server.children(recursive=True))]
            for name, used in zip(("server", "engine"), times, strict=False):
                found[f"{role}_{name}"] = used.user + used.system
        return found


async def fill_of(
    stub: gateway_pb2_grpc.GatewayServiceAsyncStub, tokens: list[int]
) -> common_pb2.FillTimeline:
    request = gateway_pb2.CompleteRequest(
        model="m",
        token_ids=common_pb2.TokenIds(ids=tokens),
        stop=common_pb2.StopCriteria(max_tokens=1),
    )
    answers = [answer async for answer in stub.Complete(request, timeout=300)]
    (fill,) = answers[-1].timeline.fills
    return fill


async def until_ready(stub: gateway_pb2_grpc.GatewayServiceAsyncStub) -> None:
    """Waits until the gateway has seen both workers."""
    async with asyncio.timeout(60):
        while True:
            try:
                await fill_of(stub, [random.randrange(3, VOCAB) for _ in range(40)])
            except (grpc.aio.AioRpcError, ValueError):  # ValueError: it was not shipped.
                await asyncio.sleep(0.2)
            else:
                return


async def measure(run: Run, hosts: Hosts) -> None:
    tokens = [random.randrange(3, VOCAB) for _ in range(run.options.prompt)]
    async with grpc.aio.insecure_channel(hosts.gateway, options=CHANNEL_OPTIONS) as channel:
        stub: gateway_pb2_grpc.GatewayServiceAsyncStub = gateway_pb2_grpc.GatewayServiceStub(
            channel
        )
        await until_ready(stub)
        for _ in range(2):  # The first computes; both connect and touch memory.
            await fill_of(stub, tokens)
        ms, rates, num_bytes = [], [], 0
        before = hosts.processor_s()
        for _ in range(run.options.repeats):
            fill = await fill_of(stub, tokens)
            assert fill.computed_tokens <= run.options.prompt // 8, "it was not cached"
            took = fill.end_time.ToTimedelta() - fill.start_time.ToTimedelta()
            ms.append(took.total_seconds() * 1e3)
            rates.append(fill.bytes / took.total_seconds() / 1e9)
            num_bytes += fill.bytes
        used = hosts.processor_s()
    per_gb = {name: (used[name] - before[name]) / num_bytes * 1e9 for name in used}
    transport = common_pb2.TransportKind.Name(fill.transport).removeprefix("TRANSPORT_KIND_")
    run.row(
        table="fills",
        transport=transport.lower(),
        mib=fill.bytes / 2**20,
        ms=spread(ms),
        gb_per_s=spread(rates),
        **{f"{name}_s_per_gb": value for name, value in per_gb.items()},
        bound_gb_per_s=1 / max(per_gb.values()),
    )


@harness.part
def fills(run: Run) -> None:
    """A cached prompt, between hosts that have no NIXL."""
    with ExitStack() as stack:
        asyncio.run(measure(run, Hosts(stack, run, "shared", network_of(run))))


async def count(run: Run, hosts: Hosts, network: Network, num_hosts: int) -> None:
    tokens = [random.randrange(3, VOCAB) for _ in range(run.options.prompt)]

    def counted() -> list[tuple[int, int]]:
        each = range(num_hosts)
        return [(network.num_sent(host), network.num_received(host)) for host in each]

    async with grpc.aio.insecure_channel(hosts.gateway, options=CHANNEL_OPTIONS) as channel:
        stub: gateway_pb2_grpc.GatewayServiceAsyncStub = gateway_pb2_grpc.GatewayServiceStub(
            channel
        )
        await until_ready(stub)
        for _ in range(2):
            await fill_of(stub, tokens)
        before, num_bytes, ms = counted(), 0, []
        for _ in range(run.options.repeats):
            fill = await fill_of(stub, tokens)
            assert fill.computed_tokens <= run.options.prompt // 8, "it was not cached"
            took = fill.end_time.ToTimedelta() - fill.start_time.ToTimedelta()
            ms.append(took.total_seconds() * 1e3)
            num_bytes += fill.bytes
        after = counted()
    found = {}
    for host, (first, last) in enumerate(zip(before, after, strict=True)):
        found[f"host{host}_sent"] = (last[0] - first[0]) / num_bytes
        found[f"host{host}_received"] = (last[1] - first[1]) / num_bytes
    transport = common_pb2.TransportKind.Name(fill.transport).removeprefix("TRANSPORT_KIND_")
    run.row(
        table="links", transport=transport.lower(), mib=fill.bytes / 2**20, ms=spread(ms), **found
    )


@harness.part
def links(run: Run) -> None:
    """Bytes on each host's link, as shares of the pages' bytes: hosts 0 and 1 prefill."""
    for transport in ("nixl", "data"):
        with ExitStack() as stack:
            # Otherwise NIXL finds that these hosts share memory, and uses no network.
            stack.enter_context(mock.patch.dict(os.environ, UCX_TLS="tcp"))
            network = network_of(run, 3)
            asyncio.run(count(run, Hosts(stack, run, transport, network, 2), network, 3))


@harness.part
def one_host(run: Run) -> None:
    """A cached prompt, on one host."""
    for transport in ("nixl", "shared", "shared", "nixl"):
        with ExitStack() as stack:
            asyncio.run(measure(run, Hosts(stack, run, transport)))


if __name__ == "__main__":
    sys.exit(harness.main())
