"""Trains an EAGLE-3 draft head for a model, on text that the model itself writes.

    python scripts/train_draft.py generate --out TEXTS
    python scripts/train_draft.py generate --held-out --out HELD_OUT
    python scripts/train_draft.py train --texts TEXTS --held-out HELD_OUT --run RUN --out HEAD
    python scripts/train_draft.py cut HEAD --texts TEXTS --vocabulary 4096 --out SMALLER
    python scripts/train_draft.py measure HEAD [--adapter DRAFT] --held-out HELD_OUT --json FILE
    python scripts/train_draft.py merge ADAPTER --out MERGED
    python scripts/train_draft.py adapt HEAD --model MERGED --texts TEXTS --held-out HELD_OUT \\
        --run RUN --out ADAPTER/draft

`generate` writes .npz files of prompts and answers; it can run several times at once with different
--worker. `train` goes on where it was stopped. Acceptance is measured on greedy answers to the
prompts of scripts/draft_training/held_out.json, which `held-out` has the model write.
drafts/smollm2-135m-eagle3/README.md has the commands of the demo model's head.

`adapt` makes a draft adapter: LoRA on the head, for requests with an adapter of the model. Texts
for it come from `generate --model MERGED`, MERGED being the model with that adapter in its weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from draft_training.curves import draw
from draft_training.head import DraftHead, HeadShape
from draft_training.layout import load_head, save_head, with_vocabulary
from draft_training.lora import add_lora, merge_lora, save_lora
from draft_training.measure import (
    DEPTHS,
    measure_grown,
    measure_head,
    measure_lookup,
    measure_trees,
)
from draft_training.target import Target
from draft_training.texts import Text, count_answers, load_texts, save_texts
from draft_training.training import Trainer, TrainingSettings
from draft_training.trees import NUM_NODES
from draft_training.vocabulary import choose, coverage
from draft_training.writing import Writer, answer_held_out, write_held_out, write_round
from parts import missing_parts
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from weft.checkpoint.resolve import resolve_model
from weft.engine.loop.llm import LLM

HELD_OUT = Path(__file__).with_name("draft_training") / "held_out.json"
SIZES = (2048, 4096, 8192, 16384)
"""Of draft vocabularies, whose coverage is told."""

console = Console()


def open_llm(arguments: argparse.Namespace, model: Path) -> LLM:
    """An engine that writes many texts at once."""
    batch = arguments.batch
    return LLM(
        model,
        device=arguments.device,
        dtype=arguments.dtype,
        max_running_requests=batch,
        max_waiting_requests=1 << 16,
        max_step_tokens=max(2048, batch),
        prefill_chunk_tokens=512,
        kv_memory_bytes=arguments.kv_gib << 30,
        num_threads=arguments.threads,
    )


def open_target(arguments: argparse.Namespace, model: Path) -> Target:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return Target(model, getattr(torch, arguments.dtype), torch.device(arguments.device))


def generate(arguments: argparse.Namespace, model: Path) -> None:
    """Rounds of texts until there are enough or the time is over; rounds that are there stay."""
    parts = missing_parts(
        arguments.out / "texts.npz",
        arguments.rounds,
        worker=arguments.worker,
        seed=arguments.seed,
        end_s=time.monotonic() + arguments.max_seconds,
    )
    with open_llm(arguments, model) as llm:
        tokenizer = AutoTokenizer.from_pretrained(model)
        writer = Writer(llm, tokenizer, arguments.max_answer_tokens)
        if arguments.held_out:
            save_texts(arguments.out / "held-out.npz", answer_held_out(writer, HELD_OUT))
            return
        for path, seed in parts:
            began = time.monotonic()
            texts = write_round(writer, arguments.answers, seed)
            save_texts(path, texts)
            written = sum(len(text.tokens) - text.num_prompt for text in texts)
            speed = written / (time.monotonic() - began)
            console.print(f"{path.name}: {len(texts)} answers, {written} tokens, {speed:.0f} a s")


def held_out(arguments: argparse.Namespace, model: Path) -> None:
    """Writes the held-out prompts anew."""
    with open_llm(arguments, model) as llm:
        write_held_out(Writer(llm, AutoTokenizer.from_pretrained(model)), HELD_OUT)


def read_texts(folder: Path, max_length: int) -> list[Text]:
    """The texts of a folder that are not too long; an answer that is cut still teaches."""
    texts = [text for text in load_texts(folder) if text.num_prompt < len(text.tokens)]
    texts = [text for text in texts if len(text.tokens) <= max_length]
    if not texts:
        raise SystemExit(f"{folder}: no texts; write some with `generate --out {folder}`")
    return texts


def draft_vocabulary(arguments: argparse.Namespace, model: Path, target: Target) -> torch.Tensor:
    """The token ids that a head is to name, chosen by the texts; tells what sizes would cover."""
    texts = read_texts(arguments.texts, arguments.max_length)
    counts = count_answers(texts, target.config.vocab_size)
    for size in SIZES:
        console.print(f"vocabulary {size}: {coverage(counts, choose(counts, size, ())):.4%}")
    special = AutoTokenizer.from_pretrained(model).all_special_ids
    return choose(counts, arguments.vocabulary, special).to(target.device)


def train_to_end(
    trainer: Trainer, held_out: list[Text], checkpoint_steps: int, keep: Callable[[], None]
) -> None:
    """Trains to the end; at each checkpoint tells what the head gains and has it written."""

    def evaluate() -> dict[str, Any]:
        gained = measure_head(trainer.head, trainer.target, held_out)
        console.print(f"step {trainer.step}: {trainer.log[-1]} {gained}")
        keep()
        return {"tokens_per_step": gained}

    trainer.run(checkpoint_steps, evaluate)
    keep()  # also of a run that had ended before


def train(arguments: argparse.Namespace, model: Path) -> None:
    """Trains a head and writes it with its curves."""
    held_out = read_texts(arguments.held_out, arguments.max_length)
    target = open_target(arguments, model)
    texts = read_texts(arguments.texts, arguments.max_length)
    token_ids = draft_vocabulary(arguments, model, target)
    shape = HeadShape.of(target.config, len(token_ids))
    head = DraftHead(shape, token_ids, target.embedding, target.lm_head)
    head.initialise(torch.Generator().manual_seed(arguments.seed))
    head.to(target.device)
    settings = TrainingSettings(
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        learning_rate=arguments.lr,
        warmup_steps=min(100, arguments.steps // 10),
        chain=arguments.chain,
        prompt_weight=arguments.prompt_weight,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    written = sum(len(text.tokens) - text.num_prompt for text in texts)
    console.print(f"{len(texts)} texts, {written} tokens of answers; {settings}")
    trainer = Trainer(head, target, texts, settings, arguments.run)

    def keep() -> None:
        save_head(head, target, arguments.out)
        draw(trainer.log, arguments.out / "curves.png")

    train_to_end(trainer, held_out, arguments.checkpoint_steps, keep)
    (arguments.out / "log.json").write_text(json.dumps(trainer.log))


def merge(arguments: argparse.Namespace, model: Path) -> None:
    """Writes the model with an adapter in its weights."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, arguments.adapter).merge_and_unload()
    merged.to(getattr(torch, arguments.dtype)).save_pretrained(arguments.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, arguments.out)
    AutoTokenizer.from_pretrained(model).save_pretrained(arguments.out)


