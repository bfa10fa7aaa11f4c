"""A catalogue of requests, made from a seed, whose answers without faults are known."""

from __future__ import annotations

import asyncio
import random
import secrets
import string
import struct
import zlib
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from weft.cli.channel import open_channel
from weft.common.rpc.errors import from_rpc_error, is_typed
from weft.contract.codec.walk import duration
from weft.contract.errors import WeftError
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

NUM_ASKS = 24
_NUM_CHOICES, BIAS = 3, 100.0
"""Number of tokens of an answer that repeats itself, and the bias of their logits."""
GRACE_S = 20.0
"""Seconds after its deadline at which a client considers a request lost; more than any request may
be late.
"""


_NUM_IMAGES = 4
_Message: TypeAlias = gateway_pb2.CompleteResponse | gateway_pb2.ChatResponse
_Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[gateway_pb2.CompleteRequest, gateway_pb2.CompleteResponse]"
    " | grpc.aio.UnaryStreamCall[gateway_pb2.ChatRequest, gateway_pb2.ChatResponse]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRequest:
    """One request, whose answer depends on nothing else."""

    number: int
    prompt: tuple[int, ...]
    """Token ids; with an image, characters of the text that follows it."""
    max_tokens: int
    temperature: float
    seed: int
    n: int
    stop: str = ""
    """A stop string; empty: none."""
    choices: tuple[int, ...] = ()
    """Token ids that the answer may consist of; empty: all. A text of few different tokens repeats
    itself, so drafts from the text so far are often right.
    """
    image: bytes = b""
    """A PNG that a chat begins with; empty: a prompt of token ids."""


