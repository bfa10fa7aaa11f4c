"""Prefill and decode apart beside whole workers, through REST, on the GPUs of one host.

    python bench/gpu_apart.py handover                   first tokens alone, with timelines
    python bench/gpu_apart.py rate --rates 16 19         2,048 + 200 tokens, Poisson
    python bench/gpu_apart.py mixed --mixed-rates 10     prompts of 500 to 8,000 tokens
    python bench/gpu_apart.py burst --model qwen3-0.6b --systems whole1
    python bench/gpu_apart.py goodput --shapes 2048+200@8,12,16,20 8192+400@2,4,6
    python bench/gpu_apart.py agents                     sessions with 8k to 64k tokens of history
    python bench/gpu_apart.py turns --histories 8000 64000    cached turns, one at a time

| system | `weft up` |
| --- | --- |
| `apart` | `--prefill 1 --decode 1 --local-prefill-max-tokens 0` |
| `whole` | `--prefill 0 --decode 2` |
| `auto` | `--prefill 1 --decode 1`: the cost rule decides |
| `whole1` | `--prefill 0 --decode 1` on the first GPU |
| `ranks` | `apart` with one worker of each role, which has half of the GPUs as ranks |

Each worker has one GPU of `--device`; with four, there are twice as many workers of each role.

Random weights in the model's real shape, the demo model's tokenizer, prompts of random tokens.
Correctness comes first: the same prompts greedily on every system; answers that differ are judged
by transformers in float32 at the end (`gpu_reference.py`). Prefix caches are off but for `agents`
and `turns`, or with `--prefix-cache`.
Each call measures the sections named of one model on the systems named, which start one after the
other; with two systems of Llama-3.1-8B that is within ten minutes. With `--together` all systems
start at once and are measured in turn, and `--systems apart:handover,rate whole1:handover,burst`
gives each its own sections: they share the GPUs, so bound their pools. Calls that name the same
`--lock` measure in turn too. Needs the REST edge (`services/rest/bin/weft-rest`), NIXL for pages
to travel between GPUs, and a tokenizer.

With a store: `--up-args "--kvstore 1"`; with a host tier: `--up-args "--host-cache-bytes
20000000000"`.
Settings beside their defaults: `--prefill-args`, `--decode-args`, as in
`--decode-args "--step-lead-s 1"`, `--prefill-args "--shared-step-tokens 8192"`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from gpu_reference import Answer, check_tokens
from harness import Harness, Run, Spread, spread
from model_shapes import MODELS
from open_loop.report import Row
from serving.load import Raw, new_runner
from serving.mesh import WEFT, MeshProcess
from serving.rest_client import RestClient, messages
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.resolve import resolve_model

SYSTEMS = {
    "apart": "--prefill {half} --decode {half} --local-prefill-max-tokens 0 --device {devices}",
    "whole": "--prefill 0 --decode {count} --device {devices}",
    "auto": "--prefill {half} --decode {half} --device {devices}",
    "whole1": "--prefill 0 --decode 1 --device {first}",
    "ranks": "--prefill 1 --decode 1 --local-prefill-max-tokens 0 --tp {half} --device {devices}",
}
SECTIONS = ("handover", "turns", "rate", "mixed", "burst", "goodput", "agents")
CACHED = {"turns", "agents"}
"""Sections for which prefix caches are on."""
ANSWER_TOKENS, ADDED_TOKENS = 64, 500
"""Tokens of each answer and new ones of each turn in `turns`."""
CHECKED = (40, 512, 2000)
"""Lengths of the prompts whose answers are compared."""
CHECKED_TOKENS = 4
TINY = {
    **MODELS["qwen3-0.6b"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
}
"""A tiny shape to try this script on a CPU."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(slots=True)
class FirstToken:
    """Prompts of one length, or turns behind a cached history, one at a time. Milliseconds."""

    system: str
    prompt_tokens: int
    """With `cached`, those of the history."""
    ms: Spread
    timeline: str = ""
    """Output of `weft trace --timeline` for the last prompt."""
    cached: bool = False
    """Whether these are turns behind a history."""


Answers = dict[str, list[list[int]]]
"""Answers to the compared prompts, by system."""


def make_model(folder: Path, options: argparse.Namespace) -> Path:
    """A model's directory without weights, with the demo model's tokenizer or another one."""
    shape = TINY if options.model == "tiny" else MODELS[options.model]
    config = {**shape, "vocab_size": options.vocab, "eos_token_id": 2}
    if options.layers:
        config["num_hidden_layers"] = options.layers
    model = folder / str(options.model)
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = options.tokenizer
    source = resolve_model("demo") if tokenizer is None else tokenizer
    for file in TOKENIZER_FILES:
        if (source / file).exists():
            (model / file).write_bytes((source / file).read_bytes())
    return model


