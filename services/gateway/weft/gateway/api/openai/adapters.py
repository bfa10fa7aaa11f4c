"""Bodies and answers of the calls that load and unload LoRA adapters, as vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import Field
from weft.common.adapters.manifest import Entry
from weft.contract.errors import WeftError
from weft.gateway.adapters.manager import LoadOrder
from weft.gateway.api.openai.answers import Answer
from weft.gateway.api.openai.bodies import Body
from weft.gateway.api.openai.bounds import Bounds
from weft.gateway.validate import invalid

_NAME = {"pattern": r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"}


class LoadAdapterBody(Body):
    """Body of POST /v1/load_lora_adapter, as vLLM's."""

    model: str | None = Field(None, description="base model; may be absent where there is one")
    lora_name: str = Field(description="what requests will call it")
    base_model_name: str | None = Field(None, description="another name of `model`")
    lora_path: str = Field(description="folder of a PEFT adapter in the adapter root")
    load_inplace: bool | None = Field(
        None, description="replace other content of that name; default false"
    )
    pinned: bool | None = Field(None, description="keep it on the device; default false")
    lenient: bool | None = Field(
        None, description="leave out what of it cannot be applied; default false"
    )


class UnloadAdapterBody(Body):
    """Body of POST /v1/unload_lora_adapter, as vLLM's."""

    of_others = frozenset({"lora_int_id"})

    model: str | None = Field(None, description="not used")
    lora_name: str = Field(description="what requests call it")


class AdapterAnswer(Answer):
    """An adapter that was loaded or unloaded."""

    status: Literal["success"]
    message: str
    id: str = Field(description="its name")
    parent: str = Field(description="its base model")
    digest: str = Field(description="of its content, 64 hex digits")


BOUNDS: Bounds = {
    "LoadAdapterBody": {"lora_name": _NAME, "lora_path": {"minLength": 1}},
    "UnloadAdapterBody": {"lora_name": _NAME},
}
"""Keywords of JSON schema by body and field, as in `weft.gateway.api.openai.bounds`."""


def load_order(body: LoadAdapterBody) -> LoadOrder:
    """Raises InvalidRequest if the body names two base models."""
    if body.model and body.base_model_name and body.model != body.base_model_name:
        raise invalid("base_model_name", "contradicts model; give one of them")
    return LoadOrder(
        name=body.lora_name,
        path=body.lora_path,
        model=body.model or body.base_model_name or "",
        replaces=bool(body.load_inplace),
        is_pinned=bool(body.pinned),
        is_lenient=bool(body.lenient),
    )


@contextmanager
def as_in_the_body(model: str = "model") -> Iterator[None]:
    """Translates the names of fields in errors to those of an adapter call's body, whose field
    `model` names the base model.
    """
    names = {"name": "lora_name", "path": "lora_path", "model": model}
    try:
        yield
    except WeftError as error:
        if error.param in names:
            name = names[error.param]
            error.message = error.message.replace(f"{error.param}: ", f"{name}: ", 1)
            error.param = name
        raise


def adapter_json(entry: Entry, what: str) -> dict[str, object]:
    """What an answer says of an entry; `what` has become of it: loaded or unloaded."""
    return {
        "status": "success",
        "message": f"the adapter `{entry.name}` is {what}",
        "id": entry.name,
        "parent": entry.model,
        "digest": entry.digest,
    }
