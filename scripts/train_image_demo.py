"""Trains the demo model's image tower: a SigLIP and a connector in SmolVLM's form, on a language
model that stays as it is, from scenes of the pictures in an npm package.

    npm pack emoji-datasource-google@16.0.0 && tar xzf emoji-datasource-google-16.0.0.tgz
    python scripts/train_image_demo.py --emoji package --minutes 9 --out TOWER

Rows of the tower first learn to name what is at their place, by the language model's embeddings of
its name; then the tower learns from the language model's answers to questions on whole scenes.
TOWER gets tower.safetensors, tower.json (what joins it to the language model) and results.json, for
500 scenes of each kind that were not trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from image_training.questions import NUMBERS, TAKEN, Chats, ask
from image_training.scenes import MOST, Scene, draw, labels, random_scene
from image_training.things import Thing, all_things, load_pictures
from image_training.tower import SIDE, build, rows_of, tower_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from weft.checkpoint.resolve import resolve_model

LENGTH = 168
"""Tokens of a chat, padding included."""


class Names(nn.Module):
    """Scores of what is at each row's place, from the language model's embeddings of names."""

    def __init__(self, embeddings: torch.Tensor, ids: Sequence[Sequence[int]]) -> None:
        super().__init__()
        means = torch.stack([embeddings[list(one)].float().mean(0) for one in ids])
        self.register_buffer("names", F.normalize(means, dim=1))
        self.scale = nn.Parameter(torch.tensor(20.0))
        self.nothing = nn.Parameter(torch.tensor(0.3))

    def forward(self, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        scores = F.normalize(rows.float(), dim=-1) @ self.names.t()
        nothing = self.nothing.expand(*scores.shape[:-1], 1)
        scores = self.scale * torch.cat((nothing, scores), -1)
        weight = torch.ones(scores.shape[-1], device=scores.device)
        weight[0] = 0.15
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), weight)


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.options = options.device, options
        model_dir = resolve_model(options.model)
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.tokenizer = tokenizer
        self.things = all_things()
        self.pictures = load_pictures(options.emoji, self.things).to(self.device)
        torch.manual_seed(options.seed)
        self.model = build(model_dir, options.width, options.layers, self.device)
        self.text = self.model.model.text_model
        self.chats = Chats(tokenizer, SIDE**2)
        self.embeddings = self.model.get_input_embeddings().weight.detach()
        ids = [tokenizer.encode(f" {one.name}").ids for one in self.things]
        self.names = Names(self.embeddings, ids).to(self.device)
        parts = [*self.model.model.vision_model.parameters()]
        parts += [*self.model.model.connector.parameters(), *self.names.parameters()]
        self.optimizer = torch.optim.AdamW(parts, lr=0.0, betas=(0.9, 0.98), weight_decay=0.05)
        self.parts = parts
        self.dice = random.Random(options.seed)
        self.log: list[dict[str, float]] = []
        if options.compile:
            for layer in (*self.text.layers, *self.model.model.vision_model.encoder.layers):
                layer.compile(dynamic=False)

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return rows_of(self.model, pixels)

    def name_loss(self, scenes: Sequence[Scene], rows: torch.Tensor) -> torch.Tensor:
        wanted = labels(scenes, SIDE).to(self.device, non_blocking=True)
        loss: torch.Tensor = self.names(rows, wanted)
        return loss

    def answer_loss(self, scenes: Sequence[Scene], rows: torch.Tensor) -> torch.Tensor:
        chats = [self.chats.of(ask(self.dice, scene, self.things)) for scene in scenes]
        tokens = torch.zeros(len(chats), LENGTH, dtype=torch.int64)
        places = []
        for number, (row, chat) in enumerate(zip(tokens, chats, strict=True)):
            row[: len(chat.tokens)] = torch.tensor(chat.tokens[:LENGTH])
            places += [number * LENGTH + at for at in chat.answers if at < LENGTH]
        tokens, at = tokens.to(self.device), torch.tensor(places, device=self.device)
        begin = chats[0].image
        text = F.embedding(tokens, self.embeddings)
        end = begin + rows.shape[1]
        given = torch.cat((text[:, :begin], rows.to(text.dtype), text[:, end:]), 1)
        states = self.text(inputs_embeds=given, use_cache=False).last_hidden_state
        states = states.flatten(0, 1)[at - 1]
        return F.cross_entropy((states @ self.embeddings.t()).float(), tokens.flatten()[at])

    def step(self, rate: float, name_share: float, *, answers: bool) -> torch.Tensor:
        scenes = [random_scene(self.dice, len(self.things)) for _ in range(self.options.batch)]
        rows = self.rows(draw(scenes, self.pictures))
        loss = name_share * self.name_loss(scenes, rows)
        found = loss.detach()
        if answers:
            answer = self.answer_loss(scenes, rows)
            loss, found = loss + answer, answer.detach()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parts, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def run(self, stop: float, first_share: float) -> None:
        """Until the time `stop`; names alone for the first share of it."""
        began, number = time.monotonic(), 0
        told = began
        while (now := time.monotonic()) < stop:
            done = (now - began) / (stop - began)
            answers = done >= first_share
            warm = min(1.0, (number + 1) / 200)
            falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
            rate = self.options.rate * warm * falling
            share = 0.25 * (1 - done) if answers else 1.0
            loss = self.step(rate, share, answers=answers)
            number += 1
            if now - told > self.options.tell_s or number <= 2:
                told = now
                self.log.append({"seconds": now - began, "step": number, "loss": float(loss)})
                print(f"{now - began:6.0f} s, step {number}: {float(loss):.3f}", flush=True)

    # -- after training --------------------------------------------------------------------------

    @torch.inference_mode()
    def answer(self, scenes: Sequence[Scene], questions: Sequence[str]) -> list[str]:
        """Greedy answers, of at most 24 tokens."""
        chats = [self.chats.of([(question, "")]) for question in questions]
        rows = self.rows(draw(scenes, self.pictures)).to(self.embeddings.dtype)
        lengths = torch.tensor([len(chat.tokens) for chat in chats], device=self.device)
        tokens = torch.zeros(len(chats), LENGTH, dtype=torch.int64)
        for row, chat in zip(tokens, chats, strict=True):
            row[: len(chat.tokens)] = torch.tensor(chat.tokens)
        tokens, begin = tokens.to(self.device), chats[0].image
        at = torch.arange(len(chats), device=self.device)
        first = lengths.clone()
        for _ in range(24):
            given = F.embedding(tokens, self.embeddings)
            given[:, begin : begin + rows.shape[1]] = rows
            states = self.text(inputs_embeds=given, use_cache=False).last_hidden_state
            tokens[at, lengths] = (states[at, lengths - 1] @ self.embeddings.t()).argmax(-1)
            lengths += 1
        texts = []
        for row, begin_, end in zip(tokens.tolist(), first.tolist(), lengths.tolist(), strict=True):
            text = self.tokenizer.decode(row[begin_:end], skip_special_tokens=False)
            texts.append(text.partition("<|im_end|>")[0].strip())
        return texts

    def measure(self) -> dict[str, Any]:
        """Names of single things, and counts of one to four alike, in scenes never trained on."""
        torch.compiler.set_stance("force_eager")
        dice, count = random.Random(self.options.seed + 10**6), self.options.held_out
        torch.manual_seed(self.options.seed + 1)
        kinds = ("single", "same", "mixed")
        single, alike, mixed = (
            [random_scene(dice, len(self.things), kind) for _ in range(count)] for kind in kinds
        )
        things = self.things
        names = self._answers(single, ["What is in the picture?"] * count)
        asked = [f"How many {things[one.things[0]].plural} are there?" for one in alike]
        counts = self._answers(alike, asked)
        lists = self._answers(mixed, ["What is in the picture?"] * count)
        are_named = [
            _words(answer) == things[one.things[0]].with_article
            for one, answer in zip(single, names, strict=True)
        ]
        are_counted = [
            answer == f"{NUMBERS[len(one.things)]}."
            for one, answer in zip(alike, counts, strict=True)
        ]
        shares = [_share(one, things, text) for one, text in zip(mixed, lists, strict=True)]
        found: dict[str, Any] = {
            "names": sum(are_named) / count,
            "names by chance": 1 / len(things),
            "counts": sum(are_counted) / count,
            "counts by chance": 1 / MOST,
            "things named in mixed scenes": sum(shares) / count,
        }
        shown = [
            *zip(single, names, strict=True),
            *zip(alike, counts, strict=True),
            *zip(mixed, lists, strict=True),
        ]
        examples = [
            {"truth": [things[n].name for n in one.things], "answer": text}
            for one, text in shown[:: max(1, count // 8)]
        ]
        return {**found, "scenes": count, "examples": examples}

    def _answers(self, scenes: Sequence[Scene], questions: Sequence[str]) -> list[str]:
        texts, size = [], self.options.batch
        for begin in range(0, len(scenes), size):
            texts += self.answer(scenes[begin : begin + size], questions[begin : begin + size])
        return texts


def _words(text: str) -> str:
    return text.lower().strip(" .")


def _share(scene: Scene, things: Sequence[Thing], text: str) -> float:
    """Share of a scene's kinds whose names an answer has."""
    named = [things[one].name in text.lower() or things[one].plural in text for one in scene.kinds]
    return sum(named) / len(named)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo", help="language model: a directory, or demo")
    parser.add_argument("--emoji", type=Path, required=True, help="unpacked npm package")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--first-share", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tell-s", type=float, default=15.0, help="seconds between reports")
    parser.add_argument("--held-out", type=int, default=500, help="scenes of each kind to measure")
    parser.add_argument("--compile", action="store_true", help="compile layers")
    options = parser.parse_args()
    stop = time.monotonic() + 60 * options.minutes
    training = Training(options)
    training.run(stop, options.first_share)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(tower_weights(training.model), options.out / "tower.safetensors")
    config = training.model.config
    joined = {
        "language_model": "demo",
        "tokens": TAKEN,
        "config": {
            "architectures": ["SmolVLMForConditionalGeneration"],
            "model_type": "smolvlm",
            "vision_config": config.vision_config.to_diff_dict(),
            "scale_factor": config.scale_factor,
            "image_token_id": config.image_token_id,
        },
    }
    (options.out / "tower.json").write_text(json.dumps(joined, indent=1) + "\n")
    results = training.measure()
    print(json.dumps({name: one for name, one in results.items() if name != "examples"}))
    for example in results["examples"]:
        print(example)
    results["losses"] = training.log
    (options.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
