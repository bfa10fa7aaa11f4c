"""The repository's own adapters on the demo model: the engine says what PEFT says."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.lora_reference import BASE, PeftModels
from weft.testing.models.threads import one_thread

ADAPTERS = Path(__file__).parents[3] / "adapters"
QUESTIONS = ["Where is the harbour?", "What do you think of the weather?", "Sort 3, 1, 2."]


@pytest.mark.full
def test_demo_adapters_in_one_batch_with_the_base_model(tmp_path: Path) -> None:
    model_dir = resolve_model("demo")
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    models = PeftModels(model_dir, tmp_path)
    directories = [path for path in ADAPTERS.iterdir() if path.is_dir()]
    assert directories
    for directory in directories:
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
        models.put(directory, PeftModel.from_pretrained(base, directory).eval())
    prompts, adapters = [], []
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for adapter in (BASE, *models.digests):
            prompts.append(tokenizer.encode(text).ids)
            adapters.append(adapter)
    with (
        one_thread(),
        LLM(model_dir, dtype="float32", num_pages=200, enable_lora=True) as llm,
    ):
        for directory in directories:
            llm.load_adapter(directory)
        stop = StopCriteria(max_tokens=16)
        samples = llm.generate(prompts, stop=stop, top_logprobs=20, adapters=adapters)
    for prompt, adapter, sample in zip(prompts, adapters, samples, strict=True):
        models.check(adapter, prompt, sample)
    texts = {tuple(sample.token_ids) for sample in samples[: 1 + len(directories)]}
    assert len(texts) == 1 + len(directories), "each says something else"
