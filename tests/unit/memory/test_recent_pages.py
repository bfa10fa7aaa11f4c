"""Keys of prompts that continue earlier ones are those of the prompts alone, and hashed once."""

from __future__ import annotations

import random

import pytest
from weft.contract import keys
from weft.contract.keys import PageKeys, RecentPages, ShortKeys, short_key

SIZE = 4


def exact(tokens: list[int], namespace: bytes) -> list[int]:
    whole = PageKeys(namespace, SIZE).upto(tokens, len(tokens) // SIZE)
    return [short_key(key) for key in whole]


def draw(count: int) -> list[int]:
    return [random.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize("max_bytes", [1 << 20, 600])
def test_keys_do_not_depend_on_what_is_remembered(max_bytes: int) -> None:
    recent = RecentPages(max_bytes)
    namespaces = [bytes(32), bytes([1] * 32)]
    chats = [draw(random.randrange(1, 40)) for _ in range(6)]
    for _ in range(60):
        chat = random.choice(chats)
        # A turn more, another ending, or a new chat with a beginning that others have.
        if random.random() < 0.2:
            chats.append(chat[: random.randrange(1, len(chat) + 1)] + draw(9))
        elif random.random() < 0.3:
            del chat[random.randrange(1, len(chat) + 1) :]
        chat += draw(random.randrange(20))
        namespace = random.choice(namespaces)
        asked, whole = ShortKeys(chat, SIZE, namespace, recent), len(chat) // SIZE
        for count in sorted(random.randrange(whole + 1) for _ in range(3)):
            assert asked.upto(count)[:count] == exact(chat, namespace)[:count]
        assert asked.upto(whole) == exact(chat, namespace)


def test_a_turn_hashes_its_new_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0
    digest = keys._page_digest

    def counted(parent: bytes, namespace: bytes, tokens: bytes, media: bytes) -> bytes:
        nonlocal hashed
        hashed += 1
        return digest(parent, namespace, tokens, media)

    monkeypatch.setattr(keys, "_page_digest", counted)
    recent, history = RecentPages(), draw(80 * SIZE)
    for tokens, pages in ((history, 80), (history + draw(3 * SIZE + 1), 3), (history, 80)):
        # The second turn has taken the place of the first.
        hashed = 0
        ShortKeys(tokens, SIZE, bytes(32), recent).upto(len(tokens) // SIZE)
        assert hashed == pages
    hashed = 0
    ShortKeys(history, SIZE, bytes([1] * 32), recent).upto(80)
    assert hashed == 80, "another tenant's pages are another's"


def test_no_more_is_remembered_than_allowed() -> None:
    recent = RecentPages(max_bytes=4000)
    for _ in range(20):
        ShortKeys(draw(200), SIZE, bytes(32), recent).upto(50)
        assert recent._num_bytes == sum(len(each.data) for each in recent._known) <= 4000
