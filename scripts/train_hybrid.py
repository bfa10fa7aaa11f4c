"""Trains a small model with recurrent layers and an MTP head, on text that the demo model writes.

    python scripts/train_hybrid.py generate --model demo --out TEXTS
    python scripts/train_hybrid.py prepare --texts TEXTS --data DATA
    python scripts/train_hybrid.py train --data DATA --run RUN --out MODEL
    python scripts/train_hybrid.py curves RUN/log.json --out MODEL/curves.png
    python scripts/train_hybrid.py measure MODEL --json FILE

`generate` writes .jsonl files of prompts and answers; it can run several times at once with
different --worker. `train` goes on where it was stopped. The model has Qwen3.5's form: gated delta
nets, and attention in every fourth layer. models/tales-10m/README.md has the commands that made it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from hybrid_training.export import export, load
from hybrid_training.model import HybridLM, Shape
from hybrid_training.texts import load_split, load_turns, prepare, save_turns
from hybrid_training.training import Settings, Trainer, held_out_losses
from hybrid_training.writing import Script, chat, is_held_out, write
from parts import missing_parts
from transformers import AutoTokenizer
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM, GeneratedSample

HELD_OUT_BATCHES = 8
DRAFTS = (1, 2, 3)
SHOWN = 4
"""Answers that `measure` prints."""


def tell(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def generate(arguments: argparse.Namespace) -> None:
    """Writes shards of turns until there are enough or the time is over; those there stay."""
    parts = missing_parts(
        arguments.out / "turns.jsonl",
        arguments.shards,
        worker=arguments.worker,
        seed=arguments.seed,
        end_s=time.monotonic() + arguments.max_seconds,
    )
    model = resolve_model(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with LLM(
        model,
        device=arguments.device,
        dtype=arguments.dtype,
        max_running_requests=arguments.batch,
        max_waiting_requests=1 << 16,
        max_step_tokens=max(2048, arguments.batch),
        prefill_chunk_tokens=512,
        kv_memory_bytes=arguments.kv_mib << 20,
        num_threads=arguments.threads,
        cuda_graphs=not arguments.eager,
    ) as llm:
        for path, seed in parts:
            began = time.monotonic()
            script = Script(seed)
            prompts = [script.prompt() for _ in range(arguments.turns)]
            turns = write(llm, tokenizer, prompts, seed, arguments.max_tokens, arguments.batch)
            save_turns(path, turns)
            characters = sum(len(turn.answer) for turn in turns)
            speed = characters / (time.monotonic() - began)
            tell(f"{path.name}: {len(turns)} turns, {characters} characters, {speed:.0f} a s")


def prepare_texts(arguments: argparse.Namespace) -> None:
    """Trains the tokenizer unless it is there, and writes the texts as token ids."""
    turns = load_turns(arguments.texts)
    sizes = prepare(turns, arguments.vocabulary, arguments.data)
    tell(f"{len(turns)} turns, {sizes} tokens")


def train(arguments: argparse.Namespace) -> None:
    """Trains the model and writes it with its log."""
    shape = Shape(vocab_size=arguments.vocabulary, num_hidden_layers=arguments.layers)
    torch.manual_seed(arguments.seed)
    model = HybridLM(shape)
    if arguments.start:
        load(model, arguments.start)
    model.to(arguments.device)
    settings = Settings(
        steps=arguments.steps,
        seconds=arguments.seconds,
        batch=arguments.batch,
        length=arguments.length,
        learning_rate=arguments.lr,
        seed=arguments.seed,
    )
    texts, held_out = (load_split(arguments.data, split) for split in ("train", "held-out"))
    tell(f"{sum(p.numel() for p in model.parameters())} parameters, {len(texts)} texts; {settings}")
    trainer = Trainer(model, texts, settings, arguments.run, is_compiled=arguments.compile)
    tokenizer = arguments.data / "tokenizer.json"

    def checkpointed() -> dict[str, Any]:
        found = held_out_losses(model, held_out, settings, HELD_OUT_BATCHES)
        tell(f"{trainer.log[-1]} held out {found}")
        export(model, tokenizer, arguments.out)
        log = [*trainer.log[:-1], {**trainer.log[-1], "held_out": found}]
        content = {"settings": asdict(settings), "shape": asdict(shape), "log": log}
        (arguments.run / "log.json").write_text(json.dumps(content) + "\n")
        return {"held_out": found}

    trainer.run(arguments.log_steps, arguments.checkpoint_seconds, checkpointed)
    export(model, tokenizer, arguments.out)


def curves(arguments: argparse.Namespace) -> None:
    """Draws the log of a training."""
    from hybrid_training.curves import draw

    draw(json.loads(arguments.log.read_text()), arguments.out)


def measure(arguments: argparse.Namespace) -> None:
    """Has a trained model answer held-out prompts, and tells how many drafts are accepted."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    script = Script(arguments.seed)
    drawn = (script.prompt() for _ in range(1 << 20))
    prompts = list(islice(filter(is_held_out, drawn), arguments.prompts))
    ids = tokenizer(chat(tokenizer, prompts), add_special_tokens=False)["input_ids"]
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 0.7):
        sampling = [
            SamplingParams(temperature=temperature, seed=arguments.seed + number)
            for number in range(len(ids))
        ]
        for num_drafts in DRAFTS:
            with LLM(
                arguments.model,
                device=arguments.device,
                dtype=arguments.dtype,
                drafter="mtp",
                draft_gate="fixed",
                max_draft_tokens=num_drafts,
                kv_memory_bytes=512 << 20,
                num_threads=arguments.threads,
            ) as llm:
                found = llm.generate(ids, sampling, StopCriteria(max_tokens=200))
            rows.append({"temperature": temperature, "drafts": num_drafts, **acceptance(found)})
            tell(str(rows[-1]))
        for prompt, answer in list(zip(prompts, found, strict=True))[:SHOWN]:
            tell(f"\n> {prompt}\n{tokenizer.decode(answer.token_ids)}\n")
    if arguments.json:
        content = {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "prompts": len(prompts),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def acceptance(samples: Sequence[GeneratedSample]) -> dict[str, float]:
    """Tokens a step of decoding (1 without drafts), and the share of drafts that were accepted."""
    timelines = [sample.timeline for sample in samples if sample.timeline is not None]
    accepted = sum(timeline.num_accepted_tokens for timeline in timelines)
    drafted = sum(timeline.num_drafted_tokens for timeline in timelines)
    # The first token comes of the prompt's step.
    decoded = sum(len(sample.token_ids) - 1 for sample in samples)
    return {
        "tokens": decoded,
        "tokens_per_step": round(decoded / (decoded - accepted), 3),
        "accepted": round(accepted / drafted, 3),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"

    def command(name: str, run: Any) -> argparse.ArgumentParser:
        part = commands.add_parser(name, help=run.__doc__)
        part.set_defaults(call=run)
        part.add_argument("--device", default=default_device)
        part.add_argument("--seed", type=int, default=0)
        return part

    part = command("generate", generate)
    part.add_argument("--model", default="demo", help="demo, its GGUF file or directory")
    part.add_argument("--dtype", default="bfloat16")
    part.add_argument("--threads", type=int, default=None)
    part.add_argument("--out", type=Path, required=True)
    part.add_argument("--worker", type=int, default=0, help="each process its own number")
    part.add_argument("--shards", type=int, default=1000)
    part.add_argument("--turns", type=int, default=4096, help="of a shard")
    part.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    part.add_argument("--batch", type=int, default=1024, help="texts written at once")
    part.add_argument("--eager", action="store_true", help="no CUDA graphs: a shorter start")
    part.add_argument("--kv-mib", type=int, default=8192, help="KV memory of the engine")
    part.add_argument("--max-seconds", type=float, default=1e9, help="no shard begins after them")

    part = command("prepare", prepare_texts)
    part.add_argument("--texts", type=Path, required=True)
    part.add_argument("--data", type=Path, required=True, help="folder of token ids")
    part.add_argument("--vocabulary", type=int, default=Shape().vocab_size)

    part = command("train", train)
    part.add_argument("--data", type=Path, required=True)
    part.add_argument("--run", type=Path, required=True, help="folder of checkpoints")
    part.add_argument("--out", type=Path, required=True, help="folder of the model")
    part.add_argument("--start", type=Path, help="a trained model to go on with")
    part.add_argument("--vocabulary", type=int, default=Shape().vocab_size)
    part.add_argument("--layers", type=int, default=Shape().num_hidden_layers)
    part.add_argument("--steps", type=int, default=100_000)
    part.add_argument("--seconds", type=float, default=float("inf"), help="of training in all")
    part.add_argument("--batch", type=int, default=64, help="rows of a batch")
    part.add_argument("--length", type=int, default=512, help="tokens of a row")
    part.add_argument("--lr", type=float, default=2.5e-3, help="highest learning rate")
    part.add_argument("--log-steps", type=int, default=25)
    part.add_argument("--checkpoint-seconds", type=float, default=60.0)
    part.add_argument("--compile", action="store_true", help="compile the steps of training")

    part = command("curves", curves)
    part.add_argument("log", type=Path, help="log.json of a run")
    part.add_argument("--out", type=Path, required=True, help="PNG")

    part = command("measure", measure)
    part.add_argument("model", type=Path)
    part.add_argument("--dtype", default="float32")
    part.add_argument("--threads", type=int, default=None)
    part.add_argument("--prompts", type=int, default=64, help="held-out ones")
    part.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
