"""Latency targets of a real mesh under overload, with the gateway's admission and without it.

    python bench/overload.py [--seconds 40]

One mesh on this machine; single requests that share system prompts. The capacity is what it serves
a second when all requests are there at once. Goodput is requests within both targets, a second of
arrivals, by this client's clock. Without the gate the gateway knows no target (its tenants file is
empty); with it the file has them. `bench/slo.py` is the same for simulated meshes.

| part | requests |
| --- | --- |
| `overload` | one tenant at shares of the capacity |
| `tenants` | that tenant at a quarter of it, beside another one's flood at twice of it |
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from chats.client import Asking, ChatClient, Turn
from chats.mesh import MODEL, SHAPE, VOCAB, chat_mesh, make_model
from chats.workload import Chat, make_chats
from harness import Harness, Run, percentile
from weft.gateway.admission.keys import new_key, write_keys
from weft.gateway.admission.slo import Targets
from weft.testing.meshes.local_mesh import LocalMesh

TENANTS = ("chat", "flood")
REFUSED = "TARGET_UNATTAINABLE"
REREAD_S = 2.5
"""A gateway looks at its tenants file every second."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tenant in one run."""

    part: str
    share: float
    """Share of the capacity that this tenant requests."""
    tenant: str
    has_gate: bool
    num_offered: int
    num_met: int
    num_late: int
    """First tokens after the target."""
    num_slow: int
    """First tokens in time, the next ones not."""
    num_refused: int
    num_failed: int
    """Failures other than missed targets."""
    goodput_per_s: float
    first_p50_s: float
    first_p99_s: float
    between_p99_s: float
    refused_after_p50_s: float


def row_of(
    part: str,
    share: float,
    tenant: str,
    turns: list[Turn],
    *,
    has_gate: bool,
    targets: Targets,
    seconds: float,
) -> Row:
    """Counts what became of a tenant's requests."""
    refused = [turn for turn in turns if turn.reason == REFUSED]
    answered = [turn for turn in turns if not turn.error]
    outcomes = [targets.outcome(turn.first_s, turn.between_s) for turn in answered]
    between = [turn.between_s for turn in answered if turn.between_s is not None]
    return Row(
        part=part,
        share=share,
        tenant=tenant,
        has_gate=has_gate,
        num_offered=len(turns),
        num_met=outcomes.count("met"),
        num_late=outcomes.count("late_first_token"),
        num_slow=outcomes.count("slow_tokens"),
        num_refused=len(refused),
        num_failed=len(turns) - len(answered) - len(refused),
        goodput_per_s=outcomes.count("met") / seconds,
        first_p50_s=percentile([turn.first_s for turn in answered], 0.5, 0.0),
        first_p99_s=percentile([turn.first_s for turn in answered], 0.99, 0.0),
        between_p99_s=percentile(between, 0.99, 0.0),
        refused_after_p50_s=percentile([turn.end_s for turn in refused], 0.5, 0.0),
    )


