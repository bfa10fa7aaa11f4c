"""Whether answers are valid under schemas, by jsonschema, with patterns as ECMA-262 has them and
multiples of decimals as they are written: for jsonschema itself 610.91 is no multiple of 0.01.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

import regex
from jsonschema import ValidationError, validators

SPACES = r" \t\n\v\f\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


def pattern_of_ecma(pattern: str) -> str:
    """The same in Python's syntax, with its flag for ASCII: blanks are more than those of ASCII,
    and the end is no place before a last line end.
    """
    written, is_class = "", False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        if part == "\\s":
            part = SPACES if is_class else f"[{SPACES}]"
        elif part == "$" and not is_class:
            part = r"\Z"
        is_class = part == "[" or (is_class and part != "]")
        written += part
    return written


def problem(schema: Any, text: str) -> str:
    """Why an answer is invalid; empty: it is not, or jsonschema cannot tell."""

    def check_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Any:
        # The flag would make properties of characters those of ASCII too.
        flags = 0 if r"\p" in pattern else regex.ASCII
        if isinstance(instance, str) and not regex.search(
            pattern_of_ecma(pattern), instance, flags
        ):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def check_multiple(validator: Any, step: Any, instance: Any, schema: Any) -> Any:
        if validator.is_type(instance, "number"):
            # `repr` has 17 digits at most and rounds what needs more, such as quarters of 2**50.
            spelled = (Fraction(repr(instance)), Fraction(instance))
            if all((one / Fraction(repr(step))).denominator != 1 for one in spelled):
                yield ValidationError(f"{instance!r} is not a multiple of {step}")

    def check_names(validator: Any, parts: Any, instance: Any, schema: Any) -> Any:
        for pattern, part in parts.items() if isinstance(instance, dict) else ():
            flags = 0 if r"\p" in pattern else regex.ASCII
            for name, value in instance.items():
                if regex.search(pattern_of_ecma(pattern), name, flags):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)

    checks = {
        "pattern": check_pattern,
        "patternProperties": check_names,
        "multipleOf": check_multiple,
    }
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        judge = validators.extend(kind, checks)(schema)
        found = next(judge.iter_errors(json.loads(text, parse_int=_whole)), None)
    except Exception:  # whatever a strange schema makes a validator raise
        return ""
    return "" if found is None else f"{found.message[:200]}: {text[:300]}"


def _whole(text: str) -> int | float:
    """A large number as schemas' own are read: for Python 1e308 differs from its digits."""
    value = int(text)
    return value if abs(value) < 2**63 else float(text)
