"""Greedy tokens against a reference that computes in float32 in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from weft.contract.request import SamplingParams
from weft.engine.loop.llm import GeneratedSample
from weft.engine.sampling.sampler import derive_seed
from weft.kernels.ops.sampling.noise import gumbel_noise
from weft.testing.kernels.naive_sampling import Float64Array, NaiveParams, edited_logits

NEAR_TIE = 1e-5
"""Difference of logits, relative to the largest one, that roundings in float32 may turn over. Of a
million tokens of random models one is chosen by so little.
"""

OF_STATES = 5e-4
"""The same for models with recurrent states, which carry roundings on from token to token: of nine
thousand differences of logits one was off by half as much.
"""

OF_ROUNDED_ROWS = 5e-4
"""`near_tie` where products round their rows to 16 bits."""
_CHANGE = 3e-6
"""Far more than roundings."""

_NUM_TRIES = 8
"""Of a text whose experts are not determined one try in a hundred does not show it."""


def check_choices(logits: torch.Tensor, tokens: Sequence[int], near_tie: float = NEAR_TIE) -> None:
    """Each token is the choice of the reference, where float32 can tell.

    Args:
        logits: `[num_tokens, vocab]`, the reference's, behind what comes before each token.
        tokens: The tokens.
        near_tie: What rounding may turn over, relative to the largest logit.
    """
    assert len(logits) == len(tokens)
    lacks = (logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]).tolist()
    for at, (lack, size) in enumerate(zip(lacks, logits.abs().amax(-1).tolist(), strict=True)):
        assert lack <= near_tie * size, f"token {at} of {tokens} lacks {lack} of {size}"


def are_clear(logits: torch.Tensor, near_tie: float = NEAR_TIE) -> bool:
    """Whether float32 can tell the largest of each row: `[num_tokens, vocab]`."""
    best, second = logits.topk(2, -1).values.unbind(-1)
    return bool((best - second > near_tie * logits.abs().amax(-1)).all())


def are_clear_draws(
    logits: torch.Tensor,
    tokens: Sequence[int],
    first_position: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    allowed: Sequence[int] | None = None,
) -> bool:
    """Whether tokens were drawn so clearly that no rounding in float32 makes others of them.

    Args:
        logits: `[num_tokens, vocab]`, the reference's, behind what comes before each token; with
            every bias.
        tokens: The tokens.
        first_position: Number of tokens before the first one.
        temperature: 0: greedy.
        seed: Of this sample.
        allowed: Token ids that a constraint may have allowed; None: all of them, always.
    """
    rows, scores = torch.arange(len(tokens)), logits.double()
    if temperature:
        ids = np.arange(logits.shape[1])
        noise = [gumbel_noise(seed, first_position + at, ids) for at in range(len(tokens))]
        scores = scores / temperature + torch.from_numpy(np.stack(noise))
    chosen = torch.tensor(tokens)
    gaps = scores[rows, chosen].unsqueeze(1) - scores
    gaps[rows, chosen] = torch.inf
    if allowed is not None:
        gaps = gaps[:, list(allowed)].abs()
    least = NEAR_TIE * logits.abs().amax(-1, keepdim=True) / (temperature or 1.0)
    return bool((gaps > least).all())


class _NotedChoices(TorchFunctionMode):
    """Notes which indices are the largest, where anything asks for them: routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[torch.Tensor] = []
        """Of each question, in ascending order along the last dimension."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "argmax":
            self.chosen.append(out)
        elif name in ("topk", "max") and not isinstance(out, torch.Tensor):
            self.chosen.append(out[1].sort(-1).values)
        return out


def _experts(reference: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Those that each token asks, router by router."""
    with _NotedChoices() as noted:
        reference(ids, use_cache=False)
    return noted.chosen


@torch.inference_mode()
def asks_surely(reference: Any, tokens: Sequence[int]) -> bool:
    """Whether each token of a text asks the same experts however a reference in float32 rounds:
    also if its embedding changes a little. Models without experts always do.
    """
    ids, weight = torch.tensor([list(tokens)]), reference.get_input_embeddings().weight
    kept, experts = weight.clone(), _experts(reference, ids)
    changes = [_CHANGE * torch.randn(weight.shape) for _ in range(2)]
    for change in (*changes, *(-change for change in changes)):
        weight.mul_(1 + change)
        others = _experts(reference, ids)
        weight.copy_(kept)
        if not all(map(torch.equal, experts, others)):
            return False
    return True


@contextmanager
def where_experts_are_sure(load: Callable[[], Any], tokens: Sequence[int]) -> Iterator[None]:
    """Failures inside count where a text asks its experts surely: where two are nearly alike for
    one of its tokens, roundings decide which one is asked, and all that follows is another text.

    Args:
        load: Gets the reference, of transformers.
        tokens: The text.
    """
    try:
        yield
    except AssertionError:
        reference = load()
        if all(asks_surely(reference, tokens) for _ in range(_NUM_TRIES)):
            raise


