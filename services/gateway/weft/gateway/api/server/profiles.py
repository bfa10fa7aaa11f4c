"""Profiles over REST, with the bodies of vLLM and of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field
from weft.common.rpc.errors import Context
from weft.contract.errors import WeftError
from weft.contract.profiles import MAX_LIMIT_S, MAX_STEPS, ProfileOptions, check_id
from weft.gateway.admission.authenticate import bearer
from weft.gateway.api.dialect_bodies import DialectBody, Few
from weft.gateway.api.parameters import Int
from weft.gateway.api.unserved import left_out, refused
from weft.gateway.console.access import MeshAccess
from weft.gateway.console.profiles import MeshProfile, MeshProfiles
from weft.gateway.validate import invalid
from weft.gateway.warnings import warn

_HOST, _DEVICE = frozenset({"CPU"}), frozenset({"GPU", "CUDA"})
_GENERATES_NOTHING = "a profile generates nothing"


def _from_text(value: object) -> object:
    """SGLang's command sends numbers as texts."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


Number = Annotated[Int, BeforeValidator(_from_text)]


class StopProfileBody(DialectBody):
    """Body of POST /stop_profile."""

    model: str | None = left_out("all workers are profiled")
    # vLLM's load generator sends a request for text to both paths.
    prompt: Any = left_out(_GENERATES_NOTHING)
    messages: Any = left_out(_GENERATES_NOTHING)
    max_tokens: Any = left_out(_GENERATES_NOTHING)
    max_completion_tokens: Any = left_out(_GENERATES_NOTHING)
    temperature: Any = left_out(_GENERATES_NOTHING, asks_when_empty=True)
    repetition_penalty: Any = left_out(_GENERATES_NOTHING)
    logprobs: Any = left_out(_GENERATES_NOTHING)
    ignore_eos: Any = left_out(_GENERATES_NOTHING)
    stream: Any = left_out(_GENERATES_NOTHING)
    stream_options: Any = left_out(_GENERATES_NOTHING)


class ProfileBody(StopProfileBody):
    """Body of POST /start_profile, as vLLM's or SGLang's."""

    profile_prefix: str | None = Field(None, description="what the file's name begins with")
    delay_iterations: Number | None = Field(
        None, description="steps that begin before the first recorded one"
    )
    max_iterations: Number | None = Field(
        None, description=f"steps to record, at most {MAX_STEPS}; 0 or absent: until the stop"
    )
    output_dir: str | None = Field(
        None, description="folder of the file, below the gateway's folder for profiles"
    )
    start_step: Number | None = Field(
        None, description="first step that may be recorded, counted since the engine's start"
    )
    num_steps: Number | None = Field(
        None,
        description=f"steps to record, at most {MAX_STEPS}, of which the answer then has the file; "
        "absent: until the stop",
    )
    activities: Few[str] | None = Field(None, description="CPU, GPU or both, the default")
    merge_profiles: bool | None = Field(None, description="always true: there is one file")
    profile_id: str | None = left_out("profiles are numbered here; give profile_prefix")
    profile_by_stage: bool | None = left_out("the name of each step says what is in it")
    with_stack: bool | None = left_out("stacks would make the stop take minutes")
    record_shapes: bool | None = left_out("the name of each step says its sizes")
    shape_discovery: bool | None = left_out("kernels' own data")
    profile_stages: Few[str] | None = refused("a choice of stages")


class ProfileOrder(NamedTuple):
    options: ProfileOptions
    prefix: str
    folder: str
    waits: bool
    """Whether the answer comes once the trace is written, as SGLang's does."""


def profile_order(body: ProfileBody) -> ProfileOrder:
    """Raises InvalidRequest, whose `param` is the client's name of a field."""
    if body.num_steps is not None and body.max_iterations:
        raise invalid("max_iterations", "contradicts num_steps; give one of them")
    kinds = {kind.upper() for kind in body.activities or ("CPU", "GPU")}
    if unknown := kinds - _HOST - _DEVICE:
        raise invalid("activities", f"only CPU and GPU are supported, not {min(unknown)[:20]}")
    if body.profile_prefix:
        check_id(body.profile_prefix, "profile_prefix")
    steps = body.max_iterations if body.num_steps is None else body.num_steps
    if steps is None or steps == body.max_iterations == 0:
        warn("num_steps", f"at most {MAX_STEPS} steps are recorded")
        given: dict[str, Any] = {"steps": MAX_STEPS, "limit_s": MAX_LIMIT_S}
    else:
        given = {"steps": steps}
    with _as_in_the_body(body):
        options = ProfileOptions(
            **given,
            after_steps=body.delay_iterations or 0,
            from_step=body.start_step or 0,
            host=not kinds.isdisjoint(_HOST),
            device=not kinds.isdisjoint(_DEVICE),
        )
    prefix, folder = body.profile_prefix or "", body.output_dir or ""
    return ProfileOrder(options, prefix, folder, waits=body.num_steps is not None)


@contextmanager
def _as_in_the_body(body: ProfileBody | None = None) -> Iterator[None]:
    """Translates the names of fields in errors to those of the body."""
    is_vllms = body is not None and body.num_steps is None
    names = {
        "steps": "max_iterations" if is_vllms else "num_steps",
        "after_steps": "delay_iterations",
        "from_step": "start_step",
        "folder": "output_dir",
    }
    try:
        yield
    except WeftError as error:
        if error.param in names:
            name = names[error.param]
            error.message = error.message.replace(error.param, name, 1)
            error.param = name
        raise


class ProfileCalls:
    """Begins and ends profiles for callers who may operate the mesh."""

    def __init__(self, profiles: MeshProfiles, access: MeshAccess) -> None:
        self._profiles = profiles
        self._access = access

    def check_caller(self, context: Context) -> None:
        """Raises ConsoleOff, Unauthenticated or PermissionDenied."""
        self._access.check_operate(context)

    async def start(self, order: ProfileOrder, context: Context) -> dict[str, object]:
        """Raises as `MeshProfiles.start`."""
        token = bearer(context.invocation_metadata())
        with _as_in_the_body():
            profile = await self._profiles.start(
                order.options, token, prefix=order.prefix, folder=order.folder
            )
        if not order.waits:
            return _answer(profile)
        summary = await self._profiles.summary(profile.profile_id)
        steps = {engine.worker_id: engine.steps for engine in summary.engines}
        return _answer(profile) | {"steps": steps, "notes": list(summary.notes)}

    async def stop(self) -> dict[str, object]:
        """Raises ProfileNotFound if none has begun."""
        return _answer(await self._profiles.stop())


def _answer(profile: MeshProfile) -> dict[str, object]:
    return {
        "profile_id": profile.profile_id,
        "path": str(profile.out),
        "workers": profile.members,
        "notes": profile.notes,
    }
