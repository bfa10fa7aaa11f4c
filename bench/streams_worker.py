"""A decode worker without a model for `streams.py`: tokens of all streams at a fixed pace.

It speaks the worker's protocol and does as little as it can for a token, so that the gateway is
what limits. It reads orders from stdin, one JSON object a line, and answers by lines on stdout:

- `{"streams": N, "tokens": T, "step_s": S}` sets up a run. Once N requests were submitted it says
  `{"waiting": N}`.
- `{"go": true}` has it send a token of each stream every S seconds; one message carries what is
  due, several tokens of a stream where the gateway did not take the message before in time. It
  says `{"sent": seconds, "messages": M}` when all T tokens were taken.
- `{"end": true}` ends the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.v1 import common_pb2, decode_pb2

MAX_STREAMS_A_MESSAGE = 2048
"""Entries of about 60 bytes, and workers' messages stay under 256 KiB."""


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


class StreamsWorker(FakeWorker):
    """Sends the first tokens of one text, again and again, on all streams in step."""

    def __init__(self, model: str, config: dict[str, Any], tokens: list[int]) -> None:
        super().__init__(
            model,
            config["vocab_size"],
            lambda submit, prompt: Script(tokens=[[]]),
            max_context_tokens=config["max_position_embeddings"],
        )
        self._ids = tokens
        self._id_bytes = [varint(token) for token in tokens]
        self._plan: dict[str, Any] = {"streams": 0, "tokens": 0, "step_s": 0.01}
        self._submitted: list[tuple[str, int, bytes]] = []
        """Each stream's id and number, and the beginning of its entries."""
        self._going = asyncio.Event()
        self._ending = asyncio.Event()

    def order(self, order: dict[str, Any]) -> None:
        """Takes a line of stdin."""
        if "go" in order:
            self._going.set()
        elif "end" in order:
            self._ending.set()
        else:
            self._plan = order

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> None:
        extra = decode_pb2.SessionEvent()
        has_extra, lock = asyncio.Event(), asyncio.Lock()

        async def write(event: decode_pb2.SessionEvent) -> None:
            async with lock:
                await context.write(event)

        async def receive() -> None:
            async for message in requests:
                kind = message.WhichOneof("request")
                if kind == "submit":
                    key = message.submit.request_id
                    extra.accepted.add(request_id=key, attempt=message.submit.attempt)
                    prefix = b"\x0a" + varint(len(key)) + key.encode() + b"\x10\x01"
                    self._submitted.append((key, message.submit.stream, prefix))
                    if len(self._submitted) == self._plan["streams"]:
                        say({"waiting": len(self._submitted)})
                elif kind == "hello":
                    extra.welcome.worker_id = self.worker_id
                    extra.welcome.worker_epoch = self.epoch
                elif kind == "ping":
                    extra.pong.nonce = message.ping.nonce
                has_extra.set()

        async def answer() -> None:
            while True:
                await has_extra.wait()
                has_extra.clear()
                event = decode_pb2.SessionEvent()
                event.CopyFrom(extra)
                extra.Clear()
                await write(event)

        tasks = [asyncio.create_task(task) for task in (receive(), answer(), self._run(write))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self, write: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._going.wait()
            self._going.clear()
            plan, streams = self._plan, self._submitted
            began = loop.time()
            sent = num_messages = 0
            while sent < plan["tokens"]:
                await asyncio.sleep(max(0.0, began + (sent + 1) * plan["step_s"] - loop.time()))
                due = min(plan["tokens"], int((loop.time() - began) / plan["step_s"]))
                if due <= sent:
                    continue
                for event in self._events(streams, sent, due):
                    await write(event)
                    num_messages += 1
                sent = due
            say({"sent": loop.time() - began, "messages": num_messages})
            await self._ending.wait()
            self._ending.clear()
            self._submitted = []
            for start in range(0, len(streams), MAX_STREAMS_A_MESSAGE // 4):
                event = decode_pb2.SessionEvent()
                for key, *_ in streams[start : start + MAX_STREAMS_A_MESSAGE // 4]:
                    event.finished.add(
                        request_id=key,
                        attempt=1,
                        reason=common_pb2.FINISH_REASON_LENGTH,
                        completion_tokens=plan["tokens"],
                    )
                await write(event)

    def _events(
        self, streams: list[tuple[str, int, bytes]], first: int, end: int
    ) -> list[decode_pb2.SessionEvent]:
        num_ids = len(self._id_bytes)
        ids = b"".join([self._id_bytes[index % num_ids] for index in range(first, end)])
        # Field 4 is `first_index`, which is left out where it is 0, and 5 `ids`.
        index = b"\x20" + varint(first) if first else b""
        rest = index + b"\x2a" + varint(len(ids)) + ids
        if end - first == 1:
            columns = decode_pb2.SessionEvent.TokenColumns(
                streams=[number for _, number, _ in streams],
                indices=[first] * len(streams),
                ids=[self._ids[first % num_ids]] * len(streams),
            )
            return [decode_pb2.SessionEvent(columns=columns)]
        events = []
        for start in range(0, len(streams), MAX_STREAMS_A_MESSAGE):
            parts: list[bytes] = []
            for *_, prefix in streams[start : start + MAX_STREAMS_A_MESSAGE]:
                parts += (b"\x22", varint(len(prefix) + len(rest)), prefix, rest)
            events.append(decode_pb2.SessionEvent.FromString(b"".join(parts)))
        return events


def say(line: dict[str, Any]) -> None:
    """Answers the bench."""
    print(json.dumps(line), flush=True)


async def main() -> None:
    """Serves until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model_dir / "tokenizer.json"))
    config = json.loads((options.model_dir / "config.json").read_text())
    tokens = tokenizer.encode(options.text, add_special_tokens=False).ids
    worker = StreamsWorker(options.model, config, tokens)
    say({"address": await worker.start()})
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(worker.order, json.loads(line))
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()
    await worker.stop()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