class Bench:
    """A mesh with two tenants, whose targets come and go.

    Args:
        folder: For keys and the tenants file.
        run: Is told the rows.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self._run, self._flags = run, run.options
        flags = run.options
        self.targets = Targets(flags.first_token, flags.between_tokens)
        self._tenants = folder / "tenants.toml"
        self._tenants.write_text("")
        pairs = {tenant: new_key(tenant) for tenant in TENANTS}
        self._keys = {tenant: key for tenant, (key, _) in pairs.items()}
        self.keys_file = folder / "keys.json"
        write_keys(self.keys_file, [entry for _, entry in pairs.values()])
        self.gateway_flags = f"--tenants-file {self._tenants}"
        self._seed = flags.seed
        self.rows: list[Row] = []

    async def capacity(self, client: ChatClient, count: int) -> float:
        """Requests served a second when all come at once."""
        turns = await client.run(self._requests(count, 1e6), self._asking("chat"))
        if failed := [turn.error for turn in turns if turn.error]:
            raise RuntimeError(failed[0])
        return count / max(turn.sent_s + turn.end_s for turn in turns)

    def set_gate(self, *, is_on: bool) -> None:
        """Gives the chats' tenant its targets, or takes them away."""
        lines = ["[tenants.chat]", f"weight = {self._flags.weight}"]
        if is_on:
            lines.append(f"ttft_target_ms = {1e3 * self._flags.first_token}")
            lines.append(f"itl_target_ms = {1e3 * self._flags.between_tokens}")
        self._tenants.write_text("\n".join(lines) + "\n")
        time.sleep(REREAD_S)

    async def run(
        self, client: ChatClient, part: str, capacity: float, *, has_gate: bool, **shares: float
    ) -> None:
        """Offers load, and adds a row for each tenant.

        Args:
            client: Of the mesh.
            part: Of the table.
            capacity: Requests a second.
            has_gate: Targets are set.
            **shares: Of the capacity, by tenant.
        """
        seconds = self._flags.seconds
        offers = {
            tenant: self._requests(int(seconds * share * capacity), share * capacity)
            for tenant, share in shares.items()
        }
        runs = (client.run(chats, self._asking(tenant)) for tenant, chats in offers.items())
        for tenant, turns in zip(offers, await asyncio.gather(*runs), strict=True):
            row = row_of(
                *(part, shares[tenant], tenant, turns),
                has_gate=has_gate,
                targets=self.targets,
                seconds=seconds,
            )
            self.rows.append(row)
            self._run.row(row)
            for error in {turn.error for turn in turns if turn.error and turn.reason != REFUSED}:
                sys.stderr.write(f"{error}\n")

    def _requests(self, count: int, rate: float) -> list[Chat]:
        self._seed += 1
        return make_chats(count, rate, VOCAB, self._seed, turns=(1, 1))

    def _asking(self, tenant: str) -> Asking:
        return Asking(max_tokens=self._flags.answer, api_key=self._keys[tenant])


async def measure(bench: Bench, mesh: LocalMesh, flags: argparse.Namespace) -> float:
    """Runs everything; returns also the capacity in requests per second."""
    async with ChatClient(mesh.grpc_address, MODEL) as client:
        await bench.capacity(client, flags.burst // 4)  # warms up
        capacity = await bench.capacity(client, flags.burst)
        print(f"capacity: {capacity:.1f} requests/s")
        for has_gate in (False, True):
            bench.set_gate(is_on=has_gate)
            for share in flags.shares:
                await bench.run(client, "overload", capacity, has_gate=has_gate, chat=share)
                mesh.wait_idle()
            await bench.run(client, "tenants", capacity, has_gate=has_gate, chat=0.25, flood=2.0)
            mesh.wait_idle()
    return capacity


harness = Harness(__file__, __doc__)
harness.flag("--seconds", type=float, default=40.0, help="of arrivals in each run")
harness.flag("--shares", type=float, nargs="*", default=[0.5, 2.0], help="of capacity")
harness.flag("--burst", type=int, default=200, help="requests that tell the capacity")
harness.flag("--first-token", type=float, default=1.5, help="target, in seconds")
harness.flag("--between-tokens", type=float, default=0.2, help="target, in seconds")
harness.flag("--answer", type=int, default=16, help="tokens of each answer")
harness.flag("--weight", type=float, default=1.0, help="of the chats' tenant")
harness.flag("--prefill", type=int, default=1, help="workers")
harness.flag("--decode", type=int, default=1, help="workers")
harness.flag("--transport", default="auto", help="of weft up")
harness.flag("--seed", type=int, default=1)


@harness.part
def overload(run: Run) -> None:
    """A mesh with the gate and without."""
    flags = run.options
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-overload-")))
    bench = Bench(folder, run)
    workers = ["--prefill", str(flags.prefill), "--decode", str(flags.decode)]
    workers += ["--transport", flags.transport, "--api-keys-file", str(bench.keys_file)]
    gateway = ["--gateway-args", bench.gateway_flags]
    with chat_mesh(folder / "mesh", make_model(folder), *workers, *gateway) as mesh:
        capacity = asyncio.run(measure(bench, mesh, flags))
    by_gate = {
        row.has_gate: row.goodput_per_s
        for row in bench.rows
        if row.part == "overload" and row.share == max(flags.shares)
    }
    ratio = by_gate[True] / by_gate[False] if by_gate[False] else float("inf")
    run.note(f"goodput at {max(flags.shares):g} times the capacity: {ratio:.2f} times as much")
    run.keep(model=SHAPE, capacity_per_s=capacity, goodput_ratio=ratio)


if __name__ == "__main__":
    sys.exit(harness.main())
