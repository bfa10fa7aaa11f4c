"""Typed settings of a service: defaults < TOML file < environment < flags."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from weft.contract.settings import MAX_CONTEXT_TOKENS, Setting, TransportName, settings_of

_log = logging.getLogger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "text"]

MAX_NAME_CHARS = 256
"""Length limit of a model's name."""


class Settings(BaseModel):
    """Base of all settings. Subclasses name their program and describe every field with its unit.

    Values of fields with `repr=False` are never shown, not even wrong ones.

    A field `kv_memory_bytes` of program `decode` is the TOML key `kv_memory_bytes`, the
    environment variable `WEFT_DECODE_KV_MEMORY_BYTES` and the flag `--kv-memory-bytes`. Lists are
    comma-separated in the environment and in flags, which can also be repeated; a comma that
    belongs to an item is written `\\,`. `none` clears an optional field.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    program: ClassVar[str] = "service"
    """Program name in `--help`, and in the environment prefix `WEFT_<PROGRAM>_`."""
    command: ClassVar[str] = "weft serve"
    """Command that precedes that name on a command line."""
    folders: ClassVar[tuple[str, ...]] = ()
    """Names of fields with folders that must be there at the start."""
    files: ClassVar[tuple[str, ...]] = ()
    """Names of fields with files that must be there at the start."""

    def describe(self) -> dict[str, object]:
        """The effective values as JSON types, for the start-up log."""
        hidden = {name for name, field in type(self).model_fields.items() if not field.repr}
        return self.model_dump(mode="json", exclude=hidden)


S = TypeVar("S", bound=Settings)


def declared(setting: Setting, default: Any) -> Any:
    """A field of settings for a setting that is declared elsewhere."""
    return Field(default, ge=setting.ge, gt=setting.gt, le=setting.le, description=setting.help)


def setting_of(program: type[Settings], name: str, *default: Any) -> Any:
    """A field of settings that another program declares, with its default or another one."""
    field = copy(program.model_fields[name])
    if default:
        field.default = default[0]
    return field


def declared_setting(declaring: type[Any], name: str, *default: Any) -> Any:
    """A field for a setting that a dataclass declares, with its default or another one."""
    value = default[0] if default else declaring.__dataclass_fields__[name].default
    return declared(settings_of(declaring)[name], value)


def with_settings_of(base: type[S], declaring: type[Any], names: Iterable[str]) -> type[S]:
    """A class of settings that has, in addition, settings that a dataclass declares."""
    types = get_type_hints(declaring)
    fields: dict[str, Any] = {
        name: (types[name], declared_setting(declaring, name)) for name in names
    }
    return create_model(f"{declaring.__name__}Settings", __base__=base, **fields)


class ServiceSettings(Settings):
    """Settings of every Weft gRPC service."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 = any free one")
    metrics_port: int | None = Field(
        0, ge=0, le=65535, description="Prometheus HTTP port; 0 = any free one, none = off"
    )
    ready_file: Path | None = Field(
        None, description="JSON file written when the service is ready (addresses, pid)"
    )
    drain_grace_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="grace period for running requests after SIGTERM, in seconds",
    )
    max_message_bytes: int = Field(
        16 << 20, ge=1 << 16, le=1 << 30, description="largest gRPC message received, in bytes"
    )
    admin_port: int | None = Field(
        None, ge=0, le=65535, description="operators' gRPC port; 0 = any free one, none = off"
    )
    admin_host: str = Field("127.0.0.1", description="address that the operators' port listens on")
    admin_token_file: Path | None = Field(
        None,
        description="file with the token required by the operators' port",
    )
    tracing: bool = Field(
        True, description="make spans of requests, for `weft trace` and for export"
    )
    trace_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the traces started here that are exported",
    )
    trace_buffer_spans: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="number of recent spans kept for `weft trace`",
    )
    otlp_endpoint: str = Field(
        "",
        max_length=1024,
        description="collector that spans are exported to, as http://HOST:4317; empty = "
        "$OTEL_EXPORTER_OTLP_ENDPOINT, else no export",
    )
    enable_faults: bool = Field(
        False, description="let operators inject faults, for tests of the mesh"
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM certificate that names this service; enables mutual TLS for all gRPC",
    )
    tls_key: Path | None = Field(None, description="PEM key of that certificate")
    tls_ca: Path | None = Field(
        None, description="PEM certificates of the authorities whose peers are trusted"
    )
    insecure: bool = Field(
        False,
        description="listen beyond loopback even though a port is unprotected: without TLS, or "
        "the gateway's without API keys",
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port with gRPC health only, always without TLS, for probes that have no "
        "certificate; 0 = any free one, none = off",
    )
    log_level: LogLevel = Field(
        "info",
        description="lowest level that is logged",
    )
    log_format: LogFormat = Field("auto", description="auto = text on a terminal, else JSON lines")

    @model_validator(mode="after")
    def _check_admin(self) -> Self:
        if self.admin_port is not None and self.admin_token_file is None:
            raise ValueError(
                "--admin-port needs --admin-token-file, a file with a token of at least 16 "
                "characters"
            )
        if self.enable_faults and self.admin_port is None:
            raise ValueError("--enable-faults needs --admin-port, where faults are injected")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        given = [self.tls_cert, self.tls_key, self.tls_ca]
        if any(given) and not all(given):
            raise ValueError("--tls-cert, --tls-key and --tls-ca: give all three, or none")
        if not self.insecure and (problem := self.exposure):
            raise ValueError(f"{problem}; accept that with --insecure, or see docs/security.md")
        return self

    @property
    def has_tls(self) -> bool:
        """Whether gRPC uses mutual TLS."""
        return self.tls_cert is not None

    @property
    def exposure(self) -> str:
        """Unprotected listeners reachable from other machines, in words; empty if none."""
        if not self.has_tls and not is_loopback(self.host):
            return f"--host {self.host} is open to other machines, and there is no --tls-cert"
        if self.admin_port is not None and not self.has_tls and not is_loopback(self.admin_host):
            return (
                f"--admin-host {self.admin_host} is open to other machines, and without "
                "--tls-cert its token travels in the clear"
            )
        return ""


