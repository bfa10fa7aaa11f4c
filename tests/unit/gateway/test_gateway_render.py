"""Stop strings and stop tokens against a naive search over the whole text."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from weft.gateway.generation.generation import SampleOutput
from weft.gateway.text.detokenize import Vocabulary
from weft.gateway.text.render import RenderPlan, SampleRenderer
from weft.gateway.text.stops import StopAutomaton, StopScanner
from weft.testing.models.tiny_tokenizers import byte_level_bpe

SMALL = st.text(alphabet="ab🎉", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🎉", min_size=1, max_size=5), min_size=1, max_size=4)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(byte_level_bpe())


def naive(text: str, stops: list[str], include: bool, least: int = 0) -> tuple[str, bool]:
    """Grows the text a character at a time, and looks for the longest stop string at its end, which
    is behind the first `least` characters.
    """
    for end in range(1 + least, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(map(len, found))
            return text[: end if include else end - longest], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(SMALL, STOPS, st.lists(st.integers(0, 30), max_size=6), st.booleans())
def test_scanner_equals_naive_search(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    scanner = StopScanner(StopAutomaton(stops), include)
    borders = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    shown, stopped = "", False
    expected, expected_stop = naive(text, stops, include)
    for start, end in pairwise(borders):
        delta, stopped = scanner.push(text[start:end])
        shown += delta
        assert expected.startswith(shown)
        if stopped:
            break
        # Only a possible beginning of a stop string is held back.
        held = text[:end][len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
    if not stopped:
        shown += scanner.finish()
    assert (shown, stopped) == (expected, expected_stop)


@settings(max_examples=150, deadline=None)
@given(
    SMALL.filter(bool), STOPS, st.booleans(), st.integers(0, 6), st.integers(0, 3), st.booleans()
)
def test_renderer_equals_naive_search_over_tokens(
    text: str, stops: list[str], include: bool, min_tokens: int, pad: int, by_bytes: bool
) -> None:
    plan = RenderPlan(
        vocabulary(),
        [],
        stops=StopAutomaton(stops),
        stop_ids=[2],
        min_tokens=min_tokens,
        include_stop=include,
        skip_special_tokens=True,
    )
    tokenizer = vocabulary().tokenizer
    parts = [text[i : i + 1 + pad] for i in range(0, len(text), 1 + pad)]
    ids = [i for part in parts for i in tokenizer.encode(part).ids]
    if by_bytes:
        single = {vocabulary().token_bytes(i): i for i in range(3, 259)}
        ids = [single[bytes([b])] for b in text.encode()]
    renderer = SampleRenderer(plan)
    shown = ""
    for token in ids:
        shown += renderer.push(token)
        if renderer.is_stopped:
            break
    else:
        shown += renderer.finish(by_stop_token=False)
    least = len(_text_of_first(ids, min_tokens))
    assert (shown, renderer.is_stopped) == naive(text, stops, include, least)


@given(SMALL, STOPS, st.lists(st.integers(0, 300), max_size=12), st.data())
def test_tokens_that_come_at_once_are_taken_as_one_by_one(
    text: str, stops: list[str], others: list[int], data: st.DataObject
) -> None:
    ids = vocabulary().tokenizer.encode(text).ids + others
    plan = RenderPlan(
        vocabulary(),
        [],
        stops=StopAutomaton(stops) if data.draw(st.booleans()) else None,
        stop_ids=[2, 7],
        min_tokens=1,
        include_stop=False,
        skip_special_tokens=data.draw(st.booleans()),
    )
    one, many = (SampleOutput(0, SampleRenderer(plan)) for _ in range(2))
    shown = ["", ""]
    while ids and not one.renderer.is_stopped:
        cut = data.draw(st.integers(1, len(ids)))
        for token in ids[:cut]:
            if not one.renderer.is_stopped:
                shown[0] += one.push([token])
        shown[1] += many.push(ids[:cut])
        del ids[:cut]
    assert (shown[1], many.ids) == (shown[0], one.ids)
    assert many.renderer.is_stopped == one.renderer.is_stopped
    if not one.renderer.is_stopped:
        assert many.renderer.finish(by_stop_token=True) == one.renderer.finish(by_stop_token=True)


def _text_of_first(ids: list[int], count: int) -> str:
    """Complete characters of the first tokens."""
    data = b"".join(vocabulary().token_bytes(token) for token in ids[:count])
    return data.decode("utf-8", "ignore")


def _render(ids: list[int], finish_by_stop: bool, include: bool, stop_ids: list[int]) -> str:
    plan = RenderPlan(
        vocabulary(),
        [],
        stops=None,
        stop_ids=stop_ids,
        min_tokens=0,
        include_stop=include,
        skip_special_tokens=True,
    )
    renderer = SampleRenderer(plan)
    return "".join(renderer.push(token) for token in ids) + renderer.finish(finish_by_stop)


def test_stop_token_text() -> None:
    tokenizer = vocabulary().tokenizer
    a, b = tokenizer.encode("a").ids[0], tokenizer.encode("b").ids[0]
    assert _render([a, b], True, False, [b]) == "a"
    assert _render([a, b], True, True, [b]) == "ab"
    # Ended by length just at a stop token, or not ended by it at all: text like any other.
    assert _render([a, b], False, False, [b]) == "ab"
    assert _render([b, a, b], True, False, [b]) == "ba"
