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
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from harness import Harness, Run, numbers, ratio_of, spread
from machine import ROOT
from serving.answers import Answer
from serving.checking import Checker, Verdict
from step_kinds import StepKinds
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from weft.checkpoint.adapters.files import DRAFT_FOLDER
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.dtypes import resolve_dtype
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.grammar_state import ConstraintState
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

    def first_share_of(self, base: Cell) -> float:
        """In the first turn of this text; NaN if all are timed."""
        if not self.first_rates:
            return float("nan")
        return self.first_rates[0] / base.first_rates[0]


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


harness = Harness(__file__, __doc__, repeats=5)
harness.flag("--model", default="demo", help="demo or a Hugging Face directory")
harness.flag("--draft", type=Path, default=DRAFT, help="folder of the EAGLE-3 head")
harness.flag("--draft-model", type=Path, help="folder of a model that drafts: `model`")
harness.flag("--drafters", default=",".join(DRAFTERS), help="which, by commas")
harness.flag("--prompts", type=Path, default=PROMPTS, help="kind and messages of each")
harness.flag("--number", type=int, default=8, help="prompts of each kind")
harness.flag("--streams", type=numbers, default=[1, 4, 16], help="requests at once, by commas")
harness.flag("--tokens", type=int, default=128, help="of an answer at most")
harness.flag("--rounds", type=int, default=1, help="prompts of a stream in a turn")
harness.flag("--warm-turns", type=int, default=1, help="turns of each row before them")
harness.flag("--kinds", default="", help="of text, by commas; `mixed`: all in turn")
harness.flag("--max-draft-tokens", type=int, default=5)
harness.flag(
    "--draft-width", default="1", help="of eagle3, by commas, an engine each; 1: chains alone"
)
harness.flag("--adapter", type=Path, help="PEFT folder, of all requests")
harness.flag("--json-answers", action="store_true", help="constrain all answers")
harness.flag(
    "--lasting", action="store_true", help="only prompts with answers of --tokens, cut anew"
)
harness.flag("--steps", action="store_true", help="tell the time by kind of step")
harness.flag("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
harness.flag("--device", default="cpu")
harness.flag("--pool-bytes", type=int, default=POOL_BYTES, help="KV of each engine")


@harness.check
def complete(options: argparse.Namespace) -> None:
    """The engines, and how their requests draw."""
    options.drafters = [name for name in options.drafters.split(",") if name]
    known = (*DRAFTERS, "model") if options.draft_model else DRAFTERS
    if unknown := set(options.drafters) - set(known):
        harness.error(f"--drafters: {', '.join(sorted(unknown))}: none of {', '.join(known)}")
    constraint = ANSWER if options.json_answers else None
    options.params = SamplingParams(temperature=0.0, constraint=constraint)
    options.engines = engines_of(options)


def open_engines(run: Run, model_dir: Path, dtype: str) -> dict[str, ServedModel]:
    """The engines by name, with the adapter of their requests."""
    engines = {}
    for name, settings in run.options.engines.items():
        folder = Path(run.stack.enter_context(TemporaryDirectory()))
        llm = run.stack.enter_context(LLM(model_dir, **settings, dtype=dtype))
        adapter = load_adapter(llm, name, run.options.adapter, folder)
        engines[name] = ServedModel(llm, adapter, run.options.params)
    return engines


@harness.part
def speculation(bench: Run) -> None:
    """All kinds of text and numbers of streams; then every token is checked."""
    options = bench.options
    model_dir, dtype = resolve_model(options.model), resolve_dtype(options.dtype)
    prompts = read_prompts(options.prompts, model_dir, options.number)
    kinds = [kind for kind in options.kinds.split(",") if kind] or list(prompts)
    if unknown := set(kinds) - set(prompts):
        raise SystemExit(f"--kinds: {', '.join(sorted(unknown))}: none of {', '.join(prompts)}")
    engines = open_engines(bench, model_dir, dtype)
    if options.lasting:
        all_of = list(engines.values())
        prompts = {kind: lasting(all_of, texts, options.tokens) for kind, texts in prompts.items()}
    watched = {n: StepKinds(one.llm.engine) for n, one in engines.items() if options.steps}
    # As in a worker, the collector does not visit long-lived objects while steps run.
    gc.collect()
    gc.freeze()
    answers: Answers = {}
    for streams, kind in product(options.streams, kinds):
        number = options.rounds * max(streams, len(prompts[kind]))
        chosen = list(islice(cycle(prompts[kind]), number))
        cells = measure(bench, engines, watched, chosen, streams, answers)
        title = f"{kind}, {streams} at once"
        for name, cell in cells.items():
            bench.row(cell_figures(cell, cells), table=title, drafter=name)
        for name, steps in watched.items():
            for step_kind, count in steps.take().items():
                bench.row(
                    step_kind, table=f"{title}: steps of {name}", steps=count.steps,
                    seconds=count.seconds, tokens=count.tokens,
                )  # fmt: skip
        gates = {n: one.llm.engine.scheduler.running_plans.gate for n, one in engines.items()}
        bench.keep(depths={n: {} if gate is None else gate.depths() for n, gate in gates.items()})
    if options.json_answers:
        check_json(model_dir, answers)
        return
    for name, verdict in judge(model_dir, dtype, answers, options.adapter).items():
        bench.row(verdict, table="tokens of different answers against float32", drafter=name)
        if not verdict.is_right:
            bench.fail(f"{name}: wrong tokens")


def measure(
    bench: Run,
    engines: dict[str, ServedModel],
    watched: dict[str, StepKinds],
    chosen: list[list[int]],
    streams: int,
    answers: Answers,
) -> dict[str, Cell]:
    """One kind of text with one number of streams, the engines in turn; adds to the answers."""
    options, cells = bench.options, {name: Cell() for name in engines}
    least = options.tokens // 2 if options.lasting else options.tokens
    among, number = range(least, options.tokens + 1), len(chosen)
    lengths = random.Random(number).choices(among, k=number)
    for turn in range(options.warm_turns + options.repeats):
        is_warm = turn >= options.warm_turns
        if turn == options.warm_turns:
            for kinds_of_steps in watched.values():
                kinds_of_steps.take()
        for name, served in engines.items():
            samples = run(served, chosen, streams, lengths, cells[name], is_warm=is_warm)
            for prompt, sample in zip(chosen, samples, strict=True):
                texts = answers.setdefault(tuple(prompt), {})
                texts.setdefault(tuple(sample.token_ids), set()).add(name)
    return cells


def cell_figures(cell: Cell, cells: dict[str, Cell]) -> dict[str, Any]:
    """A row: of none, of chains: ratios in the same turn; at first: of none, the first turn."""
    found: dict[str, Any] = {"tokens_per_s": spread(cell.rates)}
    for base in (base for base in ("none", CHAINS) if base in cells):
        found[f"of_{base}"] = ratio_of(cell.rates, cells[base].rates)
    if "none" in cells:
        found["at_first"] = cell.first_share_of(cells["none"])
    found["tokens_a_step"] = cell.accepted_length
    found["drafts_right"] = cell.accepted / cell.drafted if cell.drafted else None
    found["trees"] = cell.trees / cell.verifies if cell.verifies else None
    return found | {"rates": cell.rates, "first_rates": cell.first_rates}


if __name__ == "__main__":
    sys.exit(harness.main())
