"""`weft doctor`: findings about a faked host of two sockets, and about this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.cli.doctor.command import as_json, as_page
from weft.cli.doctor.facts import Facts
from weft.cli.doctor.findings import Finding, findings
from weft.cli.doctor.probe import Probe
from weft.engine.base.placement import ProcessLimits
from weft.engine.base.topology import Host
from weft.testing.engine.faked_host import FakedHost

LIMITS = ProcessLimits(cores=frozenset(range(16)), memory_nodes=frozenset({0, 1}))
PROBE = Probe(
    torch="2.15.0",
    cuda="13.0",
    reached_gpus=[[other for other in range(4) if other != one] for one in range(4)],
    link="over NVLink",
    native=["AMX"],
    plugins=["UCX"],
)


@pytest.fixture
def faked(tmp_path: Path) -> FakedHost:
    host = FakedHost(tmp_path)
    (tmp_path / "dev/infiniband").mkdir()
    host.write("proc/self/status", "CapEff: 0000000000000000")
    host.write("proc/sys/kernel/yama/ptrace_scope", "1")
    host.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    return host


def look(
    faked: FakedHost, *, probe: Probe = PROBE, environ: dict[str, str] | None = None, **facts: Any
) -> dict[str, Finding]:
    whole: dict[str, Any] = {
        "host": Host(faked.root, environ or {}),
        "limits": LIMITS,
        "probe": probe,
        "versions": {"torch": "2.15.0"},
        "num_gpus": 4,
        "torch_has_cuda": True,
        "num_cores": 16,
        "rest_binary": Path("/usr/bin/weft-rest"),
        "compiler": "/usr/bin/cc",
        "shared_bytes": 8 << 30,
        "memory_bytes": 64 << 30,
    }
    return {one.what: one for one in findings(Facts(**whole | facts))}


def test_a_host_that_lacks_nothing(faked: FakedHost) -> None:
    found = look(faked)
    assert {one.state for one in found.values()} == {"ok"}
    assert not any(one.advice or one.stops for one in found.values())
    assert found["GPUs"].found == "4 x NVIDIA H200, driver 580.95.05, CUDA 13.0"
    assert found["peer access"].found == "all GPUs reach one another over NVLink"
    assert "node 1: cores 4-7,12-15" in found["NUMA"].found
    assert "cuda:3 at node 1" in found["NUMA"].found
    assert "cuda:2: mlx5_1:1" in found["network"].found
    page = as_page(list(found.values()))
    assert len(page.splitlines()) == len(found) + 1
    assert page.endswith(f"{len(found)} ok, 0 holds back, 0 missing: a mesh can run\n")


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "C compiler",
        {"compiler": None, "probe": replace(PROBE, native_notices=["x"])},
        "missing",
        "no `cc`",
    ),
    ("Triton", {"compile_problem": "no Python.h: install it"}, "missing", "no Python.h"),
    ("REST edge", {"rest_binary": None}, "missing", "gRPC only"),
    ("NUMA", {"limits": replace(LIMITS, memory_refusal="it refuses")}, "holds back", "it refuses"),
    ("NUMA", {"limits": replace(LIMITS, cores=frozenset({0}))}, "holds back", "may use 0"),
    ("locked memory", {"locked_bytes": 8 << 20}, "holds back", "8,192 KiB"),
    ("open files", {"open_files": 1024}, "holds back", "1,024"),
    ("shared memory", {"shared_bytes": 64 << 20}, "holds back", "0.1 GiB"),
    ("shared memory", {"shared_bytes": None}, "holds back", "is not there"),
    ("memory", {"memory_bytes": 1 << 30}, "holds back", "1.0 GiB free"),
    ("cache folder", {"cache_problem": "read-only"}, "holds back", "read-only"),
    ("GPUs", {"num_gpus": 3}, "holds back", "the host has 4"),
    ("GPUs", {"num_gpus": 0}, "missing", "none that torch can use"),
    ("GPUs", {"num_gpus": 0, "torch_has_cuda": False}, "missing", "none that torch can use"),
    ("torch", {"probe": Probe(torch_problem="ImportError: x")}, "missing", "ImportError: x"),
    ("NIXL", {"probe": replace(PROBE, nixl_problem="no package")}, "missing", "several times"),
    ("Triton", {"probe": replace(PROBE, triton_problem="no package")}, "missing", "no package"),
    ("CPU operations", {"probe": replace(PROBE, native_notices=["no AMX"])}, "holds back", "AMX"),
    (
        "peer access",
        {"probe": replace(PROBE, reached_gpus=[[1], [], []])},
        "holds back",
        "cuda:1 does not reach cuda:0",
    ),
]


@pytest.mark.parametrize(("what", "facts", "state", "said"), CASES)
def test_what_is_not_as_it_should_be(
    faked: FakedHost, what: str, facts: dict[str, Any], state: str, said: str
) -> None:
    found = look(faked, **facts)[what]
    assert found.state == state
    assert said in found.found
    # Errors of the product say themselves what to do.
    assert found.advice or "install" in found.found
    assert found.advice in as_page([found])
    assert json.loads(as_json([found]))["findings"][0]["state"] == state


def test_what_the_files_say(faked: FakedHost) -> None:
    faked.write("proc/sys/kernel/yama/ptrace_scope", "2")
    faked.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    (faked.root / "dev/infiniband").rmdir()
    found = look(faked)
    assert "ptrace_scope is 2" in found["shared memory"].found
    assert found["huge pages"].state == "holds back"
    assert "no /dev/infiniband" in found["network"].found
    faked.write("proc/self/status", f"CapEff: {1 << 19:016x}")
    assert look(faked)["shared memory"].state == "ok"
    for name in ("mlx5_0", "mlx5_1"):
        faked.write(f"sys/class/infiniband/{name}/ports/1/state", "1: DOWN")
    found = look(faked, locked_bytes=1 << 20)
    assert "no port is active" in found["network"].found
    assert found["locked memory"].state == "ok"


def test_only_what_is_needed_stops_a_mesh(faked: FakedHost) -> None:
    def stopping(**facts: Any) -> set[str]:
        return {name for name, one in look(faked, **facts).items() if one.stops}

    lacking: dict[str, Any] = {"compiler": None, "rest_binary": None}
    assert stopping(**lacking) == set()
    lacking["compile_problem"] = "no Python.h: install it"
    assert stopping(**lacking) == {"Triton"}
    # On a CPU it is slower without.
    assert stopping(**lacking, num_gpus=0) == set()
    assert stopping(probe=Probe(torch_problem="ImportError")) == {"torch"}


def test_a_host_without_gpus(tmp_path: Path) -> None:
    found = look(
        FakedHost(tmp_path / "faked"),
        host=Host(tmp_path / "nothing", {}, list),
        num_gpus=0,
        probe=replace(PROBE, reached_gpus=[]),
    )
    assert found["GPUs"] == Finding(what="GPUs", state="ok", found="none; workers run on the CPU")
    assert found.keys().isdisjoint({"peer access", "Triton"})
    assert {one.state for one in found.values()} == {"ok"}


def doctor(*flags: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "weft.cli", "doctor", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, **environ},
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_on_this_host() -> None:
    status, out = doctor("--json")
    found = {one["what"]: one for one in json.loads(out)["findings"]}
    assert {one["state"] for one in found.values()} <= {"ok", "holds back", "missing"}
    assert status == any(one["stops"] for one in found.values())
    assert found["torch"]["state"] == "ok"


@pytest.mark.parametrize(
    "code", ["raise ImportError('libfoo is not there')", "import os; os._exit(9)"]
)
def test_a_torch_that_cannot_be_imported(tmp_path: Path, code: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(code)
    status, out = doctor(PYTHONPATH=str(tmp_path))
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.startswith("missing     torch ")]
    assert "libfoo is not there" in line or "status 9" in line
    assert "a mesh cannot run: torch" in out
