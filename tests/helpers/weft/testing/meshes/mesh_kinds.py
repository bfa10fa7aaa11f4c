"""The meshes that tests of tests/mesh run on."""

from __future__ import annotations

from pathlib import Path

import pytest

NUM_TOKENS = 20
"""Length of most answers."""
PREEMPTED_TOKENS = 36
"""Length of answers that are to be pre-empted."""
DRAFTED_TOKENS = 36
"""Length of answers in which drafts are looked at."""
_FLOAT32 = ("--dtype", "float32", "--kv-memory-bytes", str(512 << 20))
_SHIP_ALWAYS = ("--local-prefill-max-tokens", "0")
PATIENT = "--fill-progress-timeout-s 60 --lease-s 60"
"""For decode workers whose prompts a test wants to be shipped: on a busy machine a step of a filler
can take longer than a fill may stall or a lease lasts, and the prompt runs where it is decoded.
"""
_DRAFT = str(Path(__file__).parents[5] / "drafts" / "smollm2-135m-eagle3")
KINDS: dict[str, tuple[str, ...]] = {
    "nixl": (
        *_FLOAT32,
        *_SHIP_ALWAYS,
        *("--transport", "nixl", "--draft-dir", _DRAFT, "--decode-args", PATIENT),
    ),
    "data": (*_FLOAT32, *_SHIP_ALWAYS, "--transport", "data", "--decode-args", PATIENT),
    # Prompts run where they are decoded, one at a time, and the more urgent one has the place.
    "local": (
        *_FLOAT32,
        *("--local-prefill-max-tokens", "1000000", "--prefill", "0"),
        "--decode-args",
        "--num-pages 83 --max-running-requests 1 --scheduling-policy priority "
        "--preemption-threshold 1",
    ),
    "shipped": (
        *(*_SHIP_ALWAYS, "--decode-args", PATIENT),
        *("--max-restart-delay-s", "0.5"),
    ),
    "pairs": (
        *_SHIP_ALWAYS,
        # Tests look into the quarantine of owners, however long a killed filler is not vouched for.
        *("--prefill", "2", "--decode", "2", "--prefill-args", "--prefill-chunk-tokens 128"),
        *("--max-restart-delay-s", "0.5", "--enable-faults"),
        *("--decode-args", f"{PATIENT} --max-quarantine-fraction 1"),
        # A lost decode worker fails its requests; test_resumption.py has it otherwise.
        *("--gateway-args", "--decode-policy round_robin --max-attempts 1"),
    ),
    "both": (
        *_SHIP_ALWAYS,
        *("--both", "3", "--decode-args", f"{PATIENT} --prefill-chunk-tokens 128"),
    ),
    "bfloat16": (
        *("--dtype", "bfloat16", *_SHIP_ALWAYS, "--transport", "shared", "--decode-args", PATIENT),
        # Messages that the servers put into memory which they share with their engines.
        *("--prefill-args", "--transport data"),
    ),
}
"""Flags of `weft up` by kind of mesh."""
TINY_KINDS = ("shipped", "pairs", "both")
"""Kinds that run with a `TinyMesh`: their tests do not depend on the model."""


def on(kind: str) -> pytest.MarkDecorator:
    """Runs a test on a mesh of this kind (the fixture `mesh`)."""
    return pytest.mark.mesh(kind)
