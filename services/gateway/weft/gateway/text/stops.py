"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """Finds many strings at once, character by character (Aho and Corasick, 1975).

    Immutable; the samples of a request share it. State 0 is the start. `depth[s]` is the length of
    the longest end of the text that begins some stop string; `matched[s]` is the length of the
    longest stop string that ends here, 0 for none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Builds it from non-empty strings."""
        self.goto: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.matched: list[int] = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self.first_chars = frozenset(self.goto[0])

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.goto[state].get(char)
            if following is None:
                following = len(self.goto)
                self.goto[state][char] = following
                self.goto.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
            state = following
        self.matched[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            self.matched[state] = self.matched[state] or self.matched[self.fail[state]]
            for char, following in self.goto[state].items():
                self.fail[following] = self.step(self.fail[state], char)
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        goto, fail = self.goto, self.fail
        while True:
            following = goto[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = fail[state]


class StopScanner:
    """Cuts one sample's text at the stop string that ends first; of those, the longest.

    Text that may be the beginning of a stop string is held back, and only that.
    """

    def __init__(self, automaton: StopAutomaton, include_stop: bool) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.found = ""
        """The stop string that was found; empty: none."""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """Takes more text; returns the text to show, and whether a stop string was found. Stop
        strings that end in this text are ignored unless it `counts`.
        """
        automaton = self._automaton
        state = self._state
        if state == 0 and automaton.first_chars.isdisjoint(text):
            return text, False
        held = self._held
        for index, char in enumerate(text):
            state = automaton.step(state, char)
            if counts and automaton.matched[state]:
                end = len(held) + index + 1
                start = end - automaton.matched[state]
                self._state, self._held = 0, ""
                whole = held + text
                self.found = whole[start:end]
                return whole[: end if self._include_stop else start], True
        self._state = state
        whole = held + text
        safe = len(whole) - automaton.depth[state]
        self._held = whole[safe:]
        return whole[:safe], False

    def finish(self) -> str:
        """Returns the text that was held back and did not become a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
