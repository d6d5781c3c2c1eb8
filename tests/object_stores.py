"""Object stores for tests: moto's S3 server, which is a fake and checks no credentials, and a proxy that misbehaves.

With ELASTIC_TRAIN_TEST_S3=swift the server is OpenStack Swift, a real one (tests/swift_server.py).
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.swift_server import swift_server

BUCKET = "bucket"
IS_SWIFT = os.environ.get("ELASTIC_TRAIN_TEST_S3") == "swift"
ACCESS_KEY, SECRET_KEY = "testing:tester", "secret/of/the/tests/1234567890"


def environment(endpoint: str) -> dict[str, str]:
    """By which s3fs finds a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def s3_server(address: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The endpoint of a server of this process with an empty bucket."""
    from botocore.session import get_session

    with swift_server(address, port, ACCESS_KEY, SECRET_KEY) if IS_SWIFT else moto_server(address, port) as endpoint:
        client = get_session().create_client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):  # moto's memory is the process's
            client.create_bucket(Bucket=BUCKET)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for entry in page.get("Contents", ()):
                client.delete_object(Bucket=BUCKET, Key=entry["Key"])
        yield endpoint


@contextlib.contextmanager
def moto_server(address: str, port: int) -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=address, port=port, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextlib.contextmanager
def s3_server_in(prefix: Sequence[str], address: str, port: int = 5000) -> Iterator[str]:
    """The same in a process that `prefix` runs somewhere else, e.g. in a network namespace."""
    command = [*prefix, sys.executable, "-m", "tests.object_stores", address, str(port)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            assert endpoint, "it has ended"
            yield endpoint
        finally:
            process.kill()


Fault = Callable[["Request"], bool]
"""answers a request in the place of the server, or says False"""


class Request(BaseHTTPRequestHandler):
    """One request to the proxy."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_request(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        fault = self.server.fault
        if fault is not None and fault(self):
            return
        self.forward()

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = handle_request

    @property
    def is_part(self) -> bool:
        return self.command == "PUT" and "/state.pt." in self.path

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def forward(self) -> None:
        connection = http.client.HTTPConnection(self.server.behind, timeout=30.0)
        connection.request(self.command, self.path, self.body(), dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    def answer(self, status: int, code: str, message: str = "no") -> bool:
        self.body()
        data = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return True

    def cut(self) -> bool:
        """End the connection in the middle of what is sent."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
        self.close_connection = True
        self.connection.shutdown(2)
        return True

    def hang(self) -> bool:
        """Answer nothing, until the client goes or the test is over."""
        self.body()
        self.server.is_over.wait(30.0)
        self.close_connection = True
        return True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Proxy(ThreadingHTTPServer):
    """Hands requests on to the server behind it, and lets a fault answer in its place."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.behind = behind.removeprefix("http://")
        self.fault: Fault | None = None
        self.requests: list[str] = []
        self.is_over = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def proxy_to(endpoint: str) -> Iterator[Proxy]:
    with Proxy(endpoint) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.is_over.set()
            proxy.shutdown()
            thread.join(10.0)


def first(count: int, fault: Fault) -> Fault:
    """The fault for so many requests that it is for, and then no more."""
    left = [count]

    def some(request: Request) -> bool:
        if left[0] == 0:
            return False
        left[0] -= 1
        is_answered = fault(request)
        left[0] += not is_answered
        return is_answered

    return some


if __name__ == "__main__":
    with s3_server(sys.argv[1], int(sys.argv[2])) as its_endpoint:
        print(its_endpoint, flush=True)
        sys.stdin.read()  # until who started it ends
