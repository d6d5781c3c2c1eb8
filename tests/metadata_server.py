"""A metadata server that answers as the clouds' pages say (elastic_train/notices/notice.py names them). A fake: the
clouds themselves are out of reach. What it knows is in a file, so that a test can change it.

    python tests/metadata_server.py aws 169.254.169.254 80 KNOWN.json

for a network namespace of the test's own, and for nowhere else.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKEN = "AQAEALtHHVVd=="


class Handler(http.server.BaseHTTPRequestHandler):
    """`known` has the documents by path; `fault`, if any, is how it misbehaves."""

    server: MetadataServer
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        if self._misbehaves():
            return
        if self.server.known().get("hop limit") == 1:  # for who asks from a container: the answer is lost on its way
            self.close_connection = True
            self.server.is_over.wait(60)
            return
        is_token = self.server.cloud == "aws" and self.path == "/latest/api/token"
        has_ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
        self._say(200 if is_token and has_ttl else 400 if is_token else 404, self.server.token if is_token else "")

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self._misbehaves():
            return
        known = self.server.known()
        document = known.get(self.path.split("?")[0])
        match self.server.cloud:
            case "aws" if self.headers.get("X-aws-ec2-metadata-token") != self.server.token:
                self._say(401, "Unauthorized")
            case "gcp" if self.headers.get("Metadata-Flavor") != "Google":
                self._say(403, "Missing Metadata-Flavor:Google header.")
            case "azure" if self.headers.get("Metadata") != "true":
                self._say(400, '{"error": "Bad request"}')
            case _ if self.path == known.get("forbidden"):
                self._say(403, "Forbidden")
            case _ if document is None:
                self._say(404, "Not Found")
            case _:
                self._say(200, document if isinstance(document, str) else json.dumps(document))

    def _misbehaves(self) -> bool:
        fault = self.server.known().get("fault")
        if fault is None:
            return False
        self.close_connection = True
        match fault:
            case "hangs":
                self.server.is_over.wait(60)
            case "drips":
                while not self.server.is_over.wait(0.05):
                    self.wfile.write(b"H")
            case "500":
                self._say(500, "Internal Server Error")
            case "redirects":
                self._say(302, "", Location=f"http://127.0.0.1:{self.server.server_port}/elsewhere")
            case "lies":
                self._say(200, '{"action": ')
            case "floods":
                self._say(200, " " * 10_000_000)
        return True

    def _say(self, status: int, text: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")  # as it was asked for: most servers repeat that
        if self.server.cloud == "gcp":
            self.send_header("Metadata-Flavor", "Google")
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class MetadataServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, cloud: str, address: tuple[str, int], known: Path) -> None:
        self.cloud, self.token = cloud, TOKEN
        self._known = known
        self.asked: list[str] = []
        self.is_over = threading.Event()
        super().__init__(address, Handler)

    def known(self) -> dict[str, Any]:
        return dict(json.loads(self._known.read_text())) if self._known.exists() else {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has gone; that is no matter of the server's."""


@contextmanager
def serving(cloud: str, known: Path) -> Iterator[MetadataServer]:
    """At a free port of this machine's own address."""
    server = MetadataServer(cloud, ("127.0.0.1", 0), known)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def learn(known: Path, **documents: Any) -> None:
    """Replace what a server knows, in one moment; a name stands for its path."""
    draft = known.with_suffix(".draft")
    draft.write_text(json.dumps({PATHS.get(name, name): document for name, document in documents.items()}))
    draft.rename(known)


PATHS = {
    "action": "/latest/meta-data/spot/instance-action",
    "rebalance": "/latest/meta-data/events/recommendations/rebalance",
    "instance": "/computeMetadata/v1/instance/",
    "preempted": "/computeMetadata/v1/instance/preempted",
    "maintenance": "/computeMetadata/v1/instance/maintenance-event",
    "machine": "/metadata/instance/compute/name",
    "events": "/metadata/scheduledevents",
}


def iso_time(seconds_from_now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds_from_now))


if __name__ == "__main__":
    cloud, host, port, known = sys.argv[1:]
    server = MetadataServer(cloud, (host, int(port)), Path(known))
    Path(known).with_suffix(".ready").touch()
    server.serve_forever()
