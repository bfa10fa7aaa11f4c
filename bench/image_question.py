"""A question on a picture to the demo model with its tower, over REST on a CPU.

    python bench/image_question.py

Each picture is new, a JPEG file of 1024 x 768 with noise, so that nothing of it is cached; the
answer has at most 24 tokens. `seconds` are the client's, `processor_s` those of all processes of
the mesh, which also count where other programs keep the cores busy.
"""

from __future__ import annotations

import base64
import io
import sys
import time

import httpx
import numpy as np
from harness import Harness, Run, spread
from machine import ROOT
from PIL import Image
from processor_time import taken_s
from serving.mesh import MeshProcess

QUESTION = "What is in the picture?"
TOKENS = 24
SIZE = (768, 1024)

harness = Harness(__file__, __doc__, repeats=15)
harness.flag("--model", default="models/smollm2-135m-images", help="in the repository")
harness.flag("--dtype", default="auto")
harness.flag("--up-flags", default="", help="further flags of `weft up`")


def picture(rng: np.random.Generator) -> str:
    """A JPEG file as a data URL."""
    small = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    wide = np.asarray(small.resize(SIZE[::-1])).astype(np.int16)
    noisy = np.clip(wide + rng.integers(-8, 9, wide.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


@harness.part
def question(run: Run) -> None:
    """One request at a time."""
    options, rng = run.options, np.random.default_rng(1)
    mesh = MeshProcess(str(ROOT / options.model), options.dtype, options.up_flags)
    run.stack.callback(mesh.stop)
    mesh.wait_until_ready()
    walls, taken, tokens = list[float](), list[float](), 0
    with httpx.Client(base_url=mesh.url, timeout=120) as client:
        for _ in range(options.repeats + 1):
            parts = [
                {"type": "image_url", "image_url": {"url": picture(rng)}},
                {"type": "text", "text": QUESTION},
            ]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": TOKENS}
            before, began = sum(taken_s(mesh.pid).values()), time.perf_counter()
            answer = client.post("/v1/chat/completions", json={**body, "temperature": 0})
            walls.append(time.perf_counter() - began)
            taken.append(sum(taken_s(mesh.pid).values()) - before)
            if answer.status_code != 200:
                raise SystemExit(f"the request failed: {answer.text[:500]}")
            tokens += answer.json()["usage"]["completion_tokens"]
    run.row(
        requests=len(walls) - 1,
        seconds=spread(walls[1:]),
        slowest_s=max(walls[1:]),
        processor_s=spread(taken[1:]),
        tokens_an_answer=tokens / len(walls),
    )


if __name__ == "__main__":
    sys.exit(harness.main())
