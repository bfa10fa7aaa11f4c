"""What drafts bring: the engine with and without, by kind of text and number of streams.

Engines without drafts, with n-gram drafts and with an EAGLE-3 head run the same held-out prompts in
turn, greedily. Tokens are checked afterwards by a float32 run of transformers.

    python bench/speculation.py                                    the demo model and its head
    python bench/speculation.py --model DIR --draft DIR --device cuda --streams 1,8,64
    python bench/speculation.py --drafters none,ngram
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serving.checking import Checker, Verdict
from serving.setup import ROOT, MachineUse, describe_lines, describe_setup
from serving.systems import Answer
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from weft.engine.llm import LLM
from weft.engine.models.demo import resolve_model
from weft.engine.models.dtypes import resolve_dtype
from weft.engine.request import StopCriteria

DRAFT = ROOT / "drafts" / "smollm2-135m-eagle3"
PROMPTS = ROOT / "scripts" / "draft_training" / "held_out.json"
"""That the head was not trained on."""
DRAFTERS = ("none", "ngram", "eagle3")
POOL_BYTES = 512 << 20


@dataclass
class Cell:
    """One drafter, kind of text and number of streams."""

    rates: list[float] = field(default_factory=list)
    """Tokens a second, by turn."""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verifies: int = 0
    """Steps of requests in which drafts were verified."""

    @property
    def accepted_length(self) -> float:
        """Tokens of a request in a step with drafts, on average."""
        return 1 + self.accepted / self.verifies if self.verifies else 1.0


def main() -> int:
    """Runs the benchmark; 1 if a timed token is wrong."""
    arguments = parse()
    model_dir, dtype = resolve_model(arguments.model), resolve_dtype(arguments.dtype)
    prompts = read_prompts(arguments.prompts, model_dir, arguments.number)
    setup = describe_setup(dtype, torch.get_num_threads())
    if arguments.device != "cpu":
        setup["gpu"] = torch.cuda.get_device_name()
    cells: dict[tuple[str, str, int], Cell] = {}
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    with ExitStack() as stack, Progress(transient=True) as progress:
        engines = {}
        for drafter in arguments.drafters:
            settings: dict[str, Any] = {"dtype": dtype, "device": arguments.device}
            settings |= {"drafter": drafter, "kv_memory_bytes": arguments.pool_bytes}
            settings |= {"max_draft_tokens": arguments.max_draft_tokens}
            if drafter == "eagle3":
                settings |= {"draft_dir": arguments.draft, "draft_width": arguments.draft_width}
            elif drafter == "model":
                settings["draft_dir"] = arguments.draft_model
            engines[drafter] = stack.enter_context(LLM(model_dir, **settings))
        total = len(engines) * len(prompts) * len(arguments.streams) * (arguments.turns + 1)
        timing = progress.add_task("timing", total=total)
        before = MachineUse.now()
        for turn in range(arguments.turns + 1):
            for kind, texts in prompts.items():
                for streams in arguments.streams:
                    for drafter, llm in engines.items():
                        cell = cells.setdefault((drafter, kind, streams), Cell())
                        run(llm, texts, streams, arguments.tokens, cell, answers, is_warm=turn > 0)
                        progress.advance(timing)
        setup["other_cores"] = MachineUse.now().others_since(before)
        depths = {name: llm.engine.drafting.depths() for name, llm in engines.items()}
    verdict = judge(model_dir, dtype, answers)
    return report(arguments, setup, cells, depths, verdict)


def read_prompts(path: Path, model_dir: Path, number: int) -> dict[str, list[list[int]]]:
    """Token ids of so many prompts of each kind."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    kinds: dict[str, list[list[int]]] = {}
    for entry in json.loads(path.read_text()):
        ids = tokenizer.apply_chat_template(
            entry["messages"], add_generation_prompt=True, return_dict=False
        )
        kinds.setdefault(entry["kind"], []).append(list(ids))
    return {kind: texts[:number] for kind, texts in kinds.items()}


def run(
    llm: LLM,
    texts: Sequence[list[int]],
    streams: int,
    num_tokens: int,
    cell: Cell,
    answers: dict[tuple[int, ...], list[list[int]]],
    *,
    is_warm: bool,
) -> None:
    """All prompts once, `streams` of them at a time; few prompts are repeated to be as many."""
    chosen = [texts[index % len(texts)] for index in range(max(streams, len(texts)))]
    stop = StopCriteria(max_tokens=num_tokens)
    counters = llm.engine.counters()
    began = time.perf_counter()
    samples = []
    for index in range(0, len(chosen), streams):
        samples += llm.generate(chosen[index : index + streams], None, stop)
    seconds = time.perf_counter() - began
    if not is_warm:
        return
    num_made = sum(len(sample.token_ids) for sample in samples)
    cell.rates.append(num_made / seconds)
    cell.tokens += num_made
    after = llm.engine.counters()
    cell.drafted += after["drafted_tokens"] - counters["drafted_tokens"]
    cell.accepted += after["accepted_tokens"] - counters["accepted_tokens"]
    cell.verifies += after["verified_runs"] - counters["verified_runs"]
    for prompt, sample in zip(chosen, samples, strict=True):
        known = answers.setdefault(tuple(prompt), [])
        if sample.token_ids not in known:
            known.append(sample.token_ids)


