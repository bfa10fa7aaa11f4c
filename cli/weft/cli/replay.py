"""`weft replay FILE`: sends the requests of a log again and compares the answers.

FILE is a gateway's request log with tokens (`--request-log`, `--request-log-content tokens`), or
`requests.jsonl` of a crash dump. Sampling uses the logged seeds: in float32 the same model gives
the same tokens; in bfloat16 up to near-ties.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import grpc
from google.protobuf.json_format import ParseDict, ParseError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from weft.cli.channel import (
    add_address_flag,
    api_key_metadata,
    cli_identity,
    explain,
    open_channel,
)
from weft.cli.numbers import MAX_SECONDS, number, whole_number
from weft.common.telemetry.request_log import LoggedPrompt, read_log
from weft.contract.codec.pairs import FINISH_REASONS
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

Verdict = Literal["same", "different", "failed", "skipped"]
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Result:
    request_id: str
    verdict: Verdict
    detail: str = ""
    new_request_id: str = ""
    logged_s: float = 0.0
    took_s: float = 0.0


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        identity = cli_identity(arguments.tls_dir)
        with arguments.file.open(encoding="utf-8", errors="replace") as file:
            prompts = list(read_log(file))[: arguments.limit]

        async def run() -> list[Result]:
            async with open_channel(arguments.address, "gateway", identity) as channel:
                replay = Replay(channel, arguments.concurrency, arguments.timeout)
                return await replay.run(prompts, arguments.speed)

        results = asyncio.run(run())
    except OSError as error:
        sys.stderr.write(f"weft replay: {arguments.file}: {error.strerror}\n")
        return 1
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    else:
        show(Console(), results)
    counts = Counter(result.verdict for result in results)
    return int(not counts["same"] or bool(counts["different"] or counts["failed"]))


class Replay:
    """Sends logged prompts to a gateway, at most `concurrency` at once."""

    def __init__(self, channel: grpc.aio.Channel, concurrency: int, timeout_s: float) -> None:
        self._stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        self._places = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s

    async def run(self, prompts: Sequence[LoggedPrompt], speed: float) -> list[Result]:
        """Returns the results in the prompts' order. A `speed` of 1 keeps the times of the log, 2
        is twice as fast, 0 as fast as possible.
        """
        if not prompts:
            return []
        start_s, first = time.monotonic(), min(prompt.time for prompt in prompts)

        async def send(prompt: LoggedPrompt) -> Result:
            if speed:
                due_s = start_s + (prompt.time - first) / speed
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            async with self._places:
                result = await self._send(prompt)
            progress.advance(task)
            return result

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("replay", total=len(prompts))
            return await asyncio.gather(*(send(prompt) for prompt in prompts))

    async def _send(self, prompt: LoggedPrompt) -> Result:
        if not prompt.prompt_ids:
            return Result(prompt.request_id, "skipped", "its tokens were not logged")
        if prompt.is_pooled:
            return Result(prompt.request_id, "skipped", "vectors were wanted, which are not logged")
        try:
            request = to_request(prompt)
        except ParseError as error:
            return Result(prompt.request_id, "skipped", f"not of this version: {error}")
        began_s = time.monotonic()
        answers: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        new_id = ""
        try:
            call = self._stub.Complete(
                request, timeout=self._timeout_s, metadata=api_key_metadata() or None
            )
            async for message in call:
                new_id = message.request_id
                for choice in message.choices:
                    answers.setdefault(choice.index, []).extend(choice.token_ids)
                    if choice.finish_reason:
                        reasons[choice.index] = FINISH_REASONS[choice.finish_reason]
        except grpc.aio.AioRpcError as error:
            return Result(prompt.request_id, "failed", explain(error, "the gateway"), new_id)
        difference = compare(prompt, answers, reasons)
        return Result(
            prompt.request_id,
            "different" if difference else "same",
            difference,
            new_id,
            prompt.duration_s,
            round(time.monotonic() - began_s, 6),
        )


def to_request(prompt: LoggedPrompt) -> gateway_pb2.CompleteRequest:
    """Raises ParseError if the prompt has fields that this version does not know."""
    request = gateway_pb2.CompleteRequest(
        model=prompt.adapter,
        token_ids=common_pb2.TokenIds(ids=prompt.prompt_ids or []),
        sampling=ParseDict(prompt.sampling, common_pb2.SamplingParams()),
        stop=ParseDict(prompt.stop, common_pb2.StopCriteria()),
    )
    if prompt.top_logprobs is not None:
        request.logprobs.top_logprobs = prompt.top_logprobs
        request.logprobs.SetInParent()
    return request


def compare(prompt: LoggedPrompt, answers: dict[int, list[int]], reasons: dict[int, str]) -> str:
    """Describes how an answer differs from the logged one; empty if it does not. A logged sample
    without an end is compared up to where the log ends.
    """
    for index, sample in enumerate(prompt.samples):
        ids = answers.get(index, [])
        has_ended = sample.finish_reason in ("stop", "length")
        wanted = sample.ids if sample.ids is not None else []
        got = ids if has_ended else ids[: len(wanted)]
        if sample.ids is not None and got != wanted:
            pairs = zip(wanted, got, strict=False)
            shared = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got))
            )
            return f"sample {index} differs from its token {shared} on ({len(wanted)} logged)"
        if has_ended and (len(ids), reasons.get(index)) != (
            sample.num_tokens,
            sample.finish_reason,
        ):
            return (
                f"sample {index} has {len(ids)} tokens and ends by {reasons.get(index)}; logged: "
                f"{sample.num_tokens} and {sample.finish_reason}"
            )
    return ""


def show(console: Console, results: Sequence[Result]) -> None:
    odd = [result for result in results if result.verdict != "same"]
    if odd:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("request", "verdict", ""):
            table.add_column(name, overflow="fold")
        for result in odd[:_SHOWN]:
            table.add_row(result.request_id, result.verdict, result.detail)
        console.print(table)
        if len(odd) > _SHOWN:
            console.print(f"... and {len(odd) - _SHOWN} more; --json shows all")
    counts = Counter(result.verdict for result in results)
    verdicts: tuple[Verdict, ...] = ("same", "different", "failed", "skipped")
    console.print(
        f"{len(results)} requests: "
        + ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft replay", description=__doc__)
    parser.add_argument("file", type=Path, help="a request log, or requests.jsonl of a crash dump")
    add_address_flag(parser)
    parser.add_argument(
        "--speed",
        type=number(0, 1e6),
        default=0.0,
        metavar="X",
        help="1 = at the times of the log, 2 = twice as fast; 0 = as fast as it goes (default)",
    )
    parser.add_argument(
        "--concurrency",
        type=whole_number(1, 4096),
        default=16,
        metavar="N",
        help="requests under way at once (default 16)",
    )
    parser.add_argument(
        "--timeout",
        type=number(0, MAX_SECONDS),
        default=600.0,
        metavar="S",
        help="of each request (default 600)",
    )
    parser.add_argument(
        "--limit",
        type=whole_number(1, 2**31 - 1),
        metavar="N",
        help="the first N requests only",
    )
    parser.add_argument("--json", action="store_true", help="every result, as JSON")
    return parser
