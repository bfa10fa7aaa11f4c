"""The log of a training as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from .measure import DEPTHS
from .texts import KINDS


def draw(log: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: loss and accuracy of each step of the chain, and tokens a step of the engine.

    Args:
        log: Of `Trainer`; entries of checkpoints hold what `measure` gave.
        path: Of the PNG.
    """
    mpl.rcParams["font.size"] = 8
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    loss, accuracy, gain = figure.subplots(1, 3)
    steps = [entry["step"] for entry in log]
    for index in range(len(log[0]["losses"])):
        loss.plot(steps, [entry["losses"][index] for entry in log], label=f"step {index}")
        accuracy.plot(steps, [entry["accuracy"][index] for entry in log], label=f"step {index}")
    loss.set(title="cross-entropy by step of the chain", xlabel="batches")
    accuracy.set(title="share of tokens drafted right", xlabel="batches", ylim=(0, 1))
    measured = [entry for entry in log if "tokens_per_step" in entry]
    for kind in KINDS:
        deepest = [entry["tokens_per_step"][kind][-1] for entry in measured]
        gain.plot([entry["step"] for entry in measured], deepest, marker=".", label=kind)
    gain.set(title=f"held out: tokens a step, depth {max(DEPTHS)}", xlabel="batches")
    for axes in (loss, accuracy, gain):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
