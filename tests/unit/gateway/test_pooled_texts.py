"""Texts for vectors are cut as transformers cuts them, and damaged pooling files stop no chats."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast
from weft.checkpoint.pooling import load_pooling
from weft.contract.errors import InvalidRequest
from weft.gateway.api.answer import field_names
from weft.gateway.api.openai.parse import parse_body
from weft.gateway.api.pooling.bodies import CohereEmbedBody
from weft.gateway.api.pooling.translate import cohere_request
from weft.gateway.request import (
    CallFacts,
    PairPrompt,
    PoolingOptions,
    RawRequest,
    TextPrompt,
    WrappedPrompt,
)
from weft.gateway.text.model_card import load_model_card
from weft.gateway.text.pooled_prompts import for_model
from weft.gateway.text.tokens import encode_cut, encode_pair, encode_parts
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir

CLS, SEP = "<|im_start|>", "<|im_end|>"


def with_template(kind: str) -> Tokenizer:
    tokenizer = byte_level_bpe()
    specials = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
    if kind != "none":
        second = f"{SEP}:1" if kind == "bert" else f"{SEP} {SEP}"
        end = "$B:1 " + second if kind == "bert" else f"{SEP} $B {SEP}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} {end}", special_tokens=specials
        )
    return tokenizer


def words(rng: random.Random, most: int) -> str:
    return " ".join(
        rng.choice(("fox", "mesh", "é", "weaving")) for _ in range(rng.randint(1, most))
    )


@pytest.mark.parametrize("kind", ["bert", "roberta", "none"])
def test_texts_are_cut_as_by_transformers(kind: str) -> None:
    seed = random.randrange(2**31)
    tokenizer, rng = with_template(kind), random.Random(seed)
    theirs: Any = PreTrainedTokenizerFast(tokenizer_object=with_template(kind))
    added = tokenizer.num_special_tokens_to_add(is_pair=True)
    for _ in range(60):
        first, second, most = words(rng, 30), words(rng, 30), rng.randint(added + 2, 60)
        wanted = theirs(first, second, truncation=True, max_length=most, return_token_type_ids=True)
        ids, start = encode_pair(tokenizer, first, second, most)
        assert ids == wanted["input_ids"], seed
        kinds = wanted["token_type_ids"]
        assert start == (kinds.index(1) if 1 in kinds else 0)
        whole = theirs(second, truncation=True, max_length=most)["input_ids"]
        assert encode_cut(tokenizer, second, most) == whole
    with pytest.raises(InvalidRequest, match=f"{added + 1} tokens .* adds {added}"):
        encode_pair(tokenizer, "the fox " * 9, "the mesh " * 9, added + 1)
    if kind != "none":
        with pytest.raises(InvalidRequest, match="2 tokens"):
            encode_cut(tokenizer, "the fox " * 9, 2)


def test_a_document_is_cut_and_its_query_is_not() -> None:
    tokenizer = byte_level_bpe()
    query, document = "weaving " * 5, "fox " * 50
    around = [tokenizer.encode(text).ids for text in ("head", "tail")]
    text = tokenizer.encode(query + document).ids
    num_query = len(tokenizer.encode(query).ids)
    room = num_query + 4
    most = room + sum(map(len, around))
    given = (tokenizer, "head", query + document, "tail")
    found = encode_parts(*given, most, len(query))
    assert found == [*around[0], *text[:room], *around[1]]
    with pytest.raises(InvalidRequest, match=f"query takes {num_query} tokens"):
        encode_parts(*given, most - 4, len(query))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate": "NONE", "max_tokens": 3}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"dimensions": 3}, "dimensions"),
        ({"truncate": "START"}, "truncate"),
    ],
)
def test_settings_of_coheres_body_are_obeyed_or_refused(
    fields: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        cohere(fields)
    assert caught.value.param == param


def test_cuts_of_coheres_body_are_told_by_its_names() -> None:
    cuts = [cohere(fields) for fields in ({"max_tokens": 3}, {}, {"truncate": "NONE"})]
    assert [one.pooling.truncate_tokens for one in cuts if one.pooling] == [3, 0, None]
    with pytest.raises(InvalidRequest) as caught, field_names(CohereEmbedBody.names, {}):
        encode_cut(with_template("roberta"), "the fox " * 9, 2)
    assert caught.value.param == "max_tokens"
    assert caught.value.message.startswith("max_tokens: a text cut to 2 tokens")


def cohere(fields: dict[str, object]) -> RawRequest:
    facts = CallFacts("r")
    data = json.dumps({"model": "m", "texts": ["x"], **fields}).encode()
    return cohere_request(parse_body(CohereEmbedBody, data, 1 << 20), facts)


def test_a_gemma_reranker_is_asked_as_its_model_card_says(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    (folder / "modules.json").write_text('[{"type": "x.LogitScore", "path": "1"}]')
    (folder / "1").mkdir()
    (folder / "1/config.json").write_text('{"true_token_id": 7, "false_token_id": null}')
    card = load_model_card(folder)
    pair = (PairPrompt(first="a {query}?", second="a mesh"),)
    wanted = PoolingOptions(output="classes")
    (prompt,), asked = for_model(pair, wanted, card, "score")
    assert isinstance(prompt, WrappedPrompt)
    assert prompt.head + prompt.text == "<bos>A: a {query}?\nB: a mesh"
    assert prompt.tail.startswith("\nGiven a query A and a passage B, ")
    assert asked is not None
    assert (asked.output, asked.label_ids) == ("label_logits", (7,))
    judged = replace(card.pooling, false_token_id=9)
    _, asked = for_model(pair, wanted, replace(card, pooling=judged), "score")
    assert asked is not None
    assert asked.label_ids == (7, 9)
    with pytest.raises(InvalidRequest, match="takes none"):
        for_model(pair, PoolingOptions(output="classes", instruction="x"), card, "score")


def test_damaged_pooling_files_stop_requests_for_vectors_only(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "m")
    (folder / "modules.json").write_text("{")
    card = load_model_card(folder)
    assert load_pooling(folder, "generate").task == "generate"
    chat = (TextPrompt(text="x"),)
    assert for_model(chat, None, card, "generate") == (chat, None)
    pair = (PairPrompt(first="x", second="y"),)
    with pytest.raises(InvalidRequest, match=r"modules\.json is not JSON"):
        for_model(pair, PoolingOptions(output="classes"), card, "generate")
