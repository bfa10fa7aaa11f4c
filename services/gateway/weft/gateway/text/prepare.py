"""Turns prompts as the client wrote them into token ids that fit the context."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tokenizers import Tokenizer
from weft.contract.errors import ContextTooLong, DeadlineExceeded, InvalidRequest
from weft.contract.spans import Media, MediaSpan
from weft.gateway.admission.admission import Admission
from weft.gateway.media.reader import MediaReader
from weft.gateway.media.sources import Source
from weft.gateway.request import (
    ChatPrompt,
    ClipPrompt,
    FileKind,
    GenerateRequest,
    PairPrompt,
    PoolingOptions,
    PreparedPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    WrappedPrompt,
)
from weft.gateway.settings import GatewaySettings
from weft.gateway.text.answer.describe import with_described_tools
from weft.gateway.text.answer.formats import ReasoningFormat
from weft.gateway.text.answer.make import final_constraint
from weft.gateway.text.control_tokens import Rendered
from weft.gateway.text.image_prompts import PromptMedia
from weft.gateway.text.model_card import ModelCard, least_tokens
from weft.gateway.text.parts import text_of, without_unread
from weft.gateway.text.tokens import decode, encode, encode_cut, encode_pair, encode_parts
from weft.gateway.validate import invalid
from weft.gateway.warnings import warn

T = TypeVar("T")


class Preparer:
    """Applies the chat template and tokenises, off the event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        context_tokens: Callable[[], int],
        files: MediaReader | None = None,
    ) -> None:
        """Starts the threads. `context_tokens` returns the context length that all owners
        have now. `files` reads the images and clips of all models; None: no
        model takes any.
        """
        self._context_tokens = context_tokens
        num_threads = settings.tokenizer_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        # Calls that only tokenise may use half of the threads, or the only one, so that prompts of
        # requests rarely wait for them.
        self._bare = Admission(max(1, num_threads // 2), settings.max_queued_tokenizations)
        self._timeout_s = settings.request_timeout_s
        self._media: PromptMedia | None = None
        if files is not None:
            self._media = PromptMedia(
                files, self._again, self._refuse_above, context_tokens, self._timeout_s
            )

    def close(self) -> None:
        """Stops the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prepare(
        self,
        model: ModelCard,
        request: GenerateRequest,
        on_media: Callable[[Sequence[Media]], None],
    ) -> list[PreparedPrompt]:
        """Prepares the prompts of a request. Calls `on_media` with the media of each file once they
        are there, before the request has passed all checks.

        Raises:
            InvalidRequest: A template refuses its messages, a prompt is empty, an image cannot be
                read, or the constraint cannot be combined with calls.
            ContextTooLong: A prompt and its output do not fit the context.
            Overloaded: Too many images wait.
            DeadlineExceeded: An image was not processed in time.
            PeerUnavailable: The process that worked on an image has died.
        """
        prompts, pooling = request.prompts, request.pooling
        opened: list[list[Source] | BaseException | None] = []
        if all(isinstance(prompt, TokenPrompt) for prompt in prompts):
            # A thread is not worth it: there is hardly anything to do.
            prepared = self._tokenize_all(model, prompts, pooling)
        else:
            loop = asyncio.get_running_loop()
            opening = asyncio.create_task(self._open_files(request))
            try:
                # Its future has no name here, or it and its error would hold the body in a cycle.
                prepared = await loop.run_in_executor(
                    self._pool, self._tokenize_all, model, prompts, pooling
                )
                opened = await opening
            finally:
                opening.cancel()
        for prompt, given, seed in zip(prompts, prepared, request.seeds, strict=True):
            if isinstance(prompt, ChatPrompt) and prompt.files:
                await self._reading().add(model, prompt, given, request, opened.pop(0), on_media)
            self._fit(prompt, given, request)
            given.seed, given.constraint = seed, final_constraint(request, model, given)
        return prepared

    async def _open_files(
        self, request: GenerateRequest
    ) -> list[list[Source] | BaseException | None]:
        """What `PromptMedia.open` gives for each prompt with files, or raises."""
        chats = [one for one in request.prompts if isinstance(one, ChatPrompt) and one.files]
        opening = [self._reading().open(chat, request) for chat in chats]
        return await asyncio.gather(*opening, return_exceptions=True)

    async def tokenize(self, model: ModelCard, prompt: Prompt) -> list[int]:
        """Tokenises one prompt that is not run.

        Raises:
            InvalidRequest: A template refuses its messages, or an image has no size.
            ContextTooLong: It is many times longer than the context.
            Overloaded: Too many such calls wait.
            DeadlineExceeded: It was not done in time.
            PeerUnavailable: The process that read an image's header has died.
        """
        if isinstance(prompt, ChatPrompt):
            prompt = without_unread(prompt, model.unread, model.reads)
        (given,) = await self._bounded(lambda: self._tokenize_all(model, (prompt,)))
        if isinstance(prompt, ChatPrompt) and prompt.files:
            await self._reading().count(model, prompt, given)
        return given.ids

    async def detokenize(self, model: ModelCard, many: Sequence[Sequence[int]]) -> list[str]:
        """Decodes lists of token ids, special tokens included.

        Raises:
            Overloaded: Too many such calls wait.
            DeadlineExceeded: It was not done in time.
        """
        return await self._bounded(lambda: decode(model.tokenizer, many))

    def _reading(self) -> PromptMedia:
        assert self._media is not None, "the gateway has a reader for models that take media"
        return self._media

    async def _again(self, model: ModelCard, prompt: ChatPrompt) -> PreparedPrompt:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._tokenize, model, prompt)

    async def _bounded(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        admitted = await self._bare.admit(1, deadline)
        job = self._pool.submit(work)

        def release(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the gateway has stopped
                loop.call_soon_threadsafe(admitted.release)

        # The place is released when the thread has ended, even if the caller has left before.
        job.add_done_callback(release)
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed while the text was tokenised", stage="prepare"
            ) from None
        finally:
            del job  # Its error would keep this frame, and the frame its error.

    def _tokenize_all(
        self, model: ModelCard, prompts: Sequence[Prompt], pooling: PoolingOptions | None = None
    ) -> list[PreparedPrompt]:
        most = None if pooling is None else pooling.truncate_tokens
        if most is not None:
            context = self._context_tokens()
            most = min(context, most or context)
            return [_tokenize_cut(model, prompt, most) for prompt in prompts]
        for prompt in prompts:
            self._refuse_hopeless(model, prompt)
        return [self._tokenize(model, prompt) for prompt in prompts]

    def _tokenize(self, model: ModelCard, prompt: Prompt) -> PreparedPrompt:
        if not isinstance(prompt, ChatPrompt):
            return _tokenize(model, prompt)
        rendered = _render(model, prompt)
        # Calls and reasoning of earlier turns count as far as the template writes them.
        self._refuse_above(prompt, least_tokens(model, [rendered.plain]))
        return _tokenize_chat(model, prompt, rendered)

    def _refuse_hopeless(self, model: ModelCard, prompt: Prompt) -> None:
        """Refuses a text that is far too long before megabytes of it are rendered or tokenised."""
        if isinstance(prompt, TextPrompt):
            least = least_tokens(model, [prompt.text])
        elif isinstance(prompt, ChatPrompt):
            # Templates write parameters in forms of their own, some shorter than JSON.
            tools = [tool["function"].get("description") or "" for tool in prompt.tools]
            least = least_tokens(model, [*tools, *(_content(m) for m in prompt.messages)])
        elif isinstance(prompt, PairPrompt):
            least = least_tokens(model, [prompt.first, prompt.second])
        elif isinstance(prompt, WrappedPrompt):
            least = least_tokens(model, [prompt.text])
        else:
            least = len(prompt.ids)
        self._refuse_above(prompt, least)

    def _refuse_above(self, prompt: Prompt, least: int) -> None:
        if least > self._context_tokens():
            raise self._too_long(prompt, f"at least {least}; shorten it", least)

    def _fit(self, prompt: Prompt, given: PreparedPrompt, request: GenerateRequest) -> None:
        """Sets how many tokens of the context the answer to a prompt may have."""
        ids, raw, stop = given.ids, request.raw, request.stop
        if not ids:
            raise invalid(_param(prompt), "the prompt has no tokens; give at least one")
        context = self._context_tokens()
        if request.pooling is not None:
            if len(ids) > context:
                how = "truncate_prompt_tokens, in /v2/embed truncate"
                problem = f"{len(ids)}; shorten it, or have it cut ({how})"
                raise self._too_long(prompt, problem, len(ids))
            return
        # A token that is only drawn needs no room.
        room = context - len(ids) + raw.is_echo_alone
        max_tokens, param = stop.max_tokens, raw.name_of("max_tokens")
        if max_tokens is None:
            max_tokens = room
        if max_tokens > room >= 1 and raw.lowers_max_tokens:
            warn(param, f"lowered to {room}, which the prompt leaves of the context")
            max_tokens = room
        if room < 1 or max_tokens > room:
            problem = (
                f"{len(ids)} and the output needs {max(1, max_tokens)}; shorten the prompt or "
                f"lower {param}"
            )
            error = self._too_long(prompt, problem, len(ids) if room < 1 else 0)
            if max_tokens > context:
                error.param = param
            raise error
        if stop.min_tokens > max_tokens:
            raise invalid(
                raw.name_of("min_tokens"),
                f"{stop.min_tokens}, but only {max_tokens} tokens can be generated",
            )
        given.max_tokens = max_tokens

    def _too_long(self, prompt: Prompt, problem: str, num_tokens: int) -> ContextTooLong:
        """`num_tokens` is 0 if the prompt fits, but its answer does not."""
        context = self._context_tokens()
        error = ContextTooLong(
            # Clients look for these words, which are OpenAI's, to shorten a conversation.
            f"this model's maximum context length is {context} tokens, but the prompt has "
            f"{problem}",
            stage="validate",
            param=_param(prompt),
        )
        error.num_prompt_tokens, error.max_tokens = num_tokens, context
        return error


def _tokenize(model: ModelCard, prompt: Prompt) -> PreparedPrompt:
    tokenizer = model.tokenizer
    if isinstance(prompt, TextPrompt):
        add_special = prompt.add_special_tokens
        return PreparedPrompt(ids=encode(tokenizer, prompt.text, add_special_tokens=add_special))
    if isinstance(prompt, PairPrompt):
        ids, second = encode_pair(_of_pair(model, prompt), prompt.first, prompt.second)
        return PreparedPrompt(ids=ids, segment_start=second)
    if isinstance(prompt, WrappedPrompt):
        return PreparedPrompt(ids=_encode_wrapped(model, prompt))
    if isinstance(prompt, ClipPrompt):
        clip = prompt.clip
        span = MediaSpan(position=0, length=prompt.num_rows, digest=clip.digest, shape=clip.shape)
        return PreparedPrompt(ids=list(prompt.ids), spans=(span,), media=(clip,))
    assert isinstance(prompt, TokenPrompt)
    return PreparedPrompt(ids=list(prompt.ids))


def _tokenize_chat(model: ModelCard, prompt: ChatPrompt, rendered: Rendered) -> PreparedPrompt:
    for media in model.media.values():
        # In texts of the conversation the token is spelled with a mark in it.
        rendered = rendered._replace(text=media.with_texts_around(rendered.text))
    ids = model.controls.encode(rendered)
    for kind, media in model.media.items():
        files = [file for file in prompt.files if file.modality == kind]
        _check_placeholders(kind, ids.count(media.place_id), len(files))
    if model.reasoning is None:
        return PreparedPrompt(ids=ids)
    begins, has_reasoned = _reasoning_at_end(prompt, rendered.text, model.reasoning)
    return PreparedPrompt(ids=ids, begins_reasoning=begins, has_reasoned=has_reasoned)


def _check_placeholders(kind: FileKind, num_placeholders: int, num_files: int) -> None:
    """The n-th placeholder is the n-th file's, since no text of the conversation makes one."""
    if num_placeholders != num_files:
        what = {"image": "images", "audio": "clips of audio", "video": "videos"}[kind]
        raise invalid(
            "messages",
            f"have {num_files} {what}, for which the model's chat template wrote "
            f"{num_placeholders} places; put {what} into messages of the user's",
        )


def _tokenize_cut(model: ModelCard, prompt: Prompt, most: int) -> PreparedPrompt:
    """At most `most` tokens: the rest is cut from the end of the prompt's texts."""
    if isinstance(prompt, TokenPrompt):
        return PreparedPrompt(ids=list(prompt.ids[:most]))
    tokenizer = model.tokenizer
    if isinstance(prompt, PairPrompt):
        ids, second = encode_pair(_of_pair(model, prompt), prompt.first, prompt.second, most)
        return PreparedPrompt(ids=ids, segment_start=second)
    if isinstance(prompt, WrappedPrompt):
        return PreparedPrompt(ids=_encode_wrapped(model, prompt, most))
    assert isinstance(prompt, TextPrompt)
    special = prompt.add_special_tokens
    return PreparedPrompt(ids=encode_cut(tokenizer, prompt.text, most, add_special_tokens=special))


def _of_pair(model: ModelCard, prompt: PairPrompt) -> Tokenizer:
    return model.controls.tokenizer_of_text(prompt.first, prompt.second)


def _encode_wrapped(model: ModelCard, prompt: WrappedPrompt, most: int | None = None) -> list[int]:
    """Control tokens in the text between the two fixed ones are text."""
    of_text = model.controls.tokenizer_of_text(prompt.text)
    texts = (prompt.head, prompt.text, prompt.tail)
    return encode_parts(model.tokenizer, *texts, most, prompt.needed_chars, of_text=of_text)


def _is_of_call(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _render(model: ModelCard, prompt: ChatPrompt) -> Rendered:
    template = model.template
    if template is None:
        raise invalid("messages", f"the model `{model.name}` has no chat template")
    prompt, mark = model.controls.guard(prompt)
    messages, variables = prompt.messages, dict(prompt.template_variables)
    if prompt.tools and model.tool_template is not None:
        template = model.tool_template
    if not template.knows_developers:
        messages = tuple(map(_as_system, messages))
    if template.knows_thinking:
        messages = tuple(map(_with_thinking, messages))
    if template.takes_tools and prompt.tools:
        variables["tools"] = list(prompt.tools)
    elif not template.takes_tools and (prompt.tools or any(map(_is_of_call, messages))):
        messages = tuple(with_described_tools(messages, prompt.tools))
    render = partial(
        template.render,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        variables=variables,
    )
    try:
        try:
            text = render(messages)
        except InvalidRequest:
            if not any(message.get("tool_calls") for message in messages):
                raise
            # DeepSeek's templates join the arguments of calls to other texts.
            text = render(tuple(map(_with_arguments_as_text, messages)))
    except InvalidRequest as error:
        told = Rendered.of(error.message, mark).plain
        raise InvalidRequest(told, stage=error.stage, param=error.param) from error.__cause__
    return Rendered.of(text, mark)


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """For templates that do not know the role `developer`."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _with_arguments_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reasoning gets the name that gpt-oss's template knows. In a message with calls, that
    template refuses reasoning together with content; then the content takes the place of the
    reasoning.
    """
    reasoning = message.get("reasoning")
    if reasoning is None or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": reasoning}


def _reasoning_at_end(
    prompt: ChatPrompt, text: str, reasoning: ReasoningFormat
) -> tuple[bool, bool]:
    """Whether a rendered conversation ends within the reasoning of the model's turn, and whether it
    ends after it.
    """
    opener, closer = reasoning.opener, reasoning.closer
    if reasoning.is_harmony:
        return False, False  # Answers in channels name their channel themselves.
    if prompt.continue_final_message:
        final = _content(prompt.messages[-1])
        return final.rfind(opener) > final.rfind(closer), closer in final
    text = text.rstrip()
    has_reasoned = text.endswith(closer)
    return text.endswith(opener) or (reasoning.always_begins and not has_reasoned), has_reasoned


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _content(message: Mapping[str, Any]) -> str:
    return text_of(message.get("content"))
