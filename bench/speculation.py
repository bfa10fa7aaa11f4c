"""The gain of drafts: the engine with and without them, by kind of text and number of streams.

Engines without drafts, with n-gram drafts and with an EAGLE-3 head run the same held-out prompts in
turn, greedily. Each row, a kind of text and a number of streams, is printed and kept as it is done.
A stream begins its next prompt as soon as one has ended. `mixed` is text of all kinds in turn. A
row's first turn, in which an engine's gate adapts to the new text, is reported apart from the
others. Tokens are checked afterwards against a float32 run of transformers, which shows the largest
distance from its own choice.

    python bench/speculation.py                                    the demo model and its head
    python bench/speculation.py --model DIR --draft DIR --device cuda --streams 1,8,64
    python bench/speculation.py --drafters none,ngram
    python bench/speculation.py --drafters none,eagle3 --draft-width 1,4     chains beside trees
    python bench/speculation.py --drafters none,eagle3 --adapter adapters/pirate
    python bench/speculation.py --drafters none,eagle3 --json-answers --lasting

With --json-answers each answer is constrained to a JSON object with one text, and checked to be (or
begin) one; float32 chooses without a constraint, so that it says nothing of these tokens. With
--lasting only prompts are used whose answers last, and are cut at lengths between half of --tokens
and all: engines which choose differently between two nearly equal tokens nevertheless answer at the
same lengths, and these differ, as in service, so that prompts do not begin and end together. With
--steps the time of the timed turns is told by kind of step, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain, cycle, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serving.answers import Answer
from serving.checking import Checker, Verdict
from serving.setup import ROOT, MachineUse, describe_lines, describe_setup
from step_kinds import StepCounts, StepKinds, described_steps, table_of_steps
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from weft.checkpoint.adapters.files import DRAFT_FOLDER
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.masks import ConstraintState
from weft.engine.features.constraints.vocabulary import load_vocabulary
from weft.engine.loop.llm import LLM, GeneratedSample

DRAFT = ROOT / "drafts" / "smollm2-135m-eagle3"
PROMPTS = ROOT / "scripts" / "draft_training" / "held_out.json"
"""Prompts that the head was not trained on."""
DRAFTERS = ("none", "ngram", "eagle3")
CHAINS = "eagle3"
ADAPTED = "draft adapter"
"""In the names of engines that draft with the adapter's own."""
MIXED = "mixed"
COLUMNS = (
    *("drafter", "tokens/s", "of none", "of chains", "at first", "a step", "drafts right", "trees"),
)
POOL_BYTES = 512 << 20
ANSWER = Constraint(
    kind="json_schema",
    text=json.dumps(
        {
            "type": "object",
            "properties": {"answer": {"type": "string"}},
            "required": ["answer"],
            "additionalProperties": False,
        }
    ),
)
"""Of each answer with --json-answers."""


class ServedModel(NamedTuple):
    """An engine, and what its requests have."""

    llm: LLM
    adapter: bytes
    """Adapter digest; empty: none."""
    params: SamplingParams


Row = tuple[str, int]
"""Kind of text, and number of streams."""
Answers = dict[tuple[int, ...], dict[tuple[int, ...], set[str]]]
"""By prompt: its answers, and the engines that gave each."""


@dataclass
class Cell:
    """Results of one engine, kind of text and number of streams."""

    rates: list[float] = field(default_factory=list)
    """Tokens a second, by turn."""
    first_rates: list[float] = field(default_factory=list)
    """The same of the turns before those that are timed, the first of this text."""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verifies: int = 0
    """Steps of requests in which drafts were verified."""
    trees: int = 0
    """Part of these with trees."""

    @property
    def accepted_length(self) -> float:
        """Mean number of tokens of a request in a step with drafts."""
        return 1 + self.accepted / self.verifies if self.verifies else 1.0

    def shares_of(self, base: Cell) -> list[float]:
        """Ratios to another engine's tokens per second, by turn."""
        return [rate / other for rate, other in zip(self.rates, base.rates, strict=True)]

    def first_share_of(self, base: Cell) -> float:
        """In the first turn of this text; NaN if all are timed."""
        if not self.first_rates:
            return float("nan")
        return self.first_rates[0] / base.first_rates[0]


