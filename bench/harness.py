"""One harness for all benchmarks: flags, parts, turns, one table, one JSON file.

A script says only what is timed:

    harness = Harness(__file__, __doc__, repeats=9)
    harness.flag("--sizes", type=int, nargs="+", default=[1, 64])

    @harness.part
    def sums(run: Run) -> None:
        for size in run.options.sizes:
            values = list(range(size))
            times = in_turns({"sum": lambda: timed(partial(sum, values))}, run.options.repeats)
            run.row(size=size, us=spread(times["sum"], 1e6))

    if __name__ == "__main__":
        sys.exit(harness.main())

A row is printed as soon as it is known, and the JSON file is written anew with it, so that a run
that is ended loses nothing. A part that fails is reported, and the others go on. With `--baseline
TREE` the same script of another working tree runs in turns with this one, each time in a process of
its own, and the rows are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from machine import ROOT, MachineUse, commit_of, describe_machine, one_line
from rich.console import Console
from rich.table import Table

PACKAGES = (
    *(
        "contract",
        "checkpoint",
        "engine",
        "pages",
        "kernels",
        "services/common",
        "services/gateway",
    ),
    *("services/prefill", "services/decode", "services/kvstore", "cli", "chaos", "protos/gen"),
    *("tests/helpers", "bench"),
)
"""Folders of a working tree from which its processes import."""
PLAIN_WIDTH = 160
"""Columns where the output is no terminal."""
MAX_OTHERS = 0.2
"""Cores that other programs may keep busy."""
MAX_CELL = 60
"""Longer texts are left out of tables."""
HIDDEN = "..."
"""In place of them."""

T = TypeVar("T")


class Spread(NamedTuple):
    """Median of several values, with their 10th and 90th percentile."""

    median: float
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        return f"{cell(self.median)} [{cell(self.low)} to {cell(self.high)}]"


def spread(values: Sequence[float], scale: float = 1.0) -> Spread:
    """The spread of these values, each multiplied by `scale`."""
    low, median, high = np.quantile(np.asarray(values, float) * scale, (0.1, 0.5, 0.9)).tolist()
    return Spread(median, low, high, len(values))


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The spread of the ratios of values that were measured in the same turn."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def percentile(values: Sequence[float], share: float, nothing: float = math.nan) -> float:
    """The value at a share of the sorted values; `nothing` of no values."""
    return float(np.quantile(np.asarray(values, float), share)) if len(values) else nothing


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """p50, p90 and p99; nothing of no values."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {n: scale * percentile(values, share) for n, share in shares.items() if len(values)}


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    began = clock()
    call()
    return clock() - began


def in_turns(
    ways: Mapping[str, Callable[[], T]], repeats: int, warm_up: int = 1
) -> dict[str, list[T]]:
    """What each way returns, turn by turn; every other turn goes through the ways backwards.

    Args:
        ways: By name.
        repeats: Turns that are kept.
        warm_up: Turns before them.
    """
    names = list(ways)
    found: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(-warm_up, repeats):
        for name in names[::-1] if turn % 2 else names:
            result = ways[name]()
            if turn >= 0:
                found[name].append(result)
    return found


def numbers(text: str) -> list[int]:
    """Whole numbers separated by commas, as a flag's type."""
    return [int(part) for part in text.split(",") if part]


