"""Notices of Kubernetes: the conditions of this pod and the taints of its node, if the pod may read them.

Token and address are found as in "Accessing the Kubernetes API from a Pod". The pod's name is in POD_NAME. Without it
the host's name is used, which differs in an Indexed Job ("Job with Pod-to-Pod Communication"). If its service account
may not `get` pods (and nodes), only SIGTERM announces the end, as without this source.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastic_train.notices.metadata import ask
from elastic_train.notices.notice import NoticeUnreadable, from_node, from_pod, json_object
from elastic_train.preemption import PreemptionNotice

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FORBIDDEN = 403
NOT_FOUND = 404


class KubernetesSource:
    """The API server, accessed with the pod's own service account.

    Args:
        log: logs, once per kind of object, that the account may not read it.
    """

    name = "kubernetes"
    poll_seconds = 5.0

    def __init__(
        self,
        log: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
        account: Path = ACCOUNT,
        *,
        has_tls: bool = True,
    ) -> None:
        self._log, self._environ, self._account, self._has_tls = log, environ, account, has_tls
        self._given: set[str] = set()
        self._warned: set[str] = set()

    def look(self) -> PreemptionNotice | None:
        pod_name = self._environ.get("POD_NAME") or self._environ.get("HOSTNAME", "")
        namespace = quote(self._read("namespace"), safe="")
        pod = self._get("pods", f"/api/v1/namespaces/{namespace}/pods/{quote(pod_name, safe='')}")
        try:
            disrupted = from_pod(pod or {})
            if disrupted is not None:  # no other answer could add to this, so a failure must not hide it
                return disrupted
            node_name = (pod or {}).get("spec", {}).get("nodeName") or self._environ.get("NODE_NAME")
            node = self._get("nodes", f"/api/v1/nodes/{quote(node_name, safe='')}") if node_name else None
            return from_node(node or {})
        except (AttributeError, TypeError) as error:
            raise NoticeUnreadable(f"no pod, or no node, of Kubernetes: {error}") from error

    def _get(self, kind: str, path: str) -> dict[str, Any] | None:
        """Get an object; None if this pod was never allowed to. Later looks ask again, because an API server whose
        authorizer is starting or disconnected forbids everything."""
        address, tls = self._server()
        answer = ask(address, path, {"Authorization": f"Bearer {self._read('token')}"}, tls=tls)
        if answer.status == FORBIDDEN and kind not in self._given:
            if kind not in self._warned:
                self._warned.add(kind)
                self._log(f"--notices kubernetes: the pod's service account may not get {kind}; it goes on asking")
            return None
        if answer.status == NOT_FOUND and kind == "pods" and not self._environ.get("POD_NAME"):
            raise NoticeUnreadable(
                f"{answer.refused()}: in an Indexed Job a pod is not named as its host; give "
                "its container POD_NAME (fieldRef: metadata.name)"
            )
        if answer.status != 200:  # also a late FORBIDDEN: losing the permission withdraws no notice
            raise answer.refused()
        self._given.add(kind)
        return json_object(answer.text)

    def _server(self) -> tuple[tuple[str, int], ssl.SSLContext | None]:
        host, port = (self._environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port.isdigit():
            raise NoticeUnreadable("KUBERNETES_SERVICE_HOST is not set: this is no pod of Kubernetes")
        if not self._has_tls:
            return (host, int(port)), None
        try:
            return (host, int(port)), ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        except OSError as error:
            raise NoticeUnreadable(f"{self._account / 'ca.crt'}: {error.strerror}") from error

    def _read(self, name: str) -> str:
        """Read a file of the service account; each time, because tokens are rotated."""
        try:
            return (self._account / name).read_text().strip()
        except OSError as error:
            raise NoticeUnreadable(f"{self._account / name}: {error.strerror}") from error
