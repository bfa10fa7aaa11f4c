"""The tokenizers and chat templates that adapters bring."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import NamedTuple

from weft.common.adapters.manifest import Entry
from weft.engine.errors import AdapterError, ModelError
from weft.engine.lora.files import AdapterFiles, open_adapter
from weft.engine.lora.names import parse_name
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.model import ServedModel, with_own_texts

_WHOLE = ("weight", "copy", "frozen")
"""Parts of an embedding that have a row for each token."""


class _Known(NamedTuple):
    model: ServedModel
    texts: bytes
    """Digest of the files; empty: there are none."""


class AdapterTexts:
    """Reads them once for each content; adapters with the same files share what is made of them.

    Args:
        directory: Says where adapters lie, and which there are.
    """

    def __init__(self, directory: AdapterDirectory) -> None:
        self._directory = directory
        self._known: dict[tuple[str, str], _Known] = {}
        """By name of the base model and content digest."""
        self._reading = asyncio.Lock()

    async def of(self, entry: Entry, model: ServedModel) -> ServedModel:
        """The model as an adapter has it: with its tokenizer and chat template, if it brings them.

        Args:
            entry: The adapter's.
            model: Its base model.

        Raises:
            AdapterError: They cannot be used with the model, or with the adapter's embedding.
        """
        key = (model.name, entry.digest)
        if key not in self._known:
            async with self._reading:
                if key not in self._known:
                    await self._read(entry, model)
        return self._known[key].model

    async def _read(self, entry: Entry, model: ServedModel) -> None:
        folder = self._directory.registry.directory(entry.digest_bytes)
        try:
            found = await asyncio.to_thread(self._load, folder, model, entry)
        except (AdapterError, ModelError) as error:
            message = error.message.replace(str(folder), entry.path)
            raise AdapterError(message, stage="adapter", param="path") from error
        there = {*self._directory.manifest.digests(), entry.digest}
        self._known = {key: known for key, known in self._known.items() if key[1] in there}
        self._known[model.name, entry.digest] = found

    def _load(self, folder: Path, model: ServedModel, entry: Entry) -> _Known:
        with open_adapter(folder) as files:
            given = files.text_files()
            if not given:
                return _Known(model, b"")
            num_rows = _num_rows(files, model)
        parts = (part for name, data in given.items() for part in (name.encode(), data))
        digests = (hashlib.blake2b(part).digest() for part in (model.name.encode(), *parts))
        texts = hashlib.blake2b(b"".join(digests)).digest()
        same = [known.model for known in self._known.values() if known.texts == texts]
        own = same[0] if same else with_own_texts(model, folder)
        if entry.is_lenient and own.vocabulary_size > model.vocabulary_size:
            # Workers may have left the rows of its tokens out.
            return _Known(model, b"")
        if own.vocabulary_size > max(num_rows, model.vocabulary_size):
            raise AdapterError(
                f"adapter {folder}: its tokenizer has token {own.vocabulary_size - 1}, its "
                f"embedding {num_rows} rows: save the embedding with it (PEFT's "
                "save_embedding_layers), or remove its tokenizer.json"
            )
        return _Known(own, texts)


def _num_rows(files: AdapterFiles, model: ServedModel) -> int:
    """Tokens that the adapter's embedding has rows for."""
    named = ((parse_name(name), entry.shape) for name, entry in files.tensors.items())
    rows = [
        shape[0]
        for parsed, shape in named
        if parsed.module.rest == "embed_tokens" and parsed.part in _WHOLE and shape
    ]
    return max(rows, default=model.vocabulary_size)