@torch.inference_mode()
def check_same(
    load: Callable[[], Any],
    prompt: Sequence[int],
    found: Sequence[int],
    expected: Sequence[int],
    params: SamplingParams | None = None,
    sample: int = 0,
    near_tie: float = NEAR_TIE,
) -> None:
    """Two texts of a prompt are the same, but for what float32 cannot tell: they may part where the
    reference draws two tokens alike, or behind a token whose experts it does not ask surely.

    Args:
        load: Gets the reference, of transformers; called where the texts differ.
        prompt: What comes before both.
        found: Tokens.
        expected: Tokens that somebody else made, by sums in another order.
        params: How both were drawn; None: greedily.
        sample: Which of the request's samples they are.
        near_tie: What rounding may turn over, relative to the largest logit.
    """
    if list(found) == list(expected):
        return
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    assert at is not None, f"{found} and {expected} are of different lengths"
    reference, before = load(), list(expected[:at])
    params = params or SamplingParams(temperature=0.0)
    seed = derive_seed(params.seed, sample)
    with where_experts_are_sure(lambda: reference, [*prompt, *before]):
        logits = reference(torch.tensor([[*prompt, *before]]), use_cache=False).logits[0, -1]
        scores = _scores(logits, params, seed, prompt, before)
        lack = abs(scores[found[at]] - scores[expected[at]])
        size = float(logits.abs().max())
        assert lack <= near_tie * size, f"token {at} of {found} is none of {expected}: {lack}"


def check_same_groups(
    load: Callable[[], Any],
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[GeneratedSample]],
    expected: Sequence[Sequence[GeneratedSample]],
    params: SamplingParams | None = None,
) -> None:
    """`check_same` for all samples of all prompts: a group of samples for each prompt."""
    for prompt, found, wanted in zip(prompts, groups, expected, strict=True):
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            check_same(load, prompt, one.token_ids, other.token_ids, params, number)


@torch.inference_mode()
def is_sure(
    reference: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
    sample: int = 0,
) -> bool:
    """Whether float32 can tell each token of a text, drawn from all tokens, from the next best.

    Args:
        reference: Of transformers.
        prompt: What comes before the text.
        tokens: The text.
        params: How it was drawn.
        sample: Which of the request's samples it is.
    """
    text, seed = [*prompt, *tokens], derive_seed(params.seed, sample)
    rows = reference(torch.tensor([text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    for at, logits in enumerate(rows):
        scores = np.sort(_scores(logits, params, seed, prompt, tokens[:at]))
        if scores[-1] - scores[-2] <= NEAR_TIE * float(logits.abs().max()):
            return False
    return True


def _scores(
    logits: torch.Tensor,
    params: SamplingParams,
    seed: int,
    prompt: Sequence[int],
    before: Sequence[int],
) -> Float64Array:
    """Of all tokens [vocab], of which the one with the largest is drawn."""
    naive = NaiveParams(
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        prompt=tuple(prompt),
        output=tuple(before),
    )
    scores = edited_logits(logits.numpy(), naive).astype(np.float64)
    if params.temperature:
        position = len(prompt) + len(before)
        scores += params.temperature * gumbel_noise(seed, position, np.arange(len(scores)))
    return scores


class Choices(list[int]):
    """A reference's greedy tokens. Other tokens are equal if `check_choices` takes each of them
    behind those before it.

    Args:
        logits_of: The reference: `[num_tokens, vocab]` behind each of some tokens.
        prompt: What comes before.
        num_new: Number of tokens.
        reference: The same as a model of transformers, if it has experts: other tokens are equal
            too if it does not ask them surely (`asks_surely`).
        near_tie: As in `check_choices`.
    """

    def __init__(
        self,
        logits_of: Callable[[list[int]], torch.Tensor],
        prompt: Sequence[int],
        num_new: int,
        reference: Any = None,
        near_tie: float = NEAR_TIE,
    ) -> None:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(num_new):
                tokens.append(int(logits_of(tokens)[-1].argmax()))
        super().__init__(tokens[len(prompt) :])
        self._logits_of, self._prompt, self._reference = logits_of, list(prompt), reference
        self._near_tie = near_tie

    def is_clear(self) -> bool:
        """Whether no other tokens are equal."""
        return are_clear(self._logits_behind(self), self._near_tie)

    def __eq__(self, found: object) -> bool:
        if list.__eq__(self, found) is True:
            return True
        if not isinstance(found, list) or len(found) != len(self):
            return False
        try:
            if self._reference is None:
                check_choices(self._logits_behind(found), found, self._near_tie)
            else:
                with where_experts_are_sure(lambda: self._reference, [*self._prompt, *found]):
                    check_choices(self._logits_behind(found), found, self._near_tie)
        except AssertionError:
            return False
        return True

    def __ne__(self, found: object) -> bool:
        return not self == found

    def _logits_behind(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._logits_of([*self._prompt, *tokens])[len(self._prompt) - 1 : -1]


class GreedyReference:
    """Greedy continuations by a text model of transformers, in float32."""

    def __init__(self, model_dir: Path, num_new: int) -> None:
        from transformers import AutoModelForCausalLM  # Slow to import, and few need it.

        self._num_new = num_new
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def __call__(self, prompt: list[int], num_new: int | None = None) -> Choices:
        return Choices(self._logits, prompt, num_new or self._num_new)

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits
