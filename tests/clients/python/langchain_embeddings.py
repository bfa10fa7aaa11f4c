"""LangChain: embeddings of a query and of documents, in a vector store."""

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

# It counts the tokens of OpenAI's models otherwise.
embeddings = OpenAIEmbeddings(model="embedder", check_embedding_ctx_length=False)
texts = ["a mesh of services", "a fish", "a weaver at a loom"]
vectors = embeddings.embed_documents(texts)
assert [len(vector) for vector in vectors] == [72] * 3
query = embeddings.embed_query(texts[1])
assert max(abs(a - b) for a, b in zip(query, vectors[1], strict=True)) < 1e-5
store = InMemoryVectorStore.from_texts(texts, embeddings)
(found,) = store.similarity_search(texts[2], k=1)
assert found.page_content == texts[2]
