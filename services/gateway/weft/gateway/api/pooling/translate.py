"""Conversion of bodies for vectors to the gateway's own request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.contract.tasks import Output
from weft.gateway.api.parameters import given_parameters
from weft.gateway.api.pooling.bodies import (
    ClassifyBody,
    CohereEmbedBody,
    CutBody,
    EmbeddingsBody,
    InputBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from weft.gateway.request import (
    CallFacts,
    PairPrompt,
    PoolingOptions,
    Prompt,
    RawRequest,
    TextPrompt,
    TokenPrompt,
)
from weft.gateway.validate import check_range, invalid

OUTPUTS: Mapping[str, Output] = {
    "embed": "embedding",
    "dense": "embedding",
    "token_embed": "token_embeddings",
    "sparse": "sparse",
    "multi_vector": "multi_vector",
    "classify": "classes",
}


_CHOICES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Names of prompts for each of Cohere's types of input."""


def embeddings_request(body: EmbeddingsBody, facts: CallFacts) -> RawRequest:
    """Raises InvalidRequest if the body asks for something unsupported, or its fields contradict
    each other.
    """
    if body.prompt_name and body.input_type and body.prompt_name != body.input_type:
        raise invalid("input_type", "contradicts prompt_name; give one of them")
    output = OUTPUTS[body.output_type or "dense"]
    if body.encoding_format == "base64" and output != "embedding":
        raise invalid(
            "encoding_format", f"base64 is not for {output}, whose shape it does not tell"
        )
    wanted = PoolingOptions(
        output=output,
        dimensions=body.dimensions,
        normalises=body.normalize,
        truncate_tokens=_cut(body),
        prompt_name=body.prompt_name or body.input_type,
        prompt_field="prompt_name" if body.prompt_name else "input_type",
    )
    return _request(body, facts, _inputs(body), wanted)


def cohere_request(body: CohereEmbedBody, facts: CallFacts) -> RawRequest:
    """Raises InvalidRequest if there are no texts, the body asks for something unsupported, or its
    fields contradict each other.
    """
    if body.input_type == "image" or not body.texts:
        raise invalid("texts", "give at least one text; images are not supported")
    if body.max_tokens is not None:
        check_range("max_tokens", body.max_tokens, 1, 2**31 - 1)
        if body.truncate == "NONE":
            raise invalid("max_tokens", "texts are not cut with truncate NONE; give one of them")
    cut = None if body.truncate == "NONE" else body.max_tokens or 0
    wanted = PoolingOptions(
        output="embedding",
        dimensions=body.output_dimension,
        truncate_tokens=cut,
        prompt_choices=_CHOICES.get(body.input_type or "", ()),
    )
    prompts = tuple(TextPrompt(text=text) for text in body.texts)
    return _request(body, facts, prompts, wanted)


def pooling_request(body: PoolingBody, facts: CallFacts) -> RawRequest:
    """Translates a body for raw vectors; the default task is embeddings. Raises InvalidRequest if
    base64 is wanted for lexical weights.
    """
    if body.encoding_format == "base64" and body.task == "sparse":
        raise invalid("encoding_format", "base64 is not for sparse")
    wanted = PoolingOptions(
        output=OUTPUTS[body.task or "embed"],
        dimensions=body.dimensions,
        normalises=body.normalize,
        truncate_tokens=_cut(body),
    )
    return _request(body, facts, _inputs(body), wanted)


def classify_request(body: ClassifyBody, facts: CallFacts) -> RawRequest:
    return _request(
        body, facts, _inputs(body), PoolingOptions(output="classes", truncate_tokens=_cut(body))
    )


def rerank_request(body: RerankBody, facts: CallFacts) -> RawRequest:
    """Each document becomes a pair with the query."""
    if body.top_n is not None:
        check_range("top_n", body.top_n, 1, 2**31 - 1)
    pairs = [PairPrompt(first=body.query, second=text) for text in documents_of(body)]
    wanted = PoolingOptions(
        output="classes", truncate_tokens=_cut(body), instruction=body.instruction or ""
    )
    return _request(body, facts, tuple(pairs), wanted)


def score_request(body: ScoreBody, facts: CallFacts) -> RawRequest:
    """Raises InvalidRequest if the numbers of texts do not fit together."""
    first = _one_of("text_1", body.text_1, "queries", body.queries)
    second = _one_of("text_2", body.text_2, "documents", body.documents)
    wanted = PoolingOptions(
        output="classes", truncate_tokens=_cut(body), instruction=body.instruction or ""
    )
    return _request(body, facts, pairs_of(first, second), wanted)


def pairs_of(
    first: Sequence[str], second: Sequence[str], names: tuple[str, str] = ("text_1", "text_2")
) -> tuple[PairPrompt, ...]:
    """Pairs each second text with its first one, or with the only first one. `names` are the two
    fields' in errors. Raises InvalidRequest if the numbers of texts do not fit together, or one of
    them is 0.
    """
    if not second:
        raise invalid(names[1], "is empty; give at least one text")
    if len(first) == 1:
        first = list(first) * len(second)
    if len(first) != len(second):
        raise invalid(
            names[0],
            f"has {len(first)} texts for {len(second)} of {names[1]}; give one, or as many",
        )
    return tuple(PairPrompt(first=a, second=b) for a, b in zip(first, second, strict=True))


def documents_of(body: RerankBody) -> list[str]:
    return [one if isinstance(one, str) else one.text for one in body.documents]


def _one_of(
    name: str, given: str | list[str] | None, other: str, alias: str | list[str] | None
) -> list[str]:
    if given is not None and alias is not None:
        raise invalid(other, f"is another name of {name}; give one of them")
    texts = alias if given is None else given
    if texts is None:
        raise invalid(name, "this field is required")
    return [texts] if isinstance(texts, str) else texts


def _cut(body: CutBody) -> int | None:
    given = body.truncate_prompt_tokens
    if given is None or given == -1:
        return None if given is None else 0
    check_range("truncate_prompt_tokens", given, 1, 2**31 - 1)
    return given


def _inputs(body: InputBody) -> tuple[Prompt, ...]:
    given, specials = body.input, body.add_special_tokens is not False
    if not given and not isinstance(given, str):
        raise invalid("input", "is empty; give at least one text")
    if isinstance(given, str):
        return (TextPrompt(text=given, add_special_tokens=specials),)
    many: list[Prompt] = []
    ids: list[int] = []
    for one in given:
        if isinstance(one, int):
            ids.append(one)
        elif isinstance(one, str):
            many.append(TextPrompt(text=one, add_special_tokens=specials))
        else:
            many.append(TokenPrompt(ids=tuple(one)))
    return (TokenPrompt(ids=tuple(ids)),) if ids else tuple(many)


def _request(
    body: PoolBody, facts: CallFacts, prompts: tuple[Prompt, ...], wanted: PoolingOptions
) -> RawRequest:
    given = given_parameters(body, "pooling")
    return RawRequest(
        call=facts, model=body.model or "", prompts=prompts, given=given, pooling=wanted
    )
