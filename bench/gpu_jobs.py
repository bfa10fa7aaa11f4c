"""Runs lists of jobs on the GPUs of one machine, within a number of seconds.

    python bench/gpu_jobs.py bench/jobs/hosts.txt --seconds 560

A line of a list has a name, cards, the seconds that the job may take, and a command:

    # What the jobs below answer.
    steps    0         120  python bench/gpu_engine.py --only steps --json $OUT/steps.json
    hosts    01        90   NCCL_IB_DISABLE=1 python -m pytest tests/gpu/engine/test_gpu_hosts.py
    moe      0,shared  60   python -m pytest tests/gpu/kernels/test_gpu_moe.py

Cards are digits; `any` is any one card and `-` is none. A job has its cards for itself, apart from
`shared` ones, which share a card and have caches of kernels of their own. Jobs without cards run
one after another. Jobs start in the order of the list as soon as their cards are free. A later job
passes a waiting one only where it does not delay it. A job that cannot end in time is not started.
No shell reads a command: it may begin with settings of its environment, and `$OUT` and other
variables are replaced. What a job leaves running is killed, in other process groups as well.

The folder `--out` gets each job's output as NAME.log. At the end logs and results are packed into
one archive and removed; a table of the jobs stays beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import psutil
from harness import Harness, Run
from machine import ROOT

NO_CARD, ANY_CARD = "-", "any"
MARK = "WEFT_GPU_JOB"
"""Variable in the environment of a job's processes."""
SUMMARY = "jobs.json"
END_S = 4.0
"""Between SIGTERM and SIGKILL, and after it."""
PACKING_S = 12.0
"""What is left of the seconds for ending jobs and packing."""
LOOK_EVERY_S = 0.05
TAIL_LINES = 3

harness = Harness(__file__, __doc__)
harness.flag("lists", type=Path, nargs="+", metavar="LIST", help="files of jobs")
harness.flag("--seconds", type=float, default=560.0, help="until all has ended and is packed")
out = Path(os.environ.get("OUT", "build/gpu-jobs"))
harness.flag(
    "--out",
    type=Path,
    default=out,
    help="a new or empty folder (default: $OUT, else build/gpu-jobs)",
)
harness.flag("--names", nargs="+", metavar="NAME", help="of the jobs that run (default: all)")
harness.flag("--cards", type=int, help="of this machine (default: as nvidia-smi says)")
harness.flag("--beside", type=int, default=6, help="shared jobs of a card")


@dataclass(frozen=True, slots=True)
class Job:
    """A line of a list."""

    name: str
    cards: str
    seconds: float
    command: list[str]
    settings: dict[str, str]
    """Of its environment."""
    is_shared: bool

    def places(self, num_cards: int) -> list[tuple[str, ...]]:
        """The sets of cards that it may have; none on a machine with too few."""
        if self.cards == ANY_CARD:
            return [(str(card),) for card in range(num_cards)]
        known = {NO_CARD, *map(str, range(num_cards))}
        return [tuple(self.cards)] if known.issuperset(self.cards) else []


