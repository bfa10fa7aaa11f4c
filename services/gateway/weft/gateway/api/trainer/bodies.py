"""Bodies of trainers' calls, as SGLang has them, and the answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from weft.gateway.api.dialect_bodies import DialectBody
from weft.gateway.api.unserved import left_out

_NAMES_PAGES = "pages of other weights have other names, so none is found"


class PauseGenerationBody(DialectBody):
    """Body of POST /pause_generation."""

    mode: Literal["abort", "in_place", "retract"] | None = Field(
        None,
        description="requests end (the default), keep their pages, or are computed anew afterwards",
    )


class ContinueGenerationBody(DialectBody):
    """Body of POST /continue_generation."""

    torch_empty_cache: bool | None = left_out("nothing is kept for later use")


class UpdateFromDiskBody(DialectBody):
    """Body of POST /update_weights_from_disk."""

    model_path: str = Field(description="folder of safetensors files on each worker's host")
    load_format: str | None = left_out("safetensors files are read", "auto")
    abort_all_requests: bool | None = Field(None, description="end all requests before")
    weight_version: str | None = Field(None, description="name of the new version")
    flush_cache: Any = left_out(_NAMES_PAGES, True)
    is_async: Any = left_out("the files are always read in a thread")
    torch_empty_cache: Any = left_out("nothing is kept for later use")
    keep_pause: bool | None = Field(None, description="stay paused afterwards, if paused by this")
    recapture_cuda_graph: Any = left_out("weights keep their addresses")
    token_step: Any = left_out("give weight_version")


class CheckWeightsBody(DialectBody):
    """Body of POST /weights_checker."""

    action: Literal["checksum"] = Field(description="only checksum is served")


class WorkerWeights(BaseModel):
    """The weights of one worker."""

    state: Literal["ready", "updating", "failed"]
    version: str
    model_digest: str = Field(description="names the weights; empty while they are a mixture")
    pause: str
    updates: int
    problem: str
    packed_digest: str | None = Field(None, description="of the parameters as they lie in memory")


class TrainerAnswer(BaseModel):
    """Answer to a trainer's call."""

    success: Literal[True]
    message: str
    weight_version: str = Field(description="empty while the workers' differ")
    workers: dict[str, WorkerWeights]


class ServerInfoAnswer(BaseModel):
    """Answer to GET /server_info."""

    model_path: str
    served_model_name: str
    version: str
    weight_version: str
    workers: dict[str, WorkerWeights]


class PausedAnswer(BaseModel):
    """Answer to GET /is_paused."""

    is_paused: bool


class FlushedAnswer(BaseModel):
    """Answer to /flush_cache and /reset_prefix_cache."""

    success: Literal[True]
    message: str
