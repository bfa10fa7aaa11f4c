"""Commands about weights between the turns of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.contract.messages import Inbox, Outbox
from weft.contract.weights import WeightCommand, WeightReply
from weft.engine.loop.llm import LLM


class Commands:
    """Sends commands with turns of an engine that somebody else calls."""

    def __init__(self, llm: LLM) -> None:
        self.replies: dict[int, WeightReply] = {}
        self.turns = 0
        self._turn: Callable[[Inbox | None], Outbox] = llm.engine.turn
        self._at: dict[int, list[WeightCommand]] = {}
        self._after: dict[int, WeightCommand] = {}
        llm.engine.turn = self._with_commands  # type: ignore[method-assign]

    def at(self, turn: int, command: WeightCommand) -> None:
        self._at.setdefault(turn, []).append(command)

    def after(self, query: int, command: WeightCommand) -> None:
        """Sends a command once another one is answered."""
        self._after[query] = command

    def wait(self, query: int) -> None:
        """Turns until a command is answered."""
        for _ in range(100_000):
            if query in self.replies:
                return
            self._with_commands()
            time.sleep(1e-3)
        raise AssertionError(f"command {query} was not answered")

    def _with_commands(self, inbox: Inbox | None = None) -> Outbox:
        self.turns += 1
        commands = self._at.pop(self.turns, [])
        commands += [self._after.pop(one) for one in list(self._after) if one in self.replies]
        if commands:
            inbox = inbox or Inbox()
            inbox.weight_commands += commands
        outbox = self._turn(inbox)
        self.replies |= {reply.query: reply for reply in outbox.weight_replies}
        return outbox
