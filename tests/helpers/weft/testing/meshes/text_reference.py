"""What transformers makes of the mesh tests' prompts: greedy tokens, and the logits behind them.

Computed in float32, prompts of like lengths together, by the model's own `generate`, in a process
of its own: `python text_reference.py MODEL_DIR < JOBS`. Kept on disk, since that takes a while.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.contract.startup import no_collections
from weft.testing.meshes.mesh_prompts import MeshPrompt

NUM_TOP = 64
"""Logits kept of each position."""
MAX_PADDED = 64
"""Tokens by which the longest prompt of a batch may exceed twice the shortest one."""
Job = tuple[list[int], int, bool, str]
"""Prompt, largest number of new tokens, whether to go on past the end, file for the result."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One prompt's greedy continuation."""

    prompt_ids: list[int]
    token_ids: list[int]
    """Token ids up to the requested length, or to the end-of-sequence token, which is included."""
    top: list[list[tuple[int, float]]]
    """For each token the largest logits at its position, (token id, logit), largest first."""
    log_sum_exp: list[float]
    """For each token the log-sum-exp of all logits at its position."""

    def logit(self, position: int, token_id: int) -> float | None:
        """Logit of a token at the position of output token `position`; None if it is far down."""
        return dict(self.top[position]).get(token_id)

    def logprob(self, position: int, token_id: int) -> float | None:
        """Log-probability of a token at a position."""
        logit = self.logit(position, token_id)
        return None if logit is None else logit - self.log_sum_exp[position]


class TextReference:
    """References of one model, computed when they are first asked for.

    Args:
        model_dir: Hugging Face directory.
        folder: Where they are kept between runs.
    """

    def __init__(self, model_dir: Path, folder: Path) -> None:
        # Here, for those who import this module and need no reference.
        from transformers import AutoTokenizer

        self._model_dir = model_dir
        self._folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)

    @cached_property
    def eos_token_id(self) -> int:
        config = json.loads((self._model_dir / "generation_config.json").read_text())
        return int(config["eos_token_id"])

    @cached_property
    def _identity(self) -> str:
        """Changes with everything that the results depend on."""
        parts = [importlib.metadata.version(name) for name in ("torch", "transformers")]
        for path in sorted(self._model_dir.iterdir()):
            status = path.stat()
            parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
        return " ".join([*parts, str(NUM_TOP)])

    def prompt_ids(self, prompt: MeshPrompt) -> list[int]:
        """The prompt's tokens by transformers' own tokenizer and chat template."""
        if not prompt.is_chat:
            return list(self.tokenizer(prompt.text)["input_ids"])
        return list(
            self.tokenizer.apply_chat_template(
                prompt.as_messages(), add_generation_prompt=True, return_dict=False
            )
        )

    def of(self, prompt: MeshPrompt, num_tokens: int, *, ignore_eos: bool = False) -> Reference:
        """The greedy continuation of a prompt.

        Args:
            prompt: What is continued.
            num_tokens: Largest length.
            ignore_eos: Go on past the end-of-sequence token.
        """
        job = self._job(prompt, num_tokens, ignore_eos)
        path = Path(job[-1])
        if not path.exists():
            self._compute([job])
        content = json.loads(path.read_text())
        content["top"] = [[(int(i), float(v)) for i, v in row] for row in content["top"]]
        return Reference(**content)

    def prepare(self, cases: Iterable[tuple[MeshPrompt, int, bool]]) -> None:
        """Computes what is missing of many (prompt, num_tokens, ignore_eos), all in one go."""
        jobs = [self._job(*case) for case in cases]
        if missing := [job for job in jobs if not Path(job[-1]).exists()]:
            self._compute(missing)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that a client should see for these tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _job(self, prompt: MeshPrompt, num_tokens: int, ignore_eos: bool) -> Job:
        ids = self.prompt_ids(prompt)
        key = f"{self._identity} {num_tokens} {ignore_eos} {ids}".encode()
        name = hashlib.blake2b(key, digest_size=16).hexdigest()
        return ids, num_tokens, ignore_eos, str(self._folder / f"{name}.json")

    def _compute(self, jobs: list[Job]) -> None:
        command = [sys.executable, __file__, str(self._model_dir)]
        # One thread: the cores are wanted by a mesh and by other tests beside it.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, input=json.dumps(jobs), text=True, check=True, env=environment)


def is_near_tie(one: float, other: float, ulps: int = 4) -> bool:
    """Whether two logits are at most so many bfloat16 units of the larger one apart."""
    import math

    # A bfloat16 has 8 significant bits: frexp gives x = m * 2^e with m in [1/2, 1).
    exponent = math.frexp(max(one, other))[1]
    return abs(one - other) <= ulps * 2.0 ** (exponent - 8)


def _batches(jobs: Iterable[Job]) -> Iterator[list[list[Job]]]:
    """Jobs by prompt, of prompts of like lengths, so that little is padded.

    A step of many prompts costs little more than that of one: it reads the same weights. What is
    wanted of one prompt are beginnings of the same tokens.
    """
    of_prompt: dict[tuple[int, ...], list[Job]] = {}
    for job in jobs:
        of_prompt.setdefault(tuple(job[0]), []).append(job)
    batch: list[list[Job]] = []
    for own in sorted(of_prompt.values(), key=lambda own: (_num_tokens(own), len(own[0][0]))):
        if batch:
            first = batch[0]
            most = 2 * len(first[0][0]) + MAX_PADDED
            if _num_tokens(own) != _num_tokens(first) or len(own[0][0]) > most:
                yield batch
                batch = []
        batch.append(own)
    if batch:
        yield batch


def _num_tokens(jobs: Iterable[Job]) -> int:
    """Of the longest continuation."""
    return max(num_tokens for _, num_tokens, *_ in jobs)


def _continued(
    model: Any, batch: list[list[Job]], eos_token_id: int
) -> Iterator[tuple[Reference, str]]:
    """Continues a batch past all ends; returns each job's part with its file."""
    import torch

    prompts = [own[0][0] for own in batch]
    width = max(map(len, prompts))
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt_ids in enumerate(prompts):
        ids[row, width - len(prompt_ids) :] = torch.tensor(prompt_ids)
        mask[row, width - len(prompt_ids) :] = 1
    model.generation_config.eos_token_id = None
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=_num_tokens(batch[0]),
        do_sample=False,
        pad_token_id=eos_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(made.logits, 1).double()  # [len(batch), num_new_tokens, vocabulary]
    for row, own in enumerate(batch):
        continued = made.sequences[row, width:].tolist()
        values, indices = (each.tolist() for each in logits[row].topk(NUM_TOP, dim=-1))
        top = [list(zip(*pair, strict=True)) for pair in zip(indices, values, strict=True)]
        sums = logits[row].logsumexp(-1).tolist()
        for prompt_ids, num_tokens, ignore_eos, path in own:
            tokens = continued[:num_tokens]
            if not ignore_eos and eos_token_id in tokens:
                tokens = tokens[: tokens.index(eos_token_id) + 1]
            length = len(tokens)
            yield Reference(prompt_ids, tokens, top[:length], sums[:length]), path


def _main() -> None:
    with no_collections():
        import torch
        from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    eos_token_id = model.generation_config.eos_token_id
    with torch.inference_mode():
        for batch in _batches(json.load(sys.stdin)):
            for reference, path in _continued(model, batch, eos_token_id):
                temporary = Path(f"{path}.{os.getpid()}")
                temporary.write_text(json.dumps(asdict(reference)))
                temporary.rename(path)


if __name__ == "__main__":
    _main()
