"""`elastic-train certs`: a certificate authority for one etcd cluster, and certificates for its servers and clients.

Elliptic curve keys (P-256), as etcd's own documentation uses; a server's certificate serves between members too. The
authority's key signs further certificates later, and belongs on no node.
"""

from __future__ import annotations

import datetime
import importlib.util
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.errors import UsageError, first_line

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_YEARS = 10
MAX_DAYS = 365 * AUTHORITY_YEARS


@dataclass(frozen=True)
class CertificateFiles:
    """Where everything lies: certificates are public, keys readable by their owner alone."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca.key"

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"


def make_certificates(
    folder: Path, hosts: Sequence[str], *, client: str = "client", days: int = 365, renew: bool = False
) -> CertificateFiles:
    """An authority (the one that is there, or a new one), `server` for all of `hosts`, and one for a client.

    Args:
        hosts: names and IP addresses under which the servers are reached; clients compare them. Empty: only a client's
            certificate, by the authority that is there.
        client: its common name, which etcd takes for the user name; also that of its files.
        renew: replace certificates that are there; the authority stays, so that nobody else has to be told.

    Raises:
        UsageError: `cryptography` is not installed, an argument cannot work, there are certificates already, the
            authority or its key is missing, or the folder cannot be read or written.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError("certificates need cryptography: pip install 'elastic_train[certs]'")
    if client in ("ca", "server") or not client.replace("-", "").replace("_", "").isalnum():
        raise UsageError(f"--client {client}: letters, digits, - and _, and neither ca nor server")
    if not 0 < days <= MAX_DAYS:
        raise UsageError(f"--days {days}: 1 to {MAX_DAYS}, as long as the authority lasts")
    names = [general_name(host) for host in hosts]
    files = CertificateFiles(folder)
    wanted = ["server", client] if hosts else [client]
    try:
        standing = [files.certificate(name) for name in wanted if files.certificate(name).exists()]
        if standing and not renew:
            hint = "; without --hosts only the client's is made" if standing == [files.certificate("server")] else ""
            raise UsageError(f"{standing[0]} exists; --renew replaces it, signed by the same authority{hint}")
        if renew and not hosts and not standing:
            raise UsageError(f"there is no {files.certificate(client)} to renew; the servers' needs their --hosts")
        if files.ca.exists() != files.ca_key.exists():
            raise UsageError(f"{folder} holds only one of ca.pem and ca.key: a new authority needs an empty folder")
        if not hosts and not files.ca.exists():
            raise UsageError(f"{folder} has no authority yet: --hosts, the servers' names and addresses, makes one")
        folder.mkdir(parents=True, exist_ok=True)
        authority, authority_key = read_authority(files) if files.ca.exists() else make_authority(files)
        if hosts:
            issue(files, "server", hosts[0], names, authority, authority_key, days)
        issue(files, client, client, [], authority, authority_key, days)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: {error.strerror}") from error
    return files


def general_name(host: str) -> x509.GeneralName:
    """Raises: UsageError where it is neither an address nor a name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", host) is None or ".." in host:
        raise UsageError(f"--hosts: {host!r} is no host name or address (without scheme and port)")
    return x509.DNSName(host)


def read_authority(files: CertificateFiles) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(files.ca_key.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(files.ca.read_bytes())
    except (TypeError, ValueError) as error:  # TypeError: with a password
        raise UsageError(f"{files.ca} and {files.ca_key} are not ours: {first_line(error)}") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UsageError(f"{files.ca_key} is no elliptic curve key, so not one of ours")
    return certificate, key


def make_authority(files: CertificateFiles) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = common_name("elastic_train authority")
    builder = begin(name, name, key.public_key(), MAX_DAYS)
    usage = key_usage(digital_signature=False, signs=True)
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return write(files, "ca", certificate, key, key), key


def issue(
    files: CertificateFiles,
    name: str,
    subject: str,
    hosts: list[x509.GeneralName],
    authority: x509.Certificate,
    authority_key: EllipticCurvePrivateKey,
    days: int,
) -> None:
    """A certificate and its key; with `hosts` for a server, which is a client of its fellow members too."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = (
        begin(common_name(subject), authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(digital_signature=True, signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    write(files, name, builder, key, authority_key)


def begin(subject: x509.Name, issuer: x509.Name, public_key: object, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)  # type: ignore[arg-type]  # of our own making
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # a node's clock may be a little behind
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def common_name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # X.520's longest


def key_usage(*, digital_signature: bool, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def write(
    files: CertificateFiles,
    name: str,
    builder: x509.CertificateBuilder,
    key: EllipticCurvePrivateKey,
    signing_key: EllipticCurvePrivateKey,
) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes, serialization

    certificate = builder.sign(signing_key, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = files.key(name)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    files.certificate(name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate
