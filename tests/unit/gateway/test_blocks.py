"""Answers as blocks: however a text is cut, the same blocks, in order, with nothing left out."""

from __future__ import annotations

import itertools
import random

from weft.gateway.api.blocks import BlockReader, Step
from weft.gateway.generation.answer import Delta
from weft.gateway.text.answer import TextParser
from weft.gateway.text.answer.formats import HERMES, QWEN3
from weft.v1 import common_pb2

CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
PIECES = ("<think>", "</think>", "hm ", "\n", " ", "text", CALL, CALL[:30], "<tool", "é🎉")


def read(text: str, cuts: list[int], *, is_parsed: bool) -> tuple[BlockReader, list[Step]]:
    def make() -> TextParser:
        return TextParser(HERMES, reasoning=QWEN3)

    reader = BlockReader(make if is_parsed else None)
    steps: list[Step] = []
    bounds = [0, *cuts, len(text)]
    for begin, end in itertools.pairwise(bounds):
        is_last = end == len(text) and end == bounds[-1] and begin == bounds[-2]
        reason = common_pb2.FINISH_REASON_STOP if is_last else None
        steps += reader.push(Delta(0, text[begin:end], (), (), reason, None))
    return reader, steps


def shown(reader: BlockReader) -> list[tuple[str, str, str]]:
    return [(block.kind, block.name, block.text) for block in reader.blocks]


def check_order(steps: list[Step]) -> None:
    """Blocks begin and end one by one."""
    current = None
    for step in steps:
        if step.what == "begin":
            assert current is None
            current = step.block
        else:
            assert step.block is current
            if step.what == "end":
                current = None
    assert current is None
    numbers = [step.block.number for step in steps if step.what == "begin"]
    assert numbers == list(range(len(numbers)))


def test_cuts_change_nothing() -> None:
    rng = random.Random()
    for _ in range(500):
        text = "".join([rng.choice(PIECES) for _ in range(rng.randrange(8))])
        for is_parsed in (True, False):
            whole, steps = read(text, [], is_parsed=is_parsed)
            check_order(steps)
            cuts = sorted(rng.sample(range(len(text)), rng.randrange(len(text)))) if text else []
            parts, more = read(text, cuts, is_parsed=is_parsed)
            check_order(more)
            assert shown(parts) == shown(whole), (text, cuts)
            for block in parts.blocks:
                added = [s.text for s in more if s.block is block and s.what == "add"]
                assert "".join(added) == block.text
        assert "".join([block.text for block in whole.blocks]) == text


def test_a_stop_token_that_comes_alone_keeps_its_log_probability() -> None:
    entries = [common_pb2.TokenLogprob(token_id=number) for number in (5, 6)]
    stop = common_pb2.FINISH_REASON_STOP
    together = BlockReader(None)
    together.push(Delta(0, "text", (), entries, stop, None))
    apart = BlockReader(None)
    apart.push(Delta(0, "text", (), entries[:1], None, None))
    steps = apart.push(Delta(0, "", (), entries[1:], stop, None))
    assert apart.blocks[0].logprobs == together.blocks[0].logprobs == entries
    assert [(step.what, list(step.logprobs)) for step in steps] == [
        ("add", entries[1:]),
        ("end", []),
    ]
    assert shown(apart) == shown(together)


def test_blanks_beside_calls_are_no_text() -> None:
    reader, _ = read(f"\n\n{CALL}\n{CALL}\n", [], is_parsed=True)
    assert [block.kind for block in reader.blocks] == ["call", "call"]
    assert reader.has_calls
    assert shown(read("", [], is_parsed=False)[0]) == [("text", "", "")]
