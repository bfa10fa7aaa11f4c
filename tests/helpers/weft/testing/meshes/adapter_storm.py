"""Traffic over many adapters of a mesh while these are loaded, replaced and unloaded at random.

Each text must be that of a content which its name meant while the request was under way. Names
belong to one operator each, who notes before every call what the name may mean from then on, and
after it what it means.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import httpx
from weft.testing.meshes.adapter_texts import AdapterCards
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_adapters import TIMEOUT_S, load, unload
from weft.testing.meshes.tiny_mesh import MODEL
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

NOTHING = -1
"""The meaning of a name that is not loaded."""
Meaning = frozenset[int]


class Meanings:
    """The possible meanings of names, over time.

    Args:
        names: All there are; at first they mean nothing.
        lag_s: Later than the operator's answer other gateways may still see what was before.
    """

    def __init__(self, names: Sequence[str], lag_s: float = 0.0) -> None:
        self._lag_s = lag_s
        self._lock = threading.Lock()
        self._log: dict[str, list[tuple[float, Meaning]]] = {
            name: [(0.0, frozenset({NOTHING}))] for name in names
        }

    def note(self, name: str, *meanings: int) -> None:
        """Records that from now on the name means one of these."""
        with self._lock:
            self._log[name].append((time.monotonic(), frozenset(meanings)))

    def now(self, name: str) -> Meaning:
        """What the name may mean now."""
        with self._lock:
            return self._log[name][-1][1]

    def between(self, name: str, began: float, ended: float) -> Meaning:
        """What the name may have meant at some time in between."""
        with self._lock:
            log = self._log[name]
            ends = [when for when, _ in log[1:]] + [float("inf")]
            return frozenset().union(
                *(
                    meaning
                    for (when, meaning), end in zip(log, ends, strict=True)
                    if when <= ended and end + self._lag_s >= began
                )
            )


@dataclass
class Answer:
    """Answer to one request."""

    text: str = ""
    first_at: float = 0.0
    """Time of its first text, before which its name was resolved."""
    problem: str = ""
    is_unknown: bool = False
    """Whether there was no adapter of the name."""


@dataclass
class Storm:
    """A running storm.

    Args:
        mesh: Whose gateways are asked.
        texts: What is right.
        names: Of adapters, the most wanted first.
        seed: Of what is asked and done.
        num_new: Tokens of an answer.
    """

    mesh: LocalMesh
    texts: AdapterCards
    names: Sequence[str]
    seed: int
    num_new: int
    lag_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    meanings: Meanings = field(init=False)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meanings = Meanings(self.names, self.lag_s)

    def load_all(self, at_once: int) -> None:
        """Gives each name a content, the first ones those of their numbers."""
        contents = len(self.texts.texts)

        def run(number: int) -> None:
            for index in range(number, len(self.names), at_once):
                self._load(self.names[index], index % contents)

        self._join([threading.Thread(target=run, args=(number,)) for number in range(at_once)])

    def begin(self, num_clients: int, num_operators: int) -> None:
        """Starts clients, and operators with their share of the names each."""
        for number in range(num_clients):
            self._start(self._ask_on, number)
        for number in range(num_operators):
            self._start(self._operate, number, self.names[number::num_operators])

    def end(self) -> None:
        """Lets open requests end."""
        self._is_over.set()
        self._join(self._threads, are_started=True)

    def unload_all(self, at_once: int) -> None:
        """Unloads all names."""

        def run(number: int) -> None:
            for name in self.names[number::at_once]:
                if self.meanings.now(name) != {NOTHING}:
                    self._unload(name)

        self._join([threading.Thread(target=run, args=(number,)) for number in range(at_once)])

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=self._noted, args=(target, *arguments))
        self._threads.append(thread)
        thread.start()

    def _noted(self, target: object, *arguments: object) -> None:
        assert callable(target)
        try:
            target(*arguments)
        except Exception as error:
            self.problems.append(repr(error))
            raise

    @staticmethod
    def _join(threads: Sequence[threading.Thread], *, are_started: bool = False) -> None:
        for thread in threads:
            if not are_started:
                thread.start()
        for thread in threads:
            thread.join()

    # -- operators -------------------------------------------------------------------------------

    def _operate(self, number: int, names: Sequence[str]) -> None:
        rng = random.Random(f"{self.seed} operator {number}")
        while not self._is_over.is_set():
            name = rng.choice(names)
            content = rng.randrange(len(self.texts.texts))
            if self.meanings.now(name) != {NOTHING} and rng.random() < 0.4:
                self._unload(name)
            else:
                self._load(name, content)
            self._is_over.wait(rng.random() * 0.1)

    def _load(self, name: str, content: int) -> None:
        (before,) = self.meanings.now(name)
        self.meanings.note(name, before, content)
        answer = load(self.mesh, name, self.texts.folder(content).name, load_inplace=True)
        if answer.status_code != 200:
            self.problems.append(f"load of {name}: {answer.text}")
        self.meanings.note(name, content)
        self.counts["replaced" if before not in (NOTHING, content) else "loaded"] += 1

    def _unload(self, name: str) -> None:
        (before,) = self.meanings.now(name)
        self.meanings.note(name, before, NOTHING)
        answer = unload(self.mesh, name)
        if answer.status_code != 200:
            self.problems.append(f"unload of {name}: {answer.text}")
        self.meanings.note(name, NOTHING)
        self.counts["unloaded"] += 1

    # -- clients ---------------------------------------------------------------------------------

    def _ask_on(self, number: int) -> None:
        rng = random.Random(f"{self.seed} client {number}")
        weights = [1.0 / (1 + rank) for rank in range(len(self.names))]
        addresses = self.mesh.grpc_addresses
        with grpc.insecure_channel(addresses[number % len(addresses)]) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            while not self._is_over.is_set():
                (name,) = rng.choices(self.names, weights)
                name = "" if rng.random() < 0.1 else name
                prompt = rng.randrange(len(self.texts.prompts))
                model = rng.choice([name, f"{MODEL}:{name}"]) if name else MODEL
                began = time.monotonic()
                if rng.random() < 0.7:
                    answer = self._stream(stub, model, self.texts.prompts[prompt])
                else:
                    answer = self._whole(model, self.texts.prompts[prompt])
                self._check(name, prompt, began, answer)

    def _check(self, name: str, prompt: int, began: float, answer: Answer) -> None:
        self.counts["requests"] += 1
        resolved = answer.first_at or time.monotonic()
        meant = self.meanings.between(name, began, resolved) if name else frozenset()
        if answer.is_unknown:
            self.counts["unknown"] += 1
            if NOTHING not in meant:
                self.problems.append(f"{name} was unknown, it meant {sorted(meant)}")
        elif answer.problem:
            self.problems.append(f"{name or 'the base model'}: {answer.problem}")
        else:
            found = {self.texts.texts[one][prompt] for one in meant if one != NOTHING}
            right = found if name else {self.texts.base[prompt]}
            if "" in right:
                self.counts["near-ties"] += 1
            elif answer.text not in right:
                self.problems.append(self._describe(name, prompt, meant, answer.text))

    def _describe(self, name: str, prompt: int, meant: Meaning, text: str) -> str:
        others = [n for n, texts in enumerate(self.texts.texts) if texts[prompt] == text]
        told = f"content {others}" if others else "no content"
        told = "the base model" if text == self.texts.base[prompt] else told
        return f"{name or 'the base model'} meant {sorted(meant)}, the text is that of {told}"

    def _stream(self, stub: object, model: str, prompt: list[int]) -> Answer:
        assert isinstance(stub, gateway_pb2_grpc.GatewayServiceStub)
        request = gateway_pb2.CompleteRequest(
            model=model,
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0),
            stop=common_pb2.StopCriteria(max_tokens=self.num_new, ignore_eos=True),
            stream=True,
        )
        answer = Answer()
        try:
            for message in stub.Complete(request, timeout=TIMEOUT_S):
                answer.first_at = answer.first_at or time.monotonic()
                answer.text += "".join(choice.text for choice in message.choices)
        except grpc.RpcError as error:
            answer.problem = f"{error.code()}: {error.details()}"
            answer.is_unknown = error.code() is grpc.StatusCode.NOT_FOUND and not answer.text
        return answer

    def _whole(self, model: str, prompt: list[int]) -> Answer:
        """Sends a request over REST, without streaming."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.num_new,
            "temperature": 0,
            "ignore_eos": True,
        }
        url = f"{self.mesh.url}/v1/completions"
        found = httpx.post(url, json=body, timeout=TIMEOUT_S, trust_env=False)
        if found.status_code == 200:
            return Answer(text=found.json()["choices"][0]["text"])
        return Answer(problem=json.dumps(found.json()), is_unknown=found.status_code == 404)
