"""The Grafana dashboard asks for metrics that exist, in expressions that parse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from weft.testing.meshes.metric_names import Metric, documented

DASHBOARD = Path(__file__).parents[3] / "dashboards" / "weft.json"
STANDARD = {"process_cpu_seconds_total", "weft_engine_process_cpu_seconds_total"}
TARGET_LABELS = {"job", "instance"}
"""Every scraped series has them."""


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str, str]]:
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]


def series() -> dict[str, Metric]:
    """Documented metrics by the names of their series."""
    found = {}
    for metrics in documented().values():
        for metric in metrics:
            suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
            found |= {metric.name + suffix: metric for suffix in suffixes}
    return found


def selectors(expression: str) -> list[Any]:
    """Every vector selector of an expression."""
    found: list[Any] = []

    def walk(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        for name in ("expr", "lhs", "rhs", "param", "vector_selector", "args"):
            child = getattr(node, name, None)
            for each in child if isinstance(child, list) else [child]:
                if each is not None:
                    walk(each)

    walk(promql_parser.parse(expression.replace("$__rate_interval", "5m")))
    return found


@pytest.mark.parametrize(("title", "expression", "legend"), expressions())
def test_an_expression_asks_for_what_services_show(
    title: str, expression: str, legend: str
) -> None:
    known = series()
    found = selectors(expression)
    assert found, expression
    labels = set(TARGET_LABELS)
    for selector in found:
        name = selector.name
        if name in STANDARD:
            continue
        assert name in known, f"{title}: {name} is not in dashboards/metrics.toml"
        labels |= known[name].labels
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= known[name].labels | TARGET_LABELS, expression
        # A counter is only ever looked at through its rate.
        is_counter = known[name].kind == "counter" or name != known[name].name
        is_rated = re.search(rf"(rate|increase)\({name}\b", expression) is not None
        assert is_counter == is_rated, expression
    grouped = {
        label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")
    }
    assert grouped - {"le"} <= labels, expression
    assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, legend


def test_the_selectors_of_nested_expressions_are_found() -> None:
    names = [
        selector.name
        for selector in selectors(
            "histogram_quantile(0.9, sum by (le) (rate(a_bucket[$__rate_interval]))) / -b + (c)"
        )
    ]
    assert names == ["a_bucket", "b", "c"]


def test_panels_do_not_overlap_and_are_told_apart() -> None:
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_data_source_is_chosen_by_whoever_imports_it() -> None:
    (variable,) = dashboard()["templating"]["list"]
    assert (variable["name"], variable["type"]) == ("datasource", "datasource")
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"


def test_everything_that_operators_must_see_is_shown() -> None:
    shown = {selector.name for _, text, _ in expressions() for selector in selectors(text)}
    assert shown >= {
        "weft_time_to_first_token_seconds_bucket",
        "weft_inter_token_latency_seconds_bucket",
        "weft_request_duration_seconds_bucket",
        "weft_requests",
        "weft_kv_usage_ratio",
        "weft_engine_prefix_hit_tokens_total",
        "weft_fills_total",
        "weft_fill_bytes_total",
        "weft_engine_preemptions_total",
        "weft_kv_pages",
        "weft_request_retries_total",
        "weft_request_resumptions_total",
        "weft_worker_breaker_state",
        "weft_engine_digest_mismatches_total",
    }
