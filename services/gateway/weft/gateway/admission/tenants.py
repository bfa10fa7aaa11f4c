"""The tenants' file of latency targets, shares and rates."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from weft.contract.errors import ConfigError
from weft.contract.request import PARAMETERS
from weft.gateway.admission.file_watch import FileWatch
from weft.gateway.request import Targets

_log = logging.getLogger(__name__)
_FIRST, _BETWEEN = PARAMETERS["ttft_target_ms"], PARAMETERS["itl_target_ms"]
_FirstMs = Annotated[float, Field(ge=_FIRST.low, le=_FIRST.high)]
_BetweenMs = Annotated[float, Field(ge=_BETWEEN.low, le=_BETWEEN.high)]
_PerMinute = Annotated[float, Field(gt=0, le=1e12)]
_Weight = Annotated[float, Field(ge=1e-6, le=1e6)]


class Rates(BaseModel):
    """Rate limits; None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None
    """Limit of prompt and generated tokens per minute."""

    @property
    def are_limited(self) -> bool:
        """Whether there is a limit."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


class TenantTerms(Rates):
    """Terms of one tenant."""

    ttft_target_ms: _FirstMs | None = None
    """Target from arrival to the first token, milliseconds; absent: none."""
    itl_target_ms: _BetweenMs | None = None
    """Target for the mean time between the tokens of a request; None: no target."""
    weight: _Weight = 1.0
    """Share of the service while tenants compete."""

    @property
    def targets(self) -> Targets:
        """The targets in seconds."""
        first, between = self.ttft_target_ms, self.itl_target_ms
        return Targets(
            None if first is None else first / 1e3, None if between is None else between / 1e3
        )


class _TenantsFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    default: TenantTerms = TenantTerms()
    """Terms of tenants that have no table, and of all calls if there are no API keys."""
    tenants: dict[str, TenantTerms] = {}


class Tenants:
    """The current terms; changes of the file take effect within a second. The file is TOML with a
    table `default` and tables `tenants.NAME`; without one, no tenant has any terms.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._watch = FileWatch(path)
        self._file = _TenantsFile() if path is None else _read(path)
        self._has_targets = self._find_targets()

    def of(self, tenant: str) -> TenantTerms:
        """Terms of a tenant, by its name; empty: the gateway asks for no API keys."""
        self._follow()
        return self._file.tenants.get(tenant, self._file.default)

    @property
    def has_targets(self) -> bool:
        """Whether any tenant has a latency target."""
        self._follow()
        return self._has_targets

    def _find_targets(self) -> bool:
        return any(terms.targets for terms in (self._file.default, *self._file.tenants.values()))

    def _follow(self) -> None:
        if self._path is None or not self._watch.has_changed():
            return
        try:
            self._file = _read(self._path)
        except ConfigError as error:
            _log.error("the file cannot be used, known tenants' terms are kept: %s", error.message)
        else:
            self._has_targets = self._find_targets()
            _log.info("tenants' terms re-read")


def _read(path: Path) -> _TenantsFile:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return _TenantsFile.model_validate(content)
    except OSError as error:
        raise ConfigError(f"tenants file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            raise ConfigError(f"tenants file {path} is not TOML: {error}") from error
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: "
            + ("no such name" if item["type"] == "extra_forbidden" else item["msg"])
            for item in error.errors()[:3]
        )
        raise ConfigError(f"tenants file {path}: {problems}; docs/targets.md has all") from None
