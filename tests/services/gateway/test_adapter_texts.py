"""Tokenizers and chat templates that adapters bring, as a gateway reads them."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from weft.checkpoint.tokenizer_files import TokenizerFiles
from weft.common.adapters.manifest import Entry
from weft.common.adapters.registry import Registry
from weft.contract.errors import AdapterError
from weft.gateway.adapters import cards as adapter_texts
from weft.gateway.adapters.cards import AdapterCards, CopyGone
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.text import model_card as gateway_model
from weft.gateway.text.model_card import ModelCard, load_model_card
from weft.testing.models.tiny_adapters import PREFIX, write_adapter
from weft.testing.models.tiny_models import make_tiny

VOCAB = 517


class Root:
    """An adapter root with copies that bring texts."""

    def __init__(self, folder: Path) -> None:
        self.model_dir = make_tiny("llama", folder / "model", tokenizer=True, vocab_size=VOCAB)
        self.model = load_model_card(self.model_dir, "tiny")
        (folder / "root").mkdir()
        self.registry = Registry(folder / "root")
        self.texts = AdapterCards(AdapterDirectory(self.registry))
        self._count = 0

    def add(self, tokens: tuple[str, ...] = (), rows: int = VOCAB, **files: str) -> Entry:
        """A copy whose tokenizer has more tokens than the model's; files by stem."""
        self._count += 1
        digest = f"{self._count:064x}"
        folder = self.registry.directory(bytes.fromhex(digest))
        name = f"{PREFIX}model.embed_tokens.weight"
        write_adapter(folder, {name: torch.zeros(rows, 72)})
        tokenizer = Tokenizer.from_file(str(self.model_dir / "tokenizer.json"))
        tokenizer.add_special_tokens(list(tokens))
        tokenizer.save(str(folder / "tokenizer.json"))
        for stem, content in files.items():
            suffix = "jinja" if stem == "chat_template" else "json"
            (folder / f"{stem}.{suffix}").write_text(content)
        return Entry(
            name=f"a{self._count}",
            digest=digest,
            model="tiny",
            path=f"folder/a{self._count}",
            state="serving",
            generation=1,
            created=0.0,
        )

    def folder(self, entry: Entry) -> Path:
        return self.registry.directory(entry.digest_bytes)

    async def of(self, entry: Entry) -> ModelCard:
        return await self.texts.of(entry, self.model)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


async def test_what_it_brings_is_used(root: Root) -> None:
    entry = root.add(("<|end|>",), VOCAB + 1, tokenizer_config=json.dumps({"eos_token": "<|end|>"}))
    own = await root.of(entry)
    assert own.tokenizer.token_to_id("<|end|>") == VOCAB == own.vocabulary_size - 1
    assert own.eos_ids == root.model.eos_ids | {VOCAB}
    assert own.vocabulary.special_ids == root.model.vocabulary.special_ids | {VOCAB}
    assert own.template is root.model.template, "it brings none"
    assert own.name == "tiny"
    with_template = await root.of(root.add(chat_template="{{ messages[0]['content'] }}!"))
    assert with_template.template is not None
    messages = [{"role": "user", "content": "hello"}]
    rendered = with_template.template.render(
        messages, add_generation_prompt=True, continue_final_message=False, variables={}
    )
    assert rendered == "hello!"


async def test_equal_tokenizers_are_one(root: Root) -> None:
    """A template makes another content, and no other tokenizer."""
    first, second = root.add(("<a>",), VOCAB + 1), root.add(("<a>",), VOCAB + 1, chat_template="x")
    other, none = root.add(("<b>",), VOCAB + 1), root.add(chat_template="y")
    models = [await root.of(entry) for entry in (first, second, other, none)]
    assert models[0].tokenizer is models[1].tokenizer
    assert models[0].template is not models[1].template
    assert models[2].tokenizer is not models[0].tokenizer
    assert models[3].tokenizer is root.model.tokenizer
    assert models[3].vocabulary is root.model.vocabulary


async def test_a_lenient_load_knows_no_added_tokens(root: Root) -> None:
    entry = replace(root.add(("<a>",), VOCAB + 1), is_lenient=True)
    assert await root.of(entry) is root.model
    kept = await root.of(replace(root.add(chat_template="x"), is_lenient=True))
    assert kept.template is not root.model.template


LONG_NUMBER = '{"added_tokens_decoder": {"%s": {"content": "x"}}}' % ("7" * 5000)
DEEP = "{{" + 5000 * "(" + "1" + 5000 * ")" + "}}"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"tokenizer": "{}"}, "not a tokenizer"),
        ({"tokenizer_config": LONG_NUMBER}, "ValueError"),
        ({"added_tokens": '{"\\ud800": 517}'}, "surrogates not allowed"),
        ({"chat_template": DEEP}, "RecursionError"),
        ({"chat_template": "{% for"}, "template"),
        ({"tokenizer_config": "[]"}, "tokenizer_config.json: a JSON object is expected"),
    ],
    ids=["tokenizer", "number", "surrogate", "depth", "template", "list"],
)
async def test_damaged_files_are_refused(root: Root, files: dict[str, str], problem: str) -> None:
    """As errors of the adapter, which name no path of the server."""
    entry = root.add(**files)
    for _ in range(2):
        with pytest.raises(AdapterError, match=problem) as caught:
            await root.of(entry)
        assert "folder/a1: its tokenizer cannot be used" in caught.value.message
        assert str(root.registry.root) not in caught.value.message
    other = await root.of(root.add())
    assert other.tokenizer is root.model.tokenizer


async def test_tokens_without_rows_are_refused(root: Root) -> None:
    with pytest.raises(AdapterError, match=f"has token {VOCAB + 1}, and the embedding {VOCAB + 1}"):
        await root.of(root.add(("<a>", "<b>"), VOCAB + 1))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_copy_that_is_removed_leaves_nothing_behind(
    root: Root, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its template a tokenizer would be taken for one that brings none."""
    entry = root.add(("<a>",), VOCAB + 1, chat_template="x")
    kept = shutil.copytree(root.folder(entry), root.folder(entry).parent / "kept")
    if when == "before":
        shutil.rmtree(root.folder(entry))
    else:
        read = gateway_model.read_tokenizer

        def read_and_remove(_: Path) -> TokenizerFiles:
            shutil.rmtree(root.folder(entry))
            return read(kept)

        monkeypatch.setattr(gateway_model, "read_tokenizer", read_and_remove)
    with pytest.raises(CopyGone):
        await root.of(entry)
    monkeypatch.undo()
    shutil.move(kept, root.folder(entry))
    own = await root.of(entry)
    assert own.template is not root.model.template


async def test_a_disk_that_does_not_answer_keeps_one_thread(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits leaves at its own time, and threads are there for everybody else."""
    entries, is_back, num_stuck = [root.add() for _ in range(3)], threading.Event(), 0

    def stuck(*_: Any) -> ModelCard:
        nonlocal num_stuck
        num_stuck += 1
        assert is_back.wait(60)
        return root.model

    monkeypatch.setattr(adapter_texts, "with_own_tokenizer", stuck)
    for number in range(60):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await root.of(entries[number % 3])
    assert num_stuck == 1
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 30) == "done"
    is_back.set()
    models = await asyncio.wait_for(asyncio.gather(*map(root.of, entries)), 30)
    assert len(models) == 3
