"""Trains the demo adapters, pirate and json, on the demo model: adapters/README.md has the command.

The text is made by `demo_adapter_text` from tables and templates. One thread of a CPU does it in
some minutes; the same seed gives the same text and the same order on every machine.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo_adapter_text import Example, as_json, examples, pirate
from peft import LoraConfig, get_peft_model
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from weft.checkpoint.resolve import resolve_model

ROOT = Path(__file__).resolve().parent.parent
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK, ALPHA = 8, 16
FIRST_LAYER = 15
"""Layers below stay as they are: training need not go back through them, and files are small."""
IGNORED = -100


@dataclass(frozen=True)
class Demo:
    """What one adapter learns, and on which projections."""

    speak: Callable[[Example, random.Random], str]
    targets: tuple[str, ...]


DEMOS = {
    "pirate": Demo(
        pirate, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ),
    "json": Demo(as_json, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
}


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a turn, and how many of them are the prompt."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return [*prompt_ids, *answer_ids, tokenizer.eos_token_id], len(prompt_ids)


def batches(
    turns: list[tuple[list[int], int]], size: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids, attention mask and labels without end; turns of like length stand together."""
    while True:
        order = sorted(range(len(turns)), key=lambda i: (len(turns[i][0]) // 8, rng.random()))
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        rng.shuffle(groups)
        for group in groups:
            width = max(len(turns[i][0]) for i in group)
            ids = torch.zeros((len(group), width), dtype=torch.long)
            mask = torch.zeros_like(ids)
            labels = torch.full_like(ids, IGNORED)
            for row, i in enumerate(group):
                tokens, start = turns[i]
                ids[row, : len(tokens)] = torch.tensor(tokens)
                mask[row, : len(tokens)] = 1
                labels[row, start : len(tokens)] = torch.tensor(tokens[start:])
            yield ids, mask, labels


def loss_of(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Mean cross entropy of the answers; logits are made for their positions alone."""
    causal = model.get_base_model()
    hidden = causal.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    labels = labels[:, 1:]
    is_answer = labels != IGNORED
    return torch.nn.functional.cross_entropy(causal.lm_head(hidden[is_answer]), labels[is_answer])


def train(name: str, arguments: argparse.Namespace, base: Path) -> Any:
    """Trains one adapter and returns PEFT's model."""
    demo = DEMOS[name]
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(demo.targets),
        layers_to_transform=list(range(FIRST_LAYER, model.config.num_hidden_layers)),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, settings)
    turns = [encode(tokenizer, e.question, demo.speak(e, rng)) for e in examples()]
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=arguments.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.lr, total_steps=arguments.steps, pct_start=0.1
    )
    feed = batches(turns, arguments.batch, rng)
    with Progress() as progress:
        task = progress.add_task(name, total=arguments.steps)
        for _ in range(arguments.steps):
            ids, mask, labels = next(feed)
            loss = loss_of(model, ids, mask, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.update(task, advance=1, description=f"{name}: loss {loss.item():.3f}")
    return model


def save(model: Any, folder: Path) -> None:
    """Writes PEFT's files in bfloat16, without the model card and the paths of this machine."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()
    path = folder / "adapter_model.safetensors"
    tensors = {key: tensor.to(torch.bfloat16) for key, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=sorted(DEMOS), help="pirate, json; both")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "adapters", help="folder of the adapters"
    )
    parser.add_argument("--steps", type=int, default=150, help="batches")
    parser.add_argument("--batch", type=int, default=8, help="turns in a batch")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - DEMOS.keys():
        parser.error(f"unknown adapters: {', '.join(sorted(unknown))}; known: {', '.join(DEMOS)}")
    torch.set_num_threads(arguments.threads)
    base = resolve_model("demo")
    for name in arguments.names:
        save(train(name, arguments, base), arguments.out / name)


if __name__ == "__main__":
    main()