class ModelSettings(ServiceSettings):
    """Settings of every service that serves a model: gateways and workers."""

    folders: ClassVar[tuple[str, ...]] = ("adapter_root",)

    model_dir: Path = Field(
        description="Hugging Face model directory (config.json, tokenizer.json, weights)"
    )
    model_name: str = Field(
        "",
        max_length=MAX_NAME_CHARS,
        description="name of the served model; empty = the directory's name",
    )
    max_context_tokens: int | None = declared(MAX_CONTEXT_TOKENS, None)
    profile_dir: Path | None = Field(
        None,
        description="folder for profiles of workers' steps (`weft profile`); none = they are "
        "refused",
    )
    max_profiles: int = Field(
        8, ge=1, le=1000, description="number of profiles kept in that folder, the newest ones"
    )
    adapter_root: Path | None = Field(
        None,
        description="folder in which gateways register LoRA adapters and from which workers load "
        "those of their model, the same for all; none = no adapters",
    )


class PageSettings(ServiceSettings):
    """Settings of every service that holds KV pages."""

    transport: TransportName = Field(
        "auto",
        description="how KV pages travel; auto = NIXL where it works and the port is protected, "
        "else memory that two processes of a host share, else gRPC data messages; shared = as auto "
        "without NIXL",
    )

    @property
    def page_transport(self) -> TransportName:
        """`transport`, but without NIXL on an exposed port unless it was requested.

        NIXL learns over gRPC where to write and read, and only TLS proves who says so.
        """
        if self.transport == "auto" and self._is_open:
            return "shared"
        return self.transport

    @property
    def _is_open(self) -> bool:
        return not self.has_tls and not is_loopback(self.host)

    def tell_of_pages(self, has_nixl: bool) -> None:
        """Logs at the start how pages in transit are protected."""
        if has_nixl and self._is_open:
            _log.warning(
                "insecure: without --tls-cert NIXL takes metadata, that is where to write and "
                "read, from anybody who reaches --host %s",
                self.host,
            )
        elif self._is_open and self.transport == "auto":
            _log.warning(
                "KV pages for other hosts travel as gRPC data, several times slower than over "
                "NIXL, which takes anybody's metadata without --tls-cert; accept that with "
                "--transport nixl"
            )
        if has_nixl and (self.has_tls or not is_loopback(self.host)):
            _log.warning("KV pages travel over NIXL, which encrypts nothing: confine its ports")


