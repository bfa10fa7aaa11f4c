"""Creates all gRPC channels to Weft's services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

import grpc
from weft.common.rpc.tls import Identity, Material, service_name

Options = Sequence[tuple[str, Any]]

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # With short delays a restarted peer is found within a second. Weft does its own retries.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt may take; a peer on a busy machine needs more than a moment.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    # The services of a mesh are reached directly, whatever proxy the environment names.
    ("grpc.enable_http_proxy", 0),
    # Otherwise a new channel may share the connection of another one.
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options for channels between Weft's services."""


def open_channel(
    address: str, service: str, identity: Identity | None, options: Options = CHANNEL_OPTIONS
) -> ServiceChannel:
    """Opens a channel to a service at host:port. `service`, such as "decode", is the one that must
    answer there; TLS checks it. Without `identity` there is no TLS.
    """
    return ServiceChannel(address, service, identity, options)


def open_blocking_channel(
    address: str, service: str, identity: Identity | None, options: Options = CHANNEL_OPTIONS
) -> grpc.Channel:
    """Like `open_channel`, without an event loop, for short-lived programs."""
    if identity is None:
        return grpc.insecure_channel(address, options=options)
    credentials = _credentials(identity.current())
    return grpc.secure_channel(address, credentials, options=_named(options, service))


def _credentials(material: Material) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _named(options: Options, service: str) -> Options:
    """The peer is checked by its service's name, since addresses change and are often bare IP
    addresses.
    """
    return (*options, ("grpc.ssl_target_name_override", service_name(service)))


class ServiceChannel(grpc.aio.Channel):
    """A channel that can connect anew, and whose new calls use the current certificate.

    gRPC fixes a channel's certificate when it is made. So a change of the files makes a new inner
    channel, with a connection of its own, for the calls that begin from then on; the old one is
    closed when its last call has ended.
    """

    def __init__(
        self, address: str, service: str, identity: Identity | None, options: Options
    ) -> None:
        self._address = address
        self._identity = identity
        self._options = options if identity is None else _named(options, service)
        self._material = None if identity is None else identity.current()
        self._inner = self._connect()
        self._open_calls: dict[grpc.aio.Channel, int] = {self._inner: 0}
        self._closing: set[asyncio.Task[None]] = set()

    def _connect(self) -> grpc.aio.Channel:
        if self._material is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        credentials = _credentials(self._material)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options)

    def current(self) -> grpc.aio.Channel:
        """The inner channel for new calls."""
        material = None if self._identity is None else self._identity.current()
        if material is not self._material:
            old = self._inner
            self._material = material
            self._inner = self._connect()
            self._open_calls[self._inner] = 0
            self._drop_unused(old)
        return self._inner

    def renew(self, *, keeps_calls: bool = False) -> None:
        """Connects anew for the next calls.

        A connection whose packets are not answered any more, because a firewall has forgotten it or
        a proxy hangs, stays open for a quarter of an hour although a new one would work. With
        `keeps_calls`, calls on the old connection may end by themselves, since the peer may just be
        slow; otherwise they end now.
        """
        old, self._inner = self._inner, self._connect()
        self._open_calls[self._inner] = 0
        if keeps_calls:
            self._drop_unused(old)
            return
        self._open_calls.pop(old, None)
        self._close(old)

    @property
    def is_idle(self) -> bool:
        """Whether no call is open."""
        return not any(self._open_calls.values())

    def track(self, inner: grpc.aio.Channel, call: grpc.aio.RpcContext) -> None:
        """Keeps an inner channel for as long as a call on it lasts."""
        self._open_calls[inner] += 1

        def done(_: object) -> None:
            if inner in self._open_calls:
                self._open_calls[inner] -= 1
                self._drop_unused(inner)

        call.add_done_callback(done)

    def _drop_unused(self, inner: grpc.aio.Channel) -> None:
        if inner is not self._inner and self._open_calls.get(inner) == 0:
            del self._open_calls[inner]
            self._close(inner)

    def _close(self, inner: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(inner.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(inner.close(grace) for inner in list(self._open_calls)))
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(lambda inner: inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(lambda inner: inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(lambda inner: inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(lambda inner: inner.stream_stream(*args, **kwargs))

    def _method(self, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        inner: grpc.aio.Channel | None = None
        method: Any = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inner, method
            current = self.current()
            if current is not inner:
                inner, method = current, make(current)
            started = method(*args, **kwargs)
            self.track(current, started)
            return started

        return call
