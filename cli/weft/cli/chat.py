"""`weft chat`: a conversation in the terminal.

/reset forgets it, /quit or end of input ends it; Ctrl-C stops the answer being written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import grpc
from rich.console import Console
from weft.cli.channel import (
    add_address_flag,
    api_key_metadata,
    cli_identity,
    explain,
    open_blocking_channel,
)
from weft.cli.numbers import number, whole_number
from weft.contract.errors import ConfigError
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

PROMPT = "> "
_TIMEOUT_S = 10.0


class Conversation:
    """The messages of a conversation, and the calls that continue it."""

    def __init__(
        self,
        stub: gateway_pb2_grpc.GatewayServiceStub,
        request: gateway_pb2.ChatRequest,
        console: Console,
    ) -> None:
        """`request` has the model, the settings and perhaps a system message."""
        self._stub = stub
        self._request = request
        self._console = console
        self._first = len(request.messages)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        del self._request.messages[self._first :]

    def say(self, text: str) -> None:
        """Sends `text` and writes the answer as it arrives. The conversation remembers both, or
        neither if the call fails with grpc.RpcError.
        """
        self._request.messages.add(role="user", content=text)
        pieces: list[str] = []
        begin_s = time.monotonic()
        last: gateway_pb2.ChatResponse | None = None
        is_reasoning = False
        call = self._stub.Chat(self._request, metadata=api_key_metadata())
        # A handler instead of KeyboardInterrupt, which gRPC's own code may swallow.
        before = signal.signal(signal.SIGINT, lambda *_: call.cancel())
        try:
            for last in call:
                for choice in last.choices:
                    if choice.reasoning:
                        is_reasoning = True
                        self._console.out(choice.reasoning, style="dim", end="", highlight=False)
                    if choice.text and is_reasoning:
                        is_reasoning = False
                        self._write("\n\n")
                    pieces.append(choice.text)
                    self._write(choice.text)
        except grpc.RpcError:
            if call.code() is not grpc.StatusCode.CANCELLED:
                self._request.messages.pop()
                if last is not None:
                    self._write("\n")
                raise
            self._write(" [stopped]")
        finally:
            signal.signal(signal.SIGINT, before)
        self._write("\n")
        self._request.messages.add(role="assistant", content="".join(pieces))
        if last is not None and last.HasField("usage"):
            text = summary(last, time.monotonic() - begin_s)
            self._console.print(text, style="dim", highlight=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        # Written without rich, since an answer may contain text that looks like markup.
        self._console.file.write(text)
        self._console.file.flush()


def summary(last: gateway_pb2.ChatResponse, seconds: float) -> str:
    """The cost of an answer in one line, from its last message."""
    tokens = last.usage.completion_tokens
    parts = [f"{tokens} tokens", f"{tokens / max(seconds, 1e-9):.0f} tokens/s"]
    timeline = last.timeline
    if timeline.HasField("first_token_time"):
        first_s = timeline.first_token_time.ToTimedelta().total_seconds()
        parts.append(f"first after {first_s:.2f} s")
    parts.append(f"prompt {last.usage.prompt_tokens}: {timeline.matched_tokens} cached here")
    known = timeline.matched_tokens
    for fill in timeline.fills:
        if fill.accepted_tokens:
            known += fill.accepted_tokens
            parts.append(f"{fill.accepted_tokens} from {fill.worker_id}")
    here = timeline.local_prefill_tokens
    # Tokens that were computed again: the last one of a prompt that was filled whole, or those
    # that a preemption cost.
    again = max(0, min(here, known + here - last.usage.prompt_tokens))
    if here > again:
        parts.append(f"{here - again} computed by {timeline.worker_id}")
    if again:
        parts.append(f"{again} run again by {timeline.worker_id}")
    return ", ".join(parts)


def first_model(stub: gateway_pb2_grpc.GatewayServiceStub) -> str:
    request = gateway_pb2.ListModelsRequest()
    models = stub.ListModels(request, timeout=_TIMEOUT_S, metadata=api_key_metadata()).models
    for model in models:
        # Gateways of the last release do not report the task.
        if model.task in ("", "generate"):
            return model.name
    served = ", ".join(f"{model.name} ({model.task})" for model in models)
    raise ConfigError(f"no model here generates text: {served or 'none is served'}")


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    console = Console()
    identity = cli_identity(arguments.tls_dir)
    with open_blocking_channel(arguments.address, "gateway", identity) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        try:
            model = arguments.model or first_model(stub)
        except grpc.RpcError as error:
            sys.stderr.write(f"weft chat: {explain(error, arguments.address)}\n")
            return 1
        console.print(f"{model} at {arguments.address}; /reset, /quit", style="dim")
        conversation = Conversation(stub, _request(arguments, model), console)
        has_failed = False
        for line in _lines():
            if line == "/quit":
                break
            if line == "/reset":
                conversation.reset()
                continue
            try:
                conversation.say(line)
            except grpc.RpcError as error:
                has_failed = True
                text = explain(error, arguments.address)
                Console(stderr=True).print(text, style="red", markup=False, soft_wrap=True)
    # At a terminal the user has seen the failure and gone on, so it does not count.
    return int(has_failed and not sys.stdin.isatty())


def _parser() -> argparse.ArgumentParser:
    summary_line, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="weft chat", description=summary_line, epilog=rest.strip()
    )
    add_address_flag(parser)
    parser.add_argument("--model", help="name of the model; default: the first that generates text")
    parser.add_argument("--temperature", type=number(0, 100), help="0 = always the likeliest token")
    parser.add_argument(
        "--max-tokens", type=whole_number(1, 2**31 - 1), help="longest answer, in tokens"
    )
    parser.add_argument("--system", help="system message")
    return parser


def _request(arguments: argparse.Namespace, model: str) -> gateway_pb2.ChatRequest:
    request = gateway_pb2.ChatRequest(
        model=model,
        stream=True,
        sampling=common_pb2.SamplingParams(temperature=arguments.temperature),
        stop=common_pb2.StopCriteria(max_tokens=arguments.max_tokens),
    )
    if arguments.system:
        request.messages.add(role="system", content=arguments.system)
    return request


def _lines() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes of another encoding become lone surrogates instead of errors.
        sys.stdin.reconfigure(errors="surrogateescape")
    with contextlib.suppress(ImportError):  # Enables line editing where it is available.
        import readline  # noqa: F401
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n(/quit ends)\n")
            continue
        line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if line:
            yield line
