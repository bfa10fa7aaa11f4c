"""Workers listed in a file that may change."""

from __future__ import annotations

import asyncio
import json
import logging
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from weft.common.rpc.listen import split_address
from weft.contract.errors import ConfigError
from weft.gateway.fleet.discovery.base import Endpoint

_log = logging.getLogger(__name__)

_MAX_BYTES = 4 << 20


class _Listed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    decode: list[str] = []
    prefill: list[str] = []

    @field_validator("decode", "prefill")
    @classmethod
    def _check(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            split_address(address)
        return addresses


class FileDiscovery:
    """A TOML or JSON file (by its name's end) with the lists `decode` and `prefill`.

    The file is read again at each interval if it has changed. A missing or invalid file changes
    nothing. Replace the file in one step (`mv`), so that it is never read half written.
    """

    def __init__(self, path: Path, interval_s: float) -> None:
        """Reads the file for the first time. `watch` looks at it every `interval_s`.

        Raises:
            ConfigError: It cannot be read or is not valid.
        """
        self._path = path
        self._interval_s = interval_s
        self._seen = self._look()
        self._endpoints = read_endpoints(path)

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        yield self._endpoints
        while True:
            await asyncio.sleep(self._interval_s)
            if (seen := self._look()) == self._seen:
                continue
            self._seen = seen
            try:
                endpoints = await asyncio.to_thread(read_endpoints, self._path)
            except ConfigError as error:
                _log.error("the source cannot be read, known workers are kept: %s", error.message)
                continue
            if endpoints != self._endpoints:
                self._endpoints = endpoints
                yield endpoints

    def _look(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (stat.st_mtime_ns, stat.st_ino, stat.st_size)


def read_endpoints(path: Path) -> tuple[Endpoint, ...]:
    """The workers that a file lists, each once.

    Raises:
        ConfigError: It cannot be read or is not valid.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_BYTES} bytes")
        text = content.decode()
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        listed = _Listed.model_validate(table)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error
    except ValueError as error:  # The file is neither TOML nor JSON, or not UTF-8.
        raise ConfigError(f"{path}: {error}") from error
    found = [Endpoint("decode", address) for address in listed.decode]
    found += [Endpoint("prefill", address) for address in listed.prefill]
    return tuple(dict.fromkeys(found))
