"""Notices of Kubernetes: the conditions of this pod and the taints of its node, where the pod may read them.

What a pod finds in itself is as in "Accessing the Kubernetes API from a Pod". Its name is in POD_NAME, else its host's
is taken, which in an Indexed Job is another one ("Job with Pod-to-Pod Communication"). Without a rule that lets its
service account `get` pods (and nodes) it hears of its end by SIGTERM alone, as without this source.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastic_train.notices.metadata import ask, refuse
from elastic_train.notices.notice import NoticeUnreadable, from_node, from_pod, json_object
from elastic_train.preemption import PreemptionNotice

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FORBIDDEN = 403
NOT_FOUND = 404


class KubernetesSource:
    """The API server, as the pod's own service account.

    Args:
        tell: says what it may not look at, once.
    """

    name = "kubernetes"
    poll_seconds = 5.0

    def __init__(
        self,
        tell: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
        account: Path = ACCOUNT,
        *,
        has_tls: bool = True,
    ) -> None:
        self._tell, self._environ, self._account, self._has_tls = tell, environ, account, has_tls
        self._given: set[str] = set()
        self._told: set[str] = set()

    def look(self) -> PreemptionNotice | None:
        pod_name = self._environ.get("POD_NAME") or self._environ.get("HOSTNAME", "")
        namespace = quote(self._read("namespace"), safe="")
        pod = self._get("pods", f"/api/v1/namespaces/{namespace}/pods/{quote(pod_name, safe='')}")
        try:
            disrupted = from_pod(pod or {})
            if disrupted is not None:  # no other answer, nor a failure, could say more
                return disrupted
            node_name = (pod or {}).get("spec", {}).get("nodeName") or self._environ.get("NODE_NAME")
            node = self._get("nodes", f"/api/v1/nodes/{quote(node_name, safe='')}") if node_name else None
            return from_node(node or {})
        except (AttributeError, TypeError) as error:
            raise NoticeUnreadable(f"no pod, or no node, of Kubernetes: {error}") from error

    def _get(self, kind: str, path: str) -> dict[str, Any] | None:
        """None where this pod has never been let look. It asks again: a server whose authorizer has just begun, or is
        cut off from what it asks, forbids all."""
        address, tls = self._server()
        answer = ask(address, path, {"Authorization": f"Bearer {self._read('token')}"}, tls=tls)
        if answer.status == FORBIDDEN and kind not in self._given:
            if kind not in self._told:
                self._told.add(kind)
                self._tell(f"--notices kubernetes: the pod's service account may not get {kind}; it goes on asking")
            return None
        if answer.status == NOT_FOUND and kind == "pods" and not self._environ.get("POD_NAME"):
            raise NoticeUnreadable(
                f"{refuse(answer, address, path)}: in an Indexed Job a pod is not named as its host; give "
                "its container POD_NAME (fieldRef: metadata.name)"
            )
        if answer.status != 200:  # nor is a notice withdrawn because it may not look any more
            raise refuse(answer, address, path)
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
        """Anew each time: tokens are replaced."""
        try:
            return (self._account / name).read_text().strip()
        except OSError as error:
            raise NoticeUnreadable(f"{self._account / name}: {error.strerror}") from error
