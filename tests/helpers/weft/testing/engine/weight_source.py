"""A process with an engine whose weights others copy.

`python -m weft.testing.engine.weight_source FOLDER SETTINGS` obeys lines of JSON: a method of `LLM`
and its arguments. It answers each with a line, a `WeightOffer` for `offer_weights`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import torch
from weft.contract.weights import WeightOffer
from weft.engine.base.processes import die_with_parent
from weft.engine.loop.llm import LLM


class WeightSource:
    """Use it as a context manager; it begins when it is entered."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._command = [
            *(sys.executable, "-m", __name__, str(os.getpid())),
            *(str(folder), json.dumps(settings, default=str)),
        ]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stops the process without ending it."""
        self.process.send_signal(signal.SIGSTOP)

    def offer(self) -> WeightOffer:
        return WeightOffer.of_json(self.call("offer_weights"))

    def call(self, method: str, *arguments: Any) -> str:
        """Raises AssertionError with what went wrong there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, *arguments], default=str) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(_ANSWER):
                return line.removeprefix(_ANSWER)
        raise AssertionError(f"{method}: the source has ended")


_ANSWER = "answer: "


def main(parent: str, folder: str, settings: str) -> None:
    die_with_parent(int(parent))
    torch.set_num_threads(1)
    with LLM(folder, **json.loads(settings)) as llm:
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            try:
                found = getattr(llm, method)(*arguments)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            text = found.to_json() if isinstance(found, WeightOffer) else json.dumps(str(found))
            print(_ANSWER + text, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