def main() -> int:
    """Runs the benchmark; 1 if a timed token is wrong."""
    arguments = parse()
    model_dir, dtype = resolve_model(arguments.model), resolve_dtype(arguments.dtype)
    prompts = read_prompts(arguments.prompts, model_dir, arguments.number)
    setup = describe_setup(dtype, torch.get_num_threads())
    if arguments.device != "cpu":
        setup["gpu"] = torch.cuda.get_device_name()
    report = Report(arguments, setup)
    answers: Answers = {}
    kinds = [kind for kind in arguments.kinds.split(",") if kind] or list(prompts)
    if unknown := set(kinds) - set(prompts):
        raise SystemExit(f"--kinds: {', '.join(sorted(unknown))}: none of {', '.join(prompts)}")
    rows = list(product(arguments.streams, kinds))
    with ExitStack() as stack, Progress(transient=True) as progress:
        loading = progress.add_task("loading", total=len(arguments.engines))
        engines = {}
        for name, settings in arguments.engines.items():
            folder = Path(stack.enter_context(TemporaryDirectory()))
            llm = stack.enter_context(LLM(model_dir, **settings, dtype=dtype))
            adapter = load_adapter(llm, name, arguments.adapter, folder)
            engines[name] = ServedModel(llm, adapter, arguments.params)
            progress.advance(loading)
        if arguments.lasting:
            tokens, all_of = arguments.tokens, list(engines.values())
            prompts = {kind: lasting(all_of, texts, tokens) for kind, texts in prompts.items()}
        watched = {n: StepKinds(one.llm.engine) for n, one in engines.items() if arguments.steps}
        # As in a worker, the collector does not visit long-lived objects while steps run.
        gc.collect()
        gc.freeze()
        num_turns = arguments.warm_turns + arguments.turns
        total = len(engines) * len(rows) * num_turns
        timing = progress.add_task("timing", total=total)
        before = MachineUse.now()
        for streams, kind in rows:
            cells = {name: Cell() for name in engines}
            number = arguments.rounds * max(streams, len(prompts[kind]))
            chosen = list(islice(cycle(prompts[kind]), number))
            least = arguments.tokens // 2 if arguments.lasting else arguments.tokens
            lengths = random.Random(number).choices(range(least, arguments.tokens + 1), k=number)
            for turn in range(num_turns):
                is_warm = turn >= arguments.warm_turns
                if turn == arguments.warm_turns:
                    for kinds_of_steps in watched.values():
                        kinds_of_steps.take()
                for name, served in engines.items():
                    cell = cells[name]
                    samples = run(served, chosen, streams, lengths, cell, is_warm=is_warm)
                    for prompt, sample in zip(chosen, samples, strict=True):
                        texts = answers.setdefault(tuple(prompt), {})
                        texts.setdefault(tuple(sample.token_ids), set()).add(name)
                    progress.advance(timing)
            gates = {n: one.llm.engine.scheduler.running_plans.gate for n, one in engines.items()}
            report.depths = {n: {} if gate is None else gate.depths() for n, gate in gates.items()}
            setup["other_cores"] = MachineUse.now().others_since(before)
            report.add((kind, streams), cells, {n: one.take() for n, one in watched.items()})
    if arguments.json_answers:
        check_json(model_dir, answers)
        return report.end({})
    return report.end(judge(model_dir, dtype, answers, arguments.adapter))


