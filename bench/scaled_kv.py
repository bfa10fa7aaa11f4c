"""What K and V in 8 bits cost in quality, over the demo model's whole context.

The texts are this project's pages and sources. For each position the probabilities of the next
token are compared with those of the float32 weights computed in float32: the mean Kullback-Leibler
divergence in nats a token, by position, and how often the most likely token is the same. Prompts
are cut into chunks, so that nearly all K and V are read from pages.

    python bench/scaled_kv.py [--texts 4] [--tokens 8192]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from harness import Harness, Run
from tokenizers import Tokenizer
from weft.checkpoint.demo import DEMO_NAME
from weft.checkpoint.resolve import resolve_model
from weft.contract.layout import in_8_bits
from weft.engine.executor.kv_format import dtype_of
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.loader import load_model
from weft.engine.model.step import Step
from weft.kernels.ops.attention.spec import AttentionMetadata

ROOT = Path(__file__).parent.parent
PAGE_SIZE, CHUNK = 16, 256
FORMATS = {
    "bfloat16": "",
    "bfloat16, KV in fp8_e4m3": "fp8_e4m3",
    "bfloat16, KV in int8": "int8",
}
"""Formats of KV; empty: that of the activations."""


def texts_of(model_dir: Path, count: int, tokens: int) -> list[list[int]]:
    """So many texts of so many tokens each."""
    files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("engine/**/*.py")])
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(file.read_text() for file in files)).ids
    stride = len(ids) // count
    return [ids[begin : begin + tokens] for begin in range(0, stride * count, stride)]


def loaded(model_dir: Path, dtype: str) -> DecoderOnlyLM:
    """The demo model."""
    model = load_model(model_dir, dtype=dtype).model
    assert isinstance(model, DecoderOnlyLM)
    return model


def log_probabilities(
    model: DecoderOnlyLM, tokens: Sequence[int], kept: str
) -> Iterator[torch.Tensor]:
    """[CHUNK, vocab] float32 of each chunk: of the token behind each position.

    Args:
        model: The model.
        tokens: A text.
        kept: Format of KV; empty: that of the activations.
    """
    num_pages = -(-len(tokens) // PAGE_SIZE)
    layout = model.kv_layout(PAGE_SIZE)
    layout = in_8_bits(layout, kept) if kept else layout
    dtype = dtype_of(layout.plane) if kept else model.dtype
    pool = torch.zeros(layout.pool_shape(num_pages), dtype=dtype)
    for begin in range(0, len(tokens), CHUNK):
        positions = torch.arange(begin, min(begin + CHUNK, len(tokens)))
        end, count = int(positions[-1]) + 1, len(positions)
        group = AttentionMetadata(
            page_table=torch.arange(num_pages, dtype=torch.int32)[None],
            places=positions,
            cu_q_lens=torch.tensor([0, count], dtype=torch.int32),
            kv_lens=torch.tensor([end], dtype=torch.int32),
            max_q_len=count,
            max_kv_len=end,
        )
        step = Step(
            token_ids=torch.tensor(tokens[begin:end]),
            positions=positions,
            groups=(group,),
            logits_rows=torch.arange(count),
        )
        with torch.inference_mode():
            yield model.logits(model.forward_all(step, pool)).log_softmax(-1)


harness = Harness(__file__, __doc__)
harness.flag("--texts", type=int, default=4)
harness.flag("--tokens", type=int, default=8192, help="of each text")


@harness.part
def quality(run: Run) -> None:
    """All formats."""
    model_dir = resolve_model(DEMO_NAME)
    texts = texts_of(model_dir, run.options.texts, run.options.tokens)
    base = loaded(model_dir, "float32")
    model = loaded(model_dir, "bfloat16")
    divergences: dict[str, list[torch.Tensor]] = {name: [] for name in FORMATS}
    same: dict[str, list[torch.Tensor]] = {name: [] for name in FORMATS}
    for text in texts:
        others = [log_probabilities(model, text, kept) for kept in FORMATS.values()]
        for expected, *found in zip(log_probabilities(base, text, ""), *others, strict=True):
            for name, own in zip(FORMATS, found, strict=True):
                divergences[name].append((expected.exp() * (expected - own)).sum(-1))
                same[name].append(expected.argmax(-1) == own.argmax(-1))
    for name in FORMATS:
        by_text = torch.cat(divergences[name]).view(len(texts), -1)
        quarters = [part.mean().item() for part in by_text.chunk(4, dim=1)]
        figures = {"kl_nats": by_text.mean().item(), "kl_nats_by_quarter": quarters}
        run.row(figures, format=name, same_top=torch.cat(same[name]).double().mean().item())


if __name__ == "__main__":
    sys.exit(harness.main())
