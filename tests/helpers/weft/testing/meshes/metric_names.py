"""Names of metrics: those that docs/metrics.md lists, and those that a service shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).parents[5] / "docs" / "metrics.md"
_ROW = re.compile(r"\| `(\w+)(?:\{([\w, ]+)\})?` \| (\w+) \|")
_STANDARD = ("process_", "go_")
_OWN_LABELS = {"le", "quantile"}


class Metric(NamedTuple):
    """One family as the exposition names it: counters with `_total`."""

    name: str
    kind: str
    labels: frozenset[str]


def documented() -> dict[str, set[Metric]]:
    """Metrics by the heading of docs/metrics.md that they stand under."""
    found: dict[str, set[Metric]] = {}
    heading = ""
    for line in DOCS.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif match := _ROW.match(line):
            name, labels, kind = match.groups()
            known = frozenset(labels.split(", ")) if labels else frozenset()
            found.setdefault(heading, set()).add(Metric(name, kind, known))
    return found


def exposed(text: str) -> set[Metric]:
    """Names of a service's metrics, without the usual ones of processes."""
    found = set()
    for family in text_string_to_metric_families(text):
        if family.name.startswith(_STANDARD) or "_engine_process_" in family.name:
            continue
        if family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - _OWN_LABELS
        found.add(Metric(name, family.type, frozenset(labels)))
    return found
