"""The rendezvous of a job, as one node finds it: does it answer, and may this user write."""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from elastic_train.errors import StoreRefused, StoreUnreachable
from elastic_train.protocol.addresses import split_endpoint
from elastic_train.protocol.signposts import HOLDER, LOOK_SECONDS, STRANGER_SECONDS, Stranger, reach_sign
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.tools.check.facts import Problem, RendezvousFacts
from elastic_train.wording import count
from elastic_train.world import Address

CONNECT_SECONDS = 3.0
CALL_SECONDS = 8.0
CHECK_ADDRESS = "check the address, the firewall, and whether it has started"
SEE_PAGE = "deploy/etcd/README.md has TLS, users and roles"


def look_at_endpoints(endpoints: Sequence[str], run_id: str) -> RendezvousFacts:
    """Check the endpoints of c10d before the job. Some of several may be missing: any one leads to a running job.

    Args:
        run_id: run id of the job.
    """
    found = [look_at_endpoint(endpoint, run_id) for endpoint in endpoints]
    return RendezvousFacts(
        tuple(problem for one in found for problem in one.problems),
        is_usable=any(one.is_usable for one in found),
        notes=tuple(note for one in found for note in one.notes),
        is_running=any(one.is_running for one in found),
    )


def look_at_endpoint(endpoint: str, run_id: str) -> RendezvousFacts:
    """Check one endpoint: its name must resolve. Report whether a program listens there already."""
    try:
        host, port = split_endpoint(endpoint)
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except (ValueError, OSError) as error:
        return unusable(f"{endpoint} does not resolve: {error}", "check the name, and this machine's name server")
    where = f"{host}:{port} ({address[0]})"
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return RendezvousFacts(notes=(f"{where} answers; nobody listens there yet, as before the first node starts",))
    except OSError as error:
        return unusable(f"{where} does not answer: {error}", CHECK_ADDRESS)
    holder = _holder_of((host, port))
    if holder is None:
        return unusable(
            f"what listens at {where} is no rendezvous of elastic_train",
            "another program has that port: choose another --rdzv-endpoint",
        )
    return RendezvousFacts(notes=(f"{where} answers as a rendezvous",), is_running=holder == run_id)


def _holder_of(address: Address) -> str | None:
    """The run id of the job of ours that answers at an address; None if there is none. Blocks for STRANGER_SECONDS if
    another program answers: a node that has just begun to serve names its run a moment later."""
    deadline = time.monotonic() + STRANGER_SECONDS
    while True:
        try:
            return reach_sign(address).get(HOLDER)
        except Stranger:
            if time.monotonic() >= deadline:
                return None
            time.sleep(LOOK_SECONDS)
        except StoreUnreachable:
            return None


def look_at_etcd(settings: EtcdSettings, run_id: str) -> RendezvousFacts:
    """Check each member by itself, then write where the job will. Blocks some seconds if a member does not answer."""
    key = f"{settings.prefix}/{run_id}/{secrets.token_hex(6)}"
    met: dict[Problem, list[str]] = {}
    """problem -> the members that have it"""
    for endpoint in settings.endpoints:
        try:
            with closing(Connections(replace(settings, endpoints=(endpoint,)))) as connections:
                Etcd(connections, deadline=CONNECT_SECONDS).get(key)
        except StoreUnreachable as error:
            met.setdefault(why_silent(endpoint, settings, error), []).append(endpoint)
        except StoreRefused as error:
            problem = Problem(error.what.removeprefix(f"etcd at {endpoint}: "), error.do or SEE_PAGE)
            met.setdefault(problem, []).append(endpoint)
    problems = tuple(replace(problem, what=f"etcd at {', '.join(at)}: {problem.what}") for problem, at in met.items())
    if sum(map(len, met.values())) == len(settings.endpoints):
        return RendezvousFacts(problems, is_usable=False)
    try:
        with closing(Connections(settings)) as connections:
            etcd = Etcd(connections, deadline=CALL_SECONDS)
            lease = etcd.grant(60)  # removes the key even if this process dies
            try:
                etcd.transact((), [etcd.put_request(key, b"check", lease)])
            finally:
                etcd.revoke(lease)
    except (StoreUnreachable, StoreRefused) as error:
        do = error.do if isinstance(error, StoreRefused) else "see that a majority of its members run, and their logs"
        what = error.what if isinstance(error, StoreRefused) else str(error)
        return RendezvousFacts((*problems, Problem(what, do or SEE_PAGE)), is_usable=False)
    who = "anybody" if settings.user is None and settings.cert is None else settings.user or "the client certificate"
    how = "TLS" if settings.ca is not None else "plain text"
    where = f"{settings.prefix}/{run_id}"
    note = f"etcd with {count(len(settings.endpoints), 'member')} over {how}; {who} may write below {where}"
    return RendezvousFacts(problems, notes=(note,))


def unusable(what: str, do: str) -> RendezvousFacts:
    return RendezvousFacts((Problem(what, do),), is_usable=False)


def why_silent(endpoint: str, settings: EtcdSettings, error: StoreUnreachable) -> Problem:
    """Find out why a member gave no answer: to gRPC, TLS at only one end looks like a lost connection.

    Blocks for some seconds at most.
    """
    try:
        with socket.create_connection(split_endpoint(endpoint), CONNECT_SECONDS) as connection:
            has_tls = speaks_tls(connection)  # None: it does not answer
    except OSError as refused:
        return Problem(f"it does not answer: {refused.strerror or refused}", CHECK_ADDRESS)
    if has_tls is True and settings.ca is None:
        return Problem(
            "it speaks TLS, and no ca= is given",
            "give ca=FILE in --rdzv-conf, the certificate of its authority; cert= and key= too where it asks for them",
        )
    if has_tls is False and settings.ca is not None:
        return Problem(
            "it does not speak TLS, and ca= is given",
            "leave ca=, cert= and key= out of --rdzv-conf, or start it with --cert-file and --key-file",
        )
    why = error.__cause__ or error
    return Problem(f"it takes connections and does not answer: {why}", "see its log, and how busy its machine is")


def speaks_tls(connection: socket.socket) -> bool | None:
    """Return whether a TLS server answers, whatever its certificate and ours are worth. None: no answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(connection).close()
    except TimeoutError:
        return None
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # the server asks for a client certificate
    except OSError:  # an etcd without TLS closes the connection
        return False
    return True
