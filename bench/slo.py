"""Latency targets under overload: goodput with the gateway's admission and without it.

    python bench/slo.py [--seconds 40] [--json PATH]

Gate, forecasts, queue of tenants, policies and load estimates are the gateway's own; workers are
made up and live on a virtual clock (`bench/fleet/serving.py`). Two meshes: one whose prefill
workers are the bottleneck, one whose decode workers are. Requests are made-up chats; those with
targets want the first token within `--first-token`, the next ones every `--between-tokens` in the
mean. The capacity is the rate at which 95 % are in target without the gate.

| part | rows |
| --- | --- |
| `overload` | one tenant at shares of the capacity |
| `tenants` | chats with targets at a quarter of it, beside another's flood at twice of it |

Goodput is requests within their targets a second of arrivals.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fleet.serving import (
    Offer,
    ServingSetup,
    ServingSimulation,
    TenantResult,
    merged,
    without_targets,
)
from fleet.trace import conversations
from weft.gateway.admission.slo import NO_TARGETS, Targets

MESHES = {
    "prefill-bound": ServingSetup(num_prefill=4, num_decode=48),
    "decode-bound": ServingSetup(num_prefill=8, num_decode=8),
}
SHARES = (0.5, 1.0, 2.0)
FLOOD_PAGES = 1 << 40
"""Names of the flood's pages begin here: tenants share no prefixes."""


def chats(seconds: float, rate: float, targets: Targets, seed: int) -> Iterator[Offer]:
    """Conversations of several turns."""
    for arrival in conversations(int(seconds * rate), rate, seed):
        yield Offer(arrival, "chat", targets)


def flood(seconds: float, rate: float, seed: int) -> Iterator[Offer]:
    """Single requests of one tenant without targets."""
    for arrival in conversations(int(seconds * rate), rate, seed, mean_turns=1.0):
        pages = [page + FLOOD_PAGES for page in arrival.pages]
        yield Offer(arrival._replace(pages=pages), "flood", NO_TARGETS)


def capacity(setup: ServingSetup, targets: Targets, seconds: float, seed: int) -> float:
    """Finds by bisection the rate (requests/s) at which 95 % are in time without the gate."""
    low, high = 1.0, 1000.0
    while high / low > 1.03:
        rate = (low * high) ** 0.5
        offers = chats(seconds, rate, targets, seed)
        result = ServingSimulation(without_targets(setup)).run(offers)["chat"]
        if result.outcomes["met"] >= 0.95 * result.offered:
            low = rate
        else:
            high = rate
    return low


class Report:
    """Prints rows and keeps them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def head(self, title: str) -> None:
        """Starts a table."""
        print(f"\n{title}")
        names = (
            *("mesh", "gateways", "share", "tenant", "gate", "offered/s", "goodput/s"),
            *("met %", "late %", "slow %", "refused %", "first p50", "first p99"),
            *("between p99", "refused after p50"),
        )
        print(" | ".join(names))

    def add(
        self,
        part: str,
        mesh: str,
        setup: ServingSetup,
        share: float,
        tenant: str,
        *,
        result: TenantResult,
        seconds: float,
        wall_s: float,
    ) -> float:
        """Adds one row; returns the goodput."""
        outcomes = result.outcomes
        goodput = outcomes["met"] / seconds
        portions = [
            100 * outcomes[name] / result.offered
            for name in ("met", "late_first_token", "slow_tokens", "refused")
        ]
        times = {
            "first_p50_s": result.percentile("first_token_s", 50),
            "first_p99_s": result.percentile("first_token_s", 99),
            "between_p99_s": result.percentile("between_s", 99),
            "refused_after_p50_s": result.percentile("refused_after_s", 50),
        }
        print(
            f"{mesh} | {setup.num_gateways} | {share:g} | {tenant} | "
            f"{'on' if setup.holds_to_targets else 'off'} | {result.offered / seconds:.1f} | "
            f"{goodput:.1f} | {' | '.join(f'{portion:.1f}' for portion in portions)} | "
            f"{times['first_p50_s']:.2f} | {times['first_p99_s']:.2f} | "
            f"{1e3 * times['between_p99_s']:.1f} ms | {times['refused_after_p50_s']:.2f}",
            flush=True,
        )
        self.rows.append(
            {"part": part, "mesh": mesh, "setup": asdict(setup), "share": share, "tenant": tenant}
            | {"offered": result.offered, "outcomes": dict(outcomes), "goodput_per_s": goodput}
            | times
            | {"wall_s": round(wall_s, 1)}
        )
        return goodput


def main() -> None:
    """Parses arguments, simulates, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals, virtual")
    parser.add_argument("--first-token", type=float, default=1.0, help="target, in seconds")
    parser.add_argument("--between-tokens", type=float, default=0.03, help="target, in seconds")
    parser.add_argument("--ahead", type=float, default=0.25, help="--ahead-s of the gateway")
    parser.add_argument("--weight", type=float, default=4.0, help="of the chats' tenant")
    parser.add_argument("--gateways", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for all figures")
    flags = parser.parse_args()
    targets = Targets(flags.first_token, flags.between_tokens)
    report = Report()
    capacities: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for mesh, base in MESHES.items():
        base = replace(base, ahead_s=flags.ahead)
        capacities[mesh] = capacity(base, targets, flags.seconds, flags.seed)
        report.head(f"{mesh}: overload; the capacity is {capacities[mesh]:.1f} requests/s")
        for gateways in flags.gateways:
            for share in SHARES:
                goodputs = []
                setup = replace(base, num_gateways=gateways)
                for each in (without_targets(setup), setup):
                    offers = chats(flags.seconds, share * capacities[mesh], targets, flags.seed)
                    began = time.perf_counter()
                    result = ServingSimulation(each).run(offers)["chat"]
                    goodputs.append(
                        report.add(
                            "overload",
                            mesh,
                            each,
                            share,
                            "chat",
                            result=result,
                            seconds=flags.seconds,
                            wall_s=time.perf_counter() - began,
                        )
                    )
                ratios[f"{mesh}, {gateways} gateways, {share:g}"] = goodputs[1] / goodputs[0]
        report.head(f"{mesh}: chats at a quarter of the capacity, a flood at twice of it")
        for gateways in flags.gateways:
            equal = replace(base, num_gateways=gateways)
            heavy = replace(equal, weights={"chat": flags.weight})
            for each in (without_targets(equal), equal, heavy):
                offers = merged(
                    chats(flags.seconds, 0.25 * capacities[mesh], targets, flags.seed),
                    flood(flags.seconds, 2 * capacities[mesh], flags.seed + 1),
                )
                began = time.perf_counter()
                for tenant, result in ServingSimulation(each).run(offers).items():
                    report.add(
                        "tenants",
                        mesh,
                        each,
                        2.0,
                        f"{tenant} (weight {each.weights.get(tenant, 1):g})",
                        result=result,
                        seconds=flags.seconds,
                        wall_s=time.perf_counter() - began,
                    )
    print("\ngoodput with the gate / without")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    if flags.json:
        content = {
            "command": " ".join(sys.argv),
            "targets_s": [flags.first_token, flags.between_tokens],
            "capacity_per_s": capacities,
            "goodput_ratios": ratios,
            "rows": report.rows,
        }
        flags.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
