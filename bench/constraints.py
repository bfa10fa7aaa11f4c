"""What constrained output accepts, costs and lets through, with a real vocabulary.

    python bench/constraints.py                      the schemas of the tests
    python bench/constraints.py --instances DIR      JSONSchemaBench: its folder maskbench/data
    python bench/constraints.py --suite DIR          also JSON-Schema-Test-Suite: its folder tests
    python bench/constraints.py --only steps --device cuda --batches 1,16,64
    python bench/constraints.py --only host --batches 1,16,64 --host-threads 1,4,8
    python bench/constraints.py --only around --batches 1,16,64
    python bench/constraints.py --only first-token [--instances DIR]

The first table is of schemas with instances that are valid under them or not. A valid instance that
is accepted with its properties in another order counts apart; so does one with properties that the
schema does not list. Milliseconds are of the CPU. For the schemas of the
tests, instances are texts of random walks through the masks, which `jsonschema` has to accept.

The table of `steps` is of an engine, which makes masks while the model computes:
milliseconds of a decode step in which all requests are constrained, each by a schema of its own,
beside a step of the same requests without constraints, in alternation.

The table of `host` needs no model and no GPU: milliseconds of a step in which random texts of as
many schemas go on by a token each. That of `around` leaves llguidance out.

The table of `first-token` is of a mesh with the demo model on a CPU: milliseconds from a request
over REST to its first token, with a schema that the mesh has not seen and without one, in turns.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx
import jsonschema
import numpy as np
import torch
from engine_runs import run_requests
from harness import Harness, Run, in_turns, numbers, ratio_of, spread
from llguidance import LLMatcher
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.demo import DEMO_NAME
from weft.checkpoint.resolve import resolve_model
from weft.contract.cores import num_cores
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.features.constraints import grammar_state
from weft.engine.features.constraints.constraints import Constraints
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.masks import MAX_THREADS, MaskMaker
from weft.engine.features.constraints.vocabulary import load_vocabulary, tokenizer_of
from weft.engine.loop.draws import StepSampler
from weft.engine.loop.llm import LLM
from weft.engine.requests.request import RequestKey, State
from weft.engine.sampling.sampler import Sampler, SamplerRow

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from weft.testing.engine.client_schemas import client_schema
from weft.testing.engine.random_schemas import Schema, varied_schemas
from weft.testing.meshes.local_mesh import MODEL, LocalMesh

CLOSING = '"}],x'
MAX_TOKENS = 600
STEP_TOKENS = 80
"""Tokens of each request of the table of steps."""
MAX_RATIO = 1.15
"""Most that a constrained step may take beside a free one."""
DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


MAX_ORDERS = 500_000
"""Most steps spent on trying orders of an instance's properties."""
BYTES = tokenizer_of([*(bytes([byte]) for byte in range(256)), b""], [256])
"""Tokens of single bytes."""


