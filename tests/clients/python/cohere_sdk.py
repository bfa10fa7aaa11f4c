"""Cohere's SDK: embeddings of queries and documents, cut ones, and ranks."""

import math

import cohere
from settings import URL

client = cohere.ClientV2(api_key="none", base_url=URL)
texts = ["a mesh of services", "a fish"]


def embed(input_type: str, **options: object) -> list[list[float]]:
    """Vectors as numbers."""
    kinds = ["float"]
    answer = client.embed(
        model="embedder", texts=texts, input_type=input_type, embedding_types=kinds, **options
    )
    vectors = answer.embeddings.float_
    assert vectors is not None
    assert len(vectors) == 2
    return vectors


documents, queries = embed("search_document"), embed("search_query")
assert all(abs(math.hypot(*vector) - 1) < 1e-4 for vector in (*documents, *queries))
assert documents != queries
cut = embed("search_document", output_dimension=16)
assert [len(vector) for vector in cut] == [16, 16]
ranked = client.rerank(model="ranker", query="mesh?", documents=texts, top_n=2).results
assert sorted(one.index for one in ranked) == [0, 1]
assert ranked[0].relevance_score >= ranked[1].relevance_score
