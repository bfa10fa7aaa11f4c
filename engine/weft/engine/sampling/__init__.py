"""Sampling: from logits to the next token of each running sample."""

from weft.engine.sampling.sampler import SampleOutput, Sampler, SampleRow, derive_seed

__all__ = ["SampleOutput", "SampleRow", "Sampler", "derive_seed"]