def adapt(arguments: argparse.Namespace, model: Path) -> None:
    """Trains a draft adapter for a merged model and tells what it gains."""
    held_out = read_texts(arguments.held_out, arguments.max_length)
    texts = read_texts(arguments.texts, arguments.max_length)
    target = open_target(arguments, model)
    head = load_head(arguments.head, target)
    before = measure_head(head, target, held_out)
    console.print(f"without: {before}")
    added = add_lora(head, arguments.rank, arguments.alpha, arguments.seed)
    settings = TrainingSettings(
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        learning_rate=arguments.lr,
        warmup_steps=min(100, arguments.steps // 10),
        chain=arguments.chain,
        seed=arguments.seed,
    )
    trainer = Trainer(head, target, texts, settings, arguments.run)
    train_to_end(
        trainer,
        held_out,
        arguments.checkpoint_steps,
        lambda: save_lora(added, arguments.alpha, arguments.out),
    )
    if arguments.json:
        content = {"before": before, "depths": list(DEPTHS), "log": trainer.log}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def cut(arguments: argparse.Namespace, model: Path) -> None:
    """Writes a head with another draft vocabulary; nothing is trained again."""
    target = open_target(arguments, model)
    token_ids = draft_vocabulary(arguments, model, target)
    head = with_vocabulary(load_head(arguments.head, target), target, token_ids)
    save_head(head, target, arguments.out)


def print_tokens(
    what: str, columns: Sequence[int], found: Mapping[str, Mapping[str, Sequence[float]]]
) -> None:
    """Tokens a step of drafts, by kind of text."""
    table = Table(title=f"tokens a step by {what}", box=None)
    for column in ("draft", "kind", *map(str, columns)):
        table.add_column(column)
    for draft, kinds in found.items():
        for kind, values in kinds.items():
            table.add_row(draft, kind, *(f"{value:.2f}" for value in values))
    console.print(table)


def report(arguments: argparse.Namespace, model: Path) -> None:
    """Measures a written head."""
    texts = read_texts(arguments.held_out, arguments.max_length)
    target = open_target(arguments, model)
    head = load_head(arguments.head, target)
    if arguments.adapter:
        merge_lora(head, arguments.adapter)
    found = measure_trees(head, target, texts, arguments.width)
    found["ngram"] = measure_lookup(texts)
    print_tokens("depth of the draft", DEPTHS, found)
    grown = measure_grown(head, target, texts, arguments.width) if arguments.grow else {}
    if grown:
        print_tokens("nodes of the tree", NUM_NODES, grown)
    if arguments.json:
        content = {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "model": arguments.model,
            "head": str(arguments.head),
            "draft_adapter": str(arguments.adapter) if arguments.adapter else None,
            "draft_vocab_size": head.shape.draft_vocab_size,
            "texts": len(texts),
            "depths": list(DEPTHS),
            **found,
            "nodes": list(NUM_NODES),
            "grown": grown,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any) -> argparse.ArgumentParser:
        part = commands.add_parser(name, help=run.__doc__)
        part.set_defaults(call=run)
        part.add_argument("--model", default="demo", help="demo, or a Hugging Face directory")
        part.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        part.add_argument("--dtype", default="bfloat16", help="of the model: bfloat16, float32")
        part.add_argument("--threads", type=int, default=None)
        part.add_argument("--batch", type=int, default=256, help="texts written at once")
        part.add_argument("--kv-gib", type=int, default=8, help="KV memory of the engine")
        part.add_argument("--max-length", type=int, default=1024, help="longer texts are left out")
        part.add_argument("--seed", type=int, default=0)
        return part

    part = command("generate", generate)
    part.add_argument("--out", type=Path, required=True)
    part.add_argument("--worker", type=int, default=0, help="each process its own number")
    part.add_argument("--rounds", type=int, default=1000)
    part.add_argument("--answers", type=int, default=2000, help="a round, about")
    part.add_argument("--max-answer-tokens", type=int, default=256)
    part.add_argument("--held-out", action="store_true", help="answer the held-out prompts only")
    part.add_argument("--max-seconds", type=float, default=1e9, help="no round begins after them")

    command("held-out", held_out)

    part = command("train", train)
    part.add_argument("--texts", type=Path, required=True)
    part.add_argument("--held-out", type=Path, required=True, help="folder of their answers")
    part.add_argument("--run", type=Path, required=True, help="folder of checkpoints")
    part.add_argument("--out", type=Path, required=True, help="folder of the head")
    part.add_argument("--vocabulary", type=int, default=8192, help="tokens of the draft")
    part.add_argument("--steps", type=int, default=4000, help="batches")
    part.add_argument("--batch-tokens", type=int, default=16_384)
    part.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    part.add_argument("--chain", type=int, default=5, help="steps of training-time test")
    part.add_argument("--prompt-weight", type=float, default=0.0)
    part.add_argument(
        "--temperature", type=float, default=1.0, help="of the target's probabilities"
    )
    part.add_argument("--checkpoint-steps", type=int, default=500)

    part = command("merge", merge)
    part.add_argument("adapter", type=Path)
    part.add_argument("--out", type=Path, required=True, help="folder of the model")

    part = command("adapt", adapt)
    part.add_argument("head", type=Path)
    part.add_argument("--texts", type=Path, required=True)
    part.add_argument("--held-out", type=Path, required=True, help="folder of their answers")
    part.add_argument("--run", type=Path, required=True, help="folder of checkpoints")
    part.add_argument("--out", type=Path, required=True, help="folder of the draft adapter")
    part.add_argument("--rank", type=int, default=16)
    part.add_argument("--alpha", type=float, default=32.0)
    part.add_argument("--steps", type=int, default=400, help="batches")
    part.add_argument("--batch-tokens", type=int, default=16_384)
    part.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    part.add_argument("--chain", type=int, default=5, help="steps of training-time test")
    part.add_argument("--checkpoint-steps", type=int, default=100)
    part.add_argument("--json", type=Path)

    part = command("cut", cut)
    part.add_argument("head", type=Path)
    part.add_argument("--texts", type=Path, required=True)
    part.add_argument("--vocabulary", type=int, default=8192, help="tokens of the draft")
    part.add_argument("--out", type=Path, required=True, help="folder of the new head")

    part = command("measure", report)
    part.add_argument("head", type=Path)
    part.add_argument("--held-out", type=Path, required=True, help="folder of their answers")
    part.add_argument("--adapter", type=Path, help="folder of a draft adapter for the head")
    part.add_argument("--width", type=int, default=4, help="children of a node in trees")
    part.add_argument("--grow", action="store_true", help="trees behind each position; minutes")
    part.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    arguments.call(arguments, resolve_model(arguments.model))


if __name__ == "__main__":
    main()
