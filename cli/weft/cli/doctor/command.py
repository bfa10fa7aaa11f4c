"""`weft doctor`: what of this host Weft uses, what holds it back, and what to do."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from weft.cli.doctor.facts import gather
from weft.cli.doctor.findings import Finding, findings


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="weft doctor",
        description=__doc__,
        epilog="Exits with 1 if something would stop a mesh. The first run compiles code.",
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    arguments = parser.parse_args(argv)
    found = findings(gather())
    text = as_json(found) if arguments.json else as_page(found)
    sys.stdout.write(text)
    return 1 if any(one.stops for one in found) else 0


def as_json(found: Sequence[Finding]) -> str:
    return json.dumps({"findings": [asdict(one) for one in found]}, indent=2) + "\n"


def as_page(found: Sequence[Finding]) -> str:
    """A line for each finding, and one for all."""
    width = max(len(one.what) for one in found)
    lines = []
    for one in found:
        line = f"{one.state:<10}  {one.what:<{width}}  {one.found}"
        lines.append(f"{line} -> {one.advice}" if one.advice else line)
    counts = Counter(one.state for one in found)
    told = [f"{counts[state]} {state}" for state in ("ok", "holds back", "missing")]
    stopping = [one.what for one in found if one.stops]
    end = f"a mesh cannot run: {', '.join(stopping)}" if stopping else "a mesh can run"
    return "\n".join([*lines, f"{', '.join(told)}: {end}", ""])