@dataclass(slots=True, kw_only=True)
class Reply:
    """The part of an answer that a client received."""

    tokens: list[list[int]]
    """Token ids by sample."""
    texts: list[str]
    """Text by sample."""
    reasons: list[list[int]]
    """Finish reasons of each sample: exactly one, once it has ended."""
    completion_tokens: int | None = None
    """Tokens according to the final usage."""
    cached_tokens: int = 0
    timeline: common_pb2.Timeline | None = None
    error: WeftError | None = None
    is_typed: bool = True
    """Whether the error is a typed one; if not, the transport made it."""
    has_left: bool = False
    """Whether this client went away before the stream's end."""
    is_cancelled: bool = False
    """Whether the client went away before all samples had ended."""
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether every sample has ended."""
        return self.error is None and not self.is_cancelled and all(self.reasons)


@dataclass(slots=True)
class Pace:
    """The speed at which a client reads."""

    timeout_s: float = 30.0
    cancel_after: int | None = None
    """Messages after which the client goes away; None: it stays."""
    pause_s: float = 0.0
    """Pause before each message is read."""
    salt: str = field(default_factory=lambda: secrets.token_hex(8))
    """Cache salt. Requests of the same salt share prefixes."""


def make_asks(
    seed: int, max_prompt_tokens: int, max_new_tokens: int, *, has_images: bool = False
) -> list[ChaosRequest]:
    """Greedy requests, seeded requests and requests of n = 2, over prompts of all lengths. Some
    have a stop string, some have answers that repeat themselves, and some share their beginning.
    With `has_images` half of them begin with one of a few images.
    """
    draw = random.Random(seed)
    images = [_png(draw) for _ in range(_NUM_IMAGES)] if has_images else [b""]
    # These ids are printable bytes, which every byte-level tokenizer has.
    shared = [draw.randrange(40, 100) for _ in range(max_prompt_tokens)]
    asks = []
    for number in range(NUM_ASKS):
        length = draw.randrange(2, max_prompt_tokens)
        common = draw.choice((0, 0, length // 2))
        prompt = shared[:common] + [draw.randrange(40, 100) for _ in range(length - common)]
        image = images[number // 2 % len(images)] if number % 2 == 0 else b""
        asks.append(
            ChaosRequest(
                number=number,
                prompt=tuple(prompt),
                max_tokens=draw.randrange(4, max_new_tokens),
                temperature=1.0 if number % 3 == 2 else 0.0,
                seed=draw.randrange(1 << 32),
                n=2 if number % 6 == 5 else 1,
                stop=draw.choice(string.ascii_letters) if number % 4 == 1 else "",
                choices=tuple(draw.sample(range(40, 100), _NUM_CHOICES)) if number % 4 == 3 else (),
                image=image,
            )
        )
    return asks


def _png(draw: random.Random) -> bytes:
    """An image of noise."""
    width, height = draw.randrange(20, 160), draw.randrange(20, 160)
    rows = b"".join(b"\0" + draw.randbytes(3 * width) for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


async def send(address: str, model: str, ask: ChaosRequest, pace: Pace) -> Reply:
    """Sends a request and reads its answer at a pace. A failed request raises nothing."""
    loop = asyncio.get_running_loop()
    reply = Reply(
        tokens=[[] for _ in range(ask.n)],
        texts=[""] * ask.n,
        reasons=[[] for _ in range(ask.n)],
        started_s=loop.time(),
    )
    async with open_channel(address) as channel:
        call = _call(gateway_pb2_grpc.GatewayServiceStub(channel), model, ask, pace)
        num_messages = 0
        try:
            async for message in call:
                _take(reply, message)
                num_messages += 1
                if pace.cancel_after is not None and num_messages >= pace.cancel_after:
                    reply.has_left = True
                    reply.is_cancelled = not all(reply.reasons)
                    call.cancel()
                    break
                if pace.pause_s:
                    await asyncio.sleep(pace.pause_s)
        except grpc.aio.AioRpcError as error:
            reply.error, reply.is_typed = from_rpc_error(error), is_typed(error)
    reply.ended_s = loop.time()
    return reply


def _call(
    stub: gateway_pb2_grpc.GatewayServiceAsyncStub, model: str, ask: ChaosRequest, pace: Pace
) -> _Call:
    sampling = common_pb2.SamplingParams(
        temperature=ask.temperature,
        seed=ask.seed,
        n=ask.n,
        logit_bias=dict.fromkeys(ask.choices, BIAS),
    )
    stop = common_pb2.StopCriteria(
        max_tokens=ask.max_tokens, ignore_eos=True, stop=[ask.stop] if ask.stop else []
    )
    limit_s = pace.timeout_s + GRACE_S
    if ask.image:
        parts = (
            gateway_pb2.ContentPart(image=gateway_pb2.ImageFile(data=ask.image)),
            gateway_pb2.ContentPart(text="".join(map(chr, ask.prompt))),
        )
        chat = gateway_pb2.ChatRequest(
            model=model,
            messages=[gateway_pb2.ChatMessage(role="user", parts=parts)],
            sampling=sampling,
            stop=stop,
            stream=True,
            timeout=duration(pace.timeout_s),
            cache_salt=pace.salt,
        )
        return stub.Chat(chat, timeout=limit_s)
    request = gateway_pb2.CompleteRequest(
        model=model,
        token_ids=common_pb2.TokenIds(ids=ask.prompt),
        sampling=sampling,
        stop=stop,
        stream=True,
        timeout=duration(pace.timeout_s),
        cache_salt=pace.salt,
    )
    return stub.Complete(request, timeout=limit_s)


def _take(reply: Reply, message: _Message) -> None:
    for choice in message.choices:
        reply.tokens[choice.index] += choice.token_ids
        reply.texts[choice.index] += choice.text
        if choice.finish_reason:
            reply.reasons[choice.index].append(choice.finish_reason)
    if message.HasField("usage"):
        reply.completion_tokens = message.usage.completion_tokens
        reply.cached_tokens = message.usage.cached_prompt_tokens
    if message.HasField("timeline"):
        reply.timeline = message.timeline
