"""Constraints that begin behind reasoning: the masks are those of an independent reading of all
tokens, whatever steps and drafts they come in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from weft.contract.errors import Internal
from weft.contract.request import Reasoning
from weft.engine.base.token_trees import TokenTree, parents_of
from weft.engine.features.constraints.after_reasoning import AfterReasoning

VOCAB = 41
BEGIN, UNTIL, CALL = 40, 39, 38
LANGUAGE = [(1, 2, 3), (1, 2, 4), (5,), (1, 1, 1, 6)]
"""The texts of the constraint."""


def allowed(text: tuple[int, ...]) -> set[int]:
    """What may come behind a text of the constraint."""
    return {one[len(text)] for one in LANGUAGE if one[: len(text)] == text and len(one) > len(text)}


class FakeState:
    """A grammar's state: what `ConstraintState` promises, of `LANGUAGE`."""

    def __init__(self) -> None:
        self.text: tuple[int, ...] = ()
        self.vocab_size = VOCAB
        self.is_lost = False

    @property
    def in_group(self) -> FakeState:
        return self

    @property
    def num_accepted(self) -> int:
        return len(self.text)

    def next_masks(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> list[Any]:
        self.follow(tokens)
        texts = [self.text]
        for draft, parent in zip(drafts, parents_of(drafts), strict=True):
            texts.append((*texts[parent], draft))
        return [mask(allowed(text)) for text in texts]

    def follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in allowed(self.text):
                raise Internal(f"token {token}", stage="decode")
            self.text += (token,)


def mask(tokens: set[int]) -> np.ndarray[Any, Any]:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def expected(
    tokens: tuple[int, ...], reasoning: Reasoning | None, alternatives: tuple[int, ...]
) -> set[int] | None:
    """What may come behind all tokens of a sample, read anew; None: anything."""
    at, may_begin = 0, False
    if reasoning is not None:
        if reasoning.begin is not None:
            may_begin = not tokens
            at = 1 if tokens[:1] == (reasoning.begin,) else -1
        if at >= 0:
            ends = [
                place + len(reasoning.end)
                for place in range(at, len(tokens))
                if tokens[place : place + len(reasoning.end)] == reasoning.end
            ]
            if may_begin:
                at = 0
            elif not ends:
                return None
            else:
                at = ends[0]
                if reasoning.until is not None:
                    if reasoning.until not in tokens[at:]:
                        return None
                    at = tokens.index(reasoning.until, at) + 1
        at = max(at, 0)
    text = tokens[at:]
    if text[:1] and text[0] in alternatives:
        return None
    found = allowed(text)
    if not text:
        found |= set(alternatives)
        if may_begin and reasoning is not None and reasoning.begin is not None:
            found.add(reasoning.begin)
    return found


def spread(masks: list[Any], count: int) -> list[Any]:
    """A mask for each row: a single None is one for all."""
    found = [None] * count if len(masks) == 1 and masks[0] is None else masks
    assert len(found) == count
    return found


def check(
    masks: list[Any], paths: list[tuple[int, ...]], setting: tuple[Any, tuple[int, ...]]
) -> None:
    masks = spread(masks, len(paths))
    for path, found in zip(paths, masks, strict=True):
        wanted = expected(path, *setting)
        if wanted is None:
            assert found is None, path
        else:
            assert found is not None, path
            assert (found == mask(wanted)).all(), (path, wanted)


SETTINGS: list[tuple[Reasoning | None, tuple[int, ...]]] = [
    (Reasoning(end=(7,)), ()),
    (Reasoning(end=(7, 8)), ()),
    (Reasoning(end=(7, 7, 8)), (CALL,)),
    (Reasoning(begin=BEGIN, end=(7,)), ()),
    (Reasoning(begin=BEGIN, end=(7,)), (CALL,)),
    (Reasoning(end=(7, 8), until=UNTIL), ()),
    (None, (CALL, 37)),
]


def draw(setting: tuple[Any, tuple[int, ...]], tokens: tuple[int, ...]) -> int | None:
    """A token that may come; None: none may."""
    may_come = expected(tokens, *setting)
    if may_come is None:
        return random.choice([7, 7, 8, 8, UNTIL, BEGIN, CALL, 1, 2, 9])
    return random.choice(sorted(may_come)) if may_come else None


@pytest.mark.parametrize("setting", SETTINGS, ids=range(len(SETTINGS)))
def test_masks_are_a_function_of_the_tokens(setting: tuple[Any, tuple[int, ...]]) -> None:
    """One by one, several in a step, all at once (a resumed sample), with chains and trees of
    drafts that are right and wrong, across the end of the reasoning.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    random.seed(seed)
    for _ in range(200):
        state = AfterReasoning(cast(Any, FakeState()), VOCAB, *setting)
        tokens: tuple[int, ...] = ()
        check(state.next_masks(()), [tokens], setting)
        while len(tokens) < 14:
            step: tuple[int, ...] = ()
            for _ in range(random.randint(1, 3)):
                if (token := draw(setting, tokens + step)) is None:
                    break
                step += (token,)
            if not step:
                break
            count = random.choice([0, 0, 3, 6])
            is_tree = random.random() < 0.5
            parents = [random.randint(0, row) if is_tree else row for row in range(count)]
            paths, drafts = [tokens + step], []
            for parent in parents:
                right = draw(setting, paths[parent])
                is_wrong = right is None or random.random() < 0.2
                drafts.append(random.randrange(VOCAB) if is_wrong else cast(int, right))
                paths.append((*paths[parent], drafts[-1]))
            given = TokenTree(drafts, parents) if is_tree else drafts
            masks = state.next_masks(step, given)
            tokens += step
            assert state.num_accepted == len(tokens)
            # Behind a draft that may not come nothing is drawn, whatever its mask is.
            right_rows = [
                row
                for row, path in enumerate(paths)
                if is_right(path[len(tokens) :], tokens, setting)
            ]
            masks = spread(masks, len(paths))
            check([masks[row] for row in right_rows], [paths[row] for row in right_rows], setting)
        resumed = AfterReasoning(cast(Any, FakeState()), VOCAB, *setting)
        check(resumed.next_masks(tokens), [tokens], setting)


def is_right(
    drafts: tuple[int, ...], tokens: tuple[int, ...], setting: tuple[Any, tuple[int, ...]]
) -> bool:
    for count, draft in enumerate(drafts):
        may_come = expected(tokens + drafts[:count], *setting)
        if may_come is not None and draft not in may_come:
            return False
    return True


def test_it_joins_a_group_only_once_it_is_constrained() -> None:
    inner = FakeState()
    state = AfterReasoning(cast(Any, inner), VOCAB, Reasoning(end=(7,)))
    assert spread(state.next_masks([1, 9]), 1) == [None]
    assert state.in_group is None
    state.next_masks([7])
    assert state.in_group is None
    state.next_masks([1])
    assert state.in_group is inner
    inner.follow([2])
    assert (state.num_accepted, inner.num_accepted) == (5, 2)
    with pytest.raises(Internal):
        state.next_masks([9])
