"""Puts images into prompts, in place of the tokens that the chat template has written for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from weft.contract.spans import check_spans
from weft.gateway.media.load import Expansion, ImagePrompts, put_in
from weft.gateway.media.reader import FetchedFiles, ImageReader
from weft.gateway.media.sources import ImageRefused, Source
from weft.gateway.request import ChatPrompt, GenerateRequest, PreparedPrompt
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.parts import without_image


class PromptImages:
    """Belongs to the event loop.

    Args:
        reader: Reads the images of all models.
        tokenize: Renders and tokenises a conversation again.
        check: Raises ContextTooLong if a prompt of so many tokens can never fit.
        num_fitting: Returns the tokens that a prompt may have.
        timeout_s: Longest wait for a process.
    """

    def __init__(
        self,
        reader: ImageReader,
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

    async def add(
        self, model: ModelCard, prompt: ChatPrompt, given: PreparedPrompt, request: GenerateRequest
    ) -> None:
        """Processes a prompt's images, and sets its `ids`, `spans` and `media`. Raises as
        `ImageReader.process` does, and ContextTooLong before anything is decoded in vain.
        """
        held, tenant = self._reader.held, request.tenant_name
        held.take(request.request_id, sum(len(one.source) for one in prompt.images))
        fetched = FetchedFiles(partial(held.take, request.request_id))

        async def work(prompt: ChatPrompt, given: PreparedPrompt) -> None:
            images = _images_of(model)
            sources = await self._reader.sources(
                prompt.images, fetched, deadline=self._deadline(), tenant=tenant
            )
            num_texts = len(given.ids) - len(prompt.images)
            if num_texts + images.most_tokens * len(prompt.images) > self._num_fitting():
                # Headers tell whether the images are worth decoding.
                measured = await self._measured(images, prompt, sources, tenant)
                self._check(prompt, num_texts + sum(len(one.ids) for one in measured))
            processed = await self._reader.process(
                images.form, prompt.images, sources, deadline=self._deadline(), tenant=tenant
            )
            expanded = [
                (images.expansion(one.height, one.width, is_coarse=image.is_coarse), one.media)
                for image, one in zip(prompt.images, processed, strict=True)
            ]
            given.ids, given.spans = put_in(given.ids, images.image_id, expanded)
            given.media = tuple({one.digest: one for _, many in expanded for one in many}.values())

        await self._repeat(model, prompt, given, work)
        held.take(request.request_id, sum(len(one.data) for one in given.media))
        check_spans(given.spans, len(given.ids))

    async def count(self, model: ModelCard, prompt: ChatPrompt, given: PreparedPrompt) -> None:
        """Sets a prompt's `ids` by the headers of its images alone. Raises as `add` does."""
        held, holder = self._reader.held, f"count {next(self._counts)}"
        fetched = FetchedFiles(partial(held.take, holder))

        async def work(prompt: ChatPrompt, given: PreparedPrompt) -> None:
            images = _images_of(model)
            sources = await self._reader.sources(prompt.images, fetched, deadline=self._deadline())
            measured = await self._measured(images, prompt, sources)
            given.ids, _ = put_in(given.ids, images.image_id, [(one, ()) for one in measured])

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
            except ImageRefused as error:
                if not error.image.is_of_tool:
                    raise
                prompt = without_image(prompt, error.image, error.problem)
                given.ids = (await self._tokenize(model, prompt)).ids

    async def _measured(
        self,
        images: ImagePrompts,
        prompt: ChatPrompt,
        sources: Sequence[Source],
        tenant: str = "",
    ) -> list[Expansion]:
        sizes = await self._reader.sizes(
            images.form, prompt.images, sources, deadline=self._deadline(), tenant=tenant
        )
        return [
            images.expansion(*size, is_coarse=image.is_coarse)
            for image, size in zip(prompt.images, sizes, strict=True)
        ]

    def _deadline(self) -> float:
        """The caller may give up earlier."""
        return asyncio.get_running_loop().time() + self._timeout_s


def _images_of(model: ModelCard) -> ImagePrompts:
    assert model.images is not None, "other models get no images"
    return model.images
