"""Discovery by the EndpointSlices of Kubernetes Services."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
from weft.common.kubernetes import ApiServer
from weft.common.rpc.listen import bracket
from weft.gateway.fleet.addresses import split_service
from weft.gateway.fleet.discovery.base import Endpoint, Role
from weft.gateway.fleet.session import ReconnectBackoff

_log = logging.getLogger(__name__)

_SERVICE_LABEL = "kubernetes.io/service-name"
_TIMEOUT_S = 10.0
_WATCH_S = 300
_PAUSE_S = 0.5
_SILENCE_S = 90.0
"""Seconds of silence after which a connection is dead; the API server sends a bookmark about once a
minute.
"""
_MAX_BACKOFF_S = 30.0


class _ListAgain(Exception):
    """The known state is too old to continue from: list again."""


class KubernetesDiscovery:
    """Lists the EndpointSlices of some Services, then watches them.

    All endpoints count, whatever their conditions: the gateway checks each worker itself, and a pod
    that is ending still finishes its requests. Needs `list` and `watch` of
    `endpointslices.discovery.k8s.io` in the namespace.
    """

    def __init__(self, api: ApiServer, decode: Sequence[str], prefill: Sequence[str]) -> None:
        """Reads the API server's CA certificates; sends no request yet. Services of workers are
        SERVICE:PORT each, where PORT is a name.

        Raises:
            ConfigError: The token or the authorities cannot be read.
        """
        self._api = api
        self._ports: dict[str, list[tuple[Role, str]]] = {}
        roles: tuple[tuple[Role, Sequence[str]], ...] = (("decode", decode), ("prefill", prefill))
        for role, services in roles:
            for text in services:
                service, port = split_service(text)
                self._ports.setdefault(service, []).append((role, port))
        self._slices: dict[str, tuple[Endpoint, ...]] = {}
        self._context = api.context()

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        backoff = ReconnectBackoff(max_s=_MAX_BACKOFF_S)
        last: tuple[Endpoint, ...] | None = None
        async with httpx.AsyncClient(
            base_url=self._api.url, verify=self._context, timeout=_TIMEOUT_S, trust_env=False
        ) as client:
            while True:
                try:
                    async for endpoints in self._follow(client):
                        backoff.reset()
                        if endpoints != last:
                            last = endpoints
                            yield endpoints
                except _ListAgain:
                    _log.info("the EndpointSlices are listed again")
                except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError) as error:
                    _log.warning(
                        "the source cannot be read, known workers are kept: %s", _describe(error)
                    )
                await backoff.sleep()

    async def _follow(self, client: httpx.AsyncClient) -> AsyncIterator[tuple[Endpoint, ...]]:
        listed = await self._list(client)
        self._slices = {}
        for item in listed["items"]:
            self._take(item)
        yield self._endpoints()
        version = str(listed["metadata"]["resourceVersion"])
        while True:
            async for event in self._events(client, version):
                item = event["object"]
                version = str(item["metadata"]["resourceVersion"])
                if event["type"] == "DELETED":
                    self._slices.pop(item["metadata"]["name"], None)
                elif event["type"] != "BOOKMARK":
                    self._take(item)
                yield self._endpoints()
            await asyncio.sleep(_PAUSE_S)  # The server ends each watch after a while.

    async def _list(self, client: httpx.AsyncClient) -> dict[str, Any]:
        answer = await client.get(self._path, params=self._query(), headers=self._api.headers())
        _check(answer.status_code)
        listed: dict[str, Any] = answer.json()
        return listed

    async def _events(
        self, client: httpx.AsyncClient, version: str
    ) -> AsyncIterator[dict[str, Any]]:
        """Ends when the server ends the watch.

        Raises:
            _ListAgain: The version is too old.
            httpx.HTTPError: The server cannot be reached, refuses, or went silent.
        """
        query = {
            **self._query(),
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_S),
        }
        async with client.stream(
            "GET",
            self._path,
            params=query,
            headers=self._api.headers(),
            timeout=httpx.Timeout(_TIMEOUT_S, read=_SILENCE_S),
        ) as answer:
            _check(answer.status_code)
            async for line in answer.aiter_lines():
                event: dict[str, Any] = json.loads(line)
                if event["type"] == "ERROR":
                    _check(int(event["object"].get("code", 500)))
                    raise _ListAgain
                yield event

    @property
    def _path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._api.namespace}/endpointslices"

    def _query(self) -> dict[str, str]:
        return {"labelSelector": f"{_SERVICE_LABEL} in ({','.join(self._ports)})"}

    def _take(self, item: Mapping[str, Any]) -> None:
        service = item["metadata"]["labels"][_SERVICE_LABEL]
        numbers = {port.get("name") or "": port.get("port") for port in item.get("ports") or ()}
        self._slices[item["metadata"]["name"]] = tuple(
            Endpoint(
                role,
                f"{bracket(endpoint['addresses'][0])}:{numbers[port]}",
                endpoint.get("nodeName") or "",
            )
            for role, port in self._ports.get(service, ())
            if numbers.get(port)
            for endpoint in item.get("endpoints") or ()
            if endpoint.get("addresses")
        )

    def _endpoints(self) -> tuple[Endpoint, ...]:
        found = {endpoint for endpoints in self._slices.values() for endpoint in endpoints}
        return tuple(sorted(found, key=lambda endpoint: (endpoint.role, endpoint.address)))


def _check(status: int) -> None:
    """Raises _ListAgain for 410 Gone, and httpx.HTTPError for other failures."""
    if status == httpx.codes.GONE:
        raise _ListAgain
    if status != httpx.codes.OK:
        hint = " (the service account needs list and watch of endpointslices)"
        raise httpx.HTTPError(
            f"the Kubernetes API answered {status}{hint if status in (401, 403) else ''}"
        )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
