"""The tokenizers and chat templates that adapters bring."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from weft.checkpoint.adapters.files import AdapterFiles, open_adapter
from weft.checkpoint.adapters.names import parse_name
from weft.common.adapters.manifest import Entry
from weft.contract.errors import AdapterError, PeerUnavailable, WeftError
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.text.model_card import ModelCard, with_own_tokenizer

_WHOLE = ("weight", "copy", "frozen")
"""Parts of an embedding that have a row for each token."""
_RETRY_AFTER_S = 1.0


class CopyGone(PeerUnavailable):
    """An adapter's copy was removed while it was read."""


class _Known(NamedTuple):
    model: ModelCard
    tokenizer: bytes
    """Digest of the tokenizer; empty: it is the model's own."""


class AdapterCards:
    """Reads the tokenizer and chat template of each adapter content once.

    It reads one content at a time, in a thread. A disk that never answers blocks one thread and the
    lock, and every caller has its own deadline.
    """

    def __init__(self, directory: AdapterDirectory) -> None:
        self._directory = directory
        self._known: dict[tuple[str, str], _Known] = {}
        """Results by name of the base model and content digest."""
        self._reading: dict[tuple[str, str], asyncio.Task[ModelCard]] = {}
        self._place = asyncio.Lock()

    async def of(self, entry: Entry, model: ModelCard) -> ModelCard:
        """The card of the base model with the tokenizer and chat template that an adapter brings.

        Raises:
            AdapterError: The files cannot be used with the model, or with the adapter's embedding.
            CopyGone: The files are not there, or not any more.
        """
        key = (model.name, entry.digest)
        if (known := self._known.get(key)) is not None:
            return known.model
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.create_task(self._read(entry, model))
            reading.add_done_callback(partial(self._was_read, key))
        return await asyncio.shield(reading)

    def _was_read(self, key: tuple[str, str], reading: asyncio.Task[ModelCard]) -> None:
        del self._reading[key]
        if not reading.cancelled():
            # Reads the exception, since all callers that would get it may have left.
            reading.exception()

    async def _read(self, entry: Entry, model: ModelCard) -> ModelCard:
        folder = self._directory.registry.directory(entry.digest_bytes)
        async with self._place:
            found = await asyncio.to_thread(self._load, folder, model, entry)
        there = {*self._directory.manifest.digests(), entry.digest}
        self._known = {key: known for key, known in self._known.items() if key[1] in there}
        self._known[model.name, entry.digest] = found
        return found.model

    def _load(self, folder: Path, model: ModelCard, entry: Entry) -> _Known:
        """A copy is renamed as a whole before it is removed."""
        problem: Exception | None = None
        found = _Known(model, b"")
        try:
            found = self._load_there(folder, model, entry)
        except Exception as error:  # A client's file may make a parser raise anything.
            problem = error
        if not folder.is_dir():
            raise CopyGone(
                f"the files of the adapter `{entry.name}` were removed; send the request again",
                stage="adapter",
                retry_after_s=_RETRY_AFTER_S,
            )
        if problem is not None:
            reason = problem.message if isinstance(problem, WeftError) else repr(problem)
            message = f"adapter {folder}: its tokenizer cannot be used: {reason}"
            raise AdapterError(
                message.replace(str(folder), entry.path), stage="adapter", param="path"
            ) from problem
        return found

    def _load_there(self, folder: Path, model: ModelCard, entry: Entry) -> _Known:
        with open_adapter(folder) as files:
            if not files.has_tokenizer:
                return _Known(model, b"")
            num_rows = _num_rows(files, model)
        own = with_own_tokenizer(model, folder)
        num_tokens = own.tokenizer.get_vocab_size()
        if entry.is_lenient and num_tokens > model.vocabulary_size:
            return _Known(model, b"")  # Workers have left out the adapter's added tokens.
        if num_tokens > num_rows:
            raise AdapterError(
                f"it has token {num_tokens - 1}, and the embedding {num_rows} rows: save the "
                "embedding with the adapter (PEFT's save_embedding_layers), or remove its "
                "tokenizer.json"
            )
        return self._shared(own, model)

    def _shared(self, own: ModelCard, model: ModelCard) -> _Known:
        """Shares an equal tokenizer of the model or of another adapter, since large ones take much
        memory.
        """
        text = own.tokenizer.to_str()
        digest = hashlib.blake2b(text.encode()).digest()
        same = [known.model for known in self._known.values() if known.tokenizer == digest]
        if model.tokenizer.to_str() == text:
            same, digest = [model], b""
        for one in same[:1]:
            tokenizer, vocabulary = one.tokenizer, one.vocabulary
            own = replace(own, tokenizer=tokenizer, vocabulary=vocabulary)
        return _Known(own, digest)


def _num_rows(files: AdapterFiles, model: ModelCard) -> int:
    named = ((parse_name(name), entry.shape) for name, entry in files.tensors.items())
    rows = [
        shape[0]
        for parsed, shape in named
        if parsed.module.rest == "embed_tokens" and parsed.part in _WHOLE and shape
    ]
    return max(rows, default=model.vocabulary_size)
