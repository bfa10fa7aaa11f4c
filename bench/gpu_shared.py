"""Pages between the GPU memory of two processes of one host: CUDA IPC beside plain copies.

    python bench/gpu_shared.py [--mib 256]

The owner is a process of its own, on the same GPU and, where there are two, on the second. Pages
are scattered on both sides; their digests there are compared. A plain copy between two tensors of
this process runs in turns with each write, between the same GPUs. 256 MiB are 2,048 tokens of
Llama-3.1-8B.
"""

import multiprocessing
import sys
from functools import partial

import numpy as np
import torch
from harness import Harness, Run, ratio_of, spread, timed
from weft.contract.handle import SharedTargetInfo
from weft.engine.transfer.staging_memory import DeviceStagingPages
from weft.pages.transfer.shared import SharedSenders
from weft.testing.engine.shared_gpu_process import PAGE_BYTES, PAGES, digests_of, own

KEY = ("owner", 1)

harness = Harness(__file__, __doc__, repeats=15)
harness.flag("--mib", type=int, default=256, help="bytes a write (default 256 MiB)")


def write(
    senders: SharedSenders, target: SharedTargetInfo, local: list[int], remote: list[int]
) -> None:
    """Writes pages and waits, as the filler does."""
    handle = senders.write(KEY, target, local, remote, lambda: None)
    while handle.poll() == "pending":
        pass


def copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copies between tensors and waits."""
    destination.copy_(source)
    torch.cuda.synchronize(source.device)
    torch.cuda.synchronize(destination.device)


@harness.part
def shared(run: Run) -> None:
    """A write, by the owner's GPU."""
    num_pages = min(PAGES, (run.options.mib << 20) // PAGE_BYTES)
    memory = DeviceStagingPages(PAGES, PAGE_BYTES, torch.device("cuda:0"))
    memory.tensor.random_(0, 256)
    rng = np.random.default_rng()
    for device in ["cuda:0", "cuda:1"][: torch.cuda.device_count()]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=own, args=(there, device), daemon=True)
        process.start()
        there.close()  # If the owner fails, `recv` does too.
        target = here.recv()
        senders = SharedSenders(memory.region())
        connect_s = timed(partial(senders.connect, KEY, target))
        plain = torch.empty((num_pages, PAGE_BYTES), dtype=torch.uint8, device=device)
        times: dict[str, list[float]] = {"shared": [], "copy": []}
        is_verified = True
        for turn in range(run.options.repeats + 1):
            local, remote = (rng.permutation(PAGES)[:num_pages].tolist() for _ in range(2))
            took = {
                "shared": timed(partial(write, senders, target, local, remote)),
                "copy": timed(partial(copy, memory.tensor[:num_pages], plain)),
            }
            here.send(remote)
            is_verified &= here.recv() == digests_of(memory.tensor, local)
            if turn:  # The first turn touches memory.
                for name, seconds in took.items():
                    times[name].append(seconds)
        senders.close()
        here.send(None)
        process.join()
        size = num_pages * PAGE_BYTES
        run.row(
            owner=device,
            mib=size >> 20,
            connect_ms=1e3 * connect_s,
            shared_ms=spread(times["shared"], 1e3),
            copy_ms=spread(times["copy"], 1e3),
            shared_gb_per_s=spread([size / seconds / 1e9 for seconds in times["shared"]]),
            ratio=ratio_of(times["copy"], times["shared"]),
            verified=is_verified,
        )
        if not is_verified:
            run.fail(f"pages came changed to {device}")


if __name__ == "__main__":
    sys.exit(harness.main())
