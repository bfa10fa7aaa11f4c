"""Answers of the server's endpoints, as pydantic models: the documented shape of what is sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, RootModel


class VersionAnswer(BaseModel):
    """Answer to GET /version."""

    version: str


class PingAnswer(BaseModel):
    """Answer to /ping: empty."""


class HealthAnswer(BaseModel):
    """Answer to GET /health_generate."""

    status: Literal["ok"]


class TokenizerAnswer(BaseModel):
    """Answer to GET /tokenizer_info."""

    tokenizer_class: str
    model: str
    model_max_length: int
    vocab_size: int
    eos_token_ids: list[int]
    added_tokens_decoder: dict[str, dict[str, Any]]
    has_chat_template: bool


class MetricsAnswer(RootModel[str]):
    """Answer to GET /metrics: Prometheus' text format."""


class LayerExpertsAnswer(BaseModel):
    layer: int
    rows: list[int] = Field(description="rows that chose each expert")
    steps: list[int] = Field(description="steps in which some row did")
    places: list[int] = Field(
        description="the expert in each place, rank after rank, -1: unused; empty: they do not move"
    )
    imbalance: float = Field(description="work of the most loaded rank over the mean of all")


class ExpertBalanceAnswer(BaseModel):
    imbalance: float
    num_placements: int
    num_moved: int
    num_failed: int
    problem: str


class WorkerExpertsAnswer(BaseModel):
    is_counting: bool
    num_steps: int
    num_ranks: int
    balance: ExpertBalanceAnswer | None = Field(None, description="null: experts do not move")
    layers: list[LayerExpertsAnswer] = Field(description="of a dump alone")


class ExpertsAnswer(BaseModel):
    """Answer about the experts of all workers, by their ids."""

    workers: dict[str, WorkerExpertsAnswer]


class ProfileAnswer(BaseModel):
    """Answer to POST /start_profile and /stop_profile."""

    profile_id: str
    path: str = Field(description="of the trace on the gateway's host, there once it is whole")
    workers: list[str]
    steps: dict[str, int] | None = Field(None, description="recorded by each worker, once known")
    notes: list[str] = Field(description="what is missing and why")