class Run:
    """One run of a script: its options, and the rows as they come."""

    def __init__(self, harness: Harness, options: argparse.Namespace) -> None:
        self.options = options
        self.setup = describe_machine(options.commit)
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.stack = ExitStack()
        """Closed when all parts have run."""
        self._more: dict[str, Any] = {}
        self._notes: list[str] = []
        self._name = harness.name
        self._before = MachineUse.now()

    def wants(self, name: str) -> bool:
        """Whether `--only` names this part or row, or nothing."""
        only = getattr(self.options, "only", None)
        return not only or any(word in name for word in only)

    def row(self, row: Any = None, /, table: str = "", **figures: Any) -> None:
        """Adds a row to a table.

        Args:
            row: Its first figures: a mapping, a dataclass or a named tuple.
            table: Title of the table.
            figures: Further figures by name. Lists, mappings and long texts are kept in the JSON
                file only.
        """
        fields = {**_fields(row), **figures}
        # Names first.
        found = dict(sorted(fields.items(), key=lambda field: not isinstance(field[1], str)))
        self.rows.append({"table": table, **found} if table else found)
        shown = (f"{n} {cell(v)}" for n, v in found.items() if _is_shown(v))
        print(f"{table}: " * bool(table) + ", ".join(shown), flush=True)
        self.write()

    def keep(self, **content: Any) -> None:
        """Adds to the JSON file, beside the rows."""
        self._more |= content
        self.write()

    def note(self, text: str) -> None:
        """A line below the tables."""
        self._notes.append(text)
        print(text, flush=True)

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Reports a failure in its block, and lets the run go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{what}: {type(error).__name__}: {str(error)[:300]}")

    def fail(self, what: str) -> None:
        """Notes that something is wrong: the exit status will be 1."""
        self.failures.append(what)
        print(f"FAILED {what}", flush=True)

    def write(self) -> None:
        """Writes the JSON file, if one was named."""
        path = self.options.json
        if path is None:
            return
        hidden = ("json", "commit", "baseline", "pairs")
        options = {n: v for n, v in vars(self.options).items() if n not in hidden}
        content = {
            "command": shlex.join(["python", f"bench/{self._name}.py", *self.options.argv]),
            "setup": self.setup,
            "options": {n: v for n, v in options.items() if n != "argv"},
            **self._more,
            "rows": self.rows,
            "notes": self._notes,
            "failures": self.failures,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(_plain(content), indent=1, default=str) + "\n")
        beside.replace(path)

    def end(self) -> int:
        """Prints the tables; the exit status."""
        others = MachineUse.now().others_since(self._before)
        self.setup["other_cores"] = round(others, 2)
        console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        for table in dict.fromkeys(row.get("table", "") for row in self.rows):
            rows = [row for row in self.rows if row.get("table", "") == table]
            console.print(table_of(rows, table or self._name))
        for line in (
            *self._notes,
            one_line(self.setup),
            f"other programs kept {others:.2f} cores busy"
            + "; that is too much to trust times" * (others > MAX_OTHERS),
            *(f"FAILED {failure}" for failure in self.failures),
        ):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        self.write()
        return int(bool(self.failures))


class Harness:
    """What a script measures, and its flags.

    Args:
        file: The script's `__file__`.
        doc: The script's docstring.
        repeats: Default of `--repeats`; None: the script has no such flag.
    """

    def __init__(self, file: str, doc: str | None, repeats: int | None = None) -> None:
        self.name = Path(file).stem
        self._parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._parts: dict[str, tuple[Callable[[Run], None], bool]] = {}
        self._repeats = repeats
        self._is_complete = False
        self.flag = self._parser.add_argument
        self.one_of = self._parser.add_mutually_exclusive_group
        self.error = self._parser.error
        self._check: Callable[[argparse.Namespace], None] = lambda options: None

    def part(self, measure: Callable[[Run], None]) -> Callable[[Run], None]:
        """A part of the script, which takes the function's name."""
        self._parts[measure.__name__.strip("_").replace("_", "-")] = (measure, True)
        return measure

    def part_if_named(self, measure: Callable[[Run], None]) -> Callable[[Run], None]:
        """A part that only `--only` runs."""
        self._parts[measure.__name__.strip("_").replace("_", "-")] = (measure, False)
        return measure

    def check(self, check: Callable[[argparse.Namespace], None]) -> None:
        """A function that completes the options, or refuses them with `error`."""
        self._check = check

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options."""
        if not self._is_complete:
            self._add_common_flags()
        options = self._parser.parse_args(argv)
        options.argv = list(sys.argv[1:] if argv is None else argv)
        self._check(options)
        return options

    def _add_common_flags(self) -> None:
        self._is_complete, flag = True, self._parser.add_argument
        if len(self._parts) > 1:
            told = (
                f"{name}{'' if is_usual else ' (only if named)'}: {measure.__doc__}"
                for name, (measure, is_usual) in self._parts.items()
            )
            described = "parts with a word in it: " + " ".join(told)
            flag("--only", nargs="+", metavar="WORD", help=described.replace("%", "%%"))
        if self._repeats is not None:
            flag("--repeats", type=int, default=self._repeats, help="turns that count")
        flag("--json", type=Path, metavar="FILE", help="where to keep all figures")
        commit = os.environ.get("WEFT_COMMIT", "")
        flag("--commit", default=commit, help="of the sources, where git cannot tell")
        flag("--baseline", type=Path, metavar="TREE", help="compare with another working tree")
        flag("--pairs", type=int, default=6, help="of runs, with --baseline")

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the parts that are asked for; the exit status."""
        options = self.parse(argv)
        run = Run(self, options)
        if options.baseline is not None:
            compare(run, self.name, options)
            return run.end()
        chosen = {
            name: measure
            for name, (measure, is_usual) in self._parts.items()
            if len(self._parts) == 1 or (run.wants(name) if options.only else is_usual)
        }
        if not chosen:
            self.error(f"--only: none of {', '.join(self._parts)}")
        with run.stack:
            for name, measure in chosen.items():
                if len(chosen) == 1:
                    measure(run)
                    continue
                with run.noted(name):
                    measure(run)
        return run.end()


