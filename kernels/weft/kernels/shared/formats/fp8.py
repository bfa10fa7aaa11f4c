"""The number format e4m3."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
"""Four bits of exponent, three of mantissa, no infinities."""
FP8_MAX = 448.0
"""Largest number of `FP8`."""
