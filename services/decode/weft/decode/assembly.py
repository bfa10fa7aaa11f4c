"""Assembly of Submits that arrive in several messages."""

from __future__ import annotations

from collections.abc import Sequence

from weft.contract.codec.pairs import SUBMIT
from weft.contract.errors import InvalidRequest
from weft.contract.request import PARAMETERS
from weft.contract.submits import SampleProgress, Submit
from weft.contract.token_ids import TokenIds, extend_ids, token_ids
from weft.v1 import decode_pb2

MAX_PROMPT_TOKENS = 4 << 20
"""Most tokens of a prompt and everything that its samples have generated."""


class Assembly:
    """One Submit and the tokens received for it, never more than it announced."""

    def __init__(self, message: decode_pb2.Submit) -> None:
        """Takes the first message; `is_complete` says whether all parts have arrived.

        Raises:
            InvalidRequest: The submit announces too much, or brings more than it announces.
        """
        progress = message.progress
        total = message.prompt_length + sum(entry.num_tokens for entry in progress)
        if total > MAX_PROMPT_TOKENS:
            raise InvalidRequest("the prompt is too long", param="prompt")
        if (
            len({entry.sample for entry in progress}) < len(progress)
            or len(progress) > PARAMETERS["n"].high
        ):
            raise InvalidRequest("one entry a sample at most", param="progress")
        self.message = message
        self.prompt = token_ids()
        self.generated = {entry.sample: token_ids() for entry in progress}
        self._announced = {entry.sample: entry.num_tokens for entry in progress}
        self._num_missing = total
        self.add_prompt(message.prompt.ids)
        for entry in progress:
            self.add_generated(entry.sample, entry.tokens.ids)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self._num_missing == 0

    def submit(self, session: int) -> Submit:
        """The request, once it is complete.

        Raises:
            InvalidRequest: A field is out of its range, which the gateway should have refused.
        """
        progress = [
            SampleProgress(
                sample=entry.sample,
                tokens=self.generated[entry.sample].tolist(),
                is_finished=entry.finished,
            )
            for entry in self.message.progress
        ]
        return SUBMIT.decode(self.message, gateway=session, prompt=self.prompt, progress=progress)

    def add_prompt(self, ids: Sequence[int]) -> None:
        """Adds the next part of the prompt.

        Raises:
            InvalidRequest: It is more than was announced.
        """
        self._add(ids, self.prompt, self.message.prompt_length, "prompt")

    def add_generated(self, sample: int, ids: Sequence[int]) -> None:
        """Adds the next part of a sample's generated tokens.

        Raises:
            InvalidRequest: The part exceeds what was announced, or its sample has no entry.
        """
        known = self.generated.get(sample, token_ids())
        self._add(ids, known, self._announced.get(sample, 0), "progress")

    def _add(self, ids: Sequence[int], known: TokenIds, announced: int, param: str) -> None:
        if len(known) + len(ids) > announced:
            message = f"{len(known) + len(ids)} tokens came, {announced} were announced"
            raise InvalidRequest(message, param=param)
        extend_ids(known, ids)
        self._num_missing -= len(ids)
