"""Puts images and clips into prompts, in place of the tokens that the chat template has written for
them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from weft.contract.spans import Media, check_spans
from weft.gateway.media.prompts import Expansion, MediaForm, put_in
from weft.gateway.media.reader import FetchedFiles, MediaReader
from weft.gateway.media.sources import MediaRefused, Source, url_of
from weft.gateway.request import ChatPrompt, FileKind, GenerateRequest, PreparedPrompt
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.parts import without_file


class PromptMedia:
    """Belongs to the event loop.

    Args:
        reader: Reads the files of all models.
        tokenize: Renders and tokenises a conversation again.
        check: Raises ContextTooLong if a prompt of so many tokens can never fit.
        num_fitting: Returns the tokens that a prompt may have.
        timeout_s: Longest wait for a process.
    """

    def __init__(
        self,
        reader: MediaReader,
        tokenize: Callable[[ModelCard, ChatPrompt], Awaitable[PreparedPrompt]],
        check: Callable[[ChatPrompt, int], None],
        num_fitting: Callable[[], int],
        timeout_s: float,
    ) -> None:
        self._reader = reader
        self._tokenize = tokenize
        self._check = check
        self._num_fitting = num_fitting
        self._timeout_s = timeout_s
        self._counts = itertools.count()

    async def open(self, prompt: ChatPrompt, request: GenerateRequest) -> list[Source] | None:
        """Reads the files that a prompt has with it, as `MediaReader.sources` does; None: there are
        URLs among them, which are not asked before the prompt's text has passed its checks.
        """
        held = self._reader.held
        held.take(request.request_id, sum(len(one.source) for one in prompt.files))
        if any(map(url_of, prompt.files)):
            return None
        fetched = FetchedFiles(lambda num_bytes: None)
        return await self._reader.sources(prompt.files, fetched, deadline=self._deadline())

    async def add(
        self,
        model: ModelCard,
        prompt: ChatPrompt,
        given: PreparedPrompt,
        request: GenerateRequest,
        opened: list[Source] | BaseException | None,
        on_media: Callable[[Sequence[Media]], None],
    ) -> None:
        """Processes a prompt's files, and sets its `ids`, `spans` and `media`. `opened` is what
        `open` has returned or raised. Calls `on_media` with the media of each file as soon as they
        are there. Raises as `MediaReader.process` does, and ContextTooLong before images are
        decoded in vain.
        """
        held, tenant = self._reader.held, request.tenant_name
        fetched = FetchedFiles(partial(held.take, request.request_id))

        async def work(prompt: ChatPrompt, given: PreparedPrompt) -> None:
            nonlocal opened
            media, files = model.media, prompt.files
            sources, opened = opened, None
            if isinstance(sources, BaseException):
                try:
                    raise sources
                finally:
                    del sources  # Or it would hold this frame, and so the files, in a cycle.
            if sources is None:
                sources = await self._reader.sources(
                    files, fetched, deadline=self._deadline(), tenant=tenant
                )
            num_texts = len(given.ids) - len(files)
            most = sum(media[file.modality].most_tokens for file in files)
            if num_texts + most > self._num_fitting():
                # Headers tell whether the images are worth decoding.
                measured = await self._measured(model, prompt, sources, tenant)
                self._check(prompt, num_texts + sum(len(one.ids) for one in measured))
            processed = await self._reader.process(
                _forms_of(model),
                files,
                sources,
                lambda file: on_media(file.media),
                deadline=self._deadline(),
                tenant=tenant,
            )
            _put_in(
                model,
                prompt,
                given,
                [
                    media[file.modality].expansion(*one.size, is_coarse=file.is_coarse)
                    for file, one in zip(files, processed, strict=True)
                ],
                [one.media for one in processed],
            )

        await self._repeat(model, prompt, given, work)
        held.take(request.request_id, sum(len(one.data) for one in given.media))
        check_spans(given.spans, len(given.ids))

    async def count(self, model: ModelCard, prompt: ChatPrompt, given: PreparedPrompt) -> None:
        """Sets a prompt's `ids` by the sizes of its files alone. Raises as `add` does."""
        held, holder = self._reader.held, f"count {next(self._counts)}"
        fetched = FetchedFiles(partial(held.take, holder))

        async def work(prompt: ChatPrompt, given: PreparedPrompt) -> None:
            sources = await self._reader.sources(prompt.files, fetched, deadline=self._deadline())
            measured = await self._measured(model, prompt, sources)
            _put_in(model, prompt, given, measured, [()] * len(measured))

        try:
            await self._repeat(model, prompt, given, work)
        finally:
            held.give_back(holder)

    async def _repeat(
        self,
        model: ModelCard,
        prompt: ChatPrompt,
        given: PreparedPrompt,
        work: Callable[[ChatPrompt, PreparedPrompt], Awaitable[None]],
    ) -> None:
        """A text takes the place of what a tool has returned and nobody can read: a conversation
        goes on, whatever its tools return.
        """
        while True:
            try:
                return await work(prompt, given)
            except MediaRefused as error:
                if not error.file.is_of_tool:
                    raise
                prompt = without_file(prompt, error.file, error.problem)
                given.ids = (await self._tokenize(model, prompt)).ids

    async def _measured(
        self,
        model: ModelCard,
        prompt: ChatPrompt,
        sources: Sequence[Source],
        tenant: str = "",
    ) -> list[Expansion]:
        sizes = await self._reader.sizes(
            _forms_of(model), prompt.files, sources, deadline=self._deadline(), tenant=tenant
        )
        return [
            model.media[file.modality].expansion(*size, is_coarse=file.is_coarse)
            for file, size in zip(prompt.files, sizes, strict=True)
        ]

    def _deadline(self) -> float:
        """The caller may give up earlier."""
        return asyncio.get_running_loop().time() + self._timeout_s


def _forms_of(model: ModelCard) -> dict[FileKind, MediaForm]:
    return {kind: one.form for kind, one in model.media.items()}


def _put_in(
    model: ModelCard,
    prompt: ChatPrompt,
    given: PreparedPrompt,
    expansions: Sequence[Expansion],
    media: Sequence[Sequence[Media]],
) -> None:
    """`expansions` and `media` are those of the prompt's files, in order."""
    files: dict[int, list[tuple[Expansion, Sequence[Media]]]]
    files = {one.place_id: [] for one in model.media.values()}
    for file, expansion, own in zip(prompt.files, expansions, media, strict=True):
        files[model.media[file.modality].place_id].append((expansion, own))
    given.ids, given.spans = put_in(given.ids, files)
    given.media = tuple({one.digest: one for own in media for one in own}.values())