harness = Harness(__file__, __doc__, repeats=5)
harness.flag("--model", default=DEMO_NAME, help="model directory, or the demo's name")
harness.flag("--instances", type=Path, help="maskbench/data of JSONSchemaBench")
harness.flag("--suite", type=Path, help="tests of JSON-Schema-Test-Suite")
harness.flag("--schemas", type=int, default=200, help="number of schemas")
harness.flag("--seed", type=int, default=1, help="chooses the schemas")
harness.flag("--batches", type=numbers, default=[1, 16, 64], help="requests of a step, by commas")
harness.flag(
    "--host-threads",
    type=numbers,
    default=[min(MAX_THREADS, num_cores() // 2)],
    help="of host: threads for masks, by commas; default: as many as an engine has",
)
harness.flag("--device", default="cpu")
harness.flag("--dummy-weights", action="store_true", help="the model's folder has no weights")
harness.flag("--dtype", default="auto")


class Case(NamedTuple):
    """A schema and JSON values that are valid under it or not."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


class Figures:
    """Counts of schemas and instances, and CPU milliseconds of each kind of work."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.compile_ms: list[float] = []
        self.mask_ms: list[float] = []
        self.wrong: list[str] = []
        """Names of cases with invalid instances that were accepted."""
        self.rejected: list[str] = []
        """Names of cases with valid instances that were rejected for other reasons than order."""

    def as_json(self) -> dict[str, Any]:
        """The figures, with percentiles of the milliseconds."""
        found: dict[str, Any] = dict(self.counts)
        for name, values in (("compile", self.compile_ms), ("mask", self.mask_ms)):
            for share in (50, 99, 99.9, 100):
                value = float(np.percentile(values, share)) if values else float("nan")
                found[f"{name}_ms_p{share:g}"] = round(value, 4)
        found["masks"] = len(self.mask_ms)
        found["refusals"] = dict(self.refusals.most_common(30))
        found["wrong"] = self.wrong
        found["rejected"] = sorted(set(self.rejected))
        return found


class Judge:
    """Compiles schemas and follows instances as the engine does.

    Args:
        source: Compiler for the model's vocabulary.
        tokenizer: Of the model.
        vocab_size: Of the model.
    """

    def __init__(self, source: GrammarSource, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._words = np.zeros(-(-vocab_size // 32), np.uint32)

    def judge(self, case: Case, figures: Figures) -> None:
        """Adds the outcome of a case to the figures."""
        figures.counts["schemas"] += 1
        constraint = Constraint(kind="json_schema", text=json.dumps(case.schema))
        began = time.thread_time()
        try:
            matcher = self._source.compile(constraint)
        except ValueError as error:
            place, _, message = str(error).partition(": ")
            what = f"{place.rpartition('/')[2]}: {message}" if place.startswith("at ") else place
            figures.refusals[what[:90]] += 1
            return
        figures.compile_ms.append((time.thread_time() - began) * 1e3)
        figures.counts["accepted"] += 1
        for value, is_valid in case.instances:
            is_taken = self.takes(matcher, value, figures)
            figures.counts["valid" if is_valid else "invalid"] += 1
            if is_taken and not is_valid:
                figures.counts["invalid accepted"] += 1
                figures.wrong.append(case.name)
            if is_valid and not is_taken:
                reason = self._reason(constraint, value)
                figures.counts[f"valid rejected: {reason}"] += 1
                if reason == "other":
                    figures.rejected.append(case.name)

    def takes(self, matcher: LLMatcher, value: Any, figures: Figures | None = None) -> bool:
        """Whether a value is of the grammar; its masks are timed for the figures."""
        text = json.dumps(value, ensure_ascii=False)
        matcher = matcher.deep_copy()
        for token in self._tokenizer.encode(text, add_special_tokens=False).ids:
            began = time.thread_time()
            matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            if figures is not None:
                figures.mask_ms.append((time.thread_time() - began) * 1e3)
            is_allowed = self._words[token // 32] >> token % 32 & 1
            if not is_allowed or matcher.is_error() or not matcher.consume_token(token):
                return False
        return bool(matcher.is_accepting())

    def _reason(self, constraint: Constraint, value: Any) -> str:
        """Why a valid instance is rejected: order of properties, some not listed, or other."""
        for reason, is_closed in (("order", True), ("not listed", False)):
            try:
                matcher = GrammarSource(BYTES, is_closed=is_closed).compile(constraint)
            except ValueError:
                continue
            budget = iter(range(MAX_ORDERS))
            as_it_is = _consumed(matcher, json.dumps(value, ensure_ascii=False), budget)
            if as_it_is is not None and as_it_is.is_accepting():
                return reason
            # First the most likely order of each object alone.
            for width in (1, MAX_ORDERS):
                ends = in_some_order(matcher, value, budget, width)
                if any(end.is_accepting() for end in ends):
                    return reason
        return "other"


class BytesJudge(Judge):
    """A judge whose tokens are bytes."""

    def __init__(self, source: GrammarSource) -> None:
        super().__init__(source, Tokenizer(WordLevel({"": 0}, "")), 257)

    def takes(self, matcher: LLMatcher, value: Any, figures: Figures | None = None) -> bool:
        """Whether a value is of the grammar."""
        spelled = [*json.dumps(value, ensure_ascii=False).encode()]
        matcher = matcher.deep_copy()
        return bool(matcher.try_consume_tokens(spelled) == len(spelled) and matcher.is_accepting())


def in_some_order(
    matcher: LLMatcher, value: Any, budget: Iterator[int], width: int
) -> Iterator[LLMatcher]:
    """Matchers behind a value, whose properties may be in any order.

    Args:
        matcher: Before it, with a vocabulary of bytes.
        value: JSON.
        budget: One for each step that may be tried.
        width: Most orders of an object that are tried.
    """
    if isinstance(value, list):
        yield from _behind(matcher, "[", [("", part) for part in value], "]", budget, width)
    elif isinstance(value, dict):
        members = [(f"{json.dumps(n, ensure_ascii=False)}: ", part) for n, part in value.items()]
        yield from _behind(matcher, "{", members, "}", budget, width)
    elif (end := _consumed(matcher, json.dumps(value, ensure_ascii=False), budget)) is not None:
        yield end


def _behind(
    matcher: LLMatcher,
    begin: str,
    left: list[tuple[str, Any]],
    end: str,
    budget: Iterator[int],
    width: int,
) -> Iterator[LLMatcher]:
    """Matchers behind the members that are left and the end; those of a list in their order."""
    if not left:
        if (closed := _consumed(matcher, begin.strip(", ") + end, budget)) is not None:
            yield closed
        return
    found: list[tuple[int, LLMatcher, list[tuple[str, Any]]]] = []
    for index, (name, part) in enumerate(left if end == "}" else left[:1]):
        named = _consumed(matcher, begin + name, budget)
        if named is None:
            continue
        rest = left[:index] + left[index + 1 :]
        for behind in islice(in_some_order(named, part, budget, width), width):
            num_next = sum(_consumed(behind, f", {name}", budget) is not None for name, _ in rest)
            found.append((num_next, behind, rest))
    # The member behind which most others may come is tried first, since the grammar has it first.
    found.sort(key=lambda one: -one[0])
    for _, behind, rest in found[:width]:
        yield from _behind(behind, ", ", rest, end, budget, width)


def _consumed(matcher: LLMatcher, text: str, budget: Iterator[int]) -> LLMatcher | None:
    if next(budget, None) is None:
        return None
    copied, spelled = matcher.deep_copy(), [*text.encode()]
    return copied if copied.try_consume_tokens(spelled) == len(spelled) else None


def bench_cases(folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Schemas of JSONSchemaBench with the instances that its maskbench has."""
    files = sorted(folder.glob("*.json"))
    random.Random(seed).shuffle(files)
    for file in files[:count]:
        content = json.loads(file.read_text())
        instances = [(one["data"], bool(one["valid"])) for one in content["tests"]]
        yield Case(file.stem, content["schema"], instances)


def suite_cases(folder: Path, draft: str) -> Iterator[Case]:
    """Schemas of JSON-Schema-Test-Suite, optional ones too."""
    for file in sorted((folder / draft).rglob("*.json")):
        for one in json.loads(file.read_text()):
            schema = one["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            tests = [(test["data"], bool(test["valid"])) for test in one["tests"]]
            tests = [test for test in tests if is_text(test[0])]
            yield Case(f"{file.stem}: {one['description']}", schema, tests)


def is_text(value: Any) -> bool:
    """Whether a value can be written in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def walk(matcher: LLMatcher, tokenizer: Tokenizer, config: ModelConfig, rng: random.Random) -> str:
    """A text of a random walk through the masks; empty if it finds no end."""
    matcher, tokens = matcher.deep_copy(), list[int]()
    favoured = {tokenizer.token_to_id(symbol) for symbol in CLOSING}
    while len(tokens) < MAX_TOKENS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error())
        may_come = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        ends = [token for token in may_come if token in config.eos_token_ids]
        if ends and (len(ends) == len(may_come) or rng.random() < 0.5):
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        others = [token for token in may_come if token not in config.eos_token_ids]
        closing = [token for token in others if token in favoured]
        tokens.append(rng.choice(closing if closing and rng.random() < 0.5 else others))
        matcher.consume_token(tokens[-1])
    return ""


def decode_step_s(llm: LLM, constraints: Sequence[Constraint | None]) -> float:
    """Mean seconds of a step while every request decodes; one request for each constraint.

    NaN if the first ended before all had begun, as may happen while grammars are compiled.
    """
    prompts = [[1 + (i + j) % 100 for j in range(16)] for i in range(len(constraints))]
    sampling = [
        SamplingParams(temperature=1.0, seed=i, constraint=constraint)
        for i, constraint in enumerate(constraints)
    ]
    batch = run_requests(llm, prompts, [STEP_TOKENS] * len(prompts), sampling)
    return batch.seconds / batch.num_steps if batch.num_steps else float("nan")


def many_of(items: Schema) -> Schema:
    """A schema of an array with so many items that no request of the second table ends."""
    array = {"type": "array", "minItems": STEP_TOKENS}
    return {**array, "items": items, "$defs": items.get("$defs", {})}


@harness.part_if_named
def steps(run: Run) -> None:
    """Steps of an engine with and without constraints."""
    options = run.options
    settings: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    settings |= {"dummy_weights": True} if options.dummy_weights else {}
    model_dir = resolve_model(options.model)
    with LLM(model_dir, **settings, max_running_requests=max(options.batches)) as llm:
        for batch in options.batches:
            # Arrays of many items: none ends while steps are timed.
            schemas = [many_of(items) for items in varied_schemas(batch)]
            kinds: dict[str, list[Constraint | None]] = {
                "free": [None] * batch,
                "constrained": [
                    Constraint(kind="json_schema", text=json.dumps(schema)) for schema in schemas
                ],
            }
            ways = {name: partial(decode_step_s, llm, kinds[name]) for name in kinds}
            found = in_turns(ways, options.repeats)  # The first compiles the grammars.
            times = {f"{name}_ms": spread(found[name], 1e3) for name in kinds}
            ratio = ratio_of(found["constrained"], found["free"])
            run.row(table="a decode step", requests=batch, **times, ratio=ratio)
            if ratio.low > MAX_RATIO:
                run.fail(f"{batch} constrained requests: {ratio} of a free step, not {MAX_RATIO}")


class HostRequest:
    """The part of a running request that masks need.

    Args:
        slot: Its slot.
        constraint: Its constraint.
    """

    state, sample, num_prompt_tokens = State.RUNNING, 0, 0

    def __init__(self, slot: int, constraint: Constraint) -> None:
        self.key, self.slot = RequestKey(1, str(slot), 1), slot
        self.params = SamplingParams(constraint=constraint)
        self.tokens: list[int] = []

    @property
    def num_generated(self) -> int:
        """Number of its tokens."""
        return len(self.tokens)


@harness.part_if_named
def host(run: Run) -> None:
    """Times the masks of steps by part: of a schema for each request, by as many threads as said,
    and of one schema for all.

    `follow and fill` lasts from a step's tokens to its masks, `hand over` from there until they are
    in the sampler's table. `one by one` is the work of llguidance alone, in this thread.
    """
    args, title = run.options, f"the masks of a step, ms, {num_cores()} cores"
    names = ("follow and fill", "hand over", "one by one: follow", "one by one: fill")
    folder = resolve_model(args.model)
    model = ModelConfig.load(folder)
    source = GrammarSource(load_vocabulary(folder, model.vocab_size, model.eos_token_ids))
    texts = [
        Constraint(kind="json_schema", text=json.dumps(many_of(items)))
        for items in varied_schemas(max(args.batches))
    ]
    matchers = [source.compile(text) for text in texts]
    for batch, is_shared, threads in product(args.batches, (False, True), args.host_threads):
        if is_shared and batch == 1:
            continue
        chosen = [0 if is_shared else slot for slot in range(batch)]
        config = EngineConfig(model_dir=folder)
        constraints = Constraints(config, model.vocab_size, model.eos_token_ids, lambda: None)
        constraints._maker = MaskMaker(threads)
        sampler = Sampler(model.vocab_size, batch, device=torch.device("cpu"))
        table, step_sampler = sampler._table, StepSampler(sampler, constraints)
        requests: list[Any] = [HostRequest(i, texts[index]) for i, index in enumerate(chosen)]
        for request, index in zip(requests, chosen, strict=True):
            stop = StopCriteria(max_tokens=STEP_TOKENS)
            row = SamplerRow(params=request.params, stop=stop, seed=0, eos_token_ids=())
            sampler.add(request.slot, row, (), ())
            constraints.grammars[request.key] = matchers[index]
        alone = [matchers[index].deep_copy() for index in chosen]
        spent: list[list[float]] = [[] for _ in names]
        words = np.zeros(-(-model.vocab_size // 32), np.uint32)
        rng = np.random.default_rng(args.seed)
        for step in range(STEP_TOKENS):
            marks = [time.perf_counter()]
            constraints.begin_masks(requests, rows=sampler.mask_memory, is_awaited=True)
            marks.append(time.perf_counter())
            step_sampler._has_masks = True
            step_sampler._take_masks(requests)
            table.send()
            marks.append(time.perf_counter())
            for matcher, request in zip(alone, requests, strict=True):
                if step:
                    matcher.consume_token(request.tokens[-1])
            marks.append(time.perf_counter())
            for matcher in alone:
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            marks.append(time.perf_counter())
            for part, (begin, end) in zip(spent, pairwise(marks), strict=True):
                part.append(1e3 * (end - begin))
            sent = table.plain_tensors.masks.numpy().view(np.uint8)
            for request in requests:
                bits = np.unpackbits(sent[request.slot], bitorder="little")
                request.tokens.append(int(rng.choice(np.flatnonzero(bits))))
        times = {name: spread(part[1:]) for name, part in zip(names, spent, strict=True)}
        figures = {"requests": batch, "schemas": len({*chosen}), "threads": threads}
        run.row(figures | times, table=title)
        constraints.close()


class FreeMatcher:
    """Stands for llguidance's matcher, and takes no time: every token may come."""

    def deep_copy(self) -> FreeMatcher:
        return self

    def is_error(self) -> bool:
        return False

    def consume_token(self, sampled_token: int) -> bool:
        return True

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...


@harness.part_if_named
def around(run: Run) -> None:
    """Times what a step spends on masks beside llguidance, which takes no time here."""
    folder, vocab_size = resolve_model(DEMO_NAME), 49_152
    for batch in run.options.batches:
        constraints = Constraints(EngineConfig(model_dir=folder), vocab_size, [0], lambda: None)
        constraints._maker = MaskMaker(1)
        sampler = Sampler(vocab_size, batch)
        step_sampler = StepSampler(sampler, constraints)
        text = Constraint(kind="regex", text=".*")
        requests: list[Any] = [HostRequest(slot, text) for slot in range(batch)]
        grammar: Any = FreeMatcher()
        for request in requests:
            stop = StopCriteria(max_tokens=STEP_TOKENS)
            row = SamplerRow(params=request.params, stop=stop, seed=0, eos_token_ids=())
            sampler.add(request.slot, row, (), ())
            constraints.grammars[request.key] = grammar
        step_sampler._has_masks = True
        spent: list[float] = []
        with patch.object(grammar_state, "LLMatcher", FreeMatcher):
            for _ in range(20 * STEP_TOKENS):
                began = time.perf_counter()
                constraints.begin_masks(requests, rows=sampler.mask_memory, is_awaited=True)
                step_sampler._take_masks(requests)
                spent.append(time.perf_counter() - began)
                for request in requests:
                    request.tokens.append(1)
        run.row(
            requests=batch, us=spread(spent[1:], 1e6), table="masks of a step beside llguidance"
        )
        constraints.close()


@harness.part_if_named
def first_token(run: Run) -> None:
    """Time to the first token of a chat, with a new schema each time and without one."""
    options, rng = run.options, random.Random(run.options.seed)
    with tempfile.TemporaryDirectory(prefix="weft-first-token-") as folder, ExitStack() as stack:
        mesh = LocalMesh(Path(folder), "--prefill", "0")
        stack.callback(mesh.stop)
        mesh.wait_ready()
        client = stack.enter_context(httpx.Client(base_url=mesh.url, timeout=60))
        if options.instances:
            cases = bench_cases(options.instances, options.schemas, options.seed)
            schemas: Iterator[Schema] = (case.schema for case in cases)
        else:
            schemas = (client_schema(rng) for _ in range(options.schemas))
        num_refused, times = 0, dict[str, list[float]](plain=[], constrained=[])
        for number, schema in enumerate(schemas):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            turn = {"plain": {}, "constrained": {"response_format": form}}
            took = {name: _first_token_s(client, number, turn[name]) for name in sorted(turn)}
            if any(one is None for one in took.values()):
                num_refused += 1
                continue
            for name, one in took.items():
                times[name] += [] if one is None else [one]
    kept = {name: values[len(values) // 10 :] for name, values in times.items()}  # warmed up
    extra = [a - b for a, b in zip(kept["constrained"], kept["plain"], strict=True)]
    run.row(
        table="the first token of a chat, ms",
        **{name: spread(values, 1e3) for name, values in kept.items()},
        extra=spread(extra, 1e3),
        refused=num_refused,
    )


def _first_token_s(client: httpx.Client, number: int, fields: dict[str, Any]) -> float | None:
    """None: the schema is refused."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Write record {number} as JSON."}],
        "max_tokens": 4,
        "stream": True,
        **fields,
    }
    began = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            return None
        for line in answer.iter_lines():
            if '"content":' in line and '"content":""' not in line.replace(": ", ":"):
                return time.perf_counter() - began
    return None


def own_cases(
    source: GrammarSource, tokenizer: Tokenizer, config: ModelConfig, count: int, seed: int
) -> Iterator[Case]:
    """Schemas of the tests with a text of a random walk each, which has to be valid."""
    rng = random.Random(seed)
    for index, schema in enumerate(varied_schemas(count, seed)):
        matcher = source.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
        text = walk(matcher, tokenizer, config, rng)
        if text:
            value = json.loads(text)
            jsonschema.Draft202012Validator(schema).validate(value)
            yield Case(f"own {index}", schema, [(value, True)])


@harness.part
def schemas(run: Run) -> None:
    """What is accepted and rejected, and what compiling and masks take."""
    args = run.options
    folder = resolve_model(args.model)
    config = ModelConfig.load(folder)
    source = GrammarSource(load_vocabulary(folder, config.vocab_size, config.eos_token_ids))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    judge, found = Judge(source, tokenizer, config.vocab_size), Figures()
    title = "JSONSchemaBench" if args.instances else "random walks through masks"
    if args.instances:
        cases = bench_cases(args.instances, args.schemas, args.seed)
    else:
        cases = own_cases(source, tokenizer, config, args.schemas, args.seed)
    for case in cases:
        judge.judge(case, found)
    show(run, title, found)
    for draft in DRAFTS if args.suite else ():
        # Byte by byte: all texts are the same for every tokenizer.
        found = Figures()
        for case in suite_cases(args.suite, draft):
            BytesJudge(GrammarSource(BYTES)).judge(case, found)
        show(run, f"JSON-Schema-Test-Suite, {draft}", found)


def show(run: Run, title: str, found: Figures) -> None:
    """A row for each figure; the JSON has them as one as well."""
    figures = found.as_json()
    run.keep(**{title: figures})
    for name, value in figures.items():
        if not isinstance(value, dict | list):
            run.row(table=title, figure=name, value=value)


if __name__ == "__main__":
    sys.exit(harness.main())
