"""Ledger of a decode worker's open requests, for crash dumps."""

from __future__ import annotations

import time
from typing import NamedTuple

from weft.common.telemetry.request_log import LoggedPrompt, terms
from weft.contract.submits import GatewayBatch
from weft.contract.token_ids import TokenIds
from weft.v1 import common_pb2, decode_pb2

_Key = tuple[int, str, int]


class _Open(NamedTuple):
    line: LoggedPrompt
    """Its `sampling` and `stop` are filled in when it is asked for."""
    sampling: common_pb2.SamplingParams
    stop: common_pb2.StopCriteria
    samples: set[int]
    """Samples that have not finished."""


class Ledger:
    """Submits whose end has not been reported, as lines of a request log. Without `has_tokens`, the
    prompts' tokens, constraints and stop strings are not kept, and a request cannot be replayed.
    """

    def __init__(self, has_tokens: bool) -> None:
        self._has_tokens = has_tokens
        self._open: dict[_Key, _Open] = {}

    def on_submit(self, message: decode_pb2.Submit, session: int, prompt: TokenIds) -> None:
        """Records a submit on its way to the engine. `prompt` holds all of the prompt's tokens."""
        # Copies, since the parts of a message keep all of it in memory.
        sampling, stop = common_pb2.SamplingParams(), common_pb2.StopCriteria()
        sampling.CopyFrom(message.sampling)
        stop.CopyFrom(message.stop)
        line = LoggedPrompt(
            time=time.time(),
            request_id=message.request_id,
            trace_id=message.traceparent[3:35],
            model=message.model,
            adapter=message.adapter.name,
            is_pooled=message.HasField("pool"),
            top_logprobs=message.logprobs.top_logprobs if message.HasField("logprobs") else None,
            num_prompt_tokens=len(prompt),
            prompt_ids=list(prompt) if self._has_tokens else None,
        )
        samples = set(range(max(1, message.sampling.n)))
        samples -= {entry.sample for entry in message.progress if entry.finished}
        self._open[session, message.request_id, message.attempt] = _Open(
            line, sampling, stop, samples
        )

    def on_batch(self, batch: GatewayBatch) -> None:
        """Records a step's results for a session."""
        for finished in batch.finished:
            key = (batch.gateway, finished.request_id, finished.attempt)
            known = self._open.get(key)
            if known is not None:
                known.samples.discard(finished.sample)
                if not known.samples:
                    del self._open[key]
        for failed in batch.failed:
            self._open.pop((batch.gateway, failed.request_id, failed.attempt), None)

    def on_session_closed(self, session: int) -> None:
        """Drops the requests of a closed session, which are cancelled."""
        for key in [key for key in self._open if key[0] == session]:
            del self._open[key]

    def prompts(self) -> list[LoggedPrompt]:
        """The open requests, oldest first."""
        found = []
        for line, sampling, stop, _ in self._open.values():
            line.sampling, line.stop = terms(sampling, stop, has_content=self._has_tokens)
            found.append(line)
        return found
