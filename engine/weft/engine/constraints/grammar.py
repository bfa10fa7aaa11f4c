"""Compiles constraints against a model's vocabulary, and reads what was compiled elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import xgrammar
from weft.engine.constraints.patterns import prepare_regex
from weft.engine.constraints.schema import prepare_schema
from weft.engine.constraints.string_patterns import with_patterns
from weft.engine.constraints.strings import exact_strings
from weft.engine.request import Constraint

MAX_WHITESPACE = 32
"""Most whitespace characters between two tokens of JSON: enough for deep indentation, while a model
that emits nothing else is stopped.
"""
MAX_TEXT_SHARE = 4
"""Most characters that a compiled grammar is sent as, for each byte that it may have."""
_ORIGIN = re.compile(r"^\[[^\]]*\] \S+: ")


class GrammarSource:
    """Compiles grammars for one vocabulary.

    Args:
        vocabulary: What the model's tokens spell.
        max_grammar_bytes: Largest size of a compiled grammar.
    """

    def __init__(self, vocabulary: xgrammar.TokenizerInfo, max_grammar_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._max_grammar_bytes = max_grammar_bytes

    @classmethod
    def of_text(cls, vocabulary: str, max_grammar_bytes: int) -> GrammarSource:
        """Builds the source from a vocabulary as xgrammar serialises it."""
        return cls(xgrammar.TokenizerInfo.deserialize_json(vocabulary), max_grammar_bytes)

    def compile(self, constraint: Constraint) -> str:
        """Compiles and serialises; may take any time and memory.

        Args:
            constraint: As the client gave it.

        Raises:
            ValueError: The constraint cannot be used; the message says why, and where in it.
        """
        compiler = xgrammar.GrammarCompiler(self._vocabulary, max_threads=1, cache_enabled=False)
        try:
            compiled = compiler.compile_grammar(_grammar(constraint))
        except RuntimeError as error:
            raise ValueError(_ORIGIN.sub("", str(error)).strip()) from error
        if not _has_text(compiled):
            raise ValueError("no text satisfies it")
        size, limit = compiled.memory_size_bytes, self._max_grammar_bytes
        if size > limit:
            raise ValueError(f"is too large: {size:,} bytes when compiled, at most {limit:,}")
        text = compiled.serialize_json()
        if len(text) > (most := MAX_TEXT_SHARE * limit):  # Grows faster than what it describes.
            raise ValueError(f"is too large: {len(text):,} bytes to send, at most {most:,}")
        return text

    def read(self, serialised: str) -> xgrammar.CompiledGrammar:
        """Reads what `compile` returned, possibly in another process with the same vocabulary."""
        return xgrammar.CompiledGrammar.deserialize_json(serialised, self._vocabulary)


def _has_text(grammar: xgrammar.CompiledGrammar) -> bool:
    """Whether anything may begin a text."""
    # Not the compiler's own, which takes torch.
    words = np.zeros((1, -(-grammar.tokenizer_info.vocab_size // 32)), np.int32)
    is_restricted = xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(words)
    return not is_restricted or bool(words.any())


def _grammar(constraint: Constraint) -> xgrammar.Grammar:
    if constraint.kind == "json_schema":
        schema, patterns = prepare_schema(constraint.text)
        plain = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
        return xgrammar.Grammar.from_ebnf(with_patterns(exact_strings(str(plain)), patterns))
    if constraint.kind == "regex":
        return xgrammar.Grammar.from_regex(prepare_regex(constraint.text))
    if constraint.kind == "ebnf":
        return xgrammar.Grammar.from_ebnf(constraint.text)
    return xgrammar.Grammar.from_ebnf(choice_grammar(constraint.choices))


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of the given texts."""
    return "root ::= " + " | ".join(f'"{"".join(map(_literal, choice))}"' for choice in choices)


def _literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character >= " " else f"\\u{ord(character):04x}"
