"""TRL's `WeightTransferClient` sends the weights of each folder that its input names to a mesh.

    python trl_weights.py SITE URL

SITE is the unpacked archive of `scripts/trl_kit.py`, of which nothing is changed. vLLM's compiled
kernels and its server's tools, which a trainer never calls, get empty stand-ins. The trainer's GPU
is the first one that it sees: TRL opens its group in a new thread, whose device that is. It prints
a line of JSON when it can begin, and one with the seconds of each call behind each folder. A call
that takes longer than `LIMIT_S` ends it, with all stacks.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file

LIMIT_S = 45
STAND_INS = {"vllm._C_stable_libtorch": (), "vllm.entrypoints.mcp.tool_server": ("ToolServer",)}


def timed(times: dict[str, float], name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Adds its seconds to `times`."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    began = time.perf_counter()
    found = call(*arguments)
    faulthandler.cancel_dump_traceback_later()
    times[name] = round(time.perf_counter() - began, 3)
    return found


def load_trl(site: str) -> tuple[Any, Any]:
    """TRL's two modules, without its trainer, whose data sets the machine lacks."""
    sys.path.insert(0, site)
    for name, classes in STAND_INS.items():
        sys.modules[name] = types.ModuleType(name)
        for one in classes:
            setattr(sys.modules[name], one, type(one, (), {}))
    package = types.ModuleType("trl.experimental.async_grpo")
    package.__path__ = [f"{site}/trl/experimental/async_grpo"]
    sys.modules[package.__name__] = package
    names = ("weight_transfer", "vllm_client")
    transfer, client = (importlib.import_module(f"{package.__name__}.{name}") for name in names)
    for name in ("open_trainer_endpoint", "packed_nccl_broadcast_producer"):
        setattr(transfer, name, told(getattr(transfer, name)))
    return transfer, client


def told(call: Callable[..., Any]) -> Callable[..., Any]:
    """Prints what it raises: TRL keeps that back until the server has answered."""

    def run(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except BaseException:
            traceback.print_exc()
            raise

    return run


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path, device="cuda")
    torch.cuda.synchronize()
    return found


def main(site: str, url: str) -> None:
    times: dict[str, float] = {}
    PartialState()  # TRL's loggers ask it which process this is.
    transfer, server = timed(times, "import", load_trl, site)
    print(json.dumps(times), flush=True)
    client: Any = None
    for line in sys.stdin:
        times = {}
        tensors = timed(times, "load", tensors_of, Path(line.strip()))
        if client is None:
            # As TRL's trainer describes its parameters.
            described = {
                "names": list(tensors),
                "dtype_names": [str(one.dtype).split(".")[-1] for one in tensors.values()],
                "shapes": [list(one.shape) for one in tensors.values()],
            }
            client = transfer.WeightTransferClient(
                vllm_client=server.VLLMClient(url, server_timeout=LIMIT_S),
                weight_update_info=described,
                weight_sync_timeout=LIMIT_S,
            )
            timed(times, "init", client.init_weight_transfer)
            if client.model_update_group.disabled:
                sys.exit("vLLM could not load NCCL, and would send nothing: see its log above")
        timed(times, "pause", client.pause)
        timed(times, "send", client.send_weights, iter(tensors.items()))
        timed(times, "resume", client.resume)
        print(json.dumps(times), flush=True)
    if client is not None:
        client.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
