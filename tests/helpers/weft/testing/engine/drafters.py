"""Drafters that know what they do: right, wrong, or now and then right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.base.device_copies import Fetched
from weft.engine.base.drafts import DraftShape
from weft.engine.executor.step_input import ON_DEVICE, StepInput
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.draws import SampledTokens
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import GeneratedSample
from weft.engine.requests.request import Request, State
from weft.engine.sampling.sampler import derive_seed
from weft.engine.scheduler.plan import NO_DRAFTS, Plan, Run, VerifyItem
from weft.engine.scheduler.ports import Drafter, DraftGate


class KnownDrafter(Drafter):
    """Drafts from texts that are known beforehand.

    Args:
        texts: By prompt and sample's seed: prompt and all that follows.
        vocab_size: Of the model.
        chance: Of each draft to be right.
    """

    def __init__(
        self,
        texts: Mapping[tuple[tuple[int, ...], int], Sequence[int]],
        vocab_size: int,
        chance: float,
    ) -> None:
        self._texts = texts
        self._vocab_size = vocab_size
        self._chance = chance

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`; some have fewer drafts than they may."""
        return [self._draft(item) for item in items]

    def forget(self, slot: int) -> None:
        """See `Drafter.forget`."""

    def _draft(self, item: VerifyItem) -> list[int]:
        request = item.request
        assert request.num_launched > 0
        assert len(request.tokens) == item.start + 1
        prompt = tuple(request.tokens[: request.num_prompt_tokens])
        text = self._texts[prompt, request.seed]
        follows = list(text[item.start + 1 : item.start + 1 + item.max_drafts])
        return [
            token if random.random() < self._chance else self._other(token) for token in follows
        ]

    def _other(self, token: int) -> int:
        return (token + random.randint(1, self._vocab_size - 1)) % self._vocab_size


class EndingDrafter(KnownDrafter):
    """Always right, in steps so long that each text ends at one place of its last run.

    Args:
        texts: As of `KnownDrafter`.
        vocab_size: Of the model.
        place: Of a text's last token among those of its last run, from 0; others follow it.
    """

    def __init__(
        self,
        texts: Mapping[tuple[tuple[int, ...], int], Sequence[int]],
        vocab_size: int,
        place: int,
    ) -> None:
        super().__init__(texts, vocab_size, 1.0)
        self._place = place

    def _draft(self, item: VerifyItem) -> list[int]:
        request, most = item.request, item.max_drafts
        text = self._texts[tuple(request.tokens[: request.num_prompt_tokens]), request.seed]
        follows = list(text[item.start + 1 :])
        num_before = len(follows) - self._place - 1
        if num_before > 0:
            return follows[: min(most, num_before - 1)]
        return [*follows, *(random.randrange(self._vocab_size) for _ in range(most))][:most]


class NotedRuns:
    """Notes what each request with drafts drew in each step.

    Args:
        engine: That drafts.
    """

    def __init__(self, engine: Engine) -> None:
        self.runs: list[tuple[int, int, bool]] = []
        """Drafts, tokens drawn, and whether the request ended with them."""
        self._done, engine.pipeline._owner = engine.step_done, self
        self.step_failed = engine.step_failed

    def step_done(self, plan: Plan, drawn: SampledTokens | None, duration_s: float) -> None:
        """See `StepOwner.step_done`."""
        self._done(plan, drawn, duration_s)
        for run in drawn.runs if drawn is not None else ():
            is_over = run.request.state is State.FINISHED
            self.runs.append((run.num_drafts, len(run.tokens), is_over))


