"""The log of a training as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG of the losses in training and on held-out texts.

    Args:
        content: Of log.json.
        path: Of the PNG.
    """
    mpl.rcParams["font.size"] = 8
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    settings, log = content["settings"], content["log"]
    scale = settings["batch"] * settings["length"] / 1e6
    measured = [entry for entry in log if "held_out" in entry]
    names = ["model", *(f"MTP head, draft {n}" for n in range(1, len(log[0]["losses"])))]
    for index, name in enumerate(names):
        seen = [entry["step"] * scale for entry in log]
        (line,) = axes.plot(seen, [entry["losses"][index] for entry in log], label=name)
        axes.plot(
            [entry["step"] * scale for entry in measured],
            [entry["held_out"][index] for entry in measured],
            "o",
            color=line.get_color(),
            markersize=3,
        )
    axes.set(
        title="cross-entropy, nats a token (dots: held out)",
        xlabel="million tokens",
        ylim=(0.8, 5.0),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