def load_adapter(llm: LLM, name: str, adapter: Path | None, folder: Path) -> bytes:
    """Loads the adapter of all requests, if there is one, and with it what it brings for drafts, if
    that is what the engine is for.

    Args:
        llm: Engine.
        name: Of the engine.
        adapter: To load.
        folder: Empty, for a copy without a draft adapter.

    Returns:
        Its digest; empty: none.
    """
    if adapter is None:
        return b""
    if ADAPTED not in name:
        left_out = shutil.ignore_patterns(DRAFT_FOLDER)
        adapter = shutil.copytree(adapter, folder / adapter.name, ignore=left_out)
    return llm.load_adapter(adapter)


def read_prompts(path: Path, model_dir: Path, number: int) -> dict[str, list[list[int]]]:
    """Token ids of so many prompts of each kind."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    kinds: dict[str, list[list[int]]] = {}
    for entry in json.loads(path.read_text()):
        ids = tokenizer.apply_chat_template(
            entry["messages"], add_generation_prompt=True, return_dict=False
        )
        kinds.setdefault(entry["kind"], []).append(list(ids))
    chosen = {kind: texts[:number] for kind, texts in kinds.items()}
    return chosen | {MIXED: list(chain.from_iterable(zip(*chosen.values(), strict=True)))}


def lasting(
    engines: Sequence[ServedModel], texts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """The prompts whose answers by no engine end before so many tokens.

    Raises:
        SystemExit: There is none.
    """
    stop, found = StopCriteria(max_tokens=num_tokens), list(texts)
    for llm, adapter, params in engines:
        samples = llm.generate(found, params, stop, adapters=[adapter] * len(found))
        answered = zip(found, samples, strict=True)
        found = [prompt for prompt, sample in answered if len(sample.token_ids) == num_tokens]
        if not found:
            raise SystemExit(f"--lasting: all answers end before {num_tokens} tokens")
    return found


def run(
    served: ServedModel,
    chosen: Sequence[list[int]],
    streams: int,
    lengths: Sequence[int],
    cell: Cell,
    *,
    is_warm: bool,
) -> Sequence[GeneratedSample]:
    """These prompts, `streams` of them at a time; returns the answers, of these lengths at most."""
    stop, llm = [StopCriteria(max_tokens=length) for length in lengths], served.llm
    counters = llm.engine.counters()
    adapters = [served.adapter] * len(chosen)
    began = time.perf_counter()
    samples = llm.generate(chosen, served.params, stop, adapters=adapters, max_at_once=streams)
    seconds = time.perf_counter() - began
    num_made = sum(len(sample.token_ids) for sample in samples)
    if not is_warm:
        cell.first_rates.append(num_made / seconds)
        return samples
    cell.rates.append(num_made / seconds)
    cell.tokens += num_made
    after = llm.engine.counters()
    cell.drafted += after["drafted_tokens"] - counters["drafted_tokens"]
    cell.accepted += after["accepted_tokens"] - counters["accepted_tokens"]
    cell.verifies += after["verified_runs"] - counters["verified_runs"]
    cell.trees += after["tree_runs"] - counters["tree_runs"]
    return samples


def judge(
    model_dir: Path, dtype: str, answers: Answers, adapter: Path | None
) -> dict[str, Verdict]:
    """Checks every token against a float32 run of transformers, by engine."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    checker = Checker(model_dir, dtype, tokenizer, adapter)
    verdicts: dict[str, Verdict] = defaultdict(Verdict)
    for prompt, texts in answers.items():
        for text, names in texts.items():
            found = checker.check(list(prompt), Answer(list(text)), len(text), ())
            for name in names:
                verdicts[name].add(found)
    return verdicts