class KnownGraphs:
    """Takes the place of a head's captured chains: drafts from texts, which stay on the device.

    Args:
        engine: With an EAGLE-3 head.
        texts: As of `KnownDrafter`; all samples of a prompt have the same.
        vocab_size: Of the model.
        chance: Of each draft to be right.
    """

    def __init__(
        self,
        engine: Engine,
        texts: Mapping[tuple[tuple[int, ...], int], Sequence[int]],
        vocab_size: int,
        chance: float,
    ) -> None:
        self._texts = {prompt: text for (prompt, _), text in texts.items()}
        self._vocab_size = vocab_size
        self._chance = chance
        self._running = engine.scheduler.running
        self._executor = engine.parts.local
        self._known = self._executor.known
        self.num_late = 0
        """Chains whose begin the host did not know."""
        self.last = torch.zeros(0, dtype=torch.int64)
        """The drafts made last, whose memory the next step may use."""
        drafter = engine.drafter
        assert isinstance(drafter, EagleDrafter)
        drafter._graphs = self  # type: ignore[assignment]
        plans = engine.scheduler.running_plans
        plans.drafts_on_device = True
        plans.gate = RandomGate((0, 1, 2, 3, 5))

    def forward(self, requests: StepInput, depth: int) -> torch.Tensor:
        """See `ChainGraphs.forward`."""
        return self._draft(requests.slots.tolist(), requests.starts.tolist(), depth)

    def forward_sent(
        self, depth: int, num_requests: int, adapter_slots: npt.NDArray[np.int32] | None
    ) -> torch.Tensor:
        """See `ChainGraphs.forward_sent`."""
        assert self._executor.inputs is not None
        slots, starts, _, limits = self._executor.inputs.request_rows(num_requests)
        are_drafted = limits > 1
        drafts = self._draft(slots[are_drafted].tolist(), starts[are_drafted].tolist(), depth)
        found = drafts.new_zeros((depth, num_requests))
        found[:, are_drafted] = drafts
        self.last = found
        return found

    def fetch(self, found: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `ChainGraphs.fetch`."""
        return Fetched(found).wait

    def _draft(self, chosen: list[int], starts: list[int], depth: int) -> torch.Tensor:
        owners = {request.slot: request for request in self._running}
        drafts = torch.empty((depth, len(chosen)), dtype=torch.int64)
        for column, (slot, start) in enumerate(zip(chosen, starts, strict=True)):
            self.num_late += start == ON_DEVICE
            begin = int(self._known.starts[slot]) if start == ON_DEVICE else start
            request = owners[slot]
            text = self._texts[tuple(request.tokens[: request.num_prompt_tokens])]
            for behind in range(depth):
                at = begin + 1 + behind
                right = text[at] if at < len(text) else 0
                is_right = random.random() < self._chance
                shift = 0 if is_right else random.randint(1, self._vocab_size - 1)
                drafts[behind, column] = (right + shift) % self._vocab_size
        drafts = drafts.to(self._known.tokens.device)
        slots = torch.tensor(chosen, dtype=torch.int64, device=drafts.device)
        self._known.tokens[1 : 1 + depth].index_copy_(1, slots, drafts)
        self.last = drafts
        return drafts


class RandomGate(DraftGate):
    """A gate that asks for other drafts in each step.

    Args:
        shapes: Of trees, or numbers of drafts of chains.
    """

    def __init__(self, shapes: Sequence[int | DraftShape]) -> None:
        self._shapes = shapes
        self.last = NO_DRAFTS
        """The shape asked for last."""

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        """See `DraftGate.shape`."""
        shape = random.choice(self._shapes)
        self.last = DraftShape.chain(shape) if isinstance(shape, int) else shape
        return self.last

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """See `DraftGate.observe`."""


def speculate(engine: Engine, drafter: KnownDrafter, shapes: Sequence[int | DraftShape]) -> None:
    """Makes an engine that drafts do it like this."""
    assert engine.drafter is not None
    engine.pipeline._drafter = drafter
    engine.scheduler.running_plans.drafts_on_device = False
    engine.scheduler.running_plans.gate = RandomGate(shapes)


def texts_of(
    prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[GeneratedSample]], seed: int
) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """Texts for `KnownDrafter`, of requests with a seed: a group of samples for each prompt."""
    return {
        (tuple(prompt), derive_seed(seed, index)): [*prompt, *sample.token_ids]
        for prompt, group in zip(prompts, groups, strict=True)
        for index, sample in enumerate(group)
    }
