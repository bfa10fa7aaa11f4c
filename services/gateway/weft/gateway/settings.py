"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from weft.common.kubernetes import KubernetesSettings
from weft.common.rpc.listen import split_address
from weft.common.settings import (
    MAX_NAME_CHARS,
    ModelSettings,
    ServiceSettings,
    is_loopback,
    setting_of,
    with_settings_of,
)
from weft.contract.cores import num_cores
from weft.contract.request import check_whitespace
from weft.contract.settings import settings_of
from weft.gateway.admission.keys import parse_hash
from weft.gateway.fleet.addresses import split_service
from weft.gateway.media.hosts import HostPatterns
from weft.gateway.routing import POLICIES, PolicyOptions
from weft.gateway.text.answer.formats import FORMATS, REASONING_FORMATS

if TYPE_CHECKING:
    from weft.gateway.fleet.discovery.base import Role

DiscoveryName = Literal["static", "dns", "file", "kubernetes"]
MAX_PROMPTS = 4096
"""Upper bound of `max_prompts`."""


if TYPE_CHECKING:
    _RoutingSettings = ModelSettings
    PrefillPolicyName = str
    DecodePolicyName = str
    ToolParserName = str
    ReasoningParserName = str
else:
    _RoutingSettings = with_settings_of(ModelSettings, PolicyOptions, settings_of(PolicyOptions))
    PrefillPolicyName = Literal[tuple(name for name in POLICIES if name != "follow")]
    DecodePolicyName = Literal[tuple(POLICIES)]
    ToolParserName = Literal[("auto", *FORMATS)]
    ReasoningParserName = Literal[("auto", "none", *REASONING_FORMATS)]


def image_body_bytes(max_body_bytes: int, max_request_image_bytes: int) -> int:
    """Largest request body where a model takes images: in base64, beside the rest."""
    return max_body_bytes + max_request_image_bytes * 4 // 3