@dataclass(slots=True)
class PairRow:
    """A figure of both trees over all pairs."""

    what: str
    old: float
    new: float
    ratio: Spread
    """Of new / old."""


def pair_row(what: str, old: Sequence[float], new: Sequence[float]) -> PairRow:
    """Medians, and the ratio of the pairs."""
    return PairRow(what, statistics.median(old), statistics.median(new), ratio_of(new, old))


def compare(run: Run, name: str, options: argparse.Namespace) -> None:
    """Runs a script of two trees in turns, each in a process of its own, and compares its rows."""
    trees = {"old": options.baseline.resolve(), "new": ROOT}
    commits = {f"{which}_commit": commit_of(tree) for which, tree in trees.items()}
    run.keep(**commits)
    argv = without(options.argv, ("--baseline", "--pairs", "--json", "--commit"))
    ways = {which: lambda tree=tree: figures_of(tree, name, argv) for which, tree in trees.items()}
    found = in_turns(ways, options.pairs, warm_up=0)
    for what in found["new"][0]:
        old, new = ([one[what] for one in found[tree] if what in one] for tree in trees)
        # What is the same in every pair is a parameter.
        if len(old) == len(new) == options.pairs and old != new and all(old):
            run.row(pair_row(what, old, new))


def figures_of(tree: Path, name: str, argv: Sequence[str]) -> dict[str, float]:
    """All figures of the rows that a tree's script keeps, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        script = tree / "bench" / f"{name}.py"
        command = [sys.executable, str(script), *argv, "--json", str(path)]
        environment = os.environ | tree_environment(tree)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            raise SystemExit(f"{script}: status {done.returncode}\n{done.stderr[-2000:]}")
        return dict(_figures(json.loads(path.read_text())["rows"]))


def _figures(rows: Any) -> Iterator[tuple[str, float]]:
    """Numbers of rows, named by the texts of their row; rows of the same texts are counted."""
    seen: Counter[str] = Counter()
    for row in rows:
        texts = " ".join(v for v in row.values() if isinstance(v, str) and len(v) <= MAX_CELL)
        seen[texts] += 1
        title = f"{texts} #{seen[texts]}" if seen[texts] > 1 else texts
        for name, value in row.items():
            number = value.get("median") if isinstance(value, dict) else value
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield f"{title}: {name}", float(number)


def tree_environment(tree: Path) -> dict[str, str]:
    """Environment of a process that imports a tree's packages before all others."""
    own = [str(tree / package) for package in PACKAGES]
    kept = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in kept if path and not Path(path).is_relative_to(ROOT)]
    return {"PYTHONPATH": os.pathsep.join([*own, *others])}


def without(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command line without some flags and their values."""
    kept, words = list[str](), iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in flags:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def table_of(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Rows as a table, whose columns are all their figures."""
    table = Table(title=title, title_justify="left")
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if name != "table" and any(cell(row.get(name)) not in ("", HIDDEN) for row in rows)
    ]
    for name in columns:
        is_text = any(isinstance(row.get(name), str) for row in rows)
        table.add_column(name, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(cell(row[name]) if name in row else "" for name in columns))
    return table


def cell(value: Any) -> str:
    """A figure as it is shown."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if value is None:
        return ""
    return str(value) if _is_shown(value) else HIDDEN


def _is_shown(value: Any) -> bool:
    if isinstance(value, Spread):
        return True
    if isinstance(value, str):
        return len(value) <= MAX_CELL and "\n" not in value
    return not isinstance(value, Mapping | Sequence)


def _fields(row: Any) -> dict[str, Any]:
    if row is None:
        return {}
    if is_dataclass(row) and not isinstance(row, type):
        return {name: getattr(row, name) for name in row.__dataclass_fields__}
    return dict(row._asdict() if hasattr(row, "_asdict") else row)


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    return value
