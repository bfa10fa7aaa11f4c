"""Names the parts that known but refused architectures need and that are missing here, for
messages.
"""

from __future__ import annotations

from weft.contract.errors import ModelError

_MISSING = {
    "sparse attention, by an indexer": (
        *("DeepseekV32", "GlmMoeDsa", "AXK2", "Dots3Note", "HYV4", "Qwen4Exp", "Glm5Next"),
    ),
    "block-sparse attention": ("MiniMaxM3VL", "MiniMaxM3Sparse"),
    "compressed attention": ("DeepseekV4", "DeepseekV41"),
    "hyper-connections": ("KimiK3",),
    "scores that fall with the distance (ALiBi)": ("Bloom", "MPT", "Mpt", "JAIS"),
    "lightning attention of rotated heads": ("BailingMoeV2_5",),
    "a model without any attention": ("FalconMamba", "Mamba", "Mamba2", "Rwkv", "xLSTM"),
    "gated linear recurrences (RG-LRU)": ("RecurrentGemma",),
    "attention blocks shared by layers": ("Zamba", "Zamba2"),
    "masks that depend on values": ("Doge",),
    "attention by transformers' interface": (
        *("BigBird", "GPTNeoXJapanese", "MegatronBert", "OpenAIGPT", "RemBert", "RoFormer"),
    ),
    "biases of scores by positions": ("Inkling",),
    "attention to another sequence": (
        *("BigBirdPegasus", "Bart", "Blenderbot", "MBart", "Marian", "Mllama", "Mvp", "PLBart"),
        *("Pegasus", "ProphetNet", "T5", "TrOCR", "Whisper"),
    ),
}
"""Missing parts, and beginnings of the names of architectures that have them."""
_ENDS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")


def missing_part(architecture: str) -> str | None:
    """The part that a known architecture needs and that is missing; None: none is known."""
    stem = next((architecture.removesuffix(e) for e in _ENDS if architecture.endswith(e)), "")
    return next((part for part, stems in _MISSING.items() if stem in stems), None)


def unsupported(architecture: str, supported: tuple[str, ...]) -> ModelError:
    """The error about `architectures[0]` of a config.json, which no class implements. `supported`
    are the architectures that have a class.
    """
    part = missing_part(architecture)
    reason = "" if part is None else f" (missing: {part})"
    return ModelError(
        f"architectures: {architecture!r} is not supported{reason}; supported: "
        f"{', '.join(supported)}",
        param="architectures",
    )