def check_json(model_dir: Path, answers: Answers) -> None:
    """Checks that all answers are of the constraint, or the beginnings of such.

    Raises:
        WeftError: A token is not of the grammar.
        ValueError: An answer that has ended is not JSON.
    """
    config = ModelConfig.load(model_dir)
    vocabulary = load_vocabulary(model_dir, config.vocab_size, config.eos_token_ids)
    grammar, ends = GrammarSource(vocabulary).compile(ANSWER), frozenset(config.eos_token_ids)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for text in chain.from_iterable(answers.values()):
        has_ended = text[-1] in config.eos_token_ids
        state = ConstraintState(grammar, config.vocab_size, ends)
        state.next_masks(text[:-1] if has_ended else text)
        if has_ended:
            json.loads(tokenizer.decode(text[:-1]))["answer"]


class Report:
    """The table and the JSON, which are told as they come: a run that is ended loses nothing."""

    def __init__(self, arguments: argparse.Namespace, setup: dict[str, Any]) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self._path = arguments.json or ROOT / "bench" / "results" / f"speculation-{stamp}.json"
        self._setup = setup
        self._console = Console(width=110)
        self._rows: list[dict[str, Any]] = []
        self._checked: dict[str, dict[str, float]] | None = None
        self.depths: dict[str, dict[int, int]] = {}
        """Drafts that each gate has settled on, by number of requests."""
        self._console.print(f"Drafts, greedy answers of at most {arguments.tokens} tokens")
        for line in describe_lines(setup):
            self._console.print(line, soft_wrap=True, highlight=False)

    def add(self, row: Row, cells: dict[str, Cell], steps: dict[str, StepCounts]) -> None:
        """Prints and keeps a row of all engines; `steps`: times by kind of step, if asked for."""
        kind, streams = row
        table = Table(title=f"{kind}, {streams} at once")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "drafter" else "right")
        for name, cell in cells.items():
            right = f"{cell.accepted / cell.drafted:.0%}" if cell.drafted else "-"
            bases = [base for base in ("none", CHAINS) if base in cells]
            shares = {base: cell.shares_of(cells[base]) for base in bases}
            table.add_row(
                *(name, f"{statistics.median(cell.rates):.1f}"),
                *(_spread(shares.get("none")), _spread(shares.get(CHAINS))),
                f"{cell.first_share_of(cells['none']):.2f}" if "none" in cells else "-",
                *(f"{cell.accepted_length:.2f}", right),
                f"{cell.trees / cell.verifies:.0%}" if cell.verifies else "-",
            )
            described = _described(name, row, cell, shares)
            if name in steps:
                described["steps"] = described_steps(steps[name])
            self._rows.append(described)
        self._console.print(table)
        for name, counts in steps.items():
            self._console.print(table_of_steps(f"steps of {name}", counts))
        self._write()

    def end(self, verdicts: dict[str, Verdict]) -> int:
        """Prints what is to be known of all rows; 1 if a token is wrong."""
        self._checked = {name: asdict(verdict) for name, verdict in verdicts.items()}
        self._write()
        for line in [
            "of none, of chains: medians over turns, and spread; at first: of none, the first turn",
            "a step: tokens of a request in a step that had drafts; trees: of such steps",
            f"drafts that the gate settled on, by number of requests: {self.depths}",
            *(f"{name}: {_described_verdict(found)}" for name, found in verdicts.items()),
            f"other programs kept {self._setup['other_cores']:.2f} cores busy",
            f"written to {self._path}",
        ]:
            self._console.print(line, soft_wrap=True, highlight=False)
        return 0 if all(found.is_right for found in verdicts.values()) else 1

    def _write(self) -> None:
        content = {
            "command": " ".join(sys.argv),
            "setup": self._setup,
            "rows": self._rows,
            "depths": self.depths,
            "checked": self._checked,
        }
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(content, indent=1) + "\n")
        beside.replace(self._path)


def _described_verdict(found: Verdict) -> str:
    return (
        f"of its different answers {found.exact} tokens are exact, {found.near_ties} near ties, "
        f"{found.wrong} wrong; the furthest is at {found.furthest:.2f} of a near tie"
    )


