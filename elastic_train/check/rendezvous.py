"""The store that the workers of a job meet at, looked at from one node: does it answer, and may this user write."""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from elastic_train.errors import StoreRefused, StoreUnreachable, UsageError
from elastic_train.etcd_settings import EtcdSettings
from elastic_train.store import greet
from elastic_train.torchrun import split_endpoint

CONNECT_SECONDS = 3.0
CALL_SECONDS = 8.0
EXPIRY_DAYS = 14


@dataclass(frozen=True)
class RendezvousFacts:
    errors: tuple[str, ...] = ()
    is_usable: bool = True
    """whether the errors leave enough of it to meet at"""
    notes: tuple[str, ...] = ()
    expiries: tuple[str, ...] = ()
    """of certificates that expire soon"""


def look_at_endpoint(endpoint: str) -> RendezvousFacts:
    """A c10d endpoint before the job: its name must resolve; whether somebody listens there already, is told."""
    try:
        host, port = split_endpoint(endpoint)
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except (ValueError, OSError) as error:
        return RendezvousFacts((f"{endpoint} does not resolve: {error}",), is_usable=False)
    where = f"{host}:{port} ({address[0]})"
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return RendezvousFacts(notes=(f"{where} answers; nobody listens there yet, as before the first node starts",))
    except OSError as error:
        return RendezvousFacts((f"{where} does not answer: {error}",), is_usable=False)
    try:
        greet(host, port, timedelta(seconds=CONNECT_SECONDS))
    except StoreUnreachable:
        return RendezvousFacts((f"what listens at {where} is no rendezvous store",), is_usable=False)
    return RendezvousFacts(notes=(f"{where} answers as a rendezvous store",))


def look_at_etcd(settings: EtcdSettings, run_id: str) -> RendezvousFacts:
    """Each member by itself, then a write where the job will. Blocks some seconds where a member does not answer."""
    from elastic_train.etcd import Connections, Etcd  # and with it gRPC

    errors: list[str] = []
    expiries: list[str] = []
    if settings.cert is not None:
        expiries += expiry_told(f"the client certificate {settings.cert}", days_of(settings.cert))
    num_silent = 0
    key = f"{settings.prefix}/{run_id}/{secrets.token_hex(6)}"
    for endpoint in settings.endpoints:
        if settings.ca is not None:
            problem, days = certificate_of(endpoint, settings)
            if problem is not None:
                errors.append(f"etcd at {endpoint}: {problem}")
                num_silent += 1
                continue
            expiries += expiry_told(f"the certificate of etcd at {endpoint}", days)
        connections = Connections(replace(settings, endpoints=(endpoint,)))
        try:
            Etcd(connections, deadline=CONNECT_SECONDS).get(key)
        except StoreUnreachable as error:
            errors.append(f"etcd at {endpoint}: {error}")
            num_silent += 1
        except StoreRefused:
            break  # for all of them, and told below
        finally:
            connections.close()
    if num_silent == len(settings.endpoints):
        return RendezvousFacts(tuple(errors), is_usable=False, expiries=tuple(expiries))
    connections = Connections(settings)
    try:
        etcd = Etcd(connections, deadline=CALL_SECONDS)
        write_once(etcd, key)
    except (StoreUnreachable, StoreRefused, UsageError) as error:
        return RendezvousFacts((*errors, str(error)), is_usable=False, expiries=tuple(expiries))
    finally:
        connections.close()
    who = "anybody" if settings.user is None and settings.cert is None else settings.user or "the client certificate"
    how = "TLS" if settings.ca is not None else "plain text"
    where = f"{settings.prefix}/{run_id}"
    note = f"etcd with {len(settings.endpoints)} members over {how}; {who} may write below {where}"
    return RendezvousFacts(tuple(errors), notes=(note,), expiries=tuple(expiries))


def write_once(etcd: object, key: str) -> None:
    from elastic_train.etcd import Etcd, Transaction

    assert isinstance(etcd, Etcd)
    lease = etcd.grant(60)  # so that nothing stays, whatever happens to this process
    try:
        etcd.transact(Transaction([], [etcd.put_request(key, b"check", lease)], []))
    finally:
        etcd.revoke(lease)


def certificate_of(endpoint: str, settings: EtcdSettings) -> tuple[str | None, float | None]:
    """(what is wrong with the TLS of a member, days until its certificate expires)."""
    host, port = split_endpoint(endpoint)
    context = ssl.create_default_context(cafile=settings.ca)
    try:
        if settings.cert is not None and settings.key is not None:
            context.load_cert_chain(settings.cert, settings.key)
        with (
            socket.create_connection((host, port), CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            certificate = connection.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted: {error.verify_message}", None
    except ssl.SSLError as error:
        return f"no TLS: {error.reason or error}", None
    except OSError as error:
        return f"it does not answer: {error}", None
    expiry = certificate.get("notAfter")
    return None, (ssl.cert_time_to_seconds(str(expiry)) - time.time()) / 86400 if expiry else None


def days_of(path: str) -> float | None:
    """Until a certificate in a file expires; None where the `certs` extra is not there to tell."""
    try:
        from cryptography import x509
    except ImportError:
        return None
    try:
        certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
    except (OSError, ValueError):  # told by the connection that is made with it
        return None
    return (certificate.not_valid_after_utc.timestamp() - time.time()) / 86400


def expiry_told(what: str, days: float | None) -> list[str]:
    if days is None or days >= EXPIRY_DAYS:
        return []
    return [f"{what} expires in {days:.0f} days" if days > 0 else f"{what} has expired"]
