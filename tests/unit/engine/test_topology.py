"""NUMA nodes, GPUs and network ports of a host, read from the files of a faked one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from weft.engine.base.topology import Host
from weft.testing.engine.faked_host import GPU_NODES, GPUS, FakedHost, uuid_of


@pytest.fixture
def faked(tmp_path: Path) -> FakedHost:
    return FakedHost(tmp_path)


def never() -> Sequence[str]:
    raise AssertionError("the files say which GPUs there are")


def addresses(host: Host) -> list[str]:
    return [gpu.device.address for gpu in host.gpus]


def test_cores_of_nodes_and_nodes_of_gpus(faked: FakedHost) -> None:
    # Memory of a GPU that is a node has no cores.
    faked.write("sys/devices/system/node/node2/cpulist", "")
    host = Host(faked.root, {}, never)
    assert host.nodes == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}
    assert [gpu.index for gpu in host.gpus] == [0, 1, 2, 3]
    assert addresses(host) == list(GPUS)
    assert tuple(gpu.device.numa_node for gpu in host.gpus) == GPU_NODES
    assert host.driver_version == "580.95.05"


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        ("2,0", [2, 0]),
        (f"{uuid_of(3)},{uuid_of(1)[:8]}", [3, 1]),
        (f"1,{uuid_of(0)}", [1, 0]),
        # CUDA shows nothing behind a name that there is not.
        ("1,7,0", [1]),
        ("-1", []),
        ("", []),
        ("GPU-nobody", []),
    ],
)
def test_gpus_that_cuda_shows(faked: FakedHost, visible: str, shown: list[int]) -> None:
    host = Host(faked.root, {"CUDA_VISIBLE_DEVICES": visible}, never)
    assert addresses(host) == [GPUS[number] for number in shown]
    assert [gpu.index for gpu in host.gpus] == list(range(len(shown)))


def test_a_container_has_the_gpus_of_its_device_files(faked: FakedHost) -> None:
    (faked.root / "dev/nvidia0").unlink()
    (faked.root / "dev/nvidia2").unlink()
    assert addresses(Host(faked.root, {}, never)) == [GPUS[1], GPUS[3]]


def test_the_driver_is_asked_where_files_do_not_say(faked: FakedHost) -> None:
    told = [GPUS[1], GPUS[0]]
    for visible in ("MIG-1234", "0,MIG-1234"):
        host = Host(faked.root, {"CUDA_VISIBLE_DEVICES": visible}, lambda: told)
        assert addresses(host) == told
    # CUDA numbers unlike GPUs by their speed.
    faked.list_gpus(["NVIDIA L4", "NVIDIA H200", "NVIDIA L4", "NVIDIA L4"])
    unlike = Host(faked.root, {}, lambda: told)
    assert addresses(unlike) == told
    assert unlike.gpus[0].model == "NVIDIA H200"
    ordered = Host(faked.root, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, never)
    assert addresses(ordered) == list(GPUS)


def test_ports_by_their_distance(faked: FakedHost) -> None:
    host = Host(faked.root, {}, never)

    def near(gpu: int) -> dict[str, str]:
        return {
            port.name: distance.word for port, distance in host.by_distance(host.gpus[gpu].device)
        }

    assert list(near(0).items()) == [("mlx5_0:1", "PIX"), ("eth0", "NODE"), ("mlx5_1:1", "SYS")]
    assert near(1) == {"mlx5_0:1": "NODE", "eth0": "NODE", "mlx5_1:1": "SYS"}
    assert next(iter(near(2).items())) == ("mlx5_1:1", "PXB")
    assert near(3) == {"mlx5_1:1": "NODE", "mlx5_0:1": "SYS", "eth0": "SYS"}
    states = {port.name: (port.state, port.is_active) for port in host.ports}
    assert states["docker0"] == ("down", False)
    assert states["mlx5_0:1"] == ("ACTIVE", True)


def test_each_gpu_has_the_nearest_active_port(faked: FakedHost) -> None:
    def chosen(root: Path, **environ: str) -> list[str]:
        host = Host(root, environ, never)
        ports = (host.rdma_port_of(gpu.device) for gpu in host.gpus)
        return ["" if port is None else port.name for port in ports]

    assert chosen(faked.root) == ["mlx5_0:1", "mlx5_0:1", "mlx5_1:1", "mlx5_1:1"]
    faked.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert chosen(faked.root) == ["mlx5_1:1"] * 4
    # Equally near ones are shared out, and processes that see few GPUs choose as the others.
    faked.rdma("mlx5_2", "0000:9e:00.0", "4: ACTIVE")
    everybody = chosen(faked.root)
    assert sorted(everybody) == ["mlx5_1:1", "mlx5_1:1", "mlx5_2:1", "mlx5_2:1"]
    for number in range(4):
        assert chosen(faked.root, CUDA_VISIBLE_DEVICES=str(number)) == [everybody[number]]
    for name in ("mlx5_1", "mlx5_2"):
        faked.write(f"sys/class/infiniband/{name}/ports/1/state", "2: INIT")
    assert chosen(faked.root) == [""] * 4


def test_hosts_that_show_little(tmp_path: Path, faked: FakedHost) -> None:
    bare = Host(tmp_path / "nothing", {}, lambda: [GPUS[0]])
    assert (bare.nodes, bare.ports, bare.driver_version) == ({}, (), "")
    (gpu,) = bare.gpus
    assert (gpu.device.path, gpu.device.numa_node) == ((), None)
    assert gpu.device.distance(gpu.device).word == "-"
    # Virtual machines say -1.
    for address in GPUS:
        (faked.device(address) / "numa_node").write_text("-1\n")
    assert Host(faked.root, {}, never).gpus[0].device.numa_node is None
