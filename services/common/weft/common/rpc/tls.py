"""Identity of a service: its certificate, its key, and the authorities that it trusts.

A certificate names services by DNS names below `weft.internal`, such as `decode.weft.internal`.
Both ends of a connection are checked: a caller expects the name of the service that it calls, not
of a host, so that addresses may change; a server looks up in `weft.common.rpc.authorize` what the
services that the caller's certificate names may call.
"""

from __future__ import annotations

import datetime
import logging
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from weft.common.settings import ServiceSettings
from weft.contract.errors import ConfigError

_log = logging.getLogger(__name__)

DOMAIN = "weft.internal"
"""Domain of services in certificates, `SERVICE.weft.internal`."""
_LOOK_EVERY_S = 1.0
_WARN_BEFORE = datetime.timedelta(days=7)


def service_name(service: str) -> str:
    """The DNS name that stands for a service in certificates."""
    return f"{service}.{DOMAIN}"


def services_of(dns_names: Sequence[str]) -> frozenset[str]:
    """The services among the DNS names of a certificate."""
    suffix = f".{DOMAIN}"
    return frozenset(name.removesuffix(suffix) for name in dns_names if name.endswith(suffix))


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of the PEM files of one identity."""

    cert: Path
    """Certificate, followed by intermediate ones if any."""
    key: Path
    ca: Path
    """Certificates of the authorities whose peers are trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Content of the files at one moment, checked to fit together."""

    cert: bytes
    key: bytes
    ca: bytes
    services: frozenset[str]
    """Services that the certificate names."""
    expires: datetime.datetime


class Identity:
    """The certificate of this process, re-read when its files change. Thread-safe.

    New connections use the files as read last; open connections continue. While the files do not
    fit together, as in the middle of a rotation, the previous ones stay in use.
    """

    def __init__(self, files: TlsFiles, service: str | None = None) -> None:
        """Reads the files. `service` is the one that the certificate must name; None: any.

        Raises:
            ConfigError: The files cannot be used; the message does not quote them.
        """
        self._files = files
        self._service = service
        self._lock = threading.Lock()
        self._next_look_s = 0.0
        self._signature = self._look()
        self._material = read_material(files, service)
        self._note()

    def current(self) -> Material:
        """The current content of the files, at most a second old."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_look_s:
                self._next_look_s = now + _LOOK_EVERY_S
                self._reread()
            return self._material

    def server_credentials(self, requires_client: bool) -> grpc.ServerCredentials:
        """Credentials of a server; every handshake uses the current certificate. With
        `requires_client`, callers without a trusted certificate are refused; otherwise callers are
        not asked for one.
        """

        def fetch() -> grpc.ServerCertificateConfiguration:
            material = self.current()
            return grpc.ssl_server_certificate_configuration(
                [(material.key, material.cert)], material.ca
            )

        return grpc.dynamic_ssl_server_credentials(
            fetch(), fetch, require_client_authentication=requires_client
        )

    def client_context(self) -> ssl.SSLContext:
        """TLS context for HTTPS to services of the mesh; host names are checked."""
        return ssl.create_default_context(cadata=self.current().ca.decode("ascii"))

    def _reread(self) -> None:
        signature = self._look()
        if signature == self._signature:
            return
        try:
            self._material = read_material(self._files, self._service)
        except ConfigError as error:
            _log.warning("the certificate is not re-read yet: %s", error.message)
            return
        self._signature = signature
        _log.info("certificate re-read", extra={"certificate": str(self._files.cert)})
        self._note()

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        """Changes when a file is written or replaced, also through a link."""
        found = []
        for path in (self._files.cert, self._files.key, self._files.ca):
            try:
                stat = path.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return tuple(found)

    def _note(self) -> None:
        left = self._material.expires - datetime.datetime.now(datetime.UTC)
        if left < _WARN_BEFORE:
            _log.warning(
                "the certificate %s ends at %s; renew it",
                self._files.cert,
                self._material.expires.isoformat(timespec="seconds"),
            )


def load_identity(settings: ServiceSettings, service: str = "") -> Identity | None:
    """Loads the identity given by a service's settings, its own unless `service` is given; None if
    it runs without TLS.

    Raises:
        ConfigError: The files cannot be used, or name another service.
    """
    if settings.tls_cert is None or settings.tls_key is None or settings.tls_ca is None:
        return None
    files = TlsFiles(cert=settings.tls_cert, key=settings.tls_key, ca=settings.tls_ca)
    return Identity(files, service or settings.program)


def read_material(files: TlsFiles, service: str | None) -> Material:
    """Reads and checks the files of an identity.

    Raises:
        ConfigError: A file cannot be read or parsed, the key does not match the certificate, no
            authority of the CA file signed it, it has expired, or it does not name `service`.
    """
    cert, key, ca = (
        _read(path, flag)
        for path, flag in (
            (files.cert, "--tls-cert"),
            (files.key, "--tls-key"),
            (files.ca, "--tls-ca"),
        )
    )
    leaf, *chain = _certificates(cert, f"--tls-cert {files.cert}")
    authorities = _certificates(ca, f"--tls-ca {files.ca}")
    try:
        public = load_pem_private_key(key, password=None).public_key()
    except (ValueError, TypeError):
        raise ConfigError(f"--tls-key {files.key}: no unencrypted PEM key") from None
    if public != leaf.public_key():
        raise ConfigError(f"--tls-key {files.key} is not the key of --tls-cert {files.cert}")
    if not any(_signed(child, a) for child in (leaf, *chain) for a in authorities):
        raise ConfigError(
            f"--tls-cert {files.cert} was not issued by an authority in --tls-ca {files.ca}"
        )
    expires = leaf.not_valid_after_utc
    if expires <= datetime.datetime.now(datetime.UTC):
        moment = expires.isoformat(timespec="seconds")
        raise ConfigError(f"--tls-cert {files.cert} ended at {moment}; renew it")
    services = services_of(_dns_names(leaf))
    if service is not None and service not in services:
        named = ", ".join(sorted(services)) or "no service"
        raise ConfigError(
            f"--tls-cert {files.cert} names {named}; {service} needs a certificate with the DNS "
            f"name {service_name(service)}"
        )
    return Material(cert=cert, key=key, ca=ca, services=services, expires=expires)


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error


def _certificates(pem: bytes, where: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(f"{where}: no PEM certificate") from None


def _signed(child: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        child.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return names.value.get_values_for_type(x509.DNSName)
