"""Draws the plots of docs/performance.md from bench/results/, as SVG.

python scripts/plot_performance.py            writes docs/plots/*.svg
python scripts/plot_performance.py --check    exit status 1, and the names of stale files
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PLOTS = ROOT / "docs" / "plots"

COLORS = {"Weft": "#4f46e5", "vLLM": "#d97706", "Weft, apart": "#059669", "transformers": "#64748b"}
WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 40, 44


class Panel(NamedTuple):
    """One chart: curves over the same loads."""

    title: str
    unit: str
    loads: Sequence[int]
    curves: Mapping[str, Sequence[float]]
    """Values by the name of the system, one for each load."""


def nice_top(value: float) -> float:
    """The least of 1, 2, 3, 4, 5, 6, 8, 10 times a power of ten that is not below `value`."""
    power = 1.0
    while power * 10 < value:
        power *= 10
    return next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * power >= value)


def draw_panel(panel: Panel, offset: int) -> list[str]:
    """SVG elements of one chart, moved right by `offset` pixels."""
    top = nice_top(max(max(values) for values in panel.curves.values()))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    last = max(1, len(panel.loads) - 1)
    xs = [LEFT + width * place / last for place in range(len(panel.loads))]
    lines = [f'<g transform="translate({offset} 0)">']
    lines.append(f'<text class="t" x="{LEFT}" y="20">{panel.title}</text>')
    for part in range(5):
        y = TOP + height - height * part / 4
        lines.append(f'<path class="r" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        lines.append(f'<text class="y" x="{LEFT - 8}" y="{y + 4:.1f}">{top * part / 4:,.5g}</text>')
    for x, load in zip(xs, panel.loads, strict=True):
        lines.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 24}">{load}</text>')
    lines.append(f'<text class="x" x="{LEFT + width / 2:.1f}" y="{HEIGHT - 6}">{panel.unit}</text>')
    for name, values in panel.curves.items():
        points = [
            (x, TOP + height - height * value / top) for x, value in zip(xs, values, strict=True)
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        lines.append(f'<path class="c" stroke="{COLORS[name]}" d="M{path}"/>')
        lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLORS[name]}"/>' for x, y in points
        ]
    lines.append("</g>")
    return lines


def draw(panels: Sequence[Panel]) -> str:
    """An SVG file of charts side by side, with one legend."""
    width, height = WIDTH * len(panels), HEIGHT + 28
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    label = "; ".join(panel.title for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-label="{label}">',
        "<style>text{font:12px system-ui,sans-serif;fill:#334155}.t{font-size:13.5px;"
        "font-weight:600;fill:#0f172a}.y{text-anchor:end}.x{text-anchor:middle}"
        ".r{stroke:#e2e8f0}.c{fill:none;stroke-width:2.2}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for place, panel in enumerate(panels):
        lines += draw_panel(panel, WIDTH * place)
    for place, name in enumerate(names):
        x, y = LEFT + 130 * place, height - 10
        lines.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{COLORS[name]}"/>')
        lines.append(f'<text x="{x + 10}" y="{y}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])


def read(name: str) -> Any:
    """A file of bench/results."""
    return json.loads((RESULTS / name).read_text())


def gpu_plot(model: str) -> str:
    """Tokens per second and first tokens of whole servers on one GPU, by requests at once."""
    rows = read("rest-peers-h100-20261125.json")["rows"]
    rows = [row for row in rows if row["model"] == model and row["requests"] != "mixed"]
    loads = [row["requests"] for row in rows]
    speed = {
        "Weft": [row["weft_tokens_per_s"] for row in rows],
        "vLLM": [row["vllm_tokens_per_s"] for row in rows],
    }
    first = {
        "Weft": [row["weft_first_ms"][0] for row in rows],
        "vLLM": [row["vllm_first_ms"][0] for row in rows],
    }
    unit = "requests at once"
    return draw(
        [
            Panel(f"{model}, one H100: output tokens/s", unit, loads, speed),
            Panel(f"{model}: first token p50, ms", unit, loads, first),
        ]
    )


def cpu_plot(prompt: int) -> str:
    """The same on two CPU cores, with one worker and with prefill apart."""
    rows = [row for row in read("rest-peers-epyc-20261125.json")["rows"] if row["prompt"] == prompt]
    loads = [row["streams"] for row in rows]
    keys = {"Weft": "weft_together", "vLLM": "vllm", "Weft, apart": "weft_apart"}
    speed, first = (
        {name: [row[key][place] for row in rows] for name, key in keys.items()} for place in (0, 1)
    )
    return draw(
        [
            Panel(f"Demo model, {prompt}-token prompts: tokens/s", "streams", loads, speed),
            Panel("First token p50, ms", "streams", loads, first),
        ]
    )


def plots() -> dict[str, str]:
    """All plots by file name."""
    return {
        "rest-h100-qwen3-0.6b.svg": gpu_plot("Qwen3-0.6B"),
        "rest-h100-llama-3.1-8b.svg": gpu_plot("Llama-3.1-8B"),
        "rest-epyc-512.svg": cpu_plot(512),
    }


def main() -> int:
    """Writes or checks the plots; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, name stale files")
    check = parser.parse_args().check
    stale = []
    PLOTS.mkdir(exist_ok=True)
    for name, text in plots().items():
        path = PLOTS / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    if check and stale:
        print("stale:", *stale)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