@contextmanager
def mesh_of(system: str, model: Path, options: argparse.Namespace) -> Iterator[MeshProcess]:
    """A mesh that starts."""
    devices = options.device.split(",")
    count = len(devices)
    system_flags = SYSTEMS[system].format(
        half=count // 2, count=count, devices=options.device, first=devices[0]
    )
    worker = "--dummy-weights"
    if not (options.prefix_cache or CACHED & set(options.sections_of[system])):
        worker += " --no-prefix-cache"
    flags = [
        system_flags,
        "--prefill-args",
        shlex.quote(f"{worker} {options.prefill_args}".strip()),
        "--decode-args",
        shlex.quote(f"{worker} {options.decode_args}".strip()),
        options.up_args,
    ]
    mesh = MeshProcess(str(model), options.dtype, " ".join(flags))
    try:
        yield mesh
    finally:
        mesh.stop()


def prompts_of(lengths: tuple[int, ...], vocabulary: int, seed: int) -> list[list[int]]:
    """Random prompts, the same for every system."""
    rng = random.Random(seed)
    return [[rng.randrange(10, vocabulary) for _ in range(length)] for length in lengths]


def answers_of(mesh: MeshProcess, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of prompts that come one after the other."""
    found = []
    for prompt in prompts:
        found.append(ask(mesh, prompt, CHECKED_TOKENS)[2])
        assert len(found[-1]) == CHECKED_TOKENS, found[-1]
    return found


def first_tokens(
    mesh: MeshProcess, system: str, options: argparse.Namespace
) -> Iterator[FirstToken]:
    """Each length alone; the last one's timeline."""
    rng = random.Random(7)
    for length in options.prompts:
        times, request_id = [], ""
        for turn in range(options.turns + 2):
            (prompt,) = prompts_of((length,), options.vocab, rng.getrandbits(48))
            first_s, request_id, _ = ask(mesh, prompt, 2)
            if turn >= 2:  # The first turns warm up.
                times.append(1e3 * first_s)
        yield first_token_row(mesh, FirstToken(system, length, spread(times)), request_id)


def cached_turns(
    mesh: MeshProcess, system: str, options: argparse.Namespace
) -> Iterator[FirstToken]:
    """Sessions alone: turns behind each history, which they send again; the last one's timeline."""
    rng = random.Random(9)
    for length in options.histories:
        times, request_id = [], ""
        (history,) = prompts_of((length,), options.vocab, rng.getrandbits(48))
        _, _, answer = ask(mesh, history, ANSWER_TOKENS)
        for turn in range(options.turns + 1):
            (added,) = prompts_of((ADDED_TOKENS,), options.vocab, rng.getrandbits(48))
            history = [*history, *answer, *added]
            first_s, request_id, answer = ask(mesh, history, ANSWER_TOKENS)
            if turn >= 1:  # The first turn warms up.
                times.append(1e3 * first_s)
        row = FirstToken(system, length, spread(times), cached=True)
        yield first_token_row(mesh, row, request_id)


def first_token_row(mesh: MeshProcess, row: FirstToken, request_id: str) -> FirstToken:
    """Adds the timeline to a row, and prints that."""
    row.timeline = timeline(mesh, request_id)
    print(row.timeline, flush=True)
    return row


def ask(mesh: MeshProcess, prompt: list[int], num_tokens: int) -> tuple[float, str, list[int]]:
    """One request alone; seconds to its first token, its id and the tokens of its answer."""
    client, raw = RestClient(mesh.url), Raw()
    with new_runner() as runner:
        body = client.encode(prompt, num_tokens, return_token_ids=True)
        runner.run(client.exchange(body, raw, None))
    events = [(message, time_s) for message, time_s in messages(raw) if message.get("choices")]
    answer = [
        token
        for message, _ in events
        for choice in message["choices"]
        for token in choice.get("token_ids") or []
    ]
    return events[0][1] - raw.sent_s, events[0][0]["id"], answer


def timeline(mesh: MeshProcess, request_id: str) -> str:
    """Output of `weft trace --timeline` for a request."""
    time.sleep(0.5)  # Spans are recorded when their work has ended.
    command = [*WEFT, "trace", request_id, "--address", mesh.grpc_address, "--timeline"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "160"},
    )
    return done.stdout or done.stderr


