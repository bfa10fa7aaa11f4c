"""What constrained output costs a step, with a real vocabulary and without a model.

    python bench/constraints.py                 the demo model's vocabulary
    python bench/constraints.py --model DIR

Random logits are drawn from, with temperature 1, under the schemas of the tests; the masks are made
by the calling thread, so that the table shows all of their work. In an engine they are made while
the model computes. Every text is checked to be JSON that is valid under its schema.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from weft.engine.constraints.grammar import GrammarSource
from weft.engine.constraints.masks import ConstraintState
from weft.engine.constraints.vocabulary import load_vocabulary
from weft.engine.constraints.wire import TOKENIZER_FILE
from weft.engine.models.config import ModelConfig
from weft.engine.models.demo import DEMO_NAME, resolve_model
from weft.engine.request import Constraint, SamplingParams, StopCriteria
from weft.engine.sampling.sampler import Sampler, SampleRow

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from random_schemas import Schema, varied_schemas

CLOSING = '"}]'
MAX_TOKENS = 600


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
        mask = state.next_mask(tokens[state.num_accepted :])
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


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEMO_NAME, help="model directory, or the demo's name")
    parser.add_argument("--schemas", type=int, default=40)
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
    figures: dict[str, object] = {"vocab_size": config.vocab_size, "texts_cut": costs.num_cut}
    for name, values in vars(costs).items():
        if isinstance(values, list):
            median, tail = statistics.median(values), float(np.percentile(values, 99))
            table.add_row(name, f"{median:,.0f}", f"{tail:,.0f}", f"{len(values):,}")
            figures[name] = {"median_us": median, "p99_us": tail, "count": len(values)}
    Console().print(table)
    print(f"{args.schemas - costs.num_cut} texts valid, {costs.num_cut} cut at {MAX_TOKENS} tokens")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
