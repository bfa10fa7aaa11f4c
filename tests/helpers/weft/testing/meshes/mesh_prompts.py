"""Thirty prompts: 1 to 1,000 tokens, several scripts, code, chats and raw texts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MeshPrompt:
    """A text to continue, or a conversation to answer."""

    name: str
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content); empty for a text."""

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    def as_messages(self) -> list[Message]:
        return [{"role": role, "content": content} for role, content in self.messages]


_WORDS = {
    "who": ("baker", "miner", "pilot", "weaver", "sailor", "nurse", "farmer", "tailor", "mason"),
    "did": ("found", "lost", "carried", "painted", "sold", "repaired", "buried", "counted"),
    "what": ("lamp", "boat", "letter", "clock", "rope", "basket", "mirror", "coin", "map"),
    "where": ("harbour", "attic", "market", "forest", "bridge", "mill", "chapel", "station"),
    "when": ("at dawn", "after the storm", "last winter", "before noon", "in May"),
}


def prose(seed: int, num_sentences: int) -> str:
    """Sentences that do not repeat, of about 15 tokens each; the same for the same seed."""
    rng = random.Random(seed)

    def word(kind: str) -> str:
        return rng.choice(_WORDS[kind])

    return " ".join(
        f"The {word('who')} {word('did')} {rng.randint(2, 99)} {word('what')}s near "
        f"the {word('where')} {word('when')}."
        for _ in range(num_sentences)
    )


def _raw(name: str, text: str) -> MeshPrompt:
    return MeshPrompt(name, text=text)


def _chat(name: str, *contents: str, system: str = "") -> MeshPrompt:
    """`contents` are the user's and the assistant's in turn."""
    turns = [("system", system)] if system else []
    turns += [(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]
    return MeshPrompt(name, messages=tuple(turns))


_CODE = '''def median(values):
    """Returns the middle of the sorted values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return'''

PROMPTS: tuple[MeshPrompt, ...] = (
    _raw("one-token", "The"),
    _raw("two-tokens", "Once upon"),
    _raw("english", "The three largest cities of France are Paris,"),
    _raw(
        "page",
        "A page of memory holds sixteen tokens, and this text has a few more than that",
    ),
    _raw("chinese", "北京是中华人民共和国的首都，位于华北平原的北部。这座城市有三千多年的历史，"),
    _raw("arabic", "القاهرة هي عاصمة جمهورية مصر العربية وأكبر مدنها، وتقع على ضفاف نهر النيل"),
    _raw("hindi", "दिल्ली भारत की राजधानी है और यमुना नदी के किनारे बसी हुई एक प्राचीन नगरी है।"),
    _raw("emoji", "🙂🙃😉😍🚀🌍🌈🔥 + 👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈 = "),
    _raw("python", _CODE),
    _raw("c", "#include <stdio.h>\n\nint main(int argc, char **argv)\n{\n    for (int i = 0;"),
    _raw("json", '{"name": "Weft", "tags": ["mesh", "grpc"], "sizes": [1, 2, 4, 8, 16,'),
    _raw("spaces", "one\n\n\n  two\t\tthree    four\r\n      five\n\n six"),
    _raw("raw-300", prose(1, 20)),
    _raw("raw-1000", prose(2, 76)),
    _raw("raw-200", prose(3, 15)),
    _chat("hello", "Hi"),
    _chat("capital", "What is the capital of Italy? Answer in one word."),
    _chat("system", "Who are you?", system="You are a pirate. You speak like one."),
    _chat("turns", "My name is Ada.", "Nice to meet you, Ada.", "What is my name?"),
    _chat("chat-chinese", "请用一句话介绍长城。"),
    _chat("chat-arabic", "ما هي أكبر مدينة في المغرب؟"),
    _chat("chat-hindi", "कृपया ताजमहल के बारे में एक वाक्य लिखिए।"),
    _chat("chat-japanese", "富士山の高さは何メートルですか？"),
    _chat("chat-russian", "Напиши короткое стихотворение о зиме."),
    _chat("chat-greek", "Ποια είναι η πρωτεύουσα της Ελλάδας;"),
    _chat("chat-emoji", "What does 🎉🎂🎁 mean? 🤔"),
    _chat("chat-code", f"Finish this function:\n```python\n{_CODE}\n```"),
    _chat("chat-sql", "Write a SQL query that counts the orders of each customer."),
    _chat("summary", f"Summarise in one sentence:\n\n{prose(4, 10)}"),
    _chat("long-summary", f"Who is mentioned first in this text?\n\n{prose(5, 18)}"),
)

BY_NAME = {prompt.name: prompt for prompt in PROMPTS}
assert len(BY_NAME) == len(PROMPTS) == 30

SOME = tuple(
    BY_NAME[name]
    for name in (
        *("one-token", "page", "english", "chinese", "arabic", "emoji", "json", "raw-300"),
        *("capital", "system", "turns", "chat-hindi", "chat-japanese", "chat-code"),
        *("chat-russian", "long-summary"),
    )
)
"""Sixteen of all kinds and lengths: where the others are asked for with --full."""
COVER = tuple(BY_NAME[name] for name in ("chat-hindi", "chinese", "chat-code", "emoji"))
"""Stand for all of them where every prompt would take too long."""
DRAFTED = tuple(BY_NAME[name] for name in ("english", "raw-300", "system"))
"""Stand for all of them where drafts are looked at."""
