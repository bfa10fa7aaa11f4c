"""Runs in a Python with llama-cpp-python, for bench/quantised.py: a line of JSON with prompts and a
number of new tokens in, the seconds that llama.cpp took out.

    python bench/llama_process.py FILE.gguf THREADS perf_counter|process_time
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Answers until its input ends."""
    from llama_cpp import llama_cpp as api

    path, threads = sys.argv[1], int(sys.argv[2])
    clock = {one.__name__: one for one in (time.perf_counter, time.process_time)}[sys.argv[3]]
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 8192, 2048, 512, 16
    settings.n_threads = settings.n_threads_batch = threads
    if hasattr(settings, "kv_unified"):
        settings.kv_unified = True
    context = api.llama_init_from_model(model, settings)
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    for line in sys.stdin:
        asked = json.loads(line)
        begin = clock()
        _generate(api, context, size, asked["prompts"], asked["new"])
        print(clock() - begin, flush=True)


def _generate(api: Any, context: Any, size: int, prompts: list[list[int]], new: int) -> None:
    """All prompts in one batch, then a greedy token of each a step; nothing ends early."""
    import numpy as np

    api.llama_memory_clear(api.llama_get_memory(context), True)
    batch = api.llama_batch_init(sum(map(len, prompts)), 0, 1)
    rows = [(t, p, s, p + 1 == len(x)) for s, x in enumerate(prompts) for p, t in enumerate(x)]
    for step in range(new):
        ends = []
        batch.n_tokens = len(rows)
        for row, (token, position, stream, is_last) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, is_last
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, stream
            if is_last:
                ends.append((row, position, stream))
        status = api.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        rows = []
        for row, position, stream in ends:
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), (size,))
            rows.append((int(logits.argmax()), position + 1, stream, True))
        if step + 1 == new:
            break
    api.llama_batch_free(batch)


if __name__ == "__main__":
    main()