def parse_job(line: str) -> Job:
    """Reads a line. Raises ValueError, which says what is wrong."""
    columns = line.split(maxsplit=3)
    if len(columns) < 4:
        raise ValueError("a job has a name, cards, seconds and a command")
    name, where, seconds, text = columns
    cards, *marks = where.split(",")
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{name!r} cannot name a file")
    is_set = cards.isdigit() and len({*cards}) == len(cards)
    if not is_set and cards not in (NO_CARD, ANY_CARD):
        raise ValueError(f"cards are digits, {ANY_CARD!r} or {NO_CARD!r}, not {cards!r}")
    if marks not in ([], ["shared"]) or not seconds.isdigit():
        raise ValueError("after the cards, `,shared` or nothing, then whole seconds")
    command, settings = shlex.split(text), dict[str, str]()
    while command and (found := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", command[0])):
        settings[found[1]] = found[2]
        del command[0]
    if not command:
        raise ValueError("no command after the settings of the environment")
    return Job(name, cards, float(seconds), command, settings, is_shared=bool(marks))


@harness.check
def check(options: argparse.Namespace) -> None:
    """Reads the lists into `options.jobs`."""
    jobs: dict[str, Job] = {}
    for path in options.lists:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                job = parse_job(line)
            except ValueError as error:
                harness.error(f"{path}:{number}: {error}")
            if job.name in jobs:
                harness.error(f"{path}:{number}: a second job {job.name}")
            jobs[job.name] = job
    if unknown := set(options.names or ()) - jobs.keys():
        harness.error(f"--names: no job {', '.join(sorted(unknown))}")
    options.jobs = [job for job in jobs.values() if job.name in (options.names or jobs)]
    options.out = options.out.resolve()
    options.json = options.json or options.out / SUMMARY


@dataclass(slots=True)
class Started:
    """A job that runs."""

    job: Job
    cards: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float

    @property
    def limit_s(self) -> float:
        """When it is killed."""
        return self.began_s + self.job.seconds


@dataclass(slots=True)
class Board:
    """Which jobs run on which cards. Times are those of `time.monotonic`."""

    num_cards: int
    max_beside: int
    """Shared jobs of a card."""
    end_s: float
    started: list[Started] = field(default_factory=list)

    def next_job(self, waiting: Sequence[Job], now_s: float) -> tuple[Job, tuple[str, ...]] | None:
        """The first job that may start now, and its cards."""
        kept_until_s: dict[str, float] = {}
        for job in waiting:
            places = job.places(self.num_cards)
            for cards in sorted(places, key=lambda cards: len(self._on(cards))):
                must_end_s = min(self.end_s, *(kept_until_s.get(c, self.end_s) for c in cards))
                if now_s + job.seconds <= must_end_s and self._has_room(job, cards):
                    return job, cards
            if places and now_s + job.seconds <= self.end_s:
                soonest = min(places, key=self._free_s)
                for card in soonest:
                    kept_until_s.setdefault(card, self._free_s(soonest))
        return None

    def _on(self, cards: Sequence[str]) -> list[Started]:
        return [one for one in self.started if not {*cards}.isdisjoint(one.cards)]

    def _has_room(self, job: Job, cards: Sequence[str]) -> bool:
        if not job.is_shared:
            return not self._on(cards)
        is_shared = all(one.job.is_shared for one in self._on(cards))
        return is_shared and all(len(self._on([card])) < self.max_beside for card in cards)

    def _free_s(self, cards: Sequence[str]) -> float:
        """When these cards are free at the latest."""
        return max((one.limit_s for one in self._on(cards)), default=0.0)


def start(job: Job, cards: tuple[str, ...], out: Path, caches: Path) -> Started:
    """Starts a job in a process group of its own.

    Raises:
        KeyError: It names a variable that is not set.
        OSError: Its program cannot be run.
    """
    environment = {
        **os.environ,
        "OUT": str(out),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(card for card in cards if card != NO_CARD),
        MARK: mark_of(job),
    }
    if job.is_shared:
        environment["TRITON_CACHE_DIR"] = str(caches / job.name)
    for name, value in job.settings.items():
        environment[name] = Template(value).substitute(environment)
    command = [Template(word).substitute(environment) for word in job.command]
    if command[0] == "python":
        command[0] = sys.executable
    log = out / f"{job.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(job, cards, process, log, time.monotonic())


def mark_of(job: Job) -> str:
    """Which processes are this job's, in this run."""
    return f"{os.getpid()}/{job.name}"


def end(jobs: Sequence[Started]) -> None:
    """Ends all processes of some jobs, whoever their parents are by now."""
    marks = {mark_of(one.job) for one in jobs}
    for number in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + END_S
        is_sent = False
        while time.monotonic() < end_s:
            for one in jobs:
                one.process.poll()
            left = processes_of(marks)
            if not left:
                return
            for process in () if is_sent else left:
                with suppress(psutil.Error):
                    process.send_signal(number)
            is_sent = True
            time.sleep(LOOK_EVERY_S)


def processes_of(marks: set[str]) -> list[psutil.Process]:
    """Living processes of jobs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) in marks:
                found.append(process)
    return found


def tail(log: Path) -> list[str]:
    """The last lines that say something."""
    lines = (line.strip(" =") for line in log.read_text(errors="replace").splitlines())
    return [line for line in lines if line][-TAIL_LINES:]


class Report:
    """The table of all jobs."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def ended(self, one: Started, state: str) -> None:
        lines = tail(one.log)
        print(*(f"  {line}" for line in lines), sep="\n")
        code, seconds = one.process.returncode, round(time.monotonic() - one.began_s, 1)
        if state or code:
            self.run.fail(f"{one.job.name}: {state or f'status {code}'}")
        state = state or ("failed" if code else "done")
        figures = {"rc": code, "s": seconds, "last": lines[-1][:50] if lines else ""}
        self.run.row(name=one.job.name, cards="".join(one.cards), state=state, **figures)

    def not_run(self, job: Job, why: str, is_wrong: bool = False) -> None:
        if is_wrong:
            self.run.fail(f"{job.name}: {why}")
        self.run.row(name=job.name, cards=job.cards, state=f"not run: {why}")


@harness.part
def all_jobs(run: Run) -> None:
    """The jobs of the lists."""
    options = run.options
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        raise SystemExit(f"--out: {options.out} is not empty")
    num_cards = len(run.setup["cards"]) if options.cards is None else options.cards
    board = Board(num_cards, options.beside, time.monotonic() + options.seconds - PACKING_S)

    def stop(*_: object) -> None:
        board.end_s = 0.0

    signal.signal(signal.SIGTERM, stop)
    caches = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
    try:
        work_off(board, list(options.jobs), Report(run), options.out, caches)
    finally:
        end(board.started)
        pack(options.out, "-".join(path.stem for path in options.lists))


def work_off(board: Board, waiting: list[Job], report: Report, out: Path, caches: Path) -> None:
    """Starts and ends jobs until none is left."""
    while waiting or board.started:
        now_s = time.monotonic()
        over: dict[int, str] = {}
        for one in board.started:
            if one.process.poll() is not None:
                over[one.process.pid] = ""
            elif now_s >= board.end_s:
                over[one.process.pid] = "killed on SIGTERM"
            elif now_s >= one.limit_s:
                over[one.process.pid] = "killed at its limit"
        ended = [one for one in board.started if one.process.pid in over]
        if ended:
            end(ended)
        for one in ended:
            board.started.remove(one)
            report.ended(one, over[one.process.pid])
        for job in list(waiting):
            if not job.places(board.num_cards):
                report.not_run(job, f"the machine has {board.num_cards} cards")
            elif now_s + job.seconds > board.end_s:
                report.not_run(job, "too little time")
            else:
                continue
            waiting.remove(job)
        while chosen := board.next_job(waiting, time.monotonic()):
            waiting.remove(chosen[0])
            try:
                board.started.append(start(*chosen, out, caches))
            except KeyError as error:
                report.not_run(chosen[0], f"${error.args[0]} is not set", is_wrong=True)
            except OSError as error:
                report.not_run(chosen[0], str(error), is_wrong=True)
        time.sleep(LOOK_EVERY_S)


def pack(out: Path, name: str) -> None:
    """Moves all files but the summary into one archive."""
    files = [path for path in out.iterdir() if path.name != SUMMARY]
    with tarfile.open(out / f"{name}.tar.xz", "w:xz") as archive:
        for path in sorted(files):
            archive.add(path, arcname=path.name)
    for path in files:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


if __name__ == "__main__":
    sys.exit(harness.main())
