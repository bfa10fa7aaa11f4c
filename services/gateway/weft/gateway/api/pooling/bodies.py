"""Request bodies for vectors in place of text, with the fields that clients of OpenAI, Cohere, Jina
and vLLM send.

Unknown fields are refused, as in `weft.gateway.api.openai.bodies`. Fields of other servers that
would change the answer and are not supported are listed here and refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field
from weft.gateway.api.dialect_bodies import LENIENT
from weft.gateway.api.openai.bodies import Body, T
from weft.gateway.api.openai.foreign import HARMLESS, refuse_listed
from weft.gateway.api.parameters import Ids, Int, with_parameters
from weft.gateway.api.unserved import Unserved, refused, unused
from weft.gateway.validate import MAX_INPUTS

Inputs = Annotated[list[T], Field(fail_fast=True, max_length=MAX_INPUTS)]


_REFUSED = {
    "late_chunking": Unserved("vectors of chunks that see one another"),
    "embedding_types": Unserved("vectors of several number formats", (["float"],)),
    "output_dtype": Unserved("a number format other than float32", ("float", "float32")),
    "output_dimension": Unserved("give dimensions instead"),
    "endianness": Unserved("another order of bytes", ("native", "little")),
    "truncate": Unserved("give truncate_prompt_tokens instead", ("NONE",)),
    "truncation_side": Unserved("inputs cut at their begin", ("right",)),
    "activation": Unserved("values of classes without the model's own activation", (True,), True),
    "softmax": Unserved("values of classes without the model's own activation", (True,), True),
    "use_activation": Unserved("vectors without the model's own activation", (True,), True),
    "images": Unserved("inputs other than texts"),
    "mm_processor_kwargs": Unserved("inputs other than texts"),
    "lora_path": Unserved("an adapter is named by model"),
    "ttft_timeout": Unserved("without tokens there is no first one; timeout limits the request"),
}
"""Fields of other servers that would change the answer; bodies that set them are refused."""
_NOT_COHERES = {
    "dimensions": Unserved("give output_dimension instead"),
    "encoding_format": Unserved("give embedding_types instead", ("float",)),
    "prompt_name": Unserved("give input_type instead"),
    "truncate_prompt_tokens": Unserved("give max_tokens instead"),
}
"""Fields of the other bodies that Cohere's has by other names."""


if TYPE_CHECKING:
    _WithParameters = Body
else:
    _WithParameters = with_parameters(Body, "pooling", Int)


class PoolBody(_WithParameters):
    """Fields that all bodies of this module have."""

    names: ClassVar[Mapping[str, str]] = {"prompt": "input"}
    """Names of this body's fields, by the names of the internal request's fields."""

    of_others = HARMLESS | _REFUSED.keys()

    @classmethod
    def check_given(cls, value: Mapping[str, Any]) -> None:
        own = cls.model_fields
        refuse_listed(value, {name: why for name, why in _REFUSED.items() if name not in own})

    user: str | None = unused()


class CutBody(PoolBody):
    """A body whose inputs are cut as vLLM does."""

    truncate_prompt_tokens: Int | None = Field(
        None,
        description="longer inputs are cut to so many tokens, -1 = to the longest that the model "
        "takes; absent: they are refused",
    )


class InputBody(CutBody):
    """A body with one input or several."""

    input: str | Ids | Inputs[str] | Inputs[Ids] = Field(
        description="a text, several texts, token ids, or several lists of token ids; at most 2048"
    )
    add_special_tokens: bool | None = Field(None, description="of the tokenizer, default true")


class EmbeddingsBody(InputBody):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: float32, little-endian; default float"
    )
    dimensions: Int | None = Field(
        None, description="leading entries that are wanted, for models trained for that"
    )
    normalize: bool | None = Field(
        None, description="length 1 or not; default as the model's files say"
    )
    output_type: Literal["dense", "sparse", "multi_vector"] | None = Field(
        None,
        description="sparse: the lexical weight of each token that has one; multi_vector: a vector "
        "for each token but the first; both for models that have heads for them; default dense",
    )
    prompt_name: str | None = Field(
        None,
        description="one of the model's own prompts, which goes ahead of texts; default: its "
        "default one",
    )
    input_type: str | None = Field(None, description="another name of prompt_name")
    embed_dtype: Literal["float32"] | None = Field(None, description="only float32")
    task: str | None = refused("give prompt_name instead")
    messages: Any = refused("conversations as input")


class CohereEmbedBody(PoolBody):
    """Body of POST /v2/embed."""

    names: ClassVar[Mapping[str, str]] = {
        "prompt": "texts",
        "dimensions": "output_dimension",
        "truncate_prompt_tokens": "max_tokens",
    }

    of_others = PoolBody.of_others | _NOT_COHERES.keys()

    @classmethod
    def check_given(cls, value: Mapping[str, Any]) -> None:
        super().check_given(value)
        refuse_listed(value, _NOT_COHERES)

    texts: Inputs[str] | None = Field(None, description="1 to 2048 texts")
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering", "image"] | None
    ) = Field(
        None,
        description="the model's prompt of this name goes ahead of texts, or its prompts `query`, "
        "and `document` or `passage`, where it has them",
    )
    embedding_types: Inputs[Literal["float", "base64"]] | None = Field(
        None, description="default float"
    )
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="END, the default, cuts longer texts to what the model takes"
    )
    max_tokens: Int | None = Field(
        None, description="tokens to which texts are cut; not with truncate NONE"
    )
    output_dimension: Int | None = Field(None, description="leading entries that are wanted")
    inputs: Any = refused("inputs other than texts")


class PoolingBody(InputBody):
    """Body of POST /pooling."""

    task: Literal["embed", "token_embed", "sparse", "multi_vector", "classify"] | None = Field(
        None, description="default embed; sparse and multi_vector as `output_type` of embeddings"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: float32, little-endian; default float"
    )
    dimensions: Int | None = Field(None, description="leading entries that are wanted")
    normalize: bool | None = Field(None, description="length 1 or not")


class ClassifyBody(InputBody):
    """Body of POST /v1/classify."""


class Document(BaseModel):
    """A document given as an object, in place of a string."""

    model_config = LENIENT

    text: str = Field(description="the document")


class RerankBody(CutBody):
    """Body of POST /v1/rerank."""

    query: str = Field(description="what the documents are compared with")
    documents: Inputs[str | Document] = Field(
        min_length=1, description="1 to 2048 texts, or objects with `text`"
    )
    top_n: Int | None = Field(None, description="best documents that are returned; default all")
    return_documents: bool | None = Field(None, description="default true")
    instruction: str | None = Field(
        None, description="what makes a document relevant, for models that take an instruction"
    )
    max_tokens_per_doc: Int | None = refused("give truncate_prompt_tokens instead")
    rank_fields: Any = refused("documents of several fields")


class ScoreBody(CutBody):
    """Body of POST /v1/score."""

    text_1: str | Inputs[str] | None = Field(None, description="one text, or one for each second")
    text_2: str | Inputs[str] | None = Field(None, description="one text or several")
    queries: str | Inputs[str] | None = Field(None, description="another name of text_1")
    documents: str | Inputs[str] | None = Field(None, description="another name of text_2")
    instruction: str | None = Field(
        None, description="what makes a text relevant, for models that take an instruction"
    )