def loads_of(section: str, system: str, options: argparse.Namespace) -> list[list[str]]:
    """Flags of `load.py`, one list a run, for the section."""
    common = ["--processes", str(options.processes), "--vocab", str(options.vocab)]
    seconds = ["--seconds", str(options.seconds), *common]
    if section in ("rate", "mixed"):
        prompt = ["2048"] if section == "rate" else ["500", "8000"]
        load_of_rate = ["--prompt", *prompt, "--tokens", "200", *seconds]
        rates = options.rates if section == "rate" else options.mixed_rates
        return [["--rate", str(rate), *load_of_rate] for rate in rates]
    if section == "burst":
        more = ["--repeats", str(options.repeats), "--prompt", "512", "--tokens", "256", *common]
        return [["--burst", str(count), *more] for count in options.bursts]
    if section == "goodput":
        return [
            [
                *("--name", f"{system} {prompt} + {tokens}", *seconds),
                *("--prompt", str(prompt), "--tokens", str(tokens)),
                *("--rate", str(rate)),
            ]
            for prompt, tokens, rates in options.shapes
            for rate in rates or options.rates
        ]
    if section == "agents":
        sessions = ["--sessions", str(options.sessions), "--session-rate", "1"]
        sessions += ["--turns", str(options.session_turns), "--pause", str(options.pause)]
        sessions += ["--seed", str(options.seed)]
        history = ["--history", *map(str, options.history), "--prompt", "200", "1500"]
        return [[*sessions, *history, "--tokens", "50", "200", *common]]
    return []