class GatewaySettings(_RoutingSettings):
    """Front door of a Weft mesh: templates, tokenises, routes, streams."""

    program: ClassVar[str] = "gateway"
    files: ClassVar[tuple[str, ...]] = ("tenants_file",)

    port: int = setting_of(ServiceSettings, "port", 50051)
    models: list[str] = Field(
        [],
        description="further models, NAME=DIRECTORY each; workers report which one they serve",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="defaults of sampling parameters; auto = those of the model's "
        "generation_config.json, none = the API's own",
    )
    chat_template: str = Field(
        "",
        max_length=4096,
        description="file with the chat template of model_dir's model, or the name of one of its "
        "own; empty = the one called default",
    )
    tool_parser: ToolParserName = Field(
        "auto",
        description="how models write calls of tools; auto = as their chat templates teach",
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="how models write the reasoning before an answer; think = between think tags, "
        "none = they do not; auto = as the chat template says",
    )
    constrained_json_whitespace_pattern: str | None = Field(
        None,
        description="regular expression of the blanks, tabs and line breaks that may stand between "
        "two tokens of JSON under a constraint, for requests that give none; none = at most one "
        "blank behind each comma and each colon",
    )
    disable_any_whitespace: bool = Field(
        False, description="allow no blanks there, as an empty pattern does"
    )
    expected_adapters: list[str] = Field(
        [],
        max_length=1000,
        description="names of adapters, MODEL:NAME with several models, that must have been loaded "
        "before the gateway says for the first time that it is ready",
    )
    adapter_load_timeout_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="time limit of loading an adapter, and of waiting for the requests of an "
        "unloaded one, in seconds",
    )
    adapter_linger_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="time that a replaced or unloaded adapter stays after its last request, so "
        "that a lost request can be resumed, in seconds",
    )
    max_adapter_bytes: int = Field(
        4 << 30,
        ge=1 << 10,
        description="largest adapter that can be loaded, in bytes",
    )
    discovery: DiscoveryName = Field(
        "static",
        description="how workers are found: in the lists, as addresses of their DNS names, in a "
        "file, or in the EndpointSlices of Kubernetes Services",
    )
    decode: list[str] = Field(
        [],
        description="decode workers, host:port each; for kubernetes SERVICE:PORT, PORT a name",
    )
    prefill: list[str] = Field(
        [],
        description="prefill workers, in the same form",
    )
    discovery_file: Path | None = Field(
        None, description="with discovery = file: TOML or JSON with the lists decode and prefill"
    )
    discovery_interval_s: float = Field(
        2.0,
        ge=0.1,
        le=3600,
        description="interval of checking names or file, in seconds",
    )
    kubernetes_api: str = setting_of(KubernetesSettings, "kubernetes_api")
    kubernetes_namespace: str = setting_of(KubernetesSettings, "kubernetes_namespace")
    kubernetes_token_file: Path | None = setting_of(KubernetesSettings, "kubernetes_token_file")
    kubernetes_ca_file: Path | None = setting_of(KubernetesSettings, "kubernetes_ca_file")
    client_certificates: bool = Field(
        True,
        description="with TLS, require callers to have a certificate of the mesh; otherwise only "
        "API keys identify them",
    )
    api_keys_file: Path | None = Field(
        None,
        description="JSON file of tenants' API keys, made by `weft keys`; re-read on change; none "
        "= no file",
    )
    api_key_hashes: list[str] = Field(
        [],
        repr=False,
        description="further keys, TENANT:ID:SHA256 each, for environments without files",
    )
    tenants_file: Path | None = Field(
        None,
        description="TOML file of tenants' latency targets, shares and rates; re-read on change",
    )
    requests_per_minute: float | None = Field(
        None,
        gt=0,
        le=1e12,
        description="rate limit of all tenants together, in requests; none = no limit",
    )
    tokens_per_minute: float | None = Field(
        None,
        gt=0,
        le=1e12,
        description="rate limit of all tenants together, in prompt and generated tokens; none = "
        "no limit",
    )
    limit_backlog_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="rates shrink in proportion, to no less than a tenth, while workers have more "
        "prompts queued than they all compute in this time, in seconds; 0 = never",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=1024,
        description="number of gateways that share workers and tenants, including this one: each "
        "uses its part of the spare capacity and of the tenants' rates",
    )
    ahead_s: float = Field(
        0.25,
        ge=0.001,
        le=3600,
        description="with a target in the tenants file, requests are held at the gateway, fairly "
        "between tenants, while workers have more prompts queued than they all "
        "compute in this time, in seconds",
    )
    decode_policy: DecodePolicyName = Field(
        "cache_aware",
        description="routing policy for decode workers",
    )
    allow_worker_choice: bool = Field(
        False,
        description="let requests name their decode worker, by x-worker-id or x-data-parallel-rank",
    )
    prefill_policy: PrefillPolicyName = Field(
        "cache_aware",
        description="routing policy for prefill workers",
    )
    max_prefill_candidates: int = Field(
        3, ge=0, le=16, description="prefill workers offered to the decode worker per request"
    )
    max_running_requests: int = Field(
        1024,
        ge=1,
        description="prompts running at once, in requests",
    )
    max_queued_requests: int = Field(
        1024, ge=0, description="prompts waiting behind those; more are refused, in requests"
    )
    max_prompts: int = Field(
        256, ge=1, le=MAX_PROMPTS, description="prompts in one completions request"
    )
    ready_grace_s: float = Field(
        0.0,
        ge=0,
        le=600,
        description="time after SIGTERM in which health already says NOT_SERVING and /readyz 503, "
        "while requests are still taken, so that load balancers go elsewhere, in seconds; the "
        "grace period for running requests follows",
    )
    max_connection_age_s: float = Field(
        300.0,
        ge=1,
        le=86400,
        description="age at which a connection accepts no more calls, so that clients resolve the "
        "gateways again; its open calls continue, in seconds",
    )
    max_body_bytes: int = Field(
        8 << 20,
        ge=1,
        le=1 << 30,
        description="largest request body, in bytes; a larger one is answered with 413",
    )
    ignore_unknown_fields: bool = Field(
        False,
        description="ignore unknown fields in bodies of OpenAI's, vLLM's, Cohere's and Jina's "
        "calls, for clients that send fields of other servers; otherwise such a field is a 400",
    )
    response_store_bytes: int = Field(
        64 << 20,
        ge=0,
        description="memory for responses of /v1/responses that can be read and continued, in "
        "bytes; 0 = none are kept",
    )
    max_stored_responses: int = Field(
        4096, ge=1, description="responses that are kept at most, in responses"
    )
    response_store_url: list[str] = Field(
        [],
        max_length=64,
        repr=False,
        description="Valkey or Redis server, or some nodes of a cluster, that keeps responses "
        "instead, for all gateways with the same URL: valkey://HOST:PORT or "
        "valkeys://USER:PASSWORD@HOST:PORT?ssl_ca_certs=FILE (TLS)",
    )
    response_store_password_file: Path | None = Field(
        None, description="file with that server's password, instead of one in the URL"
    )
    response_store_prefix: str = Field(
        "weft-responses",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="prefix of the responses' names there; meshes with different ones share none",
    )
    response_store_timeout_s: float = Field(
        1.0, ge=0.01, le=60, description="time limit of a call to that server, in seconds"
    )
    response_ttl_s: float = Field(
        7 * 86400.0,
        ge=1,
        le=10 * 365 * 86400,
        description="time after its last use at which a response expires there, in seconds",
    )
    rest_metrics: bool = Field(
        False,
        description="serve the gateway's metrics as /metrics on the REST port; with API keys only "
        "to those that may load adapters",
    )
    rl: bool = Field(
        False,
        description="serve trainers' calls on the REST port, which pause workers and change their "
        "weights; they need the operators' token and --console operate",
    )
    console: Literal["off", "view", "operate"] = Field(
        "view",
        description="what the console and the stream behind it may do on the REST port: nothing, "
        "show the mesh (with API keys only to those that may load adapters), or also drain, flush "
        "and the like for operators, who give the token of --admin-token-file",
    )
    max_unsent_bytes: int = Field(
        1 << 20,
        ge=1024,
        description="unsent text at which a slow client is disconnected, in bytes",
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        le=86400,
        description="longest duration of a request, in seconds",
    )
    max_attempts: int = Field(
        5,
        ge=1,
        le=64,
        description="number of lost decode workers with which a request fails",
    )
    resume_timeout_s: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="time that a request waits for another decode worker after losing its own, in "
        "seconds",
    )
    breaker_failures: int = Field(
        5,
        ge=0,
        description="consecutive failures that open a worker's circuit breaker; 0 = never, in "
        "failures",
    )
    breaker_open_s: float = Field(
        1.0,
        gt=0,
        le=600,
        description="time for which it opens at first; doubled each time, in seconds",
    )
    request_log: Path | None = Field(
        None,
        description="file that gets one JSON line per prompt, for `weft replay`; none = off",
    )
    request_log_content: Literal["none", "tokens", "text"] = Field(
        "none",
        description="content of prompts and answers in the request log; only logs with tokens or "
        "text can be replayed",
    )
    request_log_bytes: int = Field(
        64 << 20, ge=1024, description="largest file of the request log, in bytes"
    )
    request_log_files: int = Field(
        5,
        ge=1,
        le=1000,
        description="number of request log files, including the newest",
    )
    routing_record_dir: Path | None = Field(
        None,
        description="folder for a record of every routing decision and its inputs, prompts "
        "included, for replay; one file per start; none = off",
    )
    routing_record_bytes: int = Field(
        1 << 30,
        ge=1024,
        description="size limit of a record, in bytes",
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="threads that tokenise")
    max_queued_tokenizations: int = Field(
        64,
        ge=0,
        description="calls of /tokenize, /detokenize and echo that wait for a thread; more are "
        "refused, in calls",
    )
    max_images: int = Field(
        32, ge=1, le=1024, description="images in one request, for models that take them"
    )
    max_image_bytes: int = Field(
        20 << 20, ge=1, le=1 << 30, description="largest file of an image, in bytes"
    )
    max_request_image_bytes: int = Field(
        64 << 20, ge=1, le=1 << 30, description="files of all images of a request, in bytes"
    )
    max_image_pixels: int = Field(
        50_000_000,
        ge=1,
        le=1 << 30,
        description="largest image, in pixels; a larger one is refused before it is decoded",
    )
    max_audio_bytes: int = Field(
        25 << 20, ge=1, le=1 << 30, description="largest file of audio, in bytes"
    )
    max_audio_seconds: float = Field(
        3600.0,
        gt=0,
        le=86_400,
        description="longest audio of one file; no more of a file is decoded, in seconds",
    )
    max_video_bytes: int = Field(
        48 << 20, ge=1, le=1 << 30, description="largest file of a video, in bytes"
    )
    max_video_seconds: float = Field(
        600.0, gt=0, le=86_400, description="longest video, in seconds"
    )
    media_processes: int | None = Field(
        None,
        ge=1,
        le=64,
        description="processes that decode images and audio, started as they are needed; default: "
        "one for 4 cores, 2 to 8",
    )
    media_timeout_s: float = Field(
        20.0,
        gt=0,
        le=600,
        description="time after which a process is ended that works on one image, in seconds",
    )
    max_queued_media: int = Field(
        256,
        ge=0,
        description="images that wait for a process; more are refused, in images",
    )
    media_url_hosts: list[str] = Field(
        [],
        max_length=1000,
        description="hosts from which images of http and https URLs are fetched, HOST, *.DOMAIN or "
        "*, with :PORT where it is not the scheme's; only at public addresses; empty = URLs of "
        "images are refused",
    )
    media_private_hosts: list[str] = Field(
        [],
        max_length=1000,
        description="further such hosts, HOST or HOST:PORT, whose addresses may be of private "
        "networks or of this machine",
    )
    media_url_timeout_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="time limit of fetching one image, redirects included, in seconds",
    )
    media_memo_bytes: int = Field(
        256 << 20,
        ge=0,
        description="memory for processed images, which are not decoded again when they come back, "
        "in bytes; 0 = none are kept",
    )
    media_held_bytes: int = Field(
        1 << 30,
        ge=1,
        description="images that all requests together hold until they end, as sent and as "
        "processed, in bytes; more requests with images are refused",
    )
    load_interval_s: float = Field(
        0.2, ge=0.02, le=10, description="interval of the workers' load reports, in seconds"
    )
    stale_after_s: float = Field(
        2.0,
        ge=0.1,
        le=60,
        description="silence after which a worker gets no requests, in seconds",
    )
    ping_interval_s: float = Field(
        1.0, ge=0.05, le=10, description="interval of Session pings, in seconds"
    )

    @field_validator("api_key_hashes")
    @classmethod
    def _check_hashes(cls, hashes: list[str]) -> list[str]:
        for text in hashes:
            parse_hash(text)
        return hashes

    @field_validator("media_url_hosts", "media_private_hosts")
    @classmethod
    def _check_hosts(cls, hosts: list[str], info: ValidationInfo) -> list[str]:
        HostPatterns(hosts, has_wildcards=info.field_name == "media_url_hosts")
        return hosts

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: list[str]) -> list[str]:
        for text in models:
            name, _, folder = text.partition("=")
            if not name or not folder or len(name) > MAX_NAME_CHARS:
                raise ValueError(f"{text!r} is not NAME=DIRECTORY")
        return models

    @property
    def image_body_bytes(self) -> int:
        """Largest request body where a model takes images, which are in base64."""
        return image_body_bytes(self.max_body_bytes, self.max_request_image_bytes)

    @property
    def num_media_processes(self) -> int:
        """Most processes that decode images and audio."""
        return self.media_processes or min(8, max(2, num_cores() // 4))

    @property
    def audio_body_bytes(self) -> int:
        """Largest request body where a model takes files of audio."""
        return self.max_body_bytes + self.max_audio_bytes

    @property
    def model_folders(self) -> list[tuple[str, Path]]:
        """Name and directory of all models; an empty name = the directory's."""
        further = (text.partition("=") for text in self.models)
        return [
            (self.model_name, self.model_dir),
            *((name, Path(folder)) for name, _, folder in further),
        ]

    def policy_options(self, role: Role) -> PolicyOptions:
        """The options of the routing policies for the pool of a role."""
        options = PolicyOptions(
            **{name: getattr(self, name) for name in settings_of(PolicyOptions)}
        )
        # A prefill worker's requests do not share steps, so a request costs only its tokens.
        return replace(options, request_tokens=0) if role == "prefill" else options

    @property
    def has_api_keys(self) -> bool:
        """Whether calls must carry a key."""
        return self.api_keys_file is not None or bool(self.api_key_hashes)

    @property
    def exposure(self) -> str:
        if not self.has_api_keys and not is_loopback(self.host):
            return f"--host {self.host} is open to other machines, and there is no --api-keys-file"
        return super().exposure

    @field_validator("decode", "prefill")
    @classmethod
    def _check_names(cls, names: list[str], info: ValidationInfo) -> list[str]:
        split = split_service if info.data.get("discovery") == "kubernetes" else split_address
        for name in names:
            split(name)
        if len(set(names)) != len(names):
            raise ValueError("an address is given twice; name each worker once")
        return names

    @field_validator("constrained_json_whitespace_pattern")
    @classmethod
    def _check_whitespace(cls, pattern: str | None) -> str | None:
        check_whitespace(pattern or "")
        return pattern

    @model_validator(mode="after")
    def _check_json_whitespace(self) -> Self:
        if self.disable_any_whitespace and self.constrained_json_whitespace_pattern:
            raise ValueError("disable_any_whitespace contradicts the whitespace pattern")
        return self

    @property
    def json_whitespace(self) -> str | None:
        """`Constraint.whitespace` of requests that do not give one."""
        return "" if self.disable_any_whitespace else self.constrained_json_whitespace_pattern

    @model_validator(mode="after")
    def _check_console(self) -> Self:
        if self.console == "operate" and self.admin_token_file is None:
            raise ValueError("console = operate needs --admin-token-file: operators give its token")
        return self

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        if self.discovery == "file":
            if self.discovery_file is None:
                raise ValueError("discovery = file needs --discovery-file")
            if self.decode or self.prefill:
                raise ValueError("discovery = file: the file has the workers, not --decode")
        elif not self.decode:
            raise ValueError("no decode worker; give at least one, as in --decode 127.0.0.1:50052")
        return self
