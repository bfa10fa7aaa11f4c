"""A rank that is late by a random delay at every step, fails in one, or has other embeddings.

`Ranks` starts it in place of the program of the other ranks; `ODD_RANK` says what is odd: `late`,
`differs`, or the number of the step in which it fails.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.port import Launched
from weft.engine.executor.ranks import follow
from weft.engine.executor.step_input import StepInput

_launch = LocalExecutor.launch
_how = os.environ["ODD_RANK"]
_num_steps = 0


def _odd(self: LocalExecutor, step: StepInput) -> Launched:
    global _num_steps
    _num_steps += 1
    if _how == "late":
        time.sleep(random.choice((0, 0, 1e-4, 1e-3, 5e-3)))
    elif _how == "differs":
        model: Any = self._model
        model.model.embed_tokens.mul_(1.5)
    elif _num_steps == int(_how):
        raise RuntimeError("out of luck")
    launched = _launch(self, step)
    if _how == "late":
        time.sleep(random.choice((0, 0, 1e-4, 1e-3, 5e-3)))
    return launched


if __name__ == "__main__":
    LocalExecutor.launch = _odd  # type: ignore[method-assign]
    code = follow.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
