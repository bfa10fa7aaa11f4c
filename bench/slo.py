"""Latency targets under overload: goodput with the gateway's admission and without it.

    python bench/slo.py [--seconds 40]

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

import sys
from collections.abc import Iterator
from dataclasses import replace
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
from harness import Harness, Run
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


harness = Harness(__file__, __doc__)
harness.flag("--seconds", type=float, default=40.0, help="of arrivals, virtual")
harness.flag("--first-token", type=float, default=1.0, help="target, in seconds")
harness.flag("--between-tokens", type=float, default=0.03, help="target, in seconds")
harness.flag("--ahead", type=float, default=0.25, help="--ahead-s of the gateway")
harness.flag("--weight", type=float, default=4.0, help="of the chats' tenant")
harness.flag("--gateways", type=int, nargs="*", default=[1, 4])
harness.flag("--seed", type=int, default=1)


def add(
    run: Run, table: str, setup: ServingSetup, share: float, tenant: str, result: TenantResult
) -> float:
    """Adds one row; returns the goodput."""
    outcomes, goodput = result.outcomes, result.outcomes["met"] / run.options.seconds
    names = ("met", "late_first_token", "slow_tokens", "refused")
    run.row(
        {"gateways": setup.num_gateways, "share": share, "tenant": tenant}
        | {"gate": setup.holds_to_targets, "goodput_per_s": goodput}
        | {f"{name}_share": outcomes[name] / result.offered for name in names},
        table=table,
        offered=result.offered,
        first_p50_s=result.percentile("first_token_s", 50),
        first_p99_s=result.percentile("first_token_s", 99),
        between_p99_s=result.percentile("between_s", 99),
        refused_after_p50_s=result.percentile("refused_after_s", 50),
    )
    return goodput


@harness.part
def overload(run: Run) -> None:
    """One tenant at shares of the capacity."""
    flags = run.options
    targets = Targets(flags.first_token, flags.between_tokens)
    for mesh, base in MESHES.items():
        base = replace(base, ahead_s=flags.ahead)
        rate = capacity(base, targets, flags.seconds, flags.seed)
        title = f"{mesh}: overload; the capacity is {rate:.1f} requests/s"
        for gateways in flags.gateways:
            for share in SHARES:
                goodputs = []
                setup = replace(base, num_gateways=gateways)
                for each in (without_targets(setup), setup):
                    offers = chats(flags.seconds, share * rate, targets, flags.seed)
                    result = ServingSimulation(each).run(offers)["chat"]
                    goodputs.append(add(run, title, each, share, "chat", result))
                ratio = goodputs[1] / goodputs[0]
                what = f"{mesh}, {gateways} gateways, {share:g}"
                run.note(f"{what}: goodput with the gate / without: {ratio:.2f}")


@harness.part
def tenants(run: Run) -> None:
    """Chats with targets beside another tenant's flood."""
    flags = run.options
    targets = Targets(flags.first_token, flags.between_tokens)
    for mesh, base in MESHES.items():
        base = replace(base, ahead_s=flags.ahead)
        rate = capacity(base, targets, flags.seconds, flags.seed)
        title = f"{mesh}: chats at a quarter of the capacity, a flood at twice of it"
        for gateways in flags.gateways:
            equal = replace(base, num_gateways=gateways)
            heavy = replace(equal, weights={"chat": flags.weight})
            for each in (without_targets(equal), equal, heavy):
                offers = merged(
                    chats(flags.seconds, 0.25 * rate, targets, flags.seed),
                    flood(flags.seconds, 2 * rate, flags.seed + 1),
                )
                for tenant, result in ServingSimulation(each).run(offers).items():
                    name = f"{tenant} (weight {each.weights.get(tenant, 1):g})"
                    add(run, title, each, 2.0, name, result)


if __name__ == "__main__":
    sys.exit(harness.main())
