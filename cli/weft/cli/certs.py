"""`weft certs DIR`: a certificate authority for development, and a certificate for each service.

Run it again to renew the services' certificates; services that run pick the new ones up by
themselves. The authority's key is only for this command: keep it away from the services.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from weft.cli.numbers import MAX_DAYS, whole_number
from weft.common.rpc.authorize import SERVICES
from weft.common.rpc.tls import TlsFiles, service_name
from weft.contract.errors import ConfigError

FRONT = ("gateway", "rest", "planner", "valkey")
"""Services that clients reach by the names of their hosts."""
FURTHER = ("planner", "valkey", "worker")
"""A planner, a server outside the mesh, and workers of both roles: they get a certificate only if
they are named.
"""
_STANDS_FOR = {"planner": ("cli",), "worker": ("decode", "prefill")}
"""Services that a certificate names, where they are not its own name."""
_AUTHORITY_DAYS = 3650
_BACKDATED = datetime.timedelta(minutes=5)
"""Certificates are backdated by this time, for hosts whose clocks are slow."""


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def files_of(folder: Path, service: str) -> TlsFiles:
    """Paths of the identity that `weft certs` keeps for a service."""
    return TlsFiles(
        cert=folder / f"{service}.pem",
        key=folder / f"{service}-key.pem",
        ca=folder / "ca.pem",
    )


def make_authority(folder: Path) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    name = _name("weft development authority")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=_AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder / "ca-key.pem", _pem(key), 0o600)
    _write(folder / "ca.pem", certificate.public_bytes(Encoding.PEM), 0o644)
    return Authority(certificate, key)


def read_authority(folder: Path) -> Authority:
    """Raises ConfigError if the folder's authority is damaged, or of a kind that this command does
    not make.
    """
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = load_pem_private_key((folder / "ca-key.pem").read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: its authority cannot be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / 'ca-key.pem'}: not a key that `weft certs` has made")
    return Authority(certificate, key)


def issue(
    authority: Authority,
    folder: Path,
    service: str,
    hosts: Sequence[str] = (),
    lifetime: datetime.timedelta = datetime.timedelta(days=90),
) -> None:
    """Replaces a service's key and certificate. `hosts` are DNS names and IP addresses by which
    clients reach the service.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    services = _STANDS_FOR.get(service, (service,))
    names: list[x509.GeneralName] = [x509.DNSName(service_name(one)) for one in services]
    names += [_general_name(host) for host in hosts]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(f"weft {service}"))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + lifetime) - _BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    files = files_of(folder, service)
    _write(files.key, _pem(key), 0o600)
    _write(files.cert, certificate.public_bytes(Encoding.PEM), 0o644)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    folder: Path = arguments.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not (folder / "ca.pem").exists()
        authority = make_authority(folder) if is_new else read_authority(folder)
        lifetime = datetime.timedelta(days=arguments.days)
        for service in arguments.service or SERVICES:
            hosts = ("localhost", "127.0.0.1", "::1", *arguments.host)
            issue(authority, folder, service, hosts if service in FRONT else (), lifetime)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"weft certs: {folder}: {error}\n")
        return 1
    made = ", ".join(arguments.service or SERVICES)
    authority_text = "a new authority" if is_new else "the authority that was there"
    sys.stdout.write(f"{folder}: {made}, for {arguments.days} days, signed by {authority_text}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="weft certs", description=first, epilog=rest.strip())
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if it is not there")
    parser.add_argument(
        "--service",
        action="append",
        choices=(*SERVICES, *FURTHER),
        help="only this service's certificate; may be repeated; default: all of the mesh; planner "
        "= a planner that KEDA asks; valkey = a Valkey or Redis server that keeps pages",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="further DNS name or IP address of gateway, REST edge, planner and Valkey; may be "
        "repeated",
    )
    parser.add_argument(
        "--days",
        type=whole_number(1, MAX_DAYS),
        default=90,
        help="lifetime of the certificates",
    )
    return parser


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file in one step. Others cannot read a key, not even for a moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)
