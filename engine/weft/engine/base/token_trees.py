"""Trees of tokens that may follow one another."""

from __future__ import annotations

from collections.abc import Sequence


class TokenTree(list[int]):
    """Tokens that may follow the last one of a request, as a tree: parents before children.

    Row 0 of the request is its last token, row i + 1 is token i of this list.

    Args:
        parents: For each of them, the row of its parent.
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        super().__init__(tokens)
        self.parents = parents


def parents_of(tokens: Sequence[int]) -> Sequence[int]:
    """For each token of a tree, or of a chain, the row of its parent."""
    return tokens.parents if isinstance(tokens, TokenTree) else range(len(tokens))
