"""Log-probabilities of prompts' tokens in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.gateway.api.openai.logprobs import TextOffsets, completion_logprobs, finite
from weft.gateway.generation.generation import Generation
from weft.gateway.text.detokenize import Vocabulary, make_detokenizer
from weft.v1 import common_pb2

_MAX_ADDED = 4
"""Most special tokens that a tokenizer puts in front of a text."""


class PromptLogprobs:
    """The log-probabilities of prompts in one answer. It is written once all of them have arrived;
    the client of a cancelled request gets those that have.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        generations: Sequence[Generation],
        *,
        num_listed: int | None = None,
        num_echoed: int | None = None,
    ) -> None:
        """Expects a generation with one sample for each prompt. Alternatives beyond the number
        that the client asked for are dropped.

        Args:
            num_listed: Alternatives in `prompt_logprobs`; None: there is no such field.
            num_echoed: Alternatives in `logprobs` of an echoed prompt; None: `logprobs` has only
                the answer's tokens.
        """
        self._vocabulary = vocabulary
        self._generations = generations
        self._num_listed = num_listed
        self._num_echoed = num_echoed

    def of_chat(self) -> dict[str, object]:
        """Further fields of a chat's answer."""
        return self._listed(0)

    def add_to_choice(self, choice: dict[str, Any], number: int, echo: str) -> None:
        """Adds the log-probabilities of prompt `number` to a completion's choice, whose `logprobs`
        are those of generated tokens. `echo` is the text of the prompt with which the choice
        begins.
        """
        choice.update(self._listed(number))
        if self._num_echoed is not None:
            generated = choice["logprobs"] or {}
            echoed = self._echoed(self._generations[number], echo, self._num_echoed)
            choice["logprobs"] = {
                name: values + generated.get(name, []) for name, values in echoed.items()
            }

    def _listed(self, number: int) -> dict[str, object]:
        if self._num_listed is None:
            return {}
        scores = self._generations[number].prompt_scores
        assert scores is not None, "they were asked for"
        listed = [self._by_id(entry, self._num_listed) for entry in scores.entries]
        return {"prompt_logprobs": [None, *listed]}

    def _by_id(self, entry: common_pb2.TokenLogprob, most: int) -> dict[str, dict[str, object]]:
        """vLLM's order: the token, then its alternatives, most likely first."""
        ranks = {one.token_id: rank for rank, one in enumerate(entry.top, 1)}
        own = self._described(entry, ranks.get(entry.token_id))
        described = {str(entry.token_id): own}
        for one in entry.top[:most]:
            described.setdefault(str(one.token_id), self._described(one, ranks[one.token_id]))
        return described

    def _described(
        self, entry: common_pb2.TokenLogprob | common_pb2.TopLogprob, rank: int | None
    ) -> dict[str, object]:
        return {
            "logprob": finite(entry.logprob),
            "rank": rank,
            "decoded_token": self._vocabulary.token_text(entry.token_id),
        }

    def _echoed(self, generation: Generation, echo: str, most: int) -> dict[str, list[Any]]:
        """The first token has neither probability nor alternatives."""
        scores = generation.prompt_scores
        assert scores is not None, "they were asked for"
        ids, entries = generation.prompt.ids, scores.entries
        first = common_pb2.TokenLogprob(token_id=ids[0])
        offsets = text_offsets(self._vocabulary, ids[: 1 + len(entries)], echo)
        echoed = completion_logprobs(self._vocabulary, [first, *entries], offsets, most)
        echoed["token_logprobs"][0] = echoed["top_logprobs"][0] = None
        return echoed


def text_offsets(vocabulary: Vocabulary, ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in the prompt's text, in characters. A token that begins
    within a character has that character's offset. Special tokens that the tokenizer has put in
    front of the text have no length.
    """
    detokenizer = make_detokenizer(vocabulary, (), skip_special_tokens=False)
    num_added = _num_added(vocabulary, ids, text)
    offsets = TextOffsets(detokenizer, 0).take(ids[num_added:])
    # A tokenizer may normalise the text, so that the tokens' text is longer than the client's.
    return [0] * num_added + [min(offset, len(text)) for offset in offsets]


def _num_added(vocabulary: Vocabulary, ids: Sequence[int], text: str) -> int:
    others = (number for number, one in enumerate(ids) if one not in vocabulary.special_ids)
    num_special = next(others, len(ids))
    for num_added in range(min(num_special, _MAX_ADDED) + 1):
        written = "".join(map(vocabulary.token_text, ids[num_added:num_special]))
        if text.startswith(written):
            return num_added
    return 0
