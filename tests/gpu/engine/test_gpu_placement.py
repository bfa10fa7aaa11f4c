"""GPUs of this host by files, by the driver and by torch; pinned memory of a bound process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.engine.base.config import EngineConfig
from weft.engine.base.gpus import driver_gpus
from weft.engine.base.placement import ProcessLimits, bound_command, place_ranks
from weft.engine.base.topology import Host

pytestmark = pytest.mark.needs("cuda")

PINS = """
import torch
from weft.engine.transfer.staging_memory import PinnedStagingPages
pages = PinnedStagingPages(64, 1 << 20, torch.device("cuda"))
pages.tensor.fill_(1)
print(pages.tensor.data_ptr())
print(open("/proc/self/numa_maps").read())
"""


def test_files_driver_and_torch_name_the_same_gpus() -> None:
    named = [gpu.device.address for gpu in Host().gpus]
    assert named == driver_gpus()
    known: list[Any] = [torch.cuda.get_device_properties(index) for index in range(len(named))]
    assert named == [
        f"{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0" for one in known
    ]


def test_pinned_memory_is_on_the_node_of_the_gpu() -> None:
    config = EngineConfig(model_dir=Path(), device="cuda", numa_bind=True)
    (placed,) = place_ranks(config, Host(), ProcessLimits.of_this_process())
    node = placed.binding.memory_node
    if node is None:
        pytest.skip("; ".join(placed.notes))
    command = bound_command([sys.executable, "-c", PINS], placed.binding)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    address, *lines = done.stdout.splitlines()
    begins = {int(line.split()[0], 16): line.split() for line in lines if line}
    fields = begins[max(begin for begin in begins if begin <= int(address))]
    on = {field.split("=")[0] for field in fields if field[:1] == "N" and field[1:2].isdecimal()}
    assert on == {f"N{node}"}, fields
