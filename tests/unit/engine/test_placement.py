"""Where the processes of ranks run, on a faked host of two sockets and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.contract.binding import Binding
from weft.contract.cores import list_cores, num_cores, parse_cores
from weft.contract.errors import ConfigError
from weft.engine.base.config import EngineConfig
from weft.engine.base.placement import (
    ProcessLimits,
    RankPlacement,
    bindings_of,
    bound_command,
    place_ranks,
    unbound,
)
from weft.engine.base.topology import Host
from weft.engine.executor.ranks.link import config_of_json, config_to_json
from weft.testing.engine.faked_host import CORES, GPUS, FakedHost

FREE = ProcessLimits(cores=frozenset(range(16)), memory_nodes=frozenset({0, 1}))


@pytest.fixture
def faked(tmp_path: Path) -> FakedHost:
    return FakedHost(tmp_path)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_dir=Path("model"), **{"device": "cuda", **settings})


def place(
    faked: FakedHost, limits: ProcessLimits = FREE, **settings: Any
) -> tuple[RankPlacement, ...]:
    return place_ranks(config(**settings), Host(faked.root, {}), limits)


def test_each_rank_is_bound_to_the_node_of_its_gpu(faked: FakedHost) -> None:
    placed = place(faked, tp=4)
    assert [one.device for one in placed] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [one.gpu and one.gpu.address for one in placed] == list(GPUS)
    assert [one.binding.memory_node for one in placed] == [0, 0, 1, 1]
    assert [one.binding.cores for one in placed] == [CORES[0], CORES[0], CORES[1], CORES[1]]
    assert [one.net_devices for one in placed] == [
        *["mlx5_0:1,eth0,lo"] * 2,
        *["mlx5_1:1,eth0,lo"] * 2,
    ]
    assert not any(one.notes for one in placed)
    # Rank 0 moves the pages of all of them.
    bindings = bindings_of(placed)
    assert bindings[0].net_devices == "mlx5_0:1,eth0,lo,mlx5_1:1"
    assert bindings[3].net_devices == "mlx5_1:1,eth0,lo"
    made = config(tp=4, bindings=bindings)
    assert config_of_json(json.loads(json.dumps(config_to_json(made)))) == made


def test_gpus_that_are_named(faked: FakedHost) -> None:
    (placed,) = place(faked, device="cuda:3")
    assert placed.binding.memory_node == 1
    second, first = place(faked, device="cuda:2, cuda:1", tp=2)
    assert (second.binding.memory_node, first.binding.memory_node) == (1, 0)


def test_what_is_asked_goes_first(faked: FakedHost) -> None:
    (placed,) = place(faked, numa_bind_nodes="1")
    assert placed.binding.memory_node == 1
    (placed,) = place(faked, numa_bind_cpus="4-5,12")
    assert (placed.binding.cores, placed.binding.memory_node) == ("4-5,12", 1)
    (placed,) = place(faked, numa_bind_cpus="3-4")
    assert (placed.binding.cores, placed.binding.memory_node) == ("3-4", None)
    assert "of several NUMA nodes" in placed.notes[0]
    one, two = place(faked, tp=2, numa_bind_nodes="0,1", numa_bind_cpus="0|4")
    assert (one.binding.cores, two.binding.cores) == ("0", "4")
    assert (one.binding.memory_node, two.binding.memory_node) == (0, 1)
    (placed,) = place(faked, numa_bind=False, nics="all")
    assert placed.binding == Binding()
    assert placed.gpu is not None


def test_cpus_are_bound_only_if_asked(faked: FakedHost) -> None:
    (placed,) = place(faked, device="cpu")
    assert (placed.binding, placed.notes, placed.net_devices) == (Binding(), (), "")
    (placed,) = place(faked, device="cpu", numa_bind_nodes="1")
    assert placed.binding == Binding(cores=CORES[1], memory_node=1)


def test_one_node_needs_no_binding(faked: FakedHost) -> None:
    (faked.root / "sys/devices/system/node/node1/cpulist").unlink()
    for address in GPUS:
        (faked.device(address) / "numa_node").write_text("-1\n")
    (placed,) = place(faked)
    assert not placed.binding.is_bound
    assert not placed.notes
    # But may have it.
    (placed,) = place(faked, numa_bind=True)
    assert placed.binding.memory_node == 0


def test_what_the_host_does_not_allow_is_told(faked: FakedHost) -> None:
    def notes(**limits: Any) -> tuple[Binding, str]:
        (placed,) = place(faked, replace(FREE, **limits), device="cuda:2", nics="all")
        return placed.binding, "; ".join(placed.notes)

    # A container's cores are a part of the node's.
    assert notes(cores=frozenset({2, 3, 4, 5})) == (Binding(cores="4-5", memory_node=1), "")
    binding, told = notes(cores=frozenset({2, 3}))
    assert binding == Binding(memory_node=1)
    assert told == "not bound to cores of NUMA node 1: this process may use 2-3"
    binding, told = notes(memory_refusal="the host refuses set_mempolicy")
    assert binding == Binding(cores=CORES[1])
    assert told == "memory is not bound to NUMA node 1: the host refuses set_mempolicy"
    binding, told = notes(memory_nodes=frozenset({0}))
    assert binding == Binding(cores=CORES[1])
    assert "may use that of 0" in told
    binding, told = notes(has_memory_policy=True)
    assert binding == Binding(cores=CORES[1])
    assert "--numa-bind overrides it" in told
    (placed,) = place(faked, replace(FREE, has_memory_policy=True), numa_bind=True)
    assert placed.binding.memory_node == 0


def test_a_gpu_of_which_the_host_shows_nothing(faked: FakedHost) -> None:
    for address in GPUS:
        (faked.device(address) / "numa_node").write_text("-1\n")
    first, second = place(faked, tp=2)
    assert not first.binding.is_bound
    assert first.notes == (
        f"rank 0: not bound: the host does not say which NUMA node cuda:0 at {GPUS[0]} is near to; "
        "--numa-bind-nodes names it",
    )
    assert second.notes[0].startswith("rank 1: ")


def test_network_devices_that_are_named(faked: FakedHost) -> None:
    (placed,) = place(faked, nics="mlx5_1")
    assert placed.binding.net_devices == "mlx5_1:1"
    (placed,) = place(faked, nics="mlx5_1:1, eth0")
    assert placed.net_devices == "mlx5_1:1,eth0"
    one, two = place(faked, tp=2, nics="mlx5_1|mlx5_0")
    assert (one.net_devices, two.net_devices) == ("mlx5_1:1", "mlx5_0:1")
    (placed,) = place(faked, nics="docker0")
    assert placed.notes == ("the network device docker0 is down",)
    # The user's own variable is inherited.
    (placed,) = place(faked, replace(FREE, net_devices="mlx5_9:1"), nics="mlx5_0")
    assert (placed.net_devices, placed.binding.net_devices) == ("mlx5_9:1", "")
    assert placed.notes == ("nics is not used: UCX_NET_DEVICES is mlx5_9:1",)
    (placed,) = place(faked, replace(FREE, net_devices="lo"))
    assert (placed.net_devices, placed.notes) == ("lo", ())


def test_without_rdma_ucx_chooses(faked: FakedHost) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        faked.write(f"sys/class/infiniband/{name}/ports/1/state", "1: DOWN")
    (placed,) = place(faked)
    assert placed.net_devices == ""
    assert [port.name for port, _ in placed.ports][:2] == ["mlx5_0:1", "eth0"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"numa_bind_nodes": "2"}, "there is no NUMA node 2; there are 0-1"),
        ({"numa_bind_nodes": "-1"}, "there is no NUMA node -1"),
        ({"numa_bind_cpus": "16-20"}, "may not use 16-20, only 0-15"),
        ({"numa_bind_cpus": "one"}, "'one' is no core"),
        ({"nics": "mlx5_2"}, r"no network device 'mlx5_2'; there are mlx5_0:1 \(ACTIVE\)"),
        ({"nics": "mlx5_0:2"}, "no network device 'mlx5_0:2'"),
        ({"nics": "eth0,"}, "no network device ''"),
        ({"numa_bind_nodes": "0,1"}, "for each of tp = 1"),
        ({"numa_bind_cpus": "0|1", "tp": 3}, "for each of tp = 3"),
        ({"numa_bind": False, "numa_bind_nodes": "0"}, "numa_bind = False"),
        ({"numa_bind": True, "device": "cpu"}, "on a CPU"),
    ],
)
def test_what_there_is_not_is_refused(
    faked: FakedHost, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        place(faked, **settings)


def test_a_process_is_born_where_it_belongs() -> None:
    """On this host, as far as it allows that."""
    limits, host = ProcessLimits.of_this_process(), Host()
    if not host.nodes:
        pytest.skip("the host shows no NUMA nodes")
    core = max(limits.cores)
    (placed,) = place_ranks(config(device="cpu", numa_bind_cpus=str(core)), host, limits)
    code = (
        "import os, sys; from weft.contract.binding import Binding\n"
        "from weft.engine.base.placement import unbound\n"
        f"print(os.sched_getaffinity(0), unbound({placed.binding!r}, 'it'), sys.argv[1:])\n"
        "print(open('/proc/self/numa_maps').readline())"
    )
    command = bound_command([sys.executable, "-c", code, "a b"], placed.binding)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second, *_ = done.stdout.splitlines()
    assert first == f"{ {core} } [] ['a b']"
    if placed.binding.memory_node is not None:
        assert f"prefer:{placed.binding.memory_node} " in second
    # It knows what it is not bound to.
    told = unbound(Binding(cores=str(core + 1), memory_node=1023), "rank 1")
    assert told == [
        f"rank 1 is not bound to the cores {core + 1}: the host refused it",
        "rank 1: memory is not bound to node 1023: the host refused it",
    ]
    # This process is as it was.
    assert os.sched_getaffinity(0) == limits.cores


def test_what_is_not_bound_starts_as_it_did() -> None:
    assert bound_command(["/bin/true"], Binding(net_devices="lo")) == ["/bin/true"]


def test_lists_of_cores() -> None:
    for text, cores in {"": set(), "0": {0}, "0-2,5": {0, 1, 2, 5}, "3, 4": {3, 4}}.items():
        assert parse_cores(text) == cores
        assert parse_cores(list_cores(cores)) == cores
    assert list_cores([9, 1, 2, 3]) == "1-3,9"
    for wrong in ("a", "1-", "-1", "1-2-3"):
        with pytest.raises(ValueError, match="no range"):
            parse_cores(wrong)
    assert num_cores(frozenset({min(os.sched_getaffinity(0))})) == 1
