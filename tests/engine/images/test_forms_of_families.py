"""What the gateway makes of image files is what the worker's tower takes, family by family."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.gateway.media.load import load_image_prompts
from weft.gateway.media.prompts import put_in
from weft.testing.models.choices import check_choices
from weft.testing.models.image_families import FAMILIES, Prompt, text
from weft.testing.models.tiny_images import random_image

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.mark.parametrize("name", FAMILIES)
def test_files_become_tokens_and_rows(name: str, tmp_path: Path) -> None:
    """Images of four sizes, the last one with few tokens."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    family = FAMILIES[name]()
    folder = family.make(tmp_path / "model", seed)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    images = load_image_prompts(folder, config, tokenizer)
    assert images is not None
    files = [random_image(n, random.randint(9, 90), random.randint(9, 90)) for n in range(4)]
    flags = [False, False, False, True]
    expanded = [
        (
            images.expansion(one.height, one.width, is_coarse=is_coarse),
            images.form.process(one, is_coarse=is_coarse),
        )
        for one, is_coarse in zip(files, flags, strict=True)
    ]
    given = [*text(), *(id_ for _ in files for id_ in (images.place_id, *text()))]
    ids, spans = put_in(given, {images.place_id: expanded})
    media = {one.digest: one for _, many in expanded for one in many}
    prompt = Prompt(ids, list(spans), list(media.values()))
    with LLM(folder, dtype="float32", num_pages=600, prefill_chunk_tokens=64) as llm:
        llm.put(prompt.media)
        stop = StopCriteria(max_tokens=6, ignore_eos=True)
        (sample,) = llm.generate([prompt.ids], stop=stop, spans=[prompt.spans])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    check_choices(family.logits(model, prompt, sample.token_ids), sample.token_ids, 3e-5)
