"""A fleet in virtual time: prefill workers that serve one prompt after another, decode workers
whose steps slow with their requests.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from weft.common.capacity import size_of_prompt
from weft.planner.forecast import Speed, Targets, room_of
from weft.planner.recent import RecentRequests
from weft.planner.replay.traces import Arrival


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    requests: int = 0
    good: int = 0
    """Within both targets."""
    refused: int = 0
    late_first: int = 0
    slow: int = 0
    worker_s: float = 0.0
    """Time of all workers, starting ones included."""

    @property
    def goodput(self) -> float:
        """Share of the requests that were answered within their targets."""
        return self.good / self.requests if self.requests else 1.0


class Fleet:
    """Workers of two roles. Times are seconds of the trace, and never go back.

    Args:
        start_s: From the order of a worker to its first work.
        switch_s: From the order of a role to the first work in it.
        refuses: As admission does, a request for which decode workers have no room is held, and one
            whose first token would be late is refused.
    """

    def __init__(
        self,
        speed: Speed,
        targets: Targets,
        prefill: int,
        decode: int,
        *,
        start_s: float = 60.0,
        switch_s: float = 1.0,
        refuses: bool = True,
    ) -> None:
        self.speed = speed
        self._targets = targets
        self._start_s = start_s
        self._switch_s = switch_s
        self._refuses = refuses
        self.now_s = 0.0
        self._free_at = [0.0] * prefill
        """When each prefill worker can begin its next prompt; a heap."""
        self._decode = decode
        self._coming: list[tuple[float, int]] = []
        """Decode workers that are on their way: when, and how many; a heap."""
        self._coming_prefill: list[float] = []
        """When prefill workers begin that are on their way; a heap."""
        self._pace = 0.0
        """Tokens that a request which has run from the beginning would have."""
        self._running: list[tuple[float, float, int]] = []
        """Pace at the end, time of the beginning and tokens of each running request; a heap."""
        self._joining: list[tuple[float, int]] = []
        """When prompts end, and tokens of their answers; a heap."""
        self._held: deque[Arrival] = deque()
        self._room = max(1.0, room_of(speed, targets)) if refuses else math.inf
        """Requests that a decode worker may have."""
        self.tally = Tally()
        self.num_arrived = 0
        self.recent = RecentRequests()

    @property
    def prefill(self) -> int:
        """Starting ones included."""
        return len(self._free_at) + len(self._coming_prefill)

    @property
    def decode(self) -> int:
        """Starting ones included."""
        return self._decode + sum(count for _, count in self._coming)

    @property
    def queued_tokens(self) -> float:
        """Prompt tokens that prefill workers have not computed."""
        rate = self.speed.prefill_tokens_per_s
        return rate * sum(max(0.0, free_at - self.now_s) for free_at in self._free_at)

    def change(self, prefill: int, decode: int) -> None:
        """Orders numbers of workers: roles change first, then workers start, or end once idle."""
        more_prefill, more_decode = prefill - self.prefill, decode - self.decode
        moved = min(max(more_prefill, 0), max(-more_decode, 0))
        if moved:
            self._drop_decode(moved)
            self._add_prefill(moved, self._switch_s)
            more_prefill -= moved
            more_decode += moved
        moved = min(max(more_decode, 0), max(-more_prefill, 0))
        if moved:
            self._drop_prefill(moved)
            heapq.heappush(self._coming, (self.now_s + self._switch_s, moved))
            more_decode -= moved
            more_prefill += moved
        if more_prefill > 0:
            self._add_prefill(more_prefill, self._start_s)
        self._drop_prefill(-more_prefill)
        if more_decode > 0:
            heapq.heappush(self._coming, (self.now_s + self._start_s, more_decode))
        self._drop_decode(-more_decode)

    def offer(self, arrival: Arrival) -> None:
        """A request comes."""
        self.run_until(arrival.time_s)
        self.tally.requests += 1
        self.num_arrived += 1
        tokens = arrival.prompt_tokens
        self.recent.prompt(size_of_prompt(tokens), tokens)
        own_s = tokens / self.speed.prefill_tokens_per_s
        if self._refuses and own_s > self._targets.first_token_s:
            self.tally.refused += 1
            return
        self._held.append(arrival)
        self._release()

    def _release(self) -> None:
        """Held requests go to workers, in their order, while there is room."""
        while self._held and len(self._running) + len(self._joining) < self._room * self._decode:
            self._send(self._held.popleft())

    def _send(self, arrival: Arrival) -> None:
        begins_s = max(self.now_s, self._free_at[0]) if self._free_at else math.inf
        ends_s = begins_s + arrival.prompt_tokens / self.speed.prefill_tokens_per_s
        is_late = ends_s - arrival.time_s > self._targets.first_token_s
        if is_late and (self._refuses or ends_s == math.inf):
            self.tally.refused += 1
            return
        self.tally.late_first += is_late
        heapq.heapreplace(self._free_at, ends_s)
        # A late one is computed and answered all the same.
        heapq.heappush(
            self._joining, (ends_s, -arrival.output_tokens if is_late else arrival.output_tokens)
        )

    def run_until(self, time_s: float) -> None:
        """Lets time pass."""
        while self.now_s < time_s:
            step_s = self._step_s()
            ahead = [time_s]
            if self._joining:
                ahead.append(self._joining[0][0])
            if self._coming:
                ahead.append(self._coming[0][0])
            if self._coming_prefill:
                ahead.append(self._coming_prefill[0])
            if self._running and step_s > 0:
                left = self._running[0][0] - self._pace
                ahead.append(self.now_s + max(0.0, left) * step_s)
            until_s = max(self.now_s, min(ahead))
            if step_s > 0 and self._running:
                self._pace += (until_s - self.now_s) / step_s
            self.tally.worker_s += (until_s - self.now_s) * (self.prefill + self.decode)
            self.now_s = until_s
            self._settle()

    def _settle(self) -> None:
        while self._coming and self._coming[0][0] <= self.now_s:
            self._decode += heapq.heappop(self._coming)[1]
        while self._coming_prefill and self._coming_prefill[0] <= self.now_s:
            heapq.heappush(self._free_at, heapq.heappop(self._coming_prefill))
        while self._joining and self._joining[0][0] <= self.now_s:
            _, tokens = heapq.heappop(self._joining)
            heapq.heappush(self._running, (self._pace + abs(tokens), self.now_s, tokens))
        while self._running and self._running[0][0] <= self._pace + 1e-6:
            _, began_s, tokens = heapq.heappop(self._running)
            self.recent.ended(1, 1, 0, abs(tokens))
            is_slow = (self.now_s - began_s) / abs(tokens) > self._targets.inter_token_s
            self.tally.slow += is_slow
            self.tally.good += not is_slow and tokens > 0
        self._release()

    def _step_s(self) -> float:
        """Time between tokens now; 0: nobody decodes."""
        if not self._decode:
            return 0.0
        each = len(self._running) / self._decode
        # A worker with a request runs steps of one at least.
        return self.speed.step_base_s + self.speed.step_request_s * max(1.0, each)

    def _add_prefill(self, count: int, delay_s: float) -> None:
        for _ in range(count):
            heapq.heappush(self._coming_prefill, self.now_s + delay_s)

    def _drop_prefill(self, count: int) -> None:
        """Those that have not started go first, then the least busy; what they compute they end."""
        for _ in range(min(count, self.prefill)):
            if self._coming_prefill:
                self._coming_prefill.remove(max(self._coming_prefill))
                heapq.heapify(self._coming_prefill)
            else:
                heapq.heappop(self._free_at)

    def _drop_decode(self, count: int) -> None:
        """Those that have not started go first; running requests are handed over."""
        while count > 0 and self._coming:
            at_s, coming = heapq.heappop(self._coming)
            taken = min(count, coming)
            count -= taken
            if coming > taken:
                heapq.heappush(self._coming, (at_s, coming - taken))
                break
        self._decode -= max(0, min(count, self._decode))
