"""LlamaIndex: embeddings of a query and of texts."""

from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from settings import URL

model = OpenAILikeEmbedding(model_name="embedder", api_base=f"{URL}/v1", api_key="none")
texts = ["a mesh of services", "a fish"]
vectors = model.get_text_embedding_batch(texts)
assert [len(vector) for vector in vectors] == [72, 72]
query = model.get_query_embedding(texts[0])
assert max(abs(a - b) for a, b in zip(query, vectors[0], strict=True)) < 1e-5
