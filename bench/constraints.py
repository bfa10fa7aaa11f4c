"""What constrained output costs a step, with a real vocabulary.

    python bench/constraints.py                 the demo model's vocabulary
    python bench/constraints.py --model DIR
    python bench/constraints.py --device cuda --batches 1,16,64

The first table needs no model: random logits are drawn from, with temperature 1, under the schemas
of the tests. The calling thread makes the masks, so that the table shows all of their work. Every
text is checked to be JSON that is valid under its schema.

The second table, with `--batches`, is of an engine, which makes masks while the model computes:
milliseconds of a decode step in which all requests are constrained, each by a schema of its own,
beside a step of the same requests without constraints, in alternation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from serving.setup import describe_setup
from tokenizers import Tokenizer
from weft.engine.constraints.grammar import GrammarSource
from weft.engine.constraints.masks import ConstraintState
from weft.engine.constraints.vocabulary import load_vocabulary
from weft.engine.constraints.wire import TOKENIZER_FILE
from weft.engine.llm import LLM
from weft.engine.messages import Inbox, Submit
from weft.engine.models.config import ModelConfig
from weft.engine.models.demo import DEMO_NAME, resolve_model
from weft.engine.request import Constraint, SamplingParams, StopCriteria
from weft.engine.sampling.sampler import Sampler, SampleRow

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from weft.testing.engine.random_schemas import Schema, varied_schemas

CLOSING = '"}]'
MAX_TOKENS = 600
STEP_TOKENS = 80
"""Tokens of each request of the second table."""


class Costs:
    """Microseconds of each kind of work, one entry a time that it was done."""

    def __init__(self) -> None:
        self.compile: list[float] = []
        self.read: list[float] = []
        self.mask: list[float] = []
        self.masked_draw: list[float] = []
        self.free_draw: list[float] = []
        self.num_cut = 0
        """Texts that no end was found for in time."""


def timed(into: list[float], began: float) -> None:
    into.append((time.perf_counter() - began) * 1e6)


def follow(
    schema: Schema, source: GrammarSource, config: ModelConfig, tokenizer: Tokenizer, costs: Costs
) -> None:
    """Compiles one schema and draws one text under it."""
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    began = time.perf_counter()
    serialised = source.compile(constraint)
    timed(costs.compile, began)
    began = time.perf_counter()
    grammar = source.read(serialised)
    timed(costs.read, began)
    state, sampler = ConstraintState(grammar, config.vocab_size), Sampler(config.vocab_size, 1)
    row = SampleRow(
        params=SamplingParams(), stop=StopCriteria(), seed=1, eos_token_ids=config.eos_token_ids
    )
    sampler.add(0, row, [], [])
    slots, tokens = np.zeros(1, np.int64), list[int]()
    closing = [tokenizer.token_to_id(symbol) for symbol in CLOSING]
    while len(tokens) < MAX_TOKENS:
        logits = torch.randn(1, config.vocab_size)
        logits[0, [*closing, *config.eos_token_ids]] += 6.0
        began = time.perf_counter()
        (mask,) = state.next_masks(tokens[state.num_accepted :])
        timed(costs.mask, began)
        for masks, into in ((None, costs.free_draw), (mask, costs.masked_draw)):
            sampler.set_mask(0, masks)
            began = time.perf_counter()
            token = int(sampler.sample(logits, slots, slots + len(tokens)).token_ids[0])
            timed(into, began)
        tokens.append(token)
        if token in config.eos_token_ids:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            return
    costs.num_cut += 1


def decode_step_s(llm: LLM, constraints: Sequence[Constraint | None], name: str) -> float:
    """Mean seconds of a step while every request decodes; one request for each constraint.

    NaN if the first ended before all had begun, as may happen while grammars are compiled.

    Raises:
        RuntimeError: A request failed.
    """
    waiting = {f"{name}-{i}" for i in range(len(constraints))}
    submits = [
        Submit(
            session=1,
            request_id=f"{name}-{i}",
            attempt=1,
            prompt=[1 + (i + j) % 100 for j in range(16)],
            sampling=SamplingParams(temperature=1.0, seed=i, constraint=constraint),
            stop=StopCriteria(max_tokens=STEP_TOKENS, ignore_eos=True),
        )
        for i, constraint in enumerate(constraints)
    ]
    inbox: Inbox | None = Inbox(submits=submits)
    num_open, num_steps, began, last = len(submits), 0, 0.0, 0.0
    while num_open:
        outbox = llm.engine.turn(inbox)
        inbox = None
        for batch in outbox.sessions:
            if batch.failed:
                raise RuntimeError(f"a request failed: {batch.failed[0]}")
            waiting.difference_update(tokens.request_id for tokens in batch.all_tokens())
            num_open -= len(batch.finished)
        if num_open == len(submits) and not waiting:
            last = time.perf_counter()
            if began:
                num_steps += llm.engine.ran_step
            else:
                began = last
    return (last - began) / num_steps if num_steps else float("nan")


def many_of(items: Schema) -> Schema:
    """An array of so many of these that no request of the second table gets to its end."""
    array = {"type": "array", "minItems": STEP_TOKENS}
    return {**array, "items": items, "$defs": items.get("$defs", {})}


def time_steps(args: argparse.Namespace, console: Console) -> list[dict[str, float]]:
    """Times steps of an engine with and without constraints; prints and returns a row a batch."""
    table = Table(title=f"a decode step, {args.device}, {args.dtype}")
    for name in ("requests", "free ms", "constrained ms", "constrained / free"):
        table.add_column(name, justify="right")
    settings = {"device": args.device, "dtype": args.dtype}
    rows: list[dict[str, float]] = []
    with LLM(resolve_model(args.model), **settings, max_running_requests=max(args.batches)) as llm:
        for batch in args.batches:
            # Arrays of many items: none ends while steps are timed.
            schemas = [many_of(items) for items in varied_schemas(batch)]
            kinds: dict[str, list[Constraint | None]] = {
                "free": [None] * batch,
                "constrained": [
                    Constraint(kind="json_schema", text=json.dumps(schema)) for schema in schemas
                ],
            }
            found: dict[str, list[float]] = {name: [] for name in kinds}
            for turn in range(args.turns + 1):  # The first warms up, and compiles the grammars.
                for name, constraints in kinds.items():
                    seconds = decode_step_s(llm, constraints, f"{name}-{batch}-{turn}")
                    if turn:
                        found[name].append(seconds)
            free, constrained = (1e3 * statistics.median(found[name]) for name in kinds)
            ratios = [b / a for a, b in zip(found["free"], found["constrained"], strict=True)]
            low, ratio, high = min(ratios), statistics.median(ratios), max(ratios)
            spread = f"{ratio:.2f} [{low:.2f} to {high:.2f}]"
            table.add_row(str(batch), f"{free:.2f}", f"{constrained:.2f}", spread)
            rows.append(
                {
                    "requests": batch,
                    "free_ms": free,
                    "constrained_ms": constrained,
                    "ratio": ratio,
                    "ratio_min": low,
                    "ratio_max": high,
                }
            )
    console.print(table)
    return rows


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEMO_NAME, help="model directory, or the demo's name")
    parser.add_argument("--schemas", type=int, default=40, help="of the first table")
    parser.add_argument(
        "--batches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[],
        help="requests of a step, such as 1,16,64; default: no second table",
    )
    parser.add_argument("--turns", type=int, default=5, help="timed rounds of the second table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    torch.manual_seed(1)
    folder = resolve_model(args.model)
    config = ModelConfig.load(folder)
    vocabulary = load_vocabulary(folder, config.vocab_size, config.eos_token_ids)
    source, costs = GrammarSource(vocabulary, max_grammar_bytes=1 << 28), Costs()
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    for schema in varied_schemas(args.schemas):
        follow(schema, source, config, tokenizer, costs)
    table = Table(title=f"{args.schemas} schemas, vocabulary of {config.vocab_size:,}")
    for name in ("work", "median us", "p99 us", "times"):
        table.add_column(name, justify="left" if name == "work" else "right")
    figures: dict[str, Any] = {"vocab_size": config.vocab_size, "texts_cut": costs.num_cut}
    for name, values in vars(costs).items():
        if isinstance(values, list):
            median, tail = statistics.median(values), float(np.percentile(values, 99))
            table.add_row(name, f"{median:,.0f}", f"{tail:,.0f}", f"{len(values):,}")
            figures[name] = {"median_us": median, "p99_us": tail, "count": len(values)}
    console = Console()
    console.print(table)
    print(f"{args.schemas - costs.num_cut} texts valid, {costs.num_cut} cut at {MAX_TOKENS} tokens")
    if args.batches:
        figures["steps"] = time_steps(args, console)
    if args.json is not None:
        figures["setup"] = describe_setup(args.dtype, torch.get_num_threads())
        if args.commit:
            figures["setup"]["commit"] = args.commit
        if args.device != "cpu":
            figures["setup"]["gpu"] = torch.cuda.get_device_name()
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
