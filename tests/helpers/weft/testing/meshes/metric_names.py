"""Names of metrics: those of dashboards/metrics.toml, and those that a service shows."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

LIST = Path(__file__).parents[5] / "dashboards" / "metrics.toml"
_STANDARD = ("process_", "go_")
_OWN_LABELS = {"le", "quantile"}


class Metric(NamedTuple):
    """One family as the exposition names it: counters with `_total`."""

    name: str
    kind: str
    labels: frozenset[str]


def documented() -> dict[str, set[Metric]]:
    """Metrics by the service that they are listed under."""
    return {
        service: {
            Metric(name, one["type"], frozenset(one.get("labels", ())))
            for name, one in metrics.items()
        }
        for service, metrics in tomllib.loads(LIST.read_text()).items()
    }


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
