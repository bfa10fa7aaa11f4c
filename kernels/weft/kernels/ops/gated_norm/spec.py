"""Types of norms with gates."""

from typing import Literal

GateForm = Literal["silu", "sigmoid"]