def judge(model_dir: Path, dtype: str, answers: dict[tuple[int, ...], list[list[int]]]) -> Verdict:
    """Every timed token against a float32 run of transformers."""
    checker = Checker(model_dir, dtype, Tokenizer.from_file(str(model_dir / "tokenizer.json")))
    verdict = Verdict()
    for prompt, texts in answers.items():
        for text in texts:
            verdict.add(checker.check(list(prompt), Answer(text), len(text), ()))
    return verdict


def report(
    arguments: argparse.Namespace,
    setup: dict[str, Any],
    cells: dict[tuple[str, str, int], Cell],
    depths: dict[str, dict[int, int]],
    verdict: Verdict,
) -> int:
    """Prints the table and writes the JSON."""
    console, rows = Console(), []
    table = Table(title=f"Drafts, greedy answers of at most {arguments.tokens} tokens")
    for column in ("drafter", "text", "streams", "tokens/s", "of none", "a step", "drafts right"):
        table.add_column(column, justify="left" if column in ("drafter", "text") else "right")
    for (drafter, kind, streams), cell in sorted(cells.items(), key=lambda item: item[0][2]):
        base = cells.get(("none", kind, streams), cell)
        shares = [rate / other for rate, other in zip(cell.rates, base.rates, strict=True)]
        right = f"{cell.accepted / cell.drafted:.0%}" if cell.drafted else "-"
        table.add_row(
            *(drafter, kind, str(streams), f"{statistics.median(cell.rates):.1f}"),
            f"{statistics.median(shares):.2f} [{min(shares):.2f}-{max(shares):.2f}]",
            *(f"{cell.accepted_length:.2f}", right),
        )
        row = {"drafter": drafter, "text": kind, "streams": streams, "rates": cell.rates}
        row |= {"shares": shares, "share": statistics.median(shares)}
        row |= {"accepted_length": cell.accepted_length, "drafted": cell.drafted}
        rows.append(row | {"accepted": cell.accepted, "tokens": cell.tokens})
    console.print(table)
    for line in [
        "a step: tokens of a request in a step that had drafts; spread over turns",
        f"drafts that the gate settled on, by number of requests: {depths}",
        f"tokens: {verdict.exact} exact, {verdict.near_ties} near ties, {verdict.wrong} wrong",
        *describe_lines(setup),
        f"other programs kept {setup['other_cores']:.2f} cores busy",
    ]:
        console.print(line, soft_wrap=True, highlight=False)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = arguments.json or ROOT / "bench" / "results" / f"speculation-{stamp}.json"
    content = {"command": " ".join(sys.argv), "setup": setup, "rows": rows, "depths": depths}
    content["checked"] = {"exact": verdict.exact, "near_ties": verdict.near_ties}
    content["checked"] |= {"wrong": verdict.wrong, "missing": verdict.missing}
    path.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written to {path}", soft_wrap=True, highlight=False)
    return 0 if verdict.is_right else 1


def parse() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="demo or a Hugging Face directory")
    parser.add_argument("--draft", type=Path, default=DRAFT, help="folder of the EAGLE-3 head")
    parser.add_argument("--draft-model", type=Path, help="folder of a model that drafts: `model`")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="which, by commas")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="kind and messages of each")
    parser.add_argument("--number", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--streams", default="1,4,16", help="requests at once, by commas")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--turns", type=int, default=5, help="timed turns, after one to warm up")
    parser.add_argument("--max-draft-tokens", type=int, default=5)
    parser.add_argument("--draft-width", type=int, default=1, help="of eagle3; 1: chains alone")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pool-bytes", type=int, default=POOL_BYTES, help="KV of each engine")
    parser.add_argument("--json", type=Path, help="where to write; default: bench/results")
    arguments = parser.parse_args()
    arguments.drafters = [name for name in arguments.drafters.split(",") if name]
    known = (*DRAFTERS, "model") if arguments.draft_model else DRAFTERS
    if unknown := set(arguments.drafters) - set(known):
        parser.error(f"--drafters: {', '.join(sorted(unknown))}: none of {', '.join(known)}")
    arguments.streams = [int(number) for number in arguments.streams.split(",")]
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
