"""Keys of pages that media touch, and how the prefix cache tells media apart."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from weft.contract.errors import InvalidRequest
from weft.contract.keys import (
    WIDE_TOKEN_BYTES,
    MediaNames,
    PageKeys,
    PromptMedia,
    ShortKeys,
    page_key,
    short_keys,
)
from weft.contract.spans import MediaSpan, check_spans, media_digest
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree

VECTORS = Path(__file__).resolve().parents[3] / "protos" / "vectors" / "media_key.json"
SIZE = 4
ENCODER = bytes(range(32))
NAMESPACE = bytes(32)


def span(position: int, length: int, name: int, offset: int = 0) -> MediaSpan:
    digest = bytes([name]) * 32
    return MediaSpan(position=position, length=length, digest=digest, offset=offset)


def keys_of(tokens: list[int], spans: list[MediaSpan]) -> list[bytes]:
    keys = PageKeys(NAMESPACE, SIZE, media=PromptMedia(spans, ENCODER))
    return keys.upto(tokens, len(tokens) // SIZE)


def test_keys_are_those_of_the_vectors() -> None:
    given = json.loads(VECTORS.read_text())
    for one in given["media"]:
        data = bytes.fromhex(one["data"])
        found = media_digest(one["kind"], one["processor"], one["shape"], data)
        assert found.hex() == one["digest"]
    prompt = given["prompt"]
    spans = [
        MediaSpan(
            position=one["position"],
            length=one["length"],
            digest=bytes.fromhex(one["digest"]),
            offset=one["offset"],
        )
        for one in prompt["spans"]
    ]
    media = PromptMedia(spans, bytes.fromhex(prompt["encoder"]))
    tokens, namespace = prompt["tokens"], bytes.fromhex(prompt["namespace"])
    keys = PageKeys(namespace, prompt["page_size"], media=media)
    found_keys = keys.upto(tokens, len(prompt["keys"]))
    assert [key.hex() for key in found_keys] == prompt["keys"]
    short = ShortKeys(tokens, prompt["page_size"], namespace, media=media)
    assert short.upto(len(found_keys)) == short_keys(found_keys)
    # A page that just got full has the same key.
    later = PageKeys(namespace, prompt["page_size"], media=media, names=MediaNames())
    assert [later.page(tokens, index)[1] for index in range(len(found_keys))] == found_keys


def test_pages_of_text_have_the_keys_of_text() -> None:
    tokens = [random.randrange(1000) for _ in range(5 * SIZE)]
    with_media = keys_of(tokens, [span(2 * SIZE + 1, SIZE, 1)])
    text = PageKeys(NAMESPACE, SIZE).upto(tokens, 5)
    assert with_media[:2] == text[:2]
    assert with_media[2:] != text[2:]
    assert page_key(with_media[1], tokens[2 * SIZE : 3 * SIZE], NAMESPACE) == text[2]


@pytest.mark.parametrize("change", ["content", "place", "row", "length", "encoder"])
def test_another_medium_makes_another_key(change: str) -> None:
    """The same tokens, another content, place in the page, row, number of rows, or encoder."""
    tokens = [7] * SIZE
    media = PromptMedia([span(1, 2, 1, 3)], ENCODER)
    others = {
        "content": PromptMedia([span(1, 2, 2, 3)], ENCODER),
        "place": PromptMedia([span(2, 2, 1, 3)], ENCODER),
        "row": PromptMedia([span(1, 2, 1, 4)], ENCODER),
        "length": PromptMedia([span(1, 3, 1, 3)], ENCODER),
        "encoder": PromptMedia([span(1, 2, 1, 3)], bytes(32)),
    }
    one, other = (page_key(bytes(32), tokens, NAMESPACE, m) for m in (media, others[change]))
    assert one != other


def test_the_prefix_cache_tells_media_apart_to_the_row() -> None:
    """Random prompts of the same placeholder tokens with few media: a lookup finds exactly as many
    tokens as the prompts have in common, media and rows included.
    """
    draw = random.Random(random.randrange(1 << 30))
    names = MediaNames()
    tree = PrefixTree(SIZE, token_bytes=WIDE_TOKEN_BYTES)
    memory = PageMemory(4000, tree)
    known: list[list[object]] = []
    for _ in range(150):
        tokens, spans, true = list[int](), list[MediaSpan](), list[object]()
        while len(tokens) < 5 * SIZE:
            if draw.random() < 0.5:
                name, offset, length = draw.randrange(3), draw.randrange(2), draw.randint(1, 7)
                spans.append(span(len(tokens), length, name, offset))
                true += [(name, offset + row) for row in range(length)]
                tokens += [7] * length
            else:
                tokens.append(draw.choice([7, 8]))
                true.append(tokens[-1])
        keys = PageKeys(NAMESPACE, SIZE, media=PromptMedia(spans, ENCODER), names=names)
        match = tree.find(NAMESPACE, keys.packed(tokens, 0, len(tokens)))
        best = 0
        for other in known:
            same = 0
            while same < min(len(true), len(other)) and true[same] == other[same]:
                same += 1
            best = max(best, same)
        assert match.num_tokens(SIZE) == best
        num_pages = len(tokens) // SIZE
        # What is cached is whole pages.
        known.append(true[: num_pages * SIZE])
        pages = memory.allocate(num_pages, NAMESPACE)
        tree.insert(keys, tokens, pages, 0, num_pages, None)


def test_a_forgotten_name_is_not_given_again() -> None:
    names = MediaNames()
    first = names.of_rows(span(0, 3, 1))
    for name in range(1 << 16):
        digest = name.to_bytes(32, "big")
        names.of_rows(MediaSpan(position=0, length=1, digest=digest))
    again = names.of_rows(span(0, 3, 1))
    assert not set(first.tolist()) & set(again.tolist())


@pytest.mark.parametrize(
    "spans", [[span(3, 4, 1), span(6, 1, 1)], [span(9, 2, 1)], [span(5, 1, 1), span(2, 1, 1)]]
)
def test_spans_that_overlap_or_leave_the_prompt_are_refused(spans: list[MediaSpan]) -> None:
    with pytest.raises(InvalidRequest, match="spans"):
        check_spans(spans, 10)
