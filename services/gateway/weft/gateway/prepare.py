"""Turns prompts as the client wrote them into token ids that fit the context."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from weft.engine.errors import ContextTooLong
from weft.gateway.admit import Admission
from weft.gateway.model import ServedModel, least_tokens
from weft.gateway.request import ChatPrompt, PreparedPrompt, Prompt, Stopping, TextPrompt
from weft.gateway.settings import GatewaySettings
from weft.gateway.tokens import decode, encode
from weft.gateway.validate import invalid

T = TypeVar("T")


class Preparer:
    """Applies the chat template and tokenises, off the event loop."""

    def __init__(
        self, model: ServedModel, settings: GatewaySettings, context_tokens: Callable[[], int]
    ) -> None:
        """Starts the threads.

        Args:
            model: The served one.
            settings: How many threads, and how many may wait.
            context_tokens: Tells the context length that all owners have now.
        """
        self._model = model
        self._context_tokens = context_tokens
        num_threads = settings.tokenizer_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        # Prompts are bounded by their own admission; what is only tokenised leaves them threads.
        self._bare = Admission(max(1, num_threads // 2), settings.max_queued_tokenizations)
        self._timeout_s = settings.request_timeout_s

    def close(self) -> None:
        """Stops the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, prompts: Sequence[Prompt], stopping: Stopping) -> list[PreparedPrompt]:
        """Prepares the prompts of a checked request.

        Raises:
            InvalidRequest: A template refuses its messages, or a prompt is empty.
            ContextTooLong: A prompt and its output do not fit the context.
        """
        tokenized = await self._in_thread(lambda: self._tokenize_all(tuple(prompts)))
        return [
            self._fit(prompt, ids, stopping) for prompt, ids in zip(prompts, tokenized, strict=True)
        ]

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokenises one prompt that is not run.

        Raises:
            InvalidRequest: A template refuses its messages.
            ContextTooLong: It is many times longer than the context.
            Overloaded: Too many such calls wait.
            DeadlineExceeded: No thread came free in time.
        """
        (ids,) = await self._bounded(lambda: self._tokenize_all((prompt,)))
        return ids

    async def detokenize(self, many: Sequence[Sequence[int]]) -> list[str]:
        """Decodes lists of token ids, special tokens included.

        Raises:
            Overloaded: Too many such calls wait.
            DeadlineExceeded: No thread came free in time.
        """
        return await self._bounded(lambda: decode(self._model.tokenizer, many))

    async def _bounded(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        place = await self._bare.admit(1, loop.time() + self._timeout_s)
        job = self._pool.submit(work)

        def release(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the gateway has stopped
                loop.call_soon_threadsafe(place.release)

        # Not when the caller leaves: the thread goes on.
        job.add_done_callback(release)
        return await asyncio.wrap_future(job)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _tokenize_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        for prompt in prompts:
            self._refuse_hopeless(prompt)
        return [self._tokenize(prompt) for prompt in prompts]

    def _refuse_hopeless(self, prompt: Prompt) -> None:
        """Refuses a text that is far too long before tokenising megabytes of it."""
        if isinstance(prompt, TextPrompt):
            least = least_tokens(self._model, [prompt.text])
        elif isinstance(prompt, ChatPrompt):
            least = least_tokens(self._model, [_content(m) for m in prompt.messages])
        else:
            least = len(prompt.ids)
        if least >= self._context_tokens():
            raise self._too_long(prompt, f"at least {least}; shorten it")

    def _tokenize(self, prompt: Prompt) -> list[int]:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, TextPrompt):
            return encode(tokenizer, prompt.text, add_special_tokens=prompt.add_special_tokens)
        if isinstance(prompt, ChatPrompt):
            if self._model.template is None:
                raise invalid("messages", f"the model `{self._model.name}` has no chat template")
            text = self._model.template.render(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                variables=prompt.template_variables,
            )
            # The template has written the special tokens itself.
            return encode(tokenizer, text, add_special_tokens=False)
        return list(prompt.ids)

    def _fit(self, prompt: Prompt, ids: list[int], stopping: Stopping) -> PreparedPrompt:
        if not ids:
            raise invalid(_param(prompt), "the prompt has no tokens; give at least one")
        context = self._context_tokens()
        room = context - len(ids)
        max_tokens = room if stopping.max_tokens is None else stopping.max_tokens
        if room < 1 or max_tokens > room:
            problem = (
                f"{len(ids)} and the output needs {max(1, max_tokens)}; shorten the prompt or "
                "lower max_tokens"
            )
            raise self._too_long(prompt, problem)
        if stopping.min_tokens > max_tokens:
            raise invalid(
                "min_tokens",
                f"{stopping.min_tokens}, but only {max_tokens} tokens can be generated",
            )
        return PreparedPrompt(ids=ids, max_tokens=max_tokens)

    def _too_long(self, prompt: Prompt, problem: str) -> ContextTooLong:
        context = self._context_tokens()
        return ContextTooLong(
            f"this model's context is {context} tokens, but the prompt has {problem}",
            stage="validate",
            param=_param(prompt),
        )


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