def is_loopback(host: str) -> bool:
    """Whether a listener on `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(cls: type[S], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> S:
    """Reads settings from all sources and validates them as a whole. `argv` has the flags without
    the program name; `--config FILE` names a TOML file. `environ` is by default the process's.

    Raises:
        SystemExit: With status 2 and a readable message on the first set of problems, or with
            status 0 after `--help`.
    """
    problems: list[str] = []
    flags = _parse_flags(cls, argv, problems)
    config = flags.pop("config", None)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    sources = (
        _from_file(cls, config, problems),
        _from_environment(cls, os.environ if environ is None else environ, problems),
        {name: (value, _flag(name)) for name, value in flags.items()},
    )
    for source in sources:
        for name, (value, where) in source.items():
            values[name], origin[name] = value, where
    if not problems:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = _explain(cls, error, origin)
    _refuse(cls, problems)


def require_paths(settings: Settings) -> None:
    """Ends the program if a path in its settings does not exist. Not a part of `load_settings`,
    which also reads settings for other machines.

    Raises:
        SystemExit: With status 2 and a readable message on all paths that are missing.
    """
    problems = [
        f"{_flag(name)} = {str(path)!r}: {problem}"
        for kind, names in (("folder", settings.folders), ("file", settings.files))
        for name in names
        if (path := getattr(settings, name)) and (problem := _missing(Path(path), kind))
    ]
    if problems:
        _refuse(type(settings), problems)


def _missing(path: Path, kind: str) -> str:
    """Why there is no folder or file at a path; empty: there is one."""
    try:
        is_there = path.is_dir() if kind == "folder" else path.exists()
    except OSError as error:  # Such as that of a folder above it that may not be searched.
        return (error.strerror or str(error)).lower()
    return "" if is_there else f"no such {kind}"


def _refuse(cls: type[Settings], problems: Sequence[str]) -> NoReturn:
    lines = "\n".join(f"  {problem}" for problem in problems)
    sys.stderr.write(f"{cls.command} {cls.program}: settings are not valid\n{lines}\n")
    raise SystemExit(2)


def flag_problems(cls: type[Settings], argv: Sequence[str]) -> list[str]:
    """What is wrong with some of a program's flags, whatever its other flags are: flags that do not
    exist, and values that no other flag makes right. Empty: nothing.

    Raises:
        SystemExit: With status 0 after `--help`.
    """
    problems: list[str] = []
    values = _parse_flags(cls, argv, problems)
    values.pop("config", None)
    try:
        cls.model_validate(values)
    except ValidationError as error:
        problems += _explain(cls, error, {name: _flag(name) for name in values}, only=values)
    return problems


def env_prefix(cls: type[Settings]) -> str:
    """Prefix of the environment variables that `cls` reads."""
    return f"WEFT_{cls.program.upper().replace('-', '_')}_"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _FlagParser(argparse.ArgumentParser):
    """Raises what is wrong with flags instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parse_flags(cls: type[Settings], argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Values are not yet validated."""
    parser = _FlagParser(
        prog=f"{cls.command} {cls.program}",
        description=(cls.__doc__ or "").split("\n\n")[0],
        epilog=f"Every setting is also an environment variable {env_prefix(cls)}<NAME> and a key "
        "of the TOML file. Order: defaults < file < environment < flags. In lists \\, is a comma.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
    )
    parser.add_argument("--config", type=Path, metavar="FILE", default=argparse.SUPPRESS)
    for name, field in cls.model_fields.items():
        if name == "config":
            raise TypeError("a settings field cannot be called `config`")
        text = f"{field.description} {_default_text(field)}".replace("%", "%%")
        if _plain_type(field) is bool:
            parser.add_argument(
                _flag(name),
                dest=name,
                help=text,
                default=argparse.SUPPRESS,
                action=argparse.BooleanOptionalAction,
            )
        else:
            parser.add_argument(
                _flag(name),
                dest=name,
                help=text,
                default=argparse.SUPPRESS,
                metavar=_metavar(field),
                action="append" if _is_list(field) else "store",
            )
    try:
        parsed, unknown = parser.parse_known_args(_join_flags(cls, argv))
    except ValueError as error:
        problems.append(str(error))
        return {}
    given = vars(parsed)
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    for flag in flags:
        close = _nearest(cls, flag[2:].replace("-", "_"), _flag)
        problems.append(f"{flag}: no such flag ({close})")
    if unknown and not flags:
        problems.append(f"{unknown[0]!r} is no flag and no value of one")
    return {name: _parse_flag(cls.model_fields.get(name), value) for name, value in given.items()}


def _join_flags(cls: type[Settings], argv: Sequence[str]) -> list[str]:
    """Joins `--x-args TEXT` to `--x-args=TEXT`, since argparse takes a TEXT such as `--one` for a
    flag.
    """
    takers = {_flag(name) for name in cls.model_fields if name.endswith("_args")}
    joined: list[str] = []
    rest = iter(argv)
    for word in rest:
        text = next(rest, None) if word in takers else None
        joined.append(word if text is None else f"{word}={text}")
    return joined


def _parse_flag(field: FieldInfo | None, value: Any) -> Any:
    if field is not None and isinstance(value, list):
        parts = [_parse_text(field, text) for text in value]
        return None if None in parts else [item for part in parts for item in part]
    return _parse_text(field, value) if field is not None and isinstance(value, str) else value


def _from_environment(
    cls: type[Settings], environ: Mapping[str, str], problems: list[str]
) -> dict[str, tuple[Any, str]]:
    prefix = env_prefix(cls)
    found: dict[str, tuple[Any, str]] = {}
    for key, text in environ.items():
        if not key.startswith(prefix):
            continue
        name = key[len(prefix) :].lower()
        if name in cls.model_fields:
            found[name] = (_parse_text(cls.model_fields[name], text), key)
        else:
            problems.append(f"{key}: no such setting; unset it ({_nearest(cls, name)})")
    return found


def _from_file(
    cls: type[Settings], path: Path | None, problems: list[str]
) -> dict[str, tuple[Any, str]]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"--config {path}: cannot be read: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"--config {path}: not a TOML file: {error}")
        return {}
    for name in table:
        if name not in cls.model_fields:
            problems.append(f"{path}: {name}: no such setting ({_nearest(cls, name)})")
    return {name: (value, f"{path}: {name}") for name, value in table.items()}


def _plain_type(field: FieldInfo) -> object:
    annotation = field.annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [m for m in typing.get_args(annotation) if m is not type(None)]
        annotation = members[0] if len(members) == 1 else annotation
    return annotation


def _parse_text(field: FieldInfo, text: str) -> Any:
    plain = _plain_type(field)
    if plain is not field.annotation and text.lower() == "none":
        return None
    if _is_list(field):
        parts = (part.replace("\\,", ",") for part in re.split(r"(?<!\\),", text))
        return [item.strip() for item in parts if item.strip()]
    return text


def list_text(items: Iterable[str]) -> str:
    """Formats items as a list's flag or variable."""
    return ",".join(item.replace(",", "\\,") for item in items)


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(_plain_type(field)) in (list, tuple, frozenset, set)


def _metavar(field: FieldInfo) -> str:
    plain = _plain_type(field)
    if typing.get_origin(plain) is Literal:
        return "{" + ",".join(str(choice) for choice in typing.get_args(plain)) + "}"
    if _is_list(field):
        return "A,B,..."
    if typing.get_origin(plain) in (typing.Union, types.UnionType):
        # A number, or a word in place of it.
        numbers, words = typing.get_args(plain)
        return f"{typing.get_args(numbers)[0].__name__.upper()}|{typing.get_args(words)[0]}"
    return getattr(plain, "__name__", "VALUE").upper()


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, (list, tuple)):
        default = ",".join(str(item) for item in default) or "empty"
    return f"(default {'none' if default is None else default})"


def _nearest(cls: type[Settings], name: str, shown: Callable[[str], str] = str) -> str:
    import difflib

    close = difflib.get_close_matches(name, cls.model_fields, n=1)
    return (
        f"did you mean {shown(close[0])}?" if close else f"see `{cls.command} {cls.program} --help`"
    )


def _explain(
    cls: type[Settings],
    error: ValidationError,
    origin: dict[str, str],
    only: Container[str] | None = None,
) -> list[str]:
    """One line per problem: where the value came from, the value, what is wrong, and what to set
    instead. With `only`, just the problems of these fields.
    """
    lines: list[str] = []
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        if only is not None and name not in only:
            continue
        message = re.sub(r"^(Value|Assertion) error, ", "", item["msg"])
        if item["type"] == "missing":
            lines.append(f"{_flag(name)}: required; {cls.model_fields[name].description}")
        elif not name:
            lines.append(message)
        else:
            where = origin.get(name, _flag(name))
            description = cls.model_fields[name].description
            shown = f" = {item['input']!r}" if cls.model_fields[name].repr else ""
            lines.append(f"{where}{shown}: {message}; {name}: {description}")
    return lines
