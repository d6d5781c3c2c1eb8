"""The meaning of a failed call to etcd: which errors are transient, and which are not."""

from __future__ import annotations

import re
from typing import Any

from elastic_train.errors import StoreRefused
from elastic_train.rendezvous.etcd_settings import EtcdSettings

TOO_LARGE = "start each member of etcd with a larger --max-request-bytes (1.5 MiB by default), or use fewer workers"
WRONG_PASSWORD = "invalid user ID or password"
REMEDIES = {
    WRONG_PASSWORD: "correct user= and the first line of password_file= in --rdzv-conf",
    "user name is empty": "give user= and password_file= in --rdzv-conf, or cert= and key= of the user's certificate",
    "authentication is not enabled": "leave user= out of --rdzv-conf: this etcd knows no users yet",
    "request is too large": TOO_LARGE,
}
"""advice, by words of etcd's message"""


class LeaseLost(Exception):
    """The lease for a key has run out, or was revoked."""


class LeaseExists(Exception):
    """The lease to grant exists already."""


class Transient(Exception):
    """An attempt failed; another one may succeed."""

    endpoint = ""
    """of the failed attempt; empty if it reached none"""


class TokenRefused(Transient):
    """The client's token has expired, or is older than a change of the users."""


class TlsRefused(Transient):
    """A member and this client do not accept each other's certificates; other members may be in order."""

    def __init__(self, endpoint: str, what: str, do: str, *, may_heal: bool = False) -> None:
        super().__init__(f"{endpoint}: {what}")
        self.what, self.do = what, do
        self.may_heal = may_heal
        """whether waiting may help: a clock may be set meanwhile"""


def judge_tls(text: str, endpoint: str, settings: EtcdSettings) -> TlsRefused | None:
    """Return the error if gRPC's text means that one side refuses the other's certificate, else None."""
    if "Hostname Verification Check failed" in text:
        return TlsRefused(
            endpoint,
            f"its certificate is not for {endpoint.rpartition(':')[0]}",
            "name it in --rdzv-endpoint as its certificate does, or make one for this name too (deploy/etcd)",
        )
    if found := re.search(r"CERTIFICATE_VERIFY_FAILED(?:: ([^:]+))?", text):
        why = found[1] or "its check has failed"
        if "expired" in why or "not yet valid" in why:
            do = "renew it (deploy/etcd has how), or set this machine's clock"
            return TlsRefused(endpoint, f"its certificate is not accepted: {why}", do, may_heal=True)
        return TlsRefused(
            endpoint,
            f"its certificate is not signed by ca={settings.ca} ({why})",
            "give ca= in --rdzv-conf the certificate of the authority that has signed etcd's",
        )
    if re.search(r"ALERT_(\w+_)?CERTIFICATE|ALERT_UNKNOWN_CA", text):
        if settings.cert is None:
            return TlsRefused(
                endpoint, "it asks for a client certificate", "give cert=FILE and key=FILE in --rdzv-conf"
            )
        return TlsRefused(
            endpoint,
            f"it does not accept the client certificate cert={settings.cert}",
            "give one in --rdzv-conf that has not expired, signed by the authority that etcd trusts (its "
            "--trusted-ca-file)",
        )
    return None


def judge(error: Any, *, has_answered: bool = False, has_written: bool = False) -> Exception:
    """Translate a gRPC error: to StoreRefused if it is permanent, else to one of the errors above.

    Args:
        has_answered: whether etcd has ever answered a call. Then the password was good, and the new one may not be in
            its file yet.
        has_written: whether etcd has ever answered a write. Then training can wait until a full database has room. At
            a start, where reads may still succeed, nothing waits.
    """
    import grpc

    code, text = error.code(), (error.details() or "").strip()
    codes = grpc.StatusCode
    if code == codes.UNAUTHENTICATED or "revision of auth store is old" in text:
        return TokenRefused(text)
    if code == codes.NOT_FOUND and "lease not found" in text:
        return LeaseLost(text)
    if code == codes.FAILED_PRECONDITION and "lease already exists" in text:
        return LeaseExists(text)
    if code == codes.RESOURCE_EXHAUSTED and "received message larger than max" in text:
        return StoreRefused(text, TOO_LARGE)  # gRPC's own limit, half a MiB above etcd's
    if code == codes.RESOURCE_EXHAUSTED and "too many requests" not in text:
        what, do = f"it refuses to write: {text}", "a full database must be compacted and defragmented"
        return Transient(f"{what}; {do}") if has_written else StoreRefused(what, do)
    if code == codes.PERMISSION_DENIED:
        return StoreRefused(
            f"{text}: the user's role does not allow this key prefix",
            "give the prefix= (--rdzv-conf) and the --rdzv-id that the role has, or grant it PREFIX/RUN_ID/",
        )
    if has_answered and WRONG_PASSWORD in text:
        return Transient(f"the password has changed: {text}")
    if code in (codes.INVALID_ARGUMENT, codes.FAILED_PRECONDITION, codes.UNIMPLEMENTED):
        return StoreRefused(text, next((do for words, do in REMEDIES.items() if words in text), ""))
    return Transient(text.splitlines()[0][:200] if text else str(code.name).lower().replace("_", " "))
