"""Address and credentials of an etcd cluster, from torchrun's options and the environment, checked once.

Imports nothing heavy: every agent of an etcd job loads it, and passes the settings to its workers in one variable.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import UsageError, first_line
from elastic_train.protocol.addresses import MAX_PORT

DEFAULT_PORT = 2379
SETTINGS_VARIABLE = "ELASTIC_TRAIN_ETCD"
"""environment variable by which an agent passes the settings to its workers; without a password"""
USER_VARIABLE = "ELASTIC_TRAIN_ETCD_USER"
PASSWORD_VARIABLE = "ELASTIC_TRAIN_ETCD_PASSWORD"
PASSWORD_FILE_VARIABLE = "ELASTIC_TRAIN_ETCD_PASSWORD_FILE"
TEXT_KEYS = ("ca", "cert", "key", "user", "password_file", "prefix")
CONF_KEYS = (*TEXT_KEYS, "grace", "last_call")
"""keys of --rdzv-conf that are read here; last_call also under torchrun's own name, last_call_timeout"""
OTHER_KEYS = (
    "membership", "lease", "join_timeout", "read_timeout", "last_call_timeout",
    # of torchrun's other rendezvous, or set by torchrun itself; without effect here
    "timeout", "rank", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt",
    "cas_backoff_max_seconds", "is_host", "store_type",
)  # fmt: skip
"""keys that handler.py and etcd_handler.py read"""
LAST_CALL_SECONDS = 2.0
"""how long a first world below --nnodes' maximum waits for more nodes; the default of last_call_timeout"""


@dataclass(frozen=True)
class EtcdSettings:
    """One etcd cluster, one user, one key prefix."""

    endpoints: tuple[str, ...]
    """HOST:PORT of etcd's members; any of them may be down"""
    prefix: str = "/elastic_train"
    """of every key; etcd's role permissions can separate the jobs of teams by it"""
    ca: str | None = None
    """file of the certificate authority; switches TLS on"""
    cert: str | None = None
    key: str | None = None
    """client certificate and its key, for mutual TLS"""
    user: str | None = None
    password_file: str | None = None
    """file whose first line is the password; without it, the password is in ELASTIC_TRAIN_ETCD_PASSWORD"""
    grace: float = 60.0
    """seconds without etcd that `agents`, or a node that is in no world, survive; also seconds after which members are
    ignored that neither etcd nor a newcomer hears"""
    last_call: float = LAST_CALL_SECONDS
    """seconds that a first world below max_nodes waits for more nodes"""
    min_nodes: int = 1
    max_nodes: int = 1

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise UsageError("--rdzv-backend=etcd3 needs --rdzv-endpoint=HOST:PORT[,HOST:PORT...]")
        if (self.cert is None) != (self.key is None):
            raise UsageError("etcd: a client certificate needs both cert= and key= in --rdzv-conf")
        if self.cert is not None and self.ca is None:
            # The etcd3 client would use plaintext without a warning.
            raise UsageError("etcd: cert= and key= need ca= too, the authority that signed the servers' certificates")
        for name in ("ca", "cert", "key", "password_file"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise UsageError(f"etcd: {name}={path} cannot be read")
        if not self.prefix.startswith("/") or self.prefix.endswith("/"):
            raise UsageError(f"etcd: prefix={self.prefix} must begin with a slash and not end with one")

    def password(self, environ: Mapping[str, str]) -> str | None:
        """Return the password of `user`; None without a user. Raises: UsageError: the user has no password."""
        if self.user is None:
            return None
        if self.password_file is not None:
            try:
                text = Path(self.password_file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"etcd: password_file={self.password_file}: {first_line(error)}") from error
            if not text:
                raise UsageError(f"etcd: password_file={self.password_file} is empty: its first line is the password")
            return text.splitlines()[0]
        if PASSWORD_VARIABLE not in environ:
            raise UsageError(
                f"etcd: user {self.user} needs a password, in password_file=PATH (--rdzv-conf), in "
                f"{PASSWORD_FILE_VARIABLE} or in {PASSWORD_VARIABLE}"
            )
        return environ[PASSWORD_VARIABLE]

    @staticmethod
    def from_torchrun(
        endpoint: str,
        conf: Mapping[str, object],
        environ: Mapping[str, str],
        *,
        min_nodes: int,
        max_nodes: int,
        last_call: float = LAST_CALL_SECONDS,
    ) -> EtcdSettings:
        """Read `--rdzv-endpoint`, `--rdzv-conf` and the environment; `last_call` is the default of that key.

        Raises:
            UsageError: a value is missing, malformed, or must not be on a command line.
        """
        require_known(conf)
        given = {name: str(conf[name]) for name in TEXT_KEYS if name in conf}
        for name, variable in (("user", USER_VARIABLE), ("password_file", PASSWORD_FILE_VARIABLE)):
            if name not in given and environ.get(variable):
                given[name] = environ[variable]
        last_call_key = "last_call" if "last_call" in conf else "last_call_timeout"
        endpoints, schemes = parse_endpoints(endpoint)
        if "https" in schemes and "ca" not in given:
            raise UsageError("etcd: https:// endpoints need ca=FILE in --rdzv-conf")
        if "http" in schemes and "ca" in given:
            raise UsageError("etcd: ca= switches TLS on, and an endpoint says http://")
        settings = EtcdSettings(
            endpoints,
            **given,
            grace=read_seconds(conf, "grace", EtcdSettings.grace),
            last_call=read_seconds(conf, last_call_key, last_call),
            min_nodes=min_nodes,
            max_nodes=max_nodes,
        )
        settings.password(environ)
        return settings


def read_seconds(conf: Mapping[str, object], key: str, default: float) -> float:
    """Return a value of `--rdzv-conf`. Raises: UsageError: it is not a finite number above 0."""
    text = str(conf.get(key, default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{key}={text} in --rdzv-conf: give a number of seconds above 0")
    return seconds


def require_known(conf: Mapping[str, object]) -> None:
    """Raises: UsageError: `--rdzv-conf` has an unknown key, or a password, which must not be on a command line."""
    if "password" in conf:
        raise UsageError(
            "etcd: every user of this machine can read a password on a command line: give password_file=PATH, or "
            f"{PASSWORD_VARIABLE} in the environment"
        )
    unknown = sorted(conf.keys() - {*CONF_KEYS, *OTHER_KEYS})
    if unknown:
        raise UsageError(f"etcd: --rdzv-conf knows no {', '.join(unknown)}; it knows {', '.join(CONF_KEYS)}")


def parse_endpoints(text: str) -> tuple[tuple[str, ...], set[str]]:
    """Return (HOST:PORT..., given schemes) of a comma-separated list.

    Raises:
        UsageError: a part is not [http[s]://]HOST[:PORT], or the port is out of range.
    """
    endpoints, schemes = [], set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(?:(https?)://)?(\[[0-9A-Fa-f:.%]+\]|[^\[\]:/]+)(?::(\d+))?/?", part)
        if match is None:
            raise UsageError(f"etcd: {part!r} in --rdzv-endpoint is not HOST:PORT")
        port = int(match[3] or DEFAULT_PORT)
        if not 0 < port <= MAX_PORT:
            raise UsageError(f"etcd: {part!r} in --rdzv-endpoint: a port is 1 to {MAX_PORT}")
        if match[1]:
            schemes.add(match[1])
        endpoints.append(f"{match[2]}:{port}")
    return tuple(endpoints), schemes