def _described(name: str, row: Row, cell: Cell, shares: dict[str, list[float]]) -> dict[str, Any]:
    kind, streams = row
    found: dict[str, Any] = {"drafter": name, "text": kind, "streams": streams}
    found |= {"first_rates": cell.first_rates}
    found |= {"rates": cell.rates, "accepted_length": cell.accepted_length}
    for base, values in shares.items():
        found[f"shares_of_{base}"] = values
        found[f"share_of_{base}"] = statistics.median(values)
    counts = {"drafted": cell.drafted, "accepted": cell.accepted, "tokens": cell.tokens}
    return found | counts | {"verifies": cell.verifies, "trees": cell.trees}


def _spread(shares: Sequence[float] | None) -> str:
    if shares is None:
        return "-"
    return f"{statistics.median(shares):.2f} [{min(shares):.2f}-{max(shares):.2f}]"


def parse() -> argparse.Namespace:
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="demo or a Hugging Face directory")
    parser.add_argument("--draft", type=Path, default=DRAFT, help="folder of the EAGLE-3 head")
    parser.add_argument("--draft-model", type=Path, help="folder of a model that drafts: `model`")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="which, by commas")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="kind and messages of each")
    parser.add_argument("--number", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--streams", default="1,4,16", help="requests at once, by commas")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--rounds", type=int, default=1, help="prompts of a stream in a turn")
    parser.add_argument("--turns", type=int, default=5, help="timed turns")
    parser.add_argument("--warm-turns", type=int, default=1, help="turns of each row before them")
    parser.add_argument("--kinds", default="", help="of text, by commas; `mixed`: all in turn")
    parser.add_argument("--max-draft-tokens", type=int, default=5)
    parser.add_argument(
        "--draft-width", default="1", help="of eagle3, by commas, an engine each; 1: chains alone"
    )
    parser.add_argument("--adapter", type=Path, help="PEFT folder, of all requests")
    parser.add_argument("--json-answers", action="store_true", help="constrain all answers")
    parser.add_argument(
        "--lasting", action="store_true", help="only prompts with answers of --tokens, cut anew"
    )
    parser.add_argument("--steps", action="store_true", help="tell the time by kind of step")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pool-bytes", type=int, default=POOL_BYTES, help="KV of each engine")
    parser.add_argument("--json", type=Path, help="where to write; default: bench/results")
    arguments = parser.parse_args()
    arguments.drafters = [name for name in arguments.drafters.split(",") if name]
    known = (*DRAFTERS, "model") if arguments.draft_model else DRAFTERS
    if unknown := set(arguments.drafters) - set(known):
        parser.error(f"--drafters: {', '.join(sorted(unknown))}: none of {', '.join(known)}")
    constraint = ANSWER if arguments.json_answers else None
    arguments.params = SamplingParams(temperature=0.0, constraint=constraint)
    arguments.streams = [int(number) for number in arguments.streams.split(",")]
    arguments.engines = engines_of(arguments)
    return arguments


def engines_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings of each engine, by its name in the table."""
    common: dict[str, Any] = {"device": arguments.device, "kv_memory_bytes": arguments.pool_bytes}
    common["max_draft_tokens"] = arguments.max_draft_tokens
    common |= {"enable_lora": arguments.adapter is not None, "max_loras": 2}
    engines: dict[str, dict[str, Any]] = {}
    for drafter in arguments.drafters:
        settings = common | {"drafter": drafter}
        if drafter == "model":
            settings["draft_dir"] = arguments.draft_model
        if drafter != "eagle3":
            engines[drafter] = settings
            continue
        for width in map(int, arguments.draft_width.split(",")):
            name = CHAINS if width == 1 else f"trees of width {width}"
            engines[name] = settings | {"draft_dir": arguments.draft, "draft_width": width}
            if arguments.adapter and (arguments.adapter / DRAFT_FOLDER).is_dir():
                engines[f"{name}, {ADAPTED}"] = engines[name]
    return engines


if __name__ == "__main__":
    raise SystemExit(main())
