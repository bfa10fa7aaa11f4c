"""Who may watch a mesh, and who may change something in it."""

from __future__ import annotations

import hmac
import logging
import time
from typing import Literal, NoReturn

from weft.common.admin import token_digest
from weft.common.rpc.authorize import OPERATORS
from weft.common.rpc.errors import Context
from weft.common.rpc.tls import services_of
from weft.contract.errors import InvalidApiKey, PermissionDenied, Unauthenticated, WeftError
from weft.gateway.admission.authenticate import ApiKeys, bearer

_log = logging.getLogger(__name__)

Console = Literal["off", "view", "operate"]
"""What the main port lets do: nothing, watch, or also change something with the token."""
_REFUSALS_LOGGED_EVERY_S = 1.0


class ConsoleOff(WeftError):
    """The settings do not allow to watch the mesh on the main port."""

    reason = "CONSOLE_OFF"
    grpc_code = "NOT_FOUND"
    http_status = 404


class MeshAccess:
    """Decides for the main port. Operators' ports check their token themselves. Without a `token`
    nobody may change anything; without `keys` callers need none.
    """

    def __init__(self, console: Console, token: str | None, keys: ApiKeys | None) -> None:
        self._console = console
        self._token = None if token is None else token_digest(token)
        self._keys = keys
        self._log_at = 0.0

    def may_operate(self, context: Context) -> bool:
        """Whether the caller may change something."""
        return (self._console == "operate" or _is_command_line(context)) and self.has_token(context)

    def has_token(self, context: Context) -> bool:
        """Whether the caller has the operators' token."""
        # Digests are compared, so that the time reveals neither content nor length.
        given = token_digest(bearer(context.invocation_metadata()))
        return self._token is not None and hmac.compare_digest(given, self._token)

    def check_watch(self, context: Context) -> None:
        """Raises ConsoleOff, Unauthenticated or PermissionDenied unless the caller may watch."""
        if _is_command_line(context):
            return
        self._check_on()
        if self._keys is None or self.has_token(context):
            return
        tenant = self._keys.find(bearer(context.invocation_metadata()))
        if tenant is None:
            self._refuse(
                InvalidApiKey(
                    "the console needs an API key that manages adapters (`weft keys add TENANT "
                    "--adapters`), or the operators' token",
                    stage="authenticate",
                )
            )
        if not tenant.manages_adapters:
            self._refuse(
                PermissionDenied(
                    "this API key may not watch the mesh; one made by `weft keys add TENANT "
                    "--adapters` may",
                    stage="authorize",
                )
            )

    def check_operate(self, context: Context) -> None:
        """Raises ConsoleOff, Unauthenticated or PermissionDenied unless the caller may change
        something.
        """
        if self.may_operate(context):
            return
        self._check_on()
        if self._console != "operate":
            self._refuse(
                PermissionDenied(
                    "the console only shows: start the gateway with --console operate",
                    stage="authorize",
                )
            )
        self._refuse(
            Unauthenticated(
                "this needs the operators' token: that of the gateway's --admin-token-file",
                stage="authenticate",
            )
        )

    def _check_on(self) -> None:
        if self._console == "off":
            raise ConsoleOff(
                "the console is off: start the gateway with --console view", stage="authorize"
            )

    def _refuse(self, error: WeftError) -> NoReturn:
        now_s = time.monotonic()
        if now_s >= self._log_at:
            self._log_at = now_s + _REFUSALS_LOGGED_EVERY_S
            _log.warning("a call of the console was refused", extra={"reason": error.reason})
        raise error


class OperatorsAccess(MeshAccess):
    """Access through an operators' port, whose callers have shown its token."""

    def __init__(self) -> None:
        super().__init__("operate", None, None)

    def may_operate(self, context: Context) -> bool:
        return True

    def has_token(self, context: Context) -> bool:
        return True

    def check_watch(self, context: Context) -> None: ...


def _is_command_line(context: Context) -> bool:
    names = [name.decode() for name in context.auth_context().get("peer_dns", ())]
    return not OPERATORS.isdisjoint(services_of(names))
