"""What torch, the native operations and NIXL say of this host, from a process of their own: an
import may fail, end the process, or take long.

`python -m weft.cli.doctor.probe` writes a `Probe` as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.pages.transfer.nixl_binding import nixl_version

_LIMIT_S = 400.0
"""Time for the imports and for compiling the native operations, which later starts find."""
_WAIT_LAUNCHES = {"GOMP_SPINCOUNT": "0", "PYTHONWARNINGS": "ignore"}


@dataclass(slots=True, kw_only=True)
class Probe:
    torch: str = ""
    """Version that is imported; empty: it cannot be."""
    torch_problem: str = ""
    """Why not."""
    cuda: str = ""
    """CUDA version that torch is built for; empty: none."""
    triton_problem: str = ""
    """Why Triton cannot be imported; empty: it can."""
    reached_gpus: list[list[int]] = field(default_factory=list)
    """For each GPU that torch can use, the others whose memory it reaches."""
    link: str = ""
    """How they do, in words."""
    native: list[str] = field(default_factory=list)
    """What the native operations multiply with."""
    native_notices: list[str] = field(default_factory=list)
    """What is slower because of them, in words."""
    nixl_problem: str = ""
    """Why NIXL cannot be used; empty: it can."""
    plugins: list[str] = field(default_factory=list)
    """NIXL's back ends."""


def run_probe() -> Probe:
    """Asks a new process; a `Probe` with problems alone if it does not answer."""
    command = [sys.executable, "-m", "weft.cli.doctor.probe"]
    environment = {**os.environ, **_WAIT_LAUNCHES}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return Probe(torch_problem=f"a process that imports it did not end in {_LIMIT_S:.0f} s")
    try:
        return Probe(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return Probe(
            torch_problem=f"a process that imports it ended with status {done.returncode}: "
            f"{lines[-1]}"
        )


def versions() -> dict[str, str]:
    """Versions of what Weft runs on; without what is not installed."""
    found = {"Python": platform.python_version()}
    for name in ("weft", "torch", "triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {name: version for name, version in [("nixl", nixl_version())] if version}


def _tell_torch(probe: Probe) -> None:
    import torch

    probe.cuda = torch.version.cuda or ""
    probe.torch = str(torch.__version__)


def _tell_gpus(probe: Probe) -> None:
    import torch
    from weft.engine.parallel.device_peers import link_of
    from weft.engine.transfer.build import reached_gpus

    gpus = range(torch.cuda.device_count())
    probe.reached_gpus = [reached_gpus(index) for index in gpus]
    probe.link = link_of(gpus) if len(gpus) > 1 else ""


def _tell_triton(probe: Probe) -> None:
    importlib.import_module("triton")


def _tell_native(probe: Probe) -> None:
    import torch
    from weft.engine.executor.device import missing_native
    from weft.kernels.shared.cpu import native_cpu

    probe.native_notices = missing_native(torch.device("cpu"))
    if (native := native_cpu()) is not None:
        known = {
            "AMX": native.has_amx,
            "AVX512-BF16": native.native_bf16,
            "rows of int8": native.takes_int8_rows,
        }
        probe.native = [name for name, is_there in known.items() if is_there]


def _tell_nixl(probe: Probe) -> None:
    from weft.common.rpc.listen import keep_nixl_on_loopback
    from weft.pages.transfer.nixl_binding import load_binding, nixl_available

    is_available, reason = nixl_available()
    if not is_available:
        probe.nixl_problem = reason
        return
    keep_nixl_on_loopback("127.0.0.1")
    agent = load_binding().create_agent("doctor", has_device=False, has_thread=False)
    probe.plugins = sorted(agent.get_plugin_list())


def _problem(tell: Callable[[Probe], None], probe: Probe) -> str:
    try:
        tell(probe)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def main() -> Probe:
    probe = Probe()
    probe.torch_problem = _problem(_tell_torch, probe)
    if not probe.torch_problem:
        _problem(_tell_gpus, probe)
        if problem := _problem(_tell_native, probe):
            probe.native_notices = [f"the native operations cannot be asked: {problem}"]
    probe.triton_problem = _problem(_tell_triton, probe)
    probe.nixl_problem = _problem(_tell_nixl, probe) or probe.nixl_problem
    return probe


if __name__ == "__main__":
    told: dict[str, Any] = asdict(main())
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Native threads must not hold up the end.