def run_load(flags: list[str], prints: bool = True) -> list[Row]:
    """Rows of `load.py`, in a process of its own: its clients then start without torch."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        script = Path(__file__).with_name("load.py")
        # The compared prompts have warmed the mesh up.
        more = ["--no-warm-up", "--json", out]
        output = None if prints else subprocess.DEVNULL
        subprocess.run([sys.executable, script, *flags, *more], stdout=output, check=False)
        return [Row(**row) for row in json.loads(out.read_text())["rows"]]


def measure(
    run: Run, section: str, system: str, mesh: MeshProcess, answers: Answers
) -> list[FirstToken]:
    """One section of one system."""
    options = run.options
    if system not in answers:
        answers[system] = answers_of(mesh, prompts_of(CHECKED, options.vocab, 3))
    rows: list[FirstToken] = []
    if section in ("handover", "turns"):
        measured = first_tokens if section == "handover" else cached_turns
        for row in measured(mesh, system, options):
            rows.append(row)
            run.row(row, table="first tokens")
    for flags in loads_of(section, system, options):
        for load in run_load(["--url", mesh.url, "--name", system, *flags]):
            run.row(load, table=section)
            if load.failed:
                run.fail(f"{load.name}: {load.failed} failed: {load.errors}")
    return rows


def measure_all(run: Run, model: Path) -> Answers:
    """Every section of every system."""
    options, answers, rows = run.options, Answers(), list[FirstToken]()
    began = time.monotonic()
    systems = list(options.sections_of)
    groups = [systems] if options.together else [[system] for system in systems]
    for group in groups:
        with ExitStack() as stack:
            meshes = {name: stack.enter_context(mesh_of(name, model, options)) for name in group}
            for name, mesh in meshes.items():
                mesh.wait_until_ready()
                print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
            stack.enter_context(FileLock(options.lock) if options.lock else nullcontext())
            for section in SECTIONS:
                for name, mesh in meshes.items():
                    if section in options.sections_of[name]:
                        rows += measure(run, section, name, mesh, answers)
        began = time.monotonic()
    show_handover(run, rows)
    return answers


def show_handover(run: Run, rows: list[FirstToken]) -> None:
    """Prints what shipping costs beside a whole worker."""

    def of(row: FirstToken) -> tuple[int, bool]:
        return row.prompt_tokens, row.cached

    whole = {of(row): row for row in rows if row.system.startswith("whole")}
    for row in rows:
        if not row.system.startswith("whole") and of(row) in whole:
            more = row.ms.median - whole[of(row)].ms.median
            what = "tokens of history" if row.cached else "tokens"
            run.note(f"{row.system} minus whole, {row.prompt_tokens} {what}: {more:+.1f} ms")


def judge(run: Run, model: Path, found: Answers) -> None:
    """Compares the systems' answers; answers that differ are compared with transformers in
    float32.
    """
    options = run.options
    prompts = prompts_of(CHECKED, options.vocab, 3)
    by_prompt = list(zip(prompts, *found.values(), strict=True))
    others = [
        Answer(prompt, tokens)
        for prompt, *answers in by_prompt
        if any(answer != answers[0] for answer in answers)
        for tokens in answers
    ]
    num_equal = sum(all(answer == answers[0] for answer in answers) for _, *answers in by_prompt)
    run.note(f"the systems' tokens are equal for {num_equal} of {len(prompts)} prompts")
    if not others or not options.reference:
        return
    device = options.device.split(",")[0]
    agreement = check_tokens(model, ModelConfig.load(model), others, device)
    run.note(f"those that differ, against float32: {agreement}")
    if not agreement.is_close:
        run.fail("wrong tokens")


def system_of(text: str) -> tuple[str, tuple[str, ...]]:
    """`SYSTEM` or `SYSTEM:SECTION,...`."""
    name, _, sections = text.partition(":")
    chosen = tuple(sections.split(",")) if sections else ()
    if name not in SYSTEMS or not set(chosen) <= set(SECTIONS):
        raise argparse.ArgumentTypeError(
            f"{text}: one of {', '.join(SYSTEMS)}, with sections of its own behind a colon"
        )
    return name, chosen


def shape_of(text: str) -> tuple[int, int, tuple[float, ...]]:
    """`PROMPT+TOKENS` or `PROMPT+TOKENS@RATE,...`."""
    lengths, _, rates = text.partition("@")
    prompt, tokens = map(int, lengths.split("+"))
    return prompt, tokens, tuple(map(float, rates.split(","))) if rates else ()


harness = Harness(__file__, __doc__)
harness.flag("sections", nargs="+", choices=SECTIONS)
harness.flag("--systems", nargs="+", type=system_of, default=[("whole", ()), ("apart", ())])
harness.flag("--together", action="store_true", help="start all systems at once")
harness.flag("--lock", type=Path, help="file; calls that name it measure in turn")
harness.flag("--model", choices=[*MODELS, "tiny"], default="llama-3.1-8b")
harness.flag("--layers", type=int, help="of the model; default its own number")
harness.flag("--device", default="cuda:0,cuda:1")
harness.flag("--dtype", default="bfloat16")
harness.flag("--vocab", type=int, default=49_152)
harness.flag("--tokenizer", type=Path, help="folder of its files; default the demo model's")
harness.flag("--prompts", type=int, nargs="+", default=[512, 2048, 8192])
harness.flag("--turns", type=int, default=9, help="of each length or history alone")
harness.flag("--rates", type=float, nargs="+", default=[16.0])
harness.flag("--mixed-rates", type=float, nargs="+", default=[8.0])
harness.flag("--seconds", type=float, default=20.0)
harness.flag("--bursts", type=int, nargs="+", default=[1, 16, 64, 256])
harness.flag("--repeats", type=int, default=3, help="of bursts")
harness.flag(
    "--shapes",
    nargs="+",
    type=shape_of,
    default=[(2048, 200, ()), (8192, 400, ())],
    help="of goodput: prompt+new tokens, as in 8192+400, or with rates of its own 8192+400@2,4",
)
harness.flag("--sessions", type=int, default=8, help="of agents, one begun a second")
harness.flag("--history", type=int, nargs=2, default=[8000, 64_000], help="tokens of first turns")
harness.flag("--seed", type=int, default=1, help="of the sessions")
harness.flag(
    "--histories", type=int, nargs="+", default=[8000, 32_000, 64_000], help="of turns, tokens"
)
harness.flag("--session-turns", type=int, default=6)
harness.flag("--pause", type=float, default=1.0, help="mean seconds between turns")
harness.flag("--processes", type=int, default=8)
harness.flag("--prefix-cache", action="store_true", help="keep caches on")
harness.flag("--prefill-args", default="", help="further flags of prefill workers")
harness.flag("--decode-args", default="", help="further flags of decode workers")
harness.flag("--up-args", default="", help="further flags of `weft up`")
harness.flag(
    "--reference",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="compare answers that differ with a float32 reference",
)


@harness.part
def apart(run: Run) -> None:
    """The sections that are named, of all systems."""
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
    model = make_model(folder, run.options)
    judge(run, model, measure_all(run, model))


@harness.check
def complete(options: argparse.Namespace) -> None:
    """The sections of each system, which must have the devices that they need."""
    options.sections_of = {name: own or options.sections for name, own in options.systems}
    num_devices = len(options.device.split(","))
    for name in options.sections_of:
        if "{half}" in SYSTEMS[name] and num_devices % 2:
            harness.error(f"--device: {name} needs an even number of devices, not {num_devices}")


if __name__ == "__main__":
    sys.exit(harness.main())
